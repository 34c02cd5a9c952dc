"""How an image becomes positions of the LLM: how many, from its size alone, and the text that stands around them.

image (width, height) --layout--> its tiles, in order, each a square for the encoder --connector--> positions of a tile

square      one tile, no text
idefics3    one tile between the texts that Idefics3Processor writes around an image that it does not split
none        text alone: no positions, and a sample that has images is unusable
stripped    text alone: images and their marks are taken out of samples

The texts are written into the conversation before it is tokenized, once and whole, as the stock processors do: text
lengths, and so text fingerprints, depend on them. Index, packs, loader, fusion, planner and exports ask here alone.
The index asks by an image's size; templates, the planner and answers know of one tile: with more, samples have to
bring sizes along.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmtrain.config.schema import RunConfig

NONE, STRIPPED = "none", "stripped"
WRAPPERS = {
    "square": ("", ""),
    "idefics3": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
    NONE: ("", ""),
    STRIPPED: ("", ""),
}  # layout -> text before and behind an image's positions


def layout_name(config: RunConfig) -> str:
    """The layout of a run's images, whose numbers the encoder decides."""
    if config.model.vision is not None:
        return config.model.vision.layout
    return STRIPPED if config.data.images == "strip" else NONE


def marks_around(layout: str) -> tuple[list[str], list[str]]:
    """The tokens that a layout's texts before and behind an image are made of."""
    before, after = (re.findall(r"<[^<>]+>", text) for text in WRAPPERS[layout])
    return before, after


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """A layout with its numbers."""

    name: str  # as `layout_name` says
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
