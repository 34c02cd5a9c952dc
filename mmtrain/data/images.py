"""An image's way from a file's bytes to the encoder's input.

bytes --Pillow--> RGB (height, width) --pad to square with the mean colour--> --resize--> (S, S)
      --/255, minus mean, over std--> (3, S, S) float32

As in LLaVA (`image_aspect_ratio: pad`): the whole image is kept. A centre crop (timm's `crop_pct`, transformers'
`crop_size`) would cut away what a caption may speak of. Price: the padding's patches are tokens too.
"""

from __future__ import annotations

import difflib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image, UnidentifiedImageError
from timm.models import PretrainedCfg

from mmtrain.data.records import DECODE_ERRORS, IMAGE_FORMATS
from mmtrain.demo.names import is_demo
from mmtrain.errors import UserError
from mmtrain.plan.model_files import model_folder, read_json


@dataclass(frozen=True)
class ImageTransform:
    """The encoder's published preprocessing, without its crop."""

    image_size: int  # pixels a side
    mean: tuple[float, float, float]  # of RGB in 0..1
    std: tuple[float, float, float]
    interpolation: str  # a name of PIL.Image.Resampling, in lower case

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Turn an image of any size and mode into (3, image_size, image_size) float32."""
        image = image.convert("RGB")
        side = max(image.size)
        if image.size != (side, side):
            square = Image.new("RGB", (side, side), tuple(int(channel * 255) for channel in self.mean))
            square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            image = square
        size = (self.image_size, self.image_size)
        image = image.resize(size, Image.Resampling[self.interpolation.upper()])
        pixels = np.asarray(image, dtype=np.float32) / 255
        pixels = (pixels - np.float32(self.mean)) / np.float32(self.std)
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def decode_image(content: bytes, where: str) -> Image.Image:
    """Decode an image file's bytes; raises UserError naming `where` for what Pillow cannot read to its end."""
    try:
        image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
        image.load()
    except DECODE_ERRORS as error:
        reason = f"none of {', '.join(IMAGE_FORMATS)}" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"{where}: not a readable image ({reason}); replace or remove this sample") from error
    return image


def image_transform(name: str) -> ImageTransform:
    """The preprocessing that belongs to a vision encoder, named as in `model.vision.name`.

    From timm's pretrained configuration, or from the `preprocessor_config.json` of a transformers folder. Raises
    UserError where neither exists: guessed means would give features that the encoder was never trained on.
    """
    if is_timm_name(name):
        config = timm_config(name)
        return _transform(name, config.input_size[-1], config.mean, config.std, config.interpolation)
    folder = model_folder(name)
    config = read_json(folder / "config.json")
    if "architecture" in config:
        facts = config.get("pretrained_cfg", config)
        size = (config.get("model_args") or {}).get("img_size") or facts["input_size"][-1]
        size = size[-1] if isinstance(size, list) else size
        return _transform(name, size, facts["mean"], facts["std"], facts["interpolation"])
    facts = read_json(folder / "preprocessor_config.json")
    size = config.get("vision_config", config).get("image_size", 224)  # as CLIPVisionConfig and SiglipVisionConfig
    interpolation = Image.Resampling(facts.get("resample", Image.Resampling.BICUBIC)).name
    return _transform(name, size, facts["image_mean"], facts["image_std"], interpolation)


def _transform(name: str, size: int, mean: list[float], std: list[float], interpolation: str) -> ImageTransform:
    if interpolation.upper() not in Image.Resampling.__members__:
        known = ", ".join(member.lower() for member in Image.Resampling.__members__)
        raise UserError(f"model.vision.name: {name} is resized by {interpolation!r}; known are {known}")
    return ImageTransform(int(size), tuple(mean), tuple(std), interpolation.lower())


def is_timm_name(name: str) -> bool:
    """Whether `name` is looked up in timm's registry; folders, hub ids (owner/name) and `demo:vision` are not."""
    return "/" not in name and not is_demo(name) and not Path(name).expanduser().exists()


def timm_config(name: str) -> PretrainedCfg:
    """timm's record of a pretrained model: where its weights are, input size, mean, std, interpolation.

    Raises UserError for an unknown name and for weights that were trained with another activation function.
    """
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise UserError(f"model.vision.name: {name} is neither a folder here nor a model that timm knows{hint}")
    known = timm.list_pretrained(f"{architecture}.*")
    if not known or (tag and name not in known):
        listed = ", ".join(known) or "no weights at all"
        raise UserError(f"model.vision.name: timm has no weights {name}; of {architecture} it has {listed}")
    config = timm.get_pretrained_cfg(name)
    refuse_wrong_activation({"architecture": architecture, "pretrained_cfg": {"tag": config.tag}})
    return config


def refuse_wrong_activation(config_json: dict) -> None:
    """Raise UserError where a CLIP trained with QuickGELU would run with GELU: it loads, and its features are wrong.

    config_json: a timm folder's config.json; timm's registry notes of which weights this holds.
    """
    architecture = config_json["architecture"]
    name = f"{architecture}.{(config_json.get('pretrained_cfg') or {}).get('tag')}"
    notes = timm.get_pretrained_cfg(name).notes if name in timm.list_pretrained(f"{architecture}.*") else None
    if "QuickGELU" in " ".join(notes or ()) and "quickgelu" not in architecture:
        right = name.replace("_clip_", "_clip_quickgelu_")
        raise UserError(
            f"model.vision.name: {name} was trained with QuickGELU, but this architecture computes GELU; use {right}"
        )
