"""How full packs of a length become, and which length near it fills them best.

sets of samples --order.plan_epoch, as training plans--> Fill: packs, share of their tokens that is no padding

Lengths in tokens depend on images that all take the same number: captions of one image each fill a pack in steps of
some 600 tokens, and a pack length slightly below a multiple of that wastes most of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmtrain.config.schema import DataSection
from mmtrain.data.stream.order import Capacity, SampleSet, plan_epoch

NEARBY = 8  # lengths are near if they differ by at most an eighth
LARGEST_STEP = 64  # tokens between the lengths that are tried
SMALLEST_STEP = 8  # tokens; what tensor cores want matrices to be multiples of
SEARCHED_SAMPLES = 32_768  # that the lengths are tried on; the best is then planned with all


@dataclass(frozen=True)
class Fill:
    """The first epoch with packs of one length."""

    pack_length: int  # tokens
    packs: int
    fill: float  # share of the packs' tokens that hold a sample's, 0 without packs
    overlong: int  # samples that do not fit into a pack


def epoch_fill(sets: Sequence[SampleSet], capacity: Capacity) -> Fill:
    """Plan an epoch as a run with seed 0 and the default windows does. 558,000 samples take a second."""
    defaults = DataSection.model_fields
    plan = plan_epoch(
        sets, 0, 0, capacity, defaults["shuffle_shards"].default, pack_window=defaults["pack_window"].default
    )
    tokens = int(np.concatenate([one.lengths for one in sets])[plan.samples].sum(dtype=np.int64))
    return Fill(capacity.tokens, len(plan), tokens / (max(len(plan), 1) * capacity.tokens), plan.overlong)


def nearby_lengths(pack_length: int) -> list[int]:
    """Pack lengths that differ from this one by at most an eighth, it included.

    The others are multiples of about a 64th of it, of 64 tokens at most: 32 near 2048, 64 near 4096 and 8192.
    """
    step = max(SMALLEST_STEP, min(LARGEST_STEP, pack_length // 64 // SMALLEST_STEP * SMALLEST_STEP))
    reach = pack_length // NEARBY
    first = -(-max(pack_length - reach, 1) // step) * step
    return sorted({pack_length, *range(first, pack_length + reach + 1, step)})


def best_nearby(sets: Sequence[SampleSet], capacity: Capacity) -> Fill:
    """The pack length near `capacity.tokens` that fills best among those that skip no more samples; ties: the nearest.

    Price: the lengths, at most 33 of them for the usual ones, are compared on 32,768 samples: 5 s of one core.
    """
    lengths = np.concatenate([one.lengths for one in sets])
    overlong = (lengths > capacity.tokens).sum()
    candidates = [
        replace(capacity, tokens=length)
        for length in nearby_lengths(capacity.tokens)
        if (lengths > length).sum() <= overlong
    ]
    some = _some(sets)
    best = max(candidates, key=lambda one: (epoch_fill(some, one).fill, -abs(one.tokens - capacity.tokens)))
    return max(epoch_fill(sets, best), epoch_fill(sets, capacity), key=lambda fill: fill.fill)


def _some(sets: Sequence[SampleSet]) -> list[SampleSet]:
    """At most SEARCHED_SAMPLES of all samples, drawn evenly, as one shard of each set."""
    sizes = [len(one.lengths) for one in sets]
    share = min(1.0, SEARCHED_SAMPLES / max(sum(sizes), 1))
    draw = np.random.RandomState(0)
    some = []
    for one, size in zip(sets, sizes, strict=True):
        kept = draw.permutation(size)[: round(share * size)]
        some.append(SampleSet(one.weight, np.array([len(kept)]), one.lengths[kept], one.images[kept]))
    return some
