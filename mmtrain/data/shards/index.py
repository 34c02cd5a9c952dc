"""The index of a shard: where every member lies, its checksum, and how long each sample's text is.

shard-000000.tar --scan, tokenizer--> ShardIndex
    --write_index--> shard-000000.tar.index --read_tables--> arrays, --read_index--> ShardIndex

The first line of the file is a JSON object: format, version, tar_bytes, readings, texts
(fingerprints), tables (rows of each) and crc32 (of the line without it, then of all that follows).
Then come the tables, one after the other, as TABLES says: raw little-endian numbers. A sample says
how many elements of keys (bytes), members and images are its own, after those of the samples before
it. For each fingerprint (samples,) uint32 tokens follow.

`suffixes` has the text of each number, a NUL behind each. `faults` has a line of JSON for each: a
reading or a fingerprint, place (a sample's number in its shard, from 0), reason and detail. Those
that do not depend on the tokenizer have the format in which samples were read
(SampleFormat.reading). Image sizes are those after turning by EXIF.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
from numpy import ndarray
from pydantic import BaseModel, Field, InstanceOf, TypeAdapter, ValidationError

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json
from mmtrain.base.printing import escape
from mmtrain.base.small_files import opened
from mmtrain.data.samples.records import REASONS, BadSample
from mmtrain.data.samples.sample import Sample, Sizes, image_number
from mmtrain.data.shards.remote import RemoteTar, Tar

FORMAT = "mmtrain shard index"
# 4: tables of numbers
VERSION = 4
MAKE = "mmtrain index CONFIG"
MEND = "mmtrain index CONFIG --rebuild"

UNKNOWN_SIZE = (0, 0)  # width and height of an image whose header does not tell
MAX_LINE = 1 << 16  # bytes; the first has 300, and 30 for each tokenizer and template
_MAX_DETAIL = 2000  # characters of a fault's detail, 6 bytes each at most

# `key_hash` decides whether a sample is held out.
TABLES = {
    "samples": np.dtype(
        [("key_hash", "<u8"), ("keys", "<u4"), ("members", "<u4"), ("images", "<u4")]
    ),
    "members": np.dtype([("suffix", "<u4"), ("offset", "<u8"), ("size", "<u8"), ("crc32", "<u4")]),
    "images": np.dtype([("width", "<i4"), ("height", "<i4")]),
    "keys": np.dtype("u1"),
    "suffixes": np.dtype("u1"),
    "faults": np.dtype("u1"),
}

TOKENS = np.dtype("<u4")

T = TypeVar("T", bytes, list)
Tables = dict[str, ndarray]
Faults = dict[int, tuple[str, str]]  # place -> a code of records.REASONS, detail


class MissingIndex(UserError):  # noqa: N818
    """A shard has no index yet."""


class Member(NamedTuple):
    """A file in a tar."""

    suffix: str  # what follows the key's dot, in lower case: "json", "0.jpg"
    offset: int  # of its content, in bytes
    size: int  # bytes
    crc32: int  # of its content


def checksum_detail(member: Member) -> str:
    """Describe a member whose bytes are not those that were indexed, for the reason "checksum"."""
    return (
        f"{member.suffix}: {member.size:,} bytes whose CRC32 is not {member.crc32:08x}: "
        f"they are damaged, or the shard was replaced after it was indexed (then run {MEND} SHARD)"
    )


@dataclass
class TextLengths:
    """Lengths of a shard's samples under one tokenizer and template."""

    tokens: list[int]  # per sample, without image positions; 0 where the sample is unusable
    # samples that this template or tokenizer cannot hold
    faults: Faults = field(default_factory=dict)

    def add(self, sample: Sample | BadSample | None, count: Callable[[Sample], int]) -> None:
        """Append the length of the next sample, with or without its images.

        None: it is unusable whatever the text.
        """
        try:
            if isinstance(sample, BadSample):
                raise sample
            self.tokens.append(0 if sample is None else count(sample))
        except BadSample as error:
            self.faults[len(self.tokens)] = (error.reason, error.detail)
            self.tokens.append(0)


@dataclass
class ShardIndex:
    """The content of a shard, as a run must know it before it reads any sample."""

    tar_bytes: int
    keys: list[str]  # names up to the first dot after the last slash, as webdataset groups members
    members: list[tuple[Member, ...]]  # per sample, in the tar's order
    image_sizes: list[Sizes]  # of each sample's images, 0 where not known
    # by SampleFormat.reading, at least one; unusable whatever the tokenizer
    faults: dict[str, Faults]
    texts: dict[str, TextLengths] = field(default_factory=dict)  # by text_fingerprint

    def add(
        self,
        key: str,
        members: Iterable[Member],
        image_sizes: Iterable[tuple[int, int]],
    ) -> None:
        self.keys.append(key)
        self.members.append(tuple(members))
        self.image_sizes.append(tuple(image_sizes))


def index_path(tar: Tar) -> Path:
    """Return the path of a shard's index.

    It lies beside the tar, or in the cache if it is there already or the tar's folder cannot be
    written. The index of a remote tar is always in the cache.
    """
    cached = _in_cache(tar)
    beside = _beside(tar)
    if os.access(cached, os.F_OK) or not (beside.is_file() or os.access(beside.parent, os.W_OK)):
        return cached
    return beside


def _beside(tar: Tar) -> Path:
    if isinstance(tar, RemoteTar):
        return tar.index
    return tar.with_name(tar.name + ".index")


def _in_cache(tar: Tar) -> Path:
    if isinstance(tar, RemoteTar):
        return tar.index
    name = hashlib.sha256(os.fsencode(tar.absolute())).hexdigest()[:24]
    return cache_folder("index") / f"{name}.index"


def read_index(tar: Tar) -> ShardIndex:
    """Read the index of a shard, an object for each sample.

    Raises what `read_tables` raises. Cost: 4 us a sample.
    """
    header, tables = read_tables(tar)
    samples = tables["samples"]
    suffixes = suffix_texts(tables)
    members = [Member(suffixes[number], *rest) for number, *rest in tables["members"].tolist()]
    texts = {}
    for name in header.texts:
        texts[name] = TextLengths(tables[name].tolist(), faults_of(tables, name))
    return ShardIndex(
        tar_bytes=header.tar_bytes,
        keys=[key.decode() for key in _rows(tables["keys"].tobytes(), samples["keys"])],
        members=list(map(tuple, _rows(members, samples["members"]))),
        image_sizes=list(map(tuple, _rows(tables["images"].tolist(), samples["images"]))),
        faults={reading: faults_of(tables, reading) for reading in header.readings},
        texts=texts,
    )


def _rows(flat: T, counts: ndarray) -> list[T]:
    return [flat[begin:end] for begin, end in pairwise(accumulate(counts.tolist(), initial=0))]


def faults_of(tables: Tables, *names: str) -> Faults:
    """Return the samples of a shard that these readings, or these fingerprints' texts, cannot
    hold; of a sample with several faults the last.
    """
    faults = {}
    for name, place, reason, detail in _fault_rows(tables):
        if name in names:
            faults[place] = (reason, detail)
    return faults


def _fault_rows(tables: Tables) -> Iterator[_FaultRow]:
    # One by one: as objects that are not checked yet they may take 30 times their bytes.
    lines = io.BytesIO(tables["faults"])
    while line := lines.readline(MAX_LINE):
        yield _FAULT.validate_python(json.loads(line))


def other_reading(tar: Tar, header: Header) -> UserError:
    return UserError(
        f"{tar}: its index has samples of format {', '.join(header.readings)} only. "
        f"Index it: {MAKE} {tar}"
    )


def suffix_texts(tables: Tables) -> list[str]:
    """Return the suffixes of a shard's members, by number."""
    return tables["suffixes"].tobytes().decode().split("\0")[:-1]


def sums_of(values: ndarray, counts: ndarray) -> ndarray:
    """Return (n,) int64 sums of rows of `counts` values each; 0 for an empty row."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return np.diff(sums[np.cumsum(counts)], prepend=0)


def key_hash(key: bytes) -> int:
    """Return the 64 bits of a sample's key that decide whether it is held out."""
    digest = hashlib.blake2b(key, digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big")


def write_index(tar: Tar, index: ShardIndex) -> None:
    """Write a shard's index, which has its name only when it is complete.

    Raises UserError if the disk refuses it.
    """
    content = _content(index)
    beside = _beside(tar)
    cached = _in_cache(tar)
    for path in (beside, cached):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
            break
        except OSError as error:
            if path == cached or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise UserError(
                    f"{path}: cannot be written ({error.strerror}). "
                    "Free space, or make the folder writable"
                ) from error
    # a home may be closed to its user: HOME=/root in a container
    if path != cached and os.access(cached, os.F_OK):
        cached.unlink(missing_ok=True)  # it would hide the new one


def _content(index: ShardIndex) -> bytes:
    texts = dict(sorted(index.texts.items()))
    keys = [key.encode() for key in index.keys]
    members = list(chain.from_iterable(index.members))
    suffixes = {}
    for member in members:
        suffixes.setdefault(member.suffix, len(suffixes))
    faults = index.faults | {name: text.faults for name, text in texts.items()}
    lines = []
    for name, found in sorted(faults.items()):
        for place, (reason, detail) in sorted(found.items()):
            lines.append(compact_json((name, place, reason, detail[:_MAX_DETAIL])) + b"\n")
    counts = (map(len, column) for column in (keys, index.members, index.image_sizes))
    rows = {
        "samples": list(zip(map(key_hash, keys), *counts, strict=True)),
        "members": [(suffixes[suffix], *rest) for suffix, *rest in members],
        "images": list(chain.from_iterable(index.image_sizes)),
    }
    content = {name: np.array(of_table, TABLES[name]).tobytes() for name, of_table in rows.items()}
    content["keys"] = b"".join(keys)
    content["suffixes"] = "".join(f"{suffix}\0" for suffix in suffixes).encode()
    content["faults"] = b"".join(lines)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "tar_bytes": index.tar_bytes,
        "readings": sorted(index.faults),
        "texts": list(texts),
        "tables": {name: len(raw) // TABLES[name].itemsize for name, raw in content.items()},
    }
    tokens = [np.array(text.tokens, TOKENS).tobytes() for text in texts.values()]
    body = b"".join([*content.values(), *tokens])
    header["crc32"] = zlib.crc32(body, zlib.crc32(compact_json(header)))
    return compact_json(header) + b"\n" + body


_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]  # what archive.read_headers takes
_Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]+$")]  # no table's name
# details hold any text
_FaultRow = tuple[_Name, _Count, Literal[tuple(REASONS)], InstanceOf[str]]
_FAULT = TypeAdapter(_FaultRow)


class Header(BaseModel, strict=True):
    """The first line of an index."""

    format: Literal["mmtrain shard index"]
    tar_bytes: Annotated[int, Field(ge=0, le=2**62)]
    readings: Annotated[list[_Name], Field(min_length=1)]
    texts: list[_Fingerprint]
    tables: dict[Literal[tuple(TABLES)], _Count]
    crc32: int

    @property
    def shapes(self) -> dict[str, tuple[np.dtype, int]]:
        """Type and rows of each table, in the file's order; tokens by their fingerprint."""
        shapes = {name: (dtype, self.tables[name]) for name, dtype in TABLES.items()}
        return shapes | dict.fromkeys(self.texts, (TOKENS, self.tables["samples"]))


def read_header(tar: Tar) -> Header:
    """Read the first line of a shard's index.

    Raises MissingIndex, or UserError for one of another version, size or tar.
    """
    with _opened(tar) as (path, stream):
        header, _ = _read_header(path, tar, stream)
    return header


def read_tables(tar: Tar) -> tuple[Header, Tables]:
    """Read the index of a shard, and check it.

    Raises MissingIndex, or UserError for one that is damaged or of another tar. Cost: 0.2 us a
    sample.
    """
    with _opened(tar) as (path, stream):
        header, crc32 = _read_header(path, tar, stream)
        body = stream.read()
    tables = {}
    begin = 0
    try:
        if zlib.crc32(body, crc32) != header.crc32:
            raise ValueError("its checksum does not match its bytes")
        for name, (dtype, rows) in header.shapes.items():
            tables[name] = np.frombuffer(body, dtype, rows, begin)
            begin += tables[name].nbytes
        _check(header, tables)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, tar, error) from None
    return header, tables


@contextlib.contextmanager
def _opened(tar: Tar) -> Iterator[tuple[Path, BinaryIO]]:
    path = index_path(tar)
    try:
        with opened(path, "an index") as stream:
            yield path, stream
    except FileNotFoundError:
        raise MissingIndex(f"{tar}: has no index {path}. Make it: {MAKE} {tar}") from None


def _read_header(path: Path, tar: Tar, stream: BinaryIO) -> tuple[Header, int]:
    """Return the first line, and the CRC32 of its other values."""
    line = stream.readline(MAX_LINE)
    try:
        fields = json.loads(line)
        if fields["format"] == FORMAT and fields["version"] != VERSION:
            version = escape(repr(fields["version"]))
            raise UserError(
                f"{path} has version {version}; "
                f"this mmtrain reads {VERSION}. Make it again: {MEND} {tar}"
            )
        header = Header.model_validate(fields)
        needed = sum(dtype.itemsize * rows for dtype, rows in header.shapes.values())
        size = os.fstat(stream.fileno()).st_size - len(line)
        if size != needed:
            raise ValueError(f"its tables have {size:,} bytes, but need {needed:,}")
        del fields["crc32"]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, tar, error) from None
    try:
        tar_bytes = tar.stat().st_size
    except OSError as error:
        raise UserError(f"{tar}: cannot be read ({error.strerror})") from error
    if tar_bytes != header.tar_bytes:
        raise UserError(
            f"{path}: is stale: made for a tar of {header.tar_bytes:,} bytes, "
            f"but {tar.name} has {tar_bytes:,}. "
            f"If the tar was copied incompletely, copy it again; if the tar is right: {MEND} {tar}"
        )
    return header, zlib.crc32(compact_json(fields))


def _damaged(path: Path, tar: Tar, error: Exception) -> UserError:
    seen = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        seen = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return UserError(
        f"{path}: is damaged ({escape(seen)}). "
        f"Restore a copy of it or, if the tar is sound, run: {MEND} {tar}"
    )


def _check(header: Header, tables: Tables) -> None:
    """Raise ValueError for tables that cannot be: a made-up index has a right checksum."""
    samples = tables["samples"]
    members = tables["members"]
    for name in ("keys", "members", "images"):
        if samples[name].sum() != len(tables[name]):
            raise ValueError(f"{name}: samples do not add up to {len(tables[name]):,}")
    for name in ("keys", "members"):
        if not samples[name].all():
            raise ValueError(f"{name}: a sample has none")
    if tables["images"].view("<i4").min(initial=0) < 0:
        raise ValueError("images: a width or height is below 0")
    # in this order, as differences of what is not signed are large
    room = header.tar_bytes - members["offset"]
    if (members["offset"] > header.tar_bytes).any() or (members["size"] > room).any():
        raise ValueError(f"members: one leads beyond the {header.tar_bytes:,} bytes of the tar")

    # Each text is whole UTF-8, and can be printed.
    keys = tables["keys"]
    starts = np.cumsum(samples["keys"]) - samples["keys"]
    str(keys.data, "utf-8")
    if _control_characters(keys) or ((keys[starts] & 0xC0) == 0x80).any():
        raise ValueError("keys: hold a control character, or a part of one")
    ends = _control_characters(tables["suffixes"])
    if ends > len(members):
        raise ValueError("suffixes: are more than members, or hold a control character")
    suffixes = suffix_texts(tables)
    if ends != len(suffixes) or (members["suffix"] >= len(suffixes)).any():
        raise ValueError("suffixes: hold a control character, or too few texts")

    # Each image has a size, unless every reading has found a fault in its sample.
    is_picture = np.array([image_number(suffix) is not None for suffix in suffixes], bool)
    pictures = sums_of(is_picture[members["suffix"]], samples["members"])
    unsized = set(np.flatnonzero(pictures != samples["images"]).tolist())
    names = header.readings + header.texts
    if len(set(names)) < len(names):
        raise ValueError("readings, texts: one is named twice")
    places: defaultdict[str, set[int]] = defaultdict(set)
    for name, place, *_ in _fault_rows(tables):
        if name not in names or place in places[name] or place >= len(samples):
            raise ValueError(f"faults: {name!r} is not in the first line, or {place} no sample's")
        places[name].add(place)
    for reading in header.readings:
        if unsized - places[reading]:
            place = min(unsized - places[reading])
            raise ValueError(f"images: sample {place} has other numbers of images and sizes")


def _control_characters(text: ndarray) -> int:
    # One after the other: each makes an array of the text's size.
    return np.count_nonzero(text < 32) + np.count_nonzero(text == 127)
