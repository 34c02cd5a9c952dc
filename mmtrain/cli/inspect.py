"""Show what is in webdataset shards: counts, lengths, image sizes, how full packs become; damage; one sample in detail.

    (no option)       from the indexes: samples, images, what cannot be trained on and why, histograms of text lengths
                      and image sizes (as EXIF turns them), how full packs become, and the data.expected_... keys for
                      the planner; with tiles also their number and the positions that they take
    --verify          read every byte, compare it with the checksums in the indexes, list every damaged member
    --show KEY        a sample as the model will see it: turns, tokens, labels, positions of images and their tiles

A run's configuration, CONFIG, says how samples become tokens; without one --tokenizer, --template, --layout and others
do. Shards without an index get one, which needs a tokenizer and a template. Shards that were indexed for exactly one
tokenizer and template need neither, except for --show.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, print_note, print_result, print_table
from mmtrain.base.progress import ProgressBar
from mmtrain.data.samples.records import reason_lines
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.shards.index import MissingIndex, index_path
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.shards.shard_list import find_shards
from mmtrain.data.shards.verify import DamagedMember, verify_shard
from mmtrain.data.stream.order import Capacity
from mmtrain.demo.data import make_demo_shards
from mmtrain.inspection.reading import (
    Reading,
    add_reading_arguments,
    parse_reading_arguments,
    reading_of,
    shard_names,
)
from mmtrain.inspection.survey import Fill, Survey, epoch_fill, histogram, quantile, survey
from mmtrain.layouts.layout import ImageLayout

if TYPE_CHECKING:
    from mmtrain.inspection.tokenized import TokenizedSample

EXAMPLES = """\
  what is in shards that training has used, or that were made with --tokenizer:
    mmtrain inspect data/llava558k --vision vit_large_patch14_clip_quickgelu_336.openai
  other people's shards, for a chat model:
    mmtrain inspect '/data/mix/shard-{000000..000331}.tar' --tokenizer /models/Qwen2.5-7B-Instruct \\
        --template chat --vision /models/siglip
  as a run will read them; what to write into its data.expected_... keys:
    mmtrain inspect mine.yaml
    mmtrain inspect example:siglip_384_qwen25_7b model.llm.path=models/qwen data/llava558k
  which of these pack lengths wastes least, at 576 tokens an image:
    mmtrain inspect data/llava558k --tokens-per-image 576 --pack-length 3008 3072 3136
  is every byte as it was when the shards were indexed?
    mmtrain inspect data/llava558k --verify
  one sample, token by token:
    mmtrain inspect data/llava558k --show 004539375 --tokenizer models/vicuna-7b --template plain \\
        --tokens-per-image 576
"""
EXITS = {0: "done; with --verify: every byte is as it was indexed", 1: "--verify found damage; it is listed"}
PACK_LENGTHS = (2048, 4096, 8192)
EXIT_DAMAGED = 1
TERMINAL_BINS = 12
BAR_WIDTH = 40  # characters


def run(options: argparse.Namespace) -> int:
    """Print the report that the options ask for and return the exit code; raises UserError."""
    stream = sys.stderr if options.json else sys.stdout
    names, programs = shard_names(options)
    make_demo_shards(names, "SHARDS")
    tars = find_shards(names, programs)
    if options.verify:
        return _verify(tars, stream, options.json)
    reading = reading_of(options, tars)
    if reading.tokenizer is not None and reading.template is not None:
        ensure_indexes(tars, reading.tokenizer, reading.template, reading.layout, reading.form, stream=stream)
    if options.show is not None:
        _show(tars, reading, options)
        return 0
    try:
        surveyed = survey(tars, reading.fingerprint, reading.layout, reading.form)
    except MissingIndex as error:
        raise UserError(f"{error}; or give --tokenizer PATH and --template NAME here, or a CONFIG") from None
    fills, missing = _fills(surveyed, reading, options)
    if options.json:
        print_result(json.dumps(_as_dict(surveyed, reading, fills)))
    else:
        _print_report(surveyed, reading.layout, fills, missing)
    return 0


def _fills(surveyed: Survey, reading: Reading, options: argparse.Namespace) -> tuple[list[Fill], str]:
    """Return how full packs of each length become, or why that is not known."""
    missing = ""
    if surveyed.sample_set is None:
        missing = "the shards are not indexed for exactly one tokenizer: give --tokenizer PATH and --template NAME"
    elif surveyed.images.any():
        missing = reading.missing_positions
    if missing and options.pack_length is not None:
        raise UserError(f"--pack-length: {missing}")
    fills = []
    if surveyed.sample_set is not None and not missing:
        of_config = () if reading.pack_length is None else (reading.pack_length,)
        for length in options.pack_length or of_config or PACK_LENGTHS:
            fills.append(epoch_fill([surveyed.sample_set], Capacity(length, reading.max_tiles_per_pack)))
    return fills, missing


def _tokens_per_image(layout: ImageLayout) -> int | None:
    """Return the tokens of every image; None where that depends on its size, or is not known."""
    if not layout.takes_images:
        return 0
    return None if layout.is_sized else layout.positions_per_tile or None


def _as_dict(surveyed: Survey, reading: Reading, fills: list[Fill]) -> dict[str, Any]:
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
        "layout": reading.layout_name,
        "tokens_per_image": _tokens_per_image(reading.layout),
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
        "mean": float(values.mean()),
        **{name: quantile(values, share) for name, share in shares.items()},
        "histogram": dict(zip(("edges", "counts"), histogram(values, TERMINAL_BINS), strict=True)),
    }


def _print_report(survey: Survey, layout: ImageLayout, fills: list[Fill], missing: str) -> None:
    none, one = int((survey.images == 0).sum()), int((survey.images == 1).sum())
    several = len(survey.images) - none - one
    print_result(f"{survey.shards:,} shards, {survey.bytes / 1e6:,.1f} MB")
    print_result(f"{len(survey.images):,} samples: {none:,} without images, {one:,} with one, {several:,} with several")
    print_result(f"{survey.images.sum():,} images")
    print_result(f"samples that cannot be trained on: {survey.reasons.total():,}", *reason_lines(survey.reasons))
    if survey.text_tokens is not None:
        _print_distribution("text tokens of a sample, without its images", survey.text_tokens)
    _print_distribution("longer side of an image, in pixels", survey.longer_sides)
    if layout.is_sized:
        if not layout.attends_across:  # where each tile is one position
            _print_distribution(f"tiles of an image ({layout.name})", survey.taken[:, 1])
        _print_distribution(f"positions of an image ({layout.name})", survey.taken[:, 0])
    if missing:
        print_result("", f"how full packs become: {missing}")
        return
    image = "positions of images by their sizes" if layout.is_sized else "no images"
    if tokens := _tokens_per_image(layout):
        image = f"{tokens:,} tokens an image"
    print_result("", f"how full packs become ({image}; overlong samples fit into no pack and are skipped)")
    rows = [(f"{fill.pack_length:,}", f"{fill.packs:,}", f"{fill.fill:.2%}", f"{fill.overlong:,}") for fill in fills]
    print_table((">pack_length", ">packs", ">full", ">overlong"), rows)
    if survey.expected:
        print_result("", "what a typical sample is, for the planner's estimates; in a run's configuration:", "  data:")
        print_result(*(f"    {key.removeprefix('data.')}: {value}" for key, value in survey.expected.items()))


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
    edges, counts = histogram(values, TERMINAL_BINS)
    mark = "\N{FULL BLOCK}" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    rows = []
    for (first, after), count in zip(itertools.pairwise(edges), counts, strict=True):
        name = f"{first:,}" if after == first + 1 else f"{first:,} - {after - 1:,}"
        rows.append((name, f"{count:,}", mark * -(-count * BAR_WIDTH // max(counts))))
    print_table((">", ">", ""), rows)


def _verify(tars: Sequence[Path], stream: TextIO, as_json: bool) -> int:
    without = [tar for tar in tars if not index_path(tar).is_file()]
    if without:
        raise UserError(
            f"--verify: {len(without):,} of {len(tars):,} shards have no index, and so no checksums to compare with "
            f"(the first is {without[0]}). Indexing takes a shard as it is now: mmtrain index "
            f"{without[0].parent} --tokenizer PATH --template NAME"
        )
    damages: list[DamagedMember] = []
    samples = compared = done = 0
    started = time.monotonic()

    def count(size: int) -> None:
        nonlocal samples, compared
        samples, compared = samples + 1, compared + size
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
        return EXIT_DAMAGED if damages else 0
    for damage in damages:
        where = "" if damage.offset is None else f" at byte {damage.offset:,}"
        what = "the whole" if damage.key is None else f"sample {escape(damage.key)}"
        print_result(f"damaged: {damage.shard}: {what}{where}: {escape(damage.detail)}")
    print_result(f"{len(tars):,} shards, {samples:,} samples, {compared:,} bytes compared: {len(damages):,} damaged")
    return EXIT_DAMAGED if damages else 0


def _show(tars: Sequence[Path], reading: Reading, options: argparse.Namespace) -> None:
    from mmtrain.inspection.tokenized import tokenize_samples  # transformers, which takes seconds

    samples = tokenize_samples(tars, options.show, reading)
    if options.json:
        rows = [asdict(sample) | {"members": [member._asdict() for member in sample.members]} for sample in samples]
        print_result(json.dumps({"samples": rows}))
        return
    for number, sample in enumerate(samples, 1):
        print_result(
            f"{number} of {len(samples)} samples of this key: {sample.shard}" if len(samples) > 1 else sample.shard
        )
        _print_sample(sample)


def _print_sample(sample: TokenizedSample) -> None:
    key = escape(sample.key)
    for member in sample.members:
        print_result(f"  {key}.{escape(member.suffix)}  {member.size:,} bytes at byte {member.offset:,}")
    for speaker, text in sample.turns:
        print_result(f"  {speaker}: {escape(text)}")
    if sample.fault is not None:
        print_result(f"  cannot be trained on: {sample.fault.reason}: {escape(sample.fault.detail)}", "")
        return
    texts = [row.text if row.token == IMAGE_POSITION else repr(row.text) for row in sample.rows]
    table = []
    for row, text, after in zip(sample.rows, texts, [*texts[1:], ""], strict=True):
        last = row.first + row.positions - 1
        is_image = row.token == IMAGE_POSITION
        table.append(
            (
                f"{row.first:,}" if row.positions == 1 else f"{row.first:,} - {last:,}",
                "" if is_image else str(row.token),
                f"{row.positions} x {text}" if is_image else text,
                "" if row.label == IGNORE else str(row.label),
                "" if row.label == IGNORE else after,
            )
        )
    print_result("")
    print_table((">position", ">token", "text", ">label", "must predict"), table)
    images = sum(row.positions for row in sample.rows if row.token == IMAGE_POSITION)
    total = sum(row.positions for row in sample.rows)
    labels = sum(row.label != IGNORE for row in sample.rows)
    print_result(f"  {total:,} tokens: {total - images:,} of text, {images:,} of images; {labels:,} supervised", "")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("inspect", __doc__, EXAMPLES, EXITS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="compare every byte with the indexes' checksums")
    what.add_argument("--show", metavar="KEY", help="one sample as the model will see it; all that have this key")
    add_reading_arguments(parser)
    parser.add_argument(
        "--tokens-per-image",
        type=positive(int),
        metavar="N",
        help="instead of --vision: what an image takes of a pack; of one that is cut into tiles, each of them",
    )
    parser.add_argument(
        "--pack-length",
        type=positive(int),
        nargs="+",
        metavar="TOKENS",
        help=f"as data.pack_length, one or several ({' '.join(map(str, PACK_LENGTHS))}, or CONFIG's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parse_reading_arguments(parser, arguments)
    if options.show is not None and options.config is None and options.tokenizer is None:
        parser.error("--show needs --tokenizer PATH and --template NAME, or a CONFIG: tokens depend on them")
    options.ending["logs"] = print_note if options.json else print_result  # with it stdout is one JSON value
    return options
