"""A run's vision encoder as the vision tower of a Hugging Face folder, by exact conversion of its weights.

encoder (timm ViT, or a vision model of transformers) --> configuration and tensors of a stock vision model
      --LLaVA: hidden_states[feature_layer], without the first token where it is a class token--> the run's features

A transformers encoder is written as it is stored, unless it has registers, which classes would take for patches. A timm
ViT gets other names; features differ by rounding alone:
                                                    `vision_config`
    timm: class token, norm before blocks           clip_vision_model
    timm: no class token                            siglip_vision_model, without its pooling head
    timm: class token                               dinov2, its layer scales 1 where the encoder has none
    clip, clip_vision_model                         clip_vision_model
    siglip (SigLIP 2 of fixed size), ..._model      siglip_vision_model
    dinov2; vit; dinov3_vit without registers       the same
    internvl, internvl_vision                       internvl_vision

Every other one is refused, but for PerceptionLM's class, which takes timm's models (`wrapped_timm_encoder`). All blocks
are kept, so the layer is counted as in the run. Names on disk are those that transformers 4 and 5 both read: version 5
itself saves CLIP and SigLIP without `vision_model.`, which version 4 fills at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from transformers.core_model_loading import revert_weight_conversion

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.exporting.tensors import TensorSource, in_memory, stored
from mmtrain.exporting.timm_vision import stock_form, unfit, with_trained
from mmtrain.models.facts.encoders import FAMILIES, family_of
from mmtrain.models.facts.families import encoder_config, encoder_tensors
from mmtrain.models.facts.model_files import foreign_files, model_folder
from mmtrain.models.facts.vision_files import is_timm_name, square
from mmtrain.models.modules.vision import model_class, stock_config, timm_model
from mmtrain.models.weights.files import tensor_files
from mmtrain.stock.stock_class import OUTER, ExportedEncoder

KEPT_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
    *("image_size", "patch_size", "hidden_act", "layer_norm_eps", "projection_dim", "vision_use_head"),
    *("mlp_ratio", "qkv_bias", "use_swiglu_ffn", "use_mask_token", "pooler_output_size", "pooler_act"),  # DINOv2, ViT
    *("rope_theta", "query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias", "use_gated_mlp"),  # DINOv3
    *("num_register_tokens", "attention_bias", "use_qk_norm", "norm_type"),  # the last three InternViT's, as are:
    *("use_absolute_position_embeddings", "use_mean_pooling"),
)  # of a transformers configuration; the others are about training or about files


def encoder_for_export(config: RunConfig, trained: Mapping[str, torch.Tensor]) -> ExportedEncoder:
    """Return the encoder of a run as a stock vision model.

    A transformers encoder keeps its precision; a timm encoder is loaded whole, in float32. `trained` tensors, by global
    name ("vision.blocks.0.attn.qkv.weight"), replace the encoder's own. Raises UserError for an encoder that no stock
    vision model computes exactly, for an incomplete one, and for a trained tensor that it does not have.
    """
    name, select_layer = config.model.vision.name, config.model.vision.select_layer
    own = {full.removeprefix("vision."): tensor for full, tensor in trained.items()}
    model = timm_model(name)
    if model is None:
        settings, tensors, notes = _from_transformers(model_folder(name), own)
    else:
        settings, tensors, notes = stock_form(model, name, own, config.model.vision.final_norm)
    prefix_tokens = 0 if FAMILIES[settings["model_type"]].class_token is None else 1
    image_size = square(settings["image_size"], "images", name)
    patch_size = square(settings["patch_size"], "patches", name)
    return ExportedEncoder(
        # numbers, where a folder may have lists: LlavaNext and LlavaOnevision divide them
        config=settings | {"image_size": image_size, "patch_size": patch_size},
        tensors=tensors,
        feature_layer=select_layer,
        select_strategy="default" if prefix_tokens else "full",
        image_size=image_size,
        patch_size=patch_size,
        prefix_tokens=prefix_tokens,
        notes=notes,
    )


def wrapped_timm_encoder(config: RunConfig, trained: Mapping[str, torch.Tensor]) -> ExportedEncoder:
    """Return the timm encoder of a run for transformers' timm_wrapper, with `trained` tensors in place of its own.

    timm_wrapper rebuilds it from the architecture's name and arguments. Raises UserError where that computes something
    else.
    """
    name = config.model.vision.name
    model = timm_model(name)
    assert model is not None, f"{name} is none of timm's, which its class has refused"
    state = with_trained(model, name, {full.removeprefix("vision."): tensor for full, tensor in trained.items()})
    content = {} if is_timm_name(name) else encoder_config(model_folder(name))
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
        raise unfit(name, f"made again as {architecture} with {arguments} computes other features")
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


def _from_transformers(
    folder: Path, trained: Mapping[str, torch.Tensor]
) -> tuple[dict, dict[str, TensorSource], tuple[str, ...]]:
    family = family_of(encoder_config(folder).get("model_type"), str(folder))
    stock, config = model_class(family), stock_config(family, folder)
    config._attn_implementation = "sdpa"  # else config.json names it, and may name a kernel to be downloaded
    places = {name: (name, file) for name, file in tensor_files(folder).items()}
    files = family.own(encoder_tensors(folder, places))
    shapes = {name: stored(*place).shape for name, place in files.items()}
    if (prefix_tokens := family.prefix_tokens(shapes)) > 1:
        registers = prefix_tokens - 1
        raise unfit(str(folder), f"has {registers} register tokens, which a stock class would take for patches")
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
    state = revert_weight_conversion(model, model.state_dict())  # as files have it: DINOv2's gates are one tensor there
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
    for name, tensor in revert_weight_conversion(model, dict(trained)).items():
        name = name.removeprefix(OUTER)
        if name not in expected or expected[name] != tensor.shape:
            raise UserError(f"vision.{name}: trained with shape {tuple(tensor.shape)}, {folder} has no such tensor")
        tensors[outer + name] = in_memory(tensor)
    settings = {key: getattr(config, key) for key in KEPT_SETTINGS if hasattr(config, key)}
    return {"model_type": config.model_type} | settings, tensors, tuple(notes)
