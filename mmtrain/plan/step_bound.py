"""What a step of a layout takes at least, by a formula: no cut, no schedule, milliseconds for any layout.

StageCosts --decoder layers one by one to the rank that is least busy with them, as memory allows--> the busiest rank
           --its micro-batches, and the way of the first and the last one through the pipeline--> seconds of a step
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from mmtrain.plan.search import MOST_STAGES_PER_RANK
from mmtrain.plan.stage_costs import StageCosts
from mmtrain.plan.streamed_costs import BOTH_ENDS
from mmtrain.plan.fetching import WHOLE_AT_ONCE


class _Layer(NamedTuple):
    """The least that any decoder layer but the last takes, which runs for supervised tokens alone."""

    resident: int  # bytes of weights and optimizer state
    kept: int  # bytes from forward to backward
    spared: int  # of these by recomputing, the most
    working: int  # bytes while it runs
    forward: float  # seconds
    backward: float
    again: float  # more, where it recomputes
    streamed: int  # bytes that leave the device if it is streamed, the most; 0: it cannot be
    buffer: int  # bytes of a streamed layer while it is whole
    host: int  # bytes of a streamed layer in the machine's memory
    fetch: float  # seconds of one fetch


class _Rank(NamedTuple):
    """What a rank has beside decoder layers."""

    in_flight: float  # micro-batches that it keeps at once, on average over its stages
    bytes: int
    seconds: float


def least_step_seconds(costs: StageCosts) -> float:
    """Seconds that a step of any cut takes at least; infinite where no cut fits in memory.

    Of p ranks with v stages each and m micro-batches, whose work is w in all and t of the busiest rank, a micro-batch
    each: m t, and (m + (p - 1) / v) w / p, the law for equal stages. The busiest rank has its share of decoder layers, as
    memory allows: layers that recompute, or are fetched, as few as fit. Of decoder layers of several kinds each amount
    is the least of all, so that where those before the first one that trains keep nothing the bound is a loose one.
    """
    work = sum(layer.forward + layer.backward for layer in costs.timings.layers) + costs.timings.encode
    pipeline, microbatches = costs.setting.pipeline, costs.setting.microbatches_per_step
    found = []
    for stages_per_rank in range(1, 1 + max(1, min(MOST_STAGES_PER_RANK * (pipeline > 1), costs.count // pipeline))):
        busiest = max(_busiest(costs, stages_per_rank), work / pipeline)
        fill = (pipeline - 1) / stages_per_rank * work / pipeline
        found.append(max(microbatches * busiest, microbatches * work / pipeline + fill))
        if stages_per_rank == 1:
            found[0] = max(found[0], _one_stage_seconds(pipeline, microbatches, busiest, work))
    return min(found) + costs.timings.end


def _one_stage_seconds(pipeline: int, microbatches: int, busiest: float, work: float) -> float:
    """1F1B: rank r is idle while ranks before it work on the first micro-batch, those behind on first and last."""
    one_by_one = work / (1 - (1 - 1 / microbatches) ** pipeline)
    return max(one_by_one, (microbatches > pipeline) * (2 * work + (microbatches - pipeline - 1) * busiest))


def _busiest(costs: StageCosts, stages_per_rank: int) -> float:
    """Seconds of the busiest rank for a micro-batch, the encoder left out where it may run anywhere."""
    layer, ranks = _least_layer(costs), _ranks(costs, stages_per_rank)
    kinds = {rank: _seconds_of(costs, layer, rank) for rank in set(ranks)}
    held = [0] * len(ranks)
    next_up = [(kinds[rank](1), number) for number, rank in enumerate(ranks)]
    heapq.heapify(next_up)
    busiest = max(kinds[rank](0) for rank in ranks)
    for _ in range(costs.count - 3):  # all but front, last decoder layer and head
        seconds, number = next_up[0]
        busiest, held[number] = max(busiest, seconds), held[number] + 1
        heapq.heapreplace(next_up, (kinds[ranks[number]](held[number] + 1), number))
        if busiest == math.inf:
            break
    return busiest


def _least_layer(costs: StageCosts) -> _Layer:
    layers, seconds, streaming = costs.layers[1:-2], costs.timings.layers[1:-2], costs.setting.streaming
    streamed = [layer for layer in layers if layer.streamed_bytes] if streaming.is_possible else []
    return _Layer(
        resident=min((x.weight_bytes + x.state_bytes for x in layers), default=0),
        kept=min((x.kept_bytes for x in layers), default=0),
        spared=max((x.kept_bytes - x.kept_bytes_recomputing for x in layers), default=0),
        working=min((max(x.forward_working_bytes, x.backward_working_bytes) for x in layers), default=0),
        forward=min((x.forward for x in seconds), default=0.0),
        backward=min((x.backward for x in seconds), default=0.0),
        again=min((x.recomputing - x.backward for x in seconds), default=0.0),
        streamed=max((x.streamed_weight_bytes - streaming.kept_on_device(x) for x in streamed), default=0),
        buffer=min((streaming.buffer_bytes(x) for x in streamed), default=0),
        host=min((streaming.buffer_bytes(x) for x in streamed), default=0) * (streaming.source == "host"),
        fetch=min((costs.fetch_seconds(x) for x in streamed), default=0.0),
    )


def _ranks(costs: StageCosts, stages_per_rank: int) -> list[_Rank]:
    """Front on the first, head on the last, and an encoder that trains, or has only one rank, on the first."""
    pipeline, most, v = costs.setting.pipeline, costs.setting.microbatches_per_step, stages_per_rank
    encoder, ends, found = costs.costs.encoder, (0, costs.count - 1), []
    is_free = encoder.frozen and pipeline > 1
    for rank in range(pipeline):
        kept = pipeline - rank if v == 1 else ((v - 1) * pipeline + 2 * (pipeline - rank - 1) + 1) / v
        here = [end for end, holder in zip(ends, (0, pipeline - 1), strict=True) if holder == rank]
        layers = [costs.layers[end] for end in here]
        size = sum(x.weight_bytes + x.state_bytes for x in layers)
        size -= costs.costs.shared_ends_bytes * (len(here) == 2)
        seconds = sum(costs.timings.layers[end].forward + costs.timings.layers[end].backward for end in here)
        if rank == 0 and not is_free:
            size += costs.encoder_bytes(encoder.blocks)
            seconds += costs.timings.encode
        found.append(_Rank(min(most, kept), size, seconds))
    return found


def _seconds_of(costs: StageCosts, layer: _Layer, rank: _Rank) -> Callable[[int], float]:
    """Of a rank with so many decoder layers, of which as many recompute and are streamed as take the fewest."""
    may_stream = layer.streamed > 0
    most_host = costs.setting.streaming.host_bytes

    def seconds(count: int) -> float:
        computes = rank.seconds + count * (layer.forward + layer.backward)
        need = rank.bytes + count * (layer.resident + rank.in_flight * layer.kept) + (layer.working if count else 0)
        excess = need - costs.usable_bytes
        if excess <= 0:
            return computes
        if not count:
            return math.inf
        of_one = rank.in_flight * layer.spared
        if not may_stream:
            recompute = math.ceil(excess / of_one) if of_one else math.inf
            return computes + recompute * layer.again if recompute <= count else math.inf
        found = math.inf
        for recompute in range(count + 1 if of_one else 1):
            left = excess - recompute * of_one
            streamed = 0
            if left > 0:
                streamed = max(1, math.ceil((left + layer.buffer) / layer.streamed))
                if streamed > 1:
                    streamed = math.ceil((left + WHOLE_AT_ONCE * layer.buffer) / layer.streamed)
            if streamed > count or (most_host is not None and streamed * layer.host > most_host):
                continue
            fetches = max(0.0, streamed - BOTH_ENDS / 2) * layer.fetch
            forward, backward = count * layer.forward, count * layer.backward + recompute * layer.again
            found = min(found, rank.seconds + max(forward, fetches) + max(backward, fetches))
        return found

    return seconds
