"""The order of an endless list of packs, as a pure function without I/O.

sets of samples (lengths, counts of shards, weight)
--Epoch: shards permuted--> the shards that an epoch visits
--group of `shuffle_shards` shards: samples drawn by hash, permuted--> windows of about
    `pack_window` samples
--pack_best_fit, packs permuted--> Group: samples (planned,), starts (packs + 1,)
--PackOrder: groups and epochs one after the other--> one endless list of packs

A sample is its global number: over all sets in listed order, in a set over all shards in listed
order. The order depends on (sets, seed, epoch) and the arguments here alone, not on the world size
or the workers. Shards and groups are permuted by numpy's RandomState, whose streams are frozen
(NEP 19), seeded through SHA-256.
"""

import functools
import hashlib
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from mmtrain.base.errors import UserError

UNUSABLE = 0  # length of a sample that cannot become a document: drawn, never packed

_KEPT = 2  # a step may span two
# A visit: an epoch reads one shard, in one of its passes over the set. `take` samples are drawn,
# the first ones of the shard's order; `unusable` of these can never be trained on; `end` is how
# many fit a pack, those of all visits before it included.
_VISIT = np.dtype([(name, "i8") for name in ("pass", "shard", "take", "unusable", "end")])


@dataclass(frozen=True, eq=False)
class SampleSet:
    """One data set as planning sees it."""

    weight: float  # how often an epoch draws its samples, > 0
    # (samples,) int32 tokens, those of images included, negative for a sample that is held out; or
    # UNUSABLE
    lengths: ndarray
    tiles: ndarray  # (samples,) int32 tiles of each sample
    firsts: ndarray  # (shards + 1,) int64 number in the set of each shard's first sample
    kept: ndarray  # (shards,) int64 samples that are not held out
    fits: ndarray  # (shards,) int64 samples that fit an empty pack
    unusable: ndarray  # (shards,) int64


@dataclass(frozen=True)
class Capacity:
    """Room of a pack."""

    tokens: int
    tiles: int | None = None  # in a pack; None: as many as its tokens allow

    def fit(self, lengths: ndarray, tiles: ndarray) -> ndarray:
        """Tell which samples are not held out, and fit an empty pack."""
        fits = (lengths > 0) & (lengths <= self.tokens)
        if self.tiles is not None:
            fits &= tiles <= self.tiles
        return fits


ANY_SIZE = Capacity(sys.maxsize)


@dataclass(frozen=True)
class PlannedPack:
    """Global numbers of the samples that share a pack, in their order inside it."""

    epoch: int
    samples: tuple[int, ...]


class Position(NamedTuple):
    """A group of packs, and the number of its first pack."""

    epoch: int
    group: int
    first_pack: int


BEGIN = Position(0, 0, 0)


@dataclass(frozen=True, eq=False)
class Epoch:
    """An epoch's samples, a sample counted as often as it is drawn.

    Drawn = planned + overlong + unusable.
    """

    visits: tuple[ndarray, ...]  # of each set, in order
    groups: int
    drawn: int
    planned: int
    unusable: int

    @property
    def overlong(self) -> int:
        """Samples that do not fit an empty pack, by tokens or by tiles."""
        return self.drawn - self.planned - self.unusable

    def shares(self, group: int) -> list[tuple[int, int]]:
        """Return which of each set's planned samples a group holds, from and up to."""
        cuts = []
        for visits in self.visits:
            planned = _planned(visits)
            begin = group * planned // self.groups
            cuts.append((begin, (group + 1) * planned // self.groups))
        return cuts


@dataclass(frozen=True, eq=False)
class Group:
    """Packs that are drawn together."""

    samples: ndarray  # (planned,) int64 global sample numbers, in pack order
    starts: ndarray  # (packs + 1,) int64: pack p holds samples[starts[p] : starts[p + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1


def _planned(visits: ndarray) -> int:
    return int(visits["end"].max(initial=0))


def _seed(purpose: str, dtype: str) -> ndarray:
    return np.frombuffer(hashlib.sha256(purpose.encode()).digest(), dtype)


def _random(purpose: str) -> np.random.RandomState:
    return np.random.RandomState(_seed(purpose, "<u4"))


def _hashed(values: ndarray) -> ndarray:
    """Return (n,) uint64 hashes by splitmix64.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    mixed = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def pack_best_fit(
    lengths: ndarray,
    capacity: Capacity,
    tiles: ndarray | None = None,
) -> list[list[int]]:
    """Pack by best-fit decreasing: return the documents' positions in each pack.

    Packs are in the order of opening.

    The longest document comes first, ties by position. Each goes into the pack with the fewest free
    tokens of those with room for its tokens and its tiles, ties by the pack opened first (Johnson,
    "Near-optimal bin packing algorithms", MIT 1973). `lengths` and `tiles` are (documents,)
    integers; each document must fit an empty pack.
    """
    count = len(lengths)
    cap = capacity.tiles
    tokens = np.asarray(lengths, np.int64)
    assert count == 0 or 0 < tokens.min() <= tokens.max() <= capacity.tokens, (
        "a document does not fit an empty pack"
    )
    # Where no document has more tiles per token than a full pack may have, tokens run out first.
    if cap is not None:
        scaled = np.multiply(tiles, capacity.tokens, dtype=np.int64)
        if (scaled >= (cap + 1) * tokens).any():
            return _pack_tiles(tokens, capacity, np.asarray(tiles, np.int64))

    open_packs: list[int] = []  # sorted, each as free tokens * count + its number
    packs: list[list[int]] = []
    shortest = int(tokens.min(initial=capacity.tokens))
    sizes = tokens.tolist()
    for position in np.argsort(-tokens, kind="stable").tolist():
        size = sizes[position]
        at = bisect_left(open_packs, size * count)
        if at == len(open_packs):
            free = capacity.tokens
            pack = len(packs)
            packs.append([])
        else:
            free, pack = divmod(open_packs.pop(at), count)
        packs[pack].append(position)
        if free - size >= shortest:
            insort(open_packs, (free - size) * count + pack)
    return packs


def _pack_tiles(lengths: ndarray, capacity: Capacity, tiles: ndarray) -> list[list[int]]:
    """Pack as `pack_best_fit` does, where tiles may run out first.

    Cost: 5 us a document at any number of tiles a pack, where tokens alone take 1 us.
    """
    order = np.argsort(-lengths, kind="stable")
    # tiles that each document, or one after it, needs at least
    fewest = np.minimum.accumulate(tiles[order][::-1])[::-1].tolist()
    shortest = int(lengths.min())
    sizes = lengths.tolist()
    needs = tiles.tolist()
    packs: list[list[int]] = []
    # of the open packs, in the order of opening, and an empty one
    free, room, numbers = np.empty((3, len(order)), np.int64)
    opened = 0
    for turn, position in enumerate(order.tolist()):
        # Leave out packs with room for none of the documents that are left.
        if turn % 128 == 0:
            left = np.flatnonzero((free[:opened] >= shortest) & (room[:opened] >= fewest[turn]))
            opened = len(left)
            for column in (free, room, numbers):
                column[:opened] = column[left]
        free[opened] = capacity.tokens + 1
        room[opened] = capacity.tiles
        fits = (free[: opened + 1] >= sizes[position]) & (room[: opened + 1] >= needs[position])
        best = int(np.where(fits, free[: opened + 1], capacity.tokens + 2).argmin())
        if best == opened:
            free[best] = capacity.tokens
            numbers[best] = len(packs)
            packs.append([])
            opened += 1
        free[best] -= sizes[position]
        room[best] -= needs[position]
        packs[numbers[best]].append(position)
    return packs


@dataclass(eq=False)
class PackOrder:
    """The endless list of packs, numbered from 0: epoch after epoch, no pack spans two.

    Cost: 1 us for each sample of a group that is read. The number of a group's first pack needs the
    packs of all groups before it. `pack_counts` has them from the first epoch on; without it,
    groups are packed one after the other, from `start` on.
    """

    sets: Sequence[SampleSet]
    seed: int
    capacity: Capacity
    shuffle_shards: int
    pack_window: int
    pack_counts: Sequence[int] = ()  # of each group
    start: Position = BEGIN

    def __post_init__(self) -> None:
        self.epoch = functools.lru_cache(_KEPT)(self._epoch)
        self.group = functools.lru_cache(_KEPT)(self._group)
        self._positions = [BEGIN if self.pack_counts else self.start]
        self._offsets = np.cumsum([0, *(len(one.lengths) for one in self.sets)])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the caches, which a spawned process makes itself."""
        return PackOrder, tuple(getattr(self, each.name) for each in fields(self))

    def _epoch(self, epoch: int) -> Epoch:
        """Draw the shards of an epoch, and cut it into groups.

        A set of weight w is drawn floor(w) times whole, and its first frac(w) once more. A group
        has about `shuffle_shards` shards (of small shards as many as hold `pack_window` samples),
        with its share of every set. Raises UserError for an epoch that holds no pack.
        """
        visits = []
        drawn = unusable = planned = shards = 0
        for number, one in enumerate(self.sets):
            of_set = self._visits(one, f"{self.seed} {epoch} {number}")
            visits.append(of_set)
            drawn += int(of_set["take"].sum())
            unusable += int(of_set["unusable"].sum())
            planned += _planned(of_set)
            shards += one.weight * len(one.kept)
        # No group is empty: each has a sample of the largest set.
        largest = max(map(_planned, visits))
        groups = min(shards / self.shuffle_shards, planned / self.pack_window, largest)
        groups = max(1, round(groups))
        made = Epoch(tuple(visits), groups, drawn, planned, unusable)
        if not planned:
            raise UserError(self._why_empty(epoch, made))
        return made

    def _visits(self, one: SampleSet, purpose: str) -> ndarray:
        """Return the shards of a set that an epoch reads."""
        kept = int(one.kept.sum())
        whole = int(one.weight)
        parts = [np.empty(0, _VISIT)]
        takes = [kept] * whole
        takes.append(round((one.weight - whole) * kept))
        for number, take in enumerate(takes):
            if take == 0:
                continue
            # these words, and others below, are the seed of every order: never change them
            shards = _random(f"pass {purpose} {number}").permutation(len(one.kept))
            ends = np.cumsum(one.kept[shards])
            shards = shards[: int(np.searchsorted(ends, take)) + 1]
            visits = np.empty(len(shards), _VISIT)
            visits["pass"] = number
            visits["shard"] = shards
            visits["take"] = one.kept[shards]
            visits["unusable"] = one.unusable[shards]
            visits["end"] = one.fits[shards]
            # The pass may end inside its last shard.
            visits["take"][-1] -= ends[len(shards) - 1] - take
            last = _drawn(one, purpose, visits[-1:])
            visits["unusable"][-1] = (one.lengths[last] == UNUSABLE).sum()
            visits["end"][-1] = self.capacity.fit(one.lengths[last], one.tiles[last]).sum()
            parts.append(visits)
        together = np.concatenate(parts)
        together["end"] = np.cumsum(together["end"])
        return together

    def _group(self, epoch: int, group: int) -> Group:
        """Draw and pack a group: its samples are permuted, and each window is packed by itself.

        Cost: windows of 4096 fill packs 0.2% less than packing the whole epoch would, of 1024 1.1%.
        A group of 8,000 samples takes 10 ms.
        """
        made = self.epoch(epoch)
        parts = []
        for number, (begin, end) in enumerate(made.shares(group)):
            if begin == end:
                continue
            one = self.sets[number]
            visits = made.visits[number]
            first, last = np.searchsorted(visits["end"], [begin, end - 1], "right").tolist()
            drawn = _drawn(one, f"{self.seed} {epoch} {number}", visits[first : last + 1])
            drawn = drawn[self.capacity.fit(one.lengths[drawn], one.tiles[drawn])]
            before = visits["end"][last] - len(drawn)
            drawn = drawn[begin - before : end - before]
            parts.append((self._offsets[number] + drawn, one.lengths[drawn], one.tiles[drawn]))

        members, lengths, tiles = map(np.concatenate, zip(*parts, strict=True))
        draw = _random(f"group {self.seed} {epoch} {group}")
        samples = []
        sizes = []
        windows = max(1, round(len(members) / self.pack_window))
        for window in np.array_split(draw.permutation(len(members)), windows):
            packs = pack_best_fit(lengths[window], self.capacity, tiles[window])
            packs = [packs[position] for position in draw.permutation(len(packs))]
            samples.append(members[window][list(chain.from_iterable(packs))])
            sizes += map(len, packs)
        return Group(np.concatenate(samples), np.cumsum([0, *sizes]))

    def position(self, pack: int) -> Position:
        """Return the group that holds a pack, which is none before `start`."""
        first = self._positions[0]
        assert pack >= first.first_pack, f"pack {pack} is before {first}"
        while self._positions[-1].first_pack <= pack:
            self._append()
        at = bisect_right(self._positions, pack, key=lambda position: position.first_pack)
        return self._positions[at - 1]

    def _append(self) -> None:
        """Append the position after the last known one, whose group is packed unless counted."""
        epoch, group, first_pack = self._positions[-1]
        number = len(self._positions) - 1
        if number < len(self.pack_counts):
            first_pack += self.pack_counts[number]
        else:
            first_pack += len(self.group(epoch, group))
        group += 1
        if group == self.epoch(epoch).groups:
            epoch += 1
            group = 0
        self._positions.append(Position(epoch, group, first_pack))

    def packs(self, first: int, count: int) -> list[PlannedPack]:
        """Return packs [first, first + count); raises UserError where an epoch holds none."""
        packs: list[PlannedPack] = []
        while len(packs) < count:
            number = first + len(packs)
            epoch, group, first_pack = self.position(number)
            made = self.group(epoch, group)
            begin = number - first_pack
            starts = made.starts[begin : begin + count - len(packs) + 1].tolist()
            for start, end in pairwise(starts):
                packs.append(PlannedPack(epoch, tuple(made.samples[start:end].tolist())))
        return packs

    def samples_before(self, pack: int) -> int:
        """Return how many of the samples planned in a pack's epoch are in packs before it."""
        epoch, group, first_pack = self.position(pack)
        before = sum(begin for begin, _ in self.epoch(epoch).shares(group))
        return before + int(self.group(epoch, group).starts[pack - first_pack])

    def first_pack(self, epoch: int) -> int:
        """Return the number of an epoch's first pack.

        Raises UserError where an epoch before it holds none.
        """
        while self._positions[-1].epoch < epoch:
            self._append()
        return self._positions[bisect_left(self._positions, (epoch, 0))].first_pack

    def steps(self, epochs: int, packs_per_step: int) -> int:
        """Return the steps that train every sample of these epochs.

        The next epoch fills the last one.
        """
        return -(-self.first_pack(epochs) // packs_per_step)

    def _why_empty(self, epoch: int, made: Epoch) -> str:
        if made.drawn == 0:
            why = (
                "they are empty, or held out for evaluation, "
                f"or the weight of their data set is too small for epoch {epoch} to draw one"
            )
        else:
            limit = self.capacity.tiles
            tiles = ""
            if limit is not None:
                tiles = f", or have more than {limit} tiles (data.max_tiles_per_pack)"
            why = (
                f"of {made.drawn} drawn in epoch {epoch}, {made.overlong} are longer than "
                f"data.pack_length={self.capacity.tokens} tokens{tiles}, "
                f"and {made.unusable} cannot be used"
            )
        shards = sum(len(one.kept) for one in self.sets)
        return f"data.shards: no sample in {shards} shards fits into a pack: {why}"


def _drawn(one: SampleSet, purpose: str, visits: ndarray) -> ndarray:
    """Return (drawn,) int64 numbers in a set of the samples that visits of shards draw, in order.

    A shard's samples come in the order of a hash of the pass and their number, without those that
    are held out.
    """
    firsts = one.firsts[visits["shard"]]
    sizes = one.firsts[visits["shard"] + 1] - firsts
    # of each sample: its visit, and its number in the set
    visit = np.repeat(np.arange(len(visits)), sizes)
    numbers = np.arange(len(visit)) + (firsts - np.cumsum(sizes) + sizes)[visit]
    passes, pass_of_visit = np.unique(visits["pass"], return_inverse=True)
    seeds = np.array([_seed(f"samples {purpose} {number}", "<u8")[0] for number in passes])
    keys = _hashed(_hashed(numbers) ^ seeds[pass_of_visit[visit]])
    numbers = numbers[np.lexsort((keys, visit))]

    is_kept = one.lengths[numbers] >= 0
    numbers = numbers[is_kept]
    visit = visit[is_kept]
    place = np.arange(len(visit)) - np.searchsorted(visit, visit)  # in its visit
    return numbers[place < visits["take"][visit]]
