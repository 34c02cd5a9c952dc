"""How an image of one size is cut into tiles, and which positions they become: the rules of the stock processors.

image (width, height) --rule of its layout--> Tiling: a grid of tiles, how the picture is put on it, its positions

tiled      GotOcr2ImageProcessor, which AyaVision's processor cuts with: the grid of the nearest shape, the whole
           picture stretched over it, behind them a tile of the whole
unpadded   LlavaNext's and LlavaOnevision's: a tile of the whole, then the grid of the pinpoint that loses least, the
           picture in its middle, on black. Of the grid's positions those that show the picture are taken, row by row,
           a trained newline behind each; where they are too many, fewer are interpolated (LlavaOnevision's rule of 1.1)

Pure arithmetic on numbers of pixels, without torch; floating-point operations in the stock code's order, since they
round. Sources: `get_optimal_tiled_canvas` (got_ocr2), `select_best_resolution` (image_processing_utils), `unpad_image`
(llava_next) and `pack_image_features` (llava_onevision) in transformers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Canvas = Literal["fitted", "padded", "stretched", "centred"]
LARGEST_EXCESS = 1.1  # a side of what is shown may be so many times too long before it is interpolated


class UnfitImage(ValueError):  # noqa: N818
    """An image so long and thin that interpolation would leave no line, or none in a line; the stock model raises, too.

    What is left of a grid without interpolation may be empty as well, and is no error, there and here.
    """


@dataclass(frozen=True, slots=True)
class Shown:
    """Which of a grid's positions show the picture, and how many are made of them."""

    top: int  # positions of the grid above those that show the picture; as many below are left out, too
    left: int  # before them in a row of the grid
    height: int  # rows of the grid's positions that show it
    width: int  # positions that show it in such a row
    lines: int  # that are made of them, each with a newline behind it
    length: int  # positions in a line, the newline not counted


@dataclass(frozen=True, slots=True)
class Tiling:
    """What an image of one size becomes. Its tiles are encoded in the order in which their positions stand."""

    width: int  # of the image, in pixels; 0 where a layout does not ask for it
    height: int
    positions: int  # of the LLM, without texts around them
    rows: int = 1  # of the grid of tiles
    columns: int = 1
    canvas: Canvas = "fitted"  # how the grid is filled: fitted, by data.image_fit; padded, on a square of the mean
    # colour; stretched, to the grid's size; centred, in its shape, on black
    overview: Literal["first", "last"] | None = None  # where a tile of the whole picture stands, resized
    shown: Shown | None = None  # None: all positions of all tiles
    newlines: int = 0  # trained positions among them

    @property
    def tiles(self) -> int:
        """Squares that the encoder sees."""
        return self.rows * self.columns + (self.overview is not None)

    @classmethod
    def uncut(cls, positions: int) -> Tiling:
        """One tile with so many positions, of an image of any size."""
        return cls(0, 0, positions)


def tiled(width: int, height: int, side: int, per_tile: int, max_tiles: int) -> Tiling:
    """A stretched grid and a tile of the whole behind it; one tile alone where the grid is one.

    side: of a tile, in pixels. per_tile: positions of a tile.
    """
    columns, rows = _nearest_shape(width, height, side, max_tiles)
    count = rows * columns
    if count == 1:
        return Tiling(width, height, per_tile, canvas="stretched")
    return Tiling(width, height, per_tile * (count + 1), rows, columns, "stretched", "last")


def _nearest_shape(width: int, height: int, side: int, max_tiles: int) -> tuple[int, int]:
    """Columns and rows; of equally near shapes the larger while the picture fills more than half of it."""
    wanted, best, found = width / height, math.inf, (1, 1)
    for columns, rows in _grids(max_tiles):
        distance = abs(wanted - columns / rows)
        if distance < best:
            best, found = distance, (columns, rows)
        elif distance == best and width * height > 0.5 * side * side * columns * rows:
            found = (columns, rows)
    return found


@functools.cache
def _grids(max_tiles: int) -> list[tuple[int, int]]:
    grids = [(columns, rows) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles // columns + 1)]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


def unpadded(
    width: int, height: int, side: int, per_tile: int, pinpoints: Sequence[tuple[int, int]], most: int | None = None
) -> Tiling:
    """A tile of the whole, and lines of what a grid shows of the picture.

    side: of a tile, in pixels. per_tile: positions of a tile, a square of them. pinpoints: (height, width) in pixels of
    the grids. most: more positions than so many tiles have, by LARGEST_EXCESS, are interpolated. Raises UnfitImage.
    """
    grid = _best_resolution(width, height, pinpoints)
    rows, columns = grid[0] // side, grid[1] // side
    tile_side = math.isqrt(per_tile)
    grid_height, grid_width = rows * tile_side, columns * tile_side
    top = left = 0
    if width / height > grid_width / grid_height:
        top = (grid_height - int(round(height * (grid_width / width), 7))) // 2
    else:
        left = (grid_width - int(round(width * (grid_height / height), 7))) // 2
    lines, length = shown_height, shown_width = grid_height - 2 * top, grid_width - 2 * left
    if most is not None:
        excess = math.sqrt(shown_height * shown_width / (most * per_tile))
        if excess > LARGEST_EXCESS:
            lines, length = int(shown_height // excess), int(shown_width // excess)
            if not lines or not length:
                left = f"{lines} lines of {length} positions"
                raise UnfitImage(f"{width} x {height} pixels, so long and thin that {left} would be interpolated")
    shown = Shown(top, left, shown_height, shown_width, lines, length)
    taken = per_tile + lines * (length + 1)
    return Tiling(width, height, taken, rows, columns, "centred", "first", shown, newlines=lines)


def most_unpadded(side: int, per_tile: int, pinpoints: Sequence[tuple[int, int]], most: int | None = None) -> int:
    """Positions that `unpadded` gives an image at most; of a grid that would be interpolated, as much as is not."""
    tile_side, found = math.isqrt(per_tile), 0
    room = math.inf if most is None else LARGEST_EXCESS**2 * most * per_tile
    for grid_height, grid_width in pinpoints:
        height, width = grid_height // side * tile_side, grid_width // side * tile_side
        for lines, length in ((height, min(width, room // height)), (min(height, room // width), width)):
            found = max(found, int(lines * (length + 1)))
    return per_tile + found


def _best_resolution(width: int, height: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The (height, width) that keeps most of the picture's pixels and then wastes fewest."""
    best, most_kept, least_wasted = pinpoints[0], 0, math.inf
    for grid_height, grid_width in pinpoints:
        scale = min(grid_width / width, grid_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = grid_width * grid_height - kept
        if kept > most_kept or (kept == most_kept and wasted < least_wasted):
            best, most_kept, least_wasted = (grid_height, grid_width), kept, wasted
    return best


def one_of_several(width: int, height: int, per_tile: int) -> Tiling:
    """LlavaOnevision's rule where a sample has several images: one padded tile and a newline behind it."""
    return Tiling(width, height, per_tile + 1, canvas="padded", newlines=1)


def centred_size(width: int, height: int, grid_width: int, grid_height: int) -> tuple[int, int]:
    """Width and height in pixels of a picture that keeps its shape on a grid; `get_patch_output_size`."""
    by_width, by_height = grid_width / width, grid_height / height
    if by_width < by_height:
        return grid_width, min(math.ceil(height * by_width), grid_height)
    return min(math.ceil(width * by_height), grid_width), grid_height
