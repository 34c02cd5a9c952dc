"""The folder of a whole multimodal model, as its stock class reads it: what its files say, or why mmtrain cannot."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.config.limits import MAX_CELLS, MAX_GRIDS
from mmtrain.config.model import Pinpoints
from mmtrain.facts.connectors import refuse_other_settings
from mmtrain.facts.model_files import Shape, read_json, tensor_shapes
from mmtrain.facts.settings import is_whole
from mmtrain.facts.shapes import VisionShape, vision_shape
from mmtrain.facts.vision_files import image_settings, preprocessing
from mmtrain.layouts.anyres import Anyres

_log = logging.getLogger(__name__)
Keys = dict[str, Any]
PARTS = ("model.llm.path", "model.vision.name", "model.projector.init_from")
BY_PARTS = f"set the model's parts instead, in {', '.join(PARTS)}"
BOUNDS = ("min_positions", "max_positions")  # of image tokens
CONFIG, IMAGES = "config.json", "its image processor"
_CONNECTOR = re.compile(
    r"(?:model\.)?(?:multi_modal_projector|vision_project(?:ion|or)|connector\.modality_projection|projector\.readout"
    r"|visual\.merger|mlp_AR)\."
)
_PINPOINTS: TypeAdapter[Pinpoints] = TypeAdapter(Pinpoints)


@dataclass(frozen=True)
class StockFolder:
    """A folder, and its readers; each raises UserError for what mmtrain does not compute as the folder says."""

    path: str
    folder: Path
    config: dict[str, Any]  # config.json

    def check(self) -> None:
        """Refuse a folder whose weights hold no connector, or other settings or pixels than mmtrain's."""
        refuse_other_settings(self.config, CONFIG)
        if not any(_CONNECTOR.match(name) for name in self.tensors):
            raise UserError(f"its weights hold no connector ({_CONNECTOR.pattern}). Download the folder again")
        if self.images.get("do_resize", True) is not True:
            raise unfit(IMAGES, "do_resize", self.images["do_resize"], "true")

    @cached_property
    def tensors(self) -> dict[str, Shape]:
        """Shapes of its tensors by their names on disk."""
        return tensor_shapes(self.folder) or {}

    @cached_property
    def vision(self) -> VisionShape:
        return vision_shape(self.path, -1)

    @cached_property
    def images(self) -> dict[str, Any]:
        preprocessing(self.folder)  # which has an error for its absence
        return image_settings(self.folder)[1] or {}

    @cached_property
    def processor(self) -> dict[str, Any]:
        file = self.folder / "processor_config.json"
        return read_json(file) if file.is_file() else {}

    @cached_property
    def named_tokens(self) -> dict[str, Any]:
        """Texts that its tokenizer's file has by name."""
        file = self.folder / "tokenizer_config.json"
        named = read_json(file) if file.is_file() else {}
        more = named.get("extra_special_tokens")
        return named | (more if isinstance(more, dict) else {})

    def one_tile(self, key: str, value: Any, is_one: bool) -> None:
        """Refuse a processor that cuts images into tiles."""
        if not is_one:
            raise unfit(IMAGES, key, value, "one square per image")

    def no_texts(self, texts: dict[str, Any], layout: str) -> None:
        """Refuse a processor that writes texts around images which the layout does not have."""
        for key, text in texts.items():
            if text:
                raise unfit("its processor", key, text, f"an empty text, as layout {layout} writes none")

    def square(self, key: str, sides: Any) -> None:
        """Refuse pictures of another size than the encoder's."""
        pixels = list(sides.values()) if isinstance(sides, dict) else [sides]
        if not pixels or any(side != self.vision.image_size for side in pixels):
            raise unfit(IMAGES, key, sides, f"{self.vision.image_size} pixels a side, as its encoder takes")

    def grids(self, layout: Anyres) -> Keys:
        """Return the keys of an image layout of grids; `layout` has those of a folder that says none."""
        self.fit()
        key = "image_grid_pinpoints"
        trained, processed = (settings.get(key) for settings in (self.config, self.images))
        trained, processed = (layout.grids if grids is None else grids for grids in (trained, processed))
        try:
            trained, processed = map(_PINPOINTS.validate_python, (trained, processed))
        except ValidationError:
            raise unfit(CONFIG, key, trained, f"up to {MAX_GRIDS} pairs of height and width in pixels") from None
        if trained != processed:
            raise unfit(IMAGES, key, processed, f"{shown(trained)}, as config.json says")
        return {"pinpoints": trained, "image_fit": None}

    def cells(self, bounds: Sequence[Any], cell: int = 1) -> Keys:
        """Return the keys of layout native for bounds of its image processor, in cells of `cell` pixels."""
        least, most = bounds
        if not is_whole(most, cell, MAX_CELLS * cell) or not is_whole(least, 1, most // cell * cell):
            unit = "image tokens" if cell == 1 else f"pixels, {cell:,} an image token"
            raise unfit(IMAGES, "minimum and maximum size", list(bounds), f"a minimum and a larger maximum in {unit}")
        if least % cell or most % cell:
            _log.info(
                f"model.pretrained: {self.path}: its processor bounds images to {least:,} to {most:,} pixels, which "
                f"are no whole image tokens ({cell:,} pixels); mmtrain trains on {-(-least // cell):,} to "
                f"{most // cell:,} image tokens, and exports those bounds"
            )
        return {"min_positions": -(-least // cell), "max_positions": most // cell, "image_fit": None}

    def equal(self, file: str, said: dict[str, Any], needed: dict[str, Any], defaults: dict[str, Any]) -> None:
        """Refuse settings, `defaults` where absent, that differ from `needed`."""
        for key, value in needed.items():
            if (found := said.get(key, defaults.get(key, value))) != value:
                raise unfit(file, key, found, shown(value))

    def layer(self, default: int, strategy: str) -> int:
        """Return model.vision.select_layer; folders count hidden states from 0, the embeddings."""
        layer, depth = self.config.get("vision_feature_layer", default), self.vision.blocks_run
        if not is_whole(layer, -depth, depth) or layer == 0:
            raise unfit(CONFIG, "vision_feature_layer", layer, f"one block, 1 to {depth} or -{depth} to -1")
        selected = self.config.get("vision_feature_select_strategy", strategy)
        # Else a class token would be a patch, or a patch would be dropped.
        if selected != (needed := "default" if self.vision.prefix_tokens else "full"):
            raise unfit(CONFIG, "vision_feature_select_strategy", selected, needed)
        return layer if layer < 0 else layer - depth - 1

    def fit(self) -> str:
        """Return data.image_fit, of the processors of CLIP, SigLIP and Llava."""
        size, crops = self.images.get("size"), self.images.get("do_center_crop", "crop_size" in self.images)
        if crops:
            self.square("crop_size", self.images.get("crop_size"))
        is_edge = not isinstance(size, dict) or "shortest_edge" in size
        self.square("size", size)
        if self.images.get("do_pad"):
            return "pad"
        if is_edge and not crops:
            raise unfit(IMAGES, "size", size, "a square, or do_center_crop")
        return "center_crop" if is_edge else "resize"


def unfit(file: str, key: str, value: Any, needed: str) -> UserError:
    """The error for a setting of a folder that mmtrain does not train with."""
    return UserError(f"{file} says {key} {shown(value)}; needed is {needed}. Correct that, or {BY_PARTS}.")


def shown(value: Any) -> str:
    return "null" if value is None else escape(repr(value))
