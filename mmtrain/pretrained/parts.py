"""Models inside others: the LLM and the encoder of a whole multimodal model, read where they lie, without torch.

config.json --text_config, vision_config--> what the part's own config.json would say
names of tensors --without what stands before them--> names that the part's own files would have

| saved by                          | LLM                                            | encoder                    |
|-----------------------------------|------------------------------------------------|----------------------------|
| transformers 4, LLaVA's relatives | language_model.model., language_model.lm_head. | vision_tower.vision_model. |
| transformers 5 on disk            | the same                                       | vision_tower.              |
| transformers 5 in memory          | model.language_model., lm_head.                | model.vision_tower.        |
| Idefics3, SmolVLM                 | model.text_model., lm_head.                    | model.vision_model.        |

Source: transformers' conversion_mapping.py ("llava", "LlavaModel") and modeling files. All of these classes make their
logits by a head without scale and cap, whatever the text model's own class does; that holds here, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mmtrain.base.errors import UserError
from mmtrain.base.printing import harmless
from mmtrain.pretrained.families import BASE_PREFIX, global_name, quantised_by
from mmtrain.pretrained.model_files import read_json

T = TypeVar("T")


@dataclass(frozen=True)
class Whole:
    """A class of transformers that holds a causal LM, and what its config.json means where it says nothing."""

    tied: bool | None = None  # tie_word_embeddings; None: as its text_config has it
    encoder: str | None = None  # model_type of vision_config


WHOLES = {
    "llava": Whole(encoder="clip_vision_model"),
    "llava_next": Whole(tied=False, encoder="clip_vision_model"),
    "llava_onevision": Whole(encoder="siglip_vision_model"),
    "aya_vision": Whole(tied=True, encoder="siglip_vision_model"),
    "idefics3": Whole(tied=False, encoder="idefics3_vision"),
    "smolvlm": Whole(tied=False, encoder="smolvlm_vision"),
    "internvl": Whole(tied=True, encoder="internvl_vision"),
    "perception_lm": Whole(encoder="timm_wrapper"),
    "gemma3": Whole(tied=True, encoder="siglip_vision_model"),
    "mistral3": Whole(tied=True, encoder="pixtral"),
}  # by model_type
_TIED_IF_EITHER_SAYS_SO = ("llava", "llava_onevision")

# What text models say of their head alone, and what makes it the plain one of the classes above.
PLAIN_HEAD = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}
HEADS_BY_DEFAULT = {"cohere": ("logit_scale",), "cohere2": ("logit_scale",), "gemma2": ("final_logit_softcapping",)}
# Defaults that text_config leaves out in published files; planning imports no transformers to ask for them.
_DEFAULTS = {
    "llama": {"num_attention_heads": 32},
    "mistral": {"num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"num_attention_heads": 32, "num_key_value_heads": 32},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
# Idefics3's ViT is SigLIP's bit for bit, but for what it takes where nothing is said.
_SIGLIP_AS_IDEFICS3 = {"hidden_size": 1152, "num_attention_heads": 16, "image_size": 224, "patch_size": 32}
_IDEFICS3_VISION = ("idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")

_LLM = re.compile(r"((?:model\.)?(?:language_model|text_model)\.)(.+)")
_ENCODER = re.compile(r"((?:model\.)?(?:vision_tower|vision_model)\.(?:timm_model\.)?)(.+)")


def whole_of(config_json: Mapping[str, Any]) -> Whole | None:
    """What a config.json is of, if it is of a whole model whose parts can be read."""
    return WHOLES.get(config_json.get("model_type"))


def llm_config(folder: Path) -> dict[str, Any]:
    """config.json of the causal LM in `folder`, which may be a whole model's; {} where there is no such file.

    Raises UserError for a whole model that says nothing of its LLM. Families are judged by `check_family`.
    """
    file = folder / "config.json"
    said = read_json(file) if file.is_file() else {}
    whole = whole_of(said)
    if whole is None:
        return said
    text = _part(said, "text_config", folder)
    family = text.get("model_type")
    if family is None:
        raise UserError(f"{folder}: text_config in config.json has no model_type; download the file again")
    plain = {key: value for key, value in PLAIN_HEAD.items() if key in (*text, *HEADS_BY_DEFAULT.get(family, ()))}
    tied = said.get("tie_word_embeddings", whole.tied)
    if tied is None or (tied is False and said["model_type"] in _TIED_IF_EITHER_SAYS_SO):
        tied = text.get("tie_word_embeddings")
    found = {**_DEFAULTS.get(family, {}), **text, **plain}
    quantised = said.get("quantization_config") or found.pop("quantization_config", None)
    more = {"tie_word_embeddings": tied, "quantization_config": quantised or None}
    return found | {key: value for key, value in more.items() if value is not None}


def llm_tensors(folder: Path, tensors: Mapping[str, T]) -> dict[str, T]:
    """Of what is said of a folder's tensors, what concerns its LLM, by the names that the LLM has alone.

    Raises UserError for the LLMs of two models in one folder.
    """
    if not holds_parts(folder):
        return dict(tensors)
    base = BASE_PREFIX.get(llm_config(folder)["model_type"], "model.")
    prefix = _one_prefix(_LLM, tensors, folder)
    own: dict[str, T] = {}
    for name, said in tensors.items():
        inner = name.removeprefix(prefix)
        is_head = global_name(inner).startswith("llm.head.")
        if not is_head and inner == name:
            continue
        inner = inner if is_head else base + inner.removeprefix(base)
        if inner in own:
            raise UserError(f"{folder}: {harmless(name)} is there twice under two names; download the folder again")
        own[inner] = said
    return own


def encoder_config(folder: Path) -> dict[str, Any]:
    """config.json of the encoder in `folder`, which may be a whole model's; a timm encoder's has an architecture.

    Raises UserError for a whole model that says nothing of its encoder, and for weights that are quantised: libraries
    that are installed decide what is made of those.
    """
    said = read_json(folder / "config.json")
    if (method := quantised_by(said)) is not None:
        raise UserError(f"{folder} cannot be used: it is quantised ({method}); use its release in bfloat16 or float32")
    whole = whole_of(said)
    if whole is None:
        return said
    vision = _part(said, "vision_config", folder)
    kind = vision.get("model_type", whole.encoder)
    if kind == "timm_wrapper":
        return {"architecture": vision.get("architecture"), "model_args": vision.get("model_args")}
    if kind in _IDEFICS3_VISION:
        return {**_SIGLIP_AS_IDEFICS3, **vision, "model_type": "siglip_vision_model"}
    return {**vision, "model_type": kind}


def encoder_prefix(folder: Path, names: Mapping[str, Any]) -> str:
    """What stands before the names of the encoder's tensors in a whole model's folder; "" where it lies alone.

    Raises UserError for a whole model's folder without an encoder, and for one with two.
    """
    return _one_prefix(_ENCODER, names, folder) if holds_parts(folder) else ""


def encoder_tensors(folder: Path, tensors: Mapping[str, T]) -> dict[str, T]:
    """Of what is said of a folder's tensors, what concerns its encoder, by the names that the encoder has alone."""
    prefix = encoder_prefix(folder, tensors)
    return {name.removeprefix(prefix): said for name, said in tensors.items() if name.startswith(prefix)}


def holds_parts(folder: Path) -> bool:
    """Whether a folder holds a whole model whose parts can be read."""
    file = folder / "config.json"
    return file.is_file() and whole_of(read_json(file)) is not None


def _part(config_json: Mapping[str, Any], key: str, folder: Path) -> dict[str, Any]:
    if not config_json.get(key):
        raise UserError(f"{folder}: config.json has no {key}; download the file again")
    return config_json[key]


def _one_prefix(pattern: re.Pattern[str], names: Mapping[str, Any], folder: Path) -> str:
    found = sorted({match[1] for name in names if (match := pattern.match(name))})
    if len(found) == 1:
        return found[0]
    part = "an LLM" if pattern is _LLM else "an encoder"
    if found:
        listed = " and ".join(map(harmless, found))
        raise UserError(f"{folder}: holds {part} twice, its tensors begin with {listed}; download the folder again")
    raise UserError(f"{folder}: the weights of {part} are not in it; download the folder again")
