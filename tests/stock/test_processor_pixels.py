"""The image processor that a stock class's folder names makes the pixels of training, in every
class that is exported and with every value of data.resize that it has a backend for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from mmtrain.data.stream.images import ImageTransform
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.registry import LAYOUTS
from mmtrain.stock.exporters import STOCK_CLASSES
from mmtrain.stock.stock_class import BACKENDS, StockClass

PATCH = 14
SIZES = ((57, 31), (28, 28), (56, 28), (3, 100), (1, 1), (500, 333), (333, 640))
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
ALONE = ("Llava", "VideoLlama3")  # with native sizes each patch is a position
# that its processor asks for whatever the file says
ASKED = {"AyaVision": {"crop_to_patches": True}}
# torchvision divides once where training divides twice
WITHIN = {"pillow": 0, "torchvision": 1e-6}


def layout_of(stock: StockClass, name: str) -> ImageLayout:
    kind = LAYOUTS[name]
    if not kind.attends_across:
        return kind(4, 2 * PATCH)
    factor = 1 if stock.name in ALONE else 2
    bounds = {"min_positions": 4, "max_positions": 24}
    if stock.bounds_edge:
        bounds = {"longest_edge": 3 * PATCH}
    return kind(1, factor * PATCH, factor=factor, is_capped=stock.name == "Lfm2Vl", **bounds)


def cases() -> Iterator[tuple[StockClass, str, str, str]]:
    for stock in STOCK_CLASSES:
        for resize in BACKENDS:
            if resize not in stock.backends:
                continue
            for name in stock.layouts:
                for fit in ("pad",) if LAYOUTS[name].is_sized else stock.fits:
                    kind = f"{stock.name}-{name}-{fit}-{resize}"
                    yield pytest.param(stock, name, fit, resize, id=kind)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("stock", "name", "fit", "resize"), [*cases()])
def test_the_processor_of_a_folder_makes_the_pixels_of_training(
    tmp_path, stock, name, fit, resize, interpolation
):
    layout = layout_of(stock, name)
    transform = ImageTransform(layout.tile_size, MEAN, STD, interpolation, fit, resize=resize)
    settings = stock.image_settings(transform, layout)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend=BACKENDS[resize])
    assert processor.backend == BACKENDS[resize]

    for width, height in SIZES:
        noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
        picture = Image.fromarray(noise)
        tiling = layout.tiling(width, height)
        tiles = transform.normalise(transform.cut(picture, tiling))
        wanted = stock.inputs(tiles, (tiling,), layout)["pixel_values"]
        found = processor(picture, return_tensors="pt", **ASKED.get(stock.name, {}))
        found = found["pixel_values"].reshape(wanted.shape)
        assert float((found - wanted).abs().max()) <= WITHIN[resize], (width, height)
        assert torch.isfinite(wanted).all()
