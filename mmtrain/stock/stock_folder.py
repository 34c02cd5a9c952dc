"""The folder of a whole multimodal model, as its stock class reads it; unfit files are refused."""

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
from mmtrain.facts.model_files import optional_json, tensor_shapes
from mmtrain.facts.projector import refuse_other_settings
from mmtrain.facts.settings import Shape, is_whole
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
_PINPOINTS = TypeAdapter(Pinpoints)


@dataclass(frozen=True)
class StockFolder:
    """A folder and its readers, which raise UserError for what mmtrain does not compute."""

    path: str
    folder: Path
    config: Keys  # config.json

    def check(self) -> None:
        """Refuse a folder without a connector, or with other settings or pixels than mmtrain's."""
        refuse_other_settings(self.config, CONFIG)
        if not any(_CONNECTOR.match(name) for name in self.tensors):
            raise UserError(
                f"its weights hold no connector ({_CONNECTOR.pattern}). Download the folder again"
            )
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
    def images(self) -> Keys:
        preprocessing(self.folder)  # which has an error for its absence
        return image_settings(self.folder)[1] or {}

    @cached_property
    def processor(self) -> Keys:
        return optional_json(self.folder, "processor_config.json")

    @cached_property
    def named_tokens(self) -> Keys:
        """Texts that its tokenizer's file has by name."""
        named = optional_json(self.folder, "tokenizer_config.json")
        more = named.get("extra_special_tokens")
        if isinstance(more, dict):
            named |= more
        return named

    def one_tile(self, key: str, value: Any, is_one: bool) -> None:
        """Refuse a processor that cuts images into tiles."""
        if not is_one:
            raise unfit(IMAGES, key, value, "one square per image")

    def no_texts(self, said: Keys, defaults: Keys, layout: str) -> None:
        """Refuse a processor that writes texts around images which the layout does not have.

        `said` holds them by the keys of `defaults`.
        """
        for key, default in defaults.items():
            if text := said.get(key, default):
                raise unfit(
                    "its processor", key, text, f"an empty text, as layout {layout} writes none"
                )

    def square(self, key: str, sides: Any) -> None:
        """Refuse pictures of another size than the encoder's."""
        needed = self.vision.image_size
        pixels = [sides]
        if isinstance(sides, dict):
            pixels = list(sides.values())
        if not pixels or any(side != needed for side in pixels):
            raise unfit(IMAGES, key, sides, f"{needed} pixels a side, as its encoder takes")

    def grids(self, layout: Anyres) -> Keys:
        """Return the keys of an image layout of grids; `layout` has those of a folder without."""
        self.fit()
        key = "image_grid_pinpoints"
        grids = []
        for settings in (self.config, self.images):
            found = settings.get(key)
            grids.append(layout.grids if found is None else found)
        try:
            trained, processed = map(_PINPOINTS.validate_python, grids)
        except ValidationError:
            needed = f"up to {MAX_GRIDS} pairs of height and width in pixels"
            raise unfit(CONFIG, key, grids[0], needed) from None
        if trained != processed:
            raise unfit(IMAGES, key, processed, f"{shown(trained)}, as config.json says")
        return {"pinpoints": trained, "image_fit": None}

    def cells(self, bounds: Sequence[Any], cell: int = 1) -> Keys:
        """Return the keys of layout native for bounds of its image processor.

        The bounds are in pixels; a cell has `cell` of them.
        """
        least, most = bounds
        key = "minimum and maximum size"
        unit = "image tokens"
        if cell > 1:
            unit = f"pixels, {cell:,} an image token"
        is_most = is_whole(most, cell, MAX_CELLS * cell)
        if not is_most or not is_whole(least, 1, most // cell * cell):
            raise unfit(IMAGES, key, list(bounds), f"a minimum and a larger maximum in {unit}")
        min_positions = -(-least // cell)
        max_positions = most // cell
        if least % cell or most % cell:
            _log.info(
                f"model.pretrained: {self.path}: its processor bounds images to {least:,} to "
                f"{most:,} pixels, which are no whole image tokens ({cell:,} pixels); "
                f"mmtrain trains on {min_positions:,} to {max_positions:,} image tokens, "
                "and exports those bounds"
            )
        return {"min_positions": min_positions, "max_positions": max_positions, "image_fit": None}

    def equal(self, file: str, said: Keys, needed: Keys, defaults: Keys) -> None:
        """Refuse settings, `defaults` where absent, that differ from `needed`."""
        for key, value in needed.items():
            if (found := said.get(key, defaults.get(key, value))) != value:
                raise unfit(file, key, found, shown(value))

    def layer(self, default: int, strategy: str) -> int:
        """Return model.vision.select_layer; folders count hidden states from 0, the embeddings."""
        key = "vision_feature_layer"
        layer = self.config.get(key, default)
        depth = self.vision.blocks_run
        if not is_whole(layer, -depth, depth) or layer == 0:
            raise unfit(CONFIG, key, layer, f"one block, 1 to {depth} or -{depth} to -1")
        if layer > 0:
            layer -= depth + 1

        key = "vision_feature_select_strategy"
        selected = self.config.get(key, strategy)
        # Else a class token would be a patch, or a patch would be dropped.
        needed = "full"
        if self.vision.prefix_tokens:
            needed = "default"
        if selected != needed:
            raise unfit(CONFIG, key, selected, needed)
        return layer

    def fit(self) -> str:
        """Return data.image_fit, of the processors of CLIP, SigLIP and Llava."""
        size = self.images.get("size")
        crops = self.images.get("do_center_crop", "crop_size" in self.images)
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
    """Make the error for a setting of a folder that mmtrain does not train with."""
    return UserError(
        f"{file} says {key} {shown(value)}; needed is {needed}. Correct that, or {BY_PARTS}."
    )


def shown(value: Any) -> str:
    if value is None:
        return "null"
    return escape(repr(value))
