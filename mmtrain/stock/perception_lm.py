"""PerceptionLM: an MLP, averaged over r x r patches, behind timm's own encoder; one tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.encoders import TIMM
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import VisionShape
from mmtrain.facts.vision_files import unfit_filter
from mmtrain.layouts.layout import ImageLayout, Tiling
from mmtrain.stock.stock_class import ON_WHITE, ExportedEncoder, Inputs, NestedClass, Settings
from mmtrain.stock.stock_folder import CONFIG, Keys, StockFolder, unfit

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedTokenizerBase

    from mmtrain.data.stream.images import ImageTransform


class PerceptionLM(NestedClass):
    name = "PerceptionLM"
    model_type = "perception_lm"
    connectors = ("mlp2x_gelu_pool", "mlp2x_gelu")
    final_norm = True
    encoders = (TIMM,)
    own_encoders = ("timm_wrapper",)
    tiny_encoder: ClassVar = {
        "model_type": "timm_wrapper",
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"img_size": 8, "patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 1},
    }
    image_processor = "PerceptionLMImageProcessor"
    backends = ("torchvision",)
    video_processor = "PerceptionLMVideoProcessor"
    video_token = "<|video|>"

    def unfit_encoder(self, name: str, vision: VisionShape) -> str:
        return unfit_filter(name) or super().unfit_encoder(name, vision)

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {
            "vision_use_cls_token": bool(encoder.prefix_tokens),
            "projector_pooling_ratio": models.factor,
        }

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {"patch_size": encoder.patch_size, "pooling_ratio": models.factor}

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        return {
            "vision_input_type": "one tile",
            "tile_size": transform.image_size,
            "max_num_tiles": 1,
        }

    def pillow_pixels(self, transform: ImageTransform, layout: ImageLayout) -> str:
        """Return Python that resizes `picture` as Pillow did in training."""
        size = (transform.image_size, transform.image_size)
        by = transform.interpolation.upper()
        return f"picture = {ON_WHITE}.resize({size}, Image.Resampling.{by})"

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        return {"image_token": IMAGE_MARK, "video_token": self.video_token}

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: ImageLayout) -> Inputs:
        return {"pixel_values": tiles[:, None]}

    def read(self, folder: StockFolder) -> Keys:
        tiles = folder.images.get("vision_input_type", "thumb+tile")
        folder.one_tile("vision_input_type", tiles, tiles != "thumb+tile")
        folder.square("tile_size", folder.images.get("tile_size", 448))
        uses_class = folder.config.get("vision_use_cls_token", True)
        if uses_class is not bool(folder.vision.prefix_tokens):
            raise unfit(CONFIG, "vision_use_cls_token", uses_class, str(not uses_class))
        ratio = folder.config.get("projector_pooling_ratio", 1)
        factor = self.factor(folder, "projector_pooling_ratio", ratio)
        return {"factor": factor, "type": self.connectors[factor is None]}
