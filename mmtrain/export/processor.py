"""The processor of an exported Hugging Face LLaVA folder: the files that stock AutoProcessor loads.

RunConfig, encoder --write_processor--> tokenizer.json, tokenizer_config.json, chat_template.jinja,
                                        processor_config.json, preprocessor_config.json, generation_config.json
messages, images --AutoProcessor--> the token ids and pixels that the run was trained on

transformers 4.57 and 5.17 to 5.23 read this layout (5 would write preprocessor_config.json into processor_config.json).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.chat import PROBE
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, Sample
from mmtrain.data.samples.templates import TEMPLATES, PlainTemplate, Template, with_image_token
from mmtrain.data.samples.text_lengths import load_tokenizer
from mmtrain.data.stream.images import image_transform
from mmtrain.export import markdown
from mmtrain.export.chat_template import exported_chat_template
from mmtrain.export.image_processor import image_processor_config, image_processor_notes
from mmtrain.pretrained.model_files import model_folder, read_json
from mmtrain.pretrained.shapes import llm_shape
from mmtrain.pretrained.vision_files import tokens_per_image

# Of an LLM's generation_config.json; all else (sampling, penalties) would make answers differ from the evaluation's.
KEPT_OF_GENERATION = ("bos_token_id", "max_length", "max_new_tokens")
UNSAID_OF_GENERATION = ("eos_token_id", "pad_token_id", "do_sample", "transformers_version", "use_cache")
PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>")  # as vocabularies name them
OF_THIS_LOADING = ("local_files_only", "is_local")  # that save_pretrained takes for settings of the tokenizer


class Encoder(Protocol):
    """What the processor must know of a vision tower: export.vision.ExportedEncoder."""

    image_size: int  # pixels a side
    patch_size: int  # pixels a side
    prefix_tokens: int  # class and register tokens
    select_strategy: str  # "default" drops the first token, "full" keeps all


@dataclass(frozen=True)
class ExportedProcessor:
    """What the weights and the card of an exported folder must say of its processor."""

    image_token_id: int
    rows_needed: int  # of the exported LLM's embedding and head
    added_row: bool  # whether those are more than the LLM has
    image_seq_length: int  # tokens that an image takes
    eos_token_ids: tuple[int, ...]  # that end an answer, the one that training writes first
    notes: tuple[str, ...]  # sentences for the model card


def write_processor(config: RunConfig, encoder: Encoder, folder: Path) -> ExportedProcessor:
    """Write the processor's files and generation_config.json into `folder`, which exists.

    Raises UserError where tokenizer, template or encoder are missing or unfit for the run itself, and for a tokenizer
    that adds special tokens which cannot be switched off.
    """
    path = config.model.llm.path
    source = load_tokenizer(path)
    template = TEMPLATES[config.data.template](source, 1, sys.maxsize)
    end = _end_of_answers(template)
    tokenizer = _tokenizer_for_prompts(source, template, end)
    image_id = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
    rows = llm_shape(path).vocab_size
    rows_needed = max(rows, image_id + 1, tokenizer.pad_token_id + 1)
    _save_tokenizer(tokenizer, folder)

    transform = image_transform(config.model.vision.name, config.data.image_fit)
    assert transform.image_size == encoder.image_size, f"{transform.image_size} pixels, encoder {encoder.image_size}"
    length = tokens_per_image(encoder.image_size, encoder.patch_size)
    dropped = 1 if encoder.select_strategy == "default" else 0
    assert encoder.prefix_tokens == dropped, f"{encoder.prefix_tokens} prefix tokens, {dropped} dropped"
    _write_json(folder / "preprocessor_config.json", image_processor_config(transform))
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_MARK,
        "patch_size": encoder.patch_size,
        "num_additional_image_tokens": encoder.prefix_tokens,
        "vision_feature_select_strategy": encoder.select_strategy,
    }
    _write_json(folder / "processor_config.json", processor)

    generation, left_out = _generation(path, tokenizer, end)
    if rows_needed > rows:  # the run's own LLM has no such rows, so it never says these tokens
        generation["suppress_tokens"] = list(range(rows, rows_needed))
    _write_json(folder / "generation_config.json", generation)
    notes = (*_template_notes(template), *_generation_notes(left_out), *image_processor_notes(transform))
    eos = tuple(generation["eos_token_id"])
    return ExportedProcessor(image_id, rows_needed, rows_needed > rows, length, eos, notes)


def _tokenizer_for_prompts(source: PreTrainedTokenizerBase, template: Template, end: int) -> PreTrainedTokenizerBase:
    """A copy that reads <image>, writes the exported template, and begins a text as training does.

    A chat template writes its own BOS, so the tokenizer must add none: stock processors would add a second one, or one
    that training did not see. The plain template's BOS is the tokenizer's.
    """
    tokenizer = with_image_token(source)
    tokenizer.chat_template = exported_chat_template(template)
    _set_padding(tokenizer, {end, tokenizer.eos_token_id})
    prefix = template.prefix if isinstance(template, PlainTemplate) else []
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        marks = [(tokenizer.convert_ids_to_tokens(token), token) for token in prefix]
        before = [f"{mark}:0" for mark, _ in marks]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0"], pair=[*before, "$A:0", "$B:1"], special_tokens=marks
        )
    text = f"{IMAGE_MARK}\na red circle"
    wanted = prefix + tokenizer(text, add_special_tokens=False).input_ids
    if tokenizer(text).input_ids != wanted:
        raise UserError(
            f"the tokenizer of {source.name_or_path} ({type(source).__name__}) adds special tokens to a text that "
            "training does not add, and stock LlavaProcessor would keep them; save a fast tokenizer (tokenizer.json) "
            "into the LLM's folder, or export with --format safetensors or llava"
        )
    return tokenizer


def _set_padding(tokenizer: PreTrainedTokenizerBase, ends: Collection[int | None]) -> None:
    """Make the tokenizer pad at the left, since prompts are continued at their right end, with a token of its own.

    A pad token that also ends answers would be masked in further training, and the model would unlearn to stop. One
    that the vocabulary has for padding is taken, else <unk>, else a new one: no text holds it.
    """
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return
    known = {**tokenizer.added_tokens_encoder, tokenizer.unk_token: tokenizer.unk_token_id}
    found = (name for name in (*PAD_TOKENS, tokenizer.unk_token) if known.get(name) not in (None, *ends))
    tokenizer.add_special_tokens({"pad_token": next(found, PAD_TOKENS[0])})


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the tokenizer so that tokenizer.json is taken as it stands.

    transformers 5 would name a class that version 4 does not know, or the family's, which version 5 may build anew from
    vocabulary and merges.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = {name: value for name, value in read_json(file).items() if name not in OF_THIS_LOADING}
    settings["processor_class"] = "LlavaProcessor"
    settings["padding_side"] = tokenizer.padding_side  # save_pretrained leaves it out: batches would be padded right
    # transformers 4 would add token_type_ids, which LLaVA's generate refuses
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["clean_up_tokenization_spaces"] = bool(tokenizer.clean_up_tokenization_spaces)
    _write_json(file, settings)


def _end_of_answers(template: Template) -> int:
    """The token that training teaches the LLM to end an answer with."""
    document = template(Sample("probe", "probe", PROBE, (b"",)))
    return [label for label in document.labels if label != IGNORE][-1]


def _generation(path: str, tokenizer: PreTrainedTokenizerBase, end: int) -> tuple[dict, dict]:
    """generation_config.json: greedy, ended as answers are; and what of the LLM's own is left out."""
    folder = model_folder(path)
    file = folder / "generation_config.json"
    own = read_json(file) if file.is_file() else {}
    said = own.get("eos_token_id") or read_json(folder / "config.json").get("eos_token_id")
    ends = [end, tokenizer.eos_token_id, *(said if isinstance(said, list) else [said])]
    generation = {name: own[name] for name in KEPT_OF_GENERATION if own.get(name) is not None}
    generation |= {
        "pad_token_id": tokenizer.pad_token_id,  # behind answers that end before others; decoding drops it
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)),
        "do_sample": False,
    }
    left_out = {
        name: value
        for name, value in own.items()
        if name not in (*KEPT_OF_GENERATION, *UNSAID_OF_GENERATION) and not name.startswith("_")
    }
    return generation, left_out


def _generation_notes(left_out: dict) -> list[str]:
    said = ", ".join(markdown.name(f"{name} {value}") for name, value in left_out.items() if value not in (None, False))
    also = f"; the LLM's own settings ({said}) are left out" if said else ""
    return [f"`generate` is greedy by default, as the run's evaluation is{also}."]


def _template_notes(template: Template) -> list[str]:
    if isinstance(template, PlainTemplate):
        return [
            "The model was trained on images followed by their captions, without questions. The chat template writes "
            "the images first; a text beside them stands behind them, as the beginning of the caption."
        ]
    notes = [
        "The chat template writes all special tokens; this folder's tokenizer adds none by itself. An image and the "
        "text beside it are parted by a line break, as in LLaVA's records; a message that is one text may hold "
        f"`{IMAGE_MARK}` anywhere."
    ]
    if template.chat.dates:
        date = markdown.name(next(iter(template.chat.dates.values())))
        notes.append(f"The LLM's own template writes today's date; this one always writes {date}, as in training.")
    return notes


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
