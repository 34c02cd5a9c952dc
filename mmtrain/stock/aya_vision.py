"""AyaVision: pixel shuffle and SwiGLU; one tile without texts, or named tiles of a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmtrain.config.limits import MAX_TILES
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.models import Models
from mmtrain.facts.settings import is_whole
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles
from mmtrain.stock.stock_class import ExportedEncoder, Settings, StockClass
from mmtrain.stock.stock_folder import IMAGES, Keys, StockFolder, unfit

if TYPE_CHECKING:
    from mmtrain.data.stream.images import ImageTransform

# AyaVisionProcessor's own
_AROUND = {"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"}


class AyaVision(StockClass):
    """Aya Vision: N positions a tile exactly."""

    name = "AyaVision"
    model_type = "aya_vision"
    connectors = ("shuffle_swiglu",)
    layouts = (Square.name, Tiles.name)
    image_processor = "GotOcr2ImageProcessor"

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        settings = {
            "downsample_factor": models.factor,
            "alignment_intermediate_size": models.section.projector.width,
            "adapter_layer_norm_eps": 1e-6,
            "vision_feature_layer": encoder.feature_layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }
        if models.section.projector.width is None:
            del settings["alignment_intermediate_size"]
        return settings

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        texts = dict.fromkeys((*_AROUND, "img_line_break_token", *Tiles.token_settings), "")
        if models.section.vision.layout == Tiles.name:
            texts |= Tiles.token_settings
        return {
            "image_token": IMAGE_MARK,
            "img_patch_token": IMAGE_MARK,
            "patch_size": encoder.patch_size,
            "downsample_factor": models.factor,
            "img_size": models.layout.tile_size,
            **texts,
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        """Allow one tile where the layout has one: the processor asks for tiles in any case."""
        return {
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 1,
            **layout.image_settings,
        }

    def read(self, folder: StockFolder) -> Keys:
        largest = folder.images.get("max_patches", 12)
        smallest = folder.images.get("min_patches", 1)
        fit = folder.fit()
        names = Tiles.token_settings
        is_cut = names.items() <= (names | folder.processor).items()
        keys = {"image_fit": fit}
        if is_cut:
            if fit != "resize" or smallest != 1 or not is_whole(largest, 1, MAX_TILES):
                raise unfit(
                    IMAGES,
                    "max_patches, min_patches and fit",
                    [largest, smallest, fit],
                    f"up to {MAX_TILES} tiles, at least 1, of resized pictures",
                )
            folder.no_texts(folder.processor, _AROUND, Tiles.name)
            keys = {"layout": Tiles.name, "max_tiles": largest, "image_fit": None}
        else:
            folder.one_tile("max_patches", largest, largest == 1)
            folder.no_texts(folder.processor, _AROUND | names, Square.name)
        return keys | {
            "select_layer": folder.layer(-1, "full"),
            "factor": self.factor(folder, "downsample_factor"),
            "width": folder.config.get("alignment_intermediate_size"),
        }
