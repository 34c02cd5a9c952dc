"""Decode an image file and turn it into the encoder's input.

bytes --header: how many pixels?--> --Pillow--> RGB on white, turned by EXIF
    --fit, or tiling--> (tiles, 3, S, S) uint8
    --on the encoder's device: /255, minus mean, over std--> (tiles, 3, S, S) float32

fit: pad         whole, on a square of the mean colour (LLaVA-1.5's `image_aspect_ratio: pad`);
                 padding takes tokens
     resize      whole, both sides to S: shapes are stretched
     center_crop shorter side to S, then the middle (CLIP's, timm's): cuts away what a caption may
                 speak of

`resize`: torchvision takes a third of Pillow's time; their levels differ by at most 2 of 255.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmtrain.base.errors import UserError
from mmtrain.config.limits import MAX_IMAGE_PIXELS
from mmtrain.data.samples.records import (
    DECODE_ERRORS,
    TURNS,
    BadSample,
    open_image,
    orientation,
    refuse_unreadable,
)
from mmtrain.data.shards.index import MEND
from mmtrain.facts.model_files import no_model
from mmtrain.facts.models import Models
from mmtrain.facts.vision_files import published_images
from mmtrain.layouts.anyres import centred_size
from mmtrain.layouts.layout import Tiling

Fit = Literal["pad", "resize", "center_crop"]
BAND_PIXELS = 16_000_000  # that padding handles at a time, 64 MB


@dataclass(frozen=True)
class ImageTransform:
    """The encoder's published size, mean and interpolation, and the way to a square."""

    image_size: int  # pixels a side
    mean: tuple[float, float, float]  # of RGB in 0..1
    std: tuple[float, float, float]
    interpolation: str  # a name of PIL.Image.Resampling, in lower case
    fit: Fit = "pad"  # of an image that is not cut into tiles
    max_pixels: int = MAX_IMAGE_PIXELS  # of an image that `decode` takes
    resize: str = "pillow"  # or torchvision

    def decode(
        self,
        content: bytes,
        tiling: Tiling,
        is_control: bool = False,
    ) -> Tensor:
        """Return an image file as (tiles, 3, S, S) uint8, S = image_size; raises BadSample.

        An image of another size than the tiling's is BadSample; where `is_control`, it is stretched
        to that size.
        """
        image = decode_image(content, self.max_pixels)
        size = (tiling.width, tiling.height)
        if any(size) and image.size != size:
            if not is_control:
                raise BadSample(
                    "other_size",
                    f"{image.width} x {image.height} pixels, but its index says {size[0]} x "
                    f"{size[1]}; index its shard again: {MEND} SHARD",
                )
            image = Image.fromarray(self._resize(image, size))
        return self.cut(image, tiling)

    def cut(self, image: Image.Image, tiling: Tiling) -> Tensor:
        """Cut an image of the tiling's size into (tiles, 3, S, S) uint8.

        Raises what `fitted` raises.
        """
        if tiling.canvas == "fitted":
            return self.fitted(image)[None]
        image = as_rgb(image)
        side = self.image_size
        size = (tiling.columns * side, tiling.rows * side)
        if tiling.canvas == "padded":
            canvas = self._pad(image)
        elif tiling.canvas == "stretched":
            canvas = self._resize(image, size)
        else:
            width, height = centred_size(*image.size, *size)
            left = (size[0] - width) // 2
            top = (size[1] - height) // 2
            canvas = np.zeros((size[1], size[0], 3), np.uint8)
            canvas[top : top + height, left : left + width] = self._resize(image, (width, height))

        pixels = canvas.reshape(tiling.rows, side, tiling.columns, side, 3)
        tiles = pixels.transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)
        if tiling.overview is not None:
            whole = self._resize(image).transpose(2, 0, 1)[None]
            ordered = [whole, tiles] if tiling.overview == "first" else [tiles, whole]
            tiles = np.concatenate(ordered)
        return torch.from_numpy(np.ascontiguousarray(tiles))

    def normalise(self, tiles: Tensor) -> Tensor:
        """Turn (..., 3, S, S) uint8 into float32: divided by 255, minus mean, over std."""
        white, mean, std = _statistics(self.mean, self.std, tiles.device)
        return tiles.to(torch.float32).div_(white).sub_(mean).div_(std)

    def fitted(self, image: Image.Image) -> Tensor:
        """Turn an image of any size and mode into (3, image_size, image_size) uint8.

        Raises `refuse_unreadable`'s.
        """
        scale = self.image_size / min(image.size) if self.fit == "center_crop" else 1
        refuse_unreadable(image, scale)
        image = as_rgb(image)
        if self.fit == "pad":
            fitted = self._pad(image)
        elif self.fit == "resize":
            fitted = self._resize(image)
        else:
            fitted = self._center_crop(image)
        return torch.from_numpy(np.ascontiguousarray(fitted.transpose(2, 0, 1)))

    def _pad(self, image: Image.Image) -> np.ndarray:
        """Resize the padded square without making it.

        Bars above and below are added between the two passes, since each rounds to 8 bits.
        torchvision's bilinear one does not on a CPU with neither AVX2 nor ARM's vectors: there a
        padded picture may differ from transformers' by a level.
        """
        width, height = image.size
        side = max(image.size)
        left = (side - width) // 2
        above = (side - height) // 2
        colour = tuple(int(channel * 255) for channel in self.mean)
        narrow = np.full((side, self.image_size, 3), colour, np.uint8)
        rows = max(BAND_PIXELS // side, 1)
        for top in range(0, height, rows):
            # Pillow copies even if nothing is cut off: 0.1 ms of a photograph's 5.
            band = image
            if rows < height:
                band = image.crop((0, top, width, min(top + rows, height)))
            if width < side:
                padded = Image.new("RGB", (side, band.height), colour)
                padded.paste(band, (left, 0))
                band = padded
            at = above + top
            narrow[at : at + band.height] = self._resize(band, (self.image_size, band.height))
        return self._resize(Image.fromarray(narrow))

    def _center_crop(self, image: Image.Image) -> np.ndarray:
        size = self.image_size
        width, height = (int(size * side / min(image.size)) for side in image.size)
        left = (width - size) // 2
        top = (height - size) // 2
        resized = self._resize(image, (width, height))
        return resized[top : top + size, left : left + size]

    def _resize(self, image: Image.Image, size: tuple[int, int] | None = None) -> np.ndarray:
        """Return (height, width, 3) uint8."""
        width, height = size or (self.image_size, self.image_size)
        by = self.interpolation.upper()
        if self.resize == "pillow":
            return np.asarray(image.resize((width, height), Image.Resampling[by]))
        from torchvision.transforms.v2 import InterpolationMode, functional  # takes a second

        pixels = functional.pil_to_tensor(image)
        resized = functional.resize(pixels, [height, width], InterpolationMode[by])
        return resized.permute(1, 2, 0).numpy()


@functools.cache
def _statistics(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return 255, mean and std as tensors.

    CUDA multiplies by the reciprocal of a number, which rounds twice.
    """

    def channels(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]

    return channels((255.0,)), channels(mean), channels(std)


def as_rgb(image: Image.Image) -> Image.Image:
    """Lay what is transparent in an image on white, as transformers' processors do from 5.21 on.

    The result is RGB.
    """
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_image(content: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Decode an image file to RGB, its first picture if there are several, turned as EXIF says.

    Raises BadSample.
    """
    image = open_image(content, max_pixels)
    try:
        return upright(image)
    except DECODE_ERRORS as error:
        raise BadSample("undecodable_image", str(error)) from None


def upright(image: Image.Image) -> Image.Image:
    """Return an opened image in RGB, turned as EXIF says.

    Raises what `refuse_unreadable` raises.
    """
    refuse_unreadable(image)
    image.load()
    turn = TURNS.get(orientation(image))
    if image.mode.startswith("I;16"):  # Pillow's own conversion cuts 65,535 off at 255: all white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = as_rgb(image)
    return image if turn is None else image.transpose(turn)


def transform_of(models: Models, max_pixels: int = MAX_IMAGE_PIXELS) -> ImageTransform:
    """Return the preprocessing of a run's images."""
    return image_transform(
        models.section.vision.name,
        models.image_fit,
        max_pixels,
        models.layout.tile_size,
        models.resize,
    )


def image_transform(
    name: str,
    fit: Fit | None = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
    tile_size: int | None = None,
    resize: str = "pillow",
) -> ImageTransform:
    """Return the preprocessing of a vision encoder, named as in `model.vision.name`.

    `fit`, `resize`: as data.image_fit and data.resize.

    It is that of timm's pretrained configuration, or of a folder's `preprocessor_config.json`, with
    tiles of `tile_size` pixels a side for an encoder that takes images of any size. Raises
    UserError.
    """
    images = published_images(name)
    if images is None:
        raise no_model(name)
    size, mean, std, interpolation = images
    if interpolation.upper() not in Image.Resampling.__members__:
        names = ", ".join(Image.Resampling.__members__)
        raise UserError(
            f"model.vision.name: {name} resizes by {interpolation!r}; "
            f"needed is one of {names.lower()}"
        )
    return ImageTransform(
        tile_size or int(size),
        tuple(mean),
        tuple(std),
        interpolation,
        fit or "pad",
        max_pixels,
        resize,
    )
