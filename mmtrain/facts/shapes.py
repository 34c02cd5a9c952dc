"""Shapes of the models in a run, for planning: read as raw JSON, without torch, transformers, timm or the network.

Sources, in this order: the model's folder (or its snapshot in the local Hugging Face cache): config.json and the
headers of its safetensors files; then the records in `mmtrain/facts/recorded/` and the cache, by hub id or timm
name (`mmtrain record` adds one); then timm, for its own names. Importing AutoConfig or timm imports torch, 3 s each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

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
    layer_kinds,
    llm_config,
    llm_tensors,
    parameters_on_disk,
    remote_code,
    scaled_by,
)
from mmtrain.facts.model_files import Shape, find_model_folder, no_model, tensor_shapes
from mmtrain.facts.recorded_shapes import find_recorded
from mmtrain.facts.settings import MAX_TOKEN_ID, check_sizes, is_whole
from mmtrain.facts.timm_models import timm_config, timm_record
from mmtrain.facts.vision_files import encoder_settings, is_timm_name, patches_per_image, square


@dataclass(frozen=True, slots=True)
class ParameterShape:
    name: str  # the global one
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class LlmShape:
    """What planning needs to know of an LLM. Widths are in elements, counts per layer."""

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
    head: tuple[ParameterShape, ...]  # final norm, LM head (the embedding's shape once more where tied)
    norm_eps: float | None = None  # of its RMS norms; None where config.json says nothing
    mixer_state: int | None = None  # of recurrent layers: keys that a head's state has; None: as many as values
    mixer_chunk: int = 64  # of recurrent layers: tokens that stock code computes at once; 64 in the gated delta rule
    scaled_by: str = ""  # key of a scale or cap that multimodal classes lack


@dataclass(frozen=True, slots=True)
class VisionShape:
    """What planning needs to know of a vision encoder, cut after the selected block."""

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
        """Why slices cannot hand its hidden states on; "" where they can."""
        if self.deepstack:
            return f"has DeepStack, which takes the features of blocks {', '.join(map(str, self.deepstack))} too"
        if self.family.native is not None and self.prefix_tokens:
            return "has a class token beside images of any size"
        return ""

    @property
    def feature_width(self) -> int:
        return (self.merged_width or self.width) * (1 + len(self.deepstack))

    @property
    def features_per_image(self) -> int:
        return self.patches_per_image // self.merge**2

    def with_cells(self, factor: int) -> VisionShape:
        """Return the shape with cells of `factor` x `factor` features where the encoder takes images of any size."""
        if self.family.native is None:
            return self
        side = factor * self.merge
        return replace(self, image_size=side * self.patch_size, patches_per_image=side**2)


NO_VISION = VisionShape("no encoder", TIMM_VIT, 0, 1, 0, 0, 0, 1, (), 0)  # of a run on text alone


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether a trainable pattern names this parameter or a module around it; `*` in a pattern crosses dots."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*") for pattern in patterns)


def llm_shape(path: str) -> LlmShape:
    """Shape of an LLM given as a folder or a hub id; raises UserError if it is not known, or cannot be staged."""
    folder, config_json, tensors = find_model_folder(path), {}, None
    if folder is not None:
        config_json = llm_config(folder)
        check_family(config_json)
        tensors = tensor_shapes(folder)
    if tensors is None and (recorded := find_recorded("llm", path)) is not None:
        return llm_shape_from(recorded.config, recorded.parameters, f"recorded {recorded.id}")
    if folder is None:
        raise no_model(path)
    if tensors is None:
        raise _no_weights(folder, "model.llm.path", path)
    tensors = llm_tensors(folder, tensors)
    check_sizes(config_json, tensors, str(folder))
    _refuse_adapters(tensors, folder)
    return llm_shape_from(config_json, parameters_on_disk(config_json["model_type"], tensors), str(folder))


def _no_weights(folder: Path, key: str, arguments: str) -> UserError:
    return UserError(
        f"{folder}: has config.json but no model.safetensors. Download the weights or, to plan without them, record "
        f"the model and use NAME as {key}: mmtrain record {arguments} --id NAME"
    )


def llm_shape_from(config_json: dict[str, Any], parameters: dict[str, Shape], source: str) -> LlmShape:
    """LlmShape of a causal LM from its raw config.json and its parameters under their stock names."""
    check_family(config_json)
    layers = _first(config_json, "num_hidden_layers", "n_layer", "n_layers")
    front: list[ParameterShape] = []
    head: list[ParameterShape] = []
    decoder: dict[int, list[ParameterShape]] = {}
    for stock_name, shape in parameters.items():
        parameter = ParameterShape(canonical_name(stock_name), shape)
        if match := re.match(r"llm\.layers\.(\d+)\.", parameter.name):
            decoder.setdefault(int(match[1]), []).append(parameter)
        elif parameter.name.startswith(("llm.norm.", "llm.head.")) or ".project_out." in parameter.name:
            head.append(parameter)
        else:
            front.append(parameter)
    embedding = next((p for p in front if p.name == "llm.embedding.weight"), None)
    if embedding is None or len(embedding.shape) != 2 or not decoder:
        raise UserError(
            f"{source}: no embedding or no decoder layers among its {len(parameters)} tensors "
            f"(first: {next(iter(parameters), 'none')}). {remote_code(config_json) or 'Is it a causal LLM?'}"
        )
    if layers is None:
        layers = max(decoder) + 1
    if layers > MAX_LAYERS:
        raise UserError(f"{source}: the weights have {layers:,} decoder layers; at most {MAX_LAYERS:,} are supported")
    missing = [index for index in range(layers) if index not in decoder]
    if missing:
        raise UserError(f"{source}: config.json says {layers} decoder layers, but the weights lack layer {missing[0]}")
    # Layers of multi-token prediction (deepseek_v3's) are on disk behind the model's own.
    stored, known = max(decoder) + 1, layers + (config_json.get("num_nextn_predict_layers") or 0)
    if stored > known:
        raise UserError(
            f"{source}: config.json says {layers} decoder layers, but the weights have {stored}. Correct "
            "num_hidden_layers, or download the folder again"
        )
    has_head = any(p.name == "llm.head.weight" for p in head)
    tied = config_json.get("tie_word_embeddings")
    if tied is None:
        tied = config_json["model_type"] in TIED_BY_DEFAULT
    if tied:
        head = [p for p in head if p.name != "llm.head.weight"]
        head.append(ParameterShape("llm.head.weight", embedding.shape))
    elif not has_head:
        raise UserError(
            f"{source}: the weights lack the LM head, but config.json does not tie it to the embedding. Write "
            "tie_word_embeddings: true into config.json if they are one matrix, or download the folder again"
        )
    vocab_size = embedding.shape[0]
    if config_json.get("vocab_size") not in (None, vocab_size):
        raise UserError(
            f"{source}: config.json says vocab_size {config_json['vocab_size']}, but the embedding has {vocab_size:,}"
        )
    if is_whole(padding := config_json.get("pad_token_id"), vocab_size, MAX_TOKEN_ID):
        raise UserError(
            f"{source}: config.json says pad_token_id {padding}, but the embedding has {vocab_size:,} rows. Write "
            "null: training pads nothing"
        )
    hidden_size = _first(config_json, "hidden_size", "n_embd", "d_model") or embedding.shape[1]
    heads = _first(config_json, "num_attention_heads", "n_head")
    if heads is None:
        raise UserError(f"{source}: config.json has no num_attention_heads")
    experts = _first(config_json, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 0
    head_dim = config_json.get("head_dim")
    if config_json.get("qk_rope_head_dim"):  # multi-head latent attention (deepseek_v3): head_dim is the rope part only
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
        kv_heads=1 if config_json.get("multi_query") else config_json.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        tied=bool(tied),
        experts=experts,
        experts_per_token=_first(config_json, "num_experts_per_tok", "moe_topk", "moe_k") or 0,
        window=_window(config_json),
        front=tuple(front),
        decoder=tuple(tuple(decoder[index]) for index in range(layers)),
        head=tuple(head),
        norm_eps=config_json.get("rms_norm_eps"),
        mixer_state=_first(config_json, "linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
        mixer_chunk=_first(config_json, "mamba_chunk_size", "chunk_size") or 64,
        scaled_by=scaled_by(config_json),
    )


def _refuse_other_rotations(config_json: dict[str, Any], head_dim: int, source: str) -> None:
    """Raise UserError where M-RoPE's sections, in pairs of features, are not all that a head rotates."""
    rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    share = rope.get("partial_rotary_factor") or config_json.get("partial_rotary_factor") or 1
    if sections and 2 * sum(sections) != int(head_dim * share):
        raise UserError(
            f"{source}: config.json says mrope_section {sections}, of {2 * sum(sections)} features, but a head of "
            f"{head_dim} rotates {int(head_dim * share)}. Correct head_dim or mrope_section"
        )


def _first(config_json: dict[str, Any], *keys: str) -> int | None:
    return next((config_json[key] for key in keys if config_json.get(key) is not None), None)


def _window(config_json: dict[str, Any]) -> int | None:
    window = config_json.get("sliding_window")
    if not window or config_json.get("use_sliding_window") is False:
        return None
    kinds = layer_kinds(config_json)
    if not kinds:  # older files do not list the kinds; gemma2, for one, then alternates
        return window if config_json["model_type"] in ("mistral", "mixtral", "phi3", "starcoder2") else None
    return window if all(kind == "sliding_attention" for kind in kinds) else None


def vision_shape(
    name: str, select_layer: int, final_norm: bool = False, merger: bool = False, deepstack: bool = False
) -> VisionShape:
    """Shape of the part of a vision encoder that runs: up to the block that `select_layer` (-1: the last) selects.

    `name` is what `load_vision` takes; with `final_norm` the last norm runs too, with `merger` the encoder's own one.
    `deepstack` adds the features of DeepStack's blocks, if it has any. Raises UserError if it is not known.
    """
    more = final_norm, merger, deepstack
    folder, recorded, source = find_model_folder(name), find_recorded("vision", name), f"timm's {name}"
    # Encoders with pickled weights only (openai/clip-vit-large-patch14-336) are planned from their record too.
    if recorded is not None and (folder is None or not any(folder.glob("model.safetensors*"))):
        source = f"recorded {recorded.id}"
    elif folder is not None:
        return _vision_shape_of(folder, name, select_layer, *more)
    elif not is_timm_name(name):
        raise no_model(name)
    else:
        timm_config(name)  # weights that timm does not have are refused here, not when they are loaded
        recorded = timm_record(name)
    return vision_shape_from(recorded.config, recorded.parameters, select_layer, source, *more)


def _vision_shape_of(folder: Path, name: str, select_layer: int, *more: bool) -> VisionShape:
    config_json, tensors = encoder_config(folder), tensor_shapes(folder)
    if tensors is None:
        raise _no_weights(folder, "model.vision.name", f"--vision {name}")
    tensors = encoder_tensors(folder, tensors)
    check_sizes(config_json.get("vision_config") or config_json, tensors, str(folder))
    _refuse_adapters(tensors, folder)
    shape = vision_shape_from(config_json, tensors, select_layer, str(folder), *more)
    # The number in config.json is built, that of the weights is planned.
    blocks, stored = encoder_settings(config_json, str(folder)).blocks, shape.blocks_run - select_layer - 1
    if blocks not in (None, stored):
        raise UserError(
            f"model.vision.name: {folder}: config.json says {blocks} blocks, but the weights {stored}. Correct the "
            "number in config.json, or download the folder again"
        )
    return shape


def _refuse_adapters(names: Iterable[str], folder: Path) -> None:
    """Raise UserError for weights with adapters beside them: those of `model.lora` have the same names."""
    if (adapter := next((name for name in names if ".lora_" in name), None)) is not None:
        raise UserError(
            f"{folder}: its weights hold an adapter that is not merged ({escape(adapter)}). Merge it first "
            "(peft: merge_and_unload, then save_pretrained), and name that folder"
        )


def vision_shape_from(
    config_json: dict[str, Any],
    tensors: dict[str, Shape],
    select_layer: int,
    source: str,
    final_norm: bool = False,
    merger: bool = False,
    deepstack: bool = False,
) -> VisionShape:
    """VisionShape from the raw config.json of a timm or Hugging Face vision model and its parameters' stock names."""
    if "architecture" in config_json:
        check_plain_vit(tensors, escape(str(config_json["architecture"])), source)
    family, image_size, heads, _, window, full_blocks, taken = encoder_settings(config_json, source)
    unused, tensors = family.unused(final_norm, source, merger), family.own(tensors)
    native, patches = family.native, tensors.get(family.patches, ())
    is_flat = native is not None and native.patches == "dy dx c"  # a matrix over a patch's values
    if len(patches) != (2 if is_flat else 5 if native is not None and native.block > 1 else 4):
        raise UserError(
            f"{source}: has no {family.patches}; only vision transformers with one patch embedding are supported"
        )
    numbered = re.compile(re.escape(family.blocks) + r"(\d+)\.")
    index_of = {name: int(match[1]) for name in tensors if (match := numbered.match(name))}
    depth = max(index_of.values(), default=-1) + 1
    if not 0 < depth <= MAX_LAYERS:
        raise UserError(f"{source}: its weights have {depth:,} blocks ({family.blocks}N); needed are 1 to {MAX_LAYERS}")
    blocks: list[dict[str, Shape]] = [{} for _ in range(depth)]
    for name, index in index_of.items():
        blocks[index][numbered.sub("", name)] = tensors[name]
    if family is not TIMM_VIT and any(block != blocks[0] for block in blocks):
        odd = next(index for index, block in enumerate(blocks) if block != blocks[0])
        raise UserError(f"{source}: its block {odd} has other tensors than block 0. Download the folder again")
    blocks_run = depth + select_layer + 1
    if blocks_run < 1:
        raise UserError(
            f"model.vision.select_layer: {select_layer} is out of range: {source} has {depth} blocks, "
            f"so -1 (the last) down to {-depth} (the first)"
        )
    width, patch_size = patches[0], image_size if is_flat else square(patches[-2:], "patches", source)
    if is_flat and patches[1] != 3 * patch_size**2:
        raise UserError(
            f"{source}: {family.patches} has {patches[1]} columns, but patches of {patch_size} pixels "
            f"have {3 * patch_size**2} values. Correct patch_size in config.json, or download the folder again"
        )
    if native is not None:
        image_size = patch_size
    count = patches_per_image(image_size, patch_size)
    merged = tensors.get(native.merged or "") if merger else None
    if merger and merged is None:
        raise UserError(
            f"{source}: has no {native.merged}. Leave model.vision.merger out, or download the folder again"
        )
    positions = count + rows(tensors, family.class_token)
    if family.positions in tensors and (stored := rows(tensors, family.positions)) != positions:
        raise UserError(
            f"{source}: images of {image_size} pixels have {positions} patches and class tokens, but "
            f"{family.positions} has {stored} rows. Correct image_size in config.json, or download the folder again"
        )
    return VisionShape(
        source=source,
        family=family,
        width=width,
        heads=heads or max(1, width // 64),  # 64 features a head: what ViTs use that do not say otherwise
        patches_per_image=count,
        prefix_tokens=family.prefix_tokens(tensors),
        image_size=image_size,
        patch_size=patch_size,
        parameters=tuple(
            ParameterShape(f"vision.{name}", shape)
            for name, shape in tensors.items()
            if index_of.get(name, 0) < blocks_run and not name.startswith(unused)
        ),
        blocks_run=blocks_run,
        merge=native.block if merger else 1,
        merged_width=merged and merged[0],
        window=window,
        full_blocks=full_blocks,
        deepstack=taken if deepstack else (),
    )
