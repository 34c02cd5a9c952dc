"""Show what is in webdataset shards: counts, lengths, image sizes, how full packs become; damage; one sample in detail.

    (without more)    what the indexes tell: samples, images, what cannot be trained on and why, histograms of text
                      lengths and image sizes (as EXIF turns them), and how full packs of some lengths become, with the
                      best length near each
    --verify          read every byte, compare it with the checksums in the indexes, list every damaged member
    --show KEY        a sample as the model will see it: turns, tokens, labels, image positions

Shards without an index get one if --tokenizer and --template are given, as training gives them one. Those that were
indexed for exactly one tokenizer and template need neither, except for --show.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np

from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.errors import UserError
from mmtrain.base.printing import harmless, note, print_table, tell
from mmtrain.base.progress import ProgressBar
from mmtrain.config.templates import FILE, NAMES, template_argument
from mmtrain.data.inspection.charts import TERMINAL_BINS, print_distribution, write_png
from mmtrain.data.inspection.survey import Fill, Survey, best_nearby, epoch_fill, histogram, quantile, survey
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.samples.records import reason_lines
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.shards.detection import add_format_arguments, format_of_arguments
from mmtrain.data.shards.index_file import MissingIndex, index_path
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.shards.shard_list import find_shards
from mmtrain.data.shards.verify import Damage, verify_shard
from mmtrain.data.stream.order import Capacity
from mmtrain.demo.data import make_demo_shards
from mmtrain.pretrained.layouts import TEXT_ALONE, ImageLayout, add_layout_arguments, layout_of_arguments
from mmtrain.pretrained.model_files import model_folder
from mmtrain.pretrained.shapes import vision_shape
from mmtrain.pretrained.tokenizer_files import text_fingerprint

if TYPE_CHECKING:
    from mmtrain.data.inspection.tokenized import TokenizedSample

EXAMPLES = """\
  what is in shards that training has used, or that were made with --tokenizer; 576 tokens an image:
    mmtrain inspect data/llava558k --vision vit_large_patch14_clip_quickgelu_336.openai
  other people's shards, for a chat model; charts as PNG:
    mmtrain inspect '/data/mix/shard-{000000..000331}.tar' --tokenizer /models/Qwen2.5-7B-Instruct \\
        --template chat --vision /models/siglip --plot mix.png
  which pack length wastes least, near two of them:
    mmtrain inspect data/llava558k --tokens-per-image 576 --pack-length 3072 6144
  is every byte as it was when the shards were indexed?
    mmtrain inspect data/llava558k --verify
  one sample, token by token:
    mmtrain inspect data/llava558k --show 004539375 --tokenizer models/vicuna-7b --template plain \\
        --tokens-per-image 576
"""
EXITS = {0: "done; with --verify: every byte is as it was indexed", 1: "--verify found damage; it is listed"}
PACK_LENGTHS = (2048, 4096, 8192)
SAMPLES_BETWEEN_REPORTS = 50
EXIT_DAMAGED = 1


class Report(NamedTuple):
    """What the indexes tell of all shards together."""

    survey: Survey
    tokens_per_image: int | None
    fills: list[tuple[Fill, Fill]]  # of each pack length, and of the best near it
    missing: str  # why there are no fills, and what would help; empty if there are

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        found = self.survey
        by_images = sorted(Counter(found.images.tolist()).items())
        return {
            "shards": len(found.shard_sizes),
            "bytes": found.bytes,
            "samples": len(found.images),
            "images": int(found.images.sum()),
            "samples_by_images": {str(images): samples for images, samples in by_images},
            "unusable": dict(found.reasons.most_common()),
            "fingerprint": found.fingerprint,
            "text_tokens": _distribution(found.text_tokens),
            "image_width": _distribution(found.image_sizes[:, 0]),
            "image_height": _distribution(found.image_sizes[:, 1]),
            "image_longer_side": _distribution(found.longer_sides),
            "tokens_per_image": self.tokens_per_image,
            "packing": [{**asdict(fill), "best": asdict(best)} for fill, best in self.fills],
        }


def run(options: argparse.Namespace) -> int:
    """Print what the options ask for and return the exit code; raises UserError."""
    stream = sys.stderr if options.json else sys.stdout
    make_demo_shards(options.shards, "SHARDS")
    tars = find_shards(options.shards)
    if options.verify:
        return _verify(tars, stream, options.json)
    fingerprint, form, layout = None, format_of_arguments(options, tars), layout_of_arguments(options)
    if options.tokenizer is not None:
        ensure_indexes(tars, options.tokenizer, options.template, layout, form, stream=stream)
        folder = model_folder(options.tokenizer)
        fingerprint = text_fingerprint(folder, options.template, layout.texts, form.wording)
    tokens_per_image = 0 if options.layout in TEXT_ALONE else options.tokens_per_image
    if options.vision is not None:
        tokens_per_image = vision_shape(options.vision, -1).patches_per_image
    if options.show is not None:
        _show(tars, tokens_per_image, options, layout, form)
        return 0
    try:
        found = survey(tars, fingerprint, layout, form)
    except MissingIndex as error:
        raise UserError(f"{error}; or give --tokenizer PATH and --template NAME here") from None
    report = _report(found, tokens_per_image, options)
    if options.json:
        tell(json.dumps(report.as_dict()))
    else:
        _print_report(report)
    if options.plot is not None:
        write_png(_charts(found), options.plot)
        (note if options.json else tell)(f"wrote {options.plot}")
    return 0


def _report(found: Survey, tokens_per_image: int | None, options: argparse.Namespace) -> Report:
    missing = ""
    if found.text_lengths is None:
        missing = "the shards are not indexed for exactly one tokenizer: give --tokenizer PATH and --template NAME"
    elif tokens_per_image is None and found.images.any():
        missing = "how many tokens an image takes is not known: give --vision NAME or --tokens-per-image N"
    if missing and options.pack_length is not None:
        raise UserError(f"--pack-length: {missing}")
    fills = []
    if not missing:
        sets = [found.sample_set(tokens_per_image or 0)]
        for length in options.pack_length or PACK_LENGTHS:
            capacity = Capacity(length, options.max_tiles_per_pack)
            fills.append((epoch_fill(sets, capacity), best_nearby(sets, capacity)))
    return Report(found, tokens_per_image, fills, missing)


def _distribution(values: np.ndarray | None) -> dict[str, Any] | None:
    if values is None or not len(values):
        return None
    shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        "mean": float(values.mean()),
        **{name: quantile(values, share) for name, share in shares.items()},
        "histogram": dict(zip(("edges", "counts"), histogram(values, TERMINAL_BINS), strict=True)),
    }


def _charts(found: Survey) -> dict[str, np.ndarray]:
    charts = {} if found.text_tokens is None else {"text tokens of a sample, without its images": found.text_tokens}
    return {**charts, "longer side of an image, in pixels": found.longer_sides}


def _print_report(report: Report) -> None:
    found = report.survey
    none, one = int((found.images == 0).sum()), int((found.images == 1).sum())
    several = len(found.images) - none - one
    tell(f"{len(found.shard_sizes):,} shards, {found.bytes / 1e6:,.1f} MB")
    tell(f"{len(found.images):,} samples: {none:,} without images, {one:,} with one, {several:,} with several")
    tell(f"{found.images.sum():,} images")
    tell(f"samples that cannot be trained on: {found.reasons.total():,}", *reason_lines(found.reasons))
    for title, values in _charts(found).items():
        print_distribution(title, values)
    if report.missing:
        tell("", f"how full packs become: {report.missing}")
        return
    image = "no images" if not report.tokens_per_image else f"{report.tokens_per_image:,} tokens an image"
    tell("", f"how full packs become ({image}; overlong samples fit into no pack and are skipped)")
    rows = []
    for fill, best in report.fills:
        of_best = f"{best.pack_length:,}", f"{best.fill:.2%}"
        rows.append((f"{fill.pack_length:,}", f"{fill.packs:,}", f"{fill.fill:.2%}", f"{fill.overlong:,}", *of_best))
    print_table((">pack_length", ">packs", ">full", ">overlong", ">best near it", ">full"), rows)


def _verify(tars: Sequence[Path], stream: TextIO, as_json: bool) -> int:
    without = [tar for tar in tars if not index_path(tar).is_file()]
    if without:
        raise UserError(
            f"--verify: {len(without):,} of {len(tars):,} shards have no index, and so no checksums to compare with "
            f"(the first is {without[0]}). Indexing takes a shard as it is now: mmtrain index "
            f"{without[0].parent} --tokenizer PATH --template NAME"
        )
    damages: list[Damage] = []
    samples = compared = done = 0
    started = time.monotonic()

    def count(size: int) -> None:
        nonlocal samples, compared
        samples, compared = samples + 1, compared + size
        if samples % SAMPLES_BETWEEN_REPORTS == 0:
            progress.show(done, samples, rate())

    def rate() -> str:
        found = f", {len(damages):,} damaged" if damages else ""
        return f"{compared / 1e6 / max(time.monotonic() - started, 1e-9):,.0f} MB/s{found}"

    with ProgressBar("shards", len(tars), stream) as progress:
        for tar in tars:
            damages += verify_shard(tar, count)
            done += 1
        progress.show(done, samples, rate())
    counts = {"shards": len(tars), "samples": samples, "bytes": compared}
    if as_json:
        tell(json.dumps({**counts, "damaged": [damage._asdict() for damage in damages]}))
        return EXIT_DAMAGED if damages else 0
    for damage in damages:
        where = "" if damage.offset is None else f" at byte {damage.offset:,}"
        what = "the whole" if damage.key is None else f"sample {harmless(damage.key)}"
        tell(f"damaged: {damage.shard}: {what}{where}: {harmless(damage.detail)}")
    tell(f"{len(tars):,} shards, {samples:,} samples, {compared:,} bytes compared: {len(damages):,} damaged")
    return EXIT_DAMAGED if damages else 0


def _show(
    tars: Sequence[Path],
    tokens_per_image: int | None,
    options: argparse.Namespace,
    layout: ImageLayout,
    form: SampleFormat,
) -> None:
    from mmtrain.data.inspection.tokenized import tokenize_samples  # transformers, which takes seconds

    samples = tokenize_samples(tars, options.show, options.tokenizer, options.template, tokens_per_image, layout, form)
    if options.json:
        found = [asdict(sample) | {"members": [member._asdict() for member in sample.members]} for sample in samples]
        tell(json.dumps({"samples": found}))
        return
    for number, sample in enumerate(samples, 1):
        tell(f"{number} of {len(samples)} samples of this key: {sample.shard}" if len(samples) > 1 else sample.shard)
        _print_sample(sample)


def _print_sample(sample: TokenizedSample) -> None:
    key = harmless(sample.key)
    for member in sample.members:
        tell(f"  {key}.{harmless(member.suffix)}  {member.size:,} bytes at byte {member.offset:,}")
    for speaker, text in sample.turns:
        tell(f"  {speaker}: {harmless(text)}")
    if sample.fault is not None:
        tell(f"  cannot be trained on: {sample.fault.reason}: {harmless(sample.fault.detail)}", "")
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
    tell("")
    print_table((">position", ">token", "text", ">label", "must predict"), table)
    images = sum(row.positions for row in sample.rows if row.token == IMAGE_POSITION)
    total = sum(row.positions for row in sample.rows)
    labels = sum(row.label != IGNORE for row in sample.rows)
    tell(f"  {total:,} tokens: {total - images:,} of text, {images:,} of images; {labels:,} supervised", "")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; `--help` teaches by example."""
    parser = command_parser("inspect", __doc__, EXAMPLES, EXITS)
    parser.add_argument(
        "shards", nargs="+", metavar="SHARDS", help="tars: paths, folders, globs (*, ?), brace ranges ({00..99})"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="compare every byte with the indexes' checksums")
    what.add_argument("--show", metavar="KEY", help="one sample as the model will see it; all that have this key")
    what.add_argument("--plot", type=Path, metavar="FILE", help="write the histograms as a PNG too")
    parser.add_argument("--tokenizer", metavar="PATH", help="a model's folder, a cached hub id, or demo:llm")
    parser.add_argument(
        "--template", type=template_argument, metavar="NAME", help=f"as data.template: {', '.join(NAMES)}, or {FILE}"
    )
    add_format_arguments(parser)
    add_layout_arguments(parser)
    per_image = parser.add_mutually_exclusive_group()
    per_image.add_argument(
        "--vision",
        metavar="NAME",
        help="the vision encoder, as model.vision.name, where each of its patches is a token",
    )
    per_image.add_argument(
        "--tokens-per-image", type=positive(int), metavar="N", help="instead: what an image takes of a pack"
    )
    parser.add_argument(
        "--pack-length",
        type=positive(int),
        nargs="+",
        metavar="TOKENS",
        help=f"as data.pack_length, one or several ({' '.join(map(str, PACK_LENGTHS))})",
    )
    parser.add_argument("--max-tiles-per-pack", type=positive(int), metavar="N", help="as the key in data (none)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    if (options.tokenizer is None) != (options.template is None):
        parser.error("--tokenizer and --template go together: lengths depend on both")
    if options.show is not None and options.tokenizer is None:
        parser.error("--show needs --tokenizer PATH and --template NAME: tokens depend on both")
    if options.layout in TEXT_ALONE and (options.vision or options.tokens_per_image or options.max_tiles_per_pack):
        parser.error("--images: a run without encoder has no --vision, --tokens-per-image or --max-tiles-per-pack")
    if options.plot is not None and options.plot.suffix.lower() != ".png":
        parser.error(f"--plot {options.plot}: charts are written as PNG; name a file that ends in .png")
    options.ending["logs"] = note if options.json else tell  # with it stdout is one JSON value
    return options
