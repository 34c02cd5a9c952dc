"""Differences between LLM families before any weight is read: names of parameters, what is refused.

Global names are the same for every family, so a trainable pattern such as `llm.layers.31` or
`llm.head` works for all:

    model.embed_tokens.weight, transformer.wte.weight    -> llm.embedding.weight
    model.layers.3.X, transformer.h.3.X                  -> llm.layers.3.X
    model.norm.weight, transformer.ln_f.weight           -> llm.norm.weight
    lm_head.weight, embed_out.weight                     -> llm.head.weight
    anything else, e.g. transformer.wpe.weight           -> llm.transformer.wpe.weight

It also finds the LLM and the encoder inside a whole multimodal model: text_config and vision_config
say what the part's own config.json would, and names of tensors lose what stands before them, such
as `language_model.`. All of these classes make their logits by a head without scale and cap, and
scale no token ids that they embed, whatever the text model's own class does. Source: transformers'
conversion_mapping.py.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.encoders import MROPE_ENCODERS
from mmtrain.facts.model_files import model_config
from mmtrain.facts.published import refuse_other_codes
from mmtrain.facts.settings import Settings, Shape, Shapes, check_layers

T = TypeVar("T")
_BASE = r"(?:model\.|transformer\.|gpt_neox\.|backbone\.)(?:decoder\.|language_model\.)?"
_LAYER = re.compile(_BASE + r"(?:layers|h)\.(\d+)\.(.+)")
_EMBEDDING = re.compile(_BASE + r"(?:embed_tokens|embeddings|wte|embed_in)\.(weight)")
_NORM = re.compile(
    _BASE + r"(?:norm|norm_f|ln_f|final_layer_norm|final_layernorm|embedding_norm)\.(weight|bias)"
)
_HEAD = re.compile(r"(?:lm_head|embed_out)\.(weight|bias)")

# The attribute that holds the model without its LM head; files saved from that inner model lack it
# (gpt2's do).
BASE_PREFIX = {"gpt2": "transformer.", "gpt_bigcode": "transformer.", "gpt_neox": "gpt_neox."}

# Tensors in checkpoints that are buffers: masks and rotary frequencies (old files), expert
# balancing.
_BUFFER = re.compile(
    r".*\.(?:rotary_emb\.inv_freq|masked_bias|position_ids|(?:attn|attention)\.bias"
    r"|(?<!moe_statics\.)e_score_correction_bias"  # ernie4_5_moe's is a parameter
    r"|self_attn\.(?:slope_rate|query_decay|key_decay|diagonal_decay))"  # minimax
)

# What checkpoints of a family call its parameters; transformers renames and joins them when it
# loads.
_RENAMED = {
    "bailing_hybrid": (
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.(f_proj\.|dt_bias|A_log)", r".self_attn.forget_gate.\1"),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.attention\.", ".self_attn."),
        (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
    ),
    "nemotron_h": ((r"^backbone\.", "model."),),
    "olmo_hybrid": (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
    "lfm3": ((r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),),
    "kimi_linear": (
        (r"\.self_attn\.(f_a_proj\.|f_b_proj\.|dt_bias|A_log)", r".self_attn.forget_gate.\1"),
        (r"\.block_sparse_moe\.", ".mlp."),
    ),
}
_NOT_LOADED = re.compile(r"(?:model\.)?mtp\.")  # multi-token prediction: Qwen3-Next, Nemotron 3
_JOINED_CONVOLUTION = re.compile(r"\.[qkv]_(conv1d\.weight)")

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
# experts that are one tensor on disk, too
_FUSED_EXPERTS = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
}

_UNFIT = {
    **dict.fromkeys(
        ("biogpt", "bloom", "codegen", "falcon", "gptj", "mpt"),
        "its decoder layers take ALiBi or other arguments than position_ids and one attention mask",
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        "its layers choose the tokens to attend to from a mask, which packs lack",
    ),
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm"),
        "its recurrent layers carry state from one document into the next, and mmtrain cannot "
        "reset it in this family",
    ),
    **dict.fromkeys(("zamba", "zamba2"), "its layers share the weights of one attention block"),
}  # by model_type: why a family cannot be cut into stages or packed
_WHAT_WORKS = (
    "Use another family (llama, mistral, qwen3, gemma3, phi3, qwen3_5, lfm2, granitemoehybrid, ...)"
)
MAX_EXPERTS = 100_000
TIED_BY_DEFAULT = {
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cohere_compass_text",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox_japanese",
    "granite_swa",
    "jetmoe",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "minicpm3",
    "modernbert-decoder",
    "opt",
    "smollm3",
    "starcoder2",
    "vaultgemma",
    "xglm",
    "youtu",
    "zaya",
}
"""Families whose LM head is the embedding where config.json does not say tie_word_embeddings."""
# families that take no cache of those which multimodal classes generate with
OWN_CACHE = ("minimax",)
WHOLE_LAST_LAYER = {"gpt2", "gpt_bigcode", "llama4_text", "minimax"}
"""Families whose last decoder layer cannot run for supervised tokens alone (`takes_rows`)."""


def check_family(config_json: Settings) -> None:
    """Raise UserError for an LLM that cannot be staged or packed, from its raw config.json."""
    family = config_json.get("model_type")
    if not family:
        raise UserError(
            "config.json has no model_type: not a Hugging Face model. "
            "Name the folder of a causal LLM"
        )
    if config_json.get("is_encoder_decoder"):
        raise UserError(f"{family} is an encoder-decoder. {_WHAT_WORKS}")
    text = config_json.get("text_config")
    vision = config_json.get("vision_config")
    if text is not None or vision is not None:  # Qwen2-VL's first files have the latter alone
        inner = "its own"
        if text is not None:
            inner = text.get("model_type", "unknown")
        raise UserError(
            f"{family} is a multimodal model around a text model ({inner}). "
            "Name the folder of the text model alone"
        )
    if family in _UNFIT:
        raise UserError(f"{family} cannot be staged and packed: {_UNFIT[family]}. {_WHAT_WORKS}")
    check_layers(config_json, "config.json")
    refuse_other_codes(config_json, family)


def refuse_without_mrope(family: str, source: str) -> None:
    """Raise UserError for an LLM that no multimodal class computes with M-RoPE."""
    if family not in MROPE_MODELS:
        raise UserError(
            f"{source}: model.vision.layout needs M-RoPE, which transformers does not have for "
            f"{family}. Name an LLM of {', '.join(MROPE_MODELS)}, or set another layout"
        )


def remote_code(config_json: Settings) -> str:
    """Explain that a model needs code from its folder; empty where its config.json names none."""
    if not config_json.get("auto_map"):
        return ""
    return (
        "auto_map in config.json says that it needs code from its folder, which mmtrain never "
        "runs. Use its release for transformers' own classes; its name often ends in -hf"
    )


def canonical_name(stock_name: str) -> str:
    """Return the global name of a stock causal LM's parameter."""
    if match := _LAYER.fullmatch(stock_name):
        return f"llm.layers.{match[1]}.{match[2]}"
    for pattern, name in ((_EMBEDDING, "embedding"), (_NORM, "norm"), (_HEAD, "head")):
        if match := pattern.fullmatch(stock_name):
            return f"llm.{name}.{match[1]}"
    return f"llm.{stock_name}"


def full_names(model_type: str, names: Collection[str]) -> dict[str, str]:
    """Map an LLM's names on disk to those with a prefix, which files without the LM head lack."""
    full = dict(zip(names, names, strict=True))
    if any(canonical_name(name).startswith("llm.layers.") for name in names):
        return full
    prefix = BASE_PREFIX.get(model_type, "model.")
    for name in names:
        if not _HEAD.fullmatch(name):
            full[name] = prefix + name.removeprefix(prefix)
    return full


def loaded_name(model_type: str, name: str) -> str:
    """Return the stock model's name of a tensor that its files call `name`."""
    for pattern, renamed in _RENAMED.get(model_type, ()):
        name = re.sub(pattern, renamed, name)
    return name


def parameters_on_disk(model_type: str, tensors: Shapes) -> Shapes:
    """Return the stock model's parameters from the tensors of its files.

    Buffers are left out, expert weights fused: transformers 5 has the experts of a layer in
    `experts.gate_up_proj` (E, 2I, D) and `experts.down_proj` (E, D, I), checkpoints one tensor per
    expert.
    """
    parameters: Shapes = {}
    for on_disk, full_name in full_names(model_type, tensors).items():
        name = loaded_name(model_type, full_name)
        shape = tensors[on_disk]
        if _BUFFER.fullmatch(name) or _NOT_LOADED.match(name):
            continue
        if _JOINED_CONVOLUTION.search(name):
            name = _JOINED_CONVOLUTION.sub(r".\1", name)
            shape = (shape[0] + parameters.get(name, (0,))[0], *shape[1:])
        for stored, loaded in _FUSED_EXPERTS.items():
            name = name.replace(stored, loaded)
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            name, shape = _fused(model_type, expert, shape, parameters)
        parameters[name] = shape
    if model_type in ("minimax", "minimax_m2", "mixtral"):
        names = [name.replace(".block_sparse_moe.", ".mlp.") for name in parameters]
        return dict(zip(names, parameters.values(), strict=True))
    return parameters


def parts_on_disk(model_type: str, tensors: Collection[str]) -> dict[str, list[str]]:
    """Map the stock model's parameters to the tensors on disk that their rows come from, in order.

    Experts follow each other; of each, its gate stands before what the gate multiplies (gate_proj
    and up_proj, w1 and w3), as their names are sorted.
    """
    parts: dict[str, list[str]] = {}
    for on_disk, full_name in full_names(model_type, tensors).items():
        for name in parameters_on_disk(model_type, {full_name: (0, 0)}):
            parts.setdefault(name, []).append(on_disk)
    for names in parts.values():
        names.sort(key=lambda name: (list(map(int, re.findall(r"\d+", name))), name))
    return parts


def _fused(
    model_type: str,
    expert: re.Match[str],
    shape: Shape,
    parameters: Shapes,
) -> tuple[str, Shape]:
    """Return name and shape of the tensor that holds this expert and those in `parameters`."""
    layer, number, matrix = expert.groups()
    if len(shape) != 2 or int(number) >= MAX_EXPERTS:
        raise UserError(
            f"{expert[0]} has shape {shape}, which is no expert's matrix. "
            "Download the weights again"
        )
    rows, columns = shape
    if matrix in ("down_proj", "w2"):
        name = f"{layer}.down_proj"
    elif model_type == "nemotron_h":  # its experts have no gate
        name = f"{layer}.up_proj"
    else:
        name = f"{layer}.gate_up_proj"
        rows *= 2
    experts = max(int(number) + 1, parameters.get(name, (0,))[0])
    return name, (experts, rows, columns)


# Multimodal classes by model_type, and tie_word_embeddings where config.json lacks it; None: as
# text_config has it.
MULTIMODAL_MODELS = {
    "llava": None,
    "llava_next": False,
    "llava_onevision": None,
    "aya_vision": True,
    "idefics3": False,
    "smolvlm": False,
    "internvl": True,
    "perception_lm": None,
    "gemma3": True,
    "mistral3": True,
    "lfm2_vl": True,
    "lighton_ocr": True,
    "hyperclovax_vision_v2": True,
    "video_llama_3": False,
    "exaone4_5": False,
    **dict.fromkeys((*MROPE_ENCODERS, "glm46v"), False),
    "paddleocr_vl": True,
}
# model_type of an LLM: that of the multimodal class which runs it with M-RoPE.
MROPE_MODELS = {
    "qwen2": "qwen2_vl",
    "qwen3": "qwen3_vl",
    **{f"{kind}_text": kind for kind in MROPE_ENCODERS},
}
# How many of 64 rotary frequencies turn by row and by column, for LLMs that were published without
# M-RoPE.
MROPE_SECTIONS: dict[str, tuple[int, int, Settings]] = {
    "qwen2": (24, 24, {}),  # Qwen2.5-VL's
    "qwen3": (20, 20, {"mrope_interleaved": True}),  # Qwen3-VL's
}
_TIED_IF_EITHER_SAYS_SO = ("llava", "llava_onevision")

# Keys by which text models scale or cap logits, which the classes above do not, and the values that
# change nothing.
PLAIN_HEAD = {
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
    "lm_head_multiplier": 1.0,
    "dim_model_base": None,
}
# Keys by which text models scale embeddings of token ids, but not `inputs_embeds`, which the
# classes above hand them.
TOKEN_SCALES = {"falcon_h1": "embedding_multiplier"}
_SCALED_BY_DEFAULT = {
    "beam": "final_logit_softcapping",
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "gemma2": "final_logit_softcapping",
    "minicpm3": "dim_model_base",
    "vaultgemma": "final_logit_softcapping",
}
# Defaults that text_config leaves out in published files; planning imports no transformers to ask
# for them.
_DEFAULTS = {
    "llama": {"num_attention_heads": 32},
    "mistral": {"num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"num_attention_heads": 32, "num_key_value_heads": 32},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
# Idefics3's ViT is SigLIP's bit for bit, but for what it takes where nothing is said.
_SIGLIP_AS_IDEFICS3 = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
_IDEFICS3_VISION = ("idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")

_LLM = re.compile(r"((?:model\.)?(?:language_model|text_model)\.)")
_ENCODER = re.compile(
    r"((?:model\.)?(?:vision_tower|vision_model|vision_encoder|visual)\.(?:timm_model\.)?)"
)


def llm_config(folder: Path) -> Settings:
    """Return config.json of the causal LM in `folder`, which may be a whole model's.

    Raises UserError where that lacks it.
    """
    content = model_config(folder)
    if content.get("model_type") not in MULTIMODAL_MODELS:
        return content
    text = content.get("text_config")
    if text is None and "hidden_size" in content:  # early files of Qwen-VL have no text_config
        text = {**content, "model_type": f"{content['model_type']}_text"}
        text.pop("vision_config", None)
    text = _part({"text_config": text}, "text_config", folder)
    family = text.get("model_type")
    if family is None:
        raise UserError(
            f"{folder}: text_config in config.json has no model_type. Download the file again"
        )
    tied = content.get("tie_word_embeddings", MULTIMODAL_MODELS[content["model_type"]])
    if tied is None or (tied is False and content["model_type"] in _TIED_IF_EITHER_SAYS_SO):
        tied = text.get("tie_word_embeddings")
    config = {**_DEFAULTS.get(family, {}), **text, **_plain_scales(text)}
    quantised = content.get("quantization_config") or config.pop("quantization_config", None)
    more = {"tie_word_embeddings": tied, "quantization_config": quantised or None}
    return config | {key: value for key, value in more.items() if value is not None}


def _plain_scales(text: Settings) -> Settings:
    """Return the keys by which a text model alone scales, with values that change nothing.

    Multimodal classes do not scale by them.
    """
    family = text["model_type"]
    plain = {**PLAIN_HEAD, TOKEN_SCALES.get(family, ""): 1.0}
    used = {*text, _SCALED_BY_DEFAULT.get(family)}
    return {key: value for key, value in plain.items() if key in used}


def scaled_by(text: Settings) -> str:
    """Return a key by which a text model, but no multimodal class, scales or caps; "": none."""
    for key, plain in _plain_scales(text).items():
        if text.get(key, key) not in (None, plain):
            return key
    return ""


def llm_tensors(folder: Path, tensors: Mapping[str, T]) -> dict[str, T]:
    """Select the LLM's tensors from a multimodal checkpoint and strip their prefix.

    Raises UserError if it has two LLMs.
    """
    if not holds_parts(folder):
        return dict(tensors)

    prefix = base = BASE_PREFIX.get(llm_config(folder)["model_type"], "model.")
    # Qwen2.5-VL's
    is_bare = any(_LAYER.fullmatch(name) and not _LLM.match(name) for name in tensors)
    if not is_bare:
        prefix = _one_prefix(_LLM, tensors, folder)
    own: dict[str, T] = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(prefix)
        if not canonical_name(inner).startswith("llm.head."):
            if inner == name:
                continue
            inner = base + inner.removeprefix(base)
        if inner in own:
            raise UserError(
                f"{folder}: {escape(name)} is stored twice, under two names. "
                "Download the folder again"
            )
        own[inner] = tensor
    return own


def encoder_config(folder: Path) -> Settings:
    """Return config.json of the encoder in `folder`, which may be a whole model's.

    A timm encoder's has an architecture. Raises what `refuse_other_codes` raises.
    """
    content = model_config(folder)
    refuse_other_codes(content, str(folder))
    if not holds_encoder(folder):
        return content
    # Qwen2-VL's vision_config has no model_type
    vision = {"model_type": content["model_type"], **_part(content, "vision_config", folder)}
    kind = vision["model_type"]
    if kind == "timm_wrapper":
        return {"architecture": vision.get("architecture"), "model_args": vision.get("model_args")}
    if kind in _IDEFICS3_VISION:
        return {**_SIGLIP_AS_IDEFICS3, **vision, "model_type": "siglip_vision_model"}
    return vision


def encoder_tensors(folder: Path, tensors: Mapping[str, T]) -> dict[str, T]:
    """Select the encoder's tensors from a multimodal checkpoint and strip their prefix."""
    if not holds_encoder(folder):
        return dict(tensors)
    prefix = _one_prefix(_ENCODER, tensors, folder)
    own = filter(lambda name: name.startswith(prefix), tensors)
    return {name.removeprefix(prefix): tensors[name] for name in own}


def holds_parts(folder: Path) -> bool:
    """Whether a folder holds a whole model whose LLM can be read."""
    return model_config(folder).get("model_type") in MULTIMODAL_MODELS


def holds_encoder(folder: Path) -> bool:
    """Whether a folder holds a whole model whose encoder can be read."""
    return holds_parts(folder) and "vision_config" in model_config(folder)


def _part(config_json: Settings, key: str, folder: Path) -> Settings:
    if not config_json.get(key):
        raise UserError(f"{folder}: config.json has no {key}. Download the file again")
    return config_json[key]


def _one_prefix(pattern: re.Pattern[str], names: Settings, folder: Path) -> str:
    prefixes = sorted({match[1] for match in map(pattern.match, names) if match})
    if len(prefixes) == 1:
        return prefixes[0]
    part = "an LLM" if pattern is _LLM else "an encoder"
    problem = f"it lacks the weights of {part}"
    if prefixes:
        problem = f"holds {part} twice ({' and '.join(prefixes)})"
    raise UserError(f"{folder}: {problem}. Download the folder again")
