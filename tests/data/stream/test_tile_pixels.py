"""Pixels of tiles are those of the stock processors, whatever an image's mode, size and the
encoder's interpolation.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    GotOcr2ImageProcessor,
    LlavaNextImageProcessor,
    LlavaOnevisionImageProcessor,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from mmtrain.data.samples.records import BadSample
from mmtrain.data.stream.images import ImageTransform, decode_image
from mmtrain.layouts.anyres import Anyres, AnyresMax9
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.tiles import Tiles

SIDE = 28
TRANSFORM = ImageTransform(SIDE, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), "bicubic")
# Threads, odd numbers, exact grids and a pixel beside them, exact tiles.
SIZES = [
    *((1, 40), (40, 1), (1, 1), (300, 7), (13, 411)),
    *((57, 31), (56, 28), (28, 56), (84, 28), (57, 28), (28, 28), (169, 170)),
]
STOCK = {  # by layout and data.resize
    "tiles": {"pillow": GotOcr2ImageProcessorPil, "torchvision": GotOcr2ImageProcessor},
    "anyres": {"pillow": LlavaNextImageProcessorPil, "torchvision": LlavaNextImageProcessor},
    "anyres_max_9": {
        "pillow": LlavaOnevisionImageProcessorPil,
        "torchvision": LlavaOnevisionImageProcessor,
    },
}
LAYOUTS = [
    Tiles(4, SIDE),
    Tiles(4, SIDE, max_tiles=4),
    Tiles(4, SIDE, max_tiles=1),
    Anyres(4, SIDE),
    AnyresMax9(4, SIDE),
    AnyresMax9(4, SIDE, pinpoints=((SIDE, 3 * SIDE), (5 * SIDE, 2 * SIDE))),
]


def noise(width: int, height: int, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(1000 * width + height).integers(
        0, 256, (height, width, channels), dtype=np.uint8
    )
    return Image.fromarray(pixels)


def stored(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def stock_tiles(
    layout: ImageLayout, transform: ImageTransform, images: list[Image.Image]
) -> torch.Tensor:
    """Tiles (N, 3, S, S) uint8 of the images of one sample, as the stock processor hands them to
    `rescale`.
    """
    side = transform.image_size
    size = {"height": side, "width": side}
    settings: dict[str, Any] = {
        "size": size,
        "resample": Image.Resampling[transform.interpolation.upper()],
    }
    settings |= {"do_rescale": False, "do_normalize": False, "image_mean": list(transform.mean)}
    pixels = [np.array(image) for image in images]
    make = STOCK[layout.name][transform.resize]
    if layout.name == "tiles":
        stock = make(**settings, **layout.image_settings)
        return torch.from_numpy(
            np.stack(stock(pixels, input_data_format="channels_last")["pixel_values"])
        )
    if layout.name == "anyres":
        stock = make(**settings, crop_size=size, **layout.image_settings, do_pad=False)
        given: list[Any] = pixels
    else:
        stock = make(**settings, **layout.image_settings, do_pad=False)
        given = [pixels]
    found = stock(given, input_data_format="channels_last")["pixel_values"]
    return torch.from_numpy(np.concatenate([np.asarray(tiles) for tiles in found]))


def ours(layout: ImageLayout, transform: ImageTransform, images: list[Image.Image]) -> torch.Tensor:
    return torch.cat(
        [transform.cut(image, layout.tiling(*image.size, len(images))) for image in images]
    )


def check(layout: ImageLayout, transform: ImageTransform, images: list[Image.Image]) -> None:
    found, expected = ours(layout, transform, images), stock_tiles(layout, transform, images)
    assert found.dtype == torch.uint8 and found.shape == expected.shape, (layout, images)
    assert torch.equal(found, expected.to(torch.uint8)), (layout, images)


@pytest.mark.parametrize(
    ("resize", "interpolation"),
    [
        *(("pillow", name) for name in ("bicubic", "bilinear", "nearest", "lanczos")),
        *(("torchvision", name) for name in ("bicubic", "bilinear")),
    ],
)
def test_tiles_of_any_size_are_the_stock_processors_to_the_bit(resize, interpolation):
    transform = replace(TRANSFORM, interpolation=interpolation, resize=resize)
    for layout in LAYOUTS:
        for size in SIZES:
            check(layout, transform, [noise(*size)])


@pytest.mark.parametrize("resize", ["pillow", "torchvision"])
def test_tiles_of_several_images_of_a_sample_are_the_stock_processors_to_the_bit(resize):
    transform = replace(TRANSFORM, resize=resize)
    for layout in LAYOUTS:
        for first in range(0, len(SIZES), 3):
            check(layout, transform, [noise(*size) for size in SIZES[first : first + 3]])


def test_tiles_of_every_mode_are_those_of_its_colours():
    colours, grey16 = (
        noise(57, 31),
        np.random.default_rng(0).integers(0, 65_536, (31, 57)).astype(np.uint16),
    )
    contents = [
        *(stored(colours.convert(mode)) for mode in ("L", "LA", "1", "RGBA")),
        *(stored(colours.convert(mode), "JPEG") for mode in ("RGB", "L", "CMYK")),
        stored(noise(57, 31, channels=4)),
        stored(colours.quantize(16)),
        stored(colours.quantize(16), transparency=3),
        stored(Image.fromarray(grey16)),
        stored(Image.fromarray(grey16), "TIFF"),
    ]
    for content in contents:
        image = decode_image(content)  # what each mode's colours are is tested with squares
        for layout in LAYOUTS:
            found = TRANSFORM.decode(content, layout.tiling(*image.size))
            assert torch.equal(found, stock_tiles(layout, TRANSFORM, [image]).to(torch.uint8)), (
                layout,
                content[:8],
            )


def test_values_are_the_stock_processors_too():
    layout, image = LAYOUTS[3], noise(57, 31)
    size = {"height": SIDE, "width": SIDE}
    stock = LlavaNextImageProcessorPil(
        size=size, crop_size=size, image_mean=TRANSFORM.mean, image_std=TRANSFORM.std,
        **layout.image_settings,
    )  # fmt: skip
    expected = torch.as_tensor(np.array(stock(image)["pixel_values"]))[0]
    found = TRANSFORM.normalise(TRANSFORM.cut(image, layout.tiling(*image.size)))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS[2:5], ids=lambda layout: layout.name)
def test_another_samples_image_is_stretched_to_the_size_that_its_own_has_and_no_other_is(layout):
    own, others = layout.tiling(57, 31), noise(40, 90)
    stretched = others.resize((57, 31), Image.Resampling.BICUBIC)
    found = TRANSFORM.decode(stored(others), own, is_control=True)
    assert torch.equal(found, stock_tiles(layout, TRANSFORM, [stretched]).to(torch.uint8))
    assert torch.equal(
        TRANSFORM.decode(stored(noise(57, 31)), own, is_control=True),
        ours(layout, TRANSFORM, [noise(57, 31)]),
    )
    with pytest.raises(BadSample, match="40 x 90 pixels, but its index says 57 x 31"):
        TRANSFORM.decode(stored(others), own)
