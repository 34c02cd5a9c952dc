"""A tile of the whole image, then the lines of a grid without its padding, each with a trained
newline behind it.

anyres        LlavaNext's: of any number of tiles anyres_max_9  LlavaOnevision's: interpolated to
what 9 tiles have where it is more than LARGEST_EXCESS squared times as
              much; of several images in a sample each is one padded tile and a newline

The grid is that of the pinpoint that loses least of the picture, which lies in its middle, on
black. Sources: `select_best_resolution`, `unpad_image` and `pack_image_features` in transformers;
floating-point operations are in their order, since they round.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from mmtrain.layouts.layout import ImageLayout, Shown, Tiling, UnfitImage
from mmtrain.layouts.square import ONE_SQUARE

# how many times too long a side of what is shown may be before it is interpolated
LARGEST_EXCESS = 1.1

Grids = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Anyres(ImageLayout):
    """LLaVA-NeXT's layout; the positions of a tile are a square of them."""

    pinpoints: Grids = ()  # (height, width) in pixels of the grids; empty: the stock class's own

    name = "anyres"
    keys = ("pinpoints",)
    is_sized = True
    has_newlines = True
    in_llava = True
    # rows and columns of tiles
    default_grids: ClassVar[Grids] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    # positions of a grid beyond those of as many tiles are interpolated
    max_full_tiles: ClassVar[int | None] = None

    @property
    def grids(self) -> Grids:
        side = self.tile_size
        return self.pinpoints or tuple(
            (rows * side, columns * side) for rows, columns in self.default_grids
        )

    @property
    def of_texts(self) -> ImageLayout:
        return ONE_SQUARE

    @property
    def numbers(self) -> str:
        grids = ",".join(f"{height}x{width}" for height, width in self.grids)
        return f"{self.positions_per_tile} {self.name} {self.tile_size} {grids}"

    @property
    def most_tiles(self) -> int:
        return (
            max(
                height // self.tile_size * (width // self.tile_size) for height, width in self.grids
            )
            + 1
        )

    @property
    def most_positions(self) -> int:
        side = math.isqrt(self.positions_per_tile)
        longest, room = 0, math.inf
        if self.max_full_tiles is not None:
            room = LARGEST_EXCESS**2 * self.max_full_tiles * self.positions_per_tile
        for grid_height, grid_width in self.grids:
            height, width = (
                grid_height // self.tile_size * side,
                grid_width // self.tile_size * side,
            )
            for lines, length in (
                (height, min(width, room // height)),
                (min(height, room // width), width),
            ):
                longest = max(longest, int(lines * (length + 1)))
        return self.positions_per_tile + longest

    @property
    def description(self) -> str:
        return (
            f"one tile of the whole image and those of a grid, of {self.tile_size} x "
            f"{self.tile_size} pixels; "
            f"{len(self.grids)} grids, of up to {self.most_tiles - 1} tiles, and a trained newline "
            "after each line "
            f"(`model.vision.layout: {self.name}`)"
        )

    @property
    def image_settings(self) -> dict[str, Any]:
        return {"image_grid_pinpoints": [list(pair) for pair in self.grids]}

    def tiling(self, width: int = 0, height: int = 0, images: int = 1) -> Tiling:
        return _tiling(self, width, height)


class AnyresMax9(Anyres):
    """LLaVA-OneVision's layout."""

    name = "anyres_max_9"
    default_grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))
    max_full_tiles = 9

    def tiling(self, width: int = 0, height: int = 0, images: int = 1) -> Tiling:
        if images > 1:
            return Tiling(width, height, self.positions_per_tile + 1, canvas="padded", newlines=1)
        return super().tiling(width, height)


@functools.lru_cache(maxsize=1 << 16)
def _tiling(layout: Anyres, width: int, height: int) -> Tiling:
    per_tile = layout.positions_per_tile
    grid = _best_resolution(width, height, layout.grids)
    rows, columns = grid[0] // layout.tile_size, grid[1] // layout.tile_size
    tile_side = math.isqrt(per_tile)
    grid_height, grid_width = rows * tile_side, columns * tile_side
    top = left = 0
    if width / height > grid_width / grid_height:
        top = (grid_height - int(round(height * (grid_width / width), 7))) // 2
    else:
        left = (grid_width - int(round(width * (grid_height / height), 7))) // 2
    lines, length = shown_height, shown_width = grid_height - 2 * top, grid_width - 2 * left
    if layout.max_full_tiles is not None:
        excess = math.sqrt(shown_height * shown_width / (layout.max_full_tiles * per_tile))
        if excess > LARGEST_EXCESS:
            lines, length = int(shown_height // excess), int(shown_width // excess)
            # the stock model raises, too; without interpolation nothing left is no error
            if not lines or not length:
                raise UnfitImage(
                    f"{width} x {height} pixels, so long and thin that {lines} lines of {length} "
                    "positions would be "
                    "interpolated"
                )
    shown = Shown(top, left, shown_height, shown_width, lines, length)
    positions = per_tile + lines * (length + 1)
    return Tiling(
        width, height, positions, rows, columns, "centred", "first", shown, newlines=lines
    )


def _best_resolution(width: int, height: int, grids: Grids) -> tuple[int, int]:
    """The (height, width) that keeps most of the picture's pixels and then wastes fewest."""
    best, most_kept, least_wasted = grids[0], 0, math.inf
    for grid_height, grid_width in grids:
        scale = min(grid_width / width, grid_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = grid_width * grid_height - kept
        if kept > most_kept or (kept == most_kept and wasted < least_wasted):
            best, most_kept, least_wasted = (grid_height, grid_width), kept, wasted
    return best


def centred_size(width: int, height: int, grid_width: int, grid_height: int) -> tuple[int, int]:
    """Width and height in pixels of a picture that keeps its shape on a grid;
    `get_patch_output_size`.
    """
    by_width, by_height = grid_width / width, grid_height / height
    if by_width < by_height:
        return grid_width, min(math.ceil(height * by_width), grid_height)
    return min(math.ceil(width * by_height), grid_width), grid_height
