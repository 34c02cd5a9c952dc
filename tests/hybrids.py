"""Settings of every supported family with recurrent layers, for transformers' configs of six
layers; configs of families that an older transformers may lack.
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


def family_config(family: str, **values: object) -> PreTrainedConfig:
    """Return a family's config; skip the test where the installed transformers lacks it."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return CONFIG_MAPPING[family](**values)
