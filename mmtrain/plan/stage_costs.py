"""What any stage of any cut takes, in seconds and bytes.

A rank's memory is weights, optimizer state and the peak of its schedule (`memory`). Recomputing decoder layers buys
room for time: as few as fit are taken, those of the rank's earliest stage first, since what they keep is kept longest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from mmtrain.config.limits import MAX_LAYERS
from mmtrain.config.schema import RunConfig
from mmtrain.plan.calibration import Device, cpu_device, find_calibration
from mmtrain.plan.costs import LayerCost, Models, RunCosts, run_costs
from mmtrain.plan.fetching import WHOLE_AT_ONCE
from mmtrain.plan.fitting import fastest
from mmtrain.plan.memory import Buffers, Instant, StageBytes, instants, peak
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.streamed_costs import NO_WAITS, Streamable, Streaming, Waits, waits_of
from mmtrain.plan.timings import CPU, GPU, Timings, assumed_timings, calibrated
from mmtrain.plan.workload import FP32

RESERVED_SHARE = 0.06
"""Share of a memory limit left to what is not counted, fragmentation above all."""
RESERVED_GPU_BYTES = 5 * 2**29
"""Least of a GPU's memory that is left: its context, cuBLAS and up to nine communicators take 1.5 to 2.5 GiB."""

LayerRange = tuple[int, int]  # layers [begin, end)


def limit_on_gpu(memory_bytes: int) -> int:
    """The memory limit of a rank on a GPU: such that the larger of both reserves is left of all its memory."""
    return min(memory_bytes, max(0, math.floor((memory_bytes - RESERVED_GPU_BYTES) / (1 - RESERVED_SHARE))))


@dataclass(frozen=True, slots=True)
class Setting:
    """What a cut depends on besides the layers' costs."""

    pipeline: int
    microbatches_per_step: int
    memory_bytes: int | None  # a rank's limit
    recompute_layers: Literal["auto"] | tuple[int, ...]  # per pipeline rank
    polls_sends: bool = True  # see `memory.instants`
    streaming: Streaming = field(default_factory=Streaming)


class StageNeed(NamedTuple):
    """One stage, for one micro-batch."""

    forward: float  # seconds, the encoder left out
    backward: float  # seconds; 0 where nothing runs backward
    bytes: StageBytes
    forward_waits: Waits = NO_WAITS  # for weights of streamed layers
    backward_waits: Waits = NO_WAITS

    @property
    def seconds(self) -> float:
        """Forward and backward, in turn."""
        return self.forward + self.backward + self.forward_waits.seconds() + self.backward_waits.seconds()


@dataclass(frozen=True, slots=True)
class RankNeed:
    """What the stages of one rank take; seconds for one micro-batch, a slice of the encoder included."""

    stages: tuple[StageNeed, ...]
    recompute_layers: tuple[int, ...]  # of each stage
    seconds: float
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    working_bytes: int
    streamed: tuple[tuple[int, ...], ...] = ()  # of each stage, layers as places behind its begin; empty: none
    host_bytes: int = 0

    @property
    def streamed_count(self) -> int:
        """How many of its layers are streamed."""
        return sum(map(len, self.streamed))

    @property
    def total_bytes(self) -> int:
        """The most bytes that lie on the device at once."""
        return self.weight_bytes + self.state_bytes + self.activation_bytes + self.working_bytes


class StageCosts:
    """What any stage of any cut, and any rank of any schedule, takes."""

    def __init__(self, costs: RunCosts, timings: Timings, setting: Setting) -> None:
        self.costs = costs
        self.timings = timings
        self.setting = setting
        self.layers = costs.layers
        self.count = len(costs.layers)
        self.first_trainable = next(i for i, layer in enumerate(costs.layers) if layer.trainable_names)
        self.usable_bytes = (
            math.inf if setting.memory_bytes is None else math.floor(setting.memory_bytes * (1 - RESERVED_SHARE))
        )
        self.first_trainable_decoder_layer = max(0, self.first_trainable - 1)
        encoder = costs.encoder
        waiting = encoder.feature_bytes, encoder.batch_bytes, encoder.pixel_bytes, encoder.hidden_bytes
        self.buffers = Buffers(costs.hidden_bytes, costs.integer_bytes, *waiting)
        self._weights = _sums(layer.weight_bytes for layer in costs.layers)
        may_stream = setting.streaming.is_possible
        self._least_weights = _sums(
            layer.weight_bytes - layer.streamed_weight_bytes * may_stream for layer in costs.layers
        )
        self._state = _sums(layer.state_bytes for layer in costs.layers)
        self._trainable = _sums(layer.trainable for layer in costs.layers)
        self._forward = _sums(x.forward for x in timings.layers)
        self._backward = _sums(x.backward for x in timings.layers)
        self._run_begins: list[int] = []  # for each layer where the run of layers of its kind begins
        for i, layer in enumerate(costs.layers):
            same = i > 0 and layer.kind == costs.layers[i - 1].kind
            self._run_begins.append(self._run_begins[-1] if same else i)
        self.stage = functools.cache(self._stage)
        self._streamable = functools.cache(
            lambda ranges: Streamable(setting.streaming, [self.layers[begin:end] for begin, end in ranges])
        )
        self._one_stage_instants = functools.cache(self._find_one_stage_instants)
        self._one_stage_need = functools.cache(
            lambda rank, first, layers, blocks: self.need(rank, [layers], self._one_stage_instants(first)[rank], blocks)
        )

    # ---- stages

    def same_range(self, begin: int, end: int) -> LayerRange:
        """The first layers that take exactly what [begin, end) takes: most decoder layers are alike."""
        first = self._run_begins[begin]
        if first == begin or end >= self.count - 1 or self._run_begins[end - 1] != first:
            return begin, end
        return first, first + end - begin

    def layers_of(self, begin: int, end: int) -> tuple[LayerCost, ...]:
        """Layers [begin, end) as one stage; without the head the last decoder layer runs for all tokens."""
        if end == self.count - 1:
            return (*self.layers[begin : end - 1], self.costs.whole_last)
        return self.layers[begin:end]

    def decoder_layers(self, layer_range: LayerRange) -> int:
        """How many of the layers are decoder layers."""
        return max(0, min(layer_range[1], self.count - 1) - max(layer_range[0], 1))

    def least_seconds(self, begin: int, end: int) -> float:
        """Seconds of layers [begin, end) if nothing is recomputed; infinite if their weights alone do not fit.

        Grows as `begin` falls or `end` rises.
        """
        if self.least_bytes(begin, end) > self.usable_bytes:
            return math.inf
        return self.compute_seconds(begin, end)

    def compute_seconds(self, begin: int, end: int) -> float:
        """Seconds of layers [begin, end), nothing recomputed; a lower bound also where rounding differs."""
        sums = self._forward[end] - self._forward[begin] + self._backward[end] - self._backward[begin]
        return sums * (1 - 1e-12)

    def least_bytes(self, begin: int, end: int) -> int:
        """Weights and optimizer state of layers [begin, end), a frozen encoder and what may be streamed left out."""
        least = self._shared_bytes([(begin, end)])
        return self._least_weights[end] - self._least_weights[begin] - least + self._state[end] - self._state[begin]

    def _weight_bytes(self, ranges: Sequence[LayerRange]) -> int:
        return sum(self._weights[end] - self._weights[begin] for begin, end in ranges) - self._shared_bytes(ranges)

    def _shared_bytes(self, ranges: Sequence[LayerRange]) -> int:
        both_ends = any(begin == 0 for begin, _ in ranges) and any(end == self.count for _, end in ranges)
        return self.costs.shared_ends_bytes if both_ends else 0

    def _stage(self, begin: int, end: int, recompute: int, streamed: tuple[int, ...] = ()) -> StageNeed:
        """Layers [begin, end) of which the first `recompute` decoder layers recompute their activations.

        `streamed`: which of the layers are fetched again and again, as places behind `begin`.
        """
        costs, timings = self.costs, self.timings
        seconds_of = list(timings.layers[begin:end])
        if end == self.count - 1:
            seconds_of[-1] = timings.whole_last
        runs_backward = end > self.first_trainable
        forward, backward = timings.call, timings.call if runs_backward else 0.0
        has_input = costs.keeps_input and begin > self.first_trainable
        kept = costs.hidden_bytes if has_input else 0
        most_forward = most_backward = 0
        for i, (cost, seconds) in enumerate(zip(self.layers_of(begin, end), seconds_of, strict=True), begin):
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
        waits = self._waits(begin, end, recompute, streamed) if streamed else (NO_WAITS, NO_WAITS)
        most = StageBytes(kept, most_forward, most_backward if runs_backward else 0)
        return StageNeed(forward, backward, most, *waits)

    def _waits(self, begin: int, end: int, recompute: int, streamed: tuple[int, ...]) -> tuple[Waits, Waits]:
        """What forward and backward of a stage wait for its streamed layers: fetches hide behind decoder layers."""
        seconds, first, last = self.timings.layers, max(begin, 1), min(end, self.count - 1)
        fetches = [self.fetch_seconds(self.layers[begin + place]) for place in streamed]
        behind = [place for place in streamed if begin + place >= self.first_trainable]
        forward = sum(x.forward for x in seconds[first:last])
        backward = sum(
            x.recomputing if i < recompute else x.backward
            for i, x in enumerate(seconds[first:last])
            if first + i >= self.first_trainable
        )
        mean = sum(fetches) / len(fetches)
        return waits_of(len(streamed), mean, forward), waits_of(len(behind), mean, backward)

    def fetch_seconds(self, layer: LayerCost) -> float:
        """Of one fetch of a streamed layer."""
        streaming, timings = self.setting.streaming, self.timings
        a_byte = timings.fetch_seconds_per_byte.get(streaming.source, 0.0)
        return timings.fetch_latency + a_byte * streaming.fetched_bytes(layer)

    # ---- ranks

    def encoder_bytes(self, blocks: int) -> int:
        """Weights of a slice with so many blocks of the frozen encoder, the stem included."""
        return self.costs.encoder.stem_bytes + blocks * self.costs.encoder.block_bytes

    def need(
        self, rank: int, ranges: Sequence[LayerRange], found: Sequence[Instant], blocks: int | None = None
    ) -> RankNeed:
        """What a rank with these stages takes, at the instants of its schedule.

        With "auto" as few layers recompute, or are streamed, as fit; where both may be, whatever takes fewer seconds;
        where nothing fits, as many as take the least memory. `blocks`: how many its slice of the encoder has; layer 0's
        rank has a slice even if that has none. By default layer 0's rank has all of them, and another has none.
        """
        recompute, stream = self.setting.recompute_layers, self.setting.streaming.layers
        if recompute == "auto":  # stages without backward keep nothing that could be recomputed
            layers = [self.decoder_layers(x) if x[1] > self.first_trainable else 0 for x in ranges]
            counts = range(sum(layers) + 1)
        else:
            layers = [self.decoder_layers(x) for x in ranges]
            counts = range(recompute[rank], recompute[rank] + 1)
        most = self._streamable(tuple(ranges)).most

        def need(recomputed: int, streamed: int) -> RankNeed:
            return self.need_of(ranges, _split(recomputed, layers), found, blocks, streamed)

        if stream == "auto" and most:
            best = fastest(need, self.fits, counts, most)
            if best is not None:
                return best
        fixed = most if stream == "auto" else stream[rank] if stream else 0
        needs = []
        for count in counts:
            needs.append(need(count, fixed))
            if self.fits(needs[-1]):
                return needs[-1]
        return min(needs, key=lambda need: need.total_bytes)

    def need_of(
        self,
        ranges: Sequence[LayerRange],
        recompute: Sequence[int],
        found: Sequence[Instant],
        blocks: int | None = None,
        streamed: int = 0,
    ) -> RankNeed:
        """The same where so many decoder layers of each stage recompute, the first ones, and so many are streamed."""
        is_first = ranges[0][0] == 0
        if blocks is None:
            blocks = self.costs.encoder.blocks * is_first
        has_slice = is_first or blocks > 0
        streamable = self._streamable(tuple(ranges))
        places, aside = streamable.places(streamed), streamable.held(streamed)
        # As many as may be whole at once come once a step, and stay.
        fetched = places if sum(map(len, places)) > WHOLE_AT_ONCE else ((),) * len(ranges)
        stages = tuple(
            self.stage(*layer_range, count, its_places)
            for layer_range, count, its_places in zip(ranges, recompute, fetched, strict=True)
        )
        end_working = FP32 * sum(self._trainable[end] - self._trainable[begin] for begin, end in ranges)  # AdamW's root
        encode_working = self.costs.encoder.working_of(blocks, first=is_first)
        most = peak(found, [stage.bytes for stage in stages], encode_working, end_working)
        seconds = sum(stage.seconds for stage in stages)
        return RankNeed(
            stages,
            tuple(recompute),
            seconds + (self.timings.encode_of(blocks, is_first) if has_slice else 0.0),
            self._weight_bytes(ranges) + (self.encoder_bytes(blocks) if has_slice else 0) - aside.saved_bytes,
            sum(self._state[end] - self._state[begin] for begin, end in ranges),
            most.activations,
            most.working,
            places if any(places) else (),
            aside.host_bytes,
        )

    def without_memory(self) -> StageCosts:
        """The same where nothing fits, so that every rank recomputes whatever takes the least memory."""
        return StageCosts(self.costs, self.timings, replace(self.setting, memory_bytes=0))

    def resident(self) -> StageCosts:
        """The same where no layer is streamed."""
        return StageCosts(self.costs, self.timings, replace(self.setting, streaming=Streaming()))

    def fits(self, need: RankNeed) -> bool:
        """Whether a rank may take so much, of its device's and of its machine's memory."""
        return self.overflow(need) == 0

    def overflow(self, need: RankNeed) -> float:
        """Bytes that are too many, on the device and on the host."""
        most = self.setting.streaming.host_bytes
        on_host = 0 if most is None else max(0, need.host_bytes - most)
        return max(0, need.total_bytes - self.usable_bytes) + on_host

    # ---- one stage a rank

    def one_stage_need(self, rank: int, begin: int, end: int, blocks: int | None = None) -> RankNeed:
        """The need of a rank of 1F1B that holds layers [begin, end) as its only stage; `blocks` as in `need`.

        What its schedule keeps depends on the rest of the cut in one way only: whether anything before it trains.
        """
        if end <= self.first_trainable:
            first = rank + 1
        else:
            first = rank if begin <= self.first_trainable else 0
        return self._one_stage_need(rank, first, self.same_range(begin, end), blocks)

    def _find_one_stage_instants(self, first: int) -> tuple[tuple[Instant, ...], ...]:
        setting = self.setting
        schedule = training_schedule(setting.pipeline, setting.microbatches_per_step, first)
        return instants(schedule, self.buffers, polls=setting.polls_sends)


def stage_costs(config: RunConfig, models: Models, memory_bytes: int | None, device: Device | None) -> StageCosts:
    """Costs of any stage of this run; `memory_bytes` is what a rank may use (None: no limit).

    Measured, where there is a calibration for the run on `device` (None: this machine's CPU). Raises UserError for a
    `parallel.calibration` that does not fit.
    """
    calibration = find_calibration(config, models, device or cpu_device(config))
    costs = run_costs(config, models)
    # A limit is for GPUs, also where a laptop plans for them.
    is_gpu = memory_bytes is not None or (device is not None and device.is_gpu)
    replicas, assumptions = config.parallel.data, GPU if is_gpu else CPU
    if calibration is None:
        timings = assumed_timings(costs, replicas, assumptions)
    else:
        costs, timings = calibrated(costs, calibration, replicas, assumptions)
    recompute = config.parallel.recompute_layers
    return StageCosts(
        costs,
        timings,
        Setting(
            pipeline=config.parallel.pipeline,
            microbatches_per_step=config.train.packs_per_step
            // (config.parallel.data * config.train.packs_per_microbatch),
            memory_bytes=memory_bytes,
            recompute_layers=(recompute,) * config.parallel.pipeline if isinstance(recompute, int) else recompute,
            polls_sends=is_gpu,  # gloo, for CPUs, cannot tell what has gone
            streaming=streaming_of(config),
        ),
    )


def streaming_of(config: RunConfig) -> Streaming:
    """What of a run's frozen weights may be streamed, as its config says."""
    parallel, quantisation = config.parallel, config.model.llm.quantize
    if quantisation is not None:
        return Streaming((MAX_LAYERS,) * parallel.pipeline, quantisation)
    layers = parallel.streamed_layers
    gib = parallel.host_memory_gib
    return Streaming(
        (layers,) * parallel.pipeline if isinstance(layers, int) else layers,
        parallel.stream_from,
        (parallel.weight_shards or parallel.data) if parallel.stream_from == "peers" else 1,
        None if gib is None else int(gib * 2**30),
    )


def _split(count: int, layers: Sequence[int]) -> tuple[int, ...]:
    """`count` layers over a rank's stages, its earliest stage first."""
    result = []
    for available in layers:
        result.append(min(count, available))
        count -= result[-1]
    return tuple(result)


def _sums(values: Iterable[float]) -> list:
    return list(itertools.accumulate(values, initial=0))
