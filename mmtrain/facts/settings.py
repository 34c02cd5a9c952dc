"""What the JSON files of a model folder may say: types and bounds by key, checked when a file is read.

The bounds are far above what published models have. They keep a damaged or absurd file from being hours of work, a
traceback, or memory that a rank lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.limits import MAX_LAYERS

_WIDTHS = ("hidden_size", "intermediate_size", "n_embd", "d_model", "embed_dim", "alignment_intermediate_size")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "depth")
_SIDES = ("image_size", "img_size", "patch_size", "crop_size")
_FRACTIONS = ("_ratio", "_factor", "_eps", "model_max_length")  # ends of keys whose numbers need not be whole
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens")
_SINGLE = ("resample", "bos_token_id", "pad_token_id")
MAX_TOKEN_ID = 1_000_000_000
# Smallest and largest number, in whatever part of a file the key stands. Models of several stages list numbers.
_BOUNDS = {
    **dict.fromkeys(_WIDTHS, (1, 1_000_000)),
    **dict.fromkeys(_LAYERS, (1, MAX_LAYERS)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head"), (1, 10_000)),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (0, 100_000)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (0, 100_000)),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), (0, 100_000)),
    **dict.fromkeys(("linear_key_head_dim", "mamba_d_state", "ssm_state_size"), (1, 100_000)),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), (1, 100_000)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), (1, 1_000_000_000)),
    **dict.fromkeys(("num_labels", "num_classes"), (0, 1_000_000)),
    **{"sliding_window": (0, 1_000_000_000), "num_register_tokens": (0, 1_000), "num_channels": (1, 16)},
    **dict.fromkeys(("image_seq_len", "image_seq_length", "num_image_tokens"), (1, 100_000)),
    **dict.fromkeys(("num_additional_image_tokens", "min_patches"), (0, 100)),
    "mlp_ratio": (0, 100),
    "rms_norm_eps": (0, 1),
    "downsample_ratio": (0.01, 100),
    "rescale_factor": (0.0001, 1),
    "partial_rotary_factor": (0.001, 1),
    "num_nextn_predict_layers": (0, 100),
    "resample": (0, 5),  # of PIL.Image.Resampling
    **dict.fromkeys(("height", "width", "tile_size"), (1, 4_096)),  # of pictures for the encoder; largest: 1,540
    **dict.fromkeys(("max_patches", "max_num_tiles", "scale_factor", "downsample_factor"), (1, 100)),
    **dict.fromkeys(("pooling_ratio", "projector_pooling_ratio"), (1, 100)),
    **dict.fromkeys(_SIDES, (1, 30_000)),
    "model_max_length": (1, 1e31),  # transformers writes 1e30 for a tokenizer without one
    **dict.fromkeys(_TOKENS, (-1, MAX_TOKEN_ID)),
}
_OTHERS = {
    **dict.fromkeys(("text_config", "vision_config", "model_args", "pretrained_cfg"), (dict, "an object")),
    **dict.fromkeys(("quantization_config", "compression_config", "image_processor"), (dict, "an object")),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), (dict, "an object")),
    **dict.fromkeys(("model_type", "architecture"), (str, "a text")),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "multi_query"), (bool, "true or false")),
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), (bool, "true or false")),
    **dict.fromkeys(("layer_types", "layers_block_type", "block_types"), (list, "a list of texts")),
}


def check_settings(content: Any, source: str) -> None:
    """Raise UserError for a value in a model's JSON file that no model has. `source` names the file."""
    if isinstance(content, list):
        for inner in content:
            check_settings(inner, source)
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if value is None:
            continue
        is_size = isinstance(value, dict) and key in _SIDES  # {"height": ..., "width": ...}
        if key in _BOUNDS and not is_size:
            least, most = _BOUNDS[key]
            is_fraction = key.endswith(_FRACTIONS)
            numbers = value if isinstance(value, list) and key not in _SINGLE else [value]
            kinds = (int, float) if is_fraction else (int,)
            if not all(type(number) in kinds and least <= number <= most for number in numbers):
                needed = "a number" if is_fraction else "a whole number"
                raise _impossible(source, key, value, f"{needed} from {least} to {most:,}")
        if key in _OTHERS:
            kind, needed = _OTHERS[key]
            if not isinstance(value, kind) or (kind is list and not all(isinstance(inner, str) for inner in value)):
                raise _impossible(source, key, value, needed)
        if key == "mrope_section":
            is_list = isinstance(value, list) and len(value) == 3
            if not is_list or not all(is_whole(number, 0, 1_000) for number in value):
                raise _impossible(source, key, value, "three whole numbers from 0 to 1,000")
        check_settings(value, source)


def check_sizes(config_json: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: str) -> None:
    """Raise UserError where a config.json asks for a larger model than the folder's tensors are."""
    largest = max((side for shape in shapes.values() for side in shape), default=0)
    for key, value in config_json.items():
        if isinstance(value, dict):
            check_sizes(value, shapes, folder)
        elif key in _LAYERS and is_whole(value, len(shapes) + 1, MAX_LAYERS):
            raise UserError(f"{folder}: config.json says {key} {value}, but there are {len(shapes)} tensors")
        elif key in (*_WIDTHS, "vocab_size") and is_whole(value, largest + 1, _BOUNDS[key][1]):
            raise UserError(f"{folder}: config.json says {key} {value}, but no tensor is wider than {largest:,}")


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether a value of JSON is a whole number in these bounds; true and 4.0 are none."""
    return type(value) is int and least <= value <= most


def check_layers(part: dict[str, Any], source: str) -> None:
    """Raise UserError for a config.json whose layers differ in width or heads, or have heads that do not divide it."""
    for key in _BOUNDS:
        value = part.get(key)
        if key not in (*_SIDES, *_TOKENS) and isinstance(value, list | dict):
            raise UserError(f"{source} says {key} {escape(repr(value))}; needed is one number for all layers")
    heads = part.get("num_attention_heads") or part.get("n_head") or part.get("num_heads")
    groups, hidden = part.get("num_key_value_heads"), part.get("hidden_size") or part.get("n_embd")
    if heads and groups and heads % groups:
        raise UserError(f"{source} says {heads} attention heads in {groups} groups, which do not divide the heads")
    if heads and hidden and not (part.get("head_dim") or part.get("qk_rope_head_dim")) and hidden % heads:
        raise UserError(f"{source} says hidden size {hidden} and {heads} attention heads, which do not divide it")


def _impossible(source: str, key: str, value: Any, needed: str) -> UserError:
    return UserError(f"{source} says {key} {escape(repr(value))}, which no model has; needed is {needed}")
