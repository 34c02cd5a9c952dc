"""Llava, Mistral3 and LightOnOcr with Pixtral's vision transformer; images in their own shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from mmtrain.config.limits import MAX_GRID_SIDE
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.models import Models
from mmtrain.facts.settings import is_whole
from mmtrain.facts.shapes import llm_shape
from mmtrain.layouts.layout import Tiling
from mmtrain.layouts.native import Native, picture
from mmtrain.stock.stock_class import (
    ExportedEncoder,
    Inputs,
    Settings,
    StockClass,
    of_images,
    square_size,
)
from mmtrain.stock.stock_folder import IMAGES, Keys, StockFolder, unfit

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from mmtrain.data.stream.images import ImageTransform


class LlavaPixtral(StockClass):
    """Llava, each of whose patches is a position."""

    name = "Llava"
    model_type = "llava"
    connectors = ("mlp2x_gelu",)
    factors = (1,)
    bounds_edge = True
    # vision_feature_layer and its strategy where config.json lacks them
    layer_defaults = (-2, "default")
    layouts = (Native.name,)
    encoders = ("PixtralVisionModel",)
    tiny_encoder: ClassVar = {**StockClass.tiny_encoder, "model_type": "pixtral", "head_dim": 8}
    image_processor = "PixtralImageProcessor"
    processor_name = "PixtralProcessor"

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {
            "image_token": IMAGE_MARK,
            "image_break_token": "",
            "image_end_token": "",
            "patch_size": encoder.patch_size,
            "spatial_merge_size": models.factor,
        }

    def own_image_settings(self, transform: ImageTransform, layout: Native) -> Settings:
        return {
            "size": {"longest_edge": layout.longest_edge},
            # to whole ones of which it rounds; PixtralProcessor sets it too
            "patch_size": square_size(layout.tile_size),
        }

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: Native) -> Inputs:
        """Return pictures (images, 3, H, W), padded by zeros, and each (height, width)."""
        import torch

        side = layout.tile_size
        sizes = torch.tensor([(tiling.rows * side, tiling.columns * side) for tiling in tilings])
        padded = tiles.new_zeros(len(tilings), 3, *sizes.amax(0).tolist())
        for place, cells, tiling in zip(padded, of_images(tiles, tilings), tilings, strict=True):
            own = picture(cells, (tiling.rows, tiling.columns))
            place[:, : own.shape[1], : own.shape[2]] = own
        return {"pixel_values": padded, "image_sizes": sizes}

    def read(self, folder: StockFolder) -> Keys:
        folder.no_texts(folder.processor, _TEXTS, Native.name)
        return {"select_layer": folder.layer(*self.layer_defaults), **self.size(folder)}

    def size(self, folder: StockFolder) -> Keys:
        """Return the keys of the layout."""
        merged = 1
        if self.factors != (1,):
            merged = folder.config.get("spatial_merge_size", 2)
        needed = {"patch_size": folder.vision.patch_size, "spatial_merge_size": merged}
        folder.equal("its processor", folder.processor, needed, {})
        size = folder.images.get("size", {"longest_edge": 1024})
        longest = None
        if isinstance(size, dict):
            longest = size.get("longest_edge")
        if not is_whole(longest, 1, MAX_GRID_SIDE):
            raise unfit(IMAGES, "size", size, f"a longest_edge of 1 to {MAX_GRID_SIDE:,} pixels")
        return {"longest_edge": longest, "image_fit": None}


_TEXTS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


class Mistral3(LlavaPixtral):
    """Mistral 3, with any LLM: a norm, patches merged by a linear layer, then an MLP."""

    name = "Mistral3"
    model_type = "mistral3"
    connectors = ("norm_merge_mlp2x",)
    renamed: ClassVar = {"merging_layer": "patch_merger.merging_layer"}
    factors = (2, 3, 4)
    layer_defaults = (-1, "full")

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {
            "spatial_merge_size": models.factor,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": False,
            "vision_feature_layer": encoder.feature_layer,
        }

    def read(self, folder: StockFolder) -> Keys:
        factor = self.factor(folder, "spatial_merge_size")
        return {**super().read(folder), "factor": factor}


class LightOnOcr(Mistral3):
    """LightOnOCR, which computes as Mistral3 on the last block, and is published with Qwen3."""

    name = "LightOnOcr"
    model_type = "lighton_ocr"
    processor_name = "LightOnOcrProcessor"
    last_block = True
    encoder_names = "model.vision_encoder."
    connector_names = "model.vision_projection."
    decoder_names = "model.language_model."
    head_name = "lm_head.weight"
    image_token_key = "image_token_id"

    def unfit_llm(self, path: str) -> str:
        family = llm_shape(path).model_type
        if family == "qwen3":
            return ""
        return f"a qwen3 LLM ({family} is for Mistral3, which computes the same)"

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {"spatial_merge_size": models.factor}

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {
            "patch_size": encoder.patch_size,
            "spatial_merge_size": models.factor,
        }

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Return all three that its processor asks for; it writes the first alone."""
        return {"image_token": IMAGE_MARK, **dict.fromkeys(_TEXTS, tokenizer.pad_token)}

    def read(self, folder: StockFolder) -> Keys:
        factor = self.factor(folder, "spatial_merge_size")
        return {**self.size(folder), "factor": factor}
