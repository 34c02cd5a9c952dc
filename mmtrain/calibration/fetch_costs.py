"""How fast streamed layers come to a device: alone, and while it computes."""

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
    """Return the rates of the plan's source, by its name; none for a plan that streams nothing. Collective.

    On a CPU the thread that computes also fetches: both rates are equal.
    """
    if plan.streaming is None:
        return {}
    timeout, rank = config.parallel.timeout_seconds, dist.get_rank()
    replicas = replica_group(plan, rank, torch.device("cpu"), timeout)
    streamed = streamed_layers(plan, rank, device, replicas, timeout)
    assert streamed is not None
    number = next((layer for stage in plan.ranks[rank].stages for layer in stage.streamed), 0)
    load_decoder_layers(
        config.model.llm.path,
        number,
        number + 1,
        embedding=False,
        head=False,
        dtype=DTYPES[config.model.llm.dtype],
        device=device,
        streamed=streamed,
        streamed_numbers=(number,),
    )
    layer = streamed.layers[number]
    alone = _median(lambda: _alone(streamed, layer))
    beside = _median(lambda: _beside(streamed, layer, 2 * alone)) if device.type == "cuda" else alone
    slowest = [max(of_ranks) for of_ranks in zip(*all_gather_object((alone, beside)), strict=True)]
    fetched = layer.bytes
    if plan.streaming.source == "peers":  # a rank keeps its own part
        fetched -= layer.bytes // plan.streaming.weight_shards
    return {plan.streaming.source: FetchRates(*(fetched / seconds for seconds in slowest))}


def _median(measure: Callable[[], float]) -> float:
    return statistics.median([measure() for _ in range(ROUNDS + 1)][1:])


def _alone(streamed: StreamedLayers, layer: StreamedLayer) -> float:
    synchronize = torch.get_device_module(streamed.source.device).synchronize
    layer.make_room()
    dist.barrier()
    synchronize()
    began = time.perf_counter()
    streamed.source.fetch(layer)()
    synchronize()
    seconds = time.perf_counter() - began
    layer.let_go()
    return seconds


def _beside(streamed: StreamedLayers, layer: StreamedLayer, seconds: float) -> float:
    """Seconds of a fetch on a GPU while matrix products run for at least `seconds`."""
    device = streamed.source.device
    side = torch.cuda.Stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    layer.make_room()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    matrix @ matrix
    torch.cuda.synchronize(device)
    product_seconds = time.perf_counter() - began
    begin.record()
    arrived = streamed.source.fetch(layer)
    for _ in range(max(1, round(seconds / product_seconds))):
        matrix @ matrix
    with torch.cuda.stream(side):
        arrived()
        end.record()
    torch.cuda.synchronize(device)
    layer.let_go()
    return begin.elapsed_time(end) / 1000
