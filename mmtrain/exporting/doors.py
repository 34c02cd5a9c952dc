"""What each stock class wants in its folder: names of tensors, keys of config.json, its processor's files.

run, encoder --StockDoor--> config.json, names on disk, processor_config.json, preprocessor_config.json

One class a door; `mmtrain.pretrained.doors` says which runs each takes. Names on disk are those that transformers
itself saved or reads for the published models of a class; its loader is asked whether all of them find their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel

from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.stream.images import ImageTransform
from mmtrain.exporting.vision import ExportedEncoder
from mmtrain.pretrained.doors import DOORS, Door


class StockDoor:
    """LLaVA's folder; another door says what it has otherwise."""

    vision: ClassVar[str] = "vision_tower."  # what stands before the names of the encoder's tensors
    connector: ClassVar[str] = "multi_modal_projector."
    # Names of transformers 4 too, which version 5 reads.
    decoder: ClassVar[str] = "language_model.model."
    head: ClassVar[str] = "language_model.lm_head.weight"
    tiny_encoder: ClassVar[Mapping[str, Any]] = {
        "model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "image_size": 8, "patch_size": 8,
    }  # fmt: skip
    image_processor: ClassVar[str] = "LlavaImageProcessor"
    image_token_key: ClassVar[str] = "image_token_index"  # in config.json

    def __init__(self, facts: Door) -> None:
        self.facts = facts
        self.class_name = f"{facts.name}ForConditionalGeneration"
        self.processor_name = f"{facts.name}Processor"
        self.model_class: type[PreTrainedModel] = getattr(transformers, self.class_name)
        self.config_class: type[PreTrainedConfig] = getattr(transformers, f"{facts.name}Config")

    def config(self, run: RunConfig, encoder: ExportedEncoder, image_token_id: int, positions: int) -> dict[str, Any]:
        """The class's own keys of config.json; `positions`: of an image in the LLM."""
        return {
            self.image_token_key: image_token_id,
            "image_seq_length": positions,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "vision_feature_layer": encoder.feature_layer,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def processor(self, run: RunConfig, encoder: ExportedEncoder, positions: int) -> dict[str, Any]:
        """The class's own keys of processor_config.json."""
        return {
            "image_token": IMAGE_MARK,
            "patch_size": encoder.patch_size,
            "num_additional_image_tokens": encoder.prefix_tokens,
            "vision_feature_select_strategy": encoder.select_strategy,
        }

    def image_settings(self, transform: ImageTransform) -> dict[str, Any]:
        """The content of preprocessor_config.json, but for what is its class's own."""
        return {
            "image_processor_type": self.image_processor,
            "processor_class": self.processor_name,
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"height": transform.image_size, "width": transform.image_size},
            "resample": int(Image.Resampling[transform.interpolation.upper()]),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(transform.mean),
            "image_std": list(transform.std),
            **self.own_image_settings(transform),
        }

    def own_image_settings(self, transform: ImageTransform) -> dict[str, Any]:
        """One class serves every fit: it pads to a square of int(255 x mean) first, then resizes, then crops.

        Nothing is left to crop but for center_crop; crop_size is what other software reads the encoder's size from.
        """
        square = {"height": transform.image_size, "width": transform.image_size}
        size = {"shortest_edge": transform.image_size} if transform.fit == "center_crop" else square
        return {"do_pad": transform.fit == "pad", "size": size, "do_center_crop": True, "crop_size": square}

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """The images (N, 3, S, S) of one sample as the stock model takes them."""
        return images


STOCK_DOORS: dict[str, type[StockDoor]] = {"Llava": StockDoor}  # by Door.name


def door_of(facts: Door) -> StockDoor:
    """The stock class of a door, and what its folder must hold."""
    return STOCK_DOORS[facts.name](facts)


def door_of_type(model_type: str) -> StockDoor:
    """The same for a door's model_type in a config.json."""
    return next(door_of(facts) for facts in DOORS if facts.model_type == model_type)
