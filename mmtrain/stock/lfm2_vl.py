"""Lfm2Vl: pixel shuffle, a norm and an MLP behind SigLIP 2 NaFlex; images in their own shape."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import llm_shape
from mmtrain.layouts.layout import Tiling
from mmtrain.layouts.native import MAX_POSITIONS, MIN_POSITIONS, Native, patch_rows
from mmtrain.stock.stock_class import (
    ON_WHITE,
    ExportedEncoder,
    Inputs,
    NestedClass,
    Settings,
    of_images,
)
from mmtrain.stock.stock_folder import CONFIG, IMAGES, Keys, StockFolder, unfit

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from mmtrain.data.stream.images import ImageTransform

_log = logging.getLogger(__name__)
_BOUNDS = {"min_image_tokens": MIN_POSITIONS, "max_image_tokens": MAX_POSITIONS}
# around an image, by default
_TEXTS = {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}


class Lfm2Vl(NestedClass):
    """LFM2-VL, with any LLM. Its projector has a norm where it shuffles, else none."""

    name = "Lfm2Vl"
    model_type = "lfm2_vl"
    connectors = ("shuffle_mlp2x_gelu", "mlp2x_gelu")
    final_norm = True
    layouts = (Native.name,)
    encoders = ("Siglip2VisionModel",)
    tiny_encoder: ClassVar = {
        **NestedClass.tiny_encoder,
        "model_type": "siglip2_vision_model",
        "num_patches": 4,
        "vision_use_head": False,
    }
    image_processor = "Lfm2VlImageProcessor"
    backends = ("torchvision",)
    adds_special_tokens = False

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        factor = models.factor
        return {
            "downsample_factor": factor,
            "projector_use_layernorm": factor > 1,
            "projector_hidden_size": models.published_llm.hidden_size,
            "projector_hidden_act": "gelu",
            "projector_bias": True,
        }

    def own_image_settings(self, transform: ImageTransform, layout: Native) -> Settings:
        return {
            "do_image_splitting": False,
            "min_image_tokens": layout.min_positions,
            "max_image_tokens": layout.max_positions,
            "encoder_patch_size": layout.patch_size,
            "downsample_factor": layout.factor,
        }

    def pillow_pixels(self, transform: ImageTransform, layout: Native) -> str:
        """Return Python that resizes `picture` as Pillow did in training."""
        numbers = layout.factor, layout.min_positions, layout.max_positions, layout.patch_size
        size = (
            "processor.image_processor.smart_resize(picture.height, picture.width, "
            f"{', '.join(map(str, numbers))})"
        )
        by = f"Image.Resampling.{transform.interpolation.upper()}"
        return f"size = {size}\npicture = {ON_WHITE}.resize(size, {by})"

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        return {"image_token": IMAGE_MARK, **dict.fromkeys(_TEXTS, "")}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: Native) -> Inputs:
        """Return patches (images, most, values), padded by zeros, their mask, and grids of them."""
        import torch

        factor = layout.factor
        most = layout.max_positions * factor**2
        patches = tiles.new_zeros(len(tilings), most, 3 * layout.patch_size**2)
        mask = torch.zeros(len(tilings), most, dtype=torch.int32)
        grids = []
        for row, (cells, tiling) in enumerate(zip(of_images(tiles, tilings), tilings, strict=True)):
            grids.append((tiling.rows * factor, tiling.columns * factor))
            values = patch_rows(cells, (tiling.rows, tiling.columns), factor, 1, "dy dx c")
            patches[row, : len(values)] = values
            mask[row, : len(values)] = 1
        return {
            "pixel_values": patches,
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor(grids),
        }

    def read(self, folder: StockFolder) -> Keys:
        # its connector
        has_norm = folder.config.get("projector_use_layernorm", True)
        factor = folder.config.get("downsample_factor", 2)
        if has_norm is not (factor != 1):
            raise unfit(
                CONFIG,
                "projector_use_layernorm",
                has_norm,
                f"{factor != 1}, with downsample_factor {factor}",
            )
        width = folder.config.get("projector_hidden_size", 2560)
        needed = llm_shape(folder.path).hidden_size
        if width != needed:
            raise unfit(CONFIG, "projector_hidden_size", width, f"the LLM's width, {needed}")
        if folder.config.get("projector_bias", True) is not True:
            raise unfit(CONFIG, "projector_bias", False, "true")

        # its processor
        processed = {"encoder_patch_size": folder.vision.patch_size, "downsample_factor": factor}
        folder.equal(
            IMAGES,
            folder.images,
            processed,
            {"encoder_patch_size": 16, "downsample_factor": 2},
        )
        folder.no_texts(folder.named_tokens, _TEXTS, Native.name)
        if folder.images.get("do_image_splitting", True):
            _log.info(
                f"model.pretrained: {folder.path}: its processor cuts large images into tiles "
                "(do_image_splitting); "
                "mmtrain trains on the whole image, and exports a processor that keeps it whole"
            )
        factor = self.factor(folder, "downsample_factor")
        bounds = [folder.images.get(key, number) for key, number in _BOUNDS.items()]
        return {
            "type": self.connectors[factor is None],
            "factor": factor,
            **folder.cells(bounds),
        }
