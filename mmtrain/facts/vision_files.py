"""Images of an encoder as its folder's files have them: size, normalisation, number of patches.

timm folder:         config.json -> model_args.img_size, or pretrained_cfg.input_size (C, H, W)
transformers folder: config.json -> image_size, of vision_config where it holds more than an
                     encoder; preprocessor_config.json -> mean, std, resampling

No torch here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.facts.encoders import TIMM_VIT, EncoderFamily, family_of
from mmtrain.facts.families import encoder_config, holds_encoder
from mmtrain.facts.model_files import (
    find_model_folder,
    is_demo,
    model_config,
    optional_json,
    read_json,
)
from mmtrain.facts.settings import Settings, check_layers, first, is_whole
from mmtrain.facts.timm_models import timm_config

BICUBIC = 3  # of PIL.Image.Resampling, as preprocessor_config.json numbers it
# transformers' defaults
_BLOCK_NUMBERS = {
    "fullatt_block_indexes": (7, 15, 23, 31),
    "deepstack_visual_indexes": (8, 16, 24),
}


class Preprocessing(NamedTuple):
    """Normalisation and resampling of an encoder of transformers.

    mean, std: of RGB in 0..1, whatever range the folder's processor scales bytes to before it
    subtracts its own mean.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int  # of PIL.Image.Resampling


class PublishedImages(NamedTuple):
    """Size, normalisation and resampling of an encoder's images, as published."""

    image_size: int  # pixels a side
    mean: Sequence[float]  # of RGB in 0..1, as `std`
    std: Sequence[float]
    interpolation: str  # a name of PIL.Image.Resampling, in lower case


class EncoderSettings(NamedTuple):
    """Facts in an encoder's config.json."""

    family: EncoderFamily
    image_size: int  # pixels a side; of a patch, if the family is native
    heads: int | None  # None where it says nothing
    blocks: int | None  # None where timm alone knows
    window: int | None = None  # patches that a block attends to at once; None: all of an image
    full_blocks: tuple[int, ...] = ()  # those that attend to all of them nevertheless
    deepstack: tuple[int, ...] = ()  # blocks whose output DeepStack takes, too


def is_timm_name(name: str) -> bool:
    """Whether `name` is looked up in timm's registry, which has no folders, hub ids and demo."""
    return "/" not in name and not is_demo(name) and not Path(name).expanduser().exists()


def encoder_settings(config_json: Settings, source: str) -> EncoderSettings:
    """Read the config.json of an encoder, or of a model that holds one.

    Raises UserError for another model.
    """
    if "architecture" in config_json:
        family = TIMM_VIT
        settings = config_json.get("model_args") or {}
        size = settings.get("img_size")
        if size is None:
            sizes = (config_json.get("pretrained_cfg") or config_json).get("input_size")
            if isinstance(sizes, list) and len(sizes) == 3:
                size = sizes[1:]
        blocks = settings.get("depth")
        heads = settings.get("num_heads") or config_json.get("num_heads")
    else:
        family = family_of(config_json.get("model_type"), source)
        settings = config_json.get("vision_config") or config_json
        key = "image_size" if family.native is None else "patch_size"
        size = settings.get(key) or family.image_size
        blocks = first(settings, "blocks") or family.depth
        heads = first(settings, "encoder_heads")
    check_layers(settings, f"{source}: config.json")
    width = settings.get("hidden_size")
    head = settings.get("head_dim")
    if width and heads and head and heads * head != width:
        shown = f"{heads} heads of {head} features, which do not make up its hidden size, {width}"
        raise UserError(f"{source}: config.json says {shown}. Correct it")
    if family.native is None:
        return EncoderSettings(family, square(size, "images", source), heads, blocks)

    side = square([size, size], "patches", source)
    window = settings.get("window_size")
    full: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()
    if window is not None:
        least = side * family.native.block
        if not is_whole(window, least, 30_000):
            shown = f"window_size {escape(repr(window))}; needed are at least {least} pixels"
            raise UserError(f"{source}: config.json has {shown}, what its merger joins")
        window = (window // side) ** 2
        full = _block_numbers(settings, "fullatt_block_indexes", blocks, source)
    if "deepstack_merger_list." in family.beside:
        deepstack = _block_numbers(settings, "deepstack_visual_indexes", blocks, source)
    return EncoderSettings(family, side, heads, blocks, window, full, deepstack)


def _block_numbers(settings: Settings, key: str, blocks: int, source: str) -> tuple[int, ...]:
    numbers = settings.get(key)
    if numbers is None:
        return _BLOCK_NUMBERS[key]
    if isinstance(numbers, list) and all(is_whole(number, 0, blocks - 1) for number in numbers):
        return tuple(numbers)
    shown = f"{key} {escape(repr(numbers))}; needed are numbers of its {blocks} blocks"
    raise UserError(f"{source}: config.json has {shown}, counted from 0")


def square(size: Any, of: str, source: str) -> int:
    """Return the side of a square given as one number or as height and width.

    Raises UserError unless they are equal.
    """
    sides = [size, size]
    if isinstance(size, list | tuple):
        sides = size
    if len(sides) != 2 or not all(is_whole(side, 1, 30_000) for side in sides):
        shown = escape(repr(size))
        raise UserError(
            f"model.vision.name: {source} does not say the size of its {of}, in pixels: {shown}"
        )
    if sides[0] != sides[1]:
        raise UserError(
            f"model.vision.name: {source} takes {of} of {sides[0]} x {sides[1]} pixels; "
            "needed are square ones"
        )
    return sides[0]


def check_preprocessing(name: str) -> None:
    """Raise UserError for a folder of an encoder's weights without the images' normalisation."""
    folder = find_model_folder(name)
    if folder is None or not any(folder.glob("model.safetensors*")):
        return
    if holds_encoder(folder) or "architecture" not in model_config(folder):
        preprocessing(folder)


def preprocessing(folder: Path) -> Preprocessing:
    """Read normalisation and resampling from an encoder's folder.

    Raises UserError where it says nothing usable.
    """
    file, facts = image_settings(folder)
    if facts is None:
        raise UserError(
            f"model.vision.name: {folder} has no preprocessor_config.json, so the normalisation of "
            "its images is unknown. Copy it from where the encoder was published. For an encoder "
            "of your own write it in Python: from transformers import SiglipImageProcessor (or its "
            f"own class); SiglipImageProcessor().save_pretrained('{folder}')."
        )
    # Stock processors multiply the bytes of an image by the factor, then subtract the mean and
    # divide by the deviation.
    if facts.get("do_rescale") is False:
        raise UserError(
            f"{file}: do_rescale is false, so its encoder takes bytes as they are; needed is true"
        )
    # files hold 1/255 in several precisions
    factor = facts.get("rescale_factor") or 1 / 255
    scale = round(255 * factor, 6)
    mean = [0.0] * 3
    std = [1.0] * 3
    if facts.get("do_normalize") is not False:
        mean = _statistics(facts, "image_mean", -10, file)
        std = _statistics(facts, "image_std", 0.001, file)
    resample = facts.get("resample")
    if resample is None:
        resample = BICUBIC
    return Preprocessing(
        tuple(value / scale for value in mean),
        tuple(value / scale for value in std),
        resample,
    )


def published_images(name: str) -> PublishedImages | None:
    """Read an encoder's image settings from its folder or timm's record; None: it is not here."""
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


def _statistics(facts: Settings, key: str, least: float, file: Path) -> list[float]:
    """Return the mean or the standard deviation of each channel.

    Raises UserError for values that no encoder has.
    """
    values = facts.get(key)
    is_list = isinstance(values, list) and len(values) == 3
    # A comparison that NaN fails.
    if not is_list or not all(type(x) in (int, float) and least <= x <= 10 for x in values):
        shown = escape(repr(values), 200)
        raise UserError(
            f"{file}: {key} is {shown}; needed are three numbers from {least} to 10. "
            "Correct the file"
        )
    return values


def image_settings(folder: Path) -> tuple[Path, Settings | None]:
    """Return the file of a folder of transformers that describes its images, and its content.

    The content is None where there is no such file.
    """
    processor = "processor_config.json"
    part = optional_json(folder, processor).get("image_processor")
    if part is not None:  # transformers prefers it too
        return folder / processor, part
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return file, None
    return file, read_json(file)


def unfit_filter(name: str) -> str:
    """Return why torchvision cannot resize an encoder's images; "": it can, or is not known."""
    images = published_images(name)
    if images is None or images.interpolation in ("bilinear", "bicubic"):
        return ""
    return f"{name} resizes by {images.interpolation}, which torchvision does not have"


def patches_per_image(image_size: int, patch_size: int) -> int:
    """Return the number of patches that an encoder makes of one image.

    Its convolution drops pixels that are left over at the right and the bottom. Raises UserError
    when not even one patch fits.
    """
    if patch_size < 1 or image_size < patch_size:
        raise UserError(
            f"image size {image_size} with patch size {patch_size}: not one patch fits. "
            "Correct config.json"
        )
    return (image_size // patch_size) ** 2
