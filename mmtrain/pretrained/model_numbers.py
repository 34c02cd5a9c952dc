"""What the numbers in a model's config.json may be: whole, positive, and no larger than any model has.

They are compared before anything is computed or made from them: 10^9 layers would be a list, a text a traceback, and a
head count that does not divide would only show when a rank builds the model. The largest published values: hidden size
20,480, 126 layers, 128 heads of 576, 262,400 tokens, 512 experts.
"""

from __future__ import annotations

import math
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.small_files import shortened
from mmtrain.config.limits import MAX_LAYERS

MAX_EXPERTS = 100_000

# Smallest and largest by the names that families use for the same thing.
LLM_BOUNDS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, 1_000_000)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), (1, MAX_LAYERS)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), (1, 10_000)),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (0, 100_000)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (0, MAX_EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), (0, MAX_EXPERTS)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), (1, 1_000_000_000)),
    "sliding_window": (0, 1_000_000_000),
}
VISION_BOUNDS = {
    "hidden_size": (1, 1_000_000),
    "num_hidden_layers": (1, MAX_LAYERS),
    "num_attention_heads": (1, 10_000),
    "num_heads": (1, 10_000),
    "depth": (1, MAX_LAYERS),
    "intermediate_size": (1, 1_000_000),
    "image_size": (1, 30_000),
    "patch_size": (1, 30_000),
}


def check_llm_numbers(config_json: dict) -> None:
    """Raises UserError for a causal LM's raw config.json whose numbers, flags or layer kinds no model can have."""
    _check(config_json, LLM_BOUNDS, "config.json")
    for key in ("tie_word_embeddings", "use_sliding_window", "multi_query"):
        if not isinstance(config_json.get(key), bool | None):
            raise _wrong("config.json", key, config_json[key], "true or false")
    for key in ("layer_types", "layers_block_type", "block_types"):
        kinds = config_json.get(key)
        if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
            raise _wrong("config.json", key, kinds, "a list of texts")
    heads = config_json.get("num_attention_heads") or config_json.get("n_head")
    groups, hidden = config_json.get("num_key_value_heads"), config_json.get("hidden_size") or config_json.get("n_embd")
    if heads and groups and heads % groups:
        raise UserError(f"config.json says {heads} attention heads in {groups} groups, which do not divide them")
    if heads and hidden and not (config_json.get("head_dim") or config_json.get("qk_rope_head_dim")) and hidden % heads:
        raise UserError(f"config.json says hidden size {hidden} and {heads} attention heads, which do not divide it")


def check_vision_numbers(facts: dict, source: str) -> None:
    """Raises UserError for the facts of a Hugging Face or timm encoder, in `source`, that no encoder can have."""
    _check(facts, VISION_BOUNDS, source)
    heads, hidden = facts.get("num_attention_heads"), facts.get("hidden_size")
    if heads and hidden and hidden % heads:
        raise UserError(f"{source} says hidden size {hidden} and {heads} attention heads, which do not divide it")


def is_whole(value: Any, least: int, most: int) -> bool:
    """Whether a value of JSON is a whole number in these bounds; true and 4.0 are none."""
    return type(value) is int and least <= value <= most


def is_finite(value: Any) -> bool:
    """Whether a value of JSON is a number that is neither infinite nor NaN."""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def _check(facts: dict, bounds: dict[str, tuple[int, int]], source: str) -> None:
    for key, (least, most) in bounds.items():
        value = facts.get(key)
        if value is not None and not is_whole(value, least, most):
            raise _wrong(source, key, value, f"a whole number from {least} to {most:,}")


def _wrong(source: str, key: str, value: Any, needed: str) -> UserError:
    return UserError(f"{source} says {key} {_shown(value)}, which no model has; needed is {needed}")


def _shown(value: Any) -> str:
    return "a very large number" if type(value) is int and abs(value) > 10**30 else shortened(repr(value))
