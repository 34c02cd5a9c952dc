"""A run on text alone as a Hugging Face folder: the LLM's own class, with what was trained in its published tensors.

checkpoint, model.llm.path --language: tensor by tensor, under their own names--> model*.safetensors, config.json
tokenizer files as they are; chat_template.jinja, which writes what the run was trained on; generation_config.json
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.chat import ROLES, Turns
from mmtrain.data.samples.sample import IGNORE, Sample
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.exporting.card import write_card
from mmtrain.exporting.chat_template import TEMPLATE_FILE, documents_of, exported_chat_template
from mmtrain.exporting.hf import ExportedModel, export_hf, refuse_loading_faults, tensors_to_export, write_model
from mmtrain.exporting.language import language_for_export
from mmtrain.exporting.processor import generation_settings
from mmtrain.models.facts.connectors import image_layout
from mmtrain.models.facts.model_files import model_folder
from mmtrain.models.facts.tokenizer_files import READ_BY_TOKENIZERS
from mmtrain.models.modules.language import causal_config
from mmtrain.stock.stock_class import ExportedClass

_ASKED: Turns = (("human", "What is this?"), ("gpt", "A red circle."))
CONVERSATIONS: tuple[Turns, ...] = (_ASKED, (*_ASKED, ("human", "And that?"), ("gpt", "No\n1. é")))


class CausalClass(ExportedClass):
    """The LLM's own class: its tensors keep their names, and nothing stands before it."""

    def __init__(self, folder: Path) -> None:
        self.config_class = type(causal_config(folder))
        self.model_class = MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class]
        self.decoder_names = f"{self.model_class.base_model_prefix}."

    def language_name(self, name: str, base: str) -> str:
        return name


def export_stock(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    progress: Callable[[str, int, int], None],
    merged: bool = True,
) -> ExportedModel:
    """Export by `export_hf`, or a run on text alone by `export_causal_lm`."""
    write = export_hf if checkpoint.config.model.vision is not None else export_causal_lm
    return write(checkpoint, folder, dtype, shard_bytes, progress, merged)


def export_causal_lm(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    merged: bool = True,
) -> ExportedModel:
    """Write the LLM into `folder`, which is empty, and read it again; arguments and errors of `hf.export_hf`."""
    config = checkpoint.config
    tensors, about = tensors_to_export(checkpoint, merged)
    llm = model_folder(config.model.llm.path)
    stock, stored_as = CausalClass(llm), str(dtype).removeprefix("torch.")
    language = language_for_export(stock, llm, tensors, 0, stored_as, config.model.lora)
    content = {**language.config, "architectures": [stock.class_name]}
    refuse_loading_faults(stock, content, language.tensors)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    _write_tokenizer(config, llm, folder)
    exported = write_model(stock, folder, content, language.tensors, dtype, shard_bytes, progress)
    write_card(folder, about, "text", dtype=stored_as, language=language)
    return exported


def _write_tokenizer(config: RunConfig, llm: Path, folder: Path) -> None:
    """Tokenizer files, chat_template.jinja and generation_config.json.

    Raises UserError where stock AutoTokenizer would not write what the run was trained on.
    """
    for file in {file for pattern in READ_BY_TOKENIZERS for file in llm.glob(pattern) if file.is_file()}:
        place = folder / file.relative_to(llm)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)
    source = load_tokenizer(config.model.llm.path)
    template = make_template(config.data.template, source, image_layout(config), sys.maxsize)
    (folder / TEMPLATE_FILE).write_text(exported_chat_template(template), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for turns, document in documents_of(template, CONVERSATIONS):
        messages = [{"role": ROLES[speaker], "content": text} for speaker, text in turns]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        if list(ids) != list(document.input_ids):
            raise UserError(
                f"stock AutoTokenizer reads {turns[0][1]!r} as the tokens {ids[:40]}, and the run was trained on "
                f"{list(document.input_ids[:40])}; --format safetensors exports what was trained, without a tokenizer"
            )
    end = [label for label in template(Sample("probe", "probe", _ASKED, ())).labels if label != IGNORE][-1]
    generation = generation_settings(config.model.llm.path, tokenizer, end)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
