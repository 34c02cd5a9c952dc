"""An index made from the tar itself, in one sequential read.

tar --headers, contents--> offset, size, CRC32 of every file --neighbours of one key--> samples, judged --> ShardIndex

Samples are formed as webdataset forms them. What makes one sample unusable is noted as its fault; what would make
webdataset drop or mix up samples in silence is an error. Image headers are read, no pixel is decoded.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.data.samples.records import MAX_IMAGE_BYTES, MAX_JSON_BYTES, Rejected, open_image
from mmtrain.data.samples.sample import Sample, image_number, image_suffixes, read_sample
from mmtrain.data.shards.archive import ArchiveFile, read_headers
from mmtrain.data.shards.index import Member, ShardIndex

_CHUNK = 1 << 20  # bytes

UNKNOWN_SIZE = (0, 0)  # of an image whose header does not tell


class _File(NamedTuple):
    """A member as it passed by: what was kept of its content, and what was wrong with it."""

    key: str
    member: Member
    json: bytes = b""
    image_size: tuple[int, int] = UNKNOWN_SIZE
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
    for file in read_headers(tar, stream):
        key, suffix = _key_and_suffix(tar, file)
        stream.seek(file.offset)
        is_image = image_number(suffix) is not None
        limit = MAX_IMAGE_BYTES if is_image else MAX_JSON_BYTES if suffix == "json" else 0
        crc32, content = 0, b""
        for chunk in _chunks(stream, file.size, max(limit, _CHUNK)):
            crc32, content = zlib.crc32(chunk, crc32), chunk
        member = Member(suffix, file.offset, file.size, crc32)
        if limit and file.size > limit:
            yield _File(key, member, fault=("too_many_bytes", f"{suffix}: {file.size:,} bytes; at most {limit:,}"))
        elif is_image:
            try:
                with open_image(content, sys.maxsize) as image:  # how many pixels are too many, the run says
                    yield _File(key, member, image_size=image.size)
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


def _key_and_suffix(tar: Path, file: ArchiveFile) -> tuple[str, str]:
    folder, slash, base = file.name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if not stem or not dot or any(part.startswith("__") for part in file.name.split("/")):
        raise UserError(
            f"{tar}: {file.name!r} belongs to no sample: webdataset passes over names without a suffix or without "
            "anything before it, and over some that begin with two underscores; write the tar without it"
        )
    return folder + slash + stem, suffix.lower()


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
    index.keys.append(key)
    index.members.append(tuple(file.member for file in files))
    index.image_sizes.append(sizes)
    on_sample(sample)
