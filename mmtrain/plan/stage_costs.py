"""Seconds and bytes of any stage of any cut, and of any rank.

layers' costs and timings --StageCosts.stage--> one stage --StageCosts.fitted--> a rank that fits
    into its memory

A rank's memory is weights, optimizer state and the peak of its schedule (`simulate`). As few layers
recompute as fit, those of the rank's earliest stage first, since what those keep is kept longest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mmtrain.config.limits import MAX_LAYERS
from mmtrain.config.parallel import ParallelSection
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import Models
from mmtrain.facts.quantised import Quantisation
from mmtrain.plan.calibration import (
    CPU,
    GPU,
    Device,
    Timings,
    assumed_timings,
    calibrated,
    cpu_device,
    find_calibration,
)
from mmtrain.plan.costs import LayerCost, RunCosts, run_costs
from mmtrain.plan.instructions import ALIGNMENT, NO_WAITS, WHOLE_AT_ONCE, Waits, spread, waits_of
from mmtrain.plan.simulate import Buffers, Instant, StageBytes, peak

RESERVED_SHARE = 0.06
"""Share of a memory limit left to what is not counted, fragmentation above all."""
RESERVED_GPU_BYTES = 5 * 2**29
"""Least of a GPU's memory that is left: its context, cuBLAS and up to nine communicators take 1.5
to 2.5 GiB.
"""

LayerRange = tuple[int, int]  # layers [begin, end)
Ranges = tuple[LayerRange, ...]  # of the stages of a rank
PerRank = Literal["auto"] | tuple[int, ...]
"""Numbers of layers, one for each pipeline rank; "auto": the planner chooses them."""


def limit_on_gpu(memory_bytes: int) -> int:
    """A rank's memory limit on a GPU with this much memory: what is left after the larger of both
    reserves.
    """
    return min(
        memory_bytes, max(0, math.floor((memory_bytes - RESERVED_GPU_BYTES) / (1 - RESERVED_SHARE)))
    )


# ---- streaming


@dataclass(frozen=True)
class Streaming:
    """The frozen decoder layers that may be streamed, and their source."""

    layers: PerRank = ()  # empty: none
    # the latter: in fewer bits, on the device
    source: Literal["host", "peers"] | Quantisation = "host"
    weight_shards: int = 1  # ranks that each keep a part
    host_bytes: int | None = None  # that a rank may keep in its machine's memory; None: no limit

    @property
    def is_possible(self) -> bool:
        return self.layers == "auto" or any(self.layers)

    def buffer_bytes(self, layer: LayerCost) -> int:
        step = ALIGNMENT * self.weight_shards
        return -(-layer.streamed_bytes // step) * step

    def kept_on_device(self, layer: LayerCost) -> int:
        if self.source == "host":
            return 0
        if self.source == "peers":
            return self.buffer_bytes(layer) // self.weight_shards
        return layer.quantised_bytes

    def fetched_bytes(self, layer: LayerCost) -> int:
        """Bytes that each fetch brings to the device, or makes there from fewer bits."""
        fetched = self.buffer_bytes(layer)
        if self.source == "peers":
            fetched -= self.kept_on_device(layer)
        return fetched


class Streamed(NamedTuple):
    """Layers of one rank that are streamed, spread evenly over those that may be."""

    entries: tuple[tuple[int, ...], ...]  # of each stage, counted from its first layer
    saved_bytes: int  # on the device, less their buffers and what stays
    host_bytes: int  # in the machine's memory


def streamed_layers(
    streaming: Streaming,
    stages: Sequence[Sequence[LayerCost]],
    count: int,
) -> Streamed:
    """Stream `count` layers of a rank, or as many as may be; `stages` are the layers of each of its
    stages.
    """
    candidates = []
    for stage, layers in enumerate(stages):
        for entry, layer in enumerate(layers):
            if layer.streamed_bytes and streaming.is_possible:
                candidates.append((stage, entry, layer))
    count = min(count, len(candidates))

    entries: list[list[int]] = [[] for _ in stages]
    saved = buffers = largest = 0
    for chosen in spread(count, len(candidates)):
        stage, entry, layer = candidates[chosen]
        entries[stage].append(entry)
        saved += layer.streamed_weight_bytes - streaming.kept_on_device(layer)
        buffers += streaming.buffer_bytes(layer)
        largest = max(largest, streaming.buffer_bytes(layer))
    # Memory of a smaller buffer may not fit a larger one, so each buffer counts as the largest.
    saved -= largest * min(count, WHOLE_AT_ONCE)
    if streaming.source != "host":
        buffers = 0
    return Streamed(tuple(map(tuple, entries)), saved, buffers)


# ---- stages and ranks


@dataclass(frozen=True)
class Setting:
    """The facts besides the layers' costs on which a cut depends."""

    pipeline: int
    microbatches_per_step: int
    memory_bytes: int | None  # a rank's limit
    recompute_layers: PerRank
    polls_sends: bool = True  # see `simulate.instants`
    streaming: Streaming = Streaming()


class StageCost(NamedTuple):
    """One stage and one micro-batch."""

    forward: float  # seconds, without the encoder
    backward: float  # seconds; 0 where nothing runs backward
    bytes: StageBytes
    forward_waits: Waits = NO_WAITS
    backward_waits: Waits = NO_WAITS

    @property
    def seconds(self) -> float:
        return (
            self.forward
            + self.backward
            + self.forward_waits.seconds()
            + self.backward_waits.seconds()
        )


@dataclass(frozen=True)
class RankCost:
    """The stages of one rank; seconds of one micro-batch, its slice of the encoder included."""

    stages: tuple[StageCost, ...]
    recompute_layers: tuple[int, ...]  # of each stage
    seconds: float
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    working_bytes: int
    # of each stage, layers counted from its first; empty: none
    streamed: tuple[tuple[int, ...], ...]
    host_bytes: int

    @property
    def streamed_count(self) -> int:
        return sum(map(len, self.streamed))

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.activation_bytes + self.working_bytes


class StageCosts:
    """Costs of any stage of any cut, and of any rank of any schedule, of one run."""

    def __init__(self, costs: RunCosts, timings: Timings, setting: Setting) -> None:
        self.costs = costs
        self.timings = timings
        self.setting = setting
        self.layers = costs.layers
        self.count = len(costs.layers)
        trains = [bool(layer.trainable_names) for layer in costs.layers]
        self.first_trainable = trains.index(True)
        self.first_trainable_decoder_layer = max(0, self.first_trainable - 1)
        self.usable_bytes: float = math.inf
        if setting.memory_bytes is not None:
            self.usable_bytes = math.floor(setting.memory_bytes * (1 - RESERVED_SHARE))

        encoder = costs.encoder
        self.buffers = Buffers(
            costs.hidden_bytes,
            costs.integer_bytes,
            encoder.feature_bytes,
            encoder.batch_bytes,
            encoder.pixel_bytes,
            encoder.hidden_bytes,
        )

        self._run_begins: list[int] = []  # for each layer the first of the unbroken run of its kind
        for i, layer in enumerate(costs.layers):
            continues = i > 0 and layer.kind == costs.layers[i - 1].kind
            self._run_begins.append(self._run_begins[-1] if continues else i)

        self.stage = functools.cache(self._stage)
        self._held = functools.cache(self._find_held)
        self._streamed = functools.cache(self._find_streamed)
        self._most_streamed = functools.cache(self._find_most_streamed)

    # ---- stages

    @property
    def most_stages(self) -> int:
        return self.count - self.costs.first_layers + 1

    def same_range(self, begin: int, end: int) -> LayerRange:
        """Return the first range of layers with exactly the costs of [begin, end): most decoder
        layers are alike.
        """
        first = self._run_begins[begin]
        if first == begin or end >= self.count - 1 or self._run_begins[end - 1] != first:
            return begin, end
        return first, first + end - begin

    def layers_of(self, begin: int, end: int) -> tuple[LayerCost, ...]:
        """Layers [begin, end) as one stage; without the head the last decoder layer runs for all
        tokens.
        """
        if end == self.count - 1:
            return (*self.layers[begin : end - 1], self.costs.whole_last)
        return self.layers[begin:end]

    def decoder_layers(self, layer_range: LayerRange) -> int:
        return max(0, min(layer_range[1], self.count - 1) - max(layer_range[0], 1))

    @property
    def encodes_anywhere(self) -> bool:
        """Whether the encoder may run on any rank, and ahead of need."""
        return (
            self.costs.encoder.frozen
            and self.costs.encoder.can_be_cut
            and self.setting.pipeline > 1
        )

    def _find_held(self, ranges: Ranges) -> tuple[int, int, int]:
        """Bytes of weights and of optimizer state, and trained elements, of a rank's layers."""
        weights = state = trainable = 0
        for begin, end in ranges:
            for layer in self.layers[begin:end]:
                weights += layer.weight_bytes
                state += layer.state_bytes
                trainable += layer.trainable
        if ranges[0][0] == 0 and ranges[-1][1] == self.count:
            weights -= self.costs.shared_ends_bytes
        return weights, state, trainable

    def _find_streamed(self, ranges: Ranges, count: int) -> Streamed:
        stages = [self.layers[begin:end] for begin, end in ranges]
        return streamed_layers(self.setting.streaming, stages, count)

    def _find_most_streamed(self, ranges: Ranges) -> int:
        on_host = self.setting.streaming.host_bytes
        most = sum(map(len, self._streamed(ranges, self.count).entries))
        while on_host is not None and most and self._streamed(ranges, most).host_bytes > on_host:
            most -= 1
        return most

    def _stage(
        self,
        begin: int,
        end: int,
        recompute: int,
        streamed: tuple[int, ...] = (),
    ) -> StageCost:
        """Cost of layers [begin, end); the first `recompute` recompute, those at `streamed` are
        streamed.
        """
        costs = self.costs
        seconds_of = list(self.timings.layers[begin:end])
        if end == self.count - 1:
            seconds_of[-1] = self.timings.whole_last
        runs_backward = end > self.first_trainable
        forward = self.timings.call
        backward = self.timings.call if runs_backward else 0.0
        kept = 0
        if costs.keeps_input and begin > self.first_trainable:
            kept = costs.hidden_bytes

        most_forward = most_backward = 0
        for i, (cost, seconds) in enumerate(
            zip(self.layers_of(begin, end), seconds_of, strict=True), begin
        ):
            recomputes = 0 <= i - max(begin, 1) < recompute and i < self.count - 1
            forward += seconds.forward
            backward += seconds.recomputing if recomputes else seconds.backward
            if recomputes and cost.kept_bytes:
                kept += cost.kept_bytes_recomputing
                made = cost.forward_working_bytes + cost.kept_bytes - cost.kept_bytes_recomputing
                most_forward = max(most_forward, kept + min(made, cost.recomputing_working_bytes))
                most_backward = max(most_backward, kept + cost.recomputing_working_bytes)
            else:
                kept += cost.kept_bytes
                most_forward = max(most_forward, kept + cost.forward_working_bytes)
                most_backward = max(most_backward, kept + cost.backward_working_bytes)

        if not runs_backward:
            most_backward = 0
        stage = StageCost(forward, backward, StageBytes(kept, most_forward, most_backward))
        if streamed:
            return self._with_waits(stage, begin, end, recompute, streamed)
        return stage

    def _with_waits(
        self,
        stage: StageCost,
        begin: int,
        end: int,
        recompute: int,
        streamed: tuple[int, ...],
    ) -> StageCost:
        """Return the stage with the waits of its forward and backward for streamed layers."""
        forward = 0.0
        backward = 0.0
        first = max(begin, 1)
        for i in range(first, min(end, self.count - 1)):
            seconds = self.timings.layers[i]
            forward += seconds.forward
            if i >= self.first_trainable:
                backward += seconds.recomputing if i - first < recompute else seconds.backward

        fetches = 0.0
        fetched_backward = 0
        for entry in streamed:
            fetches += self.fetch_seconds(self.layers[begin + entry])
            if begin + entry >= self.first_trainable:
                fetched_backward += 1
        mean = fetches / len(streamed)
        return stage._replace(
            forward_waits=waits_of(len(streamed), mean, forward),
            backward_waits=waits_of(fetched_backward, mean, backward),
        )

    def fetch_seconds(self, layer: LayerCost) -> float:
        streaming = self.setting.streaming
        a_byte = self.timings.fetch_seconds_per_byte.get(streaming.source, 0.0)
        return self.timings.fetch_latency + a_byte * streaming.fetched_bytes(layer)

    # ---- ranks

    def encoder_bytes(self, blocks: int) -> int:
        """Weights of a slice with `blocks` blocks of the frozen encoder, the stem included."""
        return self.costs.encoder.stem_bytes + blocks * self.costs.encoder.block_bytes

    def fitted(
        self,
        rank: int,
        ranges: Ranges,
        moments: Sequence[Instant],
        blocks: int | None = None,
    ) -> RankCost:
        """Return the cost of a rank with these stages, at the moments of its schedule
        (`simulate.instants`).

        With "auto" as few layers recompute, or are streamed, as fit; where both may be, the faster
        of both; where nothing fits, the cost with the least memory. `blocks`: number of encoder
        blocks in its slice; None: all of them for layer 0's rank, which has a slice even without
        blocks, and no slice for another.
        """
        recompute = self.setting.recompute_layers
        stream = self.setting.streaming.layers
        layers = [self.decoder_layers(x) for x in ranges]
        if recompute == "auto":
            # stages without backward keep nothing that could be recomputed
            for stage, (_, end) in enumerate(ranges):
                if end <= self.first_trainable:
                    layers[stage] = 0
            counts = range(sum(layers) + 1)
        else:
            counts = range(recompute[rank], recompute[rank] + 1)

        def cost(recomputed: int, streamed: int) -> RankCost:
            return self.rank_cost(ranges, _split(recomputed, layers), moments, blocks, streamed)

        streamed = 0
        if stream == "auto":
            streamed = self._most_streamed(ranges)
            fastest = self._fastest(cost, counts, streamed)
            if fastest is not None:
                return fastest
        elif stream:
            streamed = stream[rank]
        costs = []
        for count in counts:
            costs.append(cost(count, streamed))
            if self.fits(costs[-1]):
                return costs[-1]
        return min(costs, key=lambda x: x.total_bytes)

    def _fastest(
        self,
        cost: Callable[[int, int], RankCost],
        recompute: range,
        most: int,
    ) -> RankCost | None:
        """Return the fastest `cost(recomputed, streamed)` that fits, with at most `most` streamed;
        None if none fits.

        Exact if recomputing more layers never asks for streaming more.
        """
        best = None
        streamed = most
        for recomputed in recompute:
            # two buffers may take more than one or two streamed layers save
            candidate = resident = cost(recomputed, 0)
            if not self.fits(resident):
                candidate = cost(recomputed, streamed)
            if not self.fits(candidate):
                continue
            while candidate is not resident and self.fits(fewer := cost(recomputed, streamed - 1)):
                candidate = fewer
                streamed -= 1
            if best is None or candidate.seconds < best.seconds:
                best = candidate
            if candidate is resident:  # recomputing more only takes longer
                break
        return best

    def rank_cost(
        self,
        ranges: Ranges,
        recompute: Sequence[int],
        moments: Sequence[Instant],
        blocks: int | None = None,
        streamed: int = 0,
    ) -> RankCost:
        """Cost of a rank where the first `recompute[s]` layers of stage s recompute, and `streamed`
        are streamed.
        """
        is_first = ranges[0][0] == 0
        if blocks is None:
            blocks = self.costs.encoder.blocks if is_first else 0
        entries, saved_bytes, host_bytes = self._streamed(ranges, streamed)
        stages = []
        for layer_range, count, fetched in zip(ranges, recompute, entries, strict=True):
            # As many as may be whole at once come once a step, and stay.
            if sum(map(len, entries)) <= WHOLE_AT_ONCE:
                fetched = ()
            stages.append(self.stage(*layer_range, count, fetched))

        weights, state, trainable = self._held(ranges)
        seconds = sum(stage.seconds for stage in stages)
        if is_first or blocks:
            weights += self.encoder_bytes(blocks)
            seconds += self.timings.encode_of(blocks, is_first)
        end_working = self.costs.optimizer.workspace_bytes * trainable
        encode_working = self.costs.encoder.working_of(blocks, first=is_first)
        most = peak(moments, [stage.bytes for stage in stages], encode_working, end_working)
        return RankCost(
            tuple(stages),
            tuple(recompute),
            seconds=seconds,
            weight_bytes=weights - saved_bytes,
            state_bytes=state,
            activation_bytes=most.activations,
            working_bytes=most.working,
            streamed=entries if any(entries) else (),
            host_bytes=host_bytes,
        )

    def changed(self, **setting: Any) -> StageCosts:
        return StageCosts(self.costs, self.timings, replace(self.setting, **setting))

    def fits(self, rank: RankCost) -> bool:
        return self.overflow(rank) == 0

    def overflow(self, rank: RankCost) -> float:
        """Bytes beyond the limits, on the device and on the host."""
        overflow = max(0, rank.total_bytes - self.usable_bytes)
        most = self.setting.streaming.host_bytes
        if most is not None:
            overflow += max(0, rank.host_bytes - most)
        return overflow


def stage_costs(
    config: RunConfig,
    models: Models,
    memory_bytes: int | None,
    device: Device | None,
) -> StageCosts:
    """Costs of any stage of this run, measured where there is a calibration on `device` (None: this
    machine's CPU).

    `memory_bytes` is what a rank may use. Raises UserError for a `parallel.calibration` that does
    not fit.
    """
    parallel = config.parallel
    costs = run_costs(config, models)
    # A limit is for GPUs, also where a laptop plans for them.
    is_gpu = memory_bytes is not None or (device is not None and device.is_gpu)
    assumptions = GPU if is_gpu else CPU
    calibration = find_calibration(config, models, device or cpu_device(parallel))
    if calibration is None:
        timings = assumed_timings(costs, parallel.data, assumptions)
    else:
        costs, timings = calibrated(costs, calibration, parallel.data, assumptions)
    packs = parallel.data * config.train.packs_per_microbatch
    setting = Setting(
        pipeline=parallel.pipeline,
        microbatches_per_step=config.train.packs_per_step // packs,
        memory_bytes=memory_bytes,
        recompute_layers=_of_ranks(parallel.recompute_layers, parallel.pipeline),
        polls_sends=is_gpu,  # gloo, for CPUs, cannot tell what has gone
        streaming=streaming_of(parallel, config.model.llm.quantize),
    )
    return StageCosts(costs, timings, setting)


def streaming_of(parallel: ParallelSection, quantisation: Quantisation | None) -> Streaming:
    """The frozen weights of a run that may be streamed, or are quantised, as its keys say."""
    if quantisation is not None:
        return Streaming((MAX_LAYERS,) * parallel.pipeline, quantisation)
    shards = 1
    if parallel.stream_from == "peers":
        shards = parallel.weight_shards or parallel.data
    host_bytes = None
    if parallel.host_memory_gib is not None:
        host_bytes = int(parallel.host_memory_gib * 2**30)
    layers = _of_ranks(parallel.streamed_layers, parallel.pipeline)
    return Streaming(layers, parallel.stream_from, shards, host_bytes)


def _of_ranks(layers: int | PerRank, pipeline: int) -> PerRank:
    return (layers,) * pipeline if isinstance(layers, int) else layers


def _split(count: int, layers: Sequence[int]) -> tuple[int, ...]:
    result = []
    for available in layers:
        result.append(min(count, available))
        count -= result[-1]
    return tuple(result)
