"""Positions of images in their own shape: those of the stock processors, for any size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from transformers import Lfm2VlImageProcessor
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    smart_resize as paddle_resize,
)
from transformers.models.pixtral.image_processing_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
    smart_resize as video_llama_resize,
)

from mmtrain import load_config
from mmtrain.base.errors import UserError
from mmtrain.facts.models import models_of
from mmtrain.layouts.layout import UnfitImage
from mmtrain.layouts.mrope import GlmV, PaddleOcrVl, QwenVl
from mmtrain.layouts.native import THINNEST, Native

Size = tuple[int, int]  # width, height in pixels
BOUNDS = ((64, 256), (4, 1280), (4, 16), (1, 1), (256, 256), (16, 16_384))


def lfm2(layout: Native, width: int, height: int) -> Size:
    """Columns and rows by Lfm2VlImageProcessor."""
    bounds = layout.min_positions, layout.max_positions, layout.patch_size
    resized = Lfm2VlImageProcessor().smart_resize(height, width, layout.factor, *bounds)
    return resized[0] // layout.tile_size, resized[1] // layout.tile_size


def qwen2(
    layout: Native, width: int, height: int, resize: Callable[..., Size] = smart_resize
) -> Size:
    """Columns and rows by Qwen2VLImageProcessor."""
    cell = layout.tile_size**2
    rows, columns = resize(
        height, width, layout.tile_size, layout.min_positions * cell, layout.max_positions * cell
    )
    return columns // layout.tile_size, rows // layout.tile_size


def glm(layout: Native, width: int, height: int) -> Size:
    """Columns and rows by Glm4vImageProcessor, which counts two frames."""
    side = layout.tile_size
    bounds = (2 * positions * side**2 for positions in (layout.min_positions, layout.max_positions))
    rows, columns = glm_resize(2, height, width, 2, side, *bounds)
    return columns // side, rows // side


def pixtral(layout: Native, width: int, height: int) -> Size:
    """Columns and rows by PixtralImageProcessor."""
    import torch

    picture, side = torch.zeros(3, height, width, device="meta"), layout.tile_size
    rows, columns = get_resize_output_image_size(picture, (layout.longest_edge,) * 2, (side, side))
    return columns // side, rows // side


RULES: dict[str, tuple[Callable[..., Size], list[Native]]] = {
    "lfm2": (
        lfm2,
        [
            Native(1, 16 * factor, least, most, factor=factor, is_capped=True)
            for factor, (least, most) in product((1, 2, 3), BOUNDS)
        ],
    ),
    "qwen2": (qwen2, [Native(1, side, *bounds) for side, bounds in product((28, 32), BOUNDS)]),
    "qwen vl": (qwen2, [QwenVl(1, side, *bounds) for side, bounds in product((28, 32), BOUNDS)]),
    "glm": (glm, [GlmV(1, 28, *bounds) for bounds in BOUNDS]),
    "paddleocr": (
        partial(qwen2, resize=paddle_resize),
        [PaddleOcrVl(1, 28, *bounds) for bounds in BOUNDS],
    ),
    "video llama": (
        partial(qwen2, resize=video_llama_resize),
        [Native(1, 14, *bounds) for bounds in BOUNDS],
    ),
    "pixtral": (
        pixtral,
        [
            Native(1, side, longest_edge=longest)
            for side, longest in product((14, 16, 28), (400, 1024, 1540))
        ],
    ),
}


def sizes(count: int) -> Iterator[Size]:
    """Extreme shapes, whole cells and a pixel beside them, and sizes at random."""
    yield from [
        (1, 1),
        (1, 200),
        (1, 201),
        (200, 1),
        (13, 13),
        (3, 600),
        (2000, 10),
        (2010, 10),
        (30_000, 150),
    ]
    for side in (14, 16, 28, 32):
        yield from [(side * a + b, side) for a in (1, 2, 7) for b in (-1, 0, 1, side // 2)]
    draw = random.Random(0)
    for _ in range(count):
        longest = draw.choice([60, 400, 1200, 4000])
        yield draw.randint(8, longest), draw.randint(8, longest)


def compare(rule: str, count: int) -> None:
    stock, layouts = RULES[rule]
    chosen = list(sizes(count))
    for number, layout in enumerate(layouts):
        for width, height in chosen[number % 3 :: 3]:
            try:
                tiling = layout.tiling(width, height)
            except UnfitImage:
                if max(width, height) > THINNEST * min(width, height):
                    continue
                if layout.is_capped:
                    assert math.prod(stock(layout, width, height)) > layout.max_positions, (
                        layout,
                        width,
                        height,
                    )
                else:
                    assert min(width, height) * layout.longest_edge < max(width, height), (
                        layout,
                        width,
                        height,
                    )
                continue
            assert (tiling.columns, tiling.rows) == stock(layout, width, height), (
                layout,
                width,
                height,
            )
            assert tiling.tiles == tiling.positions <= layout.most_positions, (
                layout,
                width,
                height,
            )


@pytest.mark.parametrize("rule", RULES)
def test_grids_are_those_of_the_stock_processor(rule):
    compare(rule, 300)


@pytest.mark.nightly
@pytest.mark.parametrize("rule", RULES)
def test_10_000_grids_are_those_of_the_stock_processor(rule):
    compare(rule, 30_000)


def test_what_the_processors_refuse_or_reduce_to_nothing_is_unfit():
    with pytest.raises(UnfitImage, match=r"10 x 2010 pixels, more than 200 times as long as wide"):
        Native(1, 28).tiling(10, 2010)
    with pytest.raises(ValueError, match="aspect ratio must be smaller than 200"):
        qwen2(Native(1, 28), 10, 2010)
    with pytest.raises(UnfitImage, match="3 x 597 pixels, which become 69 positions, more than 24"):
        # its processor pads to 24, and would cut these off
        Native(1, 14, 8, 24, is_capped=True).tiling(3, 597)
    with pytest.raises(
        UnfitImage, match="1 x 101 pixels, so thin that nothing of it is left within 100"
    ):
        Native(1, 14, longest_edge=100).tiling(1, 101)
    assert Native(1, 14, longest_edge=100).tiling(1, 100).positions == 8


@pytest.mark.parametrize("override", ["min_positions=256", "longest_edge=1"])
def test_bounds_that_ordinary_images_exceed_are_refused_when_planned(override):
    name = "pixtral_qwen3_8b" if "edge" in override else "naflex_qwen3_8b"
    config = load_config(
        Path(__file__).parents[2] / "configs" / f"{name}.yaml", [f"model.vision.{override}"]
    )
    with pytest.raises(
        UserError, match=r"model.vision.\w+: \d+ is too small for an image of 16 x 12 pixels"
    ):
        _ = models_of(config).layout


def test_numbers_tell_layouts_apart_that_give_an_image_other_positions():
    layouts = [
        *(
            Native(1, 32),
            Native(1, 28),
            Native(1, 32, 4),
            Native(1, 32, 4, 1024),
            Native(1, 32, longest_edge=1024),
        ),
        Native(1, 32, is_capped=True),
    ]
    assert len({layout.numbers for layout in layouts}) == len(layouts)
