"""A timm ViT as the stock vision model of transformers that computes the same, or why there is none.

Shapes alone would not tell a model that computes something else from a good one: every module that features come from
must be known, and what the stock model has beside the encoder's own is filled in with values that change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import timm.layers
import torch
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import nn

from mmtrain.base.errors import UserError
from mmtrain.exporting.tensors import TensorSource, in_memory
from mmtrain.models.facts.timm_models import BEHIND_THE_BLOCKS, CLIP, DINOV2, SIGLIP, StockModel, form_of
from mmtrain.stock.stock_class import WHAT_WORKS

# What features may come from: each computes what its stock counterpart does, or in eval mode nothing.
KNOWN_MODULES = {
    *(VisionTransformer, Block, Attention, timm.layers.Mlp, timm.layers.PatchEmbed, timm.layers.LayerScale),
    *(nn.Sequential, nn.Linear, nn.Conv2d, nn.LayerNorm, timm.layers.LayerNorm),
    *(nn.Identity, nn.Dropout, timm.layers.DropPath, timm.layers.PatchDropout),
}


def stock_form(
    model: nn.Module, name: str, trained: Mapping[str, torch.Tensor], final_norm: bool
) -> tuple[dict, dict[str, TensorSource], tuple[str, ...]]:
    """A whole timm encoder's stock configuration, tensors (views of the model's) and notes on what was filled in.

    trained: as `with_trained` has it; final_norm: whether the last norm must come out exactly too. Raises UserError for
    an encoder that no stock model computes, and for a trained tensor that it does not have.
    """
    _refuse_unknown_modules(model, name)
    if model.num_prefix_tokens > model.has_class_token:
        raise unfit(name, f"has {model.num_reg_tokens} register tokens, which a stock class would take for patches")
    stock = form_of(model.state_dict())
    if isinstance(stock, str):
        raise unfit(name, stock)
    if final_norm and stock is CLIP:
        raise unfit(name, "would be a CLIP of transformers, whose last norm is for its class token alone")
    if final_norm and (not isinstance(model.norm, nn.LayerNorm) or model.norm.eps != model.blocks[0].norm1.eps):
        raise unfit(name, "has no last norm like its others, as every stock model has (model.vision.final_norm)")
    state = with_trained(model, name, trained)
    stems = stock.front | {
        f"blocks.{block}.{own_name}": f"{stock.blocks}.{block}.{stock_name}"
        for block in range(len(model.blocks))
        for own_name, stock_name in stock.block.items()
    }
    tensors: dict[str, torch.Tensor] = {}
    for own_name, tensor in state.items():
        stem, _, kind = own_name.rpartition(".")
        if own_name.split(".")[0] in BEHIND_THE_BLOCKS:
            continue
        if own_name == "cls_token":
            tensors[stems[own_name]] = tensor.flatten() if stock is CLIP else tensor
        elif own_name == "pos_embed":
            if model.has_class_token and model.no_embed_class:
                tensor = torch.cat([torch.zeros_like(tensor[:, :1]), tensor], dim=1)
            tensors[stems[own_name]] = tensor if stock is DINOV2 else tensor[0]
        elif stem.endswith(".attn.qkv"):
            pieces = zip("qkv", tensor.chunk(3), strict=True)
            tensors |= {f"{stems[stem.removesuffix('qkv') + part]}.{kind}": piece for part, piece in pieces}
        else:
            tensors[f"{stems[stem]}.{'lambda1' if kind == 'gamma' else kind}"] = tensor
    notes = _fill_in(tensors, state, stock, model)
    sources = {stock_name: in_memory(tensor) for stock_name, tensor in tensors.items()}
    return _config(model, name, stock), sources, tuple(notes)


def _fill_in(
    tensors: dict[str, torch.Tensor], state: Mapping[str, torch.Tensor], stock: StockModel, model: nn.Module
) -> list[str]:
    """Add what the stock model has and the encoder lacks, in values that change nothing; says what that was."""
    notes = []
    norm, width = stock.front["norm"], model.embed_dim  # behind the last block
    own_norm = next((own for own in ("norm", "fc_norm") if f"{own}.weight" in state), None)  # fc_norm: after pooling
    if own_norm is None:
        tensors |= {f"{norm}.weight": torch.ones(width), f"{norm}.bias": torch.zeros(width)}
        notes.append(f"{norm} is 1 and 0: the encoder has no final norm, and features are taken before it")
    else:
        tensors |= {f"{norm}.{kind}": state[f"{own_norm}.{kind}"] for kind in ("weight", "bias")}
    if stock is DINOV2 and type(model.blocks[0].ls1) is nn.Identity:
        for block in range(len(model.blocks)):
            for scale in ("layer_scale1", "layer_scale2"):
                tensors[f"{stock.blocks}.{block}.{scale}.lambda1"] = torch.ones(width)
        notes.append(
            "layer_scale1 and layer_scale2 are 1: the encoder is a ViT without layer scales, which computes the same"
        )
    stems = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    lacking = [stem for stem in stems if stem not in stock.unbiased and f"{stem}.bias" not in tensors]
    tensors |= {f"{stem}.bias": torch.zeros(len(tensors[f"{stem}.weight"])) for stem in lacking}
    if lacking:
        notes.append(f"{len(lacking)} biases are 0, e.g. {lacking[0]}.bias: the encoder has none there")
    return notes


def unfit(name: str, why: str) -> UserError:
    """The error for an encoder that no stock vision model computes, with the formats that work."""
    return UserError(
        f"model.vision.name: {name} {why}; it cannot be converted exactly to a vision model that a stock class "
        f"takes. {WHAT_WORKS}"
    )


def _refuse_unknown_modules(model: nn.Module, name: str) -> None:
    epsilons = set()
    for path, module in model.named_modules():
        parts = path.split(".")
        if parts[0] in BEHIND_THE_BLOCKS:
            continue
        usable = _activation(module) is not None if path.endswith("mlp.act") else type(module) in KNOWN_MODULES
        if isinstance(module, nn.LayerNorm):
            epsilons.add(module.eps)
            usable &= parts[-1] in ("norm_pre", "norm1", "norm2")
        if not usable:
            kind = type(module).__name__
            raise unfit(name, f"has a {kind} as {path}" if path else f"is a {kind}, no plain ViT")
    if len(epsilons) > 1:
        raise unfit(name, f"normalises with several epsilons, {', '.join(map(str, sorted(epsilons)))}")


def _activation(module: nn.Module) -> str | None:
    """transformers' name of an activation function (`hidden_act`), or None for one without an exact counterpart."""
    if type(module) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_pytorch_tanh"}[module.approximate]
    layers = timm.layers
    names = {layers.GELU: "gelu", layers.GELUTanh: "gelu_pytorch_tanh", layers.QuickGELU: "quick_gelu"}
    return names.get(type(module))


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
            raise unfit(name, f"has MLPs of {wide} in blocks of {model.embed_dim}, no whole multiple")
        return config | {"mlp_ratio": wide // model.embed_dim, "use_mask_token": False}
    return config | {"intermediate_size": wide} | ({"vision_use_head": False} if stock is SIGLIP else {})


def with_trained(model: nn.Module, name: str, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A timm encoder's tensors, `trained` in the place of its own; raises UserError for one that it does not have."""
    state = model.state_dict()
    for own_name, tensor in trained.items():
        if own_name not in state or state[own_name].shape != tensor.shape:
            raise UserError(f"vision.{own_name}: trained with shape {tuple(tensor.shape)}, {name} has no such tensor")
    return state | trained
