"""Write the processor of an exported folder, which stock AutoProcessor loads, and check it.

Models, encoder --write_processor--> tokenizer.json, tokenizer_config.json, chat_template.jinja,
                                     processor_config.json, preprocessor_config.json,
                                     generation_config.json
messages, images --AutoProcessor--> check_processor: the token ids and pixels of training, or
                                    UserError

transformers 4.57 and 5.17 to 5.23 read this layout (5 would write preprocessor_config.json into
processor_config.json).

Pixels: the backend of data.resize makes those of `data.stream.images.ImageTransform`, Pillow's to
the bit, torchvision's to 3e-7, as it divides once where training divides twice. The two differ by
up to 2 levels of 255 in pictures of another size than the encoder's, or more where a strip is
stretched. No file can choose the backend of transformers 5: torchvision where that is installed.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import processors
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from mmtrain.base.errors import UserError
from mmtrain.data.samples.chat import PROBE, ROLES, Turns
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE
from mmtrain.data.samples.templates import (
    PlainTemplate,
    Template,
    load_tokenizer,
    with_marks,
)
from mmtrain.data.stream.images import ImageTransform, transform_of
from mmtrain.exporting.chat_template import (
    TEMPLATE_FILE,
    as_written,
    documents_of,
    exported_chat_template,
    load_template,
)
from mmtrain.exporting.published_files import copy_files, write_json
from mmtrain.exporting.vision import ExportedEncoder
from mmtrain.facts.families import OWN_CACHE, llm_config
from mmtrain.facts.model_files import optional_json, read_json
from mmtrain.facts.models import Models
from mmtrain.stock.stock_class import Settings, StockClass

# Of an LLM's generation_config.json; all else (sampling, penalties) would make answers differ from
# the evaluation's.
KEPT_OF_GENERATION = ("bos_token_id", "max_length", "max_new_tokens")
# as vocabularies name them
PAD_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>")
# that save_pretrained takes for settings of the tokenizer
OF_THIS_LOADING = ("local_files_only", "is_local")
CONVERSATIONS = (
    PROBE,
    (*PROBE, ("human", "Where is it?"), ("gpt", "At the left.")),
    (("human", f"{IMAGE_MARK}\n{IMAGE_MARK}\nWhich is larger?"), ("gpt", "The second.")),
)
QUESTION = (("human", "What is this?"), ("gpt", "A red circle."))
TEXTS = (QUESTION, (*QUESTION, ("human", "And that?"), ("gpt", "No\n1. é")))
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
    template: Template
    transform: ImageTransform
    stock: StockClass


def write_processor(
    stock: StockClass,
    models: Models,
    name: str,
    encoder: ExportedEncoder,
    folder: Path,
) -> ExportedProcessor:
    """Write the processor's files and generation_config.json into `folder`, which exists.

    Raises UserError where tokenizer, template or encoder are missing or unfit for the run itself,
    and for a tokenizer that adds special tokens which cannot be switched off.
    """
    path, layout = models.section.llm.path, models.layout
    source = load_tokenizer(path)
    template = load_template(path, name, layout)
    end = _end_of_answers(template, PROBE)
    tokenizer = _tokenizer_for_prompts(stock, source, template, end)

    # ids of its tokens, and how many rows they need
    ids = tokenizer.convert_tokens_to_ids
    tokens = {stock.image_token_key: layout.image_token, **stock.mark_keys}
    if stock.video_token is not None:
        tokens[stock.video_token_key] = stock.video_token
    new = [one for one in tokenizer.added_tokens_encoder if one not in source.added_tokens_encoder]
    llm = models.published_llm
    used = ids([*new, layout.image_token, tokenizer.pad_token])
    rows_needed = max(llm.vocab_size, max(used) + 1)
    _save_tokenizer(stock, tokenizer, folder)

    transform = transform_of(models)
    write_json(folder / "preprocessor_config.json", stock.image_settings(transform, layout))
    if (video := stock.video_settings(transform)) is not None:
        write_json(folder / "video_preprocessor_config.json", video)
    write_json(
        folder / "processor_config.json",
        {"processor_class": stock.processor_name, **stock.processor(models, encoder)},
    )

    generation = _generation_settings(models.llm_folder, tokenizer, end)
    image_id = ids(layout.image_token)
    # the run's own LLM has no such rows, so it never says these tokens
    unsaid = list(range(llm.vocab_size, rows_needed))
    if llm.model_type in OWN_CACHE:
        generation["use_cache"] = False
        # answers are read again as they grow, and such a token would need a picture
        unsaid.append(image_id)
    if unsaid:
        generation["suppress_tokens"] = unsaid
    write_json(folder / "generation_config.json", generation)
    token_keys = dict(zip(tokens, ids([*tokens.values()]), strict=True))
    return ExportedProcessor(
        image_id,
        token_keys,
        tuple(new),
        rows_needed,
        template,
        transform,
        stock,
    )


def _end_of_answers(template: Template, turns: Turns) -> int:
    """Return the token that ends an answer in training."""
    [(_, document)] = documents_of(template, [turns], ((1, 1),))
    return [label for label in document.labels if label != IGNORE][-1]


def _tokenizer_for_prompts(
    stock: StockClass,
    source: PreTrainedTokenizerBase,
    template: Template,
    end: int,
) -> PreTrainedTokenizerBase:
    """Return a copy with the layout's image token and the exported template.

    It begins a text as training does. A chat template writes its own BOS, so the tokenizer must add
    none. The plain template's BOS is the tokenizer's, or written by the exported template where the
    class's processor asks its tokenizer for none.
    """
    image = template.layout.image_token
    more = [image, *stock.more_tokens]
    if stock.video_token:
        more.append(stock.video_token)
    tokenizer = _with_padding(with_marks(source, *more), {end, source.eos_token_id})
    prefix = []
    if isinstance(template, PlainTemplate):
        prefix = template.prefix
    beginning = ""
    if not stock.adds_special_tokens:
        beginning = "".join(tokenizer.convert_ids_to_tokens(prefix))
        prefix = []
    tokenizer.chat_template = exported_chat_template(template, beginning)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        marks = [(tokenizer.convert_ids_to_tokens(token), token) for token in prefix]
        before = [f"{mark}:0" for mark, _ in marks]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0"],
            pair=[*before, "$A:0", "$B:1"],
            special_tokens=marks,
        )
    text = f"{image}\na red circle"
    if tokenizer(text).input_ids != prefix + tokenizer(text, add_special_tokens=False).input_ids:
        raise UserError(
            f"the tokenizer of {source.name_or_path} ({type(source).__name__}) adds special tokens "
            f"to a text that training does not add, and stock {stock.processor_name} would keep "
            "them. Save a fast tokenizer (tokenizer.json) into the LLM's folder, or export with "
            "--format safetensors or llava"
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
    unfit = (None, *ends)
    names = (*PAD_TOKENS, tokenizer.unk_token)
    padding = next((name for name in names if ids.get(name) not in unfit), PAD_TOKENS[0])
    padded = with_marks(tokenizer, padding)
    padded.add_special_tokens({"pad_token": padding})
    return padded


def _save_tokenizer(
    stock: StockClass,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """Save the tokenizer so that transformers 4 and 5 load tokenizer.json unchanged.

    Version 5 would name a class that version 4 lacks, or the family's, which version 5 may build
    anew.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = read_json(file)
    for name in OF_THIS_LOADING:
        settings.pop(name, None)
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


def _generation_settings(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    end: int,
) -> Settings:
    """Return generation_config.json: greedy, ended as answers are."""
    own = optional_json(folder, "generation_config.json")
    own_ends = own.get("eos_token_id") or llm_config(folder).get("eos_token_id")
    if not isinstance(own_ends, list):
        own_ends = [own_ends]
    ends = dict.fromkeys([end, tokenizer.eos_token_id, *own_ends])
    ends.pop(None, None)
    generation = {name: own[name] for name in KEPT_OF_GENERATION if own.get(name) is not None}
    if tokenizer.pad_token_id is not None:
        # behind answers that end before others; decoding drops it
        generation["pad_token_id"] = tokenizer.pad_token_id
    return generation | {"eos_token_id": list(ends), "do_sample": False}


def write_tokenizer(models: Models, name: str, folder: Path) -> None:
    """Write tokenizer files, chat_template.jinja and generation_config.json of a run on text alone.

    Raises UserError where stock AutoTokenizer would not write what the run was trained on.
    """
    copy_files(models.llm_folder, folder)
    template = load_template(models.section.llm.path, name, models.layout)
    (folder / TEMPLATE_FILE).write_text(exported_chat_template(template), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
    )
    for turns, document in documents_of(template, TEXTS):
        messages = [{"role": ROLES[speaker], "content": text} for speaker, text in turns]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        if list(ids) != list(document.input_ids):
            raise UserError(
                f"stock AutoTokenizer reads {turns[0][1]!r} as the tokens {ids[:40]}, but the run "
                f"was trained on {list(document.input_ids[:40])}. "
                "Use --format safetensors, which exports no tokenizer"
            )
    end = _end_of_answers(template, QUESTION)
    write_json(
        folder / "generation_config.json",
        _generation_settings(models.llm_folder, tokenizer, end),
    )


def check_processor(exported: ExportedProcessor, folder: Path) -> None:
    """Compare the token ids and pixels of a folder's processor with those of training.

    The default backend gets squares of the encoder's size, which few grids enlarge. Where the class
    has the run's backend, that gets pictures of several shapes, and two in one conversation. The
    folder must hold its config.json. Raises UserError.
    """
    side = exported.transform.image_size
    stock = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    square = exported.template.layout.tiling(side, side)
    tolerance = TOLERANCE
    if min(square.rows, square.columns) > 1:  # enlarged by torchvision, which rounds otherwise
        tolerance = math.inf
    checks = [(stock, CONVERSATIONS, [(side, side)] * 2, tolerance)]
    if exported.transform.resize in exported.stock.backends:
        exact = exported.stock.load_processor(folder)
        shapes = [(round(width * side), round(height * side)) for width, height in SHAPES]
        checks += [(exact, CONVERSATIONS[:1], [shape], TOLERANCE) for shape in shapes]
        checks.append((exact, CONVERSATIONS[-1:], shapes[:2], TOLERANCE))
    for processor, conversations, sizes, tolerance in checks:
        if fault := _fault(processor, exported, conversations, sizes, tolerance):
            raise UserError(
                f"{folder}: stock AutoProcessor does not make the inputs that the run was trained "
                f"on: {fault}. "
                "Export with --format safetensors or --format llava, which include no processor"
            )


def _fault(
    processor: ProcessorMixin,
    exported: ExportedProcessor,
    conversations: Sequence[Turns],
    sizes: Sequence[tuple[int, int]],
    tolerance: float,
) -> str | None:
    """Say how a processor's inputs differ from training's; None: nowhere.

    The conversations are about noise of these sizes. The ids of each are compared whole, and as the
    prompt for its first answer.
    """
    transform = exported.transform
    noise = np.random.default_rng(0)
    pictures = []
    for width, height in sizes:
        pictures.append(Image.fromarray(noise.integers(0, 256, (height, width, 3), np.uint8)))
    has_words = not isinstance(exported.template, PlainTemplate)
    for turns, document in documents_of(exported.template, conversations, sizes):
        shown = pictures[: len(document.tilings)]
        tiles = transform.normalise(torch.cat([*map(transform.cut, shown, document.tilings)]))
        needed = exported.stock.inputs(tiles, document.tilings, exported.template.layout)
        begin = next(t for t, label in enumerate(document.labels) if label != IGNORE) + 1
        cases = [(turns[:1], document.input_ids[:begin])]
        if has_words:
            cases.append((turns, document.input_ids))
        for asked, trained in cases:
            text = processor.apply_chat_template(
                _messages(asked, has_words),
                add_generation_prompt=len(asked) == 1,
                tokenize=False,
            )
            inputs = processor(text=text, images=[shown], return_tensors="pt")
            if fault := _tensor_fault(inputs, needed, tolerance):
                return fault
            ids = inputs["input_ids"][0].tolist()
            wanted = as_written(trained, exported.image_token_id)
            if ids != wanted:
                return f"{text!r} becomes the tokens {ids[:40]}, but training has {wanted[:40]}"
    return None


def _tensor_fault(
    inputs: BatchFeature,
    needed: dict[str, torch.Tensor],
    tolerance: float,
) -> str | None:
    """Say which input differs by more than `tolerance`, or in shape; None: none."""
    for name, tensor in needed.items():
        shape = None
        if name in inputs:
            shape = tuple(inputs[name].shape)
        if shape != tensor.shape:
            return f"{name} has shape {shape}, but training has {tuple(tensor.shape)}"
        difference = float((inputs[name] - tensor).abs().max())
        if not difference <= tolerance:
            return f"{name} differ by {difference:g}"
    return None


def _messages(turns: Turns, words: bool) -> list[dict]:
    """Return turns as messages of image and text parts; without `words` of images alone."""
    messages = []
    for speaker, text in turns:
        content = [{"type": "image"}] * text.count(IMAGE_MARK)
        if words:
            content.append({"type": "text", "text": text.replace(IMAGE_MARK, "").strip()})
        messages.append({"role": ROLES[speaker], "content": content})
    return messages
