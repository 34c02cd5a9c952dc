"""Show what webdataset shards hold: counts, lengths, sizes, full packs; damage; one sample.

    (no option)     from the indexes: samples, images, what cannot be trained on and why, text
                    lengths and image sizes (as EXIF turns them). With a CONFIG also how full packs
                    become, and the data.expected_... keys for the planner
    --verify        read every byte, compare it with the checksums in the indexes, list every
                    damaged member
    --show KEY      a sample as the model will see it: turns, tokens, labels, positions of images
                    and their tiles

A run's configuration, CONFIG, says how samples become tokens, and shards without an index get one.
SHARDS alone must have their indexes. What is shown of them needs no tokenizer; lengths of texts are
those that all shards were indexed for.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, print_note, print_result, print_table
from mmtrain.base.progress import ProgressBar
from mmtrain.cli.index import shards_of
from mmtrain.config.load import load_config
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.samples.records import reason_lines
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.shards.detection import AUTO, sample_format
from mmtrain.data.shards.index import MAKE, index_path
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.shards.remote import Tar
from mmtrain.data.shards.verify import DamagedMember, verify_shard
from mmtrain.data.stream.order import Capacity
from mmtrain.inspection.reading import (
    WORDS_HELP,
    Reading,
    parse_words,
    reading_of,
)
from mmtrain.inspection.survey import Fill, Survey, epoch_fill, quantile, survey
from mmtrain.layouts.layout import ImageLayout
from mmtrain.stock.pretrained import expand_pretrained

if TYPE_CHECKING:
    from mmtrain.inspection.tokenized import Row, TokenizedSample

EXAMPLES = """\
  what is in shards that were indexed:
    mmtrain inspect data/llava558k
  as a run will read them; what to write into its data.expected_... keys:
    mmtrain inspect mine.yaml
    mmtrain inspect example:siglip_384_qwen25_7b model.llm.path=models/qwen data/llava558k
  which of these pack lengths wastes least:
    mmtrain inspect mine.yaml --pack-length 3008 3072 3136
  is every byte as it was when the shards were indexed?
    mmtrain inspect data/llava558k --verify
  one sample, token by token:
    mmtrain inspect mine.yaml --show 004539375
"""
EXITS = {
    0: "done; with --verify: every byte is as it was indexed",
    1: "--verify found damage; it is listed",
}


def run(options: Namespace) -> int:
    """Print the report that the options ask for and return the exit code; raises UserError."""
    stream = sys.stderr if options.json else sys.stdout
    config = None
    if options.config is not None:
        config = expand_pretrained(load_config(options.config, options.changes))
    tars = shards_of(config, options.shards)
    if options.verify:
        return _verify(tars, stream, options.json)
    reading = None
    fills = []  # how full packs of each length become
    if config is None:
        surveyed = survey(tars, form=sample_format(SampleFormat(AUTO), tars, "SHARDS"))
    else:
        reading = reading_of(config, tars)
        ensure_indexes(tars, reading, stream=stream)
        if options.show is not None:
            _show(tars, reading, options)
            return 0
        surveyed = survey(tars, reading.fingerprint, reading.layout, reading.form)
        assert surveyed.catalog is not None  # the shards are indexed for this configuration
        for length in options.pack_length or (reading.pack_length,):
            capacity = Capacity(length, reading.max_tiles_per_pack)
            fills.append(epoch_fill(surveyed.catalog.sample_sets[0], capacity))
    if options.json:
        print_result(json.dumps(_as_dict(surveyed, reading, fills)))
    else:
        _print_report(surveyed, reading, fills)
    return 0


def _tokens_per_image(layout: ImageLayout) -> int | None:
    """Return the tokens of every image; None where that depends on its size, or is not known."""
    if not layout.takes_images:
        return 0
    return None if layout.is_sized else layout.positions_per_tile or None


def _as_dict(surveyed: Survey, reading: Reading | None, fills: list[Fill]) -> dict[str, Any]:
    layout = reading and reading.layout
    by_images = sorted(Counter(surveyed.images.tolist()).items())
    return {
        "shards": surveyed.shards,
        "bytes": surveyed.bytes,
        "samples": len(surveyed.images),
        "images": int(surveyed.images.sum()),
        "samples_by_images": {str(images): samples for images, samples in by_images},
        "unusable": dict(surveyed.reasons.most_common()),
        "fingerprint": surveyed.fingerprint,
        "text_tokens": _distribution(surveyed.text_tokens),
        "image_width": _distribution(surveyed.image_sizes[:, 0]),
        "image_height": _distribution(surveyed.image_sizes[:, 1]),
        "image_longer_side": _distribution(surveyed.longer_sides),
        "layout": layout and layout.name,
        "tokens_per_image": layout and _tokens_per_image(layout),
        "image_tiles": _distribution(surveyed.taken[:, 1]),
        "image_positions": _distribution(surveyed.taken[:, 0]),
        "expected": surveyed.expected,
        "packing": list(map(asdict, fills)),
    }


def _distribution(values: np.ndarray | None) -> dict[str, Any] | None:
    if values is None or not len(values):
        return None
    shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        "count": len(values),
        "mean": float(values.mean()),
        **{name: quantile(values, share) for name, share in shares.items()},
    }


def _print_report(survey: Survey, reading: Reading | None, fills: list[Fill]) -> None:
    none = (survey.images == 0).sum()
    one = (survey.images == 1).sum()
    several = len(survey.images) - none - one
    print_result(
        f"{survey.shards:,} shards, {survey.bytes / 1e6:,.1f} MB",
        f"{len(survey.images):,} samples: {none:,} without images, {one:,} with one, "
        f"{several:,} with several",
        f"{survey.images.sum():,} images",
        f"samples that cannot be trained on: {survey.reasons.total():,}",
        *reason_lines(survey.reasons),
    )
    if survey.text_tokens is not None:
        _print_distribution("text tokens of a sample, without its images", survey.text_tokens)
    _print_distribution("longer side of an image, in pixels", survey.longer_sides)
    if reading is None:
        print_result("", "how full packs become depends on the models: name a CONFIG")
        return
    layout = reading.layout
    if layout.is_sized:
        if not layout.attends_across:  # where each tile is one position
            _print_distribution(f"tiles of an image ({layout.name})", survey.taken[:, 1])
        _print_distribution(f"positions of an image ({layout.name})", survey.taken[:, 0])
    image = "positions of images by their sizes" if layout.is_sized else "no images"
    if tokens := _tokens_per_image(layout):
        image = f"{tokens:,} tokens an image"
    print_result(
        "", f"how full packs become ({image}; overlong samples fit into no pack and are skipped)"
    )
    rows = [
        (f"{fill.pack_length:,}", f"{fill.packs:,}", f"{fill.fill:.2%}", f"{fill.overlong:,}")
        for fill in fills
    ]
    print_table((">pack_length", ">packs", ">full", ">overlong"), rows)
    if fills and fills[0].packs:
        packs = reading.packs_per_step
        step_mb = survey.bytes / fills[0].packs * packs / 1e6
        print_result("", f"a step of {packs:,} packs reads {step_mb:,.1f} MB of the shards")
    if survey.expected:
        print_result(
            "",
            "what a typical sample is, for the planner's estimates; in a run's configuration:",
            "  data:",
            *(
                f"    {key.removeprefix('data.')}: {value}"
                for key, value in survey.expected.items()
            ),
        )


def _print_distribution(title: str, values: np.ndarray) -> None:
    print_result("", title)
    if not len(values):
        print_result("  none")
        return
    print_result(
        f"  mean {values.mean():,.1f}, half at most {quantile(values, 0.5):,}, 95% at most "
        f"{quantile(values, 0.95):,}, 99% at most {quantile(values, 0.99):,}",
        f"  from {values.min():,} to {values.max():,}",
    )


def _verify(tars: Sequence[Tar], stream: TextIO, as_json: bool) -> int:
    without = [tar for tar in tars if not index_path(tar).is_file()]
    if without:
        raise UserError(
            f"--verify: {len(without):,} of {len(tars):,} shards have no index, and so no "
            f"checksums to compare with (the first is {without[0]}). "
            f"Indexing takes a shard as it is now: {MAKE} {without[0]}"
        )
    damages: list[DamagedMember] = []
    samples = compared = done = 0
    started = time.monotonic()

    def count(size: int) -> None:
        nonlocal samples, compared
        samples += 1
        compared += size
        show()

    def show() -> None:
        damaged = f", {len(damages):,} damaged" if damages else ""
        rate = compared / 1e6 / max(time.monotonic() - started, 1e-9)
        progress.show(done, samples, f"{rate:,.0f} MB/s{damaged}")

    with ProgressBar("shards", len(tars), stream) as progress:
        for tar in tars:
            damages += verify_shard(tar, count)
            done += 1
        show()
    counts = {"shards": len(tars), "samples": samples, "bytes": compared}
    if as_json:
        print_result(json.dumps({**counts, "damaged": [damage._asdict() for damage in damages]}))
    else:
        for damage in damages:
            where = "" if damage.offset is None else f" at byte {damage.offset:,}"
            what = "the whole" if damage.key is None else f"sample {escape(damage.key)}"
            print_result(f"damaged: {damage.shard}: {what}{where}: {escape(damage.detail)}")
        print_result(
            f"{len(tars):,} shards, {samples:,} samples, {compared:,} bytes compared: "
            f"{len(damages):,} damaged"
        )
    return 1 if damages else 0


def _show(tars: Sequence[Tar], reading: Reading, options: Namespace) -> None:
    from mmtrain.inspection.tokenized import tokenize_samples  # transformers, which takes seconds

    samples = tokenize_samples(tars, options.show, reading)
    if options.json:
        rows = [
            asdict(sample) | {"members": [member._asdict() for member in sample.members]}
            for sample in samples
        ]
        print_result(json.dumps({"samples": rows}))
        return
    for number, sample in enumerate(samples, 1):
        place = sample.shard
        if len(samples) > 1:
            place = f"{number} of {len(samples)} samples of this key: {place}"
        print_result(place)
        _print_sample(sample)


def _shown_text(row: Row) -> str:
    return row.text if row.token == IMAGE_POSITION else repr(row.text)


def _print_sample(sample: TokenizedSample) -> None:
    key = escape(sample.key)
    for member in sample.members:
        print_result(
            f"  {key}.{escape(member.suffix)}  {member.size:,} bytes at byte {member.offset:,}"
        )
    for speaker, text in sample.turns:
        print_result(f"  {speaker}: {escape(text)}")
    if sample.fault is not None:
        print_result(
            f"  cannot be trained on: {sample.fault.reason}: {escape(sample.fault.detail)}", ""
        )
        return
    table = []
    total = images = labels = 0
    for row, following in itertools.zip_longest(sample.rows, sample.rows[1:]):
        total += row.positions
        position = f"{row.first:,}"
        token = str(row.token)
        text = _shown_text(row)
        if row.positions > 1:
            position += f" - {row.first + row.positions - 1:,}"
        if row.token == IMAGE_POSITION:
            images += row.positions
            token = ""
            text = f"{row.positions} x {text}"
        label = predicted = ""
        if row.label != IGNORE:
            labels += 1
            label = str(row.label)
            predicted = "" if following is None else _shown_text(following)
        table.append((position, token, text, label, predicted))
    print_result("")
    print_table((">position", ">token", "text", ">label", "must predict"), table)
    print_result(
        f"  {total:,} tokens: {total - images:,} of text, {images:,} of images; "
        f"{labels:,} supervised",
        "",
    )


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser("inspect", __doc__, EXAMPLES, EXITS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--verify", action="store_true", help="compare every byte with the indexes' checksums"
    )
    what.add_argument(
        "--show", metavar="KEY", help="one sample as the model will see it; all that have this key"
    )
    parser.add_argument("words", nargs="+", metavar="SHARDS|CONFIG|key=value", help=WORDS_HELP)
    parser.add_argument(
        "--pack-length",
        type=positive(int),
        nargs="+",
        metavar="TOKENS",
        help="lengths of packs to compare, instead of CONFIG's data.pack_length",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_intermixed_args(arguments)
    options.config, options.changes, options.shards = parse_words(parser, options.words)
    if options.config is None:
        for name in ("show", "pack_length"):
            if getattr(options, name) is not None:
                option = name.replace("_", "-")
                parser.error(f"--{option} depends on the models. Name a CONFIG before the SHARDS")
        if options.changes:
            parser.error(f"{options.changes[0]}: changes a CONFIG. Name one before it")
    # with it stdout is one JSON value
    options.ending["logs"] = print_note if options.json else print_result
    return options
