"""Types and bounds of keys in the JSON files of a model's folder, checked when a file is read.

The bounds are far above what published models have. They keep a damaged or absurd file from being
hours of work, a traceback, or memory that a rank lacks.
"""

from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.limits import MAX_LAYERS

Settings = dict[str, Any]  # the content of a JSON file
Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # of tensors, by name
# The keys of one fact in config.json, in the order in which they are read.
SYNONYMS = {
    # of an LLM
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk", "moe_k"),
    "mixer_state": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
    "mixer_chunk": ("mamba_chunk_size", "chunk_size"),
    "layer_kinds": ("layer_types", "layers_block_type", "block_types"),
    "quantisation": ("quantization_config", "compression_config"),
    # of an encoder
    "blocks": ("num_hidden_layers", "depth"),
    "encoder_heads": ("num_attention_heads", "num_heads"),
}
_WIDTHS = (
    *SYNONYMS["hidden_size"],
    "intermediate_size",
    "embed_dim",
    "alignment_intermediate_size",
)
_LAYERS = (*SYNONYMS["layers"], *SYNONYMS["blocks"])
_SIDES = ("image_size", "img_size", "patch_size", "crop_size")
# ends of keys whose numbers need not be whole
_FRACTIONS = ("_ratio", "_factor", "_eps", "model_max_length")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens")
_SINGLE = ("resample", "bos_token_id", "pad_token_id")
MAX_TOKEN_ID = 1_000_000_000


def _by_key(table: dict[Any, tuple[str, ...]]) -> Settings:
    """Return the values of a table by each of the keys that it lists for them."""
    values: Settings = {}
    for value, keys in table.items():
        values |= dict.fromkeys(keys, value)
    return values


# Keys by the smallest and the largest number that they may have, in whatever part of a file they
# stand. Models of several stages list numbers.
_BOUNDS = _by_key(
    {
        (1, 1_000_000): _WIDTHS,
        (1, MAX_LAYERS): _LAYERS,
        (1, 10_000): (*SYNONYMS["heads"], *SYNONYMS["encoder_heads"], "num_key_value_heads"),
        (0, 100_000): (
            "head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            *SYNONYMS["experts"],
            *SYNONYMS["experts_per_token"],
        ),
        (1, 100_000): (
            *SYNONYMS["mixer_state"],
            *SYNONYMS["mixer_chunk"],
            "image_seq_len",
            "image_seq_length",
            "num_image_tokens",
        ),
        (1, 1_000_000_000): ("vocab_size", "max_position_embeddings", "n_positions"),
        (0, 1_000_000): ("num_labels", "num_classes"),
        (0, 1_000_000_000): ("sliding_window",),
        (0, 1_000): ("num_register_tokens",),
        (1, 16): ("num_channels",),
        (0, 100): (
            "num_additional_image_tokens",
            "min_patches",
            "mlp_ratio",
            "num_nextn_predict_layers",
        ),
        (0, 1): ("rms_norm_eps",),
        (0.01, 100): ("downsample_ratio",),
        (0.0001, 1): ("rescale_factor",),
        (0.001, 1): ("partial_rotary_factor",),
        (0, 5): ("resample",),  # of PIL.Image.Resampling
        (1, 4_096): ("height", "width", "tile_size"),  # of pictures for the encoder; largest: 1,540
        (1, 100): (
            "max_patches",
            "max_num_tiles",
            "scale_factor",
            "downsample_factor",
            "pooling_ratio",
            "projector_pooling_ratio",
        ),
        (1, 30_000): _SIDES,
        (1, 1e31): ("model_max_length",),  # transformers writes 1e30 for a tokenizer without one
        (-1, MAX_TOKEN_ID): _TOKENS,
    }
)
_OTHERS = _by_key(
    {
        (dict, "an object"): (
            "text_config",
            "vision_config",
            "model_args",
            "pretrained_cfg",
            "image_processor",
            "rope_parameters",
            "rope_scaling",
            *SYNONYMS["quantisation"],
        ),
        (bool, "true or false"): (
            "tie_word_embeddings",
            "use_sliding_window",
            "multi_query",
            "do_resize",
            "do_rescale",
            "do_normalize",
        ),
        (str, "a text"): ("model_type", "architecture"),
        (list, "a list of texts"): SYNONYMS["layer_kinds"],
    }
)


def first(config_json: Settings, fact: str) -> Any:
    """Return the value of the first key of a fact that a config.json has; None: it has none."""
    values = map(config_json.get, SYNONYMS[fact])
    return next((value for value in values if value is not None), None)


def check_settings(content: Any, source: str) -> None:
    """Raise UserError for a value in a model's JSON file that no model has.

    `source` names the file.
    """
    if isinstance(content, list):
        for inner in content:
            check_settings(inner, source)
    if not isinstance(content, dict):
        return
    for key, value in content.items():
        if value is None:
            continue
        needed = _needed(key, value)
        if needed is not None:
            raise UserError(
                f"{source} says {key} {escape(repr(value))}, which no model has; needed is {needed}"
            )
        check_settings(value, source)


def _needed(key: str, value: Any) -> str | None:
    """Return the kind of value that a key needs; None if this one is right."""
    # a side may be {"height": ..., "width": ...}
    if key in _BOUNDS and not (key in _SIDES and isinstance(value, dict)):
        least, most = _BOUNDS[key]
        numbers = [value]
        if isinstance(value, list) and key not in _SINGLE:
            numbers = value
        kinds: tuple[type, ...] = (int,)
        needed = "a whole number"
        if key.endswith(_FRACTIONS):
            kinds = (int, float)
            needed = "a number"
        if not all(type(number) in kinds and least <= number <= most for number in numbers):
            return f"{needed} from {least} to {most:,}"
    if key in _OTHERS:
        kind, needed = _OTHERS[key]
        if not isinstance(value, kind):
            return needed
        if kind is list and not all(isinstance(inner, str) for inner in value):
            return needed
    if key == "mrope_section":
        is_list = isinstance(value, list) and len(value) == 3
        if not is_list or not all(is_whole(number, 0, 1_000) for number in value):
            return "three whole numbers from 0 to 1,000"
    return None


def check_sizes(config_json: Settings, shapes: Shapes, folder: str) -> None:
    """Raise UserError where a config.json asks for a larger model than the folder's tensors are."""
    largest = max(map(max, filter(None, shapes.values())), default=0)
    for key, value in config_json.items():
        if isinstance(value, dict):
            check_sizes(value, shapes, folder)
        elif key in _LAYERS and is_whole(value, len(shapes) + 1, MAX_LAYERS):
            raise UserError(
                f"{folder}: config.json says {key} {value}, but there are {len(shapes)} tensors"
            )
        elif key in (*_WIDTHS, "vocab_size") and is_whole(value, largest + 1, _BOUNDS[key][1]):
            raise UserError(
                f"{folder}: config.json says {key} {value}, but no tensor is wider than {largest:,}"
            )


def is_whole(value: Any, least: int, most: float) -> bool:
    """Whether a value of JSON is a whole number in these bounds; true and 4.0 are none."""
    return type(value) is int and least <= value <= most


def check_layers(part: Settings, source: str) -> None:
    """Raise UserError for layers that differ in width or heads, or heads that do not divide it."""
    for key in _BOUNDS:
        value = part.get(key)
        if key not in (*_SIDES, *_TOKENS) and isinstance(value, list | dict):
            raise UserError(
                f"{source} says {key} {escape(repr(value))}; needed is one number for all layers"
            )
    heads = first(part, "heads") or part.get("num_heads")
    groups = part.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise UserError(
            f"{source} says {heads} attention heads in {groups} groups, which do not "
            "divide the heads"
        )
    hidden = first(part, "hidden_size")
    says_width = part.get("head_dim") or part.get("qk_rope_head_dim")
    if heads and hidden and not says_width and hidden % heads:
        raise UserError(
            f"{source} says hidden size {hidden} and {heads} attention heads, which "
            "do not divide it"
        )
