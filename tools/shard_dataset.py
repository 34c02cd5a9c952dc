"""Turn LLaVA JSON and a folder of images into webdataset shards, which training reads in order from any disk.

Input: JSON arrays or JSON lines of records, and the images that they name, relative to one folder:
    {"id": "004539375", "image": "00453/004539375.jpg",        "image" may be a list, or absent
     "conversations": [{"from": "human", "value": "<image>\\nDescribe it."}, {"from": "gpt", "value": "A red door."}]}

Output, in the folder that --out names:
    shard-000000.tar ...   per sample KEY.json (the record) and KEY.jpg, or KEY.0.jpg, KEY.1.jpg with several images;
                           image files byte for byte as they were. KEY is the id where that can name a file.
    rejected.jsonl         one line for each record left out: {"file", "record", "id", "reason", "detail"}; `record`
                           counts from 0
    dataset.json           counts: records, samples, images, rejected by reason, and those of each shard. Written
                           last: a folder without it is unfinished.

Every image is decoded once, so that no damaged one stops a training run. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TextIO

from mmtrain.data.records import REASONS, Rejected, parse_record, read_image, read_llava_json
from mmtrain.data.sharding import UNFINISHED, KeyedSample, WrittenShard, sample_key, write_shards
from mmtrain.errors import UserError
from mmtrain.metrics import JsonLines, say

EXAMPLES = f"""\
examples:
  LLaVA's 558K pairs for stage 1 (its images.zip unpacked into LLaVA-Pretrain/images):
    python tools/shard_dataset.py --json LLaVA-Pretrain/blip_laion_cc_sbu_558k.json --images LLaVA-Pretrain/images \\
        --out data/llava558k
  several files, larger shards, no more than 1 record in 1,000 lost:
    python tools/shard_dataset.py --json part1.json part2.jsonl --images images --out data/mix \\
        --samples-per-shard 5000 --max-reject-rate 0.001
  see everything that is wrong with a data set, instead of stopping at 5%:
    python tools/shard_dataset.py --json mix.json --images images --out data/try --max-reject-rate 1
  then train on it:
    python -m mmtrain.launch CONFIG 'data.shards=data/llava558k/shard-*.tar'

reasons in rejected.jsonl:
{chr(10).join(f"  {code:18} {words}" for code, words in REASONS.items())}

exit codes:
  0    every record is in a shard or in rejected.jsonl
  2    wrong input, a full disk, or more rejected records than --max-reject-rate; the message says which
  130  stopped by Ctrl-C; no half shard is left
"""
SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Records done of `total`: a live bar on a terminal, otherwise a line every 5 seconds and one at the end."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self.stream = stream
        self.total = total
        self.started = self.printed = time.monotonic()
        self.bar = _open_bar(stream, total) if stream.isatty() else None

    def show(self, samples: int, rejected: int) -> None:
        """`samples` were written or are about to be, `rejected` were not."""
        done, now = samples + rejected, time.monotonic()
        rate = f"{samples / max(now - self.started, 1e-9):,.0f} samples/s"
        if self.bar is not None:
            self.bar.update(0, completed=done, rate=rate, rejected=f"{rejected:,} rejected")
        elif now - self.printed >= SECONDS_BETWEEN_LINES or done == self.total:
            self.printed = now
            say(f"{done:,} of {self.total:,} records  {rate}  {rejected:,} rejected")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _open_bar(stream: TextIO, total: int) -> Any:
    """rich is imported here because only terminals need it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("records"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[rejected]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
    bar.add_task("records", total=total, rate="", rejected="")
    bar.start()
    return bar


class Intake:
    """The samples of good records, in the files' order; bad ones are written down and counted.

    Raises UserError once more than `max_reject_rate` of all records are bad.
    """

    def __init__(
        self, files: dict[Path, int], images: Path, rejected: JsonLines, max_reject_rate: float, progress: Progress
    ) -> None:
        """`files`: each with its number of records; `images`: their folder, absolute and without links."""
        self.files = files
        self.images = images
        self.rejected = rejected
        # 0.29 x 100 is 28.999999999999996: without the addition the 29th of 29% would stop the run.
        self.allowed = math.floor(max_reject_rate * sum(files.values()) + 1e-6)
        self.progress = progress
        self.reasons: Counter[str] = Counter()
        self.keys: dict[str, int] = {}  # of samples -> the record's number, counted over all files

    def __iter__(self) -> Iterator[KeyedSample]:
        before = 0
        for file, records in self.files.items():
            for number, value in enumerate(read_llava_json(file)):
                try:
                    sample = self._sample(value, before + number)
                except Rejected as error:
                    self._reject(file, number, value, error)
                else:
                    yield sample
                self.progress.show(len(self.keys), self.reasons.total())
            before += records

    def _sample(self, value: object, number: int) -> KeyedSample:
        record = parse_record(value)
        key = sample_key(f"record-{number:08d}" if record.id is None else record.id)
        if key in self.keys:
            raise Rejected("duplicate_id", f"{self._where(self.keys[key])} has it too")
        images = [read_image(self.images, name) for name in record.images]
        self.keys[key] = number
        return key, record.content, images

    def _where(self, number: int) -> str:
        for file, records in self.files.items():
            if number < records:
                return f"record {number} of {file.name}"
            number -= records
        raise AssertionError(f"{number} records more than there are")

    def _reject(self, file: Path, number: int, value: object, error: Rejected) -> None:
        found = value.get("id") if isinstance(value, dict) else None
        identifier = found if isinstance(found, str | int) else None
        self.rejected.write(file=file.name, record=number, id=identifier, reason=error.reason, detail=error.detail)
        self.reasons[error.reason] += 1
        if self.reasons.total() > self.allowed:
            raise UserError(
                f"too many bad records: {self.reasons.total():,} of the first "
                f"{len(self.keys) + self.reasons.total():,} ({_by_reason(self.reasons)}), where {self.allowed:,} of "
                f"{sum(self.files.values()):,} are allowed; the last is {error}. Mend them, or raise --max-reject-rate"
            )


def _by_reason(reasons: Counter[str]) -> str:
    return ", ".join(f"{count:,} {code}" for code, count in reasons.most_common())


def shard_dataset(options: argparse.Namespace) -> None:
    """Write shards, rejected.jsonl and dataset.json into options.out; raises UserError."""
    images: Path = options.images.resolve()
    if not images.is_dir():
        raise UserError(f"--images {options.images}: no such folder")
    for number, file in enumerate(options.json):
        if file.resolve() in [other.resolve() for other in options.json[:number]]:
            raise UserError(f"--json {file}: named twice; every record would come twice")
    out: Path = options.out
    _refuse_used_folder(out)
    files = {}
    for file in options.json:  # all of them before anything is written: a broken last file shows at once
        files[file] = sum(1 for _ in read_llava_json(file))
        say(f"{file}: {files[file]:,} records")
    out.mkdir(parents=True, exist_ok=True)
    rejected_file = out / "rejected.jsonl"
    rejected_file.unlink(missing_ok=True)  # of an earlier try
    with JsonLines(rejected_file) as rejected, Progress(sys.stdout, sum(files.values())) as progress:
        intake = Intake(files, images, rejected, options.max_reject_rate, progress)
        try:
            shards = write_shards(intake, out, options.samples_per_shard)
        except UserError as error:
            listed = f"; {rejected_file} lists what was left out" if intake.reasons else ""
            left = "; delete it before another try" if any(out.glob("*.tar")) else ""
            raise UserError(f"{error}{listed}. {out} is unfinished{left}") from error
    if not shards:
        seen = f"see {rejected_file}: {_by_reason(intake.reasons)}" if intake.reasons else "there is none"
        raise UserError(f"no record became a sample; {seen}")
    counts = {
        "samples": sum(shard.samples for shard in shards),
        "images": sum(shard.images for shard in shards),
        "bytes": sum(shard.size for shard in shards),
    }
    _write_summary(out, counts, files, intake.reasons, shards)
    say(f"{out}: {len(shards):,} shards, {counts['samples']:,} samples, {counts['images']:,} images")
    say(f"rejected: {intake.reasons.total():,}" + (f", see {rejected_file}" if intake.reasons else ""))
    for code, count in intake.reasons.most_common():
        say(f"  {count:>9,} {code}: {REASONS[code]}")
    say(f"use it: data.shards={out}/shard-*.tar")


def _refuse_used_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; name a folder")
    names = ("*.tar", f"*.tar{UNFINISHED}")
    used = sorted(path.name for pattern in names for path in out.glob(pattern))
    if used:
        raise UserError(
            f"--out {out}: holds shards already ({', '.join(used[:3])}{', ...' if len(used) > 3 else ''}); a run would "
            "read old and new ones together. Choose a new folder, or delete it"
        )


def _write_summary(
    out: Path, counts: dict[str, int], files: dict[Path, int], reasons: Counter[str], shards: list[WrittenShard]
) -> None:
    content = {
        "format_version": 1,
        "records": sum(files.values()),
        **counts,
        "rejected": dict(sorted(reasons.items())),
        "inputs": [{"file": file.name, "records": records} for file, records in files.items()],
        "shards": [shard.as_dict() for shard in shards],
    }
    partial = out / "dataset.json.tmp"
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / "dataset.json")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; `--help` teaches by example."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = lambda text: Path(text).expanduser()  # noqa: E731 - the shell leaves --out=~/data as it is
    parser.add_argument("--json", type=path, nargs="+", required=True, metavar="FILE", help="LLaVA JSON or JSONL files")
    parser.add_argument("--images", type=path, required=True, metavar="DIR", help="folder that image names start from")
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="folder for the shards, without any yet")
    parser.add_argument("--samples-per-shard", type=int, default=1000, metavar="N", help="samples in a tar (1000)")
    parser.add_argument(
        "--max-reject-rate", type=float, default=0.05, metavar="R", help="stop at more bad records, as a share (0.05)"
    )
    options = parser.parse_args(arguments)
    if options.samples_per_shard < 1:
        parser.error(f"--samples-per-shard {options.samples_per_shard}: at least 1 is needed")
    if not 0 <= options.max_reject_rate <= 1:
        parser.error(f"--max-reject-rate {options.max_reject_rate}: a share from 0 to 1 is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 and one message for what the user can mend."""
    options = parse_arguments(arguments)
    try:
        shard_dataset(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or options.out}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C; what {options.out} holds is not complete", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
