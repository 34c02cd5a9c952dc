"""A timm ViT as a stock transformers vision model: the same features from other names, to the rounding of float sums.

                                        stock model
    class token, norm before blocks     CLIPVisionModel
    no class token                      SiglipVisionModel, without its pooling head
    class token                         Dinov2Model, its layer scales 1 where the encoder has none

Everything else is refused: shapes alone would not tell a tower that computes something else from a good one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import timm.layers
import torch
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import nn

from mmtrain.base.errors import UserError
from mmtrain.export.formats import WHAT_WORKS

# What features may come from: each computes what its stock counterpart does, or in eval mode nothing.
KNOWN_MODULES = {
    *(VisionTransformer, Block, Attention, timm.layers.Mlp, timm.layers.PatchEmbed, timm.layers.LayerScale),
    *(nn.Sequential, nn.Linear, nn.Conv2d, nn.LayerNorm, timm.layers.LayerNorm),
    *(nn.Identity, nn.Dropout, timm.layers.DropPath, timm.layers.PatchDropout),
}
BEHIND_THE_BLOCKS = {"norm", "fc_norm", "head", "head_drop", "attn_pool"}  # LLaVA takes features without them


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
SIGLIP = StockModel(
    "siglip_vision_model",
    {name: stock for name, stock in CLIP.front.items() if name not in ("cls_token", "norm_pre")},
    CLIP.block,
    CLIP.blocks,
    frozenset({"vision_model.embeddings.position_embedding"}),
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


@dataclass(frozen=True)
class Converted:
    """A stock vision model's configuration and its tensors by name on disk."""

    config: dict
    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...]  # what was filled in


def convert(model: nn.Module, name: str, trained: Mapping[str, torch.Tensor]) -> Converted:
    """Convert a whole timm encoder, named `name` in messages; its tensors are views of the model's.

    trained: tensors by the model's own names, in place of the model's.
    Raises UserError for an encoder without an exact stock counterpart, and for a trained tensor that it does not have.
    """
    _refuse_unknown_modules(model, name)
    stock = _stock_model(model, name)
    state = model.state_dict()
    for own_name, tensor in trained.items():
        if own_name not in state or state[own_name].shape != tensor.shape:
            raise UserError(f"vision.{own_name}: trained with shape {tuple(tensor.shape)}, {name} has no such tensor")
    tensors = {}
    for own_name, tensor in (state | trained).items():
        part = own_name.split(".")[0]
        if part not in BEHIND_THE_BLOCKS:
            converted = _block_tensors if part == "blocks" else _front_tensors
            tensors |= converted(own_name, tensor, stock, model, name)
    notes = [
        *_fill_final_norm(tensors, state, stock, model.embed_dim),
        *_fill_layer_scales(tensors, stock, model),
        *_fill_biases(tensors, stock),
    ]
    return Converted(_config(model, name, stock), tensors, tuple(notes))


def _refusal(name: str, why: str) -> UserError:
    return UserError(
        f"model.vision.name: {name} {why}; it cannot be converted exactly to a vision model that Hugging Face's LLaVA "
        f"loads. {WHAT_WORKS}"
    )


def _refuse_unknown_modules(model: nn.Module, name: str) -> None:
    epsilons = set()
    for path, module in model.named_modules():
        parts = path.split(".")
        if parts[0] in BEHIND_THE_BLOCKS:
            continue
        known = _activation(module) is not None if path.endswith("mlp.act") else type(module) in KNOWN_MODULES
        if isinstance(module, nn.LayerNorm):
            epsilons.add(module.eps)
            known &= parts[-1] in ("norm_pre", "norm1", "norm2")
        if not known:
            kind = type(module).__name__
            raise _refusal(name, f"has a {kind} as {path}" if path else f"is a {kind}, no plain ViT")
    if len(epsilons) > 1:
        raise _refusal(name, f"normalises with several epsilons, {', '.join(map(str, sorted(epsilons)))}")


def _activation(module: nn.Module) -> str | None:
    """transformers' name of an activation function (`hidden_act`), or None for one without an exact counterpart."""
    if type(module) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_pytorch_tanh"}[module.approximate]
    known = {
        timm.layers.GELU: "gelu",
        timm.layers.GELUTanh: "gelu_pytorch_tanh",
        timm.layers.QuickGELU: "quick_gelu",
    }
    return known.get(type(module))


def _stock_model(model: nn.Module, name: str) -> StockModel:
    normed = type(model.norm_pre) is not nn.Identity
    scaled = type(model.blocks[0].ls1) is not nn.Identity
    if model.pos_embed is None:
        raise _refusal(name, "has no learned position embeddings")
    if model.num_prefix_tokens > model.has_class_token:
        raise _refusal(name, f"has {model.num_reg_tokens} register tokens, which LLaVA would take for patches")
    if model.has_class_token and not normed:
        return DINOV2
    if model.has_class_token and not scaled:
        return CLIP
    if not normed and not scaled:
        return SIGLIP
    facts = {
        "layer scales": scaled,
        "a norm before its blocks": normed,
        "a class token": model.has_class_token,
        "no class token": not model.has_class_token,
    }
    raise _refusal(name, f"has {', '.join(fact for fact, holds in facts.items() if holds)}")


def _front_tensors(
    own_name: str, tensor: torch.Tensor, stock: StockModel, model: nn.Module, name: str
) -> dict[str, torch.Tensor]:
    if own_name == "cls_token":
        return {stock.front[own_name]: tensor.flatten() if stock is CLIP else tensor}
    if own_name == "pos_embed":
        if model.has_class_token and model.no_embed_class:
            tensor = torch.cat([torch.zeros_like(tensor[:, :1]), tensor], dim=1)
        return {stock.front[own_name]: tensor if stock is DINOV2 else tensor[0]}
    stem, kind = own_name.rsplit(".", 1)
    if stem not in stock.front:
        raise _refusal(name, f"has {own_name}")
    return {f"{stock.front[stem]}.{kind}": tensor}


def _block_tensors(
    own_name: str, tensor: torch.Tensor, stock: StockModel, model: nn.Module, name: str
) -> dict[str, torch.Tensor]:
    _, block, rest = own_name.split(".", 2)
    stem, kind = rest.rsplit(".", 1)
    inside = f"{stock.blocks}.{block}."
    if stem == "attn.qkv":
        return {
            f"{inside}{stock.block[f'attn.{part}']}.{kind}": piece
            for part, piece in zip("qkv", tensor.chunk(3), strict=True)
        }
    if stem not in stock.block:
        raise _refusal(name, f"has {own_name}")
    return {f"{inside}{stock.block[stem]}.{'lambda1' if kind == 'gamma' else kind}": tensor}


def _fill_final_norm(
    tensors: dict[str, torch.Tensor], state: Mapping[str, torch.Tensor], stock: StockModel, width: int
) -> list[str]:
    """The norm behind the last block: stock models have one, LLaVA does not use it (fc_norm: timm's after pooling)."""
    stock_name = stock.front["norm"]
    for own_name in ("norm", "fc_norm"):
        if f"{own_name}.weight" in state:
            tensors[f"{stock_name}.weight"] = state[f"{own_name}.weight"]
            tensors[f"{stock_name}.bias"] = state[f"{own_name}.bias"]
            return []
    tensors[f"{stock_name}.weight"], tensors[f"{stock_name}.bias"] = torch.ones(width), torch.zeros(width)
    return [f"{stock_name} is 1 and 0: the encoder has no final norm, and LLaVA takes its features before it"]


def _fill_layer_scales(tensors: dict[str, torch.Tensor], stock: StockModel, model: nn.Module) -> list[str]:
    if stock is not DINOV2 or type(model.blocks[0].ls1) is not nn.Identity:
        return []
    for block in range(len(model.blocks)):
        for scale in ("ls1", "ls2"):
            tensors[f"{stock.blocks}.{block}.{stock.block[scale]}.lambda1"] = torch.ones(model.embed_dim)
    return ["layer_scale1 and layer_scale2 are 1: the encoder is a ViT without layer scales, which computes the same"]


def _fill_biases(tensors: dict[str, torch.Tensor], stock: StockModel) -> list[str]:
    stems = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    lacking = [stem for stem in stems if stem not in stock.unbiased and f"{stem}.bias" not in tensors]
    for stem in lacking:
        tensors[f"{stem}.bias"] = torch.zeros(len(tensors[f"{stem}.weight"]))
    return [f"{len(lacking)} biases are 0, e.g. {lacking[0]}.bias: the encoder has none there"] if lacking else []


def _config(model: nn.Module, name: str, stock: StockModel) -> dict:
    block, patches = model.blocks[0], model.patch_embed
    config = {
        "model_type": stock.model_type,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": block.attn.num_heads,
        "num_channels": patches.proj.in_channels,
        "image_size": patches.img_size[0],
        "patch_size": patches.patch_size[0],
        "hidden_act": _activation(block.mlp.act),
        "layer_norm_eps": block.norm1.eps,
    }
    wide = block.mlp.fc1.out_features
    if stock is DINOV2:
        if wide % model.embed_dim:
            raise _refusal(name, f"has MLPs of {wide} in blocks of {model.embed_dim}, no whole multiple")
        return config | {"mlp_ratio": wide // model.embed_dim, "use_mask_token": False}
    return config | {"intermediate_size": wide} | ({"vision_use_head": False} if stock is SIGLIP else {})
