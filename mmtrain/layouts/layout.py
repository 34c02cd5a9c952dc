"""Image layouts: tiles for the encoder, positions of the LLM, text around them. One file a layout.

image (width, height) --ImageLayout.tiling--> Tiling: a grid of tiles, how the picture fills it, its
    positions
                      --ImageLayout.pieces--> its part of a text: words, and runs of positions

The base class is one tile without text. A new layout overrides what it has otherwise, in a file of
its own, and enters `registry.py`. Index, packs, loader, fusion, planner and exports ask these
classes alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

Canvas = Literal["fitted", "padded", "stretched", "centred"]
Overview = Literal["first", "last"]


class UnfitImage(ValueError):  # noqa: N818
    """An image that cannot be cut: so long and thin that nothing of it would be left."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The positions of a padded grid that show the picture, and to how many they are resized."""

    top: int  # rows of positions above the picture, and below it, that are left out
    left: int  # positions before it in a row, and behind it, that are left out
    height: int  # rows of positions that show it
    width: int  # positions of such a row that show it
    lines: int  # rows after interpolation, each with a newline behind it
    length: int  # positions of a line after interpolation, the newline not counted


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles and positions of an image of one size; tiles are encoded in the order of positions."""

    width: int  # of the image, in pixels; 0 where the layout does not ask for it
    height: int
    positions: int  # of the LLM, without texts around them
    rows: int = 1  # of the grid of tiles
    columns: int = 1
    # how the grid is filled: fitted, by data.image_fit; padded, on a square of the mean
    # colour; stretched, to the grid's size; centred, in its shape, on black
    canvas: Canvas = "fitted"
    # where a tile of the whole picture stands, resized
    overview: Overview | None = None
    shown: Shown | None = None  # None: all positions of all tiles
    newlines: int = 0  # trained positions among them

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + (self.overview is not None)


@dataclass(frozen=True)
class ImageLayout:
    """A layout with its numbers; a subclass adds those of the keys that it reads."""

    positions_per_tile: int = 1
    tile_size: int = 0  # pixels a side; a layout that is sized needs it

    name: ClassVar[str]  # in model.vision.layout, or data.images for a run without an encoder
    keys: ClassVar[tuple[str, ...]] = ()  # of model.vision that only some layouts read
    takes_images: ClassVar[bool] = True  # there is an encoder, so that images reach the model
    # the encoder sees all tiles of an image at once, as cells of one picture
    attends_across: ClassVar[bool] = False
    strips: ClassVar[bool] = False  # images are taken out of samples
    is_sized: ClassVar[bool] = False  # tiles and positions depend on an image's size
    # an image token has a time, a row and a column (M-RoPE)
    has_grid_positions: ClassVar[bool] = False
    # trained newlines end lines of positions; those of a tile are a square
    has_newlines: ClassVar[bool] = False
    has_texts: ClassVar[bool] = False  # words stand around an image's positions
    image_token: ClassVar[str] = "<image>"  # of the stock tokenizer; here records.IMAGE_MARK
    marks: ClassVar[tuple[str, ...]] = ()  # tokens of these texts that the tokenizer must have
    in_llava: ClassVar[bool] = False  # LLaVA's own code has it

    @property
    def texts(self) -> tuple[str, ...]:
        """An identity of the texts around images: layouts with equal keys write equal texts; empty
        where they write none.

        Lengths of texts depend on it.
        """
        return ()

    @property
    def prompt_text(self) -> str:
        """The text for an image in a prompt for the stock processor."""
        return self.image_token

    @property
    def of_texts(self) -> ImageLayout:
        """A layout with the same texts around an image and as few numbers as possible."""
        return replace(self, positions_per_tile=1)

    @property
    def numbers(self) -> str:
        """A key of the positions of images of any size: equal for layouts that give equal ones."""
        return str(self.positions_per_tile)

    @property
    def most_tiles(self) -> int:
        return 1

    @property
    def most_positions(self) -> int:
        """The most positions that an image has, without text around them; may be an upper bound."""
        return self.most_tiles * self.positions_per_tile

    @property
    def trial_sizes(self) -> list[tuple[int, int]]:
        """Widths and heights in pixels whose tilings differ, for a layout that `is_sized`."""
        side = self.tile_size // 2
        return list(itertools.product(range(side, 13 * side, side), repeat=2))

    @property
    def description(self) -> str:
        """For a model card; empty where an image becomes one square."""
        return ""

    @property
    def image_settings(self) -> dict[str, Any]:
        """Keys of the stock class's image processor that say the layout's numbers."""
        return {}

    def tiling(self, width: int, height: int, images: int = 1) -> Tiling:
        """Return tiles and positions of an image of this size in pixels.

        `images` is the number of them in its sample. Raises UnfitImage for one that cannot be cut.
        Only a layout that `is_sized` needs the size.
        """
        return Tiling(0, 0, self.positions_per_tile)

    def pieces(self, tiling: Tiling) -> tuple[str | int, ...]:
        """Return an image's part of a text, in order: words, and numbers of positions."""
        return (tiling.positions,)
