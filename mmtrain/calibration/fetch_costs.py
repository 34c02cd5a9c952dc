"""How fast streamed layers come to a device: alone, and while it computes.

a layer of the run, from where the run keeps it --fetch, alone--> bytes a second --fetch, beside a forward--> the same
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.config.schema import RunConfig
from mmtrain.engine.process_groups import replica_group
from mmtrain.engine.stages import streamed_layers
from mmtrain.models.modules.language import load_decoder_layers
from mmtrain.models.modules.stage import DTYPES
from mmtrain.models.weights.streaming import StreamedLayer, StreamedLayers
from mmtrain.plan.calibration import FetchRates
from mmtrain.plan.plan import Plan

ROUNDS = 7


def measure_fetches(config: RunConfig, plan: Plan, device: torch.device) -> dict[str, FetchRates]:
    """The rates of the plan's source, by its name; empty for a plan that streams nothing. Every rank calls this.

    On a CPU a fetch from the host and dequantising are work of the very thread that computes: there both rates are one.
    """
    if plan.streaming is None:
        return {}
    timeout = config.parallel.timeout_seconds
    replicas = replica_group(plan, dist.get_rank(), torch.device("cpu"), timeout)
    streamed = streamed_layers(plan, dist.get_rank(), device, replicas, timeout)
    assert streamed is not None
    mine = [layer for stage in plan.ranks[dist.get_rank()].stages for layer in stage.streamed] or [0]
    load_decoder_layers(
        config.model.llm.path,
        mine[0],
        mine[0] + 1,
        embedding=False,
        head=False,
        dtype=DTYPES[config.model.llm.dtype],
        device=device,
        streamed=streamed,
        streamed_numbers=mine[:1],
    )
    layer = streamed.layers[mine[0]]
    alone = _median(lambda: _alone(streamed, layer))
    beside = _median(lambda: _beside(streamed, layer, 2 * alone)) if device.type == "cuda" else alone
    slowest = [max(of_ranks) for of_ranks in zip(*all_gather_object((alone, beside)), strict=True)]
    came = layer.bytes
    if plan.streaming.source == "peers":  # a part was there
        came -= layer.bytes // plan.streaming.weight_shards
    return {plan.streaming.source: FetchRates(*(came / seconds for seconds in slowest))}


def _median(measure: Callable[[], float]) -> float:
    return statistics.median([measure() for _ in range(ROUNDS + 1)][1:])


def _alone(streamed: StreamedLayers, layer: StreamedLayer) -> float:
    device = streamed.source.device
    layer.make_room()
    dist.barrier()
    _synchronize(device)
    began = time.perf_counter()
    streamed.source.fetch(layer)()
    _synchronize(device)
    took = time.perf_counter() - began
    layer.let_go()
    return took


def _beside(streamed: StreamedLayers, layer: StreamedLayer, seconds: float) -> float:
    """On a GPU: of a fetch while matrix products run for at least so long."""
    device = streamed.source.device
    side = torch.cuda.Stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    layer.make_room()
    torch.cuda.synchronize(device)
    once = time.perf_counter()
    matrix @ matrix
    torch.cuda.synchronize(device)
    once = time.perf_counter() - once
    begin.record()
    arrived = streamed.source.fetch(layer)
    for _ in range(max(1, round(seconds / once))):
        matrix @ matrix
    with torch.cuda.stream(side):
        arrived()
        end.record()
    torch.cuda.synchronize(device)
    layer.let_go()
    return begin.elapsed_time(end) / 1000


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
