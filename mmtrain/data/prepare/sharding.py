"""Write shards: webdataset tars of LLaVA-form samples with their index.

Byte for byte a function of the samples.

ShardJob: records with sound text, names of their images
    --ShardMaker--> (key, record, [(suffix, bytes), ...])
    --> KEY.json, then KEY.jpg, or KEY.0.jpg, KEY.1.jpg with several images
    --> the tar's index: offsets, sizes, checksums of the bytes as they are written

A shard's bytes do not depend on the workers. A tar gets its name when it is complete and on the
disk, then its index.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from mmtrain.base.durable import whole_file
from mmtrain.base.errors import UserError
from mmtrain.data.samples.formats import LLAVA
from mmtrain.data.samples.records import (
    BadSample,
    checked_image,
    image_size,
    parse_turns,
    read_image,
    record_json,
)
from mmtrain.data.samples.sample import Sample
from mmtrain.data.shards.index import Member, ShardIndex, TextLengths, write_index
from mmtrain.data.shards.pool import Advance

if TYPE_CHECKING:
    from mmtrain.data.samples.templates import TextCounter

_BUFFER = 1 << 20  # bytes

# A dot would end the key, a slash make folders, underscores in front a name that webdataset passes
# over. 90 characters and what follows them fit into the 100 of a ustar header.
_SAFE_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,89}")
_LONGEST = 80  # characters of an id that is its own key; a number may follow them
_READABLE = 60  # characters of an unsafe id that its key keeps


class WrittenShard(NamedTuple):
    """The contents of a complete tar."""

    file: str  # its name, without folder
    samples: int
    images: int
    image_pixels: int  # of all images, as stored
    # of all samples, without image positions; None where no tokenizer was given
    text_tokens: int | None
    bytes: int  # of the tar
    sha256: str  # of the tar


class Candidate(NamedTuple):
    """A record with sound text: a sample, if its images are sound too."""

    record: int  # its number over all input files, from 0
    key: str
    content: dict
    images: tuple[str, ...]
    holds_images: bool  # its row has bytes of images, not only names


class BadRecord(NamedTuple):
    """A record that becomes no sample."""

    record: int  # its number over all input files, from 0
    id: str | int | None  # None also where it has none that could be written
    reason: str  # a code of records.REASONS
    detail: str


class ShardJob(NamedTuple):
    """The records of one shard."""

    number: int
    candidates: tuple[Candidate, ...]
    rejected: tuple[BadRecord, ...]  # for their text


class FinishedShard(NamedTuple):
    """A shard that is written, and the candidates that it lacks because of their images."""

    shard: WrittenShard
    rejected: tuple[BadRecord, ...]

    @property
    def candidates(self) -> int:
        return self.shard.samples + len(self.rejected)


StoredImages = Callable[[Sequence[Candidate]], Iterable[Sequence[memoryview | None]]]
# key, KEY.json's content, (suffix, bytes) of each image
KeyedSample = tuple[str, dict, Sequence[tuple[str, bytes]]]


def sample_key(identifier: str) -> str:
    """Return the tar key of a record's id.

    It is the id itself where that is safe, else its readable part and a hash of it.
    """
    if _SAFE_KEY.fullmatch(identifier) and len(identifier) <= _LONGEST:
        return identifier
    readable = re.sub(r"[^A-Za-z0-9]+", "-", identifier).strip("-")[:_READABLE]
    digest = hashlib.sha256(identifier.encode()).hexdigest()[:12]
    return f"{readable}-{digest}" if readable else digest


def tar_bytes(members: Iterable[int]) -> int:
    """Return the bytes that files of these sizes take in a tar, with their headers.

    The archive's end is left out.
    """
    return tarfile.BLOCKSIZE * sum(1 - (-size // tarfile.BLOCKSIZE) for size in members)


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


@dataclass(frozen=True)
class ShardMaker:
    """Makes the shards of a folder, each from its job."""

    # the folder that image names start from, absolute and without links; None: no record has any
    images: Path | None
    stored: StoredImages  # the bytes of candidates' images that are not files of that folder
    out: Path
    max_pixels: int
    count: TextCounter | None  # None leaves text lengths to the first run
    finished: Mapping[int, FinishedShard]  # by job number: made by an earlier run

    def __call__(self, job: ShardJob, advance: Advance) -> FinishedShard:
        """Write a shard, unless it is finished.

        Raises UserError where that one was made of other records.
        """
        finished = self.finished.get(job.number)
        if finished is not None:
            if finished.candidates != len(job.candidates):  # with --shard-bytes
                raise UserError(
                    f"{finished.shard.file} was made of {finished.candidates:,} records, "
                    f"but would now hold {len(job.candidates):,}: images have changed in size. "
                    f"Delete {self.out} and start again"
                )
            return finished
        rejected: list[BadRecord] = []
        samples = self._samples(job, rejected, advance)
        written = write_shard(self.out / shard_name(job.number), samples, self.count)
        return FinishedShard(written, tuple(rejected))

    def _samples(
        self,
        job: ShardJob,
        rejected: list[BadRecord],
        advance: Advance,
    ) -> Iterator[KeyedSample]:
        for candidate, contents in zip(job.candidates, self.stored(job.candidates), strict=True):
            try:
                files = list(map(self._file, candidate.images, contents))
            except BadSample as error:
                rejected.append(
                    BadRecord(
                        candidate.record,
                        candidate.content.get("id"),
                        error.reason,
                        error.detail,
                    )
                )
            else:
                yield candidate.key, candidate.content, files
            advance(1)

    def _file(self, name: str, content: memoryview | None) -> tuple[str, bytes]:
        if content is None:
            return read_image(self.images, name, self.max_pixels)
        return checked_image(name, content, self.max_pixels)


def write_shards(
    samples: Iterable[KeyedSample],
    folder: Path,
    samples_per_shard: int,
) -> None:
    """Write samples with unique keys, in order, into new shards of an existing folder.

    The shards are shard-000000.tar, shard-000001.tar, ...
    """
    samples = iter(samples)
    for number, first in enumerate(samples):
        others = itertools.islice(samples, samples_per_shard - 1)
        write_shard(folder / shard_name(number), itertools.chain([first], others))


def write_shard(
    path: Path,
    samples: Iterable[KeyedSample],
    count: TextCounter | None = None,
) -> WrittenShard:
    """Write one tar, which appears under `path` when complete.

    It is a POSIX.1-2008 ustar; times, owners and modes are fixed.

    Its index is written after it, with text lengths where there is a `count`. Raises UserError if
    `path` exists or the disk is full, and what `samples` raises; then the unfinished tar is
    removed.
    """
    if path.exists():
        raise UserError(
            f"{path}: exists already; shards are never overwritten. "
            "Choose a new folder, or delete them"
        )
    try:
        with whole_file(path) as unfinished, unfinished.open("wb", buffering=_BUFFER) as stream:
            shard = _Shard(path, stream, count)
            for key, record, files in samples:
                shard.add(key, record, files)
            shard.end()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); the unfinished file is removed. "
            "Free space, or choose another folder"
        ) from error
    try:
        write_index(path, shard.index)
    except UserError:
        path.unlink()
        raise
    return shard.summary()


@dataclass
class _Shard:
    """A tar on its way into a stream, and the index of what went there."""

    path: Path
    stream: BinaryIO
    count: TextCounter | None

    def __post_init__(self) -> None:
        self.index = ShardIndex(0, [], [], [], {LLAVA.reading: {}})
        self.lengths = TextLengths([])
        if self.count is not None:
            self.index.texts[self.count.how.fingerprint] = self.lengths
        self.sha256 = hashlib.sha256()

    def add(self, key: str, record: dict, files: Sequence[tuple[str, bytes]]) -> None:
        assert _SAFE_KEY.fullmatch(key), f"unsafe key {key!r}"
        members = [self._member(key, "json", record_json(record))]
        for number, (suffix, content) in enumerate(files):
            if len(files) > 1:
                suffix = f"{number}.{suffix}"
            members.append(self._member(key, suffix, content))
        self.index.add(key, members, [image_size(content) for _, content in files])
        if self.count is not None:
            no_images = (b"",) * len(files)
            sample = Sample(key, str(self.path), parse_turns(record), no_images)
            self.lengths.add(sample, self.count)

    def _member(self, key: str, suffix: str, content: bytes) -> Member:
        # its defaults: time 0, owner 0 without a name, mode 0644
        header = tarfile.TarInfo(f"{key}.{suffix}")
        header.size = len(content)
        self._write(header.tobuf(tarfile.USTAR_FORMAT))
        member = Member(
            suffix,
            self.index.tar_bytes,
            len(content),
            zlib.crc32(content),
        )
        self._write(content)
        self._write(bytes(-len(content) % tarfile.BLOCKSIZE))
        return member

    def end(self) -> None:
        """Write two blocks of zeros, and more up to a whole record."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._write(bytes(-self.index.tar_bytes % tarfile.RECORDSIZE))

    def _write(self, content: bytes) -> None:
        self.stream.write(content)
        self.sha256.update(content)
        self.index.tar_bytes += len(content)

    def summary(self) -> WrittenShard:
        sizes = list(itertools.chain.from_iterable(self.index.image_sizes))
        return WrittenShard(
            file=self.path.name,
            samples=len(self.index.keys),
            images=len(sizes),
            image_pixels=sum(map(math.prod, sizes)),
            text_tokens=None if self.count is None else sum(self.lengths.tokens),
            bytes=self.index.tar_bytes,
            sha256=self.sha256.hexdigest(),
        )
