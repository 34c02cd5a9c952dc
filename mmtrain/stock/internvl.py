"""InternVL: pixel shuffle, a norm and an MLP behind an InternViT; one tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import vision_shape
from mmtrain.layouts.layout import ImageLayout
from mmtrain.stock.stock_class import INTERN_VIT, ExportedEncoder, Settings, StockClass
from mmtrain.stock.stock_folder import Keys, StockFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmtrain.data.stream.images import ImageTransform

_AROUND = {"start_image_token": "", "end_image_token": ""}  # texts around an image


class InternVL(StockClass):
    """InternVL. Its config makes an InternViT of any encoder, without another one's weights."""

    name = "InternVL"
    model_type = "internvl"
    connectors = ("shuffle_mlp2x_gelu",)
    factors = (2, 4)  # of 3 its class finds that 27 is no multiple of 1/3
    encoders = (INTERN_VIT,)
    tiny_encoder: ClassVar = {**StockClass.tiny_encoder, "model_type": "internvl_vision"}
    image_token_key = "image_token_id"
    image_processor = "GotOcr2ImageProcessor"
    video_processor = "InternVLVideoProcessor"

    def config(self, models: Models, encoder: ExportedEncoder) -> Settings:
        # -1 is behind the last norm, which some InternViTs have; hidden states before it are
        # counted from 0
        layer = encoder.feature_layer
        if layer == -1:
            layer = encoder.config["num_hidden_layers"]
        return {
            "image_seq_length": models.layout.positions_per_tile,
            "downsample_ratio": 1 / models.factor,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def processor(self, models: Models, encoder: ExportedEncoder) -> Settings:
        return {"image_seq_length": models.layout.positions_per_tile}

    def own_image_settings(self, transform: ImageTransform, layout: ImageLayout) -> Settings:
        return {"crop_to_patches": False, "min_patches": 1, "max_patches": 1}

    def named_tokens(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Return padding as the video token: the processor looks for it, and no text has it."""
        return {**_AROUND, "context_image_token": IMAGE_MARK, "video_token": tokenizer.pad_token}

    def read(self, folder: StockFolder) -> Keys:
        max_patches = folder.images.get("max_patches", 12)
        folder.one_tile("max_patches", max_patches, max_patches == 1)
        folder.no_texts(folder.named_tokens, _AROUND, self.layouts[0])
        factor = folder.config.get("downsample_ratio", 0.5)
        if isinstance(factor, float) and factor > 0 and (1 / factor).is_integer():
            factor = int(1 / factor)
        # its class takes -1 for the encoder's result, behind its norm
        is_last = folder.config.get("vision_feature_layer", -1) == -1
        normed = vision_shape(folder.path, -1, True)
        has_norm = len(normed.parameters) > len(folder.vision.parameters)
        return {
            "select_layer": folder.layer(-1, "default"),
            "final_norm": is_last and has_norm,
            "factor": self.factor(folder, "downsample_ratio", factor),
            "image_fit": folder.fit(),
        }
