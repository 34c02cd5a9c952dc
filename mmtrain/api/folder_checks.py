"""What a Hugging Face folder that a stranger made may ask of transformers, before that reads its config.json.

Its files choose what is made and how large: of classes those that a door's folders have, of sizes what their weights
bear out. Nothing is loaded from elsewhere, and no memory is taken for what is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import shortened
from mmtrain.config.limits import MAX_GRIDS
from mmtrain.pretrained.encoders import FAMILIES
from mmtrain.pretrained.families import check_llm_numbers
from mmtrain.pretrained.model_files import Shape, is_whole, read_json
from mmtrain.pretrained.vision_files import hf_facts
from mmtrain.stock.stock_class import TIMM

if TYPE_CHECKING:
    from mmtrain.stock.stock_class import StockClass

CONNECTOR_BOUNDS = {
    **dict.fromkeys(("scale_factor", "downsample_factor", "projector_pooling_ratio"), (1, 64)),
    "downsample_ratio": (1 / 64, 1),
}  # keys of a class's config.json that say how many patches become one position
PROCESSOR_BOUNDS = {
    **dict.fromkeys(("patch_size", "downsample_factor", "pooling_ratio"), (1, 100)),
    **dict.fromkeys(("num_additional_image_tokens", "min_patches"), (0, 100)),
    **dict.fromkeys(("max_patches", "max_num_tiles"), (1, 100)),
    **dict.fromkeys(("image_seq_len", "image_seq_length"), (1, 100_000)),
    "num_image_tokens": (1, 20_000),
}
TILES_OF_FOLDERS = 1_000  # of a grid; a model that mmtrain does not train may have more than MAX_TILES
LARGEST_CANVAS = 1 << 26  # pixels, 0.8 GB in float32
ASPECT_RATIO = re.compile(r"anyres_max_[1-9][0-9]?")
SMALLEST_TILE = 16  # pixels; an image of the longest side is then cut into 65,536 of them
DEFAULT_TILE = 224  # pixels, of classes that cut into grids
LONGEST_SIDE = 4_096  # pixels of a picture for the encoder; the largest take 1,540
PARTS_OF_LLMS = {"attn_config", "ffn_config"}  # parts in a config of an LLM alone


def check_numbers(folder: Path, shapes: dict[str, Shape]) -> None:
    """Raise UserError for sizes in a folder's files that no model of these tensors has: they cost memory."""
    config = read_json(folder / "config.json")
    text, vision = config.get("text_config", config), hf_facts({"vision_config": {}} | config, str(folder))
    if not isinstance(text, dict):
        raise UserError(f"{folder}: text_config in config.json is no object; download the file again")
    for part in (config, text):
        check_llm_numbers(part)
    largest = max((side for shape in shapes.values() for side in shape), default=0)
    for part in (text, vision):
        if (part.get("num_hidden_layers") or 0) > len(shapes):
            layers = part["num_hidden_layers"]
            raise UserError(f"{folder}: config.json says {layers} layers, but has {len(shapes)} tensors")
        for key in ("hidden_size", "intermediate_size", "vocab_size"):
            width = part.get(key)
            if type(width) is int and width > largest:
                raise UserError(f"{folder}: config.json says {key} {width}, but no tensor is wider than {largest:,}")
    for key, (least, most) in CONNECTOR_BOUNDS.items():
        if (value := config.get(key)) is not None and not (type(value) in (int, float) and least <= value <= most):
            shown = shortened(repr(value))
            raise UserError(f"{folder}: config.json says {key} {shown}; needed is a number from {least} to {most:,}")
    side = vision.get("image_size")
    _check_grids(config, side if type(side) is int and side > 0 else 1, folder / "config.json")
    factor = max(config.get("scale_factor") or 1, config.get("downsample_factor") or 1)
    shuffled = (vision.get("hidden_size") or 1) * max(factor, 1 / (config.get("downsample_ratio") or 1)) ** 2
    if shuffled > largest:
        raise UserError(
            f"{folder}: config.json joins {shuffled:,.0f} features, but no tensor is wider than {largest:,}"
        )
    if (inner := config.get("alignment_intermediate_size")) is not None and not is_whole(inner, 2, largest):
        shown = shortened(repr(inner))
        raise UserError(f"{folder}: config.json says alignment_intermediate_size {shown}, which no tensor has")
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            for part in (content, content.get("image_processor")):
                _check_processor(part if isinstance(part, dict) else {}, folder / name)
            patches, own = content.get("patch_size"), vision.get("patch_size")
            if type(patches) is type(own) is int and patches < own:  # and so more tokens
                raise UserError(f"{folder / name}: patch_size is {patches}, and config.json says {own}")


def _check_grids(settings: dict, side: int, file: Path) -> None:
    """Of grids of tiles of so many pixels a side; raises UserError for more and larger ones than models have."""
    grids, ratio = settings.get("image_grid_pinpoints"), settings.get("vision_aspect_ratio")
    most = min(LARGEST_CANVAS, TILES_OF_FOLDERS * side**2)
    if grids is not None and not (
        isinstance(grids, list) and 0 < len(grids) <= MAX_GRIDS and all(map(_is_pair, grids))
    ):
        needed = f"needed are up to {MAX_GRIDS} pairs of height and width in pixels"
        raise UserError(f"{file}: image_grid_pinpoints is {shortened(repr(grids))}; {needed}")
    if too_large := [grid for grid in grids or () if grid[0] * grid[1] > most]:
        needed = f"needed are at most {most:,} pixels, {TILES_OF_FOLDERS:,} tiles"
        raise UserError(f"{file}: image_grid_pinpoints has {too_large[0]}; {needed}")
    if ratio is not None and not (isinstance(ratio, str) and ASPECT_RATIO.fullmatch(ratio)):
        needed = "needed is anyres_max_9 or another number up to 99"
        raise UserError(f"{file}: vision_aspect_ratio is {shortened(repr(ratio))}; {needed}")


def _is_pair(grid: Any) -> bool:
    return isinstance(grid, list) and len(grid) == 2 and all(is_whole(pixels, 1, LARGEST_CANVAS) for pixels in grid)


def _check_processor(settings: dict, file: Path) -> None:
    tile = []
    for key in ("size", "crop_size", "pad_size", "img_size", "tile_size", "max_image_size"):
        sides = settings.get(key)
        sides = list(sides.values()) if isinstance(sides, dict) else sides if isinstance(sides, list) else [sides]
        least = SMALLEST_TILE if key == "max_image_size" else 1
        if not all(side is None or is_whole(side, least, LONGEST_SIDE) for side in sides):
            needed = f"needed are pixels, at least {least} and at most {LONGEST_SIDE:,}"
            raise UserError(f"{file}: {key} is {shortened(repr(settings[key]))}; {needed}")
        tile += [side for side in sides if side is not None and key in ("size", "crop_size")]
    _check_grids(settings, min(tile, default=DEFAULT_TILE), file)
    for key, (least, most) in PROCESSOR_BOUNDS.items():
        value = settings.get(key)
        sides = value.values() if isinstance(value, dict) else [value]
        if not all(side is None or is_whole(side, least, most) for side in sides):
            raise UserError(f"{file}: {key} is {shortened(repr(value))}; needed is a whole number up to {most:,}")


def check_parts(stock: StockClass, config: dict[str, Any], folder: Path) -> None:
    """Raise UserError for parts in config.json that no folder of a stock class has.

    transformers makes whatever model_type says, and some types load their own parts from a hub id, or from any file.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from mmtrain.model.vision import check_wrapped_timm, model_class

    taken = [family for family in FAMILIES.values() if not stock.encoders or family.model in stock.encoders]
    encoders = {*stock.own_encoders, *(model_class(family).config_class.model_type for family in taken)}
    vision, text = (config.get(part, {}).get("model_type") for part in ("vision_config", "text_config"))
    if vision is not None and vision not in sorted(encoders):  # not in the set: it may be a list
        shown = f"vision_config of model_type {shortened(repr(vision))}; {stock.class_name} takes"
        raise UserError(f"{folder}: config.json has a {shown} {', '.join(sorted(encoders))}")
    causal = text is None or (text in list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) and text in transformers.CONFIG_MAPPING)
    if not causal or (text and transformers.CONFIG_MAPPING[text].sub_configs.keys() - PARTS_OF_LLMS):
        shown = f"text_config of model_type {shortened(repr(text))}"
        raise UserError(f"{folder}: config.json has a {shown}, which is no LLM alone; needed is one, as llama")
    if TIMM in stock.encoders:
        wrapped = config.get("vision_config") or {}
        if isinstance(arguments := wrapped.get("model_args"), dict):
            _check_processor(arguments, folder / "config.json")
        check_wrapped_timm(wrapped, folder)
