"""All samples of a run's data sets, as planning needs them, and random access to each.

index files --Catalog--> per data set lengths (samples,), tiles (samples,): what `order` plans with
global sample number --Catalog.find--> shard, members at their offsets
    --Reader: pread, CRC32 as it was indexed--> Sample, or QuarantinedSample: why it is not used

A sample's length is its text tokens (from the index, for this tokenizer and template) and its
images' tokens (known only here, where the vision encoder is).

Damaged bytes cost their sample alone. A read that fails is tried again, since network storage
stalls and restarts; one that fails for too long ends the run.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from mmtrain.base.errors import UserError
from mmtrain.base.printing import counted
from mmtrain.config.schema import DataSection, RunConfig, SampleFormatName, Shards
from mmtrain.data.samples.formats import LLAVA, SampleFormat, text_suffix
from mmtrain.data.samples.records import (
    MAX_IMAGE_BYTES,
    MAX_RECORD_BYTES,
    BadSample,
    listed_reasons,
)
from mmtrain.data.samples.sample import (
    QuarantinedSample,
    Sample,
    Sizes,
    Tokenization,
    image_number,
    read_sample,
    without_images,
)
from mmtrain.data.shards.detection import sample_format
from mmtrain.data.shards.index import MAKE, Faults, Member, ShardIndex, checksum_detail, read_index
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.shards.shard_list import expand_shards
from mmtrain.data.stream.order import HELD_OUT, UNUSABLE, Capacity, SampleSet
from mmtrain.facts.models import models_of
from mmtrain.layouts.layout import ImageLayout, UnfitImage

OPEN_FILES = 64  # shards kept open, those read last
FIRST_PAUSE = 0.1  # seconds before a failed read is tried again; each pause is twice the one before
LONGEST_PAUSE = 10.0


class DataSet(NamedTuple):
    """Shards that are drawn from together."""

    shards: tuple[Path, ...]
    weight: float = 1.0
    name: str = ""  # where there are several
    form: SampleFormat = LLAVA


class Place(NamedTuple):
    """The stored parts of a sample, and their shard."""

    key: str  # with its data set's name where there are several
    shard: Path
    members: tuple[Member, ...]
    form: SampleFormat
    sizes: Sizes  # of its images, where the layout asks for them


class _Stored(NamedTuple):
    """A shard's index in arrays: forked workers share them, and no sample is an object."""

    names: ndarray  # (samples,) bytes
    first_member: ndarray  # (samples + 1,) int32
    suffix: ndarray  # (members,) int32, a number of the catalog's suffixes
    numbers: ndarray  # (members, 3) int64 offset, size and CRC32
    first_image: ndarray  # (samples + 1,) int32
    # (images, 2) int32 width and height; none where the layout does not ask for them
    image_sizes: ndarray


def data_sets(data: DataSection) -> list[DataSet]:
    """Return the data sets that a configuration names.

    Raises what `expand_shards` and `sample_format` raise.
    """
    if data.sets is None:
        return [_data_set(data, data.shards, "data.shards", data.format)]
    sets = []
    for number, one in enumerate(data.sets):
        key = f"data.sets.{number}.shards"
        form = one.format or data.format
        sets.append(_data_set(data, one.shards, key, form, one.weight, one.name))
    return sets


def evaluated_set(config: RunConfig) -> DataSet | None:
    """Return the data set of `eval.shards`, if any.

    Raises what `expand_shards` and `sample_format` raise.
    """
    if config.eval.shards is None:
        return None
    return _data_set(config.data, config.eval.shards, "eval.shards", config.eval.format)


def _data_set(
    data: DataSection,
    shards: Shards,
    key: str,
    form: SampleFormatName,
    weight: float = 1.0,
    name: str = "",
) -> DataSet:
    tars = expand_shards(shards, key, data.allow_pipe)
    asked = SampleFormat(form, data.caption_key, data.caption_prompt)
    return DataSet(tars, weight, name, sample_format(asked, tars, key))


class Catalog:
    """Every sample of some data sets.

    Cost: 130 bytes a sample; 558,128 samples in 559 shards take 2.5 s to read.

    Attributes:
        lengths: (samples,) int32 tokens of each sample, those of its images included, held-out ones
            too; or UNUSABLE.
        held_out: numbers of the samples that are kept for evaluation.
        faults: samples that can never be trained on, by number: they are drawn, and never planned.
        fingerprint: of everything that decides which samples there are and how they are planned,
            bytes included.
    """

    def __init__(
        self,
        sets: Sequence[DataSet],
        text_fingerprints: Sequence[str],
        layout: ImageLayout,
        max_image_pixels: int,
        held_out_fraction: float | None = None,
    ) -> None:
        """Read the index of every shard, with the text lengths of each set's fingerprint.

        Raises UserError.
        """
        self.layout = layout
        self.max_image_pixels = max_image_pixels
        self.held_out_fraction = held_out_fraction
        self.shards: list[Path] = []
        self.sets: list[DataSet] = []  # of each shard
        self.firsts = [0]  # number of each shard's first sample
        self.held_out: list[int] = []
        self.faults: dict[int, QuarantinedSample] = {}
        self.sample_sets: list[SampleSet] = []
        self._stored: list[_Stored] = []
        self._suffixes: dict[str, int] = {}
        digest = hashlib.sha256(
            f"{' '.join(dict.fromkeys(text_fingerprints))} {layout.numbers}".encode()
        )
        lengths = []
        for one, text in zip(sets, text_fingerprints, strict=True):
            read = [self._read_shard(one, text, shard, digest) for shard in one.shards]
            of_shards, planned, tiles = zip(*read, strict=True)
            self.sample_sets.append(
                SampleSet(
                    one.weight,
                    np.array(list(map(len, of_shards))),
                    np.concatenate(planned),
                    np.concatenate(tiles),
                )
            )
            lengths += of_shards
        self.lengths = np.concatenate(lengths)
        self.fingerprint = digest.hexdigest()
        self._suffix_texts = list(self._suffixes)

    def _read_shard(
        self,
        one: DataSet,
        text: str,
        shard: Path,
        digest: hashlib._Hash,
    ) -> tuple[ndarray, ndarray, ndarray]:
        """Take in the next shard: return (samples,) int32 lengths, planned lengths, tiles.

        Planned lengths have HELD_OUT for samples that are held out.
        """
        index = read_index(shard)
        first = self.firsts[-1]
        texts = index.texts.get(text)
        unreadable = index.faults.get(one.form.reading)
        if texts is None or unreadable is None:
            raise UserError(
                f"{shard}: its index has no token lengths for this format, tokenizer and "
                f"template. Make them: {MAKE} {shard}"
            )
        positions, tiles, unfit = _image_totals(index, self.layout)
        exact = np.array(texts.tokens, np.int64) + positions
        # too long for any pack in any case
        lengths = np.minimum(exact, np.iinfo(np.int32).max).astype(np.int32)

        # The first fault that a sample is found to have stays.
        faults = {**unfit, **texts.faults, **unreadable}
        for place, sizes in enumerate(index.image_sizes):
            if self.layout.takes_images:
                for width, height in sizes:
                    if width * height > self.max_image_pixels:
                        detail = (
                            f"{width} x {height} pixels; "
                            f"data.max_image_pixels is {self.max_image_pixels:,}"
                        )
                        faults.setdefault(place, ("too_many_pixels", detail))
            elif sizes and not self.layout.strips:
                faults.setdefault(place, ("no_encoder", f"{len(sizes)} images"))
        for place, (reason, detail) in sorted(faults.items()):
            lengths[place] = UNUSABLE
            key = _full_key(one.name, index.keys[place])
            self.faults[first + place] = QuarantinedSample(
                key,
                str(shard),
                index.members[place][0].offset,
                reason,
                detail,
            )

        planned = lengths.copy()
        if self.held_out_fraction is not None:
            for place, key in enumerate(index.keys):
                if lengths[place] != UNUSABLE and is_held_out(key, self.held_out_fraction):
                    planned[place] = HELD_OUT
                    self.held_out.append(first + place)

        stored = self._store(index)
        self.shards.append(shard)
        self.sets.append(one)
        self.firsts.append(first + len(lengths))
        digest.update(b"\n".join(stored.names))
        for column in (stored.numbers[:, 2].astype(np.uint32), lengths, planned):
            digest.update(column.tobytes())
        return lengths, planned, tiles

    def _store(self, index: ShardIndex) -> _Stored:
        sizes = index.flat_image_sizes
        counts = index.image_counts
        if not self.layout.is_sized:
            sizes = sizes[:0]
            counts = np.zeros_like(counts)
        suffixes = []
        numbers = []
        for suffix, *rest in itertools.chain.from_iterable(index.members):
            suffixes.append(self._suffixes.setdefault(suffix, len(self._suffixes)))
            numbers.append(rest)
        stored = _Stored(
            names=np.array([key.encode() for key in index.keys], np.bytes_),
            first_member=np.cumsum([0, *map(len, index.members)], dtype=np.int32),
            suffix=np.array(suffixes, np.int32),
            numbers=np.array(numbers, np.int64).reshape(-1, 3),
            first_image=np.cumsum([0, *counts], dtype=np.int32),
            image_sizes=sizes.astype(np.int32),
        )
        self._stored.append(stored)
        return stored

    def __len__(self) -> int:
        return self.firsts[-1]

    def why_unusable(self) -> str:
        """Return how many samples can never be trained on, and why, in brackets.

        Nothing where all can be.
        """
        reasons = Counter(fault.reason for fault in self.faults.values())
        return f" ({listed_reasons(reasons, ', ')})" if reasons else ""

    def find(self, number: int) -> Place:
        """Return where the sample of a global number is stored."""
        shard = bisect_right(self.firsts, number) - 1
        place = number - self.firsts[shard]
        stored = self._stored[shard]
        begin, end = stored.first_member[place : place + 2].tolist()
        members = []
        for at in range(begin, end):
            suffix = self._suffix_texts[stored.suffix[at]]
            members.append(Member(suffix, *stored.numbers[at].tolist()))
        one = self.sets[shard]
        key = _full_key(one.name, stored.names[place].decode())
        first, last = stored.first_image[place : place + 2].tolist()
        sizes = tuple(map(tuple, stored.image_sizes[first:last].tolist()))
        return Place(
            key,
            self.shards[shard],
            tuple(members),
            one.form,
            sizes,
        )

    def refuse_overlong(self, capacity: Capacity) -> None:
        """Raise UserError for the first sample that does not fit into a pack."""
        tiles = np.concatenate([one.tiles for one in self.sample_sets])
        wrong = self.lengths > capacity.tokens
        if capacity.tiles is not None:
            wrong |= (self.lengths != UNUSABLE) & (tiles > capacity.tiles)
        if wrong.any():
            number = int(wrong.argmax())
            place = self.find(number)
            room = f"{capacity.tokens} tokens"
            if capacity.tiles is not None:
                room += f" and {counted(capacity.tiles, 'tile')}"
            raise UserError(
                f"{place.shard}: sample {place.key}: "
                f"{self.lengths[number]} tokens and {counted(tiles[number], 'tile')} do not fit "
                f"into a pack of {room} ({int(wrong.sum()):,} samples in all do not). "
                "Raise data.pack_length or data.max_tiles_per_pack, or set data.overlong=skip"
            )


def load_catalog(
    config: RunConfig,
    sets: Sequence[DataSet],
    held_out_fraction: float | None = None,
) -> Catalog:
    """Return the catalog of data sets for a run's tokenizer, template and encoder.

    Missing indexes are made.
    """
    data = config.data
    layout = models_of(config).layout
    texts = []
    for one in sets:
        how = Tokenization(
            config.model.llm.path,
            data.template,
            layout,
            one.form,
        )
        # The launcher has made them; a rank that has to, without one, shares its cores with others.
        ensure_indexes(one.shards, how, workers=1)
        texts.append(how.fingerprint)
    return Catalog(
        sets,
        texts,
        layout,
        data.max_image_pixels,
        held_out_fraction,
    )


def is_held_out(key: str, fraction: float) -> bool:
    """Tell by a sample's key alone whether it is in the share kept for evaluation."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _full_key(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


def positions_and_tiles(index: ShardIndex, layout: ImageLayout) -> tuple[ndarray, Faults]:
    """Return (images, 2) int64 positions and tiles of each image, and samples with unfit ones.

    Both are 0 where an image cannot be cut.
    """
    counts = index.image_counts
    sizes = index.flat_image_sizes
    if not layout.is_sized:
        of_image = (layout.positions_per_tile, 1) if layout.takes_images else (0, 0)
        return np.tile(np.array(of_image, np.int64), (counts.sum(), 1)), {}

    # Each size is cut once: data sets have few.
    places = np.repeat(np.arange(len(counts)), counts)
    columns = np.column_stack([sizes, counts[places] == 1])
    kinds, kind_of_image = np.unique(columns, axis=0, return_inverse=True)
    kind_of_image = kind_of_image.reshape(-1)
    of_kind = np.zeros((len(kinds), 2), np.int64)
    unfit = {}
    for kind, (width, height, is_alone) in enumerate(kinds.tolist()):
        try:
            if width and height:
                tiling = layout.tiling(width, height, 1 if is_alone else 2)
                of_kind[kind] = tiling.positions, tiling.tiles
            else:
                unfit[kind] = "undecodable_image", "its header does not contain its size"
        except UnfitImage as error:
            unfit[kind] = "unfit_shape", str(error)
    faults: Faults = {}
    for image in np.flatnonzero(np.isin(kind_of_image, list(unfit))).tolist():
        faults[int(places[image])] = unfit[int(kind_of_image[image])]
    return of_kind[kind_of_image], faults


def _image_totals(index: ShardIndex, layout: ImageLayout) -> tuple[ndarray, ndarray, Faults]:
    """Return (samples,) positions and tiles of a sample's images, and samples with unfit ones."""
    of_images, faults = positions_and_tiles(index, layout)
    ends = np.cumsum(index.image_counts)
    before = np.concatenate([[[0, 0]], np.cumsum(of_images, axis=0)])
    sums = before[ends] - before[ends - index.image_counts]
    return sums[:, 0], np.minimum(sums[:, 1], np.iinfo(np.int32).max).astype(np.int32), faults


@dataclass
class Reader:
    """Reads samples by number; each process needs its own, but a forked copy is one."""

    catalog: Catalog
    retry_seconds: float
    _files: OrderedDict[Path, int] = field(default_factory=OrderedDict)

    def read(self, number: int) -> Sample | QuarantinedSample:
        """Read the sample of a global number.

        Raises UserError where its shard cannot be read for `retry_seconds`.
        """
        place = self.catalog.find(number)
        contents = {}
        strips = self.catalog.layout.strips
        text = text_suffix(place.form.reading, [member.suffix for member in place.members])
        offset = place.members[0].offset
        try:
            for member in place.members:
                is_image = image_number(member.suffix) is not None
                if is_image and strips:
                    contents[member.suffix] = b""
                # others are no part of the sample, and of any size
                elif is_image or member.suffix == text:
                    limit = MAX_IMAGE_BYTES if is_image else MAX_RECORD_BYTES
                    if member.size > limit:
                        raise BadSample(
                            "too_many_bytes",
                            f"{member.suffix}: {member.size:,} bytes; at most {limit:,}",
                        )
                    content = contents[member.suffix] = self._read(place.shard, member)
                    if zlib.crc32(content) != member.crc32:
                        offset = member.offset
                        raise BadSample("checksum", checksum_detail(member))
            sample = read_sample(place.key, str(place.shard), contents, offset, place.form)
            sample = replace(sample, sizes=place.sizes)
            return without_images(sample) if strips else sample
        except BadSample as error:
            return QuarantinedSample(
                place.key,
                str(place.shard),
                offset,
                error.reason,
                error.detail,
            )

    def close(self) -> None:
        """Close the files that are open; the reader may be used again."""
        for shard in list(self._files):
            self._close(shard)

    __del__ = close  # descriptors are numbers, which nothing else closes

    def _read(self, shard: Path, member: Member) -> bytes:
        """Return a member's bytes; while the system fails to give them, try again."""
        deadline = time.monotonic() + self.retry_seconds
        pause = FIRST_PAUSE
        while True:
            try:
                return self._pread(shard, member)
            except OSError as error:
                # a file that came back, or another server's copy, has to be opened again
                self._close(shard)
                if time.monotonic() + pause > deadline:
                    raise UserError(
                        f"{shard}: cannot be read ({error.strerror or error}), "
                        f"retried for {self.retry_seconds:g} s (data.io_retry_seconds). "
                        "Repair the storage, or copy the file again, and start again"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _pread(self, shard: Path, member: Member) -> bytes:
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                self._close(next(iter(self._files)))
        self._files.move_to_end(shard)
        content = b""
        while len(content) < member.size:  # a read may give less than there is
            more = os.pread(file, member.size - len(content), member.offset + len(content))
            if not more:
                raise OSError(
                    f"its {member.suffix} member at byte {member.offset:,} is "
                    "cut off by the end of the file"
                )
            content += more
        return content

    def _close(self, shard: Path) -> None:
        file = self._files.pop(shard, None)
        if file is not None:
            os.close(file)
