"""The tiles of a grid, then one of the whole image, each with its name before it: AyaVision's.

The grid is that of GotOcr2ImageProcessor, which AyaVision's processor cuts with: of the nearest
shape, the whole picture stretched over it. Source: `get_optimal_tiled_canvas` (got_ocr2) in
transformers; floating-point operations are in its order, since they round.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from mmtrain.layouts.layout import ImageLayout, Overview, Tiling

_TILE, _OVERVIEW = "TILE", "TILE_GLOBAL"  # AyaVisionProcessor's texts before tiles


@dataclass(frozen=True)
class Tiles(ImageLayout):
    """A grid of at most `max_tiles` tiles, and the whole; one tile alone where the grid is one."""

    max_tiles: int = 12  # AyaVision's and InternVL's

    name = "tiles"
    keys = ("max_tiles",)
    is_sized = True
    has_texts = True
    # of AyaVisionProcessor
    token_settings: ClassVar = {"tile_token": _TILE, "tile_global_token": _OVERVIEW}

    @property
    def texts(self) -> tuple[str, ...]:
        return (f"{self.name} {self.max_tiles} {self.tile_size}",)

    @property
    def numbers(self) -> str:
        return f"{self.positions_per_tile} {self.name} {self.tile_size} {self.max_tiles}"

    @property
    def most_tiles(self) -> int:
        return self.max_tiles + (self.max_tiles > 1)

    @property
    def description(self) -> str:
        side = f"{self.tile_size} x {self.tile_size} pixels"
        return (
            f"cut into up to {self.max_tiles} tiles of {side}, and a whole one "
            "(`model.vision.layout: tiles`)"
        )

    @property
    def image_settings(self) -> dict[str, Any]:
        return {"crop_to_patches": True, "max_patches": self.max_tiles}

    def tiling(self, width: int, height: int, images: int = 1) -> Tiling:
        return _tiling(self, width, height)

    def pieces(self, tiling: Tiling) -> tuple[str | int, ...]:
        pieces: list[str | int] = []
        for number in range(1, tiling.tiles):
            pieces += f"{_TILE}_{number}", self.positions_per_tile
        return (*pieces, _OVERVIEW, self.positions_per_tile)


@functools.lru_cache(1 << 16)
def _tiling(layout: Tiles, width: int, height: int) -> Tiling:
    side = layout.tile_size
    columns, rows = _nearest_shape(width, height, side, layout.max_tiles)
    tiles = rows * columns
    overview: Overview | None = None
    if tiles > 1:
        overview = "last"
        tiles += 1
    positions = layout.positions_per_tile * tiles
    return Tiling(width, height, positions, rows, columns, "stretched", overview)


def _nearest_shape(
    width: int,
    height: int,
    side: int,
    max_tiles: int,
) -> tuple[int, int]:
    """Return columns and rows of the grid whose shape is nearest to the picture's.

    Of equally near ones it is the larger one while the picture fills more than half of it.
    """
    shape = width / height
    least_distance = math.inf
    nearest = (1, 1)
    for columns, rows in _grids(max_tiles):
        distance = abs(shape - columns / rows)
        fills_half = width * height > 0.5 * side * side * columns * rows
        if distance < least_distance or (distance == least_distance and fills_half):
            least_distance = distance
            nearest = (columns, rows)
    return nearest


@functools.cache
def _grids(max_tiles: int) -> list[tuple[int, int]]:
    pairs = itertools.product(range(1, max_tiles + 1), repeat=2)
    return sorted((pair for pair in pairs if math.prod(pair) <= max_tiles), key=math.prod)
