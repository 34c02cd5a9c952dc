"""How an image becomes positions of the LLM: how many, from its size alone, and the text that stands around them.

image (width, height) --layout--> its tiles, in order, each a square for the encoder --connector--> positions of a tile

square      one tile, no text
idefics3    one tile between the texts that Idefics3Processor writes around an image that it does not split

The texts are written into the conversation before it is tokenized, once and whole, as the stock processors do: text
lengths, and so text fingerprints, depend on them. Index, packs, loader, fusion, planner and exports ask here alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmtrain.base.errors import UserError
from mmtrain.config.schema import ModelSection
from mmtrain.pretrained.connectors import reduction
from mmtrain.pretrained.shapes import vision_shape

WRAPPERS = {
    "square": ("", ""),
    "idefics3": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
}  # layout -> text before and behind an image's positions


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """A layout with its numbers."""

    name: str  # `model.vision.layout`
    positions_per_tile: int

    @property
    def wrapper(self) -> tuple[str, str]:
        """Texts before and behind an image's positions."""
        return WRAPPERS[self.name]

    def tiles(self, width: int, height: int) -> int:
        """Squares that the encoder sees of an image of this size in pixels."""
        return 1

    def positions(self, width: int, height: int) -> int:
        """Positions of the LLM that an image of this size in pixels takes, without the text around them."""
        return self.tiles(width, height) * self.positions_per_tile


def image_layout(model: ModelSection) -> ImageLayout:
    """The layout of a run's images.

    Raises UserError for an encoder whose grid of patches the connector's factor does not divide, and what
    `vision_shape` raises.
    """
    vision = vision_shape(model.vision.name, model.vision.select_layer, model.vision.final_norm)
    factor, side = reduction(model.projector), math.isqrt(vision.patches_per_image)
    if side % factor:
        fitting = [str(other) for other in (2, 3, 4) if side % other == 0]
        remedy = f"set model.projector.factor={' or '.join(fitting)}" if fitting else "none of 2, 3 and 4 does"
        raise UserError(
            f"model.projector.factor: {factor} does not divide the grid of {model.vision.name}, {side} x {side} "
            f"patches ({vision.image_size} pixels in patches of {vision.patch_size}); {remedy}"
            + ("" if fitting else ": take another encoder, or model.projector.type=mlp2x_gelu")
        )
    return ImageLayout(model.vision.layout, vision.patches_per_image // factor**2)
