"""The processor of an exported Hugging Face folder: the files that stock AutoProcessor loads, and
their check.

RunConfig, encoder --write_processor--> tokenizer.json, tokenizer_config.json, chat_template.jinja,
                                        processor_config.json, preprocessor_config.json,
                                        generation_config.json
messages, images --AutoProcessor--> check_processor: the token ids and pixels of training, or
    UserError

transformers 4.57 and 5.17 to 5.23 read this layout (5 would write preprocessor_config.json into
processor_config.json).

Pixels: transformers' Pillow backend gives the floats of `data.stream.images.ImageTransform`.
torchvision, the default where it is installed, gives them to 3e-7 for pictures of the encoder's
size; others differ by up to 2 levels of 255, or more where a strip is stretched. No file can choose
the backend.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import processors
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.chat import PROBE, ROLES, Turns
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import (
    PlainTemplate,
    Template,
    load_tokenizer,
    make_template,
    with_marks,
)
from mmtrain.data.stream.images import ImageTransform, image_transform
from mmtrain.exporting.chat_template import TEMPLATE_FILE, documents_of, exported_chat_template
from mmtrain.exporting.published_files import copy_files, write_json
from mmtrain.exporting.vision import ExportedEncoder
from mmtrain.facts.families import OWN_CACHE, llm_config
from mmtrain.facts.model_files import model_folder, optional_json, read_json
from mmtrain.facts.models import models_of
from mmtrain.layouts.layout import ImageLayout
from mmtrain.stock.stock_class import StockClass

# Of an LLM's generation_config.json; all else (sampling, penalties) would make answers differ from
# the evaluation's.
KEPT_OF_GENERATION = ("bos_token_id", "max_length", "max_new_tokens")
# as vocabularies name them
PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>")
# that save_pretrained takes for settings of the tokenizer
OF_THIS_LOADING = ("local_files_only", "is_local")
CONVERSATIONS: tuple[Turns, ...] = (
    PROBE,
    (*PROBE, ("human", "Where is it?"), ("gpt", "At the left.")),
    (("human", f"{IMAGE_MARK}\n{IMAGE_MARK}\nWhich is larger?"), ("gpt", "The second.")),
)
TEXTS: tuple[Turns, ...] = (
    (("human", "What is this?"), ("gpt", "A red circle.")),
    (
        ("human", "What is this?"),
        ("gpt", "A red circle."),
        ("human", "And that?"),
        ("gpt", "No\n1. é"),
    ),
)
# (width, height) of pictures, in sides of a tile
SHAPES = ((2.3, 0.9), (0.4, 3.1), (0.3, 0.2), (1, 1), (4.1, 3.2))
TOLERANCE = 1e-5  # of normalised values; torchvision divides once where training divides twice


@dataclass(frozen=True)
class ExportedProcessor:
    """The processor's part of an exported folder."""

    image_token_id: int
    token_keys: dict[str, int]  # of config.json
    new_tokens: tuple[str, ...]  # that the LLM's tokenizer does not have
    rows_needed: int  # of the exported LLM's embedding and head, which may be more than the LLM has
    layout: ImageLayout
    template: Template
    transform: ImageTransform
    stock: StockClass


def write_processor(
    stock: StockClass, config: RunConfig, encoder: ExportedEncoder, folder: Path
) -> ExportedProcessor:
    """Write the processor's files and generation_config.json into `folder`, which exists.

    Raises UserError where tokenizer, template or encoder are missing or unfit for the run itself,
    and for a tokenizer that adds special tokens which cannot be switched off.
    """
    path = config.model.llm.path
    source = load_tokenizer(path)
    models = models_of(config)
    layout = models.layout
    template = make_template(config.data.template, source, layout, sys.maxsize)
    probe = template(Sample("probe", "probe", PROBE, (b"",), sizes=((1, 1),)))
    # the token that ends an answer in training
    end = [label for label in probe.labels if label != IGNORE][-1]
    tokenizer = _tokenizer_for_prompts(stock, source, template, end)
    image_id = tokenizer.convert_tokens_to_ids(layout.image_token)
    llm = models.published_llm
    rows = llm.vocab_size
    token_keys = {stock.image_token_key: image_id}
    token_keys |= {
        key: tokenizer.convert_tokens_to_ids(mark) for key, mark in stock.mark_keys.items()
    }
    if stock.video_token is not None:
        token_keys[stock.video_token_key] = tokenizer.convert_tokens_to_ids(stock.video_token)
    new = [
        token
        for token in tokenizer.added_tokens_encoder
        if token not in source.added_tokens_encoder
    ]
    used = tokenizer.convert_tokens_to_ids([*new, layout.image_token, tokenizer.pad_token])
    rows_needed = max(rows, max(used) + 1)
    _save_tokenizer(stock, tokenizer, folder)

    transform = image_transform(
        config.model.vision.name, config.data.image_fit, tile_size=layout.tile_size
    )
    assert transform.image_size == encoder.image_size, (
        f"{transform.image_size} pixels, encoder {encoder.image_size}"
    )
    write_json(folder / "preprocessor_config.json", stock.image_settings(transform, layout))
    if (video := stock.video_settings(transform)) is not None:
        write_json(folder / "video_preprocessor_config.json", video)
    settings = {"processor_class": stock.processor_name, **stock.processor(models, encoder)}
    write_json(folder / "processor_config.json", settings)

    generation = generation_settings(path, tokenizer, end)
    # the run's own LLM has no such rows, so it never says these tokens
    unsaid = list(range(rows, rows_needed))
    if llm.model_type in OWN_CACHE:
        generation["use_cache"] = False
        # answers are read again as they grow, and such a token would need a picture
        unsaid.append(image_id)
    if unsaid:
        generation["suppress_tokens"] = unsaid
    write_json(folder / "generation_config.json", generation)
    return ExportedProcessor(
        image_id, token_keys, tuple(new), rows_needed, layout, template, transform, stock
    )


def _tokenizer_for_prompts(
    stock: StockClass, source: PreTrainedTokenizerBase, template: Template, end: int
) -> PreTrainedTokenizerBase:
    """Copy the tokenizer, with the layout's image token and the exported template; it begins a text
    as training does.

    A chat template writes its own BOS, so the tokenizer must add none. The plain template's BOS is
    the tokenizer's, or written by the exported template where the class's processor asks its
    tokenizer for none.
    """
    more = (*stock.more_tokens, *([stock.video_token] if stock.video_token else []))
    image = template.layout.image_token
    tokenizer = _with_padding(with_marks(source, image, *more), {end, source.eos_token_id})
    prefix = template.prefix if isinstance(template, PlainTemplate) else []
    beginning = (
        "" if stock.adds_special_tokens else "".join(tokenizer.convert_ids_to_tokens(prefix))
    )
    tokenizer.chat_template = exported_chat_template(template, beginning)
    prefix = prefix if stock.adds_special_tokens else []
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        marks = [(tokenizer.convert_ids_to_tokens(token), token) for token in prefix]
        before = [f"{mark}:0" for mark, _ in marks]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0"], pair=[*before, "$A:0", "$B:1"], special_tokens=marks
        )
    text = f"{image}\na red circle"
    wanted = prefix + tokenizer(text, add_special_tokens=False).input_ids
    if tokenizer(text).input_ids != wanted:
        raise UserError(
            f"the tokenizer of {source.name_or_path} ({type(source).__name__}) adds special tokens "
            "to a text that "
            f"training does not add, and stock {stock.processor_name} would keep them. "
            "Save a fast tokenizer "
            "(tokenizer.json) into the LLM's folder, or export with --format safetensors or llava"
        )
    return tokenizer


def _with_padding(
    tokenizer: PreTrainedTokenizerBase, ends: Collection[int | None]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that pads at the left, with a token that ends no answer.

    One that ends answers would be masked in further training, and the model would unlearn to stop.
    Padding is one of PAD_TOKENS in the vocabulary, else <unk>, else a new token.
    """
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return tokenizer
    ids = {**tokenizer.added_tokens_encoder, tokenizer.unk_token: tokenizer.unk_token_id}
    usable = (
        name for name in (*PAD_TOKENS, tokenizer.unk_token) if ids.get(name) not in (None, *ends)
    )
    padding = next(usable, PAD_TOKENS[0])
    padded = with_marks(tokenizer, padding)
    padded.add_special_tokens({"pad_token": padding})
    return padded


def _save_tokenizer(stock: StockClass, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the tokenizer so that transformers 4 and 5 load tokenizer.json unchanged.

    Version 5 would name a class that version 4 lacks, or the family's, which version 5 may build
    anew.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = {
        name: value for name, value in read_json(file).items() if name not in OF_THIS_LOADING
    }
    settings["processor_class"] = stock.processor_name
    # save_pretrained leaves it out: batches would be padded right
    settings["padding_side"] = tokenizer.padding_side
    if named := stock.named_tokens(tokenizer):
        settings["extra_special_tokens"] = named
    # transformers 4 would add token_type_ids, which LLaVA's generate refuses
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["clean_up_tokenization_spaces"] = bool(tokenizer.clean_up_tokenization_spaces)
    write_json(file, settings)


def generation_settings(path: str, tokenizer: PreTrainedTokenizerBase, end: int) -> dict[str, Any]:
    """Return generation_config.json: greedy, ended as answers are."""
    folder = model_folder(path)
    own = optional_json(folder, "generation_config.json")
    own_ends = own.get("eos_token_id") or llm_config(folder).get("eos_token_id")
    ends = [end, tokenizer.eos_token_id, *(own_ends if isinstance(own_ends, list) else [own_ends])]
    generation = {name: own[name] for name in KEPT_OF_GENERATION if own.get(name) is not None}
    if tokenizer.pad_token_id is not None:
        # behind answers that end before others; decoding drops it
        generation["pad_token_id"] = tokenizer.pad_token_id
    distinct = list(dict.fromkeys(token for token in ends if token is not None))
    return generation | {"eos_token_id": distinct, "do_sample": False}


def write_tokenizer(config: RunConfig, folder: Path) -> None:
    """Write tokenizer files, chat_template.jinja and generation_config.json of a run on text alone.

    Raises UserError where stock AutoTokenizer would not write what the run was trained on.
    """
    copy_files(model_folder(config.model.llm.path), folder)
    source = load_tokenizer(config.model.llm.path)
    template = make_template(config.data.template, source, models_of(config).layout, sys.maxsize)
    (folder / TEMPLATE_FILE).write_text(exported_chat_template(template), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    for turns, document in documents_of(template, TEXTS):
        messages = [{"role": ROLES[speaker], "content": text} for speaker, text in turns]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        if list(ids) != list(document.input_ids):
            raise UserError(
                f"stock AutoTokenizer reads {turns[0][1]!r} as the tokens {ids[:40]}, but the run "
                "was trained on "
                f"{list(document.input_ids[:40])}. Use --format safetensors, which "
                "exports no tokenizer"
            )
    end = [
        label
        for label in template(Sample("probe", "probe", TEXTS[0], ())).labels
        if label != IGNORE
    ][-1]
    write_json(
        folder / "generation_config.json",
        generation_settings(config.model.llm.path, tokenizer, end),
    )


def check_processor(exported: ExportedProcessor, folder: Path) -> None:
    """Compare the token ids and pixels of a folder's processor with those of training; raises
    UserError.

    The default backend gets squares of the encoder's size, which few grids enlarge. Where the class
    can resize with Pillow, that gets pictures of several shapes, and two in one conversation. The
    folder must hold its config.json.
    """
    side = exported.transform.image_size
    stock = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    square = exported.layout.tiling(side, side)
    enlarged = min(square.rows, square.columns) > 1  # by torchvision, which rounds otherwise
    checks = [(stock, CONVERSATIONS, [(side, side)] * 2, math.inf if enlarged else TOLERANCE)]
    if exported.stock.has_pillow:
        exact = exported.stock.load_processor(folder)
        shapes = [(round(width * side), round(height * side)) for width, height in SHAPES]
        checks += [(exact, CONVERSATIONS[:1], [shape], TOLERANCE) for shape in shapes]
        checks.append((exact, CONVERSATIONS[-1:], shapes[:2], TOLERANCE))
    for processor, conversations, sizes, tolerance in checks:
        if fault := _fault(processor, exported, conversations, sizes, tolerance):
            raise UserError(
                f"{folder}: stock AutoProcessor does not make the inputs that the run was trained "
                f"on: {fault}. Export "
                "with --format safetensors or --format llava, which include no processor"
            )


def _fault(
    processor: ProcessorMixin,
    exported: ExportedProcessor,
    conversations: Sequence[Turns],
    sizes: Sequence[tuple[int, int]],
    tolerance: float,
) -> str | None:
    """Say how a processor's inputs differ from training's for conversations about noise of these
    sizes; None: nowhere.

    Compares a conversation's ids whole, and as the prompt for its first answer.
    """
    transform, noise, plain = (
        exported.transform,
        np.random.default_rng(0),
        isinstance(exported.template, PlainTemplate),
    )
    pictures = [
        Image.fromarray(noise.integers(0, 256, (height, width, 3), np.uint8))
        for width, height in sizes
    ]
    for turns, document in documents_of(exported.template, conversations, sizes):
        shown = pictures[: len(document.tilings)]
        tiles = torch.cat(
            [transform.cut(*pair) for pair in zip(shown, document.tilings, strict=True)]
        )
        needed = exported.stock.inputs(
            transform.normalise(tiles), document.tilings, exported.layout
        )
        begin = next(t for t, label in enumerate(document.labels) if label != IGNORE) + 1
        cases = [(turns[:1], document.input_ids[:begin])] + (
            [] if plain else [(turns, document.input_ids)]
        )
        for asked, trained in cases:
            messages = _messages(asked, words=not plain)
            text = processor.apply_chat_template(
                messages, add_generation_prompt=len(asked) == 1, tokenize=False
            )
            inputs = processor(text=text, images=[shown], return_tensors="pt")
            for name, tensor in needed.items():
                if name not in inputs or inputs[name].shape != tensor.shape:
                    shape = tuple(inputs[name].shape) if name in inputs else None
                    return f"{name} has shape {shape}, but training has {tuple(tensor.shape)}"
                difference = float((inputs[name] - tensor).abs().max())
                if not difference <= tolerance:
                    return f"{name} differ by {difference:g}"
            ids = inputs["input_ids"][0].tolist()
            wanted = [
                exported.image_token_id if token == IMAGE_POSITION else token for token in trained
            ]
            if ids != wanted:
                return f"{text!r} becomes the tokens {ids[:40]}, but training has {wanted[:40]}"
    return None


def _messages(turns: Turns, words: bool) -> list[dict]:
    """Turns as messages of image and text parts; without `words` of images alone."""
    messages = []
    for speaker, text in turns:
        images = [{"type": "image"}] * text.count(IMAGE_MARK)
        texts = [{"type": "text", "text": text.replace(IMAGE_MARK, "").strip()}] if words else []
        messages.append({"role": ROLES[speaker], "content": [*images, *texts]})
    return messages
