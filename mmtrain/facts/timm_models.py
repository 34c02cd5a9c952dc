"""Weights, preprocessing and shapes of timm's models by name; timm takes seconds to import.

names of a timm ViT's parameters --form_of--> the stock vision model of transformers that has a
                                              place for all of them, or why there is none

Names alone do not tell an activation or rotary positions: the export asks the modules for those.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mmtrain.base.errors import UserError
from mmtrain.facts.recorded_shapes import Recorded
from mmtrain.facts.settings import Settings, Shapes

if TYPE_CHECKING:
    from timm.models import PretrainedCfg


def timm_config(name: str) -> PretrainedCfg:
    """Return timm's record of a pretrained model.

    Raises UserError for an unknown name and a wrong activation function.
    """
    architecture = _architecture(name)
    import timm

    weights = timm.list_pretrained(f"{architecture}.*")
    if not weights or ("." in name and name not in weights):
        listed = ", ".join(weights) or "no weights at all"
        raise UserError(
            f"model.vision.name: timm has no weights {name}; for {architecture} it has {listed}"
        )
    config = timm.get_pretrained_cfg(name)
    refuse_wrong_activation({"architecture": architecture, "pretrained_cfg": {"tag": config.tag}})
    return config


def refuse_wrong_activation(config_json: Settings) -> None:
    """Raise UserError where a CLIP trained with QuickGELU would run with GELU.

    It loads, and its features are wrong.
    """
    import timm

    architecture = config_json["architecture"]
    name = f"{architecture}.{(config_json.get('pretrained_cfg') or {}).get('tag')}"
    if "quickgelu" in architecture or name not in timm.list_pretrained(f"{architecture}.*"):
        return
    if "QuickGELU" in " ".join(timm.get_pretrained_cfg(name).notes or ()):
        right = name.replace("_clip_", "_clip_quickgelu_")
        raise UserError(
            f"model.vision.name: {name} was trained with QuickGELU, but this architecture computes "
            f"GELU. Use {right}"
        )


@functools.cache
def timm_record(name: str) -> Recorded:
    """Return names and shapes of a timm model's parameters.

    Raises UserError for a name that timm does not know.
    """
    architecture = _architecture(name)
    import timm
    import torch

    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False)
    config = {
        "architecture": architecture,
        "pretrained_cfg": {"input_size": list(model.pretrained_cfg["input_size"])},
    }
    attention = getattr(next(iter(getattr(model, "blocks", ())), None), "attn", None)
    if (heads := getattr(attention, "num_heads", None)) is not None:
        config["num_heads"] = heads
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Recorded("vision", name, tuple({architecture} - {name}), config, shapes)


def _architecture(name: str) -> str:
    import timm

    architecture = name.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise UserError(
            f"model.vision.name: {name} is neither a folder here nor a model that timm knows{hint}"
        )
    return architecture


# features come without them, or `norm` alone
BEHIND_THE_BLOCKS = {"norm", "fc_norm", "head", "head_drop", "attn_pool"}


@dataclass(frozen=True)
class StockModel:
    """A stock vision model's own names, for timm's names without `.weight` and `.bias`."""

    model_type: str
    front: Mapping[str, str]
    block: Mapping[str, str]
    blocks: str
    unbiased: frozenset[str]  # of its weights, those without a bias


CLIP = StockModel(
    "clip_vision_model",
    {
        "cls_token": "vision_model.embeddings.class_embedding",
        "pos_embed": "vision_model.embeddings.position_embedding.weight",
        "patch_embed.proj": "vision_model.embeddings.patch_embedding",
        "norm_pre": "vision_model.pre_layrnorm",  # transformers' spelling
        "norm": "vision_model.post_layernorm",
    },
    {
        "norm1": "layer_norm1",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "attn.proj": "self_attn.out_proj",
        "norm2": "layer_norm2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    },
    "vision_model.encoder.layers",
    frozenset(
        {"vision_model.embeddings.position_embedding", "vision_model.embeddings.patch_embedding"}
    ),
)
SIGLIP = replace(
    CLIP,
    model_type="siglip_vision_model",
    front={name: CLIP.front[name] for name in ("pos_embed", "patch_embed.proj", "norm")},
    unbiased=frozenset({"vision_model.embeddings.position_embedding"}),
)
DINOV2 = StockModel(
    "dinov2",
    {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
    },
    {
        "norm1": "norm1",
        "attn.q": "attention.attention.query",
        "attn.k": "attention.attention.key",
        "attn.v": "attention.attention.value",
        "attn.proj": "attention.output.dense",
        "ls1": "layer_scale1",
        "norm2": "norm2",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
        "ls2": "layer_scale2",
    },
    "encoder.layer",
    frozenset(),
)


def form_of(shapes: Shapes, *, final_norm: bool) -> StockModel | str:
    """Return the stock model for a timm ViT of these parameters, or a reason why there is none.

    final_norm: features come from behind the last norm.
    """
    names = sorted(name for name in shapes if name.split(".")[0] not in BEHIND_THE_BLOCKS)
    if "pos_embed" not in names:
        return "has no learned position embeddings"
    if "cls_token" not in names:
        stock = SIGLIP
    elif "norm_pre.weight" in names:
        stock = CLIP
    else:
        stock = DINOV2
    block = re.compile(r"blocks\.\d+\.(.+)\.\w+")
    for name in names:
        if match := block.fullmatch(name):
            has_place = match[1].replace("attn.qkv", "attn.q") in stock.block
        else:
            has_place = name in stock.front or name.rpartition(".")[0] in stock.front
        if not has_place:
            return f"has {name}"
    if final_norm and "norm.bias" not in shapes:
        return "has no final norm (model.vision.final_norm)"
    if stock is DINOV2:
        inner, width = shapes["blocks.0.mlp.fc1.weight"]
        if inner % width:
            return f"has MLPs of {inner} in blocks of {width}, which is not a whole multiple"
    return stock
