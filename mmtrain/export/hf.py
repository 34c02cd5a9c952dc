"""The whole model as a Hugging Face LLaVA folder, which stock transformers loads without mmtrain.

checkpoint: projector --------------------------------> multi_modal_projector.linear_{1,2}.{weight,bias}
model.vision.name --vision: exact conversion----------> vision_tower.*        and config.json, README.md,
model.llm.path    --language: tensor by tensor--------> language_model.*      the processor's files

Price: time and disk for the whole model; memory for its largest tensor. Before anything is written, transformers' own
loading is tried on shapes (`stock`), and its processor on a picture; afterwards every byte is read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.export.answer_marks import mark_answers
from mmtrain.export.card import write_card
from mmtrain.export.folder import require_space
from mmtrain.export.formats import WHAT_WORKS
from mmtrain.export.language import ExportedLanguage, language_for_export
from mmtrain.export.origin import PROJECTOR, origin, trained_tensors
from mmtrain.export.processor import ExportedProcessor, write_processor
from mmtrain.export.processor_check import check_processor
from mmtrain.export.stock import kept_in_float32, refuse_loading_faults, refuse_unfit_family
from mmtrain.export.tensors import TensorWriter, check_written, write_shards
from mmtrain.export.vision import ExportedEncoder, encoder_for_export
from mmtrain.pretrained.model_files import model_folder

SMALL_FILES = 64 << 20  # bytes that tokenizer, index and card take at most


@dataclass(frozen=True)
class ExportedModel:
    """What was written."""

    bytes: int  # of the tensors
    tensors: int
    files: int
    image_token_id: int
    added_rows: int
    kept_in_float32: frozenset[str]  # names of tensors that were not cast
    unmarked: str | None  # why the chat template does not mark answers; None where it does


def export_hf(
    checkpoint: StepFolder,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ExportedModel:
    """Write the model into `folder`, which is empty, and read it again; `progress` gets (what, bytes done, of all).

    Raises UserError for models that LlavaForConditionalGeneration cannot hold, naming the formats that work, and where
    the disk is too small; OSError for a file that does not read back as written.
    """
    config = checkpoint.config
    about = origin(checkpoint)
    if about.projector_type != "mlp2x_gelu":
        raise UserError(
            f"the stock LLaVA model's projector has two layers (mlp2x_gelu), and this one is {about.projector_type}; "
            f"{WHAT_WORKS}"
        )
    trained = trained_tensors(checkpoint)
    llm = model_folder(about.llm)
    refuse_unfit_family(llm)
    encoder = encoder_for_export(config, {name: trained[name].read() for name in trained if _part(name) == "vision"})
    processor = write_processor(config, encoder, folder)
    own = {name: trained[name] for name in trained if _part(name) == "llm"}
    language = language_for_export(llm, own, processor.rows_needed, _name(dtype))
    tensors = {f"vision_tower.{name}": source for name, source in encoder.tensors.items()}
    tensors |= {
        f"multi_modal_projector.{name.removeprefix(PROJECTOR)}": trained[name]
        for name in trained
        if _part(name) == "projector"
    }
    tensors |= language.tensors
    content = _config(encoder, language, processor, dtype)
    refuse_loading_faults(content, tensors)

    kept = kept_in_float32(content, tensors, dtype)
    total = sum(TensorWriter(dtype, kept).bytes_of(name, source) for name, source in tensors.items())
    require_space(folder, total + SMALL_FILES)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    unmarked = mark_answers(config, folder)
    processor = replace(processor, notes=(*processor.notes, *([unmarked] if unmarked else [])))
    check_processor(config, processor, folder)
    progress("written", 0, total)
    writer = TensorWriter(dtype, kept, lambda done: progress("written", done, total))
    files = write_shards(folder, tensors, writer, shard_bytes)
    size = sum(written.bytes for written in files.values())
    progress("read again", 0, size)
    check_written(folder, files, lambda done: progress("read again", done, size))
    write_card(folder, about, _name(dtype), encoder, language, processor)
    return ExportedModel(
        total, len(tensors), len(files), processor.image_token_id, language.added_rows, frozenset(kept), unmarked
    )


def _part(name: str) -> str:
    return name.partition(".")[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _config(
    encoder: ExportedEncoder, language: ExportedLanguage, processor: ExportedProcessor, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of the folder, in keys that transformers 4.57 and 5 read."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": _name(dtype),
        "image_token_index": processor.image_token_id,
        "image_seq_length": processor.image_seq_length,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": encoder.feature_layer,
        "vision_feature_select_strategy": encoder.select_strategy,
        "tie_word_embeddings": language.config["tie_word_embeddings"],
        "text_config": language.config,
        "vision_config": {**encoder.config, "dtype": _name(dtype)},
        "transformers_version": transformers.__version__,
    }
