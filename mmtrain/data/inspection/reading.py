"""How a command is to read shards, as a run would: what its options say, or a run's configuration.

options of `add_reading_arguments` --reading_of--> Reading: tokenizer, template, format, layout of images, pack length
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmtrain.base.arguments import positive
from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.config.templates import FILE, NAMES, template_argument
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.shards.detection import add_format_arguments, format_of_arguments, sample_format
from mmtrain.pretrained.connectors import image_layout
from mmtrain.pretrained.layouts import (
    DEFAULT_MAX_TILES,
    ONE_SQUARE,
    SIZED,
    SQUARE,
    TEXT_ALONE,
    TILES,
    WITH_NEWLINES,
    WRAPPERS,
    ImageLayout,
    default_pinpoints,
)
from mmtrain.pretrained.model_files import model_folder
from mmtrain.pretrained.shapes import vision_shape
from mmtrain.pretrained.tokenizer_files import text_fingerprint
from mmtrain.pretrained.whole_models import completed

# A configuration says what these do.
_OF_MODEL = ("tokenizer", "template", "format", "caption_key", "caption_prompt")
_OF_LAYOUT = ("layout", "max_tiles", "vision", "tile_size", "tokens_per_image")


@dataclass(frozen=True)
class Reading:
    """What tells how the samples of shards become tokens."""

    tokenizer: str | None  # a model's folder or name; None: not said
    template: str | None
    form: SampleFormat
    layout: ImageLayout  # with 0 positions a tile where these are not said
    pack_length: int | None = None  # as a configuration says it
    max_tiles_per_pack: int | None = None

    @property
    def fingerprint(self) -> str | None:
        """Of the text lengths that it asks for; None without tokenizer."""
        if self.tokenizer is None or self.template is None:
            return None
        return text_fingerprint(model_folder(self.tokenizer), self.template, self.layout.texts, self.form.wording)

    @property
    def missing_positions(self) -> str:
        """What would tell how many positions an image takes; empty where that is known."""
        if self.layout.positions_per_tile or not self.layout.takes_images:
            return ""
        return "how many tokens an image takes is not known: give --vision NAME, --tokens-per-image N or --config FILE"


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a command that reads shards; `check_reading_arguments` judges them, `reading_of` reads them."""
    parser.add_argument(
        "--config",
        nargs="+",
        metavar=("FILE", "KEY=VALUE"),
        help="a run's configuration, with changes to it, which says all of the following: its model, template, format, "
        "layout of images and connector",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a model's folder, a cached hub id, or demo:llm")
    parser.add_argument(
        "--template",
        type=template_argument,
        metavar="NAME",
        help=f"as data.template, how conversations become tokens: {', '.join(NAMES)}, or {FILE}",
    )
    add_format_arguments(parser)
    group = parser.add_mutually_exclusive_group()
    shown = [name for name in WRAPPERS if name not in TEXT_ALONE]
    group.add_argument("--layout", default=SQUARE, choices=shown, help=f"as model.vision.layout ({SQUARE})")
    group.add_argument(
        "--images",
        dest="layout",
        default=argparse.SUPPRESS,
        choices=TEXT_ALONE,
        help="for a run without encoder, as data.images: samples that have some cannot be trained on, or on their text",
    )
    parser.add_argument(
        "--max-tiles",
        type=positive(int),
        metavar="N",
        help=f"as model.vision.max_tiles, of --layout {TILES} ({DEFAULT_MAX_TILES})",
    )
    parser.add_argument(
        "--vision",
        metavar="NAME",
        help="the vision encoder, as model.vision.name: how large a tile is, and, where each of its patches is a "
        "token, how many tokens it takes",
    )
    parser.add_argument(
        "--tile-size", type=positive(int), metavar="PIXELS", help="instead: a side of the encoder's square"
    )
    parser.set_defaults(tokens_per_image=None)  # an option of commands that ask for it


def check_reading_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command, as argparse does, for options that do not fit together."""

    def given(names: Sequence[str]) -> str:
        return ", ".join(_flag(name) for name in names if getattr(options, name) != parser.get_default(name))

    if options.config is not None and (said := given(_OF_MODEL + _OF_LAYOUT)):
        parser.error(f"{said}: --config says it; leave it out, or change a key: --config FILE KEY=VALUE")
    if (options.tokenizer is None) != (options.template is None):
        parser.error("--tokenizer and --template go together: lengths depend on both")
    if options.layout in TEXT_ALONE and (said := given(_OF_LAYOUT[1:])):
        parser.error(f"{said}: --images {options.layout} is of a run without encoder; leave it out")
    if options.max_tiles is not None and options.layout != TILES:
        parser.error(f"--max-tiles is a number of --layout {TILES}, not of {options.layout}; leave it out")
    if options.vision is not None and (said := given(("tile_size", "tokens_per_image"))):
        parser.error(f"{said}: --vision {options.vision} says it; give one of the two")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def reading_of(options: argparse.Namespace, tars: Sequence[Path]) -> Reading:
    """What checked options say of these shards.

    Raises UserError for a layout whose texts depend on a size that is not given, and what `load_config`, `image_layout`
    and `sample_format` raise.
    """
    if options.config is None:
        return Reading(options.tokenizer, options.template, format_of_arguments(options, tars), _layout(options))
    file, *changes = options.config
    config = completed(load_config(file, changes))
    data = config.data
    form = sample_format(data.format, data.caption_key, data.caption_prompt, tars, "SHARDS")
    layout = image_layout(config)
    return Reading(config.model.llm.path, data.template, form, layout, data.pack_length, data.max_tiles_per_pack)


def _layout(options: argparse.Namespace) -> ImageLayout:
    name, side, positions = options.layout, options.tile_size or 0, options.tokens_per_image or 0
    if options.vision is not None:
        shape = vision_shape(options.vision, -1)
        side, positions = shape.image_size, shape.patches_per_image
    if name == TILES and not side:
        raise UserError(
            f"--layout {name} writes a name before each tile, and how many an image has depends on their size: give "
            "--vision NAME or --tile-size PIXELS"
        )
    if name in WITH_NEWLINES and math.isqrt(positions) ** 2 != positions:
        raise UserError(
            f"--tokens-per-image {positions}: the positions of a tile are a square of them with --layout {name}, "
            f"for example {math.isqrt(positions) ** 2}"
        )
    if name in WITH_NEWLINES and not (side and positions):
        return replace(ONE_SQUARE, positions_per_tile=0)  # which has the same texts
    chosen = ImageLayout(name, positions, side, options.max_tiles or DEFAULT_MAX_TILES)
    return replace(chosen, pinpoints=default_pinpoints(name, side)) if name in SIZED else chosen
