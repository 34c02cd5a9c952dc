"""Settings of every supported family, for transformers' configs of six layers; configs of families
that an older transformers may lack.
"""

import pytest
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

HYBRIDS: dict[str, dict] = {
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3, "block_auto_adjust_ff_dim": False},
    "lfm3": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3, "num_local_experts": 0},
    "falcon_h1": {},
    "bamba": {"attn_layer_indices": [1, 4]},
    "nemotron_h": {"hybrid_override_pattern": "M*M-ME"},
    "olmo_hybrid": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {},
    "minimax": {},
}

# Settings that a released model has and that transformers' default config lacks; depth 6 unless
# given.
FAMILIES: dict[str, dict] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "smollm3": {},
    "cohere2": {},
    "gpt_oss": {},
    "qwen3_moe": {"mlp_only_layers": [3]},
    "deepseek_v3": {},
    "gpt2": {},
    "mixtral": {},
    "olmo2": {},
    "starcoder2": {},
    "opt": {},
    **HYBRIDS,
}


def family_config(family: str, **values: object) -> PreTrainedConfig:
    """Return a family's config; skip the test where the installed transformers lacks it."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return CONFIG_MAPPING[family](**values)
