"""What an encoder's folder says of its images, read without torch: size, how they are normalised, how many patches.

timm folder: config.json -> model_args.img_size, or pretrained_cfg.input_size (C, H, W)
transformers folder: config.json -> image_size, of vision_config where it holds more than an encoder;
                     preprocessor_config.json -> mean, std, resampling
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.encoders import TIMM_VIT, EncoderFamily, family_of
from mmtrain.facts.families import encoder_config, holds_encoder
from mmtrain.facts.model_files import find_model_folder, is_demo, read_json
from mmtrain.facts.settings import check_layers, is_whole
from mmtrain.facts.timm_models import timm_config

BICUBIC = 3  # of PIL.Image.Resampling, as preprocessor_config.json numbers it


class Preprocessing(NamedTuple):
    """How an encoder of transformers normalises and resizes images.

    mean, std: of RGB in 0..1, whatever range the folder's processor scales bytes to before it subtracts its own mean.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int  # of PIL.Image.Resampling


class PublishedImages(NamedTuple):
    """How an encoder's images are made, by whoever published it."""

    image_size: int  # pixels a side
    mean: Sequence[float]  # of RGB in 0..1, as `std`
    std: Sequence[float]
    interpolation: str  # a name of PIL.Image.Resampling, in lower case


class EncoderSettings(NamedTuple):
    """What an encoder's config.json says."""

    family: EncoderFamily
    image_size: int  # pixels a side; of a patch, if the family is native
    heads: int | None  # None where it says nothing
    blocks: int | None  # None where timm alone knows
    window: int | None = None  # patches that a block attends to at once; None: all of an image
    full_blocks: tuple[int, ...] = ()  # those that attend to all of them nevertheless
    deepstack: tuple[int, ...] = ()  # blocks whose output DeepStack takes, too


def is_timm_name(name: str) -> bool:
    """Whether `name` is looked up in timm's registry; folders, hub ids (owner/name) and `demo:vision` are not."""
    return "/" not in name and not is_demo(name) and not Path(name).expanduser().exists()


def encoder_settings(config_json: dict[str, Any], source: str) -> EncoderSettings:
    """Read the config.json of an encoder, or of what holds one; raises UserError for another model."""
    if "architecture" in config_json:
        family, settings = TIMM_VIT, config_json.get("model_args") or {}
        size, blocks = settings.get("img_size"), settings.get("depth")
        if size is None:
            sizes = (config_json.get("pretrained_cfg") or config_json).get("input_size")
            size = sizes[1:] if isinstance(sizes, list) and len(sizes) == 3 else None
        heads = settings.get("num_heads") or config_json.get("num_heads")
    else:
        family = family_of(config_json.get("model_type"), source)
        settings = config_json.get("vision_config") or config_json
        size = settings.get("image_size" if family.native is None else "patch_size") or family.image_size
        blocks = settings.get("num_hidden_layers") or settings.get("depth") or family.depth
        heads = settings.get("num_attention_heads") or settings.get("num_heads")
    check_layers(settings, f"{source}: config.json")
    width, head = settings.get("hidden_size"), settings.get("head_dim")
    if width and heads and head and heads * head != width:
        shown = f"{heads} heads of {head} features, which do not make up its hidden size, {width}"
        raise UserError(f"{source}: config.json says {shown}. Correct it")
    if family.native is None:
        return EncoderSettings(family, square(size, "images", source), heads, blocks, None, ())
    side, window, full = square([size, size], "patches", source), settings.get("window_size"), ()
    if window is not None:
        least = side * family.native.block
        if not is_whole(window, least, 30_000):
            shown = f"window_size {escape(repr(window))}; needed are at least {least} pixels"
            raise UserError(f"{source}: config.json has {shown}, what its merger joins")
        full = _block_numbers(settings, "fullatt_block_indexes", [7, 15, 23, 31], blocks, source)
        window = (window // side) ** 2
    has_deepstack = "deepstack_merger_list." in family.beside
    # The lists are transformers' defaults.
    deep = _block_numbers(settings, "deepstack_visual_indexes", [8, 16, 24], blocks, source) if has_deepstack else ()
    return EncoderSettings(family, side, heads, blocks, window, full, deep)


def _block_numbers(settings: dict[str, Any], key: str, default: list[int], blocks: int, source: str) -> tuple[int, ...]:
    if (numbers := settings.get(key)) is None:
        return tuple(default)
    if not isinstance(numbers, list) or not all(is_whole(number, 0, blocks - 1) for number in numbers):
        shown = f"{key} {escape(repr(numbers))}; needed are numbers of its {blocks} blocks"
        raise UserError(f"{source}: config.json has {shown}, counted from 0")
    return tuple(numbers)


def square(size: Any, of: str, source: str) -> int:
    """The side of what is given as one number or as height and width; raises UserError unless they are equal."""
    sides = size if isinstance(size, list | tuple) else [size, size]
    if len(sides) != 2 or not all(is_whole(side, 1, 30_000) for side in sides):
        shown = escape(repr(size))
        raise UserError(f"model.vision.name: {source} does not say the size of its {of}, in pixels: {shown}")
    if sides[0] != sides[1]:
        raise UserError(
            f"model.vision.name: {source} takes {of} of {sides[0]} x {sides[1]} pixels; needed are square ones"
        )
    return sides[0]


def check_preprocessing(name: str) -> None:
    """Raises UserError for an encoder's folder, its weights in it, that does not say how its images are normalised."""
    folder = find_model_folder(name)
    if folder is None or not any(folder.glob("model.safetensors*")):
        return
    if holds_encoder(folder) or "architecture" not in read_json(folder / "config.json"):
        preprocessing(folder)


def preprocessing(folder: Path) -> Preprocessing:
    """Read how an encoder's folder says that images are made; raises UserError where it says nothing usable."""
    file, facts = image_settings(folder)
    if facts is None:
        raise UserError(
            f"model.vision.name: {folder} has no preprocessor_config.json, so the normalisation of its images is "
            "unknown. Copy it from where the encoder was published. For an encoder of your own write it in Python: "
            "from transformers import SiglipImageProcessor (or its own class); "
            f"SiglipImageProcessor().save_pretrained('{folder}')."
        )
    # Stock processors multiply the bytes of an image by the factor, then subtract the mean and divide by the deviation.
    if facts.get("do_rescale") is False:
        raise UserError(f"{file}: do_rescale is false, so its encoder takes bytes as they are; needed is true")
    scale = round(255 * (facts.get("rescale_factor") or 1 / 255), 6)  # files hold 1/255 in several precisions
    mean, std = [0.0] * 3, [1.0] * 3
    if facts.get("do_normalize") is not False:
        mean, std = _statistics(facts, "image_mean", -10, file), _statistics(facts, "image_std", 0.001, file)
    resample = facts.get("resample")
    return Preprocessing(
        tuple(value / scale for value in mean),
        tuple(value / scale for value in std),
        BICUBIC if resample is None else resample,
    )


def published_images(name: str) -> PublishedImages | None:
    """Read how an encoder's images are made, from its folder or timm's record; None where it is not here."""
    from PIL import Image

    if is_timm_name(name):
        timm = timm_config(name)
        return PublishedImages(timm.input_size[-1], timm.mean, timm.std, timm.interpolation.lower())
    if (folder := find_model_folder(name)) is None:
        return None
    config = encoder_config(folder)
    size = encoder_settings(config, str(folder)).image_size
    if "architecture" in config and not holds_encoder(folder):
        facts = config.get("pretrained_cfg", config)
        return PublishedImages(size, facts["mean"], facts["std"], facts["interpolation"].lower())
    made = preprocessing(folder)
    return PublishedImages(size, made.mean, made.std, Image.Resampling(made.resample).name.lower())


def _statistics(facts: dict[str, Any], key: str, least: float, file: Path) -> list[float]:
    """Return the mean or the standard deviation of each channel; raises UserError for what no encoder has."""
    values = facts.get(key)
    is_list = isinstance(values, list) and len(values) == 3
    # A comparison that NaN fails.
    if not is_list or not all(type(value) in (int, float) and least <= value <= 10 for value in values):
        shown = escape(repr(values), 200)
        raise UserError(f"{file}: {key} is {shown}; needed are three numbers from {least} to 10. Correct the file")
    return values


def image_settings(folder: Path) -> tuple[Path, dict[str, Any] | None]:
    """The file of a folder of transformers that says how its images are made, and what it says; None: nothing."""
    file, processor = folder / "preprocessor_config.json", folder / "processor_config.json"
    part = read_json(processor).get("image_processor") if processor.is_file() else None
    if part is not None:  # transformers prefers it too
        return processor, part
    return file, read_json(file) if file.is_file() else None


def patches_per_image(image_size: int, patch_size: int) -> int:
    """Patches that an encoder makes of one image; its convolution drops what is left over at the right and the bottom.

    Raises UserError when not even one patch fits.
    """
    if patch_size < 1 or image_size < patch_size:
        raise UserError(
            f"image size {image_size} with patch size {patch_size}: not one patch fits. Correct config.json"
        )
    return (image_size // patch_size) ** 2
