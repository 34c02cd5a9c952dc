"""Which stock vision model of transformers has a place for every tensor of a timm ViT, told by their names alone.

names of a timm ViT's parameters --form_of--> the stock model's own names for them, or why there is none

What computes with them is another question, which the export asks of the modules: an activation or rotary positions
have no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

BEHIND_THE_BLOCKS = {"norm", "fc_norm", "head", "head_drop", "attn_pool"}  # features come without them, or `norm` alone


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
    frozenset({"vision_model.embeddings.position_embedding", "vision_model.embeddings.patch_embedding"}),
)
SIGLIP = replace(
    CLIP,
    model_type="siglip_vision_model",
    front={name: stock for name, stock in CLIP.front.items() if name not in ("cls_token", "norm_pre")},
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


def form_of(names: Iterable[str]) -> StockModel | str:
    """The stock model for a timm ViT with parameters of these names, or what no stock model has a place for."""
    known = {name for name in names if name.split(".")[0] not in BEHIND_THE_BLOCKS}
    classed, normed, scaled = (name in known for name in ("cls_token", "norm_pre.weight", "blocks.0.ls1.gamma"))
    if "pos_embed" not in known:
        return "has no learned position embeddings"
    if (normed and (scaled or not classed)) or (scaled and not classed):
        facts = ["layer scales"] * scaled + ["a norm before its blocks"] * normed
        return f"has {', '.join([*facts, 'a class token' if classed else 'no class token'])}"
    stock = SIGLIP if not classed else CLIP if normed else DINOV2
    for name in sorted(known):
        stem = name if name in stock.front else name.rpartition(".")[0]
        own = re.sub(r"^blocks\.\d+\.", "", stem).replace("attn.qkv", "attn.q")
        if own not in (stock.block if stem.startswith("blocks.") else stock.front):
            return f"has {name}"
    return stock
