"""All samples of a run's data sets, as planning needs them, and random access to each.

index files --Catalog--> per data set lengths (samples,), tiles (samples,): what `order` plans with
global sample number --Catalog.find--> shard, members at their offsets
                     --Reader: pread, CRC32 as it was indexed--> Sample, or QuarantinedSample: why it is not used

A sample's length is its text tokens (from the index, for this tokenizer and template) and its images' tokens (known
only here, where the vision encoder is).

What is wrong with a read decides what happens: a fault of the content (damaged bytes) is that sample's alone; a read
that fails is tried again, then ends the run; a shard that is not the one that was indexed ends the run at once.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmtrain.base.errors import UserError
from mmtrain.config.schema import DataSection, RunConfig, SampleFormatName, Shards
from mmtrain.data.samples.formats import LLAVA, SampleFormat, format_argument, text_suffix
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import QuarantinedSample, Sample, image_number, read_sample, without_images
from mmtrain.data.shards.detection import sample_format
from mmtrain.data.shards.index import Member, read_columns
from mmtrain.data.shards.index_file import MEND
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.shards.retry import RETRY_SECONDS, read_again
from mmtrain.data.shards.shard_list import expand_shards
from mmtrain.data.stream.image_totals import image_totals
from mmtrain.data.stream.order import HELD_OUT, UNUSABLE, Capacity, SampleSet
from mmtrain.models.facts.connectors import image_layout
from mmtrain.models.facts.model_files import model_folder
from mmtrain.models.facts.tokenizer_files import text_fingerprint
from mmtrain.models.layouts.layout import ImageLayout

OPEN_FILES = 64  # shards kept open, those read last


@dataclass(frozen=True)
class DataSet:
    """Shards that are drawn from together."""

    shards: tuple[Path, ...]
    weight: float = 1.0
    name: str = ""  # where there are several
    form: SampleFormat = LLAVA


@dataclass(frozen=True)
class Place:
    """Where a sample is stored."""

    key: str  # with its data set's name where there are several
    shard: Path
    name: str  # of its members, without their suffixes
    members: tuple[Member, ...]
    form: SampleFormat
    sizes: tuple[tuple[int, int], ...]  # (width, height) of its images, where the layout asks for them


class _Stored(NamedTuple):
    """What reading takes of a shard's index, in arrays, which forked workers share: no Python object a sample."""

    names: np.ndarray  # (samples,) bytes
    first_member: np.ndarray  # (samples + 1,) int32
    suffix: np.ndarray  # (members,) int32, a number of the catalog's suffixes
    offset: np.ndarray  # (members,) int64
    size: np.ndarray  # (members,) int64
    crc32: np.ndarray  # (members,) uint32
    first_image: np.ndarray  # (samples + 1,) int32
    image_sizes: np.ndarray  # (images, 2) int32 width and height; none where the layout does not ask for them


def data_sets(data: DataSection) -> list[DataSet]:
    """The data sets that a configuration names, their shards listed; raises what `_data_set` raises."""
    if data.sets is None:
        return [_data_set(data, data.shards, "data.shards", data.format)]
    return [
        _data_set(data, one.shards, f"data.sets.{number}.shards", one.format or data.format, one.weight, one.name)
        for number, one in enumerate(data.sets)
    ]


def evaluated_set(config: RunConfig) -> DataSet | None:
    """The data set of `eval.shards`, where there is one; raises what `_data_set` raises."""
    if config.eval.shards is None:
        return None
    return _data_set(config.data, config.eval.shards, "eval.shards", config.eval.format)


def _data_set(
    data: DataSection, shards: Shards, key: str, form: SampleFormatName, weight: float = 1.0, name: str = ""
) -> DataSet:
    """Raises what `expand_shards` and `sample_format` raise."""
    tars = expand_shards(shards, key, data.allow_pipe)
    found = sample_format(form, data.caption_key, data.caption_prompt, tars, key, data.io_retry_seconds)
    return DataSet(tars, weight, name, found)


def shards_by_form(sets: Iterable[DataSet]) -> dict[SampleFormat, list[Path]]:
    """The shards of data sets by the format of their samples."""
    found: dict[SampleFormat, list[Path]] = {}
    for one in sets:
        found.setdefault(one.form, []).extend(one.shards)
    return found


class Catalog:
    """Every sample of some data sets.

    The indexes are read once, so what becomes of their files later changes nothing. Price: 120 bytes a sample with
    one image; 558,128 samples in 559 shards take a second.
    """

    def __init__(
        self,
        sets: Sequence[DataSet],
        text_fingerprints: Sequence[str],
        layout: ImageLayout,
        max_image_pixels: int,
        held_out_fraction: float | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Read the index of every shard, as `read_columns` does; `text_fingerprints`, of each set: of which lengths.

        Raises UserError for an index that is missing, damaged, stale, or without these lengths.
        """
        self.layout = layout
        self.max_image_pixels = max_image_pixels
        self.held_out_fraction = held_out_fraction
        self.retry_seconds = retry_seconds
        self.shards = tuple(shard for one in sets for shard in one.shards)
        self.names = tuple(one.name for one in sets for _ in one.shards)  # of each shard's data set
        self.forms = tuple(one.form for one in sets for _ in one.shards)
        self.firsts = [0]  # number of each shard's first sample
        self.held_out: list[int] = []
        """Numbers of the samples that are kept for evaluation."""
        self.faults: dict[int, QuarantinedSample] = {}
        """By number, of the samples that can never be trained on: these are drawn, and never planned."""
        self.sample_sets: list[SampleSet] = []
        self._stored: list[_Stored] = []
        self._suffixes: dict[str, int] = {}
        digest = hashlib.sha256(f"{' '.join(dict.fromkeys(text_fingerprints))} {layout.numbers}".encode())
        lengths = []
        for one, text in zip(sets, text_fingerprints, strict=True):
            read = (self._read_shard(one, text, shard, digest) for shard in one.shards)
            lengths_of_shards, planned, tiles = zip(*read, strict=True)
            sizes = np.array(list(map(len, lengths_of_shards)))
            self.sample_sets.append(SampleSet(one.weight, sizes, np.concatenate(planned), np.concatenate(tiles)))
            lengths += lengths_of_shards
        self.lengths = np.concatenate(lengths)
        """(samples,) int32 tokens of each sample, those of its images included, held-out ones too; or UNUSABLE."""
        self.fingerprint = digest.hexdigest()
        """Of everything that decides which samples there are and how they are planned; the shards' bytes included."""
        self._suffix_texts = list(self._suffixes)

    def _read_shard(
        self, one: DataSet, text: str, shard: Path, digest: hashlib._Hash
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next shard's lengths, the same or HELD_OUT, and tiles, (samples,) int32 each; notes what else is known.

        That is where they are stored, faults, held-out samples and the fingerprint.
        """
        index, first = read_columns(shard, self.retry_seconds), self.firsts[-1]
        texts, unreadable = index.texts.get(text), index.faults.get(one.form.reading)
        if texts is None or unreadable is None:
            raise UserError(
                f"{shard}: its index has no token lengths for this format, tokenizer and template; make them: "
                f"mmtrain index {shard} --tokenizer PATH --template NAME{self.layout.index_options}"
                f"{format_argument(one.form)}"
            )
        images = np.diff(index.first_image).astype(np.int32)
        positions, tiles, unfit = image_totals(index, self.layout)
        exact = np.array(texts.tokens, np.int64) + positions
        lengths = np.minimum(exact, np.iinfo(np.int32).max).astype(np.int32)  # what no pack holds stays what none does
        faults = {**unfit, **texts.faults, **unreadable}
        if not (self.layout.takes_images or self.layout.strips):
            for place in np.flatnonzero(images).tolist():
                faults.setdefault(place, ("no_encoder", f"{images[place]} images"))
        too_large = np.flatnonzero(index.image_sizes.prod(axis=1) > self.max_image_pixels)
        for image in too_large if self.layout.takes_images else ():
            width, height = index.image_sizes[image]
            detail = f"{width} x {height}, where data.max_image_pixels is {self.max_image_pixels:,}"
            place = int(np.searchsorted(index.first_image, image, side="right")) - 1
            faults.setdefault(place, ("too_many_pixels", detail))
        for place in sorted(faults):
            lengths[place] = UNUSABLE
            offset = int(index.offset[index.first_member[place]])
            self.faults[first + place] = QuarantinedSample(
                _full_key(one.name, index.keys[place]), str(shard), offset, *faults[place]
            )
        planned = lengths.copy()
        if self.held_out_fraction is not None:
            chosen = [is_held_out(key, self.held_out_fraction) for key in index.keys]
            held_out = np.flatnonzero(np.array(chosen, bool) & (lengths != UNUSABLE))
            planned[held_out] = HELD_OUT
            self.held_out += (first + held_out).tolist()
        names = np.array([key.encode() for key in index.keys], np.bytes_)
        suffix = [self._suffixes.setdefault(suffix, len(self._suffixes)) for suffix in index.suffix]
        firsts, suffixes = index.first_member.astype(np.int32), np.array(suffix, np.int32)
        seen = index.image_sizes if self.layout.is_sized else index.image_sizes[:0]
        first_images = index.first_image if self.layout.is_sized else np.zeros_like(index.first_image)
        pictures = first_images.astype(np.int32), seen.astype(np.int32)
        self._stored.append(_Stored(names, firsts, suffixes, index.offset, index.size, index.crc32, *pictures))
        self.firsts.append(first + len(lengths))
        digest.update(b"\n".join(names) + index.crc32.tobytes() + lengths.tobytes() + planned.tobytes())
        return lengths, planned, tiles

    def __len__(self) -> int:
        return self.firsts[-1]

    def find(self, number: int) -> Place:
        """Where the sample of a global number is stored."""
        shard = bisect_right(self.firsts, number) - 1
        place, stored = number - self.firsts[shard], self._stored[shard]
        begin, end = stored.first_member[place : place + 2].tolist()
        columns = (column[begin:end].tolist() for column in (stored.suffix, stored.offset, stored.size, stored.crc32))
        members = tuple(Member(self._suffix_texts[suffix], *rest) for suffix, *rest in zip(*columns, strict=True))
        name = stored.names[place].decode()
        first, last = stored.first_image[place : place + 2].tolist()
        sizes = tuple(map(tuple, stored.image_sizes[first:last].tolist()))
        return Place(_full_key(self.names[shard], name), self.shards[shard], name, members, self.forms[shard], sizes)

    def repeated_keys(self) -> int:
        """Samples whose key an earlier one of their data set has. Price: a second for a million samples."""
        repeated = 0
        for name in dict.fromkeys(self.names):
            keys = np.concatenate([s.names for s, own in zip(self._stored, self.names, strict=True) if own == name])
            repeated += len(keys) - len(np.unique(keys))
        return repeated

    def refuse_overlong(self, capacity: Capacity) -> None:
        """Raise UserError for the first sample that does not fit into a pack."""
        tiles = np.concatenate([one.tiles for one in self.sample_sets])
        wrong = self.lengths > capacity.tokens
        if capacity.tiles is not None:
            wrong |= (self.lengths != UNUSABLE) & (tiles > capacity.tiles)
        if wrong.any():
            number = int(wrong.argmax())
            place = self.find(number)
            raise UserError(
                f"{place.shard}: sample {place.key}: {self.lengths[number]} tokens and {_tiles(tiles[number])} do "
                f"not fit into a pack of {capacity.tokens} tokens"
                + (f" and {_tiles(capacity.tiles)}" if capacity.tiles is not None else "")
                + f" ({int(wrong.sum()):,} samples in all do not); raise data.pack_length or data.max_tiles_per_pack, "
                "or set data.overlong=skip"
            )


def _tiles(count: int) -> str:
    return f"{count:,} tile{'' if count == 1 else 's'}"


def load_catalog(config: RunConfig, sets: Sequence[DataSet], held_out_fraction: float | None = None) -> Catalog:
    """The catalog of data sets for a run's tokenizer, template and encoder; indexes that are missing are made."""
    data, llm, layout = config.data, config.model.llm.path, image_layout(config)
    folder, seconds = model_folder(llm), data.io_retry_seconds
    # The launcher has made them; a rank that has to, without one, shares its cores with others.
    for form, shards in shards_by_form(sets).items():
        ensure_indexes(shards, llm, data.template, layout, form, workers=1, retry_seconds=seconds)
    texts = [text_fingerprint(folder, data.template, layout.texts, one.form.wording) for one in sets]
    return Catalog(sets, texts, layout, data.max_image_pixels, held_out_fraction, seconds)


def is_held_out(key: str, fraction: float) -> bool:
    """Whether a sample is in the share `fraction` that is kept for evaluation: a function of its key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _full_key(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


class Reader:
    """Reads samples by number; each process needs its own, but a forked copy is one."""

    def __init__(self, catalog: Catalog, retry_seconds: float) -> None:
        self.catalog = catalog
        self.retry_seconds = retry_seconds
        self._files: OrderedDict[Path, int] = OrderedDict()

    def read(self, number: int) -> Sample | QuarantinedSample:
        """The sample of a global number.

        Raises UserError for a shard that cannot be read for `retry_seconds`, and for one that its index is not of.
        """
        place = self.catalog.find(number)
        members: dict[str, bytes] = {}
        strips = self.catalog.layout.strips
        text = text_suffix(place.form.reading, [member.suffix for member in place.members])
        for member in place.members:
            is_image = image_number(member.suffix) is not None
            if is_image and strips:
                members[member.suffix] = b""
                continue
            if member.suffix != text and not is_image:
                continue  # no part of the sample, and of any size
            content = self._read(place.shard, member)
            if zlib.crc32(content) != member.crc32:
                self._refuse_stale(place, member)
                detail = f"{member.suffix}: {member.size:,} bytes whose CRC32 is not {member.crc32:08x}"
                return QuarantinedSample(place.key, str(place.shard), member.offset, "checksum", detail)
            members[member.suffix] = content
        offset = place.members[0].offset
        try:
            sample = replace(read_sample(place.key, str(place.shard), members, offset, place.form), sizes=place.sizes)
            return without_images(sample) if strips else sample
        except BadSample as error:
            return QuarantinedSample(place.key, str(place.shard), offset, error.reason, error.detail)

    def close(self) -> None:
        """Close the files that are open; the reader may be used again."""
        for shard in list(self._files):
            self._close(shard)

    __del__ = close  # descriptors are numbers, which nothing else closes

    def _read(self, shard: Path, member: Member) -> bytes:
        """A member's bytes, read again and again while the system fails to."""

        def read() -> bytes:
            try:
                content = self._pread(shard, member)
                if len(content) < member.size:
                    raise OSError(f"its {member.suffix} member at byte {member.offset:,} is cut off by the file's end")
            except OSError:
                self._close(shard)  # a file that came back, or another server's copy, has to be opened again
                raise
            return content

        return read_again(read, shard, self.retry_seconds, lambda error: True)

    def _pread(self, shard: Path, member: Member) -> bytes:
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                self._close(next(iter(self._files)))
        self._files.move_to_end(shard)
        content = os.pread(file, member.size, member.offset)
        while 0 < len(content) < member.size:  # a read may give less than there is, above 2 GiB always
            more = os.pread(file, member.size - len(content), member.offset + len(content))
            if not more:
                break
            content += more
        return content

    def _close(self, shard: Path) -> None:
        file = self._files.pop(shard, None)
        if file is not None:
            os.close(file)

    def _refuse_stale(self, place: Place, member: Member) -> None:
        """Raise UserError if the header before a damaged member is sound and speaks of another one."""
        name = f"{place.name}.{member.suffix}"
        header = Member("", member.offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE, 0)
        try:
            found = tarfile.TarInfo.frombuf(self._read(place.shard, header), tarfile.ENCODING, "surrogateescape")
        except tarfile.HeaderError:
            return  # damaged as well
        # Others are in a header of their own, and this one has a makeshift.
        plain = name.isascii() and len(name) <= tarfile.LENGTH_NAME
        if found.size != member.size or (plain and found.name.lower() != name.lower()):
            raise UserError(
                f"{place.shard}: at byte {member.offset:,} lies {found.name!r}, {found.size:,} bytes, where its index "
                f"has {name}, {member.size:,} bytes: the shard was replaced after it was indexed; index it again: "
                f"{MEND} {place.shard}"
            )
