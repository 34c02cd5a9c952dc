"""Folders of tiny LLMs whose weights are FP8 or MXFP4, as publishers write them."""

from pathlib import Path

import torch
from families import family_config
from json_files import read_json, write_json
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from mmtrain.model.llm.tiny import VOCABULARY, randomise

COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Several blocks of 128 x 128 each way, where a matrix is not one alone.
CODED_FAMILIES = {
    "qwen3": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "qwen3_moe": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mlp_only_layers": [2],
    },
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
    "gpt_oss": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
    },
}


def fp8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes e4m3 and float32 scales of blocks of 128 x 128, the last of which may be cut."""
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-30) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view_as(padded)
    return codes[:rows, :columns].contiguous(), scales


def mxfp4_codes(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random codes and scales for a weight of shape (E, K, N)."""
    experts, inputs, outputs = shape
    groups = (experts, outputs, inputs // 32)
    codes = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
    return codes, torch.randint(121, 125, groups, generator=generator, dtype=torch.uint8)


def write_codes(folder: Path) -> None:
    """Turn the weights in a stock folder into codes: MXFP4 for gpt_oss, else FP8."""
    file = folder / "model.safetensors"
    config = read_json(folder / "config.json")
    is_mxfp4 = config["model_type"] == "gpt_oss"
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in load_file(file).items():
        if is_mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scales = mxfp4_codes(weight.shape, generator)
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        elif not is_mxfp4 and ".layers." in name and "proj" in name and weight.ndim == 2:
            codes, scales = fp8_codes(weight)
            tensors |= {name: codes, f"{name}_scale_inv": scales}
        else:
            tensors[name] = weight
    save_file(tensors, file, metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    if not is_mxfp4:
        settings = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    write_json(folder / "config.json", {**config, "quantization_config": settings})


def coded_folder(family: str, folder: Path, **values: object) -> Path:
    """Save a tiny LLM as codes; return its folder."""
    config = family_config(family, **{**COMMON, **CODED_FAMILIES[family], **values})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomise(model, seed=0)
    model.save_pretrained(folder)
    write_codes(folder)
    return folder
