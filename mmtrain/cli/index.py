"""Make or complete the indexes of webdataset shards: where each member lies, its checksum, each sample's text length.

Beside shard-000000.tar comes shard-000000.tar.index (in the user's cache where the folder cannot be written). The tars
themselves are only read. What is done for each:

    no index                         the tar is read once, each sample judged
    no lengths for this tokenizer    only files with texts are read; lengths for other tokenizers stay
    all there                        nothing
    stale (the tar has another size) or damaged: an error. An index's checksums are the only record of what the tar
    should be, so it is replaced with --rebuild only, which believes the tar as it is now.

Training makes missing indexes itself; making them before saves time on the training machine. Text lengths do not depend
on the layouts square, anyres and anyres_max_9. For tiles they depend on a tile's size and on --max-tiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.printing import print_result
from mmtrain.config.templates import template_name
from mmtrain.data.samples.records import reason_lines
from mmtrain.data.shards.detection import refuse_useless_shards
from mmtrain.data.shards.indexing import build_indexes, unready_shards
from mmtrain.data.shards.shard_list import find_shards
from mmtrain.demo.data import make_demo_shards
from mmtrain.inspection.reading import add_reading_arguments, parse_reading_arguments, reading_of, shard_names
from mmtrain.inspection.survey import survey
from mmtrain.runtime.gpus import usable_cores

EXAMPLES = """\
  other people's shards, for LLaVA's stage 1 with Vicuna:
    mmtrain index '/data/cc3m/shard-{000000..000331}.tar' --tokenizer lmsys/vicuna-7b-v1.5 \\
        --template plain
  as a run would read them, tiles of images and all:
    mmtrain index mine.yaml
  a folder of shards, for a chat model in a folder of its own, with 16 processes:
    mmtrain index /data/mix --tokenizer /models/Qwen2.5-7B-Instruct --template chat --workers 16
  after shards were replaced by others of the same name:
    mmtrain index /data/mix --tokenizer /models/Qwen2.5-7B-Instruct --template chat --rebuild
"""
EXITS = {
    0: "every shard has its index; samples that cannot be trained on are counted by reason",
    2: "wrong input, shards that cannot be indexed (the message lists them; all others are done), or not "
    "one sample that can be trained on",
    130: "stopped by Ctrl-C; no half index is left, and the same command continues",
}


def run(options: argparse.Namespace) -> None:
    """Index the shards and print what they hold; raises UserError."""
    names, programs = shard_names(options)
    make_demo_shards(names, "SHARDS")
    tars = find_shards(names, programs)
    reading = reading_of(options, tars)
    tokenizer, template, layout, form = reading.tokenizer, reading.template, reading.layout, reading.form
    fingerprint = reading.fingerprint
    assert tokenizer is not None and template is not None and fingerprint is not None  # an option or CONFIG says them
    todo: Sequence[Path] = tars if options.rebuild else unready_shards(tars, fingerprint)
    if len(todo) < len(tars):
        print_result(f"{len(tars) - len(todo):,} of {len(tars):,} shards are ready: left as they are")
    if todo:
        text = tokenizer, template, layout, form
        build_indexes(todo, *text, workers=options.workers, rebuild=options.rebuild, stream=sys.stdout)
    surveyed = survey(tars, fingerprint, layout, form)
    assert surveyed.text_tokens is not None  # a fingerprint was given
    longest = surveyed.text_tokens.max(initial=0)
    print_result(f"{len(tars):,} shards, {len(surveyed.images):,} samples, {surveyed.images.sum():,} images")
    print_result(f"longest text: {longest:,} tokens of {tokenizer}, {template_name(template)}, without those of images")
    print_result(f"samples that cannot be trained on: {surveyed.reasons.total():,}", *reason_lines(surveyed.reasons))
    refuse_useless_shards(tars, fingerprint, form, "SHARDS")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    interrupted = "stopped by Ctrl-C; finished indexes stay, the same command goes on"
    parser = command_parser("index", __doc__, EXAMPLES, EXITS, interrupted=interrupted, logs=print_result)
    add_reading_arguments(parser)
    cores = usable_cores()
    parser.add_argument(
        "--workers", type=positive(int), default=cores, metavar="N", help=f"processes, a shard at a time each ({cores})"
    )
    parser.add_argument("--rebuild", action="store_true", help="make every index anew, from the tars as they are now")
    options = parse_reading_arguments(parser, arguments)
    if options.config is None and options.tokenizer is None:
        parser.error("--tokenizer PATH and --template NAME are needed, or a CONFIG: lengths depend on both")
    return options
