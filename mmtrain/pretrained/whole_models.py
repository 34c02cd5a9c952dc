"""`model.from`: a whole multimodal model's folder, completed into the keys that everything below sees.

config.json, the processor's files --one function a class--> model.vision.{select_layer, final_norm, layout, max_tiles,
                                                             pinpoints}, model.projector.{type, factor, width},
                                                             data.image_fit

It is the inverse of what an export writes (exporting/doors.py). What these keys cannot say is refused by name: the
stock class would compute, or its processor make, something else than mmtrain trains.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import shortened
from mmtrain.config.limits import MAX_GRID_SIDE, MAX_GRIDS, MAX_TILES
from mmtrain.config.schema import RunConfig
from mmtrain.pretrained.connectors import NEWLINE, refuse_other_settings
from mmtrain.pretrained.doors import DOORS, Door, stock_door
from mmtrain.pretrained.layouts import (
    ANYRES,
    ANYRES_MAX_9,
    OVERVIEW_NAME,
    SQUARE,
    TILE_NAME,
    TILES,
    WITH_NEWLINES,
    default_pinpoints,
)
from mmtrain.pretrained.model_files import is_whole, model_folder, read_json, tensor_shapes
from mmtrain.pretrained.shapes import VisionShape, llm_shape, vision_shape
from mmtrain.pretrained.vision_files import image_settings, preprocessing

_log = logging.getLogger(__name__)
Keys = dict[str, Any]
PARTS = ("model.llm.path", "model.vision.name", "model.projector.init_from")
BY_PARTS = f"give the model by its parts instead, in {', '.join(PARTS)}"
_CONNECTOR = re.compile(r"(?:model\.)?(?:multi_modal_projector|connector\.modality_projection)\.")
_AROUND = {"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"}  # AyaVisionProcessor's own
_BEFORE_TILES = {"tile_token": TILE_NAME, "tile_global_token": OVERVIEW_NAME}
_GRIDS_SIDE = {ANYRES: 336, ANYRES_MAX_9: 384}  # pixels of a tile of the classes' own pinpoints


def completed(config: RunConfig) -> RunConfig:
    """The configuration with what `model.from` stands for in its place; itself where that is not set.

    Raises UserError for a folder that is no model of a class that mmtrain exports, for what of it mmtrain would compute
    otherwise, and for a key that was given by hand and contradicts the folder.
    """
    path = getattr(config.model, "from")
    if path is None:
        return config
    if not path:
        raise UserError("model.from: is empty; give a model's folder, or null where its parts are given")
    folder = model_folder(path)
    said = read_json(folder / "config.json")
    door = next((door for door in DOORS if said.get("model_type") in list(door.model_types)), None)
    if door is None:
        known = ", ".join(name for door in DOORS for name in door.model_types)
        raise UserError(f"model.from: {path} has model_type {_shown(said.get('model_type'))}; needed is one of {known}")
    try:
        whole = _Whole(path, folder, said, door)
        keys = {**dict.fromkeys(PARTS, path), **whole.keys()}
        if config.model.init_from is not None:
            keys["model.projector.init_from"] = config.model.init_from  # which began with this one, or goes on from it
        if contradicted := next((key for key in keys if _contradicts(config, key, keys[key])), None):
            given = _shown(config.value_at(tuple(contradicted.split("."))))
            raise UserError(
                f"{contradicted} is {given} in this configuration and {_shown(keys[contradicted])} in that folder; "
                f"leave it out, or {BY_PARTS}"
            )
        stored = said.get("dtype", said.get("torch_dtype"))
        if "dtype" not in config.model.llm.model_fields_set:
            if stored == "float32":
                keys["model.llm.dtype"] = stored
            elif stored == "float16":
                _log.info(f"model.from: {path}: its float16 is rounded to bfloat16; model.llm.dtype=float32 keeps it")
        config = config.changed({**keys, "model.from": None})
        stock_door(config)
    except UserError as error:
        raise UserError(f"model.from: {path}: {error}") from None
    return config


@dataclass(frozen=True)
class _Whole:
    """A folder of one of the classes; each method raises UserError for what mmtrain does not compute as it says."""

    path: str
    folder: Path
    said: dict[str, Any]  # config.json
    door: Door

    def keys(self) -> Keys:
        """What the folder says of the keys of `model.vision` and `model.projector`, and of data.image_fit."""
        llm = llm_shape(self.path)
        refuse_other_settings(self.said, "config.json")
        names = tensor_shapes(self.folder) or {}
        if not any(_CONNECTOR.match(name) for name in names):
            raise UserError(f"its weights hold no connector ({_CONNECTOR.pattern}); download the folder again")
        self._check_pixels()
        keys: Keys = {"final_norm": self.door.final_norm, "layout": self.door.layouts[0], "factor": None, "width": None}
        keys |= {"select_layer": -1, "type": self.door.connectors[0], "image_fit": "resize"}
        keys |= {"max_tiles": None, "pinpoints": None, **_READERS[self.door.name](self)}
        if keys["layout"] in WITH_NEWLINES and not any(name in names for name in (NEWLINE, f"model.{NEWLINE}")):
            raise UserError(f"its weights hold no {NEWLINE}, which ends lines; download the folder again")
        if keys["width"] == llm.hidden_size:
            keys["width"] = None
        section = dict.fromkeys(("type", "factor", "width"), "model.projector") | {"image_fit": "data"}
        return {f"{section.get(key, 'model.vision')}.{key}": value for key, value in keys.items()}

    @cached_property
    def vision(self) -> VisionShape:
        """Its encoder with all blocks."""
        return vision_shape(self.path, -1)

    @cached_property
    def images(self) -> dict[str, Any]:
        """What is said of how its images are made."""
        preprocessing(self.folder)  # which has an error for its absence
        return image_settings(self.folder)[1] or {}

    @cached_property
    def processor(self) -> dict[str, Any]:
        """What processor_config.json says."""
        file = self.folder / "processor_config.json"
        return read_json(file) if file.is_file() else {}

    def _check_pixels(self) -> None:
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if self.images.get(key, True) is not True:
                raise UserError(f"its image processor has {key} {_shown(self.images[key])}, and mmtrain does so")
        factor = self.images.get("rescale_factor", 1 / 255)
        if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-4:
            raise UserError(f"its image processor has rescale_factor {_shown(factor)}; needed is 1/255")

    def one_tile(self, key: str, value: Any, is_one: bool) -> None:
        """Refuse a processor that cuts images into tiles."""
        if not is_one:
            raise UserError(
                f"its image processor cuts an image into tiles ({key} {_shown(value)}), and mmtrain trains on one "
                f"square: change that in the folder if one is meant, or {BY_PARTS}"
            )

    def no_texts(self, texts: dict[str, Any], layout: str) -> None:
        """Refuse a processor that writes texts around images which a layout of mmtrain does not have."""
        if written := {key: text for key, text in texts.items() if text}:
            key, text = next(iter(written.items()))
            raise UserError(
                f"its processor writes {_shown(text)} ({key}) beside an image, and the layout {layout} does "
                f"not; set that to an empty text in the folder if none is meant, or {BY_PARTS}"
            )

    def square(self, key: str, sides: Any) -> None:
        """Refuse pictures of another size than the encoder's."""
        found = list(sides.values()) if isinstance(sides, dict) else [sides]
        if not found or any(side != self.vision.image_size for side in found):
            raise UserError(
                f"its image processor has {key} {_shown(sides)}, and the encoder takes {self.vision.image_size} pixels "
                "a side; correct the one that is wrong"
            )

    def grids(self, layout: str) -> Keys:
        """The keys of a layout of grids, of the processors of LlavaNext and LlavaOnevision."""
        self.fit()
        own = default_pinpoints(layout, _GRIDS_SIDE[layout])
        said, made = (part.get("image_grid_pinpoints") for part in (self.said, self.images))
        said, made = (own if given is None else given for given in (said, made))
        side = self.vision.image_size
        if not _are_grids(said, side):
            raise UserError(
                f"config.json says image_grid_pinpoints {_shown(said)}; needed are up to {MAX_GRIDS} pairs of height "
                f"and width, multiples of {side}, the side of its encoder's square in pixels"
            )
        if [list(pair) for pair in said] != _lists(made):
            raise UserError(
                f"its image processor has image_grid_pinpoints {_shown(made)} and config.json {_shown(said)}; correct "
                "the one that is wrong"
            )
        return {"pinpoints": tuple((height, width) for height, width in said), "image_fit": None}

    def factor(self, key: str, value: Any) -> int | None:
        """`model.projector.factor`; None for 1, which a second connector of the class has."""
        known = [factor for factor in self.door.factors if factor > 1 or len(self.door.connectors) > 1]
        if type(value) is not int or value not in known:
            listed = ", ".join(map(str, known))
            raise UserError(f"config.json says {key} {_shown(self.said.get(key))}; factors that work are {listed}")
        return None if value == 1 else value

    def width(self) -> int | None:
        """`model.projector.width` of AyaVision."""
        inner, widest = self.said.get("alignment_intermediate_size"), 1_000_000
        if inner is not None and not is_whole(inner, 2, widest):
            raise UserError(f"config.json says alignment_intermediate_size {_shown(inner)}, which no connector has")
        return inner

    def layer(self, default: int, strategy: str) -> int:
        """`model.vision.select_layer`, of hidden states that are counted from 0, the embeddings."""
        layer, depth = self.said.get("vision_feature_layer", default), self.vision.blocks_run
        if not is_whole(layer, -depth, depth) or layer == 0:
            raise UserError(
                f"config.json says vision_feature_layer {_shown(layer)}; mmtrain takes the output of one block, 1 to "
                f"{depth} or -{depth} to -1"
            )
        told = self.said.get("vision_feature_select_strategy", strategy)
        if told != (needed := "default" if self.vision.prefix_tokens else "full"):
            wrong = "a class token would be a patch" if self.vision.prefix_tokens else "a patch would be dropped"
            raise UserError(f"config.json says vision_feature_select_strategy {_shown(told)}, not {needed}: {wrong}")
        return layer if layer < 0 else layer - depth - 1

    def fit(self) -> str:
        """`data.image_fit`, of the processors of CLIP, SigLIP and Llava."""
        size, crops = self.images.get("size"), self.images.get("do_center_crop", "crop_size" in self.images)
        if crops:
            self.square("crop_size", self.images.get("crop_size"))
        is_edge = not isinstance(size, dict) or "shortest_edge" in size
        self.square("size", size)
        if self.images.get("do_pad"):
            return "pad"
        if is_edge and not crops:
            raise UserError(
                f"its image processor has size {_shown(size)} and no do_center_crop: images are not squares"
            )
        return "center_crop" if is_edge else "resize"


def _llava(whole: _Whole) -> Keys:
    return {"select_layer": whole.layer(-2, "default"), "image_fit": whole.fit()}


def _next(whole: _Whole) -> Keys:
    return {"select_layer": whole.layer(-2, "default"), **whole.grids(ANYRES)}


def _onevision(whole: _Whole) -> Keys:
    for said in (whole.said, whole.processor):
        if (ratio := said.get("vision_aspect_ratio", ANYRES_MAX_9)) != ANYRES_MAX_9:
            raise UserError(
                f"its files say vision_aspect_ratio {_shown(ratio)}, and the positions of an image that mmtrain takes "
                f"are those of {ANYRES_MAX_9}: set that in the folder if it is meant, or {BY_PARTS}"
            )
    return {"select_layer": whole.layer(-1, "full"), **whole.grids(ANYRES_MAX_9)}


def _aya(whole: _Whole) -> Keys:
    most, fewest = (whole.images.get(key, default) for key, default in (("max_patches", 12), ("min_patches", 1)))
    around, before = (
        {key: whole.processor.get(key, text) for key, text in texts.items()} for texts in (_AROUND, _BEFORE_TILES)
    )
    fit, cut = whole.fit(), before == _BEFORE_TILES
    keys: Keys = {"layout": TILES, "max_tiles": most, "image_fit": None} if cut else {"image_fit": fit}
    if not cut:
        whole.one_tile("max_patches", most, most == 1)
    elif fit != "resize" or fewest != 1 or not is_whole(most, 1, MAX_TILES):
        raise UserError(
            f"its image processor has max_patches {_shown(most)}, min_patches {_shown(fewest)} and pictures made by "
            f"{fit}; needed are up to {MAX_TILES} tiles, at least 1, resized"
        )
    whole.no_texts(around if cut else {**around, **before}, TILES if cut else SQUARE)
    return keys | {
        "select_layer": whole.layer(-1, "full"),
        "factor": whole.factor("downsample_factor", whole.said.get("downsample_factor", 2)),
        "width": whole.width(),
    }


def _idefics3(whole: _Whole) -> Keys:
    whole.square("max_image_size", whole.images.get("max_image_size"))
    if whole.images.get("do_image_splitting", True):
        _log.info(
            f"model.from: {whole.path}: its processor cuts images into tiles (do_image_splitting); mmtrain trains on "
            f"one square of {whole.vision.image_size} pixels, and exports a processor that makes one"
        )
    return {"factor": whole.factor("scale_factor", whole.said.get("scale_factor", 2))}


def _internvl(whole: _Whole) -> Keys:
    most = whole.images.get("max_patches", 12)
    whole.one_tile("max_patches", most, most == 1)
    tokenizer = whole.folder / "tokenizer_config.json"
    named = read_json(tokenizer) if tokenizer.is_file() else {}
    more = named.get("extra_special_tokens")
    named |= more if isinstance(more, dict) else {}
    whole.no_texts({key: named.get(key) for key in ("start_image_token", "end_image_token")}, SQUARE)
    ratio = whole.said.get("downsample_ratio", 0.5)
    is_fraction = isinstance(ratio, float) and ratio > 0 and (1 / ratio).is_integer()
    layer = whole.layer(-1, "default")
    is_last = whole.said.get("vision_feature_layer", -1) == -1
    has_norm = len(vision_shape(whole.path, -1, True).parameters) > len(whole.vision.parameters)
    return {
        "select_layer": layer,
        "final_norm": is_last and has_norm,  # its class takes -1 for what the encoder returns
        "factor": whole.factor("downsample_ratio", int(1 / ratio) if is_fraction else ratio),
        "image_fit": whole.fit(),
    }


def _perception(whole: _Whole) -> Keys:
    tiles = whole.images.get("vision_input_type", "thumb+tile")
    whole.one_tile("vision_input_type", tiles, tiles != "thumb+tile")
    whole.square("tile_size", whole.images.get("tile_size", 448))
    if (told := whole.said.get("vision_use_cls_token", True)) is not bool(whole.vision.prefix_tokens):
        raise UserError(f"config.json says vision_use_cls_token {_shown(told)}, and its encoder is another")
    factor = whole.factor("projector_pooling_ratio", whole.said.get("projector_pooling_ratio", 1))
    return {"factor": factor, "type": "mlp2x_gelu" if factor is None else "mlp2x_gelu_pool"}


_READERS: dict[str, Callable[[_Whole], Keys]] = {
    "Llava": _llava,
    "LlavaNext": _next,
    "LlavaOnevision": _onevision,
    "AyaVision": _aya,
    "Idefics3": _idefics3,
    "InternVL": _internvl,
    "PerceptionLM": _perception,
}  # by Door.name


def _contradicts(config: RunConfig, key: str, value: Any) -> bool:
    """Whether a configuration gives a key, and another value."""
    *above, name = key.split(".")
    section = config.value_at(tuple(above))
    return name in section.model_fields_set and getattr(section, name) != value


def _are_grids(value: Any, side: int) -> bool:
    """Whether a value is a list of pairs of multiples of so many pixels."""
    return (
        isinstance(value, list | tuple)
        and 0 < len(value) <= MAX_GRIDS
        and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
        and all(is_whole(pixels, side, MAX_GRID_SIDE) and pixels % side == 0 for pair in value for pixels in pair)
    )


def _lists(value: Any) -> Any:
    """The same, where it is a list or a tuple of such, as lists of lists."""
    return [list(one) if isinstance(one, tuple) else one for one in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    return "null" if value is None else shortened(repr(value))
