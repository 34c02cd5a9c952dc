"""Shapes of the models in a run, read without torch, transformers, timm or the network.

Sources, in this order: the model's folder (or its snapshot in the local Hugging Face cache):
config.json and the headers of its safetensors files; then the records in `mmtrain/facts/recorded/`
and the cache, by hub id or timm name (`mmtrain record` adds one); then timm, for its own names.
Importing AutoConfig or timm imports torch, 3 s each.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.limits import MAX_LAYERS
from mmtrain.facts.encoders import TIMM_VIT, EncoderFamily, check_plain_vit, rows
from mmtrain.facts.families import (
    TIED_BY_DEFAULT,
    canonical_name,
    check_family,
    encoder_config,
    encoder_tensors,
    llm_config,
    llm_tensors,
    parameters_on_disk,
    parts_on_disk,
    remote_code,
    scaled_by,
)
from mmtrain.facts.model_files import find_model_folder, no_model, stored_weights, tensor_shapes
from mmtrain.facts.published import Weight, shapes_of
from mmtrain.facts.recorded_shapes import find_recorded
from mmtrain.facts.settings import (
    MAX_TOKEN_ID,
    Settings,
    Shape,
    Shapes,
    check_sizes,
    first,
    is_whole,
)
from mmtrain.facts.timm_models import timm_config, timm_record
from mmtrain.facts.vision_files import (
    EncoderSettings,
    encoder_settings,
    is_timm_name,
    patches_per_image,
    square,
)


@dataclass(frozen=True)
class ParameterShape:
    name: str  # the global one
    shape: Shape
    coded_bytes: int | None = None  # of its codes and scales in the model's files, if it has any

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LlmShape:
    """Facts of an LLM for planning. Widths are in elements, counts per layer."""

    source: str  # where the shapes come from: a folder, or "recorded ID"
    model_type: str
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding
    tied: bool  # the LM head is the embedding
    experts: int  # 0 for dense models
    experts_per_token: int  # 0 for dense models
    window: int | None  # attention window in tokens if every layer has one, else None
    front: tuple[ParameterShape, ...]  # embedding and whatever else feeds decoder layer 0
    decoder: tuple[tuple[ParameterShape, ...], ...]  # one tuple per decoder layer
    # final norm, LM head (the embedding's shape once more where tied)
    head: tuple[ParameterShape, ...]
    norm_eps: float | None = None  # of its RMS norms; None where config.json says nothing
    # of recurrent layers: keys that a head's state has; None: as many as values
    mixer_state: int | None = None
    # of recurrent layers: tokens that stock code computes at once; 64 in the gated delta rule
    mixer_chunk: int = 64
    scaled_by: str = ""  # key of a scale or cap that multimodal classes lack

    @property
    def has_published_codes(self) -> bool:
        """Whether its files have codes for weights of decoder layers."""
        parameters = itertools.chain.from_iterable(self.decoder)
        return any(map(operator.attrgetter("coded_bytes"), parameters))


@dataclass(frozen=True)
class VisionShape:
    """Facts of a vision encoder for planning, cut after the selected block."""

    source: str  # where the shapes come from: a folder, or "recorded NAME"
    family: EncoderFamily
    width: int  # features per patch
    heads: int
    patches_per_image: int  # of a cell, if it takes images of any size
    prefix_tokens: int  # class and register tokens: computed, not handed to the projector
    image_size: int  # pixels a side, of a cell if the encoder takes any size
    patch_size: int  # pixels
    parameters: tuple[ParameterShape, ...]  # of what runs, names `vision.<stock name>`
    blocks_run: int

    merge: int = 1  # patches a side that the encoder's own merger joins; 1: it does not run
    merged_width: int | None = None  # features that it makes of them
    window: int | None = None  # patches that a block attends to at once; None: all of an image
    full_blocks: tuple[int, ...] = ()  # those that attend to all of them nevertheless
    deepstack: tuple[int, ...] = ()  # blocks whose features are appended to the last one's

    @property
    def whole_because(self) -> str:
        """The reason why slices cannot hand its hidden states on; "" where they can."""
        if self.deepstack:
            blocks = ", ".join(map(str, self.deepstack))
            return f"has DeepStack, which takes the features of blocks {blocks} too"
        if self.family.native is not None and self.prefix_tokens:
            return "has a class token beside images of any size"
        return ""

    @property
    def feature_width(self) -> int:
        width = self.merged_width or self.width
        return width * (1 + len(self.deepstack))

    @property
    def features_per_image(self) -> int:
        return self.patches_per_image // self.merge**2

    def with_cells(self, factor: int) -> VisionShape:
        """Return the shape with cells of `factor` x `factor` features.

        Only an encoder of images of any size has cells.
        """
        if self.family.native is None:
            return self
        side = factor * self.merge
        return replace(self, image_size=side * self.patch_size, patches_per_image=side**2)


NO_VISION = VisionShape("no encoder", TIMM_VIT, 0, 1, 0, 0, 0, 1, (), 0)  # of a run on text alone


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a trainable pattern names this parameter or a module around it.

    `*` in a pattern crosses dots.
    """
    for pattern in patterns:
        if fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*"):
            return True
    return False


def llm_shape(path: str) -> LlmShape:
    """Return the shape of an LLM given as a folder or a hub id.

    Raises UserError if it is not known, or cannot be staged.
    """
    folder = find_model_folder(path)
    weights = None
    if folder is not None:
        config_json = llm_config(folder)
        check_family(config_json)
        weights = stored_weights(folder)
    if weights is None and (recorded := find_recorded("llm", path)) is not None:
        return llm_shape_from(recorded.config, recorded.parameters, f"recorded {recorded.id}")
    if folder is None:
        raise no_model(path)
    if weights is None:
        raise _no_weights(folder, "model.llm.path", path)
    weights = llm_tensors(folder, weights)
    tensors = shapes_of(weights)
    check_sizes(config_json, tensors, str(folder))
    _refuse_adapters(tensors, folder)
    family = config_json["model_type"]
    parameters = parameters_on_disk(family, tensors)
    coded_bytes = _coded_bytes(family, weights)
    if coded_bytes and not config_json.get("quantization_config"):
        raise UserError(
            f"{folder}: its weights are FP8 or MXFP4 codes, but config.json has no "
            "quantization_config that says so. Download it again"
        )
    return llm_shape_from(config_json, parameters, str(folder), coded_bytes)


def _coded_bytes(family: str, weights: Mapping[str, Weight]) -> dict[str, int]:
    """Return the bytes of codes and scales of each parameter whose every part is coded."""
    sizes = {}
    for name, parts in parts_on_disk(family, weights).items():
        size = 0
        for part in parts:
            part_bytes = weights[part].coded_bytes
            if part_bytes is None:
                break
            size += part_bytes
        else:
            sizes[name] = size
    return sizes


def _no_weights(folder: Path, key: str, arguments: str) -> UserError:
    return UserError(
        f"{folder}: has config.json but no model.safetensors. "
        "Download the weights or, to plan without them, record "
        f"the model and use NAME as {key}: mmtrain record {arguments} --id NAME"
    )


def llm_shape_from(
    config_json: Settings,
    parameters: Shapes,
    source: str,
    coded_bytes: Mapping[str, int] = MappingProxyType({}),
) -> LlmShape:
    """Return the shape of a causal LM from its raw config.json and parameters by stock name."""
    check_family(config_json)
    front, decoder, head = _parts(config_json, parameters, source, coded_bytes)
    embedding = next(p for p in front if p.name == "llm.embedding.weight")
    vocab_size = embedding.shape[0]
    tied = _is_tied(config_json, any(p.name == "llm.head.weight" for p in head), source)
    if tied:
        head = [p for p in head if p.name != "llm.head.weight"]
        head.append(ParameterShape("llm.head.weight", embedding.shape))
    _refuse_other_vocabulary(config_json, vocab_size, source)

    hidden_size = first(config_json, "hidden_size") or embedding.shape[1]
    heads = first(config_json, "heads")
    if heads is None:
        raise UserError(f"{source}: config.json has no num_attention_heads")
    kv_heads = config_json.get("num_key_value_heads") or heads
    if config_json.get("multi_query"):
        kv_heads = 1
    head_dim = config_json.get("head_dim")
    # multi-head latent attention (deepseek_v3): head_dim is the rope part only
    if config_json.get("qk_rope_head_dim"):
        if config_json.get("qk_nope_head_dim") is None:
            raise UserError(f"{source}: config.json has qk_rope_head_dim, but no qk_nope_head_dim")
        head_dim = config_json["qk_nope_head_dim"] + config_json["qk_rope_head_dim"]
    head_dim = head_dim or hidden_size // heads
    _refuse_other_rotations(config_json, head_dim, source)
    return LlmShape(
        source=source,
        model_type=config_json["model_type"],
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        tied=tied,
        experts=first(config_json, "experts") or 0,
        experts_per_token=first(config_json, "experts_per_token") or 0,
        window=_window(config_json),
        front=tuple(front),
        decoder=tuple(map(tuple, decoder)),
        head=tuple(head),
        norm_eps=config_json.get("rms_norm_eps"),
        mixer_state=first(config_json, "mixer_state"),
        mixer_chunk=first(config_json, "mixer_chunk") or 64,
        scaled_by=scaled_by(config_json),
    )


Parameters = list[ParameterShape]


def _parts(
    config_json: Settings,
    parameters: Shapes,
    source: str,
    coded_bytes: Mapping[str, int],
) -> tuple[Parameters, list[Parameters], Parameters]:
    """Return an LLM's parameters before its decoder layers, of each of these, and behind them.

    Raises UserError where a layer or the embedding is missing.
    """
    front: Parameters = []
    head: Parameters = []
    decoder: dict[int, Parameters] = {}
    for stock_name, shape in parameters.items():
        parameter = ParameterShape(
            canonical_name(stock_name),
            shape,
            coded_bytes.get(stock_name),
        )
        if match := re.match(r"llm\.layers\.(\d+)\.", parameter.name):
            decoder.setdefault(int(match[1]), []).append(parameter)
        elif re.match(r"llm\.(norm|head)\.|.*\.project_out\.", parameter.name):
            head.append(parameter)
        else:
            front.append(parameter)
    has_embedding = any(p.name == "llm.embedding.weight" and len(p.shape) == 2 for p in front)
    if not has_embedding or not decoder:
        raise UserError(
            f"{source}: no embedding or no decoder layers among its {len(parameters)} tensors "
            f"(first: {next(iter(parameters), 'none')}). "
            f"{remote_code(config_json) or 'Is it a causal LLM?'}"
        )

    stored = max(decoder) + 1
    layers = first(config_json, "layers") or stored
    if layers > MAX_LAYERS:
        raise UserError(
            f"{source}: the weights have {layers:,} decoder layers; "
            f"at most {MAX_LAYERS:,} are supported"
        )
    for index in range(layers):
        if index not in decoder:
            raise UserError(
                f"{source}: config.json says {layers} decoder layers, but the weights lack "
                f"layer {index}"
            )
    # Layers of multi-token prediction (deepseek_v3's) are on disk behind the model's own.
    if stored > layers + (config_json.get("num_nextn_predict_layers") or 0):
        raise UserError(
            f"{source}: config.json says {layers} decoder layers, but the weights have {stored}. "
            "Correct num_hidden_layers, or download the folder again"
        )
    return front, [decoder[index] for index in range(layers)], head


def _is_tied(config_json: Settings, has_head: bool, source: str) -> bool:
    """Whether the LM head is the embedding; raises UserError for an LLM without any."""
    tied = config_json.get("tie_word_embeddings")
    if tied is None:
        tied = config_json["model_type"] in TIED_BY_DEFAULT
    if not tied and not has_head:
        raise UserError(
            f"{source}: the weights lack the LM head, but config.json does not tie it to the "
            "embedding. Write tie_word_embeddings: true into config.json if they are one matrix, "
            "or download the folder again"
        )
    return tied


def _refuse_other_vocabulary(config_json: Settings, rows: int, source: str) -> None:
    """Raise UserError for a vocabulary or a padding token that the embedding's rows do not have."""
    if config_json.get("vocab_size") not in (None, rows):
        raise UserError(
            f"{source}: config.json says vocab_size {config_json['vocab_size']}, but the embedding "
            f"has {rows:,}"
        )
    if is_whole(padding := config_json.get("pad_token_id"), rows, MAX_TOKEN_ID):
        raise UserError(
            f"{source}: config.json says pad_token_id {padding}, but the embedding has "
            f"{rows:,} rows. Write null: training pads nothing"
        )


def _refuse_other_rotations(config_json: Settings, head_dim: int, source: str) -> None:
    """Raise UserError where M-RoPE's sections, pairs of features, are not what a head rotates."""
    rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    share = rope.get("partial_rotary_factor") or config_json.get("partial_rotary_factor") or 1
    if sections and 2 * sum(sections) != int(head_dim * share):
        raise UserError(
            f"{source}: config.json says mrope_section {sections}, of {2 * sum(sections)} "
            f"features, but a head of {head_dim} rotates {int(head_dim * share)}. "
            "Correct head_dim or mrope_section"
        )


def _window(config_json: Settings) -> int | None:
    window = config_json.get("sliding_window")
    if not window or config_json.get("use_sliding_window") is False:
        return None
    kinds = first(config_json, "layer_kinds")
    if kinds:
        has_one = set(kinds) == {"sliding_attention"}
    else:  # older files do not list the kinds; gemma2, for one, then alternates
        has_one = config_json["model_type"] in ("mistral", "mixtral", "phi3", "starcoder2")
    return window if has_one else None


def vision_shape(
    name: str,
    select_layer: int,
    final_norm: bool = False,
    merger: bool = False,
    deepstack: bool = False,
) -> VisionShape:
    """Return the shape of the part of a vision encoder that runs.

    `name` is what `load_vision` takes, `select_layer` the last block that runs (-1: the last one).
    With `final_norm` the last norm runs too, with `merger` the encoder's own one. `deepstack` adds
    the features of DeepStack's blocks, if it has any. Raises UserError if it is not known.
    """
    more = final_norm, merger, deepstack
    folder = find_model_folder(name)
    recorded = find_recorded("vision", name)
    # Encoders with pickled weights only (openai/clip-vit-large-patch14-336) are planned from their
    # record too.
    if recorded is not None and (folder is None or not any(folder.glob("model.safetensors*"))):
        source = f"recorded {recorded.id}"
    elif folder is not None:
        return _vision_shape_of(folder, name, select_layer, *more)
    elif not is_timm_name(name):
        raise no_model(name)
    else:
        # weights that timm does not have are refused here, not when they are loaded
        timm_config(name)
        recorded = timm_record(name)
        source = f"timm's {name}"
    return vision_shape_from(recorded.config, recorded.parameters, select_layer, source, *more)


def _vision_shape_of(folder: Path, name: str, select_layer: int, *more: bool) -> VisionShape:
    config_json = encoder_config(folder)
    tensors = tensor_shapes(folder)
    if tensors is None:
        raise _no_weights(folder, "model.vision.name", f"--vision {name}")
    tensors = encoder_tensors(folder, tensors)
    check_sizes(config_json.get("vision_config") or config_json, tensors, str(folder))
    _refuse_adapters(tensors, folder)
    shape = vision_shape_from(config_json, tensors, select_layer, str(folder), *more)
    # The number in config.json is built, that of the weights is planned.
    blocks = encoder_settings(config_json, str(folder)).blocks
    stored = shape.blocks_run - select_layer - 1
    if blocks not in (None, stored):
        raise UserError(
            f"model.vision.name: {folder}: config.json says {blocks} blocks, but the weights "
            f"{stored}. Correct the number in config.json, or download the folder again"
        )
    return shape


def _refuse_adapters(names: Iterable[str], folder: Path) -> None:
    """Raise UserError for weights with adapters, which have the names of those of `model.lora`."""
    for name in names:
        if ".lora_" in name:
            raise UserError(
                f"{folder}: its weights hold an adapter that is not merged ({escape(name)}). Merge "
                "it first (peft: merge_and_unload, then save_pretrained), and name that folder"
            )


def vision_shape_from(
    config_json: Settings,
    tensors: Shapes,
    select_layer: int,
    source: str,
    final_norm: bool = False,
    merger: bool = False,
    deepstack: bool = False,
) -> VisionShape:
    """Return the shape of a vision model from its raw config.json and parameters by stock name.

    It is timm's or one of transformers.
    """
    if "architecture" in config_json:
        check_plain_vit(tensors, escape(str(config_json["architecture"])), source)
    settings = encoder_settings(config_json, source)
    family = settings.family
    native = family.native
    unused = family.unused(final_norm, source, merger)
    tensors = family.own(tensors)
    patches = _patch_embedding(settings, tensors, source)

    blocks_run, running = _running(family, tensors, select_layer, source)

    # sizes of its images
    width = patches[0]
    image_size = patch_size = settings.image_size
    if len(patches) > 2:
        patch_size = square(patches[-2:], "patches", source)
    if native is not None:
        image_size = patch_size
    count = patches_per_image(image_size, patch_size)
    positions = count + rows(tensors, family.class_token)
    if family.positions in tensors and (stored := rows(tensors, family.positions)) != positions:
        raise UserError(
            f"{source}: images of {image_size} pixels have {positions} patches and "
            f"class tokens, but {family.positions} has {stored} rows. "
            "Correct image_size in config.json, or download the folder again"
        )

    joined = 1
    merged_width = None
    if merger:
        if native.merged not in tensors:
            raise UserError(
                f"{source}: has no {native.merged}. Leave model.vision.merger out, or download "
                "the folder again"
            )
        joined = native.block
        merged_width = tensors[native.merged][0]
    used = [name for name in running if not name.startswith(unused)]
    return VisionShape(
        source=source,
        family=family,
        width=width,
        # 64 features a head: what ViTs use that do not say otherwise
        heads=settings.heads or max(1, width // 64),
        patches_per_image=count,
        prefix_tokens=family.prefix_tokens(tensors),
        image_size=image_size,
        patch_size=patch_size,
        parameters=tuple(ParameterShape(f"vision.{name}", tensors[name]) for name in used),
        blocks_run=blocks_run,
        merge=joined,
        merged_width=merged_width,
        window=settings.window,
        full_blocks=settings.full_blocks,
        deepstack=settings.deepstack if deepstack else (),
    )


def _patch_embedding(settings: EncoderSettings, tensors: Shapes, source: str) -> Shape:
    """Return the shape of the patch convolution; raises UserError for one that is not there.

    It is (width, 3, side, side), with frames before the sides where its patches come in blocks, and
    (width, values) where it is a matrix over a patch's values.
    """
    family = settings.family
    dimensions = 4
    if family.native is not None:
        if family.native.block > 1:
            dimensions = 5
        if family.native.patches == "dy dx c":
            dimensions = 2
    patches = tensors.get(family.patches, ())
    if len(patches) != dimensions:
        raise UserError(
            f"{source}: has no {family.patches}; "
            "only vision transformers with one patch embedding are supported"
        )
    size = settings.image_size
    if dimensions == 2 and patches[1] != 3 * size**2:
        raise UserError(
            f"{source}: {family.patches} has {patches[1]} columns, but patches of {size} pixels "
            f"have {3 * size**2} values. Correct patch_size in config.json, or download "
            "the folder again"
        )
    return patches


def _running(
    family: EncoderFamily, tensors: Shapes, select_layer: int, source: str
) -> tuple[int, list[str]]:
    """Return the number of blocks that run, and the names of tensors but those of other blocks.

    Raises UserError for too many blocks or none, for blocks that are not equal, and for a selected
    one that is not there.
    """
    numbered = re.compile(re.escape(family.blocks) + r"(\d+)\.")
    block_of: dict[str, int] = {}
    blocks: dict[int, Shapes] = {}
    for name, shape in tensors.items():
        if match := numbered.match(name):
            block_of[name] = number = int(match[1])
            blocks.setdefault(number, {})[name.removeprefix(match[0])] = shape
    depth = max(blocks, default=-1) + 1
    if not 0 < depth <= MAX_LAYERS:
        raise UserError(
            f"{source}: its weights have {depth:,} blocks ({family.blocks}N); "
            f"needed are 1 to {MAX_LAYERS}"
        )
    for number in range(depth):
        if family is not TIMM_VIT and blocks.get(number, {}) != blocks.get(0, {}):
            raise UserError(
                f"{source}: its block {number} has other tensors than block 0. "
                "Download the folder again"
            )
    blocks_run = depth + select_layer + 1
    if blocks_run < 1:
        raise UserError(
            f"model.vision.select_layer: {select_layer} is out of range: "
            f"{source} has {depth} blocks, so -1 (the last) down to {-depth} (the first)"
        )
    return blocks_run, [name for name in tensors if block_of.get(name, 0) < blocks_run]
