"""A lower bound of a step's seconds, by a formula: without a cut or a schedule, in a millisecond for any layout.

StageCosts --decoder layers one by one to the rank that is the least busy with them, as memory allows--> busiest rank
           --all micro-batches there, and the way of the first one through the pipeline and back--> seconds of a step
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmtrain.plan.fetching import BOTH_ENDS, WHOLE_AT_ONCE
from mmtrain.plan.search import MOST_STAGES_PER_RANK
from mmtrain.plan.stage_costs import StageCosts


class _Layer(NamedTuple):
    """The least that any decoder layer takes, but for the last one, which may run for supervised tokens alone."""

    resident: int  # bytes of weights and optimizer state
    kept: int  # bytes from forward to backward
    working: int  # bytes while it runs
    spared: int  # of `kept` where it recomputes; the most of any layer, as `saved`
    saved: int  # of `resident` where it is streamed; 0: no layer may be
    buffer: int  # bytes of a streamed layer while it is whole
    on_host: int  # bytes of a streamed layer in its machine's memory
    forward: float  # seconds
    backward: float
    again: float  # added to `backward` where it recomputes
    fetch: float  # of one fetch


class _Rank(NamedTuple):
    """What a rank has besides decoder layers."""

    stages: int
    in_flight: float  # micro-batches that it keeps for backward, a mean over its stages
    resident: int
    seconds: float


def least_step_seconds(costs: StageCosts) -> float:
    """Seconds that a step takes at least, whatever the cut; infinite where no cut fits in memory.

    With p ranks of v stages and m micro-batches, which take w on all ranks together and t on the busiest one, a step
    takes m t, and (max(m, p) + (min(m, p) - 1) / v) w / p: the law of equal stages, v being what is best for it; w is
    without a frozen encoder, which may run where ranks would wait. With one stage a rank it also takes
    2 w + (m - p - 1) t: the busiest waits while others work on the first micro-batch and on the last. Ranks recompute
    and stream as few layers as fit, which counts in t. Where decoder layers are of several kinds, each amount is the
    least of any: a loose bound for a run that trains from a layer in the middle on.

    Unequal stages may beat the law: of 2,685 plans of layers with random costs two did, by 4% at most. That nothing
    fits does not rest on it.
    """
    return min(_step_seconds(costs, count, _works(costs, count)) for count in _stage_counts(costs))


def _step_seconds(costs: StageCosts, stages_per_rank: int, works: Sequence[float]) -> float:
    """Seconds of a step if the ranks take `works` seconds for a micro-batch."""
    pipeline, microbatches = costs.setting.pipeline, costs.setting.microbatches_per_step
    layers, encode = sum(layer.forward + layer.backward for layer in costs.timings.layers), costs.timings.encode
    passed = layers if _encodes_anywhere(costs) else layers + encode
    busiest = max(*works, (layers + encode) / pipeline)
    fill = max(0, pipeline - microbatches) + (min(microbatches, pipeline) - 1) / stages_per_rank
    seconds = max(microbatches * busiest, (microbatches * max(passed, sum(works)) + fill * passed) / pipeline)
    if stages_per_rank == 1 and microbatches > pipeline:
        seconds = max(seconds, 2 * passed + (microbatches - pipeline - 1) * busiest)
    return seconds + costs.timings.end


def _stage_counts(costs: StageCosts) -> range:
    """Stages a rank that the planner may choose."""
    pipeline = costs.setting.pipeline
    return range(1, 2 if pipeline == 1 else 1 + max(1, min(MOST_STAGES_PER_RANK, costs.count // pipeline)))


def _encodes_anywhere(costs: StageCosts) -> bool:
    """Whether the encoder may run on any rank, and ahead of need."""
    return costs.costs.encoder.frozen and costs.setting.pipeline > 1


def _works(costs: StageCosts, stages_per_rank: int) -> list[float]:
    """Seconds of a micro-batch on each rank, an encoder that may run anywhere left out."""
    layer, ranks = _least_layer(costs), _ranks(costs, stages_per_rank)
    seconds_of = {rank: _seconds_of(costs, layer, rank) for rank in set(ranks)}
    held = [0] * len(ranks)
    more = [(seconds_of[rank](1), number) for number, rank in enumerate(ranks)]  # with one layer more
    heapq.heapify(more)
    for _ in range(costs.count - 3):  # all decoder layers but the last
        seconds, number = more[0]
        held[number] += 1
        if seconds == math.inf:
            break
        heapq.heapreplace(more, (seconds_of[ranks[number]](held[number] + 1), number))
    return [seconds_of[rank](count) for rank, count in zip(ranks, held, strict=True)]


def _least_layer(costs: StageCosts) -> _Layer:
    layers, seconds, streaming = costs.layers[1:-2], costs.timings.layers[1:-2], costs.setting.streaming
    streamed = [layer for layer in layers if layer.streamed_bytes] if streaming.is_possible else []
    buffer = min(map(streaming.buffer_bytes, streamed), default=0)
    return _Layer(
        resident=min((x.weight_bytes + x.state_bytes for x in layers), default=0),
        kept=min((x.kept_bytes for x in layers), default=0),
        working=min((max(x.forward_working_bytes, x.backward_working_bytes) for x in layers), default=0),
        spared=max((x.kept_bytes - x.kept_bytes_recomputing for x in layers), default=0),
        saved=max((x.streamed_weight_bytes - streaming.kept_on_device(x) for x in streamed), default=0),
        buffer=buffer,
        on_host=buffer if streaming.source == "host" else 0,
        forward=min((x.forward for x in seconds), default=0.0),
        backward=min((x.backward for x in seconds), default=0.0),
        again=min((x.recomputing - x.backward for x in seconds), default=0.0),
        fetch=min(map(costs.fetch_seconds, streamed), default=0.0),
    )


def _ranks(costs: StageCosts, stages_per_rank: int) -> list[_Rank]:
    """The first has the front, and the encoder where that must be there, the last one the head."""
    pipeline, timings, ranks = costs.setting.pipeline, costs.timings, []
    for rank in range(pipeline):
        behind = pipeline - 1 - rank
        if stages_per_rank == 1:
            in_flight = 1.0 + behind
        else:  # as interleaved 1F1B keeps them, see `schedule`
            in_flight = ((stages_per_rank - 1) * pipeline + 2 * behind + 1) / stages_per_rank
        ends = [0] * (rank == 0) + [costs.count - 1] * (behind == 0)
        resident = sum(costs.layers[end].weight_bytes + costs.layers[end].state_bytes for end in ends)
        resident -= costs.costs.shared_ends_bytes * (len(ends) > 1)
        seconds = sum(timings.layers[end].forward + timings.layers[end].backward for end in ends)
        if rank == 0 and not _encodes_anywhere(costs):
            resident += costs.encoder_bytes(costs.costs.encoder.blocks)
            seconds += timings.encode
        ranks.append(_Rank(stages_per_rank, min(in_flight, costs.setting.microbatches_per_step), resident, seconds))
    return ranks


def _seconds_of(costs: StageCosts, layer: _Layer, rank: _Rank) -> Callable[[int], float]:
    """Return a function of the number of decoder layers: seconds of a micro-batch, infinite if they do not fit."""
    spared, most_on_host = rank.in_flight * layer.spared, costs.setting.streaming.host_bytes

    def seconds(count: int) -> float:
        needed = rank.resident + count * (layer.resident + rank.in_flight * layer.kept) + layer.working * (count > 0)
        excess = needed - costs.usable_bytes
        if excess <= 0:
            return rank.seconds + count * (layer.forward + layer.backward)
        if layer.saved:
            recompute = range(count + 1 if spared else 1)
        else:
            fewest = math.ceil(excess / spared) if spared else math.inf
            recompute = range(int(fewest), int(fewest) + 1) if fewest <= count else range(0)
        return min((with_recomputed(count, again, excess - again * spared) for again in recompute), default=math.inf)

    def with_recomputed(count: int, again: int, excess: float) -> float:
        streamed = _streamed(layer, excess)
        if streamed > count or (most_on_host is not None and streamed * layer.on_host > most_on_host):
            return math.inf
        waited_for = max(0, streamed - BOTH_ENDS * rank.stages)
        seconds = rank.seconds
        for computes in (count * layer.forward, count * layer.backward + again * layer.again):
            seconds += computes
            if waited_for:
                seconds += waited_for * max(0.0, layer.fetch - computes / streamed)
        return seconds

    return seconds


def _streamed(layer: _Layer, excess: float) -> int:
    """Return the fewest layers to stream so that `excess` bytes leave the device."""
    if excess <= 0:
        return 0
    if layer.saved - layer.buffer >= excess:
        return 1
    return max(WHOLE_AT_ONCE, math.ceil((excess + WHOLE_AT_ONCE * layer.buffer) / layer.saved))
