"""A run's vision encoder as the vision tower of a Hugging Face LLaVA folder, by exact conversion of its weights.

encoder (timm ViT, or transformers' CLIP or SigLIP) --> configuration and tensors of a stock vision model
      --LLaVA: hidden_states[feature_layer], without the first token where it is a class token--> the run's features

A transformers encoder goes through as it is stored; a timm one is converted by `timm_vit`. All blocks are kept, so the
layer is counted as in the run. Names on disk are those that transformers 4 and 5 both read: version 5 itself saves CLIP
and SigLIP without `vision_model.`, which version 4 fills at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import SiglipVisionConfig

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.export.tensors import TensorSource, in_memory, stored
from mmtrain.export.timm_vit import convert
from mmtrain.model.vision import HF_MODELS, timm_model
from mmtrain.model.weights import tensor_files
from mmtrain.pretrained.model_files import model_folder, read_json

OUTER = "vision_model."  # what comes before a CLIP or SigLIP tensor's name, depending on who saved it
KEPT_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
    *("image_size", "patch_size", "hidden_act", "layer_norm_eps", "projection_dim", "vision_use_head"),
)  # of a transformers configuration; the others are about training or about files


@dataclass(frozen=True)
class ExportedEncoder:
    """What a LLaVA folder says and holds of its vision tower."""

    config: dict  # `vision_config` of config.json, with its model_type
    tensors: Mapping[str, TensorSource]  # by name on disk, without `vision_tower.`
    feature_layer: int  # `vision_feature_layer`; -1 is the last block's output, without the final norm
    select_strategy: Literal["default", "full"]  # `vision_feature_select_strategy`: "default" drops the first token
    image_size: int  # pixels a side
    patch_size: int  # pixels a side
    prefix_tokens: int  # `num_additional_image_tokens` of the processor: 1 with a class token, else 0
    notes: tuple[str, ...]  # what was filled in and why that changes nothing, for the model card


def encoder_for_export(config: RunConfig, trained: Mapping[str, torch.Tensor] | None = None) -> ExportedEncoder:
    """The encoder of a run for a LLaVA folder.

    Tensors of a transformers encoder stay in their files, and in their precision, until they are written; a timm
    encoder is loaded whole, in float32.
    trained: tensors by their global names ("vision.blocks.0.attn.qkv.weight") that take the place of the encoder's own.
    Raises UserError for an encoder that no stock vision model computes exactly, for one that is not here or
    incomplete, and for a trained tensor that it does not have.
    """
    name, select_layer = config.model.vision.name, config.model.vision.select_layer
    own = {_own_name(full): tensor for full, tensor in (trained or {}).items()}
    model = timm_model(name)
    if model is None:
        settings, tensors, notes = _from_transformers(model_folder(name), own)
    else:
        converted = convert(model, name, own)
        settings, notes = converted.config, converted.notes
        tensors = {stock_name: in_memory(tensor) for stock_name, tensor in converted.tensors.items()}
    prefix_tokens = 0 if settings["model_type"] == "siglip_vision_model" else 1
    return ExportedEncoder(
        config=settings,
        tensors=tensors,
        feature_layer=select_layer,
        select_strategy="default" if prefix_tokens else "full",
        image_size=settings["image_size"],
        patch_size=settings["patch_size"],
        prefix_tokens=prefix_tokens,
        notes=notes,
    )


def _own_name(global_name: str) -> str:
    if not global_name.startswith("vision."):
        raise UserError(f"{global_name}: a trained tensor of this name has no place in a vision encoder")
    return global_name.removeprefix("vision.")


def _from_transformers(
    folder: Path, trained: Mapping[str, torch.Tensor]
) -> tuple[dict, dict[str, TensorSource], tuple[str, ...]]:
    config_class, model_class, _ = HF_MODELS[read_json(folder / "config.json")["model_type"]]
    config = config_class.from_pretrained(folder)
    config._attn_implementation = "sdpa"  # else config.json names it, and may name a kernel to be downloaded
    files = {name.removeprefix(OUTER): (name, file) for name, file in tensor_files(folder).items()}
    notes = []
    # transformers 5.17 has no such setting in SigLIP's configuration, and makes a head where it is not said.
    with_head = getattr(config, "vision_use_head", config_class is SiglipVisionConfig)
    if with_head and not any(name.startswith("head.") for name in files):
        config.vision_use_head = False
        notes.append("vision_use_head is false: the encoder's files hold no pooling head, and LLaVA does not use one")
    with torch.device("meta"):
        expected = {name.removeprefix(OUTER): t.shape for name, t in model_class(config).state_dict().items()}
    own = {name.removeprefix(OUTER): tensor for name, tensor in trained.items()}
    tensors = {}
    for name, shape in expected.items():
        if name not in files:
            raise UserError(f"model.vision.name: {folder} lacks the encoder's tensor {name}; download the folder again")
        tensors[OUTER + name] = stored(*files[name])
        if tensors[OUTER + name].shape != tuple(shape):
            raise UserError(
                f"model.vision.name: {folder} holds {name} with shape {tensors[OUTER + name].shape}, but its "
                f"config.json asks for {tuple(shape)}; download the folder again"
            )
    for name, tensor in own.items():
        if name not in expected or expected[name] != tensor.shape:
            raise UserError(f"vision.{name}: trained with shape {tuple(tensor.shape)}, {folder} has no such tensor")
        tensors[OUTER + name] = in_memory(tensor)
    settings = {key: getattr(config, key) for key in KEPT_SETTINGS if hasattr(config, key)}
    return {"model_type": config_class.model_type} | settings, tensors, tuple(notes)
