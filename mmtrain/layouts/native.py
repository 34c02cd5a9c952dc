"""A grid of cells that keeps the image's shape: each cell is f x f patches of the encoder and one
position of the LLM.

smart    between `min_positions` and `max_positions` cells; small images are enlarged (LFM2-VL's,
Qwen-VL's) longest  no side longer than `longest_edge` pixels; small images keep their size
(Pixtral's)

The picture is stretched to whole cells. Sources in transformers: `smart_resize` of
Lfm2VlImageProcessor and of Qwen2VLImageProcessor, `get_resize_output_image_size` of
PixtralImageProcessor; floating-point operations are in their order, since they round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mmtrain.layouts.layout import ImageLayout, Tiling, UnfitImage

if TYPE_CHECKING:
    import torch

MIN_POSITIONS, MAX_POSITIONS = 64, 256  # Lfm2VlImageProcessor's
PatchOrder = Literal["dy dx c", "c dy dx", "c t dy dx"]  # of a patch's values; t: frames
# dimensions of patch_rows' view
_VALUES = {"dy dx c": (5, 8, 2), "c dy dx": (2, 5, 8), "c t dy dx": (2, 5, 8)}
FRAMES = 2  # that encoders of videos take of an image
THINNEST = 200  # times as long as wide; Qwen2VLImageProcessor refuses more


@dataclass(frozen=True)
class Native(ImageLayout):
    """Cells of `tile_size` pixels; `longest_edge` chooses the rule."""

    min_positions: int = MIN_POSITIONS
    max_positions: int = MAX_POSITIONS
    longest_edge: int | None = None  # pixels
    factor: int = 1  # patches a side of a cell
    # as Lfm2VlImageProcessor: short sides count as one cell at first, none exceeds the maximum
    is_lfm2: bool = False

    name = "native"
    keys = ("min_positions", "max_positions", "longest_edge")
    is_sized = True
    attends_across = True

    @property
    def numbers(self) -> str:
        rule = f"{self.min_positions} {self.max_positions} {self.longest_edge} {self.is_lfm2}"
        return f"{self.name} {self.tile_size} {rule}"

    @property
    def most_tiles(self) -> int:
        if self.longest_edge is not None:
            return math.ceil(self.longest_edge / self.tile_size) ** 2
        if self.is_lfm2:
            return self.max_positions
        # Thin images: one side is raised to one cell, or both are rounded up to whole cells.
        longest = math.isqrt(THINNEST * self.max_positions)
        enlarged = self.min_positions + math.ceil(math.sqrt(THINNEST * self.min_positions)) + 2
        return max(self.max_positions, longest, enlarged)

    @property
    def trial_sizes(self) -> list[tuple[int, int]]:
        return [(16 * n, 12 * n) for n in range(1, 241)]

    @property
    def description(self) -> str:
        if self.longest_edge is not None:
            most = f"a longest side of {self.longest_edge} pixels"
        else:
            most = f"{self.min_positions} to {self.max_positions} image tokens"
        side = self.tile_size
        return (
            f"resized to {most}, one for each {side} x {side} pixels, in its own shape "
            "(`model.vision.layout: native`)"
        )

    @property
    def patch_size(self) -> int:
        """Pixels a side."""
        return self.tile_size // self.factor

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which the stock processor first enlarges a small image."""
        return width, height

    def tiling(self, width: int = 0, height: int = 0, images: int = 1) -> Tiling:
        rows, columns = _grid(self, *self.enlarged(width, height))
        return Tiling(width, height, rows * columns, rows, columns, "stretched")


@functools.lru_cache(maxsize=1 << 16)
def _grid(layout: Native, width: int, height: int) -> tuple[int, int]:
    if max(width, height) > THINNEST * min(width, height):
        raise UnfitImage(f"{width} x {height} pixels, more than {THINNEST} times as long as wide")
    if layout.longest_edge is not None:
        return _longest(height, width, layout.longest_edge, layout.tile_size)
    return _smart(height, width, layout)


def _smart(height: int, width: int, layout: Native) -> tuple[int, int]:
    cell, least, most = layout.tile_size, layout.min_positions, layout.max_positions
    rows, columns = (max(int(layout.is_lfm2), round(side / cell)) for side in (height, width))
    if rows * columns > most:
        scale = math.sqrt(height * width / (most * cell**2))
        rows, columns = (max(1, math.floor(side / scale / cell)) for side in (height, width))
    elif rows * columns < least:
        scale = math.sqrt(least * cell**2 / (height * width))
        rows, columns = (math.ceil(side * scale / cell) for side in (height, width))
    if layout.is_lfm2 and rows * columns > most:  # its processor would cut such patches off
        raise UnfitImage(
            f"{width} x {height} pixels, which become {rows * columns} positions, more than {most}"
        )
    return rows, columns


def _longest(height: int, width: int, longest: int, cell: int) -> tuple[int, int]:
    rows, columns = height, width
    if (ratio := max(height / longest, width / longest)) > 1:
        rows, columns = math.floor(height / ratio), math.floor(width / ratio)
    if not rows or not columns:
        raise UnfitImage(
            f"{width} x {height} pixels, so thin that nothing of it is left within {longest} pixels"
        )
    return (rows - 1) // cell + 1, (columns - 1) // cell + 1


def patch_rows(
    cells: torch.Tensor, grid: Sequence[int], side: int, block: int, order: PatchOrder
) -> torch.Tensor:
    """Return the patches (P, values) of one picture's cells (N, 3, S, S), `side` patches a side
    each.

    They stand row by row; with `block` above 1, blocks stand row by row, and patches row by row in
    each.
    """
    (rows, columns), size = grid, cells.shape[-1] // side
    apart = cells.reshape(rows, columns, 3, side // block, block, size, side // block, block, size)
    patches = apart.permute(0, 3, 1, 6, 4, 7, *_VALUES[order])
    if "t" in order.split():
        patches = patches.unsqueeze(-3).expand(*patches.shape[:-2], FRAMES, size, size)
    return patches.reshape(len(cells) * side**2, -1)


def picture(cells: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
    """Return one picture (3, H, W) of its cells (N, 3, S, S)."""
    (rows, columns), size = grid, cells.shape[-1]
    return (
        cells.reshape(rows, columns, 3, size, size)
        .permute(2, 0, 3, 1, 4)
        .reshape(3, rows * size, columns * size)
    )
