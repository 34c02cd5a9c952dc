"""Cuts: which layers each stage holds; and the best cut for one stage a rank.

A cut is contiguous: stage s holds layers [cut[s], cut[s + 1]), layer 0 being the front and the last one the head.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

from mmtrain.config.schema import RunConfig
from mmtrain.plan.stage_costs import LayerRange, StageCosts

Cut = tuple[int, ...]  # one border more than stages


def given_cut(config: RunConfig, costs: StageCosts) -> Cut:
    """The cut that `parallel.boundaries` describes."""
    return (0, *(boundary + 1 for boundary in config.parallel.boundaries or ()), costs.count)


def ranges_of(cut: Cut, rank: int, pipeline: int) -> tuple[LayerRange, ...]:
    """The stages of a rank, as layers [begin, end)."""
    return tuple((cut[s], cut[s + 1]) for s in range(rank, len(cut) - 1, pipeline))


def first_trainable_stage(costs: StageCosts, cut: Cut) -> int:
    """The stage that holds the first layer in which anything trains."""
    return next(stage for stage, end in enumerate(cut[1:]) if costs.first_trainable < end)


def uniform_cut(decoder_layers: int, stages: int) -> Cut:
    """The decoder layers in equal parts, front and head on top; as many stages as decoder layers at most."""
    return (0, *(round(decoder_layers * stage / stages) + 1 for stage in range(1, stages)), decoder_layers + 2)


# ---- the best cut for one stage a rank


def best_cut(costs: StageCosts, slices: Sequence[int] | None = None) -> Cut | None:
    """The cut whose slowest rank takes the fewest seconds, all ranks within the memory limit; None if none fits.

    `slices`: blocks of the encoder that each rank holds; None: rank 0 has all of them.

    Exact, for one stage a rank. Of several such cuts the one with the smallest sum of squared seconds, then the one
    whose late stages hold the most layers: the answer is a function of the costs alone.
    """

    def seconds(stage: int, begin: int, end: int) -> float:
        need = costs.one_stage_need(stage, begin, end, slices and slices[stage])
        return need.seconds if costs.fits(need) else math.inf

    pipeline = costs.setting.pipeline
    slowest, cut = _search(costs.count, pipeline, seconds, max, costs.least_seconds)
    if cut is None:
        return None

    def square(amount: float) -> float:
        return amount * amount if amount <= slowest else math.inf

    return _search(
        costs.count,
        pipeline,
        lambda stage, begin, end: square(seconds(stage, begin, end)),
        operator.add,
        lambda begin, end: square(costs.least_seconds(begin, end)),
    )[1]


def even_cut(costs: StageCosts, stages: int, encode: float, *, front_alone: bool = False) -> Cut:
    """The cut into any number of stages whose slowest takes the fewest seconds, memory and recomputation left out.

    The encoder counts for `encode` seconds on stage 0, which may have to hold the front alone.
    """

    def seconds(stage: int, begin: int, end: int) -> float:
        if front_alone and begin == 0 and end > 1:
            return math.inf
        found = costs.stage(begin, end, 0)
        return found.forward + found.backward + (encode if begin == 0 else 0.0)

    _, cut = _search(costs.count, stages, seconds, max, costs.compute_seconds)
    assert cut is not None
    return cut


def smallest_cut(costs: StageCosts, slices: Sequence[int] | None = None) -> Cut:
    """The cut, one stage a rank, whose largest rank needs the least memory, recomputing where that is allowed.

    `slices` as in `best_cut`.
    """
    costs = costs.without_memory()

    def size(stage: int, begin: int, end: int) -> int:
        return costs.one_stage_need(stage, begin, end, slices and slices[stage]).total_bytes

    _, cut = _search(costs.count, costs.setting.pipeline, size, max, costs.least_bytes)
    assert cut is not None
    return cut


def _search(
    layers: int,
    stages: int,
    amount: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    least: Callable[[int, int], float],
) -> tuple[float, Cut | None]:
    """Dynamic programming over (stage, end): the least joined amount of all stages, and its cut; infinite and None.

    `amount(stage, begin, end)` is infinite where that stage may not be; `least(begin, end)` is a lower bound of it that
    grows as `begin` falls, so that the scan over `begin` can stop.
    """
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # before each stage: end -> (joined amount, begin)
    for stage in range(stages):
        row: dict[int, tuple[float, int]] = {}
        last = stage == stages - 1
        for end in [layers] if last else range(stage + 1, layers - stages + stage + 2):
            found = math.inf, 0
            for begin in range(end - 1, stage - 1, -1):
                bound = least(begin, end)
                if bound == math.inf or bound > found[0]:
                    break
                if begin in best[-1]:
                    joined = join(best[-1][begin][0], amount(stage, begin, end))
                    if joined <= found[0]:  # equal: the smaller begin
                        found = joined, begin
            if found[0] < math.inf:
                row[end] = found
        best.append(row)
    if layers not in best[-1]:
        return math.inf, None
    borders = [layers]
    for row in reversed(best[1:]):
        borders.append(row[borders[-1]][1])
    return best[-1][layers][0], tuple(reversed(borders))
