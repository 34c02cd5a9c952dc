import io
import json
import random
import resource
import struct
import warnings
import zlib
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from archives import png_chunk
from PIL import ExifTags, Image, ImageOps
from timm.data import create_transform
from torchvision.transforms.v2 import InterpolationMode, functional
from transformers import CLIPImageProcessor, LlavaImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from mmtrain.data.samples.records import IMAGE_FORMATS, BadSample, image_size
from mmtrain.data.stream.images import ImageTransform, decode_image, image_transform, upright
from mmtrain.layouts.layout import Tiling

SIZES = [(40, 40), (60, 25), (25, 61), (10, 9), (9, 10), (28, 28), (28, 3), (1, 40), (500, 2)]
TRANSFORM = ImageTransform(28, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), "bicubic")

ONE_TILE = Tiling(0, 0, 1)


def noise_image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)


def encode(image: Image.Image, file_format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def seen(transform: ImageTransform, image: Image.Image) -> torch.Tensor:
    """An image as the encoder takes it, (3, S, S) float32."""
    return transform.normalise(transform.fitted(image))


def read(transform: ImageTransform, content: bytes) -> torch.Tensor:
    """An image file as the encoder takes it."""
    (pixels,) = transform.decode(content, ONE_TILE)
    assert pixels.dtype == torch.uint8
    return transform.normalise(pixels[None])[0]


@pytest.fixture
def clip_folder(tmp_path):
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "clip_vision_model", "image_size": 28})
    )
    return tmp_path


SQUARE = {"height": 28, "width": 28}
STOCK = {
    "pillow": (LlavaImageProcessorPil, CLIPImageProcessorPil),
    "torchvision": (LlavaImageProcessor, CLIPImageProcessor),
}
FITS = {
    "pad": lambda llava, _: llava(size={"shortest_edge": 28}, crop_size=SQUARE, do_pad=True),
    "center_crop": lambda _, clip: clip(size={"shortest_edge": 28}, crop_size=SQUARE),
    "resize": lambda _, clip: clip(size=SQUARE, do_center_crop=False),
}


@pytest.mark.parametrize("resize", STOCK)
@pytest.mark.parametrize("fit", FITS)
def test_pixels_are_those_of_the_stock_processor(clip_folder, fit, resize):
    stock = FITS[fit](*STOCK[resize])
    transform = image_transform(str(clip_folder), fit, resize=resize)
    for size in SIZES:
        image = noise_image(*size)
        expected = torch.as_tensor(np.array(stock(image)["pixel_values"]))[0]
        torch.testing.assert_close(seen(transform, image), expected, rtol=0, atol=2e-6)


def test_normalising_divides_subtracts_and_divides_in_float32(clip_folder):
    transform = image_transform(str(clip_folder))
    images = torch.arange(256, dtype=torch.uint8).repeat(9)[None].unflatten(1, (3, 24, 32))
    pixels = images.numpy().astype(np.float32) / np.float32(255)
    pixels -= np.float32(transform.mean)[:, None, None]
    pixels /= np.float32(transform.std)[:, None, None]
    assert torch.equal(transform.normalise(images), torch.from_numpy(pixels)), "to the last bit"


def resized(image: Image.Image, side: int, transform: ImageTransform) -> np.ndarray:
    """A square of the image, (side, side, 3), by one call of the transform's library."""
    name = transform.interpolation.upper()
    if transform.resize == "pillow":
        return np.asarray(image.resize((side, side), Image.Resampling[name]))
    pixels = functional.pil_to_tensor(image).contiguous()
    whole = functional.resize(pixels, [side, side], InterpolationMode[name])
    return whole.permute(1, 2, 0).numpy()


@pytest.mark.parametrize(
    ("resize", "interpolation"),
    [
        *(("pillow", member.name.lower()) for member in Image.Resampling),
        *(("torchvision", name) for name in ("bicubic", "bilinear")),
    ],
)
def test_padding_is_llavas_expand2square_and_one_resize_bit_for_bit(
    monkeypatch, resize, interpolation
):
    transform = replace(TRANSFORM, interpolation=interpolation, resize=resize)
    for width, height in [*SIZES, (640, 480), (333, 471)]:
        image = noise_image(width, height)
        side = max(width, height)
        square = Image.new(
            "RGB", (side, side), tuple(int(channel * 255) for channel in transform.mean)
        )
        square.paste(image, ((side - width) // 2, (side - height) // 2))
        whole = resized(square, 28, transform)
        expected = (np.asarray(whole, np.float32) / 255 - np.float32(transform.mean)) / np.float32(
            transform.std
        )
        assert np.array_equal(seen(transform, image).permute(1, 2, 0).numpy(), expected), (
            width,
            height,
        )
        with monkeypatch.context() as patch:
            # rows in bands of 28
            patch.setattr("mmtrain.data.stream.images.BAND_PIXELS", 28 * side)
            assert np.array_equal(seen(transform, image).permute(1, 2, 0).numpy(), expected), (
                width,
                height,
            )


@pytest.mark.parametrize("fit", ["pad", "center_crop"])
def test_a_timm_name_gives_timms_own_preprocessing_where_nothing_is_cut_beforehand(fit):
    name = "test_vit.r160_in1k"
    config = timm.get_pretrained_cfg(name)
    stock = create_transform(
        config.input_size,
        interpolation=config.interpolation,
        mean=config.mean,
        std=config.std,
        crop_pct=1.0,
    )
    for size in {"pad": [(200, 200)]}.get(
        fit, [(320, 160), (160, 480), (400, 300), (90, 60), (160, 162)]
    ):
        image = noise_image(*size)
        torch.testing.assert_close(
            seen(image_transform(name, fit), image), stock(image), rtol=0, atol=2e-6
        )


def test_a_timm_folder_or_name_gives_its_own_size_and_mean(tiny):
    transform = image_transform(str(tiny / "vision"))
    assert (transform.image_size, transform.mean, transform.interpolation) == (
        32,
        (0.5, 0.5, 0.5),
        "bicubic",
    )
    assert image_transform("vit_large_patch14_clip_quickgelu_336.openai").image_size == 336


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_image_mode_becomes_rgb(mode):
    image = noise_image(20, 30).convert(mode)
    expected = seen(TRANSFORM, image.convert("RGB"))
    assert expected.shape == (3, 28, 28) and expected.dtype == torch.float32
    assert torch.equal(read(TRANSFORM, encode(image, "TIFF")), expected)


def transparent_files() -> dict[str, tuple[bytes, list[list[int]]]]:
    """Files of 2 pixels with transparency, and the pixels that white paper behind them shows."""
    colours = [(200, 100, 0), (10, 20, 30)]
    rgb, rgba = Image.new("RGB", (2, 1)), Image.new("RGBA", (2, 1))
    rgb.putdata(colours)
    rgba.putdata([(200, 100, 0, 51), (10, 20, 30, 0)])  # a fifth of the colour
    grey, palette = rgba.convert("LA"), rgb.quantize(2)
    grey.putdata([(100, 51), (7, 0)])
    index = palette.getpixel((1, 0))
    alphas = bytes(51 if number != index else 0 for number in range(2))
    white, faint, faint_grey = [255] * 3, [244, 224, 204], [224] * 3
    return {
        "RGBA": (encode(rgba, "PNG"), [faint, white]),
        "RGBA TIFF": (encode(rgba, "TIFF"), [faint, white]),
        "RGBA WEBP": (encode(rgba, "WEBP", lossless=True, exact=True), [faint, white]),
        "LA": (encode(grey, "PNG"), [faint_grey, white]),
        "palette, one colour": (encode(palette, "PNG", transparency=index), [[200, 100, 0], white]),
        "palette, alphas": (encode(palette, "PNG", transparency=alphas), [faint, white]),
        "palette GIF": (encode(palette, "GIF", transparency=index), [[200, 100, 0], white]),
        "RGB, one colour": (encode(rgb, "PNG", transparency=colours[1]), [[200, 100, 0], white]),
        "grey, one value": (encode(grey.convert("L"), "PNG", transparency=7), [[100] * 3, white]),
    }


@pytest.mark.parametrize("kind", transparent_files())
def test_transparent_pixels_are_laid_on_white(kind):
    content, expected = transparent_files()[kind]
    opened = Image.open(io.BytesIO(content))
    for image in (decode_image(content), upright(opened)):
        # a processor would lay it on white again
        assert image.mode == "RGB" and "transparency" not in image.info
        assert np.asarray(image).tolist() == [expected]
    assert torch.equal(seen(TRANSFORM, opened), read(TRANSFORM, content))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_an_opaque_picture_keeps_its_colours(mode):
    image = (
        noise_image(20, 30)
        .convert("L" if mode == "LA" else "P" if mode == "PA" else "RGB")
        .convert(mode)
    )
    assert np.array_equal(upright(image), image.convert("RGB"))


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_grey_of_16_bits_keeps_its_upper_8(file_format):
    grey = np.array([[0, 255, 256, 40_000], [65_535, 32_768, 1_000, 511]], dtype=np.uint16)
    decoded = decode_image(encode(Image.fromarray(grey), file_format))
    expected = [[0, 0, 1, 156], [255, 128, 3, 1]]
    assert [np.asarray(decoded)[..., channel].tolist() for channel in range(3)] == [expected] * 3


def turned_by_pillow(content: bytes) -> np.ndarray:
    """As transformers.image_utils.load_image turns it."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription], exif[ExifTags.Base.Make] = "a picture " * 3, "a camera"
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_picture_is_turned_by_its_exif_orientation_as_pillow_does(file_format):
    for orientation in range(10):  # 0 and 9 mean nothing
        content = encode(noise_image(13, 7), file_format, exif=exif_of(orientation))
        expected = turned_by_pillow(content)
        assert np.array_equal(decode_image(content), expected), orientation
        width, height = image_size(content)
        assert (height, width) == expected.shape[:2]
        assert np.array_equal(upright(Image.open(io.BytesIO(content))), expected)


@pytest.mark.parametrize("place", [33, -12], ids=["before the pixels", "behind them"])
def test_a_png_is_turned_wherever_its_orientation_is_written(place):
    plain = encode(noise_image(13, 7), "PNG")
    for orientation in range(2, 9):
        exif = exif_of(orientation).tobytes()
        profile = b"\nexif\n%8d\n" % len(exif) + exif.hex().encode()  # as ImageMagick has it
        xmp = b'<rdf:Description tiff:Orientation="%d"/>' % orientation
        for kind, written in {
            b"eXIf": exif.removeprefix(b"Exif\0\0"),
            b"zTXt": b"Raw profile type exif\0\0" + zlib.compress(profile),
            b"iTXt": b"XML:com.adobe.xmp\0\0\0\0\0" + xmp,
        }.items():
            content = plain[:place] + png_chunk(kind, written) + plain[place:]
            assert np.array_equal(decode_image(content), turned_by_pillow(content)), (
                kind,
                orientation,
            )
            width, height = image_size(content)
            assert (height, width) == np.asarray(decode_image(content)).shape[:2]
            assert not np.array_equal(decode_image(content), decode_image(plain))


def test_broken_exif_turns_a_picture_as_pillow_does_or_not_at_all_where_it_raises():
    draw, raised, turned = random.Random(0), 0, 0
    for number in range(500):
        exif = bytearray(exif_of(number % 8 + 1).tobytes())
        for _ in range(draw.choice((1, 1, 2, 6))):
            exif[draw.randrange(6, len(exif))] = draw.choice(
                (draw.randrange(256), 0, 255, draw.randrange(13))
            )
        content = encode(noise_image(9, 5), draw.choice(("PNG", "WEBP")), exif=bytes(exif))
        opened = Image.open(io.BytesIO(content))
        with warnings.catch_warnings(action="ignore"):
            try:
                found = opened.getexif().get(ExifTags.Base.Orientation)
            except Exception:
                raised, expected = raised + 1, opened.convert("RGB")
            else:
                method = {5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}.get(
                    found
                )
                method = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM"}.get(
                    found, method
                )
                turned += method is not None
                expected = opened.convert("RGB")
                expected = (
                    expected if method is None else expected.transpose(Image.Transpose[method])
                )
        assert np.array_equal(decode_image(content), expected), bytes(exif)
        assert np.array_equal(upright(Image.open(io.BytesIO(content))), expected)
    assert raised > 15 and 150 < turned < 500


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_no_known_range_are_rejected(mode):
    with pytest.raises(BadSample, match=f"mode {mode}.* no known range") as caught:
        TRANSFORM.decode(encode(Image.new(mode, (4, 4)), "TIFF"), ONE_TILE)
    assert caught.value.reason == "undecodable_image"


@pytest.mark.parametrize("file_format", IMAGE_FORMATS)
def test_decoding_gives_all_pixels_of_pillows_full_decode_and_the_first_picture_of_several(
    file_format,
):
    several = {"save_all": True, "append_images": [noise_image(90, 70).rotate(180)]}
    content = encode(
        noise_image(90, 70), file_format, **({} if file_format in ("JPEG", "BMP") else several)
    )
    with Image.open(io.BytesIO(content)) as image:
        expected = seen(TRANSFORM, image.convert("RGB"))
    assert torch.equal(read(TRANSFORM, content), expected)


def with_size(file_format: str, width: int, height: int) -> bytes:
    """A sound small file whose header claims another size."""
    options = {"lossless": True} if file_format == "WEBP" else {}
    content = bytearray(encode(noise_image(8, 8), file_format, **options))
    if file_format == "PNG":
        content[8:33] = png_chunk(b"IHDR", struct.pack(">II", width, height) + content[24:29])
    elif file_format == "JPEG":
        at = content.index(b"\xff\xc0") + 5  # SOF0: length, precision, height, width
        content[at : at + 4] = struct.pack(">HH", height, width)
    else:
        at = content.index(b"VP8L") + 9  # chunk name, length, signature; then 14 bits each, minus 1
        bits = struct.unpack_from("<I", content, at)[0] >> 28 << 28
        struct.pack_into("<I", content, at, bits | (width - 1) | (height - 1) << 14)
    return bytes(content)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("side", [60_000, 11_000, 301])
def test_a_header_that_claims_too_many_pixels_is_rejected_before_memory_is_taken(file_format, side):
    side = min(side, 16_384) if file_format == "WEBP" else side
    transform = replace(TRANSFORM, max_pixels=90_000) if side == 301 else TRANSFORM
    content = with_size(file_format, side, side)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadSample) as caught:
        transform.decode(content, ONE_TILE)
    assert caught.value.reason == "too_many_pixels"
    # KiB; 60,000 squared are 14 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_webp_whose_decoder_takes_twice_the_memory_may_have_half_the_pixels():
    small = replace(TRANSFORM, max_pixels=2 * 90_000)
    noise = noise_image(300, 300)
    assert read(small, encode(noise, "WEBP")).shape == seen(TRANSFORM, noise).shape
    with pytest.raises(BadSample, match=r"300 x 301 pixels of WebP; at most 90,000 are allowed"):
        small.decode(encode(noise_image(300, 301), "WEBP"), ONE_TILE)
    assert read(small, encode(noise_image(300, 301), "PNG")).shape == seen(TRANSFORM, noise).shape


@pytest.mark.parametrize("size", [(1, 31_000), (31_000, 1)])
@pytest.mark.parametrize("fit", ["pad", "resize", "center_crop"])
def test_a_thread_of_pixels_is_rejected_before_it_is_made_a_square(fit, size):
    with pytest.raises(BadSample, match="too long and thin") as caught:
        replace(TRANSFORM, fit=fit).decode(encode(Image.new("L", size), "PNG"), ONE_TILE)
    assert caught.value.reason == "too_many_pixels"


@pytest.mark.parametrize("size", [(3, 3_250), (3_250, 3)])
def test_a_thread_that_center_crop_would_stretch_to_a_long_side_is_rejected(size):
    image = noise_image(*size)
    with pytest.raises(BadSample, match="too long and thin"):
        replace(TRANSFORM, fit="center_crop").fitted(image)
    assert seen(TRANSFORM, image).shape == (3, 28, 28)


def test_padding_takes_no_square_of_the_longer_side():
    image = noise_image(2, 12_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pixels = seen(TRANSFORM, image)
    # KiB; the square has 576 MB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    assert (pixels[:, :, 0] == pixels[:, 0, 0, None]).all() and pixels.shape == (3, 28, 28)


def damaged(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    if draw.random() < 0.2:
        return bytes(changed[: draw.randrange(len(changed))])
    reach = draw.choice((60, 300, len(changed)))  # headers are where decoders go wrong
    for _ in range(draw.choice((1, 1, 2, 5))):
        changed[draw.randrange(min(reach, len(changed)))] ^= 1 << draw.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("file_format", IMAGE_FORMATS)
def test_a_damaged_file_is_an_image_or_rejected_and_nothing_else(file_format):
    draw = random.Random(file_format)
    transform = replace(TRANSFORM, max_pixels=30_000)
    contents = [
        encode(noise_image(20, 16), file_format),
        encode(noise_image(20, 16).convert("L"), file_format),
    ]
    if file_format == "TIFF":
        contents.append(encode(noise_image(20, 16), "TIFF", compression="tiff_lzw"))
    outcomes = set()
    for _ in range(700):
        try:
            pixels = transform.decode(damaged(draw.choice(contents), draw), ONE_TILE)
        except BadSample as error:
            outcomes.add(error.reason)
        else:
            assert pixels.shape == (1, 3, 28, 28)
            outcomes.add("an image")
    assert (
        {"an image", "undecodable_image"}
        <= outcomes
        <= {"an image", "undecodable_image", "too_many_pixels"}
    )
