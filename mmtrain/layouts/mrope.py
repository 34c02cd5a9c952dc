"""Native layouts with a family's mark on either side of an image, and grid positions for M-RoPE.

image of r x c cells in a document: <mark> r * c positions <mark>, each at (start, start + row,
start + column)

Sources in transformers: `get_rope_index` of the families' models, and their processors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mmtrain.layouts.layout import Tiling
from mmtrain.layouts.native import Native


@dataclass(frozen=True)
class MropeLayout(Native):
    """Native cells, with three rows of positions and a mark on either side of an image."""

    keys = ("min_positions", "max_positions")
    has_texts = True
    has_grid_positions = True
    around: ClassVar[tuple[str, str]]  # texts before and behind an image

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.name, *self.around)

    @property
    def prompt_text(self) -> str:
        return self.image_token.join(self.around)

    def pieces(self, tiling: Tiling) -> tuple[str | int, ...]:
        before, behind = self.around
        return before, tiling.positions, behind


class QwenVl(MropeLayout):
    """Qwen2-VL's to Qwen3.5's."""

    name = "qwen_vl"
    image_token = "<|image_pad|>"
    around = marks = ("<|vision_start|>", "<|vision_end|>")


class GlmV(MropeLayout):
    """GLM-4.1V's to GLM-4.6V's, and GLM-OCR's."""

    name = "glm_v"
    image_token = "<|image|>"
    around = marks = ("<|begin_of_image|>", "<|end_of_image|>")

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        scale = max(1.0, self.tile_size / height, self.tile_size / width)
        return int(width * scale), int(height * scale)


class PaddleOcrVl(MropeLayout):
    """PaddleOCR-VL's."""

    name = "paddleocr_vl"
    image_token = "<|IMAGE_PLACEHOLDER|>"
    around = marks = ("<|IMAGE_START|>", "<|IMAGE_END|>")

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        cell = self.tile_size
        if height < cell:
            width = round(width * cell / height)
            height = cell
        if width < cell:
            return cell, round(height * cell / width)
        return width, height


def grid_positions(is_image: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the positions (3, T) int64 of a document's tokens: time, row, column.

    `is_image` (T,) marks image tokens; `grids` lists each image's rows and columns of them. Each
    text token advances all three by 1. An image stands at one time; what follows it begins at its
    start + max(rows, columns). The largest position is below T.
    """
    counts = list(map(math.prod, grids))
    ends = np.cumsum(counts, dtype=np.int64)
    places = np.flatnonzero(is_image)
    assert len(places) == sum(counts), (len(places), grids)

    # from each token's time to the next one's
    steps = np.ones(len(is_image), np.int64)
    steps[places] = 0
    steps[places[ends - 1]] = list(map(max, grids))
    times = np.cumsum(steps) - steps

    positions = np.tile(times, (3, 1))
    for end, (rows, columns) in zip(ends, grids, strict=True):
        of_image = places[end - rows * columns : end]
        positions[1, of_image] += np.repeat(np.arange(rows), columns)
        positions[2, of_image] += np.tile(np.arange(columns), rows)
    return positions
