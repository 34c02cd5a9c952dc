"""Convert a run's vision encoder exactly into the vision tower of a Hugging Face folder.

encoder (timm ViT, or a vision model of transformers)
    --> configuration and tensors of a stock vision model
    --LLaVA: hidden_states[feature_layer], without the first token where it is a class token-->
        the run's features

A transformers encoder is written as it is stored, unless it has registers, which classes would take
for patches. A timm ViT gets other names; features differ by rounding alone:

    encoder                                         `vision_config`
    timm: class token, norm before blocks           clip_vision_model
    timm: no class token                            siglip_vision_model, without its pooling head
    timm: class token                               dinov2, with layer scales of 1 if it has none
    clip, clip_vision_model                         clip_vision_model
    siglip (SigLIP 2 of fixed size), ..._model      siglip_vision_model
    siglip2, siglip2_vision_model (NaFlex); pixtral siglip2_vision_model; pixtral
    dinov2; vit; dinov3_vit without registers       the same
    internvl, internvl_vision                       internvl_vision

Every other one is refused, but for PerceptionLM's class, which takes timm's models
(`wrapped_timm_encoder`). All blocks are kept, so the layer is counted as in the run. Names on disk
are those that transformers 4 and 5 both read: version 5 itself saves CLIP and SigLIP without
`vision_model.`, which version 4 fills at random.
"""

from pathlib import Path

import timm
import torch
from timm import layers
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from mmtrain.base.errors import UserError
from mmtrain.config.model import ModelSection, VisionSection
from mmtrain.exporting.language import take_merged
from mmtrain.exporting.tensors import Sources, Tensors, in_memory, stored
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.encoders import FAMILIES, family_of
from mmtrain.facts.families import encoder_config, encoder_tensors
from mmtrain.facts.model_files import foreign_files, model_folder
from mmtrain.facts.models import Models
from mmtrain.facts.timm_models import BEHIND_THE_BLOCKS, CLIP, DINOV2, SIGLIP, StockModel, form_of
from mmtrain.facts.vision_files import is_timm_name, square
from mmtrain.model.encoder.vision import load_vision, model_class, stock_config, timm_model
from mmtrain.model.weights.files import tensor_entries
from mmtrain.stock.stock_class import OUTER, WHAT_WORKS, ExportedEncoder

# Of a transformers configuration: those of many, those of DINOv2, ViT, DINOv3, InternViT, SigLIP 2
# and Pixtral, those of Qwen. The others are about training or about files.
KEPT_SETTINGS = """
hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size
patch_size hidden_act layer_norm_eps projection_dim vision_use_head

mlp_ratio qkv_bias use_swiglu_ffn use_mask_token pooler_output_size pooler_act
rope_theta query_bias key_bias value_bias proj_bias mlp_bias use_gated_mlp num_register_tokens
attention_bias use_qk_norm norm_type use_absolute_position_embeddings use_mean_pooling
num_patches head_dim rope_parameters

depth num_heads in_channels spatial_merge_size temporal_patch_size out_hidden_size window_size
fullatt_block_indexes num_position_embeddings deepstack_visual_indexes num_key_value_heads embed_dim
"""
READ_AS_PATCHES = "register tokens, which a stock class would read as patches"
# Modules that features may come from: each computes what its stock counterpart does, or in eval
# mode nothing.
KNOWN_MODULES = {
    VisionTransformer,
    Block,
    Attention,
    layers.Mlp,
    layers.PatchEmbed,
    layers.LayerScale,
    layers.LayerNorm,
    layers.DropPath,
    layers.PatchDropout,
    nn.Sequential,
    nn.Linear,
    nn.Conv2d,
    nn.LayerNorm,
    nn.Identity,
    nn.Dropout,
}


def encoder_for_export(models: Models, trained: Tensors) -> ExportedEncoder:
    """Return the encoder of a run as a stock vision model.

    A transformers encoder keeps its precision; a timm encoder is loaded whole, in float32.
    `trained` tensors, by their names in the encoder, replace its own. Raises UserError for an
    encoder that no stock vision model computes exactly, for an incomplete one, and for a trained
    tensor that it does not have.
    """
    chosen = models.section.vision
    model = timm_model(chosen.name)
    if model is None:
        settings, tensors = _from_transformers(model_folder(chosen.name), trained, chosen)
    else:
        settings, tensors = _from_timm(model, chosen.name, trained, chosen.final_norm)
    family = FAMILIES[settings["model_type"]]
    patch_size = square(settings["patch_size"], "patches", chosen.name)
    settings["patch_size"] = patch_size
    # numbers, where a folder may have lists: LlavaNext and LlavaOnevision divide them
    if family.native is None:
        settings["image_size"] = models.layout.tile_size
    return ExportedEncoder(
        settings,
        tensors,
        chosen.select_layer,
        patch_size,
        prefix_tokens=0 if family.class_token is None else 1,
    )


def merged_encoder(section: ModelSection, trained: Sources) -> Tensors:
    """Return the trained tensors of a run's encoder, by their names in it, adapters merged.

    `trained` has them by global names. Raises UserError for an adapter of a layer that the encoder
    does not have.
    """
    waiting = dict(trained)
    merged = {}
    if any(map(is_adapter, trained)):
        chosen = section.vision
        tower = load_vision(
            chosen.name,
            chosen.select_layer,
            torch.float32,
            final_norm=chosen.final_norm,
        )
        for name, parameter in tower.global_parameters():
            weight = waiting.get(name) or in_memory(parameter.detach())
            result = take_merged(waiting, name, weight, section.lora, transposed=False)
            if result is not weight:
                merged[name] = result
        if idle := next(filter(is_adapter, waiting), None):
            raise UserError(
                f"{idle} was trained, but the encoder {chosen.name} has no layer of this name"
            )
    waiting |= merged
    return {name.removeprefix("vision."): source.read() for name, source in waiting.items()}


def wrapped_timm_encoder(models: Models, trained: Tensors) -> ExportedEncoder:
    """Return the timm encoder of a run for transformers' timm_wrapper.

    `trained` tensors, by their names in the encoder, replace its own. timm_wrapper rebuilds it from
    the architecture's name and arguments. Raises UserError where that computes something else.
    """
    name = models.section.vision.name
    model = timm_model(name)
    assert model is not None, f"{name} is none of timm's, which its class has refused"
    content = {}
    if not is_timm_name(name):
        content = encoder_config(model_folder(name))
    architecture = content.get("architecture", name)
    size = (model.patch_embed.img_size or model.pretrained_cfg["input_size"][1:])[0]
    arguments = {"global_pool": model.global_pool, **(content.get("model_args") or {})}
    arguments |= {"embed_dim": model.embed_dim, "img_size": size}
    arguments.pop("num_classes", None)  # the wrapper says that there are none

    state = _with_trained(model.state_dict(), trained, name)
    with foreign_files(f"model.vision.name: {name} without its folder"):
        again = timm.create_model(architecture, pretrained=False, num_classes=0, **arguments).eval()
        kept = {own: state[own] for own in state if own in again.state_dict()}
        again.load_state_dict(kept)
        noise = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model.eval().load_state_dict(state)
            wanted = model.forward_features(noise)
            found = again.forward_features(noise)
    if not torch.allclose(wanted, found, rtol=0, atol=1e-5 * float(wanted.abs().max())):
        raise _unfit(name, f"rebuilt as {architecture} with {arguments} computes other features")
    return ExportedEncoder(
        config={
            "model_type": "timm_wrapper",
            "architecture": architecture,
            "model_args": arguments,
            "do_pooling": False,
            "num_classes": 0,
        },
        tensors={f"timm_model.{own}": in_memory(tensor) for own, tensor in kept.items()},
        feature_layer=-1,
        patch_size=model.patch_embed.patch_size[0],
        prefix_tokens=model.num_prefix_tokens,
    )


def _from_transformers(
    folder: Path,
    trained: Tensors,
    chosen: VisionSection,
) -> tuple[dict, Sources]:
    """Return configuration and tensors of an encoder of transformers, `trained` ones replaced."""
    source = str(folder)
    family = family_of(encoder_config(folder).get("model_type"), source)
    config = stock_config(family, folder)
    # else config.json names it, and may name a kernel to be downloaded
    config._attn_implementation = "sdpa"
    files = family.own(encoder_tensors(folder, tensor_entries(folder)))
    sources = {name: stored(entry) for name, entry in files.items()}
    unused = family.unused(chosen.final_norm, source, chosen.merger)
    shapes = {name: source.shape for name, source in sources.items()}
    registers = family.prefix_tokens(shapes) - 1
    if registers > 0:
        raise _unfit(source, f"has {registers} {READ_AS_PATCHES}")
    # transformers 5.17 has no such setting in SigLIP's configuration, and makes a head where it is
    # not said.
    with_head = "head." in family.beside and getattr(config, "vision_use_head", True)
    if with_head and not any(name.startswith("head.") for name in sources):
        config.vision_use_head = False
    with torch.device("meta"):
        model = model_class(family)(config)

    # as files have it: DINOv2's gates are one tensor there
    state = revert_weight_conversion(model, model.state_dict())
    expected = {family.published(name): tensor for name, tensor in state.items()}
    tensors = {}
    for name, tensor in expected.items():
        shape = tuple(tensor.shape)
        if name in sources:
            tensors[name] = sources[name]
        elif name.startswith(unused):  # no feature comes from it
            tensors[name] = in_memory(torch.zeros(shape))
        else:
            raise UserError(
                f"model.vision.name: {folder} lacks the encoder's tensor {name}. "
                "Download the folder again"
            )
        if tensors[name].shape != shape:
            raise UserError(
                f"model.vision.name: {folder} holds {name} with shape {tensors[name].shape}, but "
                f"its config.json asks for {shape}. Download the folder again"
            )
    own = {}
    for name, tensor in revert_weight_conversion(model, dict(trained)).items():
        own[name.removeprefix(OUTER)] = tensor
    _with_trained(expected, own, source)
    for name, tensor in own.items():
        tensors[name] = in_memory(tensor)
    if OUTER in family.outer:
        tensors = {OUTER + name: source for name, source in tensors.items()}
    settings = {key: getattr(config, key) for key in KEPT_SETTINGS.split() if hasattr(config, key)}
    return {"model_type": config.model_type} | settings, tensors


# ---- timm's ViTs


def _from_timm(
    model: nn.Module,
    name: str,
    trained: Tensors,
    final_norm: bool,
) -> tuple[dict, Sources]:
    """Return configuration and tensors of a timm encoder as a stock one, `trained` ones replaced.

    The tensors are views. final_norm: the last norm must be exact too. Raises UserError for an
    encoder that no stock model computes, and for a trained tensor that it does not have.
    """
    _refuse_unknown_modules(model, name)
    if model.num_reg_tokens:
        raise _unfit(name, f"has {model.num_reg_tokens} {READ_AS_PATCHES}")
    state = model.state_dict()
    stock = form_of({own: tuple(state[own].shape) for own in state}, final_norm=final_norm)
    if isinstance(stock, str):
        raise _unfit(name, stock)
    if final_norm and stock is CLIP:
        raise _unfit(
            name,
            "would be a CLIP of transformers, whose final norm is only for its class token",
        )
    if final_norm and model.norm.eps != model.blocks[0].norm1.eps:
        raise _unfit(
            name,
            "has another epsilon in its final norm than in its other norms "
            "(model.vision.final_norm)",
        )
    state = _with_trained(state, trained, name)
    stems = dict(stock.front)
    for block in range(len(model.blocks)):
        for own, stock_name in stock.block.items():
            stems[f"blocks.{block}.{own}"] = f"{stock.blocks}.{block}.{stock_name}"
    tensors = {}
    for own, tensor in state.items():
        stem, _, kind = own.rpartition(".")
        if own.split(".")[0] in BEHIND_THE_BLOCKS:
            continue
        if own == "cls_token":
            if stock is CLIP:
                tensor = tensor.flatten()
            tensors[stems[own]] = tensor
        elif own == "pos_embed":
            if model.has_class_token and model.no_embed_class:
                tensor = torch.cat([torch.zeros_like(tensor[:, :1]), tensor], dim=1)
            if stock is not DINOV2:
                tensor = tensor[0]
            tensors[stems[own]] = tensor
        elif stem.endswith(".attn.qkv"):
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                tensors[f"{stems[stem.removesuffix('qkv') + part]}.{kind}"] = piece
        elif kind == "gamma":
            tensors[f"{stems[stem]}.lambda1"] = tensor
        else:
            tensors[f"{stems[stem]}.{kind}"] = tensor
    _fill_in(tensors, state, stock, model)
    return _timm_config(model, stock), {name: in_memory(tensor) for name, tensor in tensors.items()}


def _fill_in(
    tensors: Tensors,
    state: Tensors,
    stock: StockModel,
    model: nn.Module,
) -> None:
    """Add the tensors that the encoder lacks, in values that change nothing."""
    norm, width = stock.front["norm"], model.embed_dim  # behind the last block
    neutral = {"weight": torch.ones(width), "bias": torch.zeros(width)}
    for kind in neutral:
        # fc_norm: after pooling
        pooled = state.get(f"fc_norm.{kind}", neutral[kind])
        tensors[f"{norm}.{kind}"] = state.get(f"norm.{kind}", pooled)
    if stock is DINOV2 and type(model.blocks[0].ls1) is nn.Identity:
        for block in range(len(model.blocks)):
            for scale in ("layer_scale1", "layer_scale2"):
                tensors[f"{stock.blocks}.{block}.{scale}.lambda1"] = torch.ones(width)
    for name, tensor in list(tensors.items()):
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and stem not in stock.unbiased:
            tensors.setdefault(f"{stem}.bias", torch.zeros(len(tensor)))


def _unfit(name: str, why: str) -> UserError:
    """Return the error for an encoder that no stock class computes, with the formats that work."""
    return UserError(
        f"model.vision.name: {name} {why}, so it cannot be converted exactly to a vision model "
        f"that a stock class takes. {WHAT_WORKS}"
    )


def _refuse_unknown_modules(model: nn.Module, name: str) -> None:
    epsilons = set()
    for path, module in model.named_modules():
        parts = path.split(".")
        if parts[0] in BEHIND_THE_BLOCKS:
            continue
        usable = type(module) in KNOWN_MODULES
        if path.endswith("mlp.act"):
            usable = _activation(module) is not None
        if isinstance(module, nn.LayerNorm):
            epsilons.add(module.eps)
            usable &= parts[-1] in ("norm_pre", "norm1", "norm2")
        kind = type(module).__name__
        if not usable and not path:
            raise _unfit(name, f"is a {kind}, not a plain ViT")
        if not usable:
            raise _unfit(name, f"has a {kind} as {path}")
    if len(epsilons) > 1:
        raise _unfit(
            name,
            f"normalises with several epsilons, {', '.join(map(str, sorted(epsilons)))}",
        )


def _activation(module: nn.Module) -> str | None:
    """Return transformers' name of an activation (`hidden_act`); None without an exact one."""
    if type(module) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_pytorch_tanh"}[module.approximate]
    names = {
        layers.GELU: "gelu",
        layers.GELUTanh: "gelu_pytorch_tanh",
        layers.QuickGELU: "quick_gelu",
    }
    return names.get(type(module))


def _timm_config(model: nn.Module, stock: StockModel) -> dict:
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
        return config | {"mlp_ratio": wide // model.embed_dim, "use_mask_token": False}
    config["intermediate_size"] = wide
    if stock is SIGLIP:
        config["vision_use_head"] = False
    return config


def _with_trained(state: Tensors, trained: Tensors, encoder: str) -> Tensors:
    """Return the tensors of an encoder with `trained` ones in their place.

    Raises UserError for one that it does not have.
    """
    for name, tensor in trained.items():
        if name not in state or state[name].shape != tensor.shape:
            raise UserError(
                f"vision.{name}: trained with shape {tuple(tensor.shape)}, but {encoder} "
                "has no such tensor"
            )
    return {**state, **trained}
