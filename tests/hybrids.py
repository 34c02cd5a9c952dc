"""Settings of every supported family with recurrent layers, for transformers' configs of six
layers.
"""

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
