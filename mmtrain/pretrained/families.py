"""What differs between LLM families before any weight is read: which ones can be staged, and how they name parameters.

Global names are the same for every family, so a trainable pattern such as `llm.layers.31` or `llm.head` works for all:

    model.embed_tokens.weight, transformer.wte.weight    -> llm.embedding.weight
    model.layers.3.X, transformer.h.3.X                  -> llm.layers.3.X
    model.norm.weight, transformer.ln_f.weight           -> llm.norm.weight
    lm_head.weight, embed_out.weight                     -> llm.head.weight
    anything else, e.g. transformer.wpe.weight           -> llm.transformer.wpe.weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import harmless
from mmtrain.pretrained.model_files import Shape
from mmtrain.pretrained.settings import check_layers

_BASE = r"(?:model\.|transformer\.|gpt_neox\.)(?:decoder\.)?"
_LAYER = re.compile(_BASE + r"(?:layers|h)\.(\d+)\.(.+)")
_EMBEDDING = re.compile(_BASE + r"(?:embed_tokens|wte|embed_in)\.(weight)")
_NORM = re.compile(_BASE + r"(?:norm|ln_f|final_layer_norm|final_layernorm)\.(weight|bias)")
_HEAD = re.compile(r"(?:lm_head|embed_out)\.(weight|bias)")

# The attribute that holds the model without its LM head; files saved from that inner model lack it (gpt2's do).
BASE_PREFIX = {"gpt2": "transformer.", "gpt_bigcode": "transformer.", "gpt_neox": "gpt_neox."}

# Tensors in checkpoints that are buffers: masks and rotary frequencies (old files), expert balancing.
_BUFFER = re.compile(
    r".*\.(?:rotary_emb\.inv_freq|masked_bias|position_ids|(?:attn|attention)\.bias"
    r"|(?<!moe_statics\.)e_score_correction_bias)"  # ernie4_5_moe's is a parameter
)

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")

_NOT_CAUSAL = {
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "mpnet", "modernbert", "roberta",
    "xlm-roberta",
}  # fmt: skip
_OTHER_SIGNATURES = {"biogpt", "bloom", "codegen", "falcon", "gptj", "mpt"}
_SPARSE = {"deepseek_v32", "glm_moe_dsa"}
_RECURRENT = {
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm",
    "zamba", "zamba2",
}  # fmt: skip
_NO_CODE = "mmtrain runs none that a model brings"
_REMOTE_CODE = {  # model types that only a folder's own code knows, and releases that transformers' classes read
    "chatglm": "a GLM-4 of transformers' own classes, such as THUDM/glm-4-9b-chat-hf or THUDM/GLM-4-9B-0414",
}
MAX_EXPERTS = 100_000
WHOLE_LAST_LAYER = {"gpt2", "gpt_bigcode", "llama4_text"}
"""Families whose last decoder layer cannot be run for supervised tokens alone, as model.parity.takes_rows finds."""
_RECURRENT_LAYER = re.compile(r"linear|mamba|conv|recurrent|rwkv|ssm")


def check_family(config_json: dict[str, Any]) -> None:
    """Refuse by name what cannot be staged or packed, from a model's raw `config.json`; raises UserError.

    Families that pass here may still differ from what mmtrain assumes: launch probes the run's own model for that.
    """
    family = config_json.get("model_type")
    if not family:
        raise UserError("config.json has no model_type: not a Hugging Face model; give the folder of a causal LLM")
    if family in _REMOTE_CODE:
        raise UserError(f"{family} needs the code in its folder, and {_NO_CODE}; take {_REMOTE_CODE[family]}")
    if config_json.get("is_encoder_decoder"):
        raise UserError(f"{family} is an encoder-decoder; mmtrain stages decoder-only causal LLMs (llama, qwen2, ...)")
    text, vision = config_json.get("text_config"), config_json.get("vision_config")
    if text is not None or vision is not None:  # Qwen2-VL's first files have the latter alone
        inner = "its own" if text is None else text.get("model_type", "unknown")
        raise UserError(
            f"{family} is a multimodal model around a text model ({inner}); give the folder of the text model alone"
        )
    if family in _NOT_CAUSAL:
        raise UserError(f"{family} is not a causal LLM; mmtrain needs a decoder-only one (llama, qwen2, ...)")
    if family in _OTHER_SIGNATURES:
        raise UserError(
            f"{family} cannot be cut into stages: its decoder layers take ALiBi or other arguments than position_ids "
            "and one attention mask; use a llama-like family (llama, mistral, qwen2, gemma2, phi3, ...)"
        )
    if family in _SPARSE:
        raise UserError(
            f"{family} cannot be packed: its layers choose the tokens to attend to from a mask, which packs lack; "
            "use a family whose layers attend to all (deepseek_v3, glm4_moe, glm4_moe_lite, ...)"
        )
    check_layers(config_json, "config.json")
    recurrent = sorted({kind for kind in layer_kinds(config_json) if _RECURRENT_LAYER.search(kind)})
    if recurrent or (family in _RECURRENT and not layer_kinds(config_json)):
        kinds = ", ".join(recurrent) or "recurrent"
        raise UserError(
            f"{family} has {kinds} layers, which carry state from one document into the next when packed; "
            "use a family whose layers all attend (llama, qwen2, qwen3, gemma2, ...)"
        )
    if (method := quantised_by(config_json)) is not None:
        raise UserError(
            f"{family}: this checkpoint is quantised ({method}), and gradients must flow through its layers; use the "
            "bf16 release of the same model"
        )


def quantised_by(config_json: Mapping[str, Any]) -> str | None:
    """How a checkpoint is quantised, from its raw config.json; None if it is not."""
    for key in ("quantization_config", "compression_config"):
        if found := config_json.get(key):
            return harmless(str(found.get("quant_method") or "unknown"))
    return None


def remote_code(config_json: dict[str, Any]) -> str:
    """Why a model cannot be read whose config.json names code in its folder; empty where it names none.

    Such a folder may be sound all the same: many have a family that has come to transformers since.
    """
    if not config_json.get("auto_map"):
        return ""
    needs = f"auto_map in config.json says that it needs the code in its folder, and {_NO_CODE}"
    return f"{needs}; take its release for transformers' own classes, whose name often ends in -hf"


def layer_kinds(config_json: dict[str, Any]) -> list[str]:
    """The kind of every decoder layer as config.json lists it (`full_attention`, `conv`, ...); empty if it does not."""
    for key in ("layer_types", "layers_block_type", "block_types"):
        if config_json.get(key):
            return config_json[key]
    return []


def global_name(stock_name: str) -> str:
    """Global name of a parameter of a stock causal LM (`model.layers.3.X` -> `llm.layers.3.X`)."""
    if match := _LAYER.fullmatch(stock_name):
        return f"llm.layers.{match[1]}.{match[2]}"
    for pattern, name in ((_EMBEDDING, "embedding"), (_NORM, "norm"), (_HEAD, "head")):
        if match := pattern.fullmatch(stock_name):
            return f"llm.{name}.{match[1]}"
    return f"llm.{stock_name}"


def parameters_on_disk(model_type: str, tensors: dict[str, Shape]) -> dict[str, Shape]:
    """The stock model's parameters from the tensors of its files: buffers left out, expert weights fused.

    transformers 5 stores the experts of a layer as `experts.gate_up_proj` (E, 2I, D) and `experts.down_proj` (E, D, I),
    while checkpoints hold one tensor per expert (its conversion_mapping.py, "qwen2_moe" and "mixtral").
    """
    prefix = BASE_PREFIX.get(model_type, "model.")
    bare = not any(name.startswith(prefix) for name in tensors)
    parameters: dict[str, Shape] = {}
    for name, shape in tensors.items():
        if bare and not _HEAD.fullmatch(name):
            name = prefix + name
        if _BUFFER.fullmatch(name):
            continue
        name = name.replace(".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj")
        name = name.replace(".block_sparse_moe.router.layer.weight", ".block_sparse_moe.router.weight")
        name = name.replace(".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj")
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            parameters[name] = shape
            continue
        if len(shape) != 2 or int(expert[2]) >= MAX_EXPERTS:
            raise UserError(f"{name} has shape {shape}: no expert's matrix; download the weights again")
        rows, columns = shape
        if expert[3] in ("down_proj", "w2"):
            fused, rows_per_expert = f"{expert[1]}.down_proj", rows
        else:
            fused, rows_per_expert = f"{expert[1]}.gate_up_proj", 2 * rows
        experts = max(int(expert[2]) + 1, parameters.get(fused, (0,))[0])
        parameters[fused] = (experts, rows_per_expert, columns)
    if model_type in ("mixtral", "minimax_m2"):
        return {name.replace(".block_sparse_moe.", ".mlp."): shape for name, shape in parameters.items()}
    return parameters
