"""The tiles of a grid, then one of the whole image, each with its name before it: AyaVision's.

The grid is that of GotOcr2ImageProcessor, which AyaVision's processor cuts with: of the nearest
shape, the whole picture stretched over it. Source: `get_optimal_tiled_canvas` (got_ocr2) in
transformers; floating-point operations are in its order, since they round.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from mmtrain.layouts.layout import ImageLayout, Tiling

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

    def tiling(self, width: int = 0, height: int = 0, images: int = 1) -> Tiling:
        return _tiling(self, width, height)

    def pieces(self, tiling: Tiling) -> tuple[str | int, ...]:
        names = [*(f"{_TILE}_{number}" for number in range(1, tiling.tiles)), _OVERVIEW]
        return tuple(piece for name in names for piece in (name, self.positions_per_tile))


@functools.lru_cache(maxsize=1 << 16)
def _tiling(layout: Tiles, width: int, height: int) -> Tiling:
    columns, rows = _nearest_shape(width, height, layout.tile_size, layout.max_tiles)
    tiles = rows * columns
    if tiles == 1:
        return Tiling(width, height, layout.positions_per_tile, canvas="stretched")
    return Tiling(
        width, height, layout.positions_per_tile * (tiles + 1), rows, columns, "stretched", "last"
    )


def _nearest_shape(width: int, height: int, side: int, max_tiles: int) -> tuple[int, int]:
    """Columns and rows; of equally near shapes the larger while the picture fills more than half of
    it.
    """
    wanted, least_distance, nearest = width / height, math.inf, (1, 1)
    for columns, rows in _grids(max_tiles):
        distance = abs(wanted - columns / rows)
        if distance < least_distance:
            least_distance, nearest = distance, (columns, rows)
        elif distance == least_distance and width * height > 0.5 * side * side * columns * rows:
            nearest = (columns, rows)
    return nearest


@functools.cache
def _grids(max_tiles: int) -> list[tuple[int, int]]:
    grids = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
    ]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])
