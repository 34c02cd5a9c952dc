"""What goes into which shard, decided before any image is read.

LLaVA files --read, judged by their text, given keys--> candidates --N of them, or what fits into a size--> ShardJob

Everything here is a function of the JSON files (and, for shards of a size, of the image files' sizes): so any number of
workers, and a run that was interrupted, make the same shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE

from mmtrain.data.prepare.llava_json import read_llava_json
from mmtrain.data.prepare.shard_jobs import Candidate, Rejection, ShardJob
from mmtrain.data.prepare.sharding import sample_key, tar_bytes
from mmtrain.data.samples.records import Record, Rejected, parse_record, record_json


@dataclass(frozen=True)
class ShardLimit:
    """When a shard is full; exactly one of the two is set."""

    samples: int | None = None  # candidates: records with sound text
    bytes: int | None = None  # of the tar, by the files' sizes before --max-side; a larger sample is alone in its tar


class Intake:
    """The jobs of all shards, in the files' order."""

    def __init__(
        self, files: dict[Path, int], images: Path, limit: ShardLimit, keep_duplicates: bool, allowed_rejections: int
    ) -> None:
        """`files`: each with its number of records; `images`: their folder.

        With `keep_duplicates` a repeated id gets a key of its own. Reading ends early, after more than
        `allowed_rejections` for the text.
        """
        self.files = files
        self.images = images
        self.limit = limit
        self.keep_duplicates = keep_duplicates
        self.allowed_rejections = allowed_rejections
        self.keys: dict[str, int] = {}  # of candidates -> the record's number, counted over all files
        self.repeats: Counter[str] = Counter()  # of a key, so far
        self.text_rejections = 0

    def __iter__(self) -> Iterator[ShardJob]:
        number = first = record = 0
        candidates: list[Candidate] = []
        rejected: list[Rejection] = []
        filled = 0
        for file in self.files:
            for value in read_llava_json(file):
                candidate, size = None, 0
                try:
                    candidate = self._candidate(value, record)
                except Rejected as error:
                    rejected.append(Rejection(record, _identifier(value), error.reason, error.detail))
                    self.text_rejections += 1
                else:
                    size = self._size(candidate)
                    if candidates and filled + size > self._full:
                        yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))
                        number, first, filled, candidates, rejected = number + 1, record, 0, [], []
                    candidates.append(candidate)
                    filled += size
                record += 1
                if self.text_rejections > self.allowed_rejections:
                    yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))
                    return
        if record > first:
            yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))

    @property
    def _full(self) -> int:
        if self.limit.bytes is None:
            return self.limit.samples
        return self.limit.bytes // RECORDSIZE * RECORDSIZE - 2 * BLOCKSIZE  # the archive's end

    def _size(self, candidate: Candidate) -> int:
        """What it adds to its shard, in the limit's unit."""
        if self.limit.bytes is None:
            return 1
        return tar_bytes([len(record_json(candidate.content)), *map(self._file_size, candidate.images)])

    def _file_size(self, name: str) -> int:
        try:
            return (self.images / name).stat().st_size
        except (OSError, ValueError):  # the job that reads it will say why
            return 0

    def _candidate(self, value: object, number: int) -> Candidate:
        record = parse_record(value)
        key = self._key(record, number)
        self.keys[key] = number
        return Candidate(number, _identifier(value), key, record.content, record.images)

    def _key(self, record: Record, number: int) -> str:
        key = sample_key(f"record-{number:08d}" if record.id is None else record.id)
        if key not in self.keys:
            return key
        if not self.keep_duplicates:
            raise Rejected("duplicate_id", f"{self.where(self.keys[key])} has it too")
        while True:
            self.repeats[key] += 1
            numbered = f"{key}-{self.repeats[key] + 1}"
            if numbered not in self.keys:  # else it is an id of its own
                return numbered

    def where(self, number: int) -> str:
        """A record's file and its number in it, in words."""
        file, number = self.place(number)
        return f"record {number} of {file.name}"

    def place(self, number: int) -> tuple[Path, int]:
        """A record's file and its number in it."""
        for file, records in self.files.items():
            if number < records:
                return file, number
            number -= records
        raise AssertionError(f"{number} records more than there are")


def _identifier(value: object) -> str | int | None:
    """A record's id as rejected.jsonl shows it."""
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str | int) else None
