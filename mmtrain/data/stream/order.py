"""The order of an epoch: samples in packs, as a pure function without I/O.

sets of samples (lengths, shard sizes, weight)
--draws: shards permuted, samples permuted inside each--> one sequence per set
--groups: the same share of every sequence, permuted--> windows of about `pack_window` samples
--pack_best_fit, packs permuted--> EpochPlan: samples (planned,), starts (packs + 1,)
--PackOrder: epochs one after the other--> one endless list of packs

A sample is its global number: over all sets in listed order, in a set over all shards in listed
order. The order depends on (sets, seed, epoch) and the arguments here alone, not on the world size
or the workers. Draws come from numpy's RandomState, whose streams are frozen (NEP 19), seeded
through SHA-256.
"""

import functools
import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy import ndarray

from mmtrain.base.errors import UserError

HELD_OUT = -1  # length of a sample that is kept for evaluation: not part of the set
UNUSABLE = 0  # length of a sample that cannot become a document: drawn, never packed

_PLANS_KEPT = 2  # a step may span two epochs


@dataclass(frozen=True, eq=False)
class SampleSet:
    """One data set as planning sees it."""

    weight: float  # how often an epoch draws its samples, > 0
    shard_sizes: ndarray  # (shards,) samples in each shard, held-out ones too
    lengths: ndarray  # (samples,) int32 tokens, those of images included; or HELD_OUT, UNUSABLE
    tiles: ndarray  # (samples,) int32 tiles of each sample


@dataclass(frozen=True)
class Capacity:
    """Room of a pack."""

    tokens: int
    tiles: int | None = None  # in a pack; None: as many as its tokens allow


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The packs of one epoch.

    Drawn = planned + overlong + unusable, a sample counted as often as it is drawn.
    """

    samples: ndarray  # (planned,) int64 global sample numbers, in pack order
    starts: ndarray  # (packs + 1,) int64: pack p holds samples[starts[p] : starts[p + 1]]
    drawn: int
    overlong: int  # do not fit an empty pack, by tokens or by tiles
    unusable: int

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class PlannedPack:
    """Global numbers of the samples that share a pack, in their order inside it."""

    epoch: int
    samples: tuple[int, ...]


def _set_sequence(one: SampleSet, purpose: str) -> ndarray:
    """Return int64 positions in a set as an epoch draws them, without held-out samples."""
    sizes = one.shard_sizes.astype(np.int64)
    first = np.cumsum(sizes) - sizes
    kept = int((one.lengths != HELD_OUT).sum())
    whole = int(one.weight)
    takes = [kept] * whole + [round((one.weight - whole) * kept)]
    sequence = [np.empty(0, np.int64)]
    for number, take in enumerate(takes):
        if take:
            # these words are the seed of every order: never change them
            draw = _random(f"pass {purpose} {number}")
            drawn = []
            for shard in draw.permutation(len(first)):
                drawn.append(first[shard] + draw.permutation(sizes[shard]))
            places = np.concatenate(drawn)
            sequence.append(places[one.lengths[places] != HELD_OUT][:take])
    return np.concatenate(sequence)


def _random(purpose: str) -> np.random.RandomState:
    return np.random.RandomState(np.frombuffer(hashlib.sha256(purpose.encode()).digest(), "<u4"))


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
    is_short_of_tokens = cap is None
    if cap is not None:
        scaled = np.multiply(tiles, capacity.tokens, dtype=np.int64)
        is_short_of_tokens = bool((scaled < (cap + 1) * tokens).all())
    if is_short_of_tokens:
        cap = 0
        needs = [0] * count
    else:
        assert tiles.max() <= cap, "a document has more tiles than a pack takes"
        needs = tiles.tolist()

    # open_packs[r]: packs with room for r more tiles, sorted, each as free tokens * count + its
    # number
    open_packs: list[list[int]] = [[] for _ in range(cap + 1)]
    packs = []
    shortest = int(tokens.min(initial=capacity.tokens))
    sizes = tokens.tolist()
    for position in np.argsort(-tokens, kind="stable").tolist():
        size = sizes[position]
        need = needs[position]
        best = (capacity.tokens + 1) * count
        best_room = cap
        best_at = -1
        for room in range(need, cap + 1):
            keys = open_packs[room]
            at = bisect_left(keys, size * count)
            if at < len(keys) and keys[at] < best:
                best = keys[at]
                best_room = room
                best_at = at
        if best_at < 0:
            free = capacity.tokens
            pack = len(packs)
            packs.append([position])
        else:
            del open_packs[best_room][best_at]
            free, pack = divmod(best, count)
            packs[pack].append(position)
        if free - size >= shortest:
            insort(open_packs[best_room - need], (free - size) * count + pack)
    return packs


@dataclass(eq=False)
class PackOrder:
    """The endless list of packs, numbered from 0: epoch after epoch, no pack spans two.

    Cost: pack n needs the plans of all epochs up to its own, each made once.
    """

    sets: Sequence[SampleSet]
    seed: int
    capacity: Capacity
    shuffle_shards: int
    pack_window: int

    def __post_init__(self) -> None:
        self.epoch_plan = functools.lru_cache(_PLANS_KEPT)(self._plan_with_packs)
        self._first_packs = [0]  # of the epochs from 0 on
        # of the samples of all sets
        self.lengths = np.concatenate([one.lengths for one in self.sets])
        self.tiles = np.concatenate([one.tiles for one in self.sets])

    def plan(self, epoch: int) -> EpochPlan:
        """Draw and pack one epoch.

        A set of weight w is drawn floor(w) times whole, and its first frac(w) once more. The epoch
        is cut into groups of about `shuffle_shards` shards (of small shards as many as hold
        `pack_window` samples), each with its share of every set. Samples are permuted within a
        group, whose windows of about `pack_window` samples are packed one by one.

        Cost: windows of 4096 fill packs 0.2% less than packing the whole epoch would, of 1024 1.1%.
        558,128 samples take half a second of one core and 40 MB.
        """
        capacity = self.capacity
        lengths = self.lengths
        usable = lengths != UNUSABLE
        fits = usable & (lengths <= capacity.tokens)
        if capacity.tiles is not None:
            fits &= self.tiles <= capacity.tiles

        sequences = []
        first = drawn = unusable = kept = 0
        for number, one in enumerate(self.sets):
            sequence = first + _set_sequence(one, f"{self.seed} {epoch} {number}")
            first += len(one.lengths)
            drawn += len(sequence)
            unusable += int((~usable[sequence]).sum())
            fitting = sequence[fits[sequence]]
            kept += len(fitting)
            sequences.append(fitting)

        samples = [np.empty(0, np.int64)]
        sizes = [0]
        shards = sum(one.weight * len(one.shard_sizes) for one in self.sets)
        groups = max(1, round(min(shards / self.shuffle_shards, kept / self.pack_window)))
        for group in range(groups):
            parts = []
            for each in sequences:
                begin = group * len(each) // groups
                end = (group + 1) * len(each) // groups
                parts.append(each[begin:end])
            draw = _random(f"group {self.seed} {epoch} {group}")
            members = draw.permutation(np.concatenate(parts))
            windows = max(1, round(len(members) / self.pack_window))
            for window in np.array_split(members, windows):
                packs = pack_best_fit(lengths[window], capacity, self.tiles[window])
                packs = [packs[position] for position in draw.permutation(len(packs))]
                samples.append(window[list(chain.from_iterable(packs))])
                sizes += map(len, packs)
        return EpochPlan(
            np.concatenate(samples),
            np.cumsum(sizes),
            drawn,
            drawn - unusable - kept,
            unusable,
        )

    def packs(self, first: int, count: int) -> list[PlannedPack]:
        """Return packs [first, first + count); raises UserError where an epoch holds none."""
        while self._first_packs[-1] <= first:
            self.first_pack(len(self._first_packs))
        epoch = bisect_right(self._first_packs, first) - 1
        packs = []
        while len(packs) < count:
            begin = first + len(packs) - self.first_pack(epoch)
            plan = self.epoch_plan(epoch)
            starts = plan.starts[begin : begin + count - len(packs) + 1].tolist()
            for start, end in pairwise(starts):
                packs.append(PlannedPack(epoch, tuple(plan.samples[start:end].tolist())))
            epoch += 1
        return packs

    def first_pack(self, epoch: int) -> int:
        """Return the number of an epoch's first pack.

        Raises UserError where an epoch before it holds none.
        """
        while len(self._first_packs) <= epoch:
            last = self.epoch_plan(len(self._first_packs) - 1)
            self._first_packs.append(self._first_packs[-1] + len(last))
        return self._first_packs[epoch]

    def steps(self, epochs: int, packs_per_step: int) -> int:
        """Return the steps that train every sample of these epochs.

        The next epoch fills the last one.
        """
        return -(-self.first_pack(epochs) // packs_per_step)

    def _plan_with_packs(self, epoch: int) -> EpochPlan:
        """Return an epoch's plan; raises UserError where it holds no pack."""
        plan = self.plan(epoch)
        if len(plan):
            return plan
        if plan.drawn == 0:
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
                f"of {plan.drawn} drawn in epoch {epoch}, {plan.overlong} are longer than "
                f"data.pack_length={self.capacity.tokens} tokens{tiles}, "
                f"and {plan.unusable} cannot be used"
            )
        shards = sum(len(one.shard_sizes) for one in self.sets)
        raise UserError(f"data.shards: no sample in {shards} shards fits into a pack: {why}")
