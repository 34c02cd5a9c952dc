"""What goes into which shard, decided before any image is read.

rows of all sources --Intake: judged by their text, given keys--> candidates --N, or what fits a size--> ShardJob

Everything here is a function of the sources (and, for shards of a size, of the image files' sizes): so any number of
workers, and a run that was interrupted, make the same shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE

from mmtrain.base.errors import UserError
from mmtrain.data.prepare.rows import Adapted, RowImage
from mmtrain.data.prepare.sharding import Candidate, Rejection, ShardJob, sample_key, tar_bytes
from mmtrain.data.prepare.sources import Source, place
from mmtrain.data.samples.records import Record, Rejected, record_json


@dataclass(eq=False)
class Intake:
    """The jobs of all shards, in the files' order; `samples_per_shard` or `shard_bytes` says when one is full."""

    sources: Sequence[Source]
    images: Path | None  # their folder; None: no record has any
    samples_per_shard: int | None  # candidates: records with sound text
    shard_bytes: int | None  # of the tar, by the files' sizes before --max-side; a larger sample is alone in its tar
    keep_duplicates: bool  # a repeated id gets a key of its own
    allowed_rejections: int  # for the text; reading ends early, after more
    keys: dict[str, int] = field(init=False, default_factory=dict)  # of candidates -> the record's number in all files
    repeats: Counter[str] = field(init=False, default_factory=Counter)  # of a key, so far
    text_rejections: int = field(init=False, default=0)

    def __iter__(self) -> Iterator[ShardJob]:
        number = first = record = 0
        candidates: list[Candidate] = []
        rejected: list[Rejection] = []
        filled = 0
        for source in self.sources:
            end = record + source.records
            for value in source.rows():
                candidate, size = None, 0
                try:
                    candidate, images = self._candidate(source.adapter.adapt(value), value, record)
                except Rejected as error:
                    rejected.append(Rejection(record, _identifier(value), error.reason, error.detail))
                    self.text_rejections += 1
                else:
                    size = self._size(candidate, images)
                    if candidates and filled + size > self._full:
                        yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))
                        number, first, filled, candidates, rejected = number + 1, record, 0, [], []
                    candidates.append(candidate)
                    filled += size
                record += 1
                if self.text_rejections > self.allowed_rejections:
                    yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))
                    return
            if record != end:
                raise UserError(f"{source.path}: {source.records:,} records were counted, and there are others now")
        if record > first:
            yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))

    @property
    def _full(self) -> int:
        if self.shard_bytes is None:
            return self.samples_per_shard
        return self.shard_bytes // RECORDSIZE * RECORDSIZE - 2 * BLOCKSIZE  # the archive's end

    def _size(self, candidate: Candidate, images: Sequence[RowImage]) -> int:
        """What it adds to its shard, in the limit's unit."""
        if self.shard_bytes is None:
            return 1
        return tar_bytes([len(record_json(candidate.content)), *map(self._image_size, images)])

    def _image_size(self, image: RowImage) -> int:
        if image.content is not None:
            return image.content.nbytes
        if self.images is None or image.name is None:
            return 0
        try:
            return (self.images / image.name).stat().st_size
        except (OSError, ValueError):  # the job that reads it will say why
            return 0

    def _candidate(self, adapted: Adapted, value: object, number: int) -> tuple[Candidate, Sequence[RowImage]]:
        key = self._key(adapted.record, number)
        self.keys[key] = number
        record = adapted.named(key)
        return Candidate(number, _identifier(value), key, record.content, record.images), adapted.images

    def _key(self, record: Record, number: int) -> str:
        key = sample_key(f"record-{number:08d}" if record.id is None else record.id)
        if key not in self.keys:
            return key
        if not self.keep_duplicates:
            source, first = place(self.sources, self.keys[key])
            raise Rejected("duplicate_id", f"record {first} of {source.name} has it too")
        while True:
            self.repeats[key] += 1
            numbered = f"{key}-{self.repeats[key] + 1}"
            if numbered not in self.keys:  # else it is an id of its own
                return numbered


def _identifier(value: object) -> str | int | None:
    """A record's id as rejected.jsonl shows it."""
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str | int) else None
