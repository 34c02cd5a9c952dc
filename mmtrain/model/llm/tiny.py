"""Tiny models of a family: a real config at full depth with small widths, and weights that show
faults.

config of a 70B model (80 layers, 8192 wide) --shrink--> same family, 80 layers, 64 wide
    --randomise--> a test model

What decides how layers work together is kept: depth, layer types, scalings, soft caps, ratio of
query to key heads. The probe alone moves scalings and caps (`draw_scales`): at 1 nobody sees who
applies them. Attention windows become 8 tokens, so that documents of 20 tokens already reach beyond
them.
"""

import copy
import random
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmtrain.base.errors import UserError
from mmtrain.facts.settings import SYNONYMS
from mmtrain.model.llm.language import auto_class, drop_tower, is_mrope_class

HEADS = 4
HEAD_WIDTH = 16
WIDTH = HEADS * HEAD_WIDTH
MIXER_HEADS, MIXER_GROUPS = 2 * HEADS, 2  # of recurrent mixers, whose heads are as wide
ROTARY_WIDTH = 8  # deepseek's rotary part of a head, beside HEAD_WIDTH without rotation
INNER_WIDTH = 48
LOW_RANK = 32
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
# larger than usual: recurrent layers give values near 0, and dividing by them would enlarge
# rounding
NORM_EPS = 0.01
VOCABULARY = 128
WINDOW = 8  # tokens

# Attributes of transformers' configs, over all families. Only those that a config has, and that
# hold a number, are set.
_QUERY_HEADS = (*SYNONYMS["heads"], "num_heads", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_SIZES = {
    _QUERY_HEADS: HEADS,
    (*SYNONYMS["hidden_size"], "word_embed_proj_dim", "dim_model", "embed_dim"): WIDTH,
    (
        "head_dim",
        "global_head_dim",
        "kv_channels",
        "v_head_dim",
        "qk_nope_head_dim",
        "attention_head_dim",
        "swa_head_dim",
        "swa_v_head_dim",
        *SYNONYMS["mixer_state"],
        "linear_value_head_dim",
        "linear_head_dim",
        "mamba_d_head",
        "mamba_head_dim",
        "mamba_dt_rank",
    ): HEAD_WIDTH,
    (
        "intermediate_size",
        "ffn_hidden_size",
        "ffn_dim",
        "n_inner",
        "mlp_hidden_size",
        "intermediate_size_mlp",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "dense_intermediate_size",
    ): INNER_WIDTH,
    ("q_lora_rank", "kv_lora_rank"): LOW_RANK,
    ("vocab_size",): VOCABULARY,
    (
        "sliding_window",
        "attention_chunk_size",
        "window_size",
        *SYNONYMS["mixer_chunk"],
        "block_size",
    ): WINDOW,
    ("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"): MIXER_HEADS,
    ("mamba_d_ssm",): MIXER_HEADS * HEAD_WIDTH,
    ("mamba_expand", "expand"): MIXER_HEADS // HEADS,
}
_LIMITS = {
    SYNONYMS["experts"]: EXPERTS,
    (*SYNONYMS["experts_per_token"], "top_k_experts"): EXPERTS_PER_TOKEN,
    ("mamba_n_groups", "n_groups"): MIXER_GROUPS,
}
MAX_PARAMETERS = 100_000_000
_DROPOUTS = (
    "attention_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "dropout",
)

# Fractions that `draw_scales` leaves alone: what only training reads, widths, bounds of rounding
# and of first values.
_NOT_DRAWN = re.compile(
    r"drop|prob|noise|coef|loss|init|std|dim_|_dim|fraction|rotary|theta|eps|_min|_max|_floor"
)


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Copy `config` with the widths above; depth, per-layer lists and scalars stay."""
    tiny = copy.deepcopy(config)
    for part in tiny.sub_configs:
        inner = getattr(tiny, part, None)
        if inner is not None:
            setattr(tiny, part, shrink(inner))
    _shrink_sizes(tiny)

    # real ids lie beyond the tiny vocabulary
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(tiny, name, None) is not None:
            setattr(tiny, name, 0)
    for name in _DROPOUTS:
        if getattr(tiny, name, None):
            setattr(tiny, name, 0.0)
    for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"):
        if hasattr(tiny, name):
            setattr(tiny, name, NORM_EPS)
    rope = getattr(tiny, "rope_parameters", None)
    if isinstance(rope, dict):
        tiny.rope_parameters = _trim_rope(rope, getattr(tiny, "partial_rotary_factor", None))
    tiny.use_cache = False
    return tiny


def _shrink_sizes(tiny: PreTrainedConfig) -> None:
    """Set heads, widths and limits of a config, each only where it has a number."""

    def number(name: str) -> int | None:
        value = getattr(tiny, name, None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    heads = next(filter(None, map(number, _QUERY_HEADS)), HEADS)
    for name in _KEY_HEADS:
        if number(name):
            setattr(tiny, name, max(1, HEADS // max(1, heads // number(name))))
    keys = number("linear_num_key_heads")
    values = number("linear_num_value_heads")
    if keys and values:
        tiny.linear_num_key_heads = max(1, MIXER_HEADS * keys // values)

    for names, size in _SIZES.items():
        for name in names:
            value = getattr(tiny, name, None)
            if isinstance(value, (list, tuple)):
                setattr(tiny, name, [size] * len(value))
            elif number(name) is not None:
                setattr(tiny, name, size)
    if number("qk_rope_head_dim") is not None:
        # multi-head latent attention: deepseek
        tiny.qk_rope_head_dim = ROTARY_WIDTH
        for name, width in (("qk_head_dim", HEAD_WIDTH + ROTARY_WIDTH), ("head_dim", ROTARY_WIDTH)):
            if number(name) is not None:
                setattr(tiny, name, width)
    elif hasattr(tiny, "head_dim") and tiny.head_dim is None:
        tiny.head_dim = HEAD_WIDTH

    for names, limit in _LIMITS.items():
        for name in names:
            if (number(name) or 0) > limit:
                setattr(tiny, name, limit)
    if (number("n_group") or 0) > 1:
        tiny.n_group = 2
        tiny.topk_group = 1


def _trim_rope(
    parameters: dict[str, Any],
    partial: float | None,
) -> dict[str, Any]:
    """Cut lists of one factor per frequency, and M-RoPE's sections, to HEAD_WIDTH; some have them
    per layer type.
    """
    rotated = parameters.get("partial_rotary_factor") or partial or 1.0
    frequencies = int(HEAD_WIDTH * rotated) // 2
    trimmed = dict(parameters)
    for key, value in parameters.items():
        if isinstance(value, dict):
            trimmed[key] = _trim_rope(value, partial)
        elif isinstance(value, (list, tuple)) and "factor" in key:
            trimmed[key] = list(value[:frequencies])
        elif key == "mrope_section":
            height, width = (part * frequencies // sum(value) for part in value[1:])
            trimmed[key] = [frequencies - height - width, height, width]
    return trimmed


def draw_scales(
    config: PreTrainedConfig,
    seed: int,
) -> PreTrainedConfig:
    """Copy `config` with other scales and caps, so that none is 1, where it would not matter who
    applies it.

    Every number that config.json may give as a fraction is multiplied by its own factor of 0.6 to
    0.9, also in lists. Left alone: counts, widths, rotary parameters and what `_NOT_DRAWN` names.
    """
    changed = copy.deepcopy(config)
    factors = random.Random(seed)
    text = changed.get_text_config()

    def draw(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(draw, value)]
        return value * factors.uniform(0.6, 0.9) if isinstance(value, int | float) else value

    for name, field in text.__dataclass_fields__.items():
        if "float" in str(field.type) and not _NOT_DRAWN.search(name):
            setattr(text, name, draw(getattr(text, name)))
    return changed


def tiny_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Make a frozen fp32 LLM of `config`'s family at its depth; raises UserError for one that stays
    large.
    """
    tiny = shrink(config)
    made_by = auto_class(config)
    if is_mrope_class(tiny):
        tiny.vision_config.num_hidden_layers = 1
    with torch.device("meta"):
        hollow = made_by.from_config(
            tiny,
            attn_implementation=None,
            trust_remote_code=False,
        )
    drop_tower(hollow)
    parameters = sum(parameter.numel() for parameter in hollow.parameters())
    if parameters > MAX_PARAMETERS:
        raise UserError(
            f"{config.model_type} cannot be checked: shrunk to {WIDTH} wide it still "
            f"has {parameters / 1e6:,.0f} million parameters, so its config has unknown sizes"
        )
    # not the GPUs' generators: callers restore the CPU's alone
    torch.default_generator.manual_seed(seed)
    model = made_by.from_config(
        tiny,
        dtype=torch.float32,
        attn_implementation=None,
        trust_remote_code=False,
    )
    drop_tower(model)
    randomise(model.eval().requires_grad_(False), seed)
    return model


def randomise(model: nn.Module, seed: int) -> None:
    """Draw weights of variance 1 / fan-in and move norms and biases off their start, so that every
    fault shows.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
