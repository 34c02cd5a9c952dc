"""A grid of cells that keeps the image's shape.

Each cell is f x f patches of the encoder and one position of the LLM.

smart    between `min_positions` and `max_positions` cells; small images are enlarged (LFM2-VL's,
         Qwen-VL's)
longest  no side longer than `longest_edge` pixels; small images keep their size (Pixtral's)

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
    from torch import Tensor

# Lfm2VlImageProcessor's
MIN_POSITIONS = 64
MAX_POSITIONS = 256
PatchOrder = Literal["dy dx c", "c dy dx", "c t dy dx"]  # of a patch's values; t: frames
# dimensions of patch_rows' view
_VALUES = {
    "dy dx c": (5, 8, 2),
    "c dy dx": (2, 5, 8),
    "c t dy dx": (2, 5, 8),
}
FRAMES = 2  # that encoders of videos take of an image
THINNEST = 200  # times as long as wide; Qwen2VLImageProcessor refuses more


@dataclass(frozen=True)
class Native(ImageLayout):
    """Cells of `tile_size` pixels; `longest_edge` chooses the rule."""

    min_positions: int = MIN_POSITIONS
    max_positions: int = MAX_POSITIONS
    longest_edge: int | None = None  # pixels
    factor: int = 1  # patches a side of a cell
    # Lfm2VlImageProcessor's rule: short sides count as one cell at first, and an image that would
    # have more cells than the maximum is refused, since the processor would cut patches off
    is_capped: bool = False

    name = "native"
    keys = ("min_positions", "max_positions", "longest_edge")
    is_sized = True
    attends_across = True

    @property
    def numbers(self) -> str:
        rule = f"{self.min_positions} {self.max_positions} {self.longest_edge} {self.is_capped}"
        return f"{self.name} {self.tile_size} {rule}"

    @property
    def most_tiles(self) -> int:
        if self.longest_edge is not None:
            return math.ceil(self.longest_edge / self.tile_size) ** 2
        if self.is_capped:
            return self.max_positions
        # Thin images: one side is raised to one cell, or both are rounded up to whole cells.
        least = self.min_positions
        longest = math.isqrt(THINNEST * self.max_positions)
        enlarged = least + math.ceil(math.sqrt(THINNEST * least)) + 2
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

    def tiling(self, width: int, height: int, images: int = 1) -> Tiling:
        rows, columns = _grid(self, *self.enlarged(width, height))
        return Tiling(width, height, rows * columns, rows, columns, "stretched")


@functools.lru_cache(1 << 16)
def _grid(layout: Native, width: int, height: int) -> tuple[int, int]:
    if max(width, height) > THINNEST * min(width, height):
        raise UnfitImage(f"{width} x {height} pixels, more than {THINNEST} times as long as wide")
    if layout.longest_edge is not None:
        return _longest(height, width, layout.longest_edge, layout.tile_size)
    return _smart(height, width, layout)


def _smart(height: int, width: int, layout: Native) -> tuple[int, int]:
    cell = layout.tile_size
    least = layout.min_positions
    most = layout.max_positions
    shortest = int(layout.is_capped)
    rows = max(shortest, round(height / cell))
    columns = max(shortest, round(width / cell))

    # shrink a large image, enlarge a small one
    if rows * columns > most:
        scale = math.sqrt(height * width / (most * cell**2))
        rows = max(1, math.floor(height / scale / cell))
        columns = max(1, math.floor(width / scale / cell))
    elif rows * columns < least:
        scale = math.sqrt(least * cell**2 / (height * width))
        rows = math.ceil(height * scale / cell)
        columns = math.ceil(width * scale / cell)

    if layout.is_capped and rows * columns > most:
        raise UnfitImage(
            f"{width} x {height} pixels, which become {rows * columns} positions, more than {most}"
        )
    return rows, columns


def _longest(
    height: int,
    width: int,
    longest: int,
    cell: int,
) -> tuple[int, int]:
    ratio = max(1, height / longest, width / longest)
    lines = math.floor(height / ratio)  # pixels
    length = math.floor(width / ratio)
    if not lines or not length:
        raise UnfitImage(
            f"{width} x {height} pixels, so thin that nothing of it is left within {longest} pixels"
        )
    return -(-lines // cell), -(-length // cell)


def patch_rows(
    cells: Tensor,
    grid: Sequence[int],
    side: int,
    block: int,
    order: PatchOrder,
) -> Tensor:
    """Return the patches (P, values) of one picture's cells (N, 3, S, S).

    A cell has `side` patches a side. Patches stand row by row; with `block` above 1, blocks stand
    row by row, and patches row by row in each.
    """
    size = cells.shape[-1] // side
    of_side = side // block, block, size
    apart = cells.reshape(*grid, 3, *of_side, *of_side)
    patches = apart.permute(0, 3, 1, 6, 4, 7, *_VALUES[order])
    if "t" in order.split():
        shape = *patches.shape[:-2], FRAMES, size, size
        patches = patches.unsqueeze(-3).expand(shape)
    return patches.reshape(len(cells) * side**2, -1)


def picture(cells: Tensor, grid: Sequence[int]) -> Tensor:
    """Return one picture (3, H, W) of its cells (N, 3, S, S)."""
    rows, columns = grid
    size = cells.shape[-1]
    apart = cells.reshape(rows, columns, 3, size, size).permute(2, 0, 3, 1, 4)
    return apart.reshape(3, rows * size, columns * size)
