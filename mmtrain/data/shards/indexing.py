"""Indexes made for many shards at once, in parallel.

tar without index --headers, contents, in one sequential read--> offset, size, CRC32 of every file
                  --neighbours of one key: samples, judged; TextCounter--> index with text lengths
tar whose index lacks this tokenizer and template --json members at their offsets--> the same index, lengths added
tar whose index is of version 1 --images at their offsets--> the same index of this version, sizes as they are turned

Tars are only read. What an index holds is a function of the tar, the tokenizer and the template, not of the workers.
Samples are formed as webdataset forms them. What makes one sample unusable is noted as its fault; what would make
webdataset drop or mix up samples in silence is an error. Image headers are read, no pixel is decoded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TextIO

from mmtrain.base.durable import lock
from mmtrain.base.errors import UserError
from mmtrain.base.progress import ProgressBar
from mmtrain.data.samples.records import MAX_IMAGE_BYTES, MAX_RECORD_BYTES, Rejected, image_size
from mmtrain.data.samples.sample import Sample, image_number, image_suffixes, read_sample
from mmtrain.data.shards.archive import read_headers
from mmtrain.data.shards.index import (
    UNKNOWN_SIZE,
    VERSION,
    Member,
    ShardIndex,
    TextLengths,
    indexed_texts,
    read_index,
    write_index,
)
from mmtrain.data.shards.index_file import MissingIndex
from mmtrain.data.shards.retry import RETRY_SECONDS, UnreadableError
from mmtrain.pretrained.model_files import model_folder
from mmtrain.pretrained.tokenizer_files import text_fingerprint
from mmtrain.processes.pool import Advance, usable_cores, worker_pool

if TYPE_CHECKING:
    from mmtrain.data.samples.templates import TextCounter

_log = logging.getLogger(__name__)
FAILURES_SHOWN = 5
_CHUNK = 1 << 20  # bytes


def ensure_indexes(
    tars: Sequence[Path],
    tokenizer_path: str,
    template: str,
    layout: str = "square",
    *,
    workers: int | None = None,
    stream: TextIO | None = None,
    retry_seconds: float = RETRY_SECONDS,
) -> None:
    """Make or complete the indexes that a run with this tokenizer, template and layout needs; nothing if all are there.

    `workers` is the number of processes, None one for each core that this process may use. A `stream` that is a
    terminal gets a progress bar. One of version 1 serves as it is, and is brought up to date if it is completed. Raises
    UserError for indexes that are stale or damaged: they are never replaced unasked, for their checksums are the only
    record of what the tars should hold.
    """
    missing = unready_shards(tars, text_fingerprint(model_folder(tokenizer_path), template, layout), retry_seconds)
    if missing:
        _log.info(f"indexing {len(missing):,} of {len(tars):,} shards (once; the indexes are kept beside them)")
        build_indexes(missing, tokenizer_path, template, layout, workers=workers or usable_cores(), stream=stream)


def unready_shards(
    tars: Sequence[Path], fingerprint: str, retry_seconds: float = RETRY_SECONDS, oldest: int = 1
) -> list[Path]:
    """Those without an index, of version `oldest` at least, that holds lengths under this fingerprint.

    Says once how many are older. Raises UserError naming the indexes that are stale or damaged, or the first that the
    storage fails to give.
    """
    missing: list[Path] = []
    old = 0
    failures: list[UserError] = []
    for tar in tars:
        try:
            version, texts = indexed_texts(tar, retry_seconds)
            if version < oldest or fingerprint not in texts:
                missing.append(tar)
                old += version < VERSION
        except MissingIndex:
            missing.append(tar)
        except UnreadableError:
            raise
        except UserError as error:
            failures.append(error)
    _raise_all(failures, len(tars))
    if old:
        _log.info(f"indexes of version 1: {old:,}; their shards' images are read for the sizes that EXIF turns them to")
    return missing


def build_indexes(
    tars: Sequence[Path],
    tokenizer_path: str,
    template: str,
    layout: str = "square",
    *,
    workers: int,
    rebuild: bool = False,
    stream: TextIO | None = None,
) -> None:
    """Give each tar an index of this version with text lengths under this tokenizer, template and layout.

    An index that is there is completed; with `rebuild` it is made anew from the tar, without the lengths of other
    tokenizers. Raises UserError, after all others are done, for shards that cannot be indexed. Time: a shard is read
    once, of one that has an index of this version only the json members; each worker takes one shard at a time.
    """
    import webdataset.tariterators  # noqa: F401 - imports torch, as the next one does: once, before workers are forked

    from mmtrain.data.samples.templates import TextCounter

    index = functools.partial(_index_shard, TextCounter(tokenizer_path, template, layout), rebuild)
    failures: list[UserError] = []
    done = samples = 0

    def show(through: int) -> None:
        nonlocal samples
        samples = through
        progress.show(done, samples, f"{len(failures):,} failed" if failures else "")

    with worker_pool(index, min(workers, len(tars))) as run, ProgressBar("shards", len(tars), stream) as progress:
        for _, error in run(tars, show):
            done += 1
            if error is not None:
                failures.append(error)
        show(samples)
    _raise_all(failures, len(tars))


def _index_shard(count: TextCounter, rebuild: bool, tar: Path, advance: Advance) -> UserError | None:
    """Index one shard; what it cannot be indexed for is a value, so that the other shards go on."""
    try:
        index = None
        with contextlib.suppress(MissingIndex):
            index = None if rebuild else read_index(tar)
        if index is None:
            lengths = TextLengths([])

            def measure(sample: Sample | None) -> None:
                lengths.add(sample, count)
                advance(1)

            index = scan_shard(tar, measure)
        else:
            known = index.texts.get(count.fingerprint)
            if index.sideways is None:
                index = measure_images(tar, index)
            elif known is not None:  # another process was faster
                return None
            lengths = known or measure_texts(tar, index, count, advance)
            advance(0 if known is None else len(index.keys))
        index.texts[count.fingerprint] = lengths
        if rebuild:
            write_index(tar, index)
        else:
            write_merged(tar, index)
    except UserError as error:
        return error
    return None


def measure_images(tar: Path, index: ShardIndex) -> ShardIndex:
    """The same index, of version 1, with sizes as images are turned.

    The size of a member that is not what was indexed stays: whoever reads it will see that it is damaged.
    """
    measured = replace(index, keys=[], members=[], image_sizes=[], sideways=[])
    try:
        with tar.open("rb") as stream:
            for key, members, sizes in zip(index.keys, index.members, index.image_sizes, strict=True):
                images = {image_number(member.suffix): member for member in members}
                found = [_turned_size(stream, images.get(number), size) for number, size in enumerate(sizes)]
                measured.add(key, members, found)
    except OSError as error:
        raise UserError(f"{tar}: cannot be read ({error.strerror})") from error
    return measured


def _turned_size(stream: BinaryIO, member: Member | None, size: tuple[int, int]) -> tuple[int, int, bool]:
    if member is not None and member.size <= MAX_IMAGE_BYTES and size != UNKNOWN_SIZE[:2]:
        content = os.pread(stream.fileno(), member.size, member.offset)
        if zlib.crc32(content) == member.crc32:
            with contextlib.suppress(Rejected):
                return image_size(content)
    return (*size, False)


def measure_texts(tar: Path, index: ShardIndex, count: TextCounter, advance: Advance) -> TextLengths:
    """Text lengths of an indexed shard, from its json members alone; `advance` is told of samples that went through."""
    lengths = TextLengths([])
    try:
        with tar.open("rb") as stream:
            for place in range(len(index.keys)):
                try:
                    sample = None if place in index.faults else _without_images(tar, stream, index, place)
                except Rejected as error:
                    lengths.reject(error)
                else:
                    lengths.add(sample, count)
                advance(1)
    except OSError as error:
        raise UserError(f"{tar}: cannot be read ({error.strerror})") from error
    return lengths


def _without_images(tar: Path, stream: BinaryIO, index: ShardIndex, place: int) -> Sample:
    """A sample, its images as empty bytes; raises Rejected."""
    members = index.members[place]
    json = next(member for member in members if member.suffix == "json")
    content = os.pread(stream.fileno(), json.size, json.offset)
    if zlib.crc32(content) != json.crc32:
        raise Rejected("checksum", f"json: {json.size:,} bytes whose CRC32 is not {json.crc32:08x}")
    contents = {**dict.fromkeys((member.suffix for member in members), b""), "json": content}
    return read_sample(index.keys[place], str(tar), contents, members[0].offset)


def write_merged(tar: Path, index: ShardIndex) -> None:
    """Write an index with the lengths that another process, for another tokenizer, has written in the meantime."""
    with tar.open("rb") as stream:
        lock(stream)
        with contextlib.suppress(UserError):  # none yet, or one that this one replaces
            written = read_index(tar)
            if (written.keys, written.members) == (index.keys, index.members):
                index.texts = {**written.texts, **index.texts}
        write_index(tar, index)


class _File(NamedTuple):
    """A member as it passed by: what was kept of its content, and what was wrong with it."""

    key: str
    member: Member
    json: bytes = b""
    image_size: tuple[int, int, bool] = UNKNOWN_SIZE
    fault: tuple[str, str] | None = None


def scan_shard(tar: Path, on_sample: Callable[[Sample | None], None]) -> ShardIndex:
    """Read a tar once; its index, without text lengths.

    `on_sample` gets each sample, its images as empty bytes, or None for one with a fault. Memory is that of one member.
    Raises what `read_headers` raises, and UserError for names that webdataset forms no sample of: without a suffix, or
    with a part that begins with two underscores.
    """
    try:
        with tar.open("rb", buffering=_CHUNK) as stream, warnings.catch_warnings(action="ignore"):  # Pillow's
            index = ShardIndex(tar_bytes=os.fstat(stream.fileno()).st_size, keys=[], members=[], image_sizes=[])
            for key, files in itertools.groupby(_files(tar, stream), key=attrgetter("key")):
                _add_sample(index, tar, key, list(files), on_sample)
    except OSError as error:
        raise UserError(f"{tar}: cannot be read ({error.strerror or error})") from error
    return index


def _files(tar: Path, stream: BinaryIO) -> Iterator[_File]:
    from webdataset.tariterators import base_plus_ext  # imports torch

    for file in read_headers(tar, stream):
        key, suffix = base_plus_ext(file.name)
        if key is None or key.endswith("/") or any(part.startswith("__") for part in file.name.split("/")):
            raise UserError(
                f"{tar}: {file.name!r} belongs to no sample: webdataset passes over names without a suffix or without "
                "anything before it, and over some that begin with two underscores; write the tar without it"
            )
        suffix = suffix.lower()
        stream.seek(file.offset)
        is_image = image_number(suffix) is not None
        limit = MAX_IMAGE_BYTES if is_image else MAX_RECORD_BYTES if suffix == "json" else 0
        crc32, content = 0, b""
        for chunk in _chunks(stream, file.size, max(limit, _CHUNK)):
            crc32, content = zlib.crc32(chunk, crc32), chunk
        member = Member(suffix, file.offset, file.size, crc32)
        if limit and file.size > limit:
            yield _File(key, member, fault=("too_many_bytes", f"{suffix}: {file.size:,} bytes; at most {limit:,}"))
        elif is_image:
            try:
                yield _File(key, member, image_size=image_size(content))
            except Rejected as error:
                yield _File(key, member, fault=(error.reason, f"{suffix}: {error.detail}"))
        else:
            yield _File(key, member, json=content if suffix == "json" else b"")


def _chunks(stream: BinaryIO, size: int, largest: int) -> Iterator[bytes]:
    """The next `size` bytes: as one piece if they are at most `largest`, else in small ones."""
    piece = size if size <= largest else _CHUNK
    while size > 0:
        chunk = stream.read(min(piece, size))
        if not chunk:
            raise OSError("it became shorter while it was read")
        size -= len(chunk)
        yield chunk


def _add_sample(
    index: ShardIndex, tar: Path, key: str, files: list[_File], on_sample: Callable[[Sample | None], None]
) -> None:
    place = len(index.keys)
    members = {file.member.suffix: file for file in files}
    sample, sizes = None, ()
    try:
        if len(members) < len(files):
            twice = next(suffix for suffix in members if sum(file.member.suffix == suffix for file in files) > 1)
            raise Rejected("duplicate_member", f"{twice} comes twice")
        sizes = tuple(members[suffix].image_size for suffix in image_suffixes(list(members)))
        for file in files:
            if file.fault is not None:
                raise Rejected(*file.fault)
        contents = {suffix: file.json for suffix, file in members.items()}
        sample = read_sample(key, str(tar), contents, files[0].member.offset)
    except Rejected as error:
        index.faults[place] = (error.reason, error.detail)
    index.add(key, (file.member for file in files), sizes)
    on_sample(sample)


def _raise_all(failures: Sequence[UserError], tars: int) -> None:
    """Raise one error that lists the first few; nothing where there are none."""
    if len(failures) == 1:
        raise failures[0]
    if failures:
        listed = "\n  ".join(map(str, failures[:FAILURES_SHOWN]))
        more = f"\n  and {len(failures) - FAILURES_SHOWN:,} more" if len(failures) > FAILURES_SHOWN else ""
        raise UserError(f"{len(failures):,} of {tars:,} shards:\n  {listed}{more}")
