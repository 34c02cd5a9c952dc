"""Vision encoders, cut after the layer that feeds the projector.

images (N, 3, S, S) float32, normalised --patches, blocks up to the selected one, prefix tokens dropped--> (N, T, W)

The encoder's own code runs: a timm ViT or transformers' CLIP or SigLIP vision model. Blocks after the selected one,
final norms and pooling heads are neither run nor kept. `select_layer` counts as in LLaVA: -1 is the last block's
output, -2 the one before, always without the final norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

from mmtrain.base.errors import UserError
from mmtrain.data.stream.images import refuse_wrong_activation, timm_config
from mmtrain.pretrained.model_files import (
    cached_snapshot,
    foreign_files,
    hub_cache,
    model_folder,
    read_json,
    tensor_shapes,
)
from mmtrain.pretrained.vision_files import check_vision_numbers, is_timm_name, patches_per_image, square

# What timm reads too, its preference first.
WEIGHT_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")

HF_MODELS = {
    "clip": (CLIPVisionConfig, CLIPVisionModel, 1),
    "clip_vision_model": (CLIPVisionConfig, CLIPVisionModel, 1),
    "siglip": (SiglipVisionConfig, SiglipVisionModel, 0),
    "siglip_vision_model": (SiglipVisionConfig, SiglipVisionModel, 0),
}  # model_type -> config, model, prefix tokens (CLIP's class token, which LLaVA drops too)


class VisionTower(nn.Module):
    """An encoder, loaded frozen: images (N, 3, S, S) float32 -> features (N, T, W) in the encoder's dtype."""

    def __init__(
        self,
        model: nn.Module,
        features: Callable[[nn.Module, torch.Tensor], torch.Tensor],
        width: int,
        image_size: int,
        patch_size: int,
    ) -> None:
        """`features` runs the encoder's own forward up to the selected block and drops prefix tokens."""
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.features = features
        self.width = width
        self.image_size = image_size
        self.patches_per_image = patches_per_image(image_size, patch_size)

    def global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that is kept, as ("vision.<stock name>", parameter)."""
        for name, parameter in self.model.named_parameters():
            yield f"vision.{name}", parameter

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Encode normalised images (N, 3, S, S) into patch features (N, T, W)."""
        expected = (3, self.image_size, self.image_size)
        # Encoders with resizable position embeddings would take another size and return another number of tokens.
        assert images.shape[1:] == expected, f"images of shape {tuple(images.shape)}, the encoder takes (N, {expected})"
        return self.features(self.model, images.to(next(self.model.parameters()).dtype))


def load_vision(name: str, select_layer: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> VisionTower:
    """Load an encoder up to the selected layer: frozen, in eval mode, its weights stored in `dtype`.

    name: a timm model name (weights from the local Hugging Face cache), a folder in timm's local format or of a
    transformers CLIP or SigLIP model, or the hub id of such a folder in the local cache. Nothing is downloaded.
    Raises UserError for a name, folder or layer that does not exist, weights that are not here, and other encoders.
    """
    model = timm_model(name)
    if model is not None:
        return _cut_timm(model, name, select_layer, dtype).to(device)
    folder = model_folder(name)
    return _load_hf(folder, read_json(folder / "config.json")["model_type"], select_layer, dtype).to(device)


def timm_model(name: str) -> nn.Module | None:
    """A timm encoder with all its blocks, norms and heads, as published; None for a transformers CLIP or SigLIP.

    Takes and refuses the names that `load_vision` does.
    """
    if is_timm_name(name):
        return _create_timm(name, timm_weights(name))
    folder = model_folder(name)
    config = read_json(folder / "config.json")
    if "architecture" in config:
        refuse_wrong_activation(config)
        _check_size(folder, config)
        return _create_timm(f"local-dir:{folder}", None)
    if config.get("model_type") in HF_MODELS:
        return None
    raise UserError(
        f"model.vision.name: {name} has model_type {config.get('model_type')!r} in its config.json; needed is a timm "
        f"folder (config.json with an `architecture`) or one of {', '.join(HF_MODELS)}"
    )


def timm_weights(name: str) -> Path:
    """The weight file of a timm name in the local cache; raises UserError saying how to download it."""
    config = timm_config(name)
    if not config.hf_hub_id:
        raise UserError(
            f"model.vision.name: timm's weights of {name} are not on the Hugging Face hub; save the model in a folder "
            "with timm.models.save_for_hf and give that folder"
        )
    snapshot = cached_snapshot(config.hf_hub_id)
    candidates = (config.hf_hub_filename, *WEIGHT_FILES) if config.hf_hub_filename else WEIGHT_FILES
    for candidate in candidates:
        if snapshot is not None and (snapshot / candidate).is_file():
            return snapshot / candidate
    raise UserError(
        f"model.vision.name: the weights of timm's {name} are not in the local cache {hub_cache()}; "
        f"download them first: hf download {config.hf_hub_id}"
    )


def _check_size(folder: Path, config_json: dict) -> None:
    """Raise UserError where config.json asks for a much larger encoder than the folder's weights are."""
    if not any(folder.glob("*.safetensors")):  # what only timm reads, without running what a pickle asks for
        return
    arguments, shapes = config_json.get("model_args"), tensor_shapes(folder)
    depth = arguments.get("depth") if isinstance(arguments, dict) else None
    check_vision_numbers({"depth": depth if type(depth) is int else None}, f"{folder}: config.json")
    with foreign_files(f"model.vision.name: {folder}"), torch.device("meta"):
        model = timm.create_model(f"local-dir:{folder}", pretrained=False)
    asked = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    stored = sum(map(math.prod, shapes.values()))
    if asked > 2 * stored:  # position embeddings may be resampled, and tables are in no file
        raise UserError(
            f"model.vision.name: {folder}: config.json asks for an encoder of {asked:,} numbers, but the weights have "
            f"{stored:,}; download the folder again"
        )


def _create_timm(name: str, weights: Path | None) -> nn.Module:
    # On the CPU, never on meta: EVA's and dinov3's rotary tables are in no checkpoint, only the constructor makes them.
    overlay = None if weights is None else {"file": str(weights)}
    with foreign_files(f"model.vision.name: {name}"):
        model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
    patches = getattr(model, "patch_embed", None)
    if not hasattr(model, "prune_intermediate_layers") or not hasattr(patches, "patch_size"):
        raise UserError(
            f"model.vision.name: {name} is no plain vision transformer ({type(model).__name__}); "
            "its features are no grid of equal patches. Use a ViT, e.g. vit_base_patch16_clip_quickgelu_224.openai"
        )
    return model


def _cut_timm(model: nn.Module, name: str, select_layer: int, dtype: torch.dtype) -> VisionTower:
    patches = model.patch_embed
    _check_layer(select_layer, len(model.blocks), name)
    image_size = square(getattr(patches, "img_size", None) or model.pretrained_cfg["input_size"][1:], "images", name)
    patch_size = square(patches.patch_size, "patches", name)
    # Pruning changes what negative indices mean: only the index that it returns still names the same block.
    block = model.prune_intermediate_layers([select_layer], prune_norm=True, prune_head=True)

    def features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return model.forward_intermediates(
            images, indices=block, intermediates_only=True, output_fmt="NLC", norm=False
        )[0]

    tower = VisionTower(model, features, model.embed_dim, image_size, patch_size)
    for parameter in tower.parameters():
        parameter.data = parameter.data.to(dtype)
    for buffer in tower.buffers():
        # Not tower.to(dtype): rotary tables would be rounded. EVA's constant zero bias must follow its weights, though.
        if buffer.is_floating_point() and torch.equal(buffer, buffer.to(dtype).to(buffer.dtype)):
            buffer.data = buffer.data.to(dtype)
    return tower


def _load_hf(folder: Path, model_type: str, select_layer: int, dtype: torch.dtype) -> VisionTower:
    config_class, model_class, prefix_tokens = HF_MODELS[model_type]
    with foreign_files(f"model.vision.name: {folder}"):
        config = config_class.from_pretrained(folder)
    blocks = config.num_hidden_layers
    _check_layer(select_layer, blocks, str(folder))
    config.num_hidden_layers = blocks + 1 + select_layer
    config.vision_use_head = False
    with foreign_files(f"model.vision.name: {folder}"):
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",  # else config.json names it, and may name a kernel to be downloaded
            local_files_only=True,
            output_loading_info=True,
        )
    if info["missing_keys"] or info["mismatched_keys"]:
        # transformers would only warn and train against an encoder that is partly random
        lacking = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
        raise UserError(
            f"model.vision.name: {folder} lacks {len(lacking)} of the encoder's tensors, e.g. {lacking[0]}; "
            "download the folder again"
        )
    # Both families' `last_hidden_state` is then the selected layer's output: SigLIP's would be normed otherwise.
    model.post_layernorm = nn.Identity()

    def features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        return model(images).last_hidden_state[:, prefix_tokens:]

    return VisionTower(model, features, config.hidden_size, config.image_size, config.patch_size)


def _check_layer(select_layer: int, blocks: int, name: str) -> None:
    if not -blocks <= select_layer <= -1:
        raise UserError(
            f"model.vision.select_layer: {select_layer}, but {name} has {blocks} blocks; needed is -{blocks} to -1"
        )
