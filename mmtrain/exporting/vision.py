"""A run's vision encoder as the vision tower of a Hugging Face folder, by exact conversion of its weights.

encoder (timm ViT, or a vision model of transformers) --> configuration and tensors of a stock vision model
      --LLaVA: hidden_states[feature_layer], without the first token where it is a class token--> the run's features

A transformers encoder goes through as it is stored, if no more than a class token stands before its patches: classes
drop that one, and would take registers for patches. A timm ViT gets other names; features differ by rounding alone:
                                                    `vision_config`
    timm: class token, norm before blocks           clip_vision_model
    timm: no class token                            siglip_vision_model, without its pooling head
    timm: class token                               dinov2, its layer scales 1 where the encoder has none
    clip, clip_vision_model                         clip_vision_model
    siglip (SigLIP 2 of fixed size), ..._model      siglip_vision_model
    dinov2; vit; dinov3_vit without registers       the same
    internvl, internvl_vision                       internvl_vision

A class that takes timm's models as they are, PerceptionLM's, gets them so (`wrapped_timm_encoder`). Every other one is
refused: shapes alone would not tell a tower that computes something else from a good one. All blocks are kept, so the
layer is counted as in the run. Names on disk are those that transformers 4 and 5 both read: version 5 itself saves CLIP
and SigLIP without `vision_model.`, which version 4 fills at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import timm
import timm.layers
import torch
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.exporting.tensors import TensorSource, in_memory, stored
from mmtrain.model.vision import model_class, timm_model
from mmtrain.model.weights import tensor_files
from mmtrain.pretrained.doors import WHAT_WORKS
from mmtrain.pretrained.encoders import FAMILIES, family_of
from mmtrain.pretrained.model_files import foreign_files, model_folder, read_json
from mmtrain.pretrained.vision_files import is_timm_name, square

OUTER = "vision_model."  # what comes before a CLIP or SigLIP tensor's name, depending on who saved it
KEPT_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
    *("image_size", "patch_size", "hidden_act", "layer_norm_eps", "projection_dim", "vision_use_head"),
    *("mlp_ratio", "qkv_bias", "use_swiglu_ffn", "use_mask_token", "pooler_output_size", "pooler_act"),  # DINOv2, ViT
    *("rope_theta", "query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias", "use_gated_mlp"),  # DINOv3
    *("num_register_tokens", "attention_bias", "use_qk_norm", "norm_type"),  # the last three InternViT's, as are:
    *("use_absolute_position_embeddings", "use_mean_pooling"),
)  # of a transformers configuration; the others are about training or about files

# What features may come from: each computes what its stock counterpart does, or in eval mode nothing.
KNOWN_MODULES = {
    *(VisionTransformer, Block, Attention, timm.layers.Mlp, timm.layers.PatchEmbed, timm.layers.LayerScale),
    *(nn.Sequential, nn.Linear, nn.Conv2d, nn.LayerNorm, timm.layers.LayerNorm),
    *(nn.Identity, nn.Dropout, timm.layers.DropPath, timm.layers.PatchDropout),
}
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


@dataclass(frozen=True)
class ExportedEncoder:
    """What a folder says and holds of its vision encoder."""

    config: dict  # `vision_config` of config.json, with its model_type
    tensors: Mapping[str, TensorSource]  # by name on disk, without what the door puts before it
    feature_layer: int  # `vision_feature_layer`; -1 is the last block's output, without the final norm
    select_strategy: Literal["default", "full"]  # `vision_feature_select_strategy`: "default" drops the first token
    image_size: int  # pixels a side
    patch_size: int  # pixels a side
    prefix_tokens: int  # `num_additional_image_tokens` of the processor: 1 with a class token, else 0
    notes: tuple[str, ...]  # what was filled in and why that changes nothing, for the model card


def encoder_for_export(config: RunConfig, trained: Mapping[str, torch.Tensor]) -> ExportedEncoder:
    """The encoder of a run as a stock vision model, for a folder of LLaVA and its like.

    Tensors of a transformers encoder stay in their files, and in their precision, until they are written; a timm
    encoder is loaded whole, in float32.
    trained: tensors by their global names ("vision.blocks.0.attn.qkv.weight") that take the place of the encoder's own.
    Raises UserError for an encoder that no stock vision model computes exactly, for one that is not here or
    incomplete, and for a trained tensor that it does not have.
    """
    name, select_layer = config.model.vision.name, config.model.vision.select_layer
    own = {full.removeprefix("vision."): tensor for full, tensor in trained.items()}
    model = timm_model(name)
    if model is None:
        settings, tensors, notes = _from_transformers(model_folder(name), own)
    else:
        settings, tensors, notes = _from_timm(model, name, own, config.model.vision.final_norm)
    prefix_tokens = 0 if FAMILIES[settings["model_type"]].class_token is None else 1
    return ExportedEncoder(
        config=settings,
        tensors=tensors,
        feature_layer=select_layer,
        select_strategy="default" if prefix_tokens else "full",
        image_size=square(settings["image_size"], "images", name),
        patch_size=square(settings["patch_size"], "patches", name),
        prefix_tokens=prefix_tokens,
        notes=notes,
    )


def wrapped_timm_encoder(config: RunConfig, trained: Mapping[str, torch.Tensor]) -> ExportedEncoder:
    """The timm encoder of a run as transformers' timm_wrapper takes it, without conversion.

    That makes it of the architecture's name and arguments alone: it is tried whether what they make computes the same.
    trained: as `encoder_for_export` has it. Raises UserError for an encoder that is not timm's, or that comes out
    otherwise.
    """
    name = config.model.vision.name
    model = timm_model(name)
    assert model is not None, f"{name} is none of timm's, which its door has refused"
    state = _with_trained(model, name, {full.removeprefix("vision."): tensor for full, tensor in trained.items()})
    content = {} if is_timm_name(name) else read_json(model_folder(name) / "config.json")
    architecture = content.get("architecture", name)
    size = (model.patch_embed.img_size or model.pretrained_cfg["input_size"][1:])[0]
    arguments = {"global_pool": model.global_pool, **(content.get("model_args") or {})}
    arguments |= {"embed_dim": model.embed_dim, "img_size": size}
    arguments.pop("num_classes", None)  # the wrapper says that there are none
    with foreign_files(f"model.vision.name: {name} without its folder"):
        again = timm.create_model(architecture, pretrained=False, num_classes=0, **arguments).eval()
        kept = {own_name: tensor for own_name, tensor in state.items() if own_name in again.state_dict()}
        again.load_state_dict(kept)
        noise = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model.eval().load_state_dict(state)
            wanted, found = model.forward_features(noise), again.forward_features(noise)
    if not torch.allclose(wanted, found, rtol=0, atol=1e-5 * float(wanted.abs().max())):
        raise _refusal(name, f"made again as {architecture} with {arguments} computes other features")
    return ExportedEncoder(
        config={
            "model_type": "timm_wrapper",
            "architecture": architecture,
            "model_args": arguments,
            "do_pooling": False,
            "num_classes": 0,
        },
        tensors={f"timm_model.{own_name}": in_memory(tensor) for own_name, tensor in kept.items()},
        feature_layer=-1,
        select_strategy="default" if model.num_prefix_tokens else "full",
        image_size=size,
        patch_size=model.patch_embed.patch_size[0],
        prefix_tokens=model.num_prefix_tokens,
        notes=("Its encoder is timm's: transformers needs timm, and torchvision, to load this folder",),
    )


def _with_trained(model: nn.Module, name: str, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A timm encoder's tensors, `trained` in the place of its own."""
    state = model.state_dict()
    for own_name, tensor in trained.items():
        if own_name not in state or state[own_name].shape != tensor.shape:
            raise UserError(f"vision.{own_name}: trained with shape {tuple(tensor.shape)}, {name} has no such tensor")
    return state | trained


def _from_transformers(
    folder: Path, trained: Mapping[str, torch.Tensor]
) -> tuple[dict, dict[str, TensorSource], tuple[str, ...]]:
    family = family_of(read_json(folder / "config.json").get("model_type"), str(folder))
    stock = model_class(family)
    config = stock.config_class.from_pretrained(folder)
    config._attn_implementation = "sdpa"  # else config.json names it, and may name a kernel to be downloaded
    files = family.own({name: (name, file) for name, file in tensor_files(folder).items()})
    shapes = {name: stored(*place).shape for name, place in files.items()}
    if (prefix_tokens := family.prefix_tokens(shapes)) > 1:
        registers = prefix_tokens - 1
        raise _refusal(str(folder), f"has {registers} register tokens, which a stock class would take for patches")
    outer = OUTER if OUTER in family.outer else ""
    notes = []
    # transformers 5.17 has no such setting in SigLIP's configuration, and makes a head where it is not said.
    with_head = "head." in family.beside and getattr(config, "vision_use_head", True)
    if with_head and not any(name.startswith("head.") for name in shapes):
        config.vision_use_head = False
        notes.append(
            "vision_use_head is false: the encoder's files hold no pooling head, and no patch's feature comes from it"
        )
    with torch.device("meta"):
        model = stock(config)
    state = revert_weight_conversion(model, model.state_dict())  # as files have it: DINOv2's gates lie in one tensor
    expected = {family.published(name): tuple(tensor.shape) for name, tensor in state.items()}
    tensors = {}
    for name, shape in expected.items():
        if name not in shapes and name.startswith(family.beside):
            tensors[outer + name] = in_memory(torch.zeros(shape))
            notes.append(f"{name} is 0: the encoder's files hold none, and no feature comes from it")
            continue
        if name not in shapes:
            raise UserError(f"model.vision.name: {folder} lacks the encoder's tensor {name}; download the folder again")
        if shapes[name] != shape:
            raise UserError(
                f"model.vision.name: {folder} holds {name} with shape {shapes[name]}, but its "
                f"config.json asks for {shape}; download the folder again"
            )
        tensors[outer + name] = stored(*files[name])
    for name, tensor in {name.removeprefix(OUTER): tensor for name, tensor in trained.items()}.items():
        if name not in expected or expected[name] != tensor.shape:
            raise UserError(f"vision.{name}: trained with shape {tuple(tensor.shape)}, {folder} has no such tensor")
        tensors[outer + name] = in_memory(tensor)
    settings = {key: getattr(config, key) for key in KEPT_SETTINGS if hasattr(config, key)}
    return {"model_type": config.model_type} | settings, tensors, tuple(notes)


def _from_timm(
    model: nn.Module, name: str, trained: Mapping[str, torch.Tensor], final_norm: bool
) -> tuple[dict, dict[str, TensorSource], tuple[str, ...]]:
    """A whole timm encoder's stock configuration, tensors (views of the model's) and notes on what was filled in."""
    _refuse_unknown_modules(model, name)
    stock = _stock_model(model, name)
    if final_norm and stock is CLIP:
        raise _refusal(name, "would be a CLIP of transformers, whose last norm is for its class token alone")
    if final_norm and (not isinstance(model.norm, nn.LayerNorm) or model.norm.eps != model.blocks[0].norm1.eps):
        raise _refusal(name, "has no last norm like its others, as every stock model has (model.vision.final_norm)")
    state = _with_trained(model, name, trained)
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
        elif stem not in stems:
            raise _refusal(name, f"has {own_name}")
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


def _refusal(name: str, why: str) -> UserError:
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
    layers = timm.layers
    known = {layers.GELU: "gelu", layers.GELUTanh: "gelu_pytorch_tanh", layers.QuickGELU: "quick_gelu"}
    return known.get(type(module))


def _stock_model(model: nn.Module, name: str) -> StockModel:
    normed = type(model.norm_pre) is not nn.Identity
    scaled = type(model.blocks[0].ls1) is not nn.Identity
    if model.pos_embed is None:
        raise _refusal(name, "has no learned position embeddings")
    if model.num_prefix_tokens > model.has_class_token:
        raise _refusal(name, f"has {model.num_reg_tokens} register tokens, which a stock class would take for patches")
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
