"""The index of a shard: where every member lies, its checksum, and how long each sample's text is.

shard-000000.tar --scan, tokenizer--> ShardIndex
    --write_index--> shard-000000.tar.index --read_index--> ShardIndex

The file has two lines of ASCII. The first is a JSON object: format, version, tar_bytes, samples,
texts (usable samples by fingerprint), bytes (of the second line) and crc32 (of the first line
without it, then of the second). The second is the content, JSON in columns. Flat columns run over
all members, or images, of one sample after the other:

    {"keys": [...], "members": {"counts": [per sample], "suffix": [...], "offset": [...], "size":
     [...], "crc32": [...]}, "images": {"counts": [...], "width": [...], "height": [...]}, "faults":
     {reading: [[place, reason, detail], ...]}, "texts": {fingerprint: {"tokens": [...], "faults":
     [...]}}}

A place is a sample's number in its shard, from 0. Image sizes are those after turning by EXIF.
Faults that do not depend on the tokenizer are listed by the format in which samples were read
(SampleFormat.reading).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, Field, InstanceOf, Strict, ValidationError

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json
from mmtrain.base.printing import escape
from mmtrain.base.small_files import read_limited
from mmtrain.data.samples.records import REASONS, BadSample
from mmtrain.data.samples.sample import Sample, Sizes, image_number

FORMAT = "mmtrain shard index"
# 3: pictures that training refuses are faults, Alpaca and query/response rows are samples
VERSION = 3
MAKE = "mmtrain index CONFIG"
MEND = "mmtrain index CONFIG --rebuild"

UNKNOWN_SIZE = (0, 0)  # width and height of an image whose header does not tell
MAX_INDEX_BYTES = 1 << 30  # about 200 bytes a sample

Model = TypeVar("Model", bound=BaseModel)
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

    @property
    def image_counts(self) -> np.ndarray:
        """(samples,) int64 images of each sample."""
        return np.array(list(map(len, self.image_sizes)), np.int64)

    @property
    def flat_image_sizes(self) -> np.ndarray:
        """(images, 2) int64 width and height, one sample after the other."""
        sizes = list(chain.from_iterable(self.image_sizes))
        return np.array(sizes, np.int64).reshape(-1, 2)


def index_path(tar: Path) -> Path:
    """Return the path of a shard's index.

    It lies beside the tar, or in the cache if it is there or that folder cannot be written.
    """
    cached = _in_cache(tar)
    beside = _beside(tar)
    if os.access(cached, os.F_OK) or not (beside.is_file() or os.access(beside.parent, os.W_OK)):
        return cached
    return beside


def _beside(tar: Path) -> Path:
    return tar.with_name(tar.name + ".index")


def _in_cache(tar: Path) -> Path:
    name = hashlib.sha256(os.fsencode(tar.absolute())).hexdigest()[:24]
    return cache_folder("index") / f"{name}.index"


def read_index(tar: Path) -> ShardIndex:
    """Read the index of a shard.

    Raises MissingIndex, or UserError for one that is damaged or of another tar.
    """
    path, header, content = _read(tar)
    try:
        return _parse(header, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, tar, str(error)) from None


def indexed_texts(tar: Path) -> dict[str, int]:
    """Return the number of samples that can be trained on, by text fingerprint.

    Raises what `read_index` raises.
    """
    _, header, _ = _read(tar)
    return header.texts


def write_index(tar: Path, index: ShardIndex) -> None:
    """Write a shard's index, which has its name only when it is complete.

    Raises UserError if the disk refuses it.
    """
    content = compact_json(_columns(index))
    header = {
        "format": FORMAT,
        "version": VERSION,
        "tar_bytes": index.tar_bytes,
        "samples": len(index.keys),
        "texts": _usable(index.texts),
        "bytes": len(content),
    }
    header["crc32"] = _crc32(header, content)
    lines = compact_json(header) + b"\n" + content + b"\n"
    beside = _beside(tar)
    cached = _in_cache(tar)
    for path in (beside, cached):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lines)
            break
        except OSError as error:
            if path is cached or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise UserError(
                    f"{path}: cannot be written ({error.strerror}). "
                    "Free space, or make the folder writable"
                ) from error
    # a home may be closed to its user: HOME=/root in a container
    if path is beside and os.access(cached, os.F_OK):
        cached.unlink(missing_ok=True)  # it would hide the new one


def _read(tar: Path) -> tuple[Path, _Header, bytes]:
    """Return path, header and content line of a sound index of this tar.

    Its checksum is right, and the tar has the right size.
    """
    path = index_path(tar)
    try:
        first, _, rest = read_limited(path, MAX_INDEX_BYTES, "an index").partition(b"\n")
    except FileNotFoundError:
        raise MissingIndex(f"{tar}: has no index {path}. Make it: {MAKE} {tar}") from None
    try:
        header = json.loads(first)
        if header["format"] == FORMAT and header["version"] != VERSION:
            version = escape(repr(header["version"]))
            raise UserError(
                f"{path} has version {version}; "
                f"this mmtrain reads {VERSION}. Make it again: {MEND} {tar}"
            )
        crc32 = header.pop("crc32")
        content = rest[:-1]
        is_whole = rest[-1:] == b"\n" and len(content) == header["bytes"]
        if not is_whole or _crc32(header, content) != crc32:
            raise _damaged(path, tar, "its checksum does not match its bytes")
        checked = _checked(_Header, header)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, tar, f"{type(error).__name__}: {error}") from None
    try:
        tar_bytes = tar.stat().st_size
    except OSError as error:
        raise UserError(f"{tar}: cannot be read ({error.strerror})") from error
    if tar_bytes != checked.tar_bytes:
        raise UserError(
            f"{path}: is stale: made for a tar of {checked.tar_bytes:,} bytes, "
            f"but {tar.name} has {tar_bytes:,}. "
            f"If the tar was copied incompletely, copy it again; if the tar is right: {MEND} {tar}"
        )
    return path, checked, content


def _damaged(path: Path, tar: Path, seen: str) -> UserError:
    return UserError(
        f"{path}: is damaged ({seen}). "
        f"Restore a copy of it or, if the tar is sound, run: {MEND} {tar}"
    )


def _crc32(header: dict, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(compact_json(header)))


def _usable(texts: dict[str, TextLengths]) -> dict[str, int]:
    """Count the samples that can be trained on, by fingerprint: those with tokens."""
    return {name: sum(map(bool, text.tokens)) for name, text in sorted(texts.items())}


def _columns(index: ShardIndex) -> dict:
    members = {"counts": list(map(len, index.members))}
    for name in Member._fields:
        members[name] = list(map(attrgetter(name), chain.from_iterable(index.members)))
    width, height = index.flat_image_sizes.T.tolist()
    faults = {}
    for reading, of_reading in sorted(index.faults.items()):
        faults[reading] = _fault_rows(of_reading)
    texts = {}
    for name, text in sorted(index.texts.items()):
        texts[name] = {"tokens": text.tokens, "faults": _fault_rows(text.faults)}
    return {
        "keys": index.keys,
        "members": members,
        "images": {"counts": index.image_counts.tolist(), "width": width, "height": height},
        "faults": faults,
        "texts": texts,
    }


def _fault_rows(faults: Faults) -> list[tuple]:
    return [(place, *faults[place]) for place in sorted(faults)]


# Pixels of an image's side, tokens of a text: sums of some, and products of two, fit into int64.
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Bytes = Annotated[int, Field(ge=0, le=2**62)]
_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]  # what archive.read_headers takes
# details hold any text
_FaultRow = Annotated[tuple[int, Literal[tuple(REASONS)], InstanceOf[str]], Strict(False)]


class _Header(BaseModel, strict=True):
    format: Literal["mmtrain shard index"]
    tar_bytes: _Bytes
    samples: _Count
    texts: dict[str, int]


class _Members(BaseModel, strict=True):
    counts: list[Annotated[int, Field(ge=1, lt=2**31)]]
    suffix: list[Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]]  # empty for the file "KEY."
    offset: list[_Bytes]
    size: list[_Bytes]
    crc32: list[Annotated[int, Field(ge=0, lt=2**32)]]


class _Images(BaseModel, strict=True):
    counts: list[_Count]
    width: list[_Count]
    height: list[_Count]


class _Texts(BaseModel, strict=True):
    tokens: list[_Count]
    faults: list[_FaultRow]


class _Content(BaseModel, strict=True):
    keys: list[_Name]
    members: _Members
    images: _Images
    faults: Annotated[dict[_Name, list[_FaultRow]], Field(min_length=1)]
    texts: dict[str, _Texts]


def _checked(model: type[Model], value: object) -> Model:
    """Return the value as a model.

    Raises ValueError naming the first wrong field, without showing its content.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(escape(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from None


def _parse(header: _Header, value: object) -> ShardIndex:
    """Build an index.

    Raises ValueError for fields that do not fit each other: a made-up index has a right checksum.
    """
    content = _checked(_Content, value)
    samples = header.samples
    members = content.members
    images = content.images
    texts = content.texts
    columns = {
        "keys": content.keys,
        "members.counts": members.counts,
        "images.counts": images.counts,
    }
    for name, text in texts.items():
        columns[f"texts.{name}.tokens"] = text.tokens
    for name, column in columns.items():
        if len(column) != samples:
            raise ValueError(f"{name}: has {len(column):,} elements, but needs {samples:,}")

    index = ShardIndex(
        tar_bytes=header.tar_bytes,
        keys=content.keys,
        members=[
            tuple(map(Member._make, rows)) for rows in _split("members", members, Member._fields)
        ],
        image_sizes=_split("images", images, ("width", "height")),
        faults={},
    )
    for reading, rows in content.faults.items():
        index.faults[reading] = _faults(f"faults.{reading}", rows, samples)
    for name, text in texts.items():
        faults = _faults(f"texts.{name}.faults", text.faults, samples)
        index.texts[name] = TextLengths(text.tokens, faults)
    if header.texts != _usable(index.texts):
        raise ValueError("texts: the first line gives another number of samples")
    end = max(map(sum, zip(members.offset, members.size, strict=True)), default=0)
    if end > index.tar_bytes:
        raise ValueError(
            f"members.offset and size: end at byte {end:,} of a tar of {index.tar_bytes:,} bytes"
        )

    pictures = {suffix for suffix in set(members.suffix) if image_number(suffix) is not None}
    for place, sample in enumerate(index.members):
        files = sum(member.suffix in pictures for member in sample)
        sizes = len(index.image_sizes[place])
        if files != sizes and not all(place in faults for faults in index.faults.values()):
            raise ValueError(
                f"images.counts: {escape(index.keys[place])} has {files} images and {sizes} sizes"
            )
    return index


def _split(name: str, content: _Members | _Images, fields: Sequence[str]) -> list[tuple]:
    """Cut flat columns into the rows of each sample."""
    columns = [getattr(content, field) for field in fields]
    if {sum(content.counts)} != set(map(len, columns)):
        raise ValueError(
            f"{name}: {', '.join(fields)} do not have as many elements as the counts add up to"
        )
    rows = zip(*columns, strict=True)
    return [tuple(islice(rows, count)) for count in content.counts]


def _faults(name: str, rows: list[_FaultRow], samples: int) -> Faults:
    faults = {place: (reason, detail) for place, reason, detail in rows}
    if len(faults) < len(rows) or not all(0 <= place < samples for place in faults):
        raise ValueError(f"{name}: holds a place twice, or a place without a sample")
    return faults
