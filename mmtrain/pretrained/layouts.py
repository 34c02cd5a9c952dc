"""How an image becomes positions of the LLM: how many, from its size alone, and the text that stands around them.

image (width, height) --layout--> its tiles, in order, each a square for the encoder --connector--> positions of a tile

square      one tile, no text
idefics3    one tile between the texts that Idefics3Processor writes around an image that it does not split
require     text alone, as data.images: no positions, and a sample that has images is unusable
strip       text alone, as data.images: images and their marks are taken out of samples

The texts are written into the conversation before it is tokenized, once and whole, as the stock processors do: text
lengths, and so text fingerprints, depend on them. Index, packs, loader, fusion, planner and exports ask here alone.
The index asks by an image's size; templates, the planner and answers know of one tile: with more, samples have to
bring sizes along.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from mmtrain.config.schema import RunConfig

REQUIRE, STRIP = TEXT_ALONE = "require", "strip"
WRAPPERS = {
    "square": ("", ""),
    "idefics3": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
    REQUIRE: ("", ""),
    STRIP: ("", ""),
}  # layout -> text before and behind an image's positions


def layout_name(config: RunConfig) -> str:
    """The layout of a run's images, whose numbers the encoder decides."""
    return config.data.images if config.model.vision is None else config.model.vision.layout


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a command that takes shards without a configuration; `layout` has a name as `layout_name` says."""
    group = parser.add_mutually_exclusive_group()
    shown = [name for name in WRAPPERS if name not in TEXT_ALONE]
    group.add_argument(
        "--layout", default="square", choices=shown, help="as model.vision.layout: texts around images (square)"
    )
    group.add_argument(
        "--images",
        dest="layout",
        default=argparse.SUPPRESS,
        choices=TEXT_ALONE,
        help="for a run without encoder, as data.images: samples that have some cannot be trained on, or on their text",
    )


def layout_argument(layout: str) -> str:
    """What follows the other options of `mmtrain index` in a message that asks for this layout's lengths."""
    if layout in TEXT_ALONE:
        return f" --images {layout}"
    return "" if layout == "square" else f" --layout {layout}"


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
    def takes_images(self) -> bool:
        """Whether there is an encoder, so that images reach the model."""
        return self.name not in TEXT_ALONE

    @property
    def strips(self) -> bool:
        """Whether images are taken out of samples."""
        return self.name == STRIP

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

    def images(self, positions: int) -> int:
        """Images that take so many positions together."""
        return positions // self.positions_per_tile if self.takes_images else 0
