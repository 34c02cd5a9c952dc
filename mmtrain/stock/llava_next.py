"""LlavaNext and LlavaOnevision: a tile of the whole, and a grid's with newlines behind lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.models import Models
from mmtrain.layouts.anyres import Anyres, AnyresMax9
from mmtrain.layouts.layout import ImageLayout, Tiling
from mmtrain.stock.stock_class import (
    INTERN_VIT,
    ExportedEncoder,
    Inputs,
    Settings,
    StockClass,
    of_images,
    square_size,
)
from mmtrain.stock.stock_folder import Keys, StockFolder, unfit

if TYPE_CHECKING:
    import torch

    from mmtrain.data.stream.images import ImageTransform


class LlavaNext(StockClass):
    """LLaVA 1.6: any number of tiles."""

    name = "LlavaNext"
    model_type = "llava_next"
    connectors = ("mlp2x_gelu",)
    layouts = (Anyres.name,)
    not_encoders = (INTERN_VIT,)
    image_processor = "LlavaNextImageProcessor"

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {
            **super().config(models, encoder),
            **models.layout.image_settings,
            "use_image_newline_parameter": True,
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        """Return a crop that leaves all: transformers 4 reads the tile's size from crop_size."""
        return {
            **layout.image_settings,
            "do_pad": True,
            "do_center_crop": True,
            "crop_size": square_size(transform.image_size),
        }

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: ImageLayout) -> Inputs:
        """Return tiles (images, most tiles, 3, S, S), padded by zeros, and each (height, width)."""
        import torch

        padded = torch.nn.utils.rnn.pad_sequence(of_images(tiles, tilings), batch_first=True)
        sizes = [(tiling.height, tiling.width) for tiling in tilings]
        return {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}

    def read(self, folder: StockFolder) -> Keys:
        return {"select_layer": folder.layer(-2, "default"), **folder.grids(Anyres(tile_size=336))}


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision: at most 9 tiles' positions; of several images each is one square."""

    name = "LlavaOnevision"
    model_type = "llava_onevision"
    layouts = (AnyresMax9.name,)
    image_processor = "LlavaOnevisionImageProcessor"
    video_processor = "LlavaOnevisionVideoProcessor"
    video_token = "<|video|>"
    video_token_key = "video_token_index"

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {**super().config(models, encoder), "vision_aspect_ratio": AnyresMax9.name}

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {
            "image_token": IMAGE_MARK,
            "video_token": self.video_token,
            "num_image_tokens": models.layout.positions_per_tile + encoder.prefix_tokens,
            "vision_feature_select_strategy": encoder.select_strategy,
            "vision_aspect_ratio": AnyresMax9.name,
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        return {**layout.image_settings, "do_pad": True}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: ImageLayout) -> Inputs:
        import torch

        return {
            **super().inputs(tiles, tilings, layout),
            "batch_num_images": torch.tensor([len(tilings)]),
        }

    def read(self, folder: StockFolder) -> Keys:
        for settings in (folder.config, folder.processor):
            key = "vision_aspect_ratio"
            ratio = settings.get(key, AnyresMax9.name)
            if ratio != AnyresMax9.name:
                raise unfit("a file", key, ratio, AnyresMax9.name)
        return {"select_layer": folder.layer(-1, "full"), **folder.grids(AnyresMax9(tile_size=384))}
