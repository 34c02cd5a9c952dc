"""All samples of a run's data sets, and random access to each.

StoredSet: files in the cache --Catalog--> mapped tables
global sample number --Catalog.find--> shard, members at their offsets
    --Reader: pread, CRC32 as it was indexed--> Sample, or QuarantinedSample: why it is not used

A sample's length is its text tokens (from the index, for this tokenizer and template) and its
images' tokens (by the vision encoder's layout); `stored` adds them up.

Damaged bytes cost their sample alone. A read that fails is tried again, since network storage
stalls and restarts; one that fails for too long ends the run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from mmtrain.base.errors import UserError
from mmtrain.base.printing import counted
from mmtrain.data.samples.formats import NAMES, SampleFormat, text_suffix
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
    image_number,
    read_sample,
    without_images,
)
from mmtrain.data.shards.index import (
    TABLES,
    Faults,
    Member,
    Tables,
    checksum_detail,
    suffix_texts,
)
from mmtrain.data.shards.remote import RemoteStream, is_remote
from mmtrain.data.stream.copies import Copies
from mmtrain.data.stream.order import UNUSABLE, SampleSet
from mmtrain.data.stream.stored import UNREADABLE, StoredSet, mapped

_log = logging.getLogger(__name__)
OPEN_FILES = 64  # shards kept open, those read last
FIRST_PAUSE = 0.1  # seconds before a failed read is tried again; each pause is twice the one before
LONGEST_PAUSE = 10.0
FIRST_LOOK = 0.001  # seconds until a reader looks again for bytes of a copy; doubles, too
LONGEST_LOOK = 0.05
# seconds that a reader waits longer than the fetcher asks again: its last request, which may hang
# for 30 s, says why it gives up
GRACE = 40.0


class Place(NamedTuple):
    """The stored parts of a sample, and their shard."""

    key: str  # with its data set's name where there are several
    shard: str  # its path, or its URL
    members: tuple[Member, ...]
    form: SampleFormat
    sizes: Sizes  # of its images, where the layout asks for them


class Catalog:
    """Every sample of some data sets.

    Cost: tables are mapped, so 100 million samples are open in 0.1 s and take no memory of the
    process.

    Attributes:
        sample_sets: what planning needs of each data set.
        fingerprint: of everything that decides which samples there are and how they are planned,
            bytes included.
    """

    def __init__(self, sets: Sequence[StoredSet]) -> None:
        """Open counted data sets. Raises UserError where the cache does not hold them any more."""
        self.sets = sets
        self.layout = sets[0].measure.layout
        self.capacity = sets[0].measure.capacity
        self.sample_sets: list[SampleSet] = []
        self._tables: list[Tables] = []
        digest = hashlib.sha256()
        for one in sets:
            try:
                tables = mapped(one.view)
            except UNREADABLE as error:
                raise UserError(
                    f"{one.view}: cannot be read ({error}), though it was made as the run started. "
                    "Start again"
                ) from error
            lengths, tiles, shards = (tables[name] for name in ("lengths", "tiles", "shards"))
            counts = (shards[name] for name in ("kept", "fits", "unusable"))
            firsts = tables["firsts"][0]
            self.sample_sets.append(SampleSet(one.weight, lengths, tiles, firsts, *counts))
            self._tables.append(tables)
            digest.update(f"{one.measure.text} {self.layout.numbers}".encode())
            digest.update(shards["digest"].tobytes())
        self.fingerprint = digest.hexdigest()
        # number of each set's first sample, then of all
        self.firsts = np.cumsum([0, *(len(one.lengths) for one in self.sample_sets)])
        self._faults = functools.lru_cache(1)(self._faults_of_shard)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def has_remote_shards(self) -> bool:
        return any(is_remote(path) for tables in self._tables for path in tables["paths"].tolist())

    @property
    def held_out(self) -> ndarray:
        """(held out,) numbers of the held-out samples."""
        return np.flatnonzero(np.concatenate([one.lengths < 0 for one in self.sample_sets]))

    @property
    def held_out_samples(self) -> int:
        """Return the number of held-out samples."""
        return len(self) - sum(int(one.kept.sum()) for one in self.sample_sets)

    @property
    def reasons(self) -> Counter[str]:
        """Numbers of samples that can never be trained on, by reason."""
        reasons: Counter[str] = Counter()
        for one, sample_set in enumerate(self.sample_sets):
            for shard in np.flatnonzero(sample_set.unusable).tolist():
                reasons.update(reason for reason, _ in self._faults(one, shard).values())
        return reasons

    @property
    def tiles_per_token(self) -> float:
        """The most tiles a token that a sample has, of those that fit a pack."""
        return max(float(tables["shards"]["tiles_per_token"].max()) for tables in self._tables)

    def length(self, number: int) -> int:
        """Return the tokens of a sample, those of its images included; or UNUSABLE."""
        one, at, *_ = self._located(number)
        return abs(int(self.sample_sets[one].lengths[at]))

    def why_unusable(self) -> str:
        """Return how many samples can never be trained on, and why, in brackets.

        Nothing where all can be.
        """
        reasons = self.reasons
        return f" ({listed_reasons(reasons, ', ')})" if reasons else ""

    def faults(self) -> Iterator[QuarantinedSample]:
        """Yield the samples that can never be trained on: they are drawn, and never planned."""
        for one, sample_set in enumerate(self.sample_sets):
            for shard in np.flatnonzero(sample_set.unusable).tolist():
                first = int(self.firsts[one] + sample_set.firsts[shard])
                for place in sorted(self._faults(one, shard)):
                    fault = self.fault(first + place)
                    assert fault is not None, f"sample {first + place} has no length"
                    yield fault

    def fault(self, number: int) -> QuarantinedSample | None:
        """Return why a sample can never be trained on; None: it can."""
        if self.length(number) != UNUSABLE:
            return None
        one, _, shard, place = self._located(number)
        stored = self.find(number)
        return QuarantinedSample(
            stored.key,
            stored.shard,
            stored.members[0].offset,
            *self._faults(one, shard)[place],
        )

    def _located(self, number: int) -> tuple[int, int, int, int]:
        """Return the number of a sample's set, the sample's number there, that of its shard, and
        the sample's place there.
        """
        one = int(np.searchsorted(self.firsts, number, "right")) - 1
        at = number - int(self.firsts[one])
        firsts = self.sample_sets[one].firsts
        shard = int(np.searchsorted(firsts, at, "right")) - 1
        return one, at, shard, at - int(firsts[shard])

    def by_shard(self, numbers: ndarray) -> Iterator[tuple[str, Tables, ndarray, ndarray]]:
        """Yield for each shard that holds any of these samples: its path or URL, its tables,
        indices of its samples in `numbers`, and their places in the shard.
        """
        for one, sample_set in enumerate(self.sample_sets):
            firsts = sample_set.firsts
            at = numbers - self.firsts[one]
            shards = np.searchsorted(firsts, at, "right") - 1
            for shard in np.unique(shards[(at >= 0) & (at < firsts[-1])]).tolist():
                own = np.flatnonzero(shards == shard)
                path = str(self._tables[one]["paths"][shard])
                yield path, self._tables_of_shard(one, shard), own, at[own] - firsts[shard]

    def _tables_of_shard(self, one: int, shard: int) -> Tables:
        """Return the tables of a shard, as its index has them."""
        tables = self._tables[one]
        cuts = tables["firsts"][:, shard : shard + 2].tolist()
        return {name: tables[name][slice(*cut)] for name, cut in zip(TABLES, cuts, strict=True)}

    def _faults_of_shard(self, one: int, shard: int) -> Faults:
        tables = self._tables_of_shard(one, shard)
        measure = self.sets[one].measure
        # Only the faults are wanted: any lengths do.
        return measure.shard({**tables, measure.text: np.zeros(len(tables["samples"]), int)})[2]

    def find(self, number: int) -> Place:
        """Return where the sample of a global number is stored."""
        one, _, shard, place = self._located(number)
        tables = self._tables_of_shard(one, shard)
        suffixes = suffix_texts(tables)
        members = []
        for suffix, *rest in _row(tables, "members", place).tolist():
            members.append(Member(suffixes[suffix], *rest))
        key = _row(tables, "keys", place).tobytes().decode()
        sizes: Sizes = ()
        if self.layout.is_sized:
            sizes = tuple(_row(tables, "images", place).tolist())
        stored = self.sets[one]
        if stored.name:
            key = f"{stored.name}/{key}"
        return Place(
            key,
            str(self._tables[one]["paths"][shard]),
            tuple(members),
            stored.measure.form,
            sizes,
        )

    def refuse_overlong(self) -> None:
        """Raise UserError for the first sample that does not fit into a pack."""
        for one, sample_set in enumerate(self.sample_sets):
            lengths = abs(sample_set.lengths)
            fits = self.capacity.fit(lengths, sample_set.tiles)
            overlong = np.flatnonzero(~fits & (lengths != UNUSABLE))
            if not len(overlong):
                continue
            at = int(overlong[0])
            place = self.find(int(self.firsts[one]) + at)
            room = f"{self.capacity.tokens} tokens"
            if self.capacity.tiles is not None:
                room += f" and {counted(self.capacity.tiles, 'tile')}"
            tiles = counted(int(sample_set.tiles[at]), "tile")
            raise UserError(
                f"{place.shard}: sample {place.key}: "
                f"{lengths[at]} tokens and {tiles} do not fit "
                f"into a pack of {room} ({len(overlong):,} samples in all do not). "
                "Raise data.pack_length or data.max_tiles_per_pack, or set data.overlong=skip"
            )

    def refuse_useless_shards(self, key: str) -> None:
        """Raise UserError if no sample of this one data set can be trained on.

        Warn of single shards without any.
        """
        one = self.sample_sets[0]
        useless = np.flatnonzero(one.unusable == np.diff(one.firsts))
        if not len(useless):
            return
        shards = len(one.unusable)
        reasons = Counter(reason for reason, _ in self._faults(0, int(useless[0])).values())
        if len(useless) < shards:
            _log.warning(
                f"{key}: {len(useless):,} of {shards:,} shards hold no sample that can be trained "
                f"on; the first is {self._tables[0]['paths'][useless[0]]} "
                f"({listed_reasons(reasons, '; ') or 'no samples'})"
            )
            return
        reasons = self.reasons
        why = listed_reasons(reasons, "; ") or "no samples"
        option = "data.format or data.sets.N.format"
        if key.startswith("eval."):
            option = "eval.format"
        remedy = f"set {option} to their format: {', '.join(NAMES)}"
        if reasons.keys() == {"template"}:
            remedy = "set data.template to one that holds them"
        raise UserError(
            f"{key}: no sample in {shards:,} shards can be trained on, "
            f"read as {self.sets[0].measure.form.name} ({why}). Fix them, or {remedy}"
        )


def _row(tables: Tables, name: str, place: int) -> ndarray:
    """Return the rows of a table that belong to a sample."""
    counts = tables["samples"][name]
    begin = int(counts[:place].sum())
    return tables[name][begin : begin + int(counts[place])]


@dataclass
class Reader:
    """Reads samples by number; each process needs its own, but a forked copy is one."""

    catalog: Catalog
    retry_seconds: float
    # of remote shards; None: each member is asked for at its store, which takes 0.1 s
    copies: Copies | None = None
    waited: float = 0.0  # seconds, for bytes of copies
    _files: OrderedDict[str, int] = field(default_factory=OrderedDict)

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
                    content = self._read(place.shard, member)
                    if content is None:
                        offset = member.offset
                        raise BadSample("checksum", checksum_detail(member))
                    contents[member.suffix] = content
            sample = read_sample(place.key, place.shard, contents, offset, place.form)
            sample = replace(sample, sizes=place.sizes)
            return without_images(sample) if strips else sample
        except BadSample as error:
            return QuarantinedSample(
                place.key,
                place.shard,
                offset,
                error.reason,
                error.detail,
            )

    def close(self) -> None:
        """Close the files that are open; the reader may be used again."""
        for shard in list(self._files):
            self._close(shard)

    __del__ = close  # descriptors are numbers, which nothing else closes

    def _read(self, shard: str, member: Member) -> bytes | None:
        """Return a member's bytes, None if they are damaged. A read that fails is tried again."""
        if is_remote(shard) and self.copies is not None:
            return self._copied(shard, member)
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

    def _copied(self, shard: str, member: Member) -> bytes | None:
        """Wait until a copy has a member's bytes, and return them; None if the store's are wrong.

        Raises UserError if they do not come.
        """
        started = time.monotonic()
        pause = FIRST_LOOK
        while True:
            content = None
            with contextlib.suppress(OSError):
                content = self._pread(shard, member)
            if content is not None or self.copies.is_damaged(shard, member.offset):
                return content
            self._close(shard)  # the copy may have been removed and made again
            seconds = time.monotonic() - started
            if seconds > self.retry_seconds + GRACE:
                raise UserError(
                    f"{shard}: {member.size:,} bytes at byte {member.offset:,} did not arrive "
                    f"in {seconds:.0f} s. Raise data.io_retry_seconds, or use a faster line"
                )
            time.sleep(pause)
            self.waited += pause
            pause = min(2 * pause, LONGEST_LOOK)

    def _pread(self, shard: str, member: Member) -> bytes | None:
        """Read a member's bytes once; None if their checksum is not the index's."""
        content = self._bytes(shard, member)
        if zlib.crc32(content) != member.crc32:
            return None
        return content

    def _bytes(self, shard: str, member: Member) -> bytes:
        # The fetcher leaves out empty members: there may be no copy.
        if not member.size:
            return b""
        if is_remote(shard) and self.copies is None:
            with RemoteStream(shard, member.offset, member.offset + member.size) as stream:
                return stream.read(member.size)
        file = self._files.get(shard)
        if file is None:
            path = shard
            if is_remote(shard):
                path = self.copies.path(shard)
            file = self._files[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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

    def _close(self, shard: str) -> None:
        file = self._files.pop(shard, None)
        if file is not None:
            os.close(file)
