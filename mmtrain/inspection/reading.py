"""Options of commands that read shards as a run would, one by one or by a run's configuration.

options of `add_reading_arguments` --reading_of-->
    Reading: tokenizer, template, format, layout of images, pack length
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.base.arguments import positive
from mmtrain.base.errors import UserError
from mmtrain.config.limits import MAX_TILES
from mmtrain.config.load import KEY_AND_VALUE, example_name, load_config, refuse_repeated_keys
from mmtrain.config.templates import FILE, NAMES, template_argument
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.shards.detection import add_format_arguments, sample_format
from mmtrain.facts.connectors import image_layout
from mmtrain.facts.model_files import model_folder
from mmtrain.facts.shapes import vision_shape
from mmtrain.facts.tokenizer_files import text_fingerprint
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.registry import LAYOUTS, TEXT_ALONE
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import DEFAULT_MAX_TILES
from mmtrain.stock.pretrained import expand_pretrained

LONGEST_TILE = 4_096  # pixels a side of --tile-size; the largest encoders take 1,540
# A configuration says what these do.
_OF_MODEL = ("tokenizer", "template", "format", "caption_key", "caption_prompt")
_OF_LAYOUT = ("layout", "max_tiles", "vision", "tile_size", "tokens_per_image")


@dataclass(frozen=True)
class Reading:
    """The way from the samples of shards to tokens."""

    tokenizer: str | None  # a model's folder or name; None: not known
    template: str | None
    form: SampleFormat
    layout: ImageLayout  # with 0 positions a tile where these are not known
    # as asked for; `layout` is a square where the numbers of another are not known
    layout_name: str
    # options that would give the positions of an image; empty where they are known
    missing_positions: str = ""
    pack_length: int | None = None  # of a configuration
    max_tiles_per_pack: int | None = None

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the text lengths in indexes; None without tokenizer."""
        if self.tokenizer is None or self.template is None:
            return None
        return text_fingerprint(
            model_folder(self.tokenizer),
            self.template,
            self.layout.texts,
            self.form.wording,
        )


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, which `parse_reading_arguments` checks and `reading_of` reads."""
    parser.add_argument(
        "shards",
        nargs="+",
        metavar="SHARDS|CONFIG",
        help="tars: paths, folders, globs (*, ?), brace ranges ({00..99}); "
        "or a run's configuration, FILE.yaml or "
        "example:NAME, which names shards and replaces all options below but --pack-length; "
        "key=value changes it, and "
        "shards beside it are read as it says",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a model's folder, a cached hub id, or demo:llm",
    )
    parser.add_argument(
        "--template",
        type=template_argument,
        metavar="NAME",
        help=f"how conversations become tokens, as data.template: {', '.join(NAMES)}, or {FILE}",
    )
    add_format_arguments(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--layout",
        default="square",
        choices=list(LAYOUTS),
        help="as model.vision.layout (square)",
    )
    group.add_argument(
        "--images",
        dest="layout",
        default=argparse.SUPPRESS,
        choices=list(TEXT_ALONE),
        help="for a run without encoder, as data.images: "
        "quarantine samples with images, or train on their text",
    )
    parser.add_argument(
        "--max-tiles",
        type=positive(int, MAX_TILES),
        metavar="N",
        help=f"as model.vision.max_tiles, for --layout tiles ({DEFAULT_MAX_TILES})",
    )
    parser.add_argument(
        "--vision",
        metavar="NAME",
        help="the vision encoder, as model.vision.name; "
        "it sets the size and the image tokens of a tile",
    )
    parser.add_argument(
        "--tile-size",
        type=positive(int, LONGEST_TILE),
        metavar="PIXELS",
        help="side of the encoder's square, instead of --vision",
    )
    parser.set_defaults(tokens_per_image=None)  # an option of commands that ask for it


def parse_reading_arguments(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
) -> argparse.Namespace:
    """Parse a command line in any order.

    Exits, as argparse does, for options that do not fit together.

    `options.config` is the configuration among the words, if any, `options.changes` are the words
    key=value beside it, and `options.shards` the others.
    """
    options = parser.parse_intermixed_args(arguments)
    words = options.shards
    options.changes = []
    configs = (word for word in words if example_name(word) or word.endswith((".yaml", ".yml")))
    options.config = next(configs, None)
    if options.config is not None:
        options.changes = list(filter(KEY_AND_VALUE.match, words))
        options.shards = [word for word in words if word not in (options.config, *options.changes)]
        refuse_repeated_keys(parser, options.changes)

    def flags(names: Sequence[str]) -> str:
        changed = [name for name in names if getattr(options, name) != parser.get_default(name)]
        return ", ".join(f"--{name.replace('_', '-')}" for name in changed)

    if options.config is not None and (extra := flags(_OF_MODEL + _OF_LAYOUT)):
        parser.error(
            f"{extra}: {options.config} sets it. "
            f"Leave it out, or change a key: {options.config} key=value"
        )
    if (options.tokenizer is None) != (options.template is None):
        parser.error("--tokenizer and --template go together: lengths depend on both")
    if options.layout in TEXT_ALONE and (extra := flags(_OF_LAYOUT[1:])):
        parser.error(
            f"{extra}: --images {options.layout} means a run without encoder. Leave it out"
        )
    if options.max_tiles is not None and "max_tiles" not in _layout_class(options).keys:
        parser.error(f"--max-tiles is for --layout tiles, not for {options.layout}. Leave it out")
    if options.vision is not None and (extra := flags(("tile_size", "tokens_per_image"))):
        parser.error(f"{extra}: --vision {options.vision} sets it. Give only one of the two")
    return options


def shard_names(options: argparse.Namespace) -> tuple[list[str], Sequence[str]]:
    """Return the shards of the command line or, if none, of the configuration.

    With them comes its `data.allow_pipe`.

    Raises UserError.
    """
    if options.config is None:
        return options.shards, ()
    data = load_config(options.config, options.changes).data
    if options.shards:
        return options.shards, data.allow_pipe
    names = []
    for one in data.sets or (data,):
        names += [one.shards] if isinstance(one.shards, str) else one.shards
    return names, data.allow_pipe


def reading_of(options: argparse.Namespace, tars: Sequence[Path]) -> Reading:
    """Return how to read these shards, from checked options; raises UserError."""
    if options.config is None:
        form = sample_format(
            options.format,
            options.caption_key,
            options.caption_prompt,
            tars,
            "SHARDS",
        )
        layout = _layout(options)
        missing = ""
        if layout.takes_images and not layout.positions_per_tile:
            missing = _missing_positions(options)
        return Reading(options.tokenizer, options.template, form, layout, options.layout, missing)

    config = expand_pretrained(load_config(options.config, options.changes))
    data = config.data
    form = sample_format(data.format, data.caption_key, data.caption_prompt, tars, "SHARDS")
    layout = image_layout(config)
    packs = (data.pack_length, data.max_tiles_per_pack)
    return Reading(config.model.llm.path, data.template, form, layout, layout.name, "", *packs)


def _missing_positions(options: argparse.Namespace) -> str:
    """Return which options would give the positions of an image, as these do not."""
    if _layout_class(options).attends_across:
        return f"those of --layout {options.layout} depend on the connector. Give a CONFIG"
    if options.vision is not None:
        return (
            f"connectors of --layout {options.layout} join several patches into one token. "
            "Give a CONFIG"
        )
    numbers = "--tokens-per-image N"
    if _layout_class(options).has_newlines:
        numbers = "both --tile-size PIXELS and --tokens-per-image N (of a tile)"
    return f"the image tokens per image are unknown. Give --vision NAME, {numbers}, or a CONFIG"


def _layout_class(options: argparse.Namespace) -> type[ImageLayout]:
    return (LAYOUTS | TEXT_ALONE)[options.layout]


def _layout(options: argparse.Namespace) -> ImageLayout:
    layout = _layout_class(options)
    side = options.tile_size or 0
    positions = options.tokens_per_image or 0
    if options.vision is not None:
        shape = vision_shape(options.vision, -1)
        side = shape.image_size
        positions = 0 if layout.joins_patches else shape.patches_per_image
    square = math.isqrt(positions) ** 2
    if layout.has_newlines and square != positions:
        raise UserError(
            f"--tokens-per-image {positions}: --layout {layout.name} needs a square number of "
            f"image tokens per tile, for example {square}"
        )
    if layout.attends_across or (layout.has_newlines and not (side and positions)):
        return Square(0)  # which has the same texts
    if layout.is_sized and not side:
        raise UserError(
            f"--layout {layout.name} writes a name before each tile, and the number of tiles "
            "depends on their size. Give --vision NAME or --tile-size PIXELS"
        )
    if options.max_tiles is None:
        return layout(positions, side)
    return layout(positions, side, max_tiles=options.max_tiles)
