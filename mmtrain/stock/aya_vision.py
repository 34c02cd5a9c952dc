"""AyaVision: pixel shuffle and SwiGLU; one tile without texts around it, or the tiles of a grid,
each named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmtrain.config.limits import MAX_TILES
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.models import Models
from mmtrain.facts.settings import is_whole
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles
from mmtrain.stock.stock_class import ExportedEncoder, StockClass
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

    def config(self, models: Models, encoder: ExportedEncoder) -> dict[str, Any]:
        width = models.section.projector.width
        return {
            "downsample_factor": models.factor,
            **({} if width is None else {"alignment_intermediate_size": width}),
            "adapter_layer_norm_eps": 1e-6,
            "vision_feature_layer": encoder.feature_layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def processor(self, models: Models, encoder: ExportedEncoder) -> dict[str, Any]:
        no_texts = dict.fromkeys((*_AROUND, "img_line_break_token", *Tiles.token_settings), "")
        return {
            "image_token": IMAGE_MARK,
            "img_patch_token": IMAGE_MARK,
            "patch_size": encoder.patch_size,
            "downsample_factor": models.factor,
            "img_size": encoder.image_size,
            **no_texts,
            **(Tiles.token_settings if models.section.vision.layout == Tiles.name else {}),
        }

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> dict[str, Any]:
        """Allow one tile where the layout has one: the processor asks for tiles whatever the file
        says.
        """
        return {
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 1,
            **layout.image_settings,
        }

    def read(self, folder: StockFolder) -> Keys:
        largest, smallest = (
            folder.images.get("max_patches", 12),
            folder.images.get("min_patches", 1),
        )
        around, names = (
            {key: folder.processor.get(key, text) for key, text in texts.items()}
            for texts in (_AROUND, Tiles.token_settings)
        )
        fit, is_cut = folder.fit(), names == Tiles.token_settings
        keys: Keys = (
            {"layout": Tiles.name, "max_tiles": largest, "image_fit": None}
            if is_cut
            else {"image_fit": fit}
        )
        if not is_cut:
            folder.one_tile("max_patches", largest, largest == 1)
        elif fit != "resize" or smallest != 1 or not is_whole(largest, 1, MAX_TILES):
            needed = f"up to {MAX_TILES} tiles, at least 1, of resized pictures"
            raise unfit(
                IMAGES, "max_patches, min_patches and fit", [largest, smallest, fit], needed
            )
        folder.no_texts(around if is_cut else around | names, Tiles.name if is_cut else Square.name)
        return keys | {
            "select_layer": folder.layer(-1, "full"),
            "factor": self.factor(
                folder, "downsample_factor", folder.config.get("downsample_factor", 2)
            ),
            "width": folder.config.get("alignment_intermediate_size"),
        }
