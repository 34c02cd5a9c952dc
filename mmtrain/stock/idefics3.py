"""Idefics3 and SmolVLM: pixel shuffle and one linear layer, a square between texts."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from mmtrain.facts.models import Models
from mmtrain.facts.shapes import VisionShape
from mmtrain.facts.vision_files import published_images
from mmtrain.layouts import idefics3
from mmtrain.layouts.layout import ImageLayout, Tiling
from mmtrain.stock.stock_class import OUTER, ExportedEncoder, Inputs, NestedClass, Settings
from mmtrain.stock.stock_folder import Keys, StockFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mmtrain.data.stream.images import ImageTransform

_log = logging.getLogger(__name__)


class Idefics3(NestedClass):
    """Idefics3: one square between the texts of the layout `idefics3`. Its ViT is SigLIP's."""

    name = "Idefics3"
    model_type = "idefics3"
    connectors = ("shuffle_linear",)
    final_norm = True
    layouts = (idefics3.Idefics3.name,)
    encoders = ("SiglipVisionModel",)
    # torch.arange rounds by the width of a CPU's vectors, 1 to 16, so that these grids have some
    # patches at another's position (`Idefics3VisionEmbeddings.forward`); it was looked at up to
    # `largest_grid`.
    largest_grid = 64
    misplaced = frozenset(
        {19, 25, 29, 31, 36, 37, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62}
    )
    also = ("smolvlm",)
    own_encoders = ("idefics3_vision", "idefics3")  # the latter in files of transformers 4.46
    encoder_names = "model.vision_model."
    connector_names = "model.connector.modality_projection."
    decoder_names = "model.text_model."
    tiny_encoder: ClassVar = {**NestedClass.tiny_encoder, "model_type": "idefics3_vision"}
    image_processor = "Idefics3ImageProcessor"
    more_tokens = ("<fake_token_around_image>", "<end_of_utterance>")

    def unfit_encoder(self, name: str, vision: VisionShape) -> str:
        """Refuse an encoder whose mean colour 8 bits can hold.

        The model takes a square of zeros, which has that colour, for no image.
        """
        images = published_images(name)
        if images is not None and all((255 * channel).is_integer() for channel in images.mean):
            return (
                f"an image of its mean colour would be all zeros, which {self.class_name} "
                "reads as no image"
            )
        return super().unfit_encoder(name, vision)

    def adapt_encoder(self, models: Models, encoder: ExportedEncoder) -> ExportedEncoder:
        config = encoder.config
        own = [key for key in config if not key.startswith(("vision_", "project"))]
        settings = {key: config[key] for key in own}
        tensors = {name.removeprefix(OUTER): source for name, source in encoder.tensors.items()}
        renamed = replace(encoder, config=settings, tensors=tensors)
        return renamed.without("head.", model_type="idefics3_vision")

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {"scale_factor": models.factor}

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {"image_seq_len": models.layout.positions_per_tile}

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        return {
            "do_image_splitting": False,
            "max_image_size": {"longest_edge": transform.image_size},
        }

    def inputs(self, tiles: torch.Tensor, tilings: Sequence[Tiling], layout: ImageLayout) -> Inputs:
        return {"pixel_values": tiles[None]}

    def read(self, folder: StockFolder) -> Keys:
        folder.square("max_image_size", folder.images.get("max_image_size"))
        if folder.images.get("do_image_splitting", True):
            _log.info(
                f"model.pretrained: {folder.path}: its processor cuts images into tiles "
                f"(do_image_splitting); mmtrain trains on one square of "
                f"{folder.vision.image_size} pixels, and exports a processor that makes one"
            )
        return {"factor": self.factor(folder, "scale_factor")}
