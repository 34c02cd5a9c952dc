"""The index beside a shard: where every member lies, its checksum, and how long each sample's text is.

shard-000000.tar --scan, tokenizer--> ShardIndex --write_index--> shard-000000.tar.index --read_index--> ShardIndex

Two lines of ASCII. The first is a JSON object: format, version, tar_bytes, samples, texts (of each fingerprint how many
samples can be trained on), bytes (of the second line) and crc32 (of the first line without it, then of the second). The
second is the content, JSON in columns; flat ones run over all members, or images, of one sample after the other:

    {"keys": [...], "members": {"counts": [of each sample], "suffix": [...], "offset": [...], "size": [...], "crc32":
     [...]}, "images": {"counts": [...], "width": [...], "height": [...]},
     "faults": {reading: [[place, reason, detail], ...]}, "texts": {fingerprint: {"tokens": [...], "faults": [...]}}}

A place is a sample's number in its shard, from 0. Image sizes are those after turning by EXIF. Faults that do not
depend on the tokenizer are listed by the format in which samples were read (SampleFormat.reading: "llava", "caption",
...); each format lists those of a sample's files. The bytes are a function of the content.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, Field, InstanceOf, Strict, ValidationError

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json
from mmtrain.base.printing import escape
from mmtrain.data.samples.formats import TEXT_SUFFIXES, text_suffix
from mmtrain.data.samples.records import MAX_IMAGE_BYTES, MAX_RECORD_BYTES, REASONS, BadSample
from mmtrain.data.samples.sample import Sample, image_number
from mmtrain.data.shards.index_file import MEND, read_lines, write_lines
from mmtrain.data.shards.retry import RETRY_SECONDS, read_again

FORMAT = "mmtrain shard index"
VERSION = 1

UNKNOWN_SIZE = (0, 0)  # width and height of an image whose header does not tell

Checked = TypeVar("Checked", bound=BaseModel)
Faults = dict[int, tuple[str, str]]  # place -> a code of records.REASONS, detail


class Member(NamedTuple):
    """A file in a tar."""

    suffix: str  # what follows the key's dot, in lower case: "json", "0.jpg"
    offset: int  # of its content, in bytes
    size: int  # bytes
    crc32: int  # of its content


@dataclass
class TextLengths:
    """How long the samples of a shard are under one tokenizer and template."""

    tokens: list[int]  # of each sample, without image positions; 0 where the sample is unusable
    faults: Faults = field(default_factory=dict)  # samples that this template or tokenizer cannot hold

    def add(self, sample: Sample | None, count: Callable[[Sample], int]) -> None:
        """Append the length of the next sample, which may lack its images; None: it is unusable whatever the text."""
        try:
            self.tokens.append(0 if sample is None else count(sample))
        except BadSample as error:
            self.reject(error)

    def reject(self, error: BadSample) -> None:
        """Append a sample whose text cannot be held."""
        self.faults[len(self.tokens)] = (error.reason, error.detail)
        self.tokens.append(0)


@dataclass
class ShardIndex:
    """All that a run must know of a shard before it reads it."""

    tar_bytes: int
    keys: list[str]  # names up to the first dot after the last slash, as webdataset groups members
    members: list[tuple[Member, ...]]  # of each sample, in the tar's order
    image_sizes: list[tuple[tuple[int, int], ...]]  # (width, height) of a sample's images, 0 where not known
    faults: dict[str, Faults]  # by SampleFormat.reading, at least one; unusable whatever the tokenizer
    texts: dict[str, TextLengths] = field(default_factory=dict)  # by text_fingerprint

    def add(self, key: str, members: Iterable[Member], image_sizes: Iterable[tuple[int, int]]) -> None:
        """Append a sample."""
        self.keys.append(key)
        self.members.append(tuple(members))
        self.image_sizes.append(tuple(image_sizes))


@dataclass(eq=False)
class IndexColumns:
    """A ShardIndex as arrays over all members, or images, of one sample after the other."""

    tar_bytes: int
    keys: list[str]  # (samples,)
    first_member: np.ndarray  # (samples + 1,) int64: sample s has the members [first_member[s], first_member[s + 1])
    suffix: list[str]  # (members,), as the fields of Member
    offset: np.ndarray  # (members,) int64
    size: np.ndarray  # (members,) int64
    crc32: np.ndarray  # (members,) uint32
    first_image: np.ndarray  # (samples + 1,) int64
    image_sizes: np.ndarray  # (images, 2) int64 width and height
    faults: dict[str, Faults]
    texts: dict[str, TextLengths]


def read_columns(tar: Path, retry_seconds: float = RETRY_SECONDS) -> IndexColumns:
    """The index of a shard, as arrays; reads that fail for a reason that may pass are tried again for `retry_seconds`.

    Raises MissingIndex, and UserError for an index that is damaged, has another version, or was made for a tar of
    another size.
    """
    path, header, content = _read(tar, retry_seconds)
    try:
        return _from_columns(header, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, tar, str(error)) from None


def read_index(tar: Path) -> ShardIndex:
    """The index of a shard, sample by sample; raises what `read_columns` raises."""
    columns = read_columns(tar)
    fields = (columns.suffix, columns.offset.tolist(), columns.size.tolist(), columns.crc32.tolist())
    return ShardIndex(
        tar_bytes=columns.tar_bytes,
        keys=columns.keys,
        members=_split(list(map(Member._make, zip(*fields, strict=True))), columns.first_member),
        image_sizes=_split(list(map(tuple, columns.image_sizes.tolist())), columns.first_image),
        faults=columns.faults,
        texts=columns.texts,
    )


def indexed_texts(tar: Path, retry_seconds: float = RETRY_SECONDS) -> dict[str, int]:
    """How many samples of a shard can be trained on, by text fingerprint.

    The bytes of its index are checked, but its first line alone is parsed. Raises what `read_columns` raises.
    """
    _, header, _ = _read(tar, retry_seconds)
    return header.texts


def write_index(tar: Path, index: ShardIndex) -> None:
    """Write a shard's index, which has its name only when it is complete; raises UserError if the disk refuses it."""
    content = compact_json(_to_columns(index))
    header = {
        "format": FORMAT,
        "version": VERSION,
        "tar_bytes": index.tar_bytes,
        "samples": len(index.keys),
        "texts": _usable(index.texts),
        "bytes": len(content),
    }
    header["crc32"] = _crc32(header, content)
    write_lines(tar, compact_json(header) + b"\n" + content + b"\n")


def _read(tar: Path, retry_seconds: float) -> tuple[Path, _Header, bytes]:
    """File, header and content line of an index whose bytes are those that were written, for the tar that is there."""
    path, lines, tar_bytes = read_again(lambda: read_lines(tar), tar, retry_seconds)
    first, _, rest = lines.partition(b"\n")
    try:
        header = json.loads(first)
        if header["format"] == FORMAT and header["version"] != VERSION:
            version = escape(repr(header["version"]))
            raise UserError(f"{path} has version {version}, this mmtrain reads {VERSION}. Make it again: {MEND} {tar}")
        crc32 = header.pop("crc32")
        whole = rest[:-1]
        if rest[-1:] != b"\n" or len(whole) != header["bytes"] or _crc32(header, whole) != crc32:
            raise _corrupt(path, tar, "its checksum does not fit its bytes")
        if first != compact_json({**header, "crc32": crc32}):
            raise _corrupt(path, tar, "its first line is not as it was written")
        checked = _of_kind(_Header, header)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _corrupt(path, tar, f"{type(error).__name__}: {error}") from None
    if tar_bytes != checked.tar_bytes:
        raise UserError(
            f"{path}: is stale: made for a tar of {checked.tar_bytes:,} bytes, but {tar.name} has {tar_bytes:,}. If "
            f"the tar was copied incompletely, copy it again; if it is right as it is: {MEND} {tar}"
        )
    return path, checked, whole


def _corrupt(path: Path, tar: Path, seen: str) -> UserError:
    return UserError(f"{path}: is damaged ({seen}). If there is a copy, put it back; if the tar is sound: {MEND} {tar}")


def _crc32(header: dict, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(compact_json(header)))


def _usable(texts: dict[str, TextLengths]) -> dict[str, int]:
    """By fingerprint how many samples can be trained on: these have tokens, at least one that ends the answer."""
    return {name: sum(map(bool, text.tokens)) for name, text in sorted(texts.items())}


def _to_columns(index: ShardIndex) -> dict:
    per_sample = (index.members, index.image_sizes, *(text.tokens for text in index.texts.values()))
    assert {len(index.keys)} == set(map(len, (index.keys, *per_sample))), "not one entry a sample"
    members = [member for sample in index.members for member in sample]
    widths, heights = ([size[axis] for sample in index.image_sizes for size in sample] for axis in (0, 1))
    columns = zip(*members, strict=True) if members else [()] * 4
    return {
        "keys": index.keys,
        "members": {"counts": list(map(len, index.members)), **dict(zip(Member._fields, columns, strict=True))},
        "images": {
            "counts": list(map(len, index.image_sizes)),
            "width": widths,
            "height": heights,
        },
        "faults": {reading: _fault_rows(faults) for reading, faults in sorted(index.faults.items())},
        "texts": {
            name: {"tokens": text.tokens, "faults": _fault_rows(text.faults)}
            for name, text in sorted(index.texts.items())
        },
    }


_MOST = 2**31 - 1  # pixels of an image's side, tokens of a text: sums of some, and products of two, fit into int64
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Bytes = Annotated[int, Field(ge=0, le=2**62)]
_Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]  # what archive.read_headers takes
_FaultRow = Annotated[tuple[int, Literal[tuple(REASONS)], InstanceOf[str]], Strict(False)]  # details hold any text


class _Header(BaseModel, strict=True):
    format: Literal["mmtrain shard index"]
    tar_bytes: _Bytes
    samples: _Count
    texts: dict[str, int]


class _Members(BaseModel, strict=True):
    counts: list[Annotated[int, Field(ge=1, le=_MOST)]]
    suffix: list[_Name]
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


def _of_kind(kind: type[Checked], value: object) -> Checked:
    """The value as a model; raises ValueError naming the first field that is wrong, without showing what it holds."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(escape(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from None


def _from_columns(header: _Header, value: object) -> IndexColumns:
    """The arrays of an index, checked: who makes one up gives it a right checksum. Raises ValueError naming a field."""
    content = _of_kind(_Content, value)
    members, images, texts = content.members, content.images, content.texts
    total, samples = len(members.suffix), header.samples
    lengths = {"keys": (content.keys, samples), "members.counts": (members.counts, samples)}
    lengths |= {f"members.{name}": (getattr(members, name), total) for name in ("offset", "size", "crc32")}
    lengths |= {"images.counts": (images.counts, samples), "images.height": (images.height, len(images.width))}
    lengths |= {f"texts.{name}.tokens": (text.tokens, samples) for name, text in texts.items()}
    for name, (column, needed) in lengths.items():
        if len(column) != needed:
            raise ValueError(f"{name}: has {len(column):,} elements, {needed:,} are needed")
    if sorted(header.texts) != sorted(texts):
        raise ValueError("texts: are others than the first line says")
    columns = IndexColumns(
        tar_bytes=header.tar_bytes,
        keys=content.keys,
        first_member=_firsts("members", members.counts, total),
        suffix=members.suffix,
        offset=np.array(members.offset, np.int64),
        size=np.array(members.size, np.int64),
        crc32=np.array(members.crc32, np.uint32),
        first_image=_firsts("images", images.counts, len(images.width)),
        image_sizes=np.array([images.width, images.height], np.int64).T,
        faults={reading: _faults(f"faults.{reading}", rows, samples) for reading, rows in content.faults.items()},
        texts={
            name: TextLengths(text.tokens, _faults(f"texts.{name}.faults", text.faults, samples))
            for name, text in texts.items()
        },
    )
    if header.texts != _usable(columns.texts):
        raise ValueError("texts: the first line counts other samples")
    for name, last in (("size", columns.size), ("offset", columns.offset + columns.size)):
        if (last > columns.tar_bytes).any():
            raise ValueError(f"members.{name}: ends at byte {last.max():,} of a tar of {columns.tar_bytes:,} bytes")
    _refuse_large(columns)
    return columns


def _firsts(name: str, counts: list[int], total: int) -> np.ndarray:
    firsts = np.cumsum([0, *counts])
    if firsts[-1] != total:
        raise ValueError(f"{name}.counts: add up to {firsts[-1]:,}, but there are {total:,}")
    return firsts


def _faults(name: str, rows: list[_FaultRow], samples: int) -> Faults:
    faults = {place: (reason, detail) for place, reason, detail in rows}
    if len(faults) < len(rows) or not all(0 <= place < samples for place in faults):
        raise ValueError(f"{name}: holds a place twice, or one of no sample")
    return faults


def _refuse_large(columns: IndexColumns) -> None:
    """Raise ValueError for a member too large to be read into memory whose sample is not marked as unusable."""
    for at in np.flatnonzero(columns.size > min(MAX_RECORD_BYTES, MAX_IMAGE_BYTES)).tolist():
        suffix, size = columns.suffix[at], int(columns.size[at])
        is_text = suffix in TEXT_SUFFIXES
        limit = MAX_RECORD_BYTES if is_text else MAX_IMAGE_BYTES if image_number(suffix) is not None else size
        place = int(np.searchsorted(columns.first_member, at, side="right")) - 1
        own = columns.suffix[columns.first_member[place] : columns.first_member[place + 1]]
        for reading, faults in columns.faults.items() if size > limit else ():
            is_read = not is_text or suffix == text_suffix(reading, own)
            if is_read and place not in faults:
                raise ValueError(f"members.size: {suffix} has {size:,} bytes; at most {limit:,} can be trained on")


def _split(values: list, firsts: np.ndarray) -> list[tuple]:
    return [tuple(values[begin:end]) for begin, end in itertools.pairwise(firsts.tolist())]


def _fault_rows(faults: Faults) -> list[tuple]:
    return [(place, *faults[place]) for place in sorted(faults)]
