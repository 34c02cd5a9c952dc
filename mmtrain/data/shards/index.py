"""The index beside a shard: where every member lies, its checksum, and how long each sample's text is.

shard-000000.tar --scan, tokenizer--> ShardIndex --write_index--> shard-000000.tar.index --read_index--> ShardIndex

Two lines of ASCII. The first is a JSON object: format, version, tar_bytes, samples, texts (of each fingerprint how many
samples can be trained on), bytes (of the second line) and crc32 (of the first line without it, then of the second). The
second is the content, JSON in columns; flat ones run over all members, or images, of one sample after the other:

    {"keys": [...], "members": {"counts": [of each sample], "suffix": [...], "offset": [...], "size": [...], "crc32":
     [...]}, "images": {"counts": [...], "width": [...], "height": [...], "sideways": [[place, image], ...]},
     "faults": {reading: [[place, reason, detail], ...]}, "texts": {fingerprint: {"tokens": [...], "faults": [...]}}}

A place is a sample's number in its shard, from 0. Sizes are those after turning by EXIF; `sideways` lists the images of
which that exchanges width and height. Faults whatever the tokenizer are by the format in which samples were read
(SampleFormat.reading: "llava", "caption", ...), those of a sample's files in each of them. The bytes are a function of
the content. Earlier versions: 2 has in its first line the fingerprints alone, and its images are members whose names
end in jpg, jpeg, png or webp; 1 besides has sizes as stored, no `sideways`, and a list of faults, LLaVA's.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import BaseModel, Field, InstanceOf, Strict, ValidationError

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import compact_json
from mmtrain.base.printing import harmless
from mmtrain.data.samples.formats import LLAVA, TEXT_SUFFIXES, text_suffix
from mmtrain.data.samples.records import MAX_IMAGE_BYTES, MAX_RECORD_BYTES, REASONS, Rejected
from mmtrain.data.samples.sample import Sample, image_number
from mmtrain.data.shards.index_file import MEND, read_lines, write_lines
from mmtrain.data.shards.retry import RETRY_SECONDS, read_again

FORMAT = "mmtrain shard index"
VERSION = 3
OUTDATED = 0  # stands for the version of one that must be made again: members of its tar are images only now
_IMAGES_BEFORE_3 = ("jpg", "jpeg", "png", "webp")

UNKNOWN_SIZE = (0, 0, False)  # of an image whose header does not tell: width, height, whether it lies sideways

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
        except Rejected as error:
            self.reject(error)

    def reject(self, error: Rejected) -> None:
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
    sideways: list[tuple[int, int]] | None = field(default_factory=list)  # (place, image); None: not known, version 1
    is_outdated: bool = False  # members are images that were none when it was written: its images and faults are wrong

    def add(self, key: str, members: Iterable[Member], images: Sequence[tuple[int, int, bool]]) -> None:
        """Append a sample; `images`: what `records.image_size` says of each, or UNKNOWN_SIZE."""
        self.sideways += [(len(self.keys), number) for number, (*_, lies) in enumerate(images) if lies]
        self.keys.append(key)
        self.members.append(tuple(members))
        self.image_sizes.append(tuple((width, height) for width, height, _ in images))


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
    sideways: np.ndarray | None  # (N, 2) int64 place and image, as in ShardIndex
    faults: dict[str, Faults]
    texts: dict[str, TextLengths]
    is_outdated: bool


def read_columns(tar: Path, retry_seconds: float = RETRY_SECONDS) -> IndexColumns:
    """The index of a shard, as arrays; reads that fail for a reason that may pass are tried again for `retry_seconds`.

    Raises MissingIndex, and UserError for one that is damaged, that another version wrote, or that is stale: of a tar
    of another size than this one.
    """
    return _parsed(tar, *_read(tar, retry_seconds))


def _parsed(tar: Path, path: Path, header: _Header, content: bytes) -> IndexColumns:
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
        sideways=None if columns.sideways is None else list(map(tuple, columns.sideways.tolist())),
        is_outdated=columns.is_outdated,
    )


def indexed_texts(tar: Path, retry_seconds: float = RETRY_SECONDS) -> tuple[int, dict[str, int]]:
    """Version of a shard's index, or OUTDATED, and how many samples can be trained on, by text fingerprint.

    Its bytes are checked, but of this version's one line only is parsed. Raises what `read_columns` raises.
    """
    path, header, content = _read(tar, retry_seconds)
    if header.version == VERSION:
        return VERSION, header.texts
    columns = _parsed(tar, path, header, content)
    return OUTDATED if columns.is_outdated else header.version, _usable(columns.texts)


def write_index(tar: Path, index: ShardIndex) -> None:
    """Write a shard's index, which has its name only when it is complete; raises UserError if the disk refuses it."""
    assert index.sideways is not None and not index.is_outdated, "of an earlier version"
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
        if header["format"] != FORMAT or header["version"] not in _KINDS:
            raise UserError(
                f"{path}: {header['format']}, version {header['version']}, is no {FORMAT} of version 1 to {VERSION}; "
                f"another release of mmtrain wrote it, or it is damaged. Make it again: {MEND} {tar}"
            )
        crc32 = header.pop("crc32")
        whole = rest[:-1]
        if rest[-1:] != b"\n" or len(whole) != header["bytes"] or _crc32(header, whole) != crc32:
            raise _corrupt(path, tar, "its checksum does not fit its bytes")
        if first != compact_json({**header, "crc32": crc32}):
            raise _corrupt(path, tar, "its first line is not as it was written")
        checked = _of_kind(_KINDS[header["version"]][0], header)
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
            "sideways": index.sideways,
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
    version: int
    tar_bytes: _Bytes
    samples: _Count
    texts: dict[str, int]


class _HeaderBefore3(_Header):
    texts: list[str]


class _Members(BaseModel, strict=True):
    counts: list[Annotated[int, Field(ge=1, le=_MOST)]]
    suffix: list[_Name]
    offset: list[_Bytes]
    size: list[_Bytes]
    crc32: list[Annotated[int, Field(ge=0, lt=2**32)]]


class _Images1(BaseModel, strict=True):
    counts: list[_Count]
    width: list[_Count]
    height: list[_Count]


class _Images2(_Images1):
    sideways: list[Annotated[tuple[_Count, _Count], Strict(False)]]


class _Texts(BaseModel, strict=True):
    tokens: list[_Count]
    faults: list[_FaultRow]


class _Content1(BaseModel, strict=True):
    keys: list[_Name]
    members: _Members
    images: _Images1
    faults: list[_FaultRow]
    texts: dict[str, _Texts]


class _Content(_Content1):
    images: _Images2
    faults: Annotated[dict[_Name, list[_FaultRow]], Field(min_length=1)]


_KINDS = {1: (_HeaderBefore3, _Content1), 2: (_HeaderBefore3, _Content), VERSION: (_Header, _Content)}


def _of_kind(kind: type[Checked], value: object) -> Checked:
    """The value as a model; raises ValueError naming the first field that is wrong, without showing what it holds."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(harmless(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from None


def _from_columns(header: _Header, value: object) -> IndexColumns:
    """The arrays of an index, checked: who makes one up gives it a right checksum. Raises ValueError naming a field."""
    content = _of_kind(_KINDS[header.version][1], value)
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
    faults = {LLAVA.reading: content.faults} if header.version == 1 else content.faults
    first_image = _firsts("images", images.counts, len(images.width))
    columns = IndexColumns(
        tar_bytes=header.tar_bytes,
        keys=content.keys,
        first_member=_firsts("members", members.counts, total),
        suffix=members.suffix,
        offset=np.array(members.offset, np.int64),
        size=np.array(members.size, np.int64),
        crc32=np.array(members.crc32, np.uint32),
        first_image=first_image,
        image_sizes=np.array([images.width, images.height], np.int64).T,
        sideways=None if header.version == 1 else _sideways(images.sideways, first_image),
        faults={reading: _faults(f"faults.{reading}", rows, samples) for reading, rows in faults.items()},
        texts={
            name: TextLengths(text.tokens, _faults(f"texts.{name}.faults", text.faults, samples))
            for name, text in texts.items()
        },
        is_outdated=header.version < VERSION and any(map(_is_image_only_now, set(members.suffix))),
    )
    if header.version == VERSION and header.texts != _usable(columns.texts):
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


def _sideways(rows: list[tuple[int, int]], first_image: np.ndarray) -> np.ndarray:
    counts = dict(enumerate(np.diff(first_image).tolist()))
    if any(image >= counts.get(place, 0) for place, image in rows) or sorted(set(rows)) != rows:
        raise ValueError("images.sideways: holds an image twice, or one of no sample")
    return np.array(rows, np.int64).reshape(-1, 2)


def _is_image_only_now(suffix: str) -> bool:
    return image_number(suffix) is not None and suffix.rpartition(".")[2] not in _IMAGES_BEFORE_3


def _faults(name: str, rows: list[_FaultRow], samples: int) -> Faults:
    faults = {place: (reason, detail) for place, reason, detail in rows}
    if len(faults) < len(rows) or not all(0 <= place < samples for place in faults):
        raise ValueError(f"{name}: holds a place twice, or one of no sample")
    return faults


def _refuse_large(columns: IndexColumns) -> None:
    """Raise ValueError for a member too large to be read into memory whose sample is not marked as unusable."""
    large = (columns.size > min(MAX_RECORD_BYTES, MAX_IMAGE_BYTES)) & (not columns.is_outdated)  # else it knew fewer
    for at in np.flatnonzero(large).tolist():
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
