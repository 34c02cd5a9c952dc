"""A tile of the whole image, then a grid's lines without padding, each with a trained newline.

anyres        LlavaNext's: of any number of tiles
anyres_max_9  LlavaOnevision's: interpolated to the positions of 9 tiles where it has more than
              LARGEST_EXCESS squared times as many; of several images in a sample each is one
              padded tile and a newline

The grid is that of the pinpoint that loses least of the picture, which lies in its middle, on
black. Sources: `select_best_resolution`, `unpad_image` and `pack_image_features` in transformers;
floating-point operations are in their order, since they round.
"""

import functools
import itertools
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
    default_grids: ClassVar[Grids] = (
        (1, 2),
        (2, 1),
        (2, 2),
        (3, 1),
        (1, 3),
    )
    # positions of a grid beyond those of as many tiles are interpolated
    max_full_tiles: ClassVar[int | None] = None

    @property
    def grids(self) -> Grids:
        side = self.tile_size
        if self.pinpoints:
            return self.pinpoints
        return tuple((rows * side, columns * side) for rows, columns in self.default_grids)

    @property
    def of_texts(self) -> ImageLayout:
        return ONE_SQUARE

    @property
    def numbers(self) -> str:
        grids = ",".join(f"{height}x{width}" for height, width in self.grids)
        return f"{self.positions_per_tile} {self.name} {self.tile_size} {grids}"

    @property
    def most_tiles(self) -> int:
        side = self.tile_size
        return 1 + max(height // side * (width // side) for height, width in self.grids)

    @property
    def most_positions(self) -> int:
        side = math.isqrt(self.positions_per_tile)
        room = math.inf
        if self.max_full_tiles is not None:
            room = LARGEST_EXCESS**2 * self.max_full_tiles * self.positions_per_tile

        longest = 0.0
        for grid_height, grid_width in self.grids:
            height = grid_height // self.tile_size * side
            width = grid_width // self.tile_size * side
            longest = max(
                longest,
                height * (min(width, room // height) + 1),
                min(height, room // width) * (width + 1),
            )
        return self.positions_per_tile + int(longest)

    @property
    def description(self) -> str:
        side = self.tile_size
        return (
            f"one tile of the whole image and those of a grid, of {side} x {side} pixels; "
            f"{len(self.grids)} grids, of up to {self.most_tiles - 1} tiles, and a trained newline "
            f"after each line (`model.vision.layout: {self.name}`)"
        )

    @property
    def image_settings(self) -> dict[str, Any]:
        return {"image_grid_pinpoints": list(map(list, self.grids))}

    def tiling(self, width: int, height: int, images: int = 1) -> Tiling:
        return _tiling(self, width, height)


class AnyresMax9(Anyres):
    """LLaVA-OneVision's layout."""

    name = "anyres_max_9"
    default_grids = tuple(itertools.product(range(1, 7), repeat=2))
    max_full_tiles = 9

    def tiling(self, width: int, height: int, images: int = 1) -> Tiling:
        if images > 1:
            positions = self.positions_per_tile + 1
            return Tiling(width, height, positions, canvas="padded", newlines=1)
        return super().tiling(width, height)


@functools.lru_cache(1 << 16)
def _tiling(layout: Anyres, width: int, height: int) -> Tiling:
    # the grid, in pixels, tiles and positions
    per_tile = layout.positions_per_tile
    pixels = _best_resolution(width, height, layout.grids)
    rows, columns = (side // layout.tile_size for side in pixels)
    grid_height = rows * math.isqrt(per_tile)
    grid_width = columns * math.isqrt(per_tile)

    # the part of it that shows the picture
    top = left = 0
    if width / height > grid_width / grid_height:
        lines = int(round(height * (grid_width / width), 7))
        top = (grid_height - lines) // 2
    else:
        length = int(round(width * (grid_height / height), 7))
        left = (grid_width - length) // 2
    lines = shown_height = grid_height - 2 * top
    length = shown_width = grid_width - 2 * left

    # positions that are left of it after interpolation
    if layout.max_full_tiles is not None:
        full = layout.max_full_tiles * per_tile
        excess = math.sqrt(shown_height * shown_width / full)
        if excess > LARGEST_EXCESS:
            lines = int(shown_height // excess)
            length = int(shown_width // excess)
            # the stock model raises, too; without interpolation nothing left is no error
            if not lines or not length:
                raise UnfitImage(
                    f"{width} x {height} pixels, so long and thin that {lines} lines of {length} "
                    "positions would be interpolated"
                )

    return Tiling(
        width,
        height,
        per_tile + lines * (length + 1),
        rows,
        columns,
        "centred",
        "first",
        Shown(top, left, shown_height, shown_width, lines, length),
        newlines=lines,
    )


def _best_resolution(width: int, height: int, grids: Grids) -> tuple[int, int]:
    """The (height, width) that keeps most of the picture's pixels and then wastes fewest."""

    def value(grid: tuple[int, int]) -> tuple[int, int]:
        grid_height, grid_width = grid
        scale = min(grid_width / width, grid_height / height)
        shown = int(width * scale) * int(height * scale)
        kept = min(shown, width * height)
        wasted = grid_width * grid_height - kept
        return kept, -wasted

    return max(grids, key=value)


def centred_size(
    width: int,
    height: int,
    grid_width: int,
    grid_height: int,
) -> tuple[int, int]:
    """Return width and height in pixels of a picture that keeps its shape on a grid.

    Source: `get_patch_output_size` in transformers.
    """
    by_width = grid_width / width
    by_height = grid_height / height
    if by_width < by_height:
        return grid_width, min(math.ceil(height * by_width), grid_height)
    return min(math.ceil(width * by_height), grid_width), grid_height
