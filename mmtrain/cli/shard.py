"""Turn data as you have it into webdataset shards, which training reads in order from any disk.

Input, with the images that it names, if any does, relative to one folder:
    .json .jsonl    LLaVA's records, an array, an object around them, or a line each (--json: these
                    alone):
                    {"id": "004539375", "image": "00453/004539375.jpg",
                     "conversations": [{"from": "human", "value": "<image>\\nDescribe it."},
                                       {"from": "gpt", "value": "A red door."}]}
                    "image" may be a list, or absent;
                    ShareGPT's: {"messages" or "conversations": [{"role": "user", "content": "..."},
                    ...], "images": [...]};
                    FineVision's: {"texts": [{"user": "...", "assistant": "..."}], "images": [...]};
                    {"question" or "prompt": "...", "answer", "answers" or "completion": ...,
                    "image": ...};
                    Alpaca's {"instruction": "...", "input": "...", "output": "..."};
                    {"query": "...", "response": "..."}; both with "history": [["...", "..."], ...];
                    OBELICS's: {"images": ["a.jpg", null], "texts": [null, "..."]}, in the order of
                    a page;
                    captions: {"image": "a.jpg", "caption": "A red door."}; COCO's captions
    .csv .tsv       captions, the first line names the columns
    .parquet, a folder of them, or of datasets' save_to_disk
                    any of these; images as bytes, or names of files
                    (pip install 'mmtrain[datasets]')

Output, in the folder that --out names:
    shard-000000.tar ...   per sample KEY.json (the record, in LLaVA's form) and KEY.jpg, or
                           KEY.0.jpg, KEY.1.jpg with several images, byte for byte as they were;
                           KEY is the id where it can name a file
    shard-000000.tar.index where each file lies in the tar, its checksum, the images' sizes; with a
                           CONFIG also each sample's length in tokens, which else the first run adds
    rejected.jsonl         {"file", "record", "id", "reason", "detail"} of each record left out;
                           `record` counts from 0
    dataset.json           counts, options, checksums of input and shards. Written last: a folder
                           without it is unfinished, and --resume continues it by unfinished.jsonl

Every image is decoded once, so that no damaged one stops a training run. The same input and options
give the same bytes for any number of workers and interruptions. For that, a shard's records are
chosen before their images are read: one with a bad image leaves its shard that much smaller, and
keeps its id.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import math
import os
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.base.arguments import command_parser, positive, share
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.printing import print_info
from mmtrain.base.progress import ProgressBar
from mmtrain.config.limits import MAX_IMAGE_PIXELS
from mmtrain.config.load import DEMO, load_config
from mmtrain.config.templates import template_name
from mmtrain.data.prepare.sharding import ShardMaker
from mmtrain.data.prepare.sources import ImageReader, Source, open_sources
from mmtrain.data.prepare.validate import (
    ShardStats,
    UnfinishedRun,
    Validator,
    is_finished,
    refuse_used_folder,
    unfinished_run,
)
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.samples.records import reason_lines
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.pool import worker_pool
from mmtrain.data.shards.shard_list import matching_files
from mmtrain.facts.models import models_of
from mmtrain.inspection.reading import parse_words
from mmtrain.runtime.gpus import usable_cores
from mmtrain.stock.pretrained import expand_pretrained

if TYPE_CHECKING:
    from mmtrain.data.samples.templates import TextCounter

EXAMPLES = """\
  LLaVA's 558K pairs for stage 1 (its images.zip unpacked into LLaVA-Pretrain/images):
    mmtrain shard --json LLaVA-Pretrain/blip_laion_cc_sbu_558k.json \\
        --images LLaVA-Pretrain/images --out data/llava558k
  captions in a table (columns image_path and caption, or other ones), or COCO's:
    mmtrain shard --from captions.csv --images photos --out data/captions --image-key file \\
        data.caption_key=title 'data.caption_prompt=What do you see?'
    mmtrain shard --from annotations/captions_train2017.json --images train2017 --out data/coco
  ShareGPT's messages, as LLaMA-Factory and ms-swift read them:
    mmtrain shard --from chats.jsonl --images images --out data/chats
  a data set of Hugging Face's datasets, its images inside; parquet files:
    mmtrain shard --from saved/train --out data/mine
    mmtrain shard --from 'data/train-*.parquet' --out data/mine data.caption_key=text
  tars of at most 1 GB, at most 1 record in 1,000 lost (1.0: never stop, list all that is wrong):
    mmtrain shard --json part1.json part2.jsonl --images images --out data/mix \\
        --shard-bytes 1GB --max-reject-rate 0.001
  a mixture that repeats ids over different conversations, text lengths for a run's LLM:
    mmtrain shard example:llava15_7b_lora --json llava_v1_5_mix665k.json --images images \\
        --out data/mix665k --duplicate-ids keep
  after Ctrl-C, a full disk or a crash: the same command, and --resume
  then train on it:
    mmtrain train CONFIG 'data.shards=data/llava558k/shard-*.tar'
"""
CONFIG_HELP = (
    "a run's configuration, FILE.yaml or example:NAME: texts are counted for its LLM and template; "
    "key=value sets how records are read: data.format, data.caption_key, data.caption_prompt"
)
EXITS = {
    0: "every record is in a shard or in rejected.jsonl",
    2: "wrong input, a full disk, or more rejected records than --max-reject-rate; "
    "the message says which",
    130: "stopped by Ctrl-C; no half shard is left, --resume continues",
}
# options that decide the bytes of shards
SHAPING = ("image_key", "samples_per_shard", "shard_bytes", "duplicate_ids", "max_pixels")
UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def run(options: Namespace) -> None:
    """Write shards, their indexes, rejected.jsonl and dataset.json into options.out; raises
    UserError.
    """
    images = options.images and options.images.resolve()
    if images is not None and not images.is_dir():
        raise UserError(f"--images {options.images}: no such folder")
    out = options.out
    if out.resolve() == images:
        raise UserError(
            f"--out {options.out}: is the folder of the images; "
            "name another, which holds the shards alone"
        )
    refuse_used_folder(out, options.resume)
    # All of them before anything is written: a broken last file shows at once.
    sources = []
    config = load_config(options.config or DEMO, options.changes)
    data = config.data
    name = data.format if options.json is None else "llava"
    form = SampleFormat(name, data.caption_key, data.caption_prompt)
    count = None
    if options.config is not None:
        config = expand_pretrained(config)
        from mmtrain.data.samples.templates import TextCounter  # imports torch

        count = TextCounter(
            Tokenization(config.model.llm.path, config.data.template, models_of(config).layout)
        )
    option = "--from" if options.json is None else "--json"
    named = []
    for path in options.paths:
        if path.exists():
            named.append(path)
        else:
            named += matching_files(str(path), option)
    for path in named:
        opened, description = open_sources(path, form, options.image_key)
        print_info(f"{path}: {description}: {sum(source.records for source in opened):,} records")
        sources += opened
    files = [source.path.resolve() for source in sources]
    if twice := [file for file, count in Counter(files).items() if count > 1]:
        raise UserError(f"{twice[0]}: named twice; every record would come twice")
    run = {
        "options": {
            **{name: getattr(options, name) for name in SHAPING},
            "data.format": form.name,
            "data.caption_key": form.caption_key,
            "data.caption_prompt": form.caption_prompt,
            "data.template": count and template_name(config.data.template),
            "text_fingerprint": count and count.how.fingerprint,
        },
        "inputs": list(map(_describe, sources)),
    }
    if is_finished(out, run):
        print_info(f"{out}: finished already")
        return
    total = sum(source.records for source in sources)
    # 0.29 x 100 is 28.999999999999996: without the addition the 29th of 29% would stop the run.
    allowed = math.floor(options.max_reject_rate * total + 1e-6)
    validator = Validator(
        sources,
        images,
        options.samples_per_shard,
        options.shard_bytes,
        options.duplicate_ids == "keep",
        allowed,
    )
    rejected_file = out / "rejected.jsonl"
    with unfinished_run(out, run, options.resume) as unfinished:
        rejected_file.unlink(missing_ok=True)  # it is made again, from the first record on
        with JsonLines(rejected_file) as rejected:
            stats = ShardStats(validator, rejected, total)
            try:
                _write_all(stats, options, unfinished, count)
                if not stats.samples:
                    raise UserError("no record became a sample")
                stats.write_summary(out, run)
            except (UserError, OSError) as error:
                raise _unfinished(error, stats, unfinished, rejected_file) from error
    print_info(
        f"{out}: {len(stats.shards):,} shards, {stats.samples:,} samples, {stats.images:,} images"
    )
    see = f", see {rejected_file}" if stats.reasons else ""
    print_info(f"rejected: {stats.reasons.total():,}{see}", *reason_lines(stats.reasons))
    print_info(
        "next: mmtrain train CONFIG "
        f"{shlex.quote(f'data.shards={glob.escape(str(out))}/shard-*.tar')}"
    )


def _write_all(
    stats: ShardStats,
    options: Namespace,
    unfinished: UnfinishedRun,
    count: TextCounter | None,
) -> None:
    earlier = unfinished.finished
    if earlier:
        print_info(f"{options.out}: {len(earlier):,} shards are there already")
    done_earlier = sum(shard.candidates for shard in earlier.values())

    def tick(through: int) -> None:
        done = min(done_earlier + through, stats.total - 1)
        progress.show(done, through, f"{stats.reasons.total():,} rejected")

    maker = ShardMaker(
        stats.validator.images,
        ImageReader(stats.validator.sources),
        options.out,
        options.max_pixels,
        count,
        earlier,
    )
    with (
        worker_pool(maker, options.workers) as run,
        ProgressBar("records", stats.total, sys.stdout) as progress,
    ):
        for job, finished in run(iter(stats.validator), tick):
            stats.add(job, finished)
            unfinished.add(job.number, finished)
        made = stats.samples - sum(shard.shard.samples for shard in earlier.values())
        progress.show(stats.total, made, f"{stats.reasons.total():,} rejected")


def _unfinished(
    error: UserError | OSError, stats: ShardStats, unfinished: UnfinishedRun, rejected_file: Path
) -> UserError:
    """Add to an error what is left in the folder and how to resume."""
    if isinstance(error, OSError):
        error = UserError(
            f"{error.filename or unfinished.out}: cannot be written ({error.strerror}). Free space"
        )
    listed = f"; {rejected_file} lists what was left out" if stats.reasons else ""
    if stats.samples or unfinished.finished:
        return UserError(
            f"{error}{listed}. {unfinished.out} is unfinished: go on with --resume, or delete it"
        )
    unfinished.discard()  # another try needs no cleaning up
    return UserError(f"{error}{listed}")


def _describe(source: Source) -> dict:
    with source.path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {
        "file": source.name,
        "records": source.records,
        "sha256": digest,
        "format": source.adapter.form.name,
    }


def parse_size(text: str) -> int:
    """Return the bytes of a size: 500MB, 1GiB, 2.5e9, ..."""
    number = text.rstrip("MGiB")
    with contextlib.suppress(KeyError, ValueError, OverflowError):
        if (size := int(float(number) * UNITS[text[len(number) :]])) >= 10**6:
            return size
    raise ArgumentTypeError(f"{text!r} is no size of at least 1MB: 500MB, 1GiB, 2e9, ...")


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser("shard", __doc__, EXAMPLES, EXITS)
    # The shell leaves --out=~/data as it is. Not by pathlib, which raises for a user who is not
    # here.
    path = lambda text: Path(os.path.expanduser(text))  # noqa: E731, PTH111
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source(
        "--from",
        type=path,
        nargs="+",
        dest="paths",
        metavar="PATH",
        help="files or folders, as above",
    )
    source("--json", type=path, nargs="+", metavar="FILE", help="LLaVA JSON or JSONL files")
    add("words", nargs="*", metavar="CONFIG|key=value", help=CONFIG_HELP)
    add(
        "--image-key",
        metavar="KEY",
        help="key or column of images (images, image, image_path, ...)",
    )
    add(
        "--images",
        type=path,
        metavar="DIR",
        help="folder that image names start from; none for text alone",
    )
    add(
        "--out",
        type=path,
        required=True,
        metavar="DIR",
        help="folder for the shards, without any yet",
    )
    size = parser.add_mutually_exclusive_group().add_argument
    size(
        "--samples-per-shard",
        type=positive(int),
        metavar="N",
        help="records with valid text in a tar (1000)",
    )
    size(
        "--shard-bytes",
        type=parse_size,
        metavar="SIZE",
        help="instead: a tar's largest size (500MB, 1GiB, ...)",
    )
    add(
        "--workers",
        type=positive(int),
        default=usable_cores(),
        metavar="N",
        help="processes (%(default)s)",
    )
    add(
        "--max-reject-rate",
        type=share,
        default=0.05,
        metavar="R",
        help="stop at more bad records, as a share (0.05)",
    )
    add(
        "--duplicate-ids",
        choices=("reject", "keep"),
        default="reject",
        help="keep: keys get -2, -3, ... (reject)",
    )
    add(
        "--max-pixels",
        type=positive(int, MAX_IMAGE_PIXELS),
        default=MAX_IMAGE_PIXELS,
        metavar="N",
        help="reject larger images (%(default)s)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on where a run with the same options and images was interrupted",
    )
    options = parser.parse_intermixed_args(arguments)
    # Words behind the paths of --from are among these.
    words = [*options.words, *map(str, options.json or options.paths)]
    options.config, options.changes, paths = parse_words(parser, words)
    options.paths = list(map(path, paths))
    has_keys = options.image_key is not None or (options.changes and options.config is None)
    if options.json is not None and has_keys:
        parser.error("--json: reads LLaVA's own records; use --from with other keys")
    if options.shard_bytes is None and options.samples_per_shard is None:
        options.samples_per_shard = 1000
    if options.out == Path():
        parser.error("--out: an empty name, or this folder; name a folder for the shards alone")
    options.ending = {
        "unnamed": options.out,
        "interrupted": f"stopped by Ctrl-C; {options.out} is unfinished: "
        "go on with --resume, or delete it",
    }
    return options
