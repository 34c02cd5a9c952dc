"""Seconds and bytes of any stage of any cut, and of any rank.

layers' costs and timings --StageCosts.stage--> one stage --StageCosts.fitted--> a rank that fits into its memory

A rank's memory is weights, optimizer state and the peak of its schedule (`memory`). Recomputing and streaming decoder
layers buy room for time. As few layers recompute as fit, those of the rank's earliest stage first, since what those
keep is kept longest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from mmtrain.config.limits import MAX_LAYERS
from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.quantised import BITS, Quantisation
from mmtrain.plan.calibration import Device, cpu_device, find_calibration
from mmtrain.plan.costs import LayerCost, Models, RunCosts, run_costs
from mmtrain.plan.instructions import ALIGNMENT, NO_WAITS, WHOLE_AT_ONCE, Waits, spread, waits_of
from mmtrain.plan.memory import Buffers, Instant, StageBytes, instants, peak
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.timings import CPU, GPU, Timings, assumed_timings, calibrated

RESERVED_SHARE = 0.06
"""Share of a memory limit left to what is not counted, fragmentation above all."""
RESERVED_GPU_BYTES = 5 * 2**29
"""Least of a GPU's memory that is left: its context, cuBLAS and up to nine communicators take 1.5 to 2.5 GiB."""

LayerRange = tuple[int, int]  # layers [begin, end)


def limit_on_gpu(memory_bytes: int) -> int:
    """Return a rank's memory limit on a GPU with this much memory: what is left after the larger of both reserves."""
    return min(memory_bytes, max(0, math.floor((memory_bytes - RESERVED_GPU_BYTES) / (1 - RESERVED_SHARE))))


# ---- streaming


@dataclass(frozen=True, slots=True)
class Streaming:
    """Which frozen decoder layers may be streamed, and from where."""

    layers: Literal["auto"] | tuple[int, ...] = ()  # number of layers of each pipeline rank; empty: none
    source: Literal["host", "peers"] | Quantisation = "host"  # the latter: in fewer bits, on the device
    weight_shards: int = 1  # ranks that each keep a part
    host_bytes: int | None = None  # that a rank may keep in its machine's memory; None: no limit

    @property
    def is_possible(self) -> bool:
        """Whether any layer may be streamed."""
        return self.layers == "auto" or any(self.layers)

    def buffer_bytes(self, layer: LayerCost) -> int:
        """Bytes of a streamed layer while it is whole."""
        step = ALIGNMENT * self.weight_shards
        return -(-layer.streamed_bytes // step) * step

    def kept_on_device(self, layer: LayerCost) -> int:
        """Bytes of a streamed layer that stay on the device."""
        if self.source in BITS:
            return layer.quantised_bytes
        return self.buffer_bytes(layer) // self.weight_shards if self.source == "peers" else 0

    def fetched_bytes(self, layer: LayerCost) -> int:
        """Bytes that each fetch brings to the device, or makes there from fewer bits."""
        return self.buffer_bytes(layer) - (self.kept_on_device(layer) if self.source == "peers" else 0)


class Streamable:
    """The layers of one rank that may be streamed, spread evenly, and the memory that they save and take."""

    def __init__(self, streaming: Streaming, stages: Sequence[Sequence[LayerCost]]) -> None:
        """`stages`: the layers of each stage of the rank."""
        self._streaming, self._stages = streaming, stages
        self._candidates = [
            (stage, place)
            for stage, layers in enumerate(stages)
            for place, layer in enumerate(layers)
            if layer.streamed_bytes and streaming.is_possible
        ]
        self.most = len(self._candidates)
        """The most layers that may be streamed within the machine's memory."""
        while streaming.host_bytes is not None and self.most and self.host_bytes(self.most) > streaming.host_bytes:
            self.most -= 1

    def _chosen(self, count: int) -> list[tuple[int, int]]:
        layers = self._candidates
        return [layers[i] for i in spread(min(count, len(layers)), len(layers))] if count else []

    def places(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return, for each stage, which of its layers are streamed if `count` are, counted from its first layer."""
        chosen = self._chosen(count)
        return tuple(tuple(place for stage, place in chosen if stage == number) for number in range(len(self._stages)))

    def saved_bytes(self, count: int) -> int:
        """Bytes of the device's memory that `count` streamed layers save, less their buffers and what stays."""
        layers = [self._stages[stage][place] for stage, place in self._chosen(count)]
        # Memory of a smaller buffer may not fit a larger one, so each buffer counts as the largest.
        largest = max(map(self._streaming.buffer_bytes, layers), default=0)
        saved = sum(layer.streamed_weight_bytes - self._streaming.kept_on_device(layer) for layer in layers)
        return saved - largest * min(len(layers), WHOLE_AT_ONCE)

    def host_bytes(self, count: int) -> int:
        """Bytes of the machine's memory that `count` streamed layers take."""
        layers = [self._stages[stage][place] for stage, place in self._chosen(count)]
        return sum(map(self._streaming.buffer_bytes, layers)) if self._streaming.source == "host" else 0


# ---- stages and ranks


@dataclass(frozen=True, slots=True)
class Setting:
    """What a cut depends on besides the layers' costs."""

    pipeline: int
    microbatches_per_step: int
    memory_bytes: int | None  # a rank's limit
    recompute_layers: Literal["auto"] | tuple[int, ...]  # per pipeline rank
    polls_sends: bool = True  # see `memory.instants`
    streaming: Streaming = field(default_factory=Streaming)


class StageCost(NamedTuple):
    """One stage and one micro-batch."""

    forward: float  # seconds, without the encoder
    backward: float  # seconds; 0 where nothing runs backward
    bytes: StageBytes
    forward_waits: Waits = NO_WAITS
    backward_waits: Waits = NO_WAITS

    @property
    def seconds(self) -> float:
        """Forward, backward and waits."""
        return self.forward + self.backward + self.forward_waits.seconds() + self.backward_waits.seconds()


@dataclass(frozen=True, slots=True)
class RankCost:
    """The stages of one rank; seconds of one micro-batch, its slice of the encoder included."""

    stages: tuple[StageCost, ...]
    recompute_layers: tuple[int, ...]  # of each stage
    seconds: float
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    working_bytes: int
    streamed: tuple[tuple[int, ...], ...] = ()  # of each stage, layers counted from its first; empty: none
    host_bytes: int = 0

    @property
    def streamed_count(self) -> int:
        """Number of streamed layers."""
        return sum(map(len, self.streamed))

    @property
    def total_bytes(self) -> int:
        """The most bytes on the device at once."""
        return self.weight_bytes + self.state_bytes + self.activation_bytes + self.working_bytes


class StageCosts:
    """Costs of any stage of any cut, and of any rank of any schedule, of one run."""

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
        self._seconds = _sums(x.forward + x.backward for x in timings.layers)
        self._run_begins: list[int] = []  # for each layer the first of the unbroken run of its kind
        for i, layer in enumerate(costs.layers):
            same = i > 0 and layer.kind == costs.layers[i - 1].kind
            self._run_begins.append(self._run_begins[-1] if same else i)
        self.stage = functools.cache(self._stage)
        self._streamable = functools.cache(
            lambda ranges: Streamable(setting.streaming, [self.layers[begin:end] for begin, end in ranges])
        )
        self._one_stage_instants = functools.cache(self._find_one_stage_instants)
        self._one_stage_rank = functools.cache(
            lambda rank, first, layers, blocks: self.fitted(
                rank, [layers], self._one_stage_instants(first)[rank], blocks
            )
        )

    # ---- stages

    def same_range(self, begin: int, end: int) -> LayerRange:
        """Return the first range of layers with exactly the costs of [begin, end): most decoder layers are alike."""
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
        """Number of decoder layers in a range."""
        return max(0, min(layer_range[1], self.count - 1) - max(layer_range[0], 1))

    def least_seconds(self, begin: int, end: int) -> float:
        """Seconds of layers [begin, end) if nothing is recomputed; infinite if their weights alone do not fit.

        Grows as `begin` falls or `end` rises.
        """
        if self.least_bytes(begin, end) > self.usable_bytes:
            return math.inf
        return self.compute_seconds(begin, end)

    def compute_seconds(self, begin: int, end: int) -> float:
        """Seconds of layers [begin, end), nothing recomputed; a lower bound even after rounding."""
        return (self._seconds[end] - self._seconds[begin]) * (1 - 1e-12)

    def least_bytes(self, begin: int, end: int) -> int:
        """Weights and optimizer state of layers [begin, end), without a frozen encoder and what may be streamed."""
        shared = self._shared_bytes([(begin, end)])
        return self._least_weights[end] - self._least_weights[begin] - shared + self._state[end] - self._state[begin]

    def _weight_bytes(self, ranges: Sequence[LayerRange]) -> int:
        return sum(self._weights[end] - self._weights[begin] for begin, end in ranges) - self._shared_bytes(ranges)

    def _shared_bytes(self, ranges: Sequence[LayerRange]) -> int:
        both_ends = any(begin == 0 for begin, _ in ranges) and any(end == self.count for _, end in ranges)
        return self.costs.shared_ends_bytes if both_ends else 0

    def _stage(self, begin: int, end: int, recompute: int, streamed: tuple[int, ...] = ()) -> StageCost:
        """Cost of layers [begin, end) if the first `recompute` decoder layers recompute their activations.

        `streamed`: the layers that are streamed, counted from `begin`.
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
        return StageCost(forward, backward, most, *waits)

    def _waits(self, begin: int, end: int, recompute: int, streamed: tuple[int, ...]) -> tuple[Waits, Waits]:
        """Return how long a stage's forward and backward wait for its streamed layers."""
        seconds, first, last = self.timings.layers, max(begin, 1), min(end, self.count - 1)
        fetches = [self.fetch_seconds(self.layers[begin + place]) for place in streamed]
        fetched_backward = [place for place in streamed if begin + place >= self.first_trainable]
        forward = sum(x.forward for x in seconds[first:last])
        backward = sum(
            x.recomputing if i < recompute else x.backward
            for i, x in enumerate(seconds[first:last])
            if first + i >= self.first_trainable
        )
        mean = sum(fetches) / len(fetches)
        return waits_of(len(streamed), mean, forward), waits_of(len(fetched_backward), mean, backward)

    def fetch_seconds(self, layer: LayerCost) -> float:
        """Seconds of one fetch of a streamed layer."""
        streaming, timings = self.setting.streaming, self.timings
        a_byte = timings.fetch_seconds_per_byte.get(streaming.source, 0.0)
        return timings.fetch_latency + a_byte * streaming.fetched_bytes(layer)

    # ---- ranks

    def encoder_bytes(self, blocks: int) -> int:
        """Weights of a slice with `blocks` blocks of the frozen encoder, the stem included."""
        return self.costs.encoder.stem_bytes + blocks * self.costs.encoder.block_bytes

    def fitted(
        self, rank: int, ranges: Sequence[LayerRange], moments: Sequence[Instant], blocks: int | None = None
    ) -> RankCost:
        """Return the cost of a rank with these stages, at the moments of its schedule (`memory.instants`).

        With "auto" as few layers recompute, or are streamed, as fit; where both may be, whatever takes fewer seconds;
        where nothing fits, what takes the least memory. `blocks`: number of encoder blocks in its slice; layer 0's
        rank has a slice even without blocks. None: all of them for layer 0's rank, no slice for another.
        """
        recompute, stream = self.setting.recompute_layers, self.setting.streaming.layers
        if recompute == "auto":  # stages without backward keep nothing that could be recomputed
            layers = [self.decoder_layers(x) if x[1] > self.first_trainable else 0 for x in ranges]
            counts = range(sum(layers) + 1)
        else:
            layers = [self.decoder_layers(x) for x in ranges]
            counts = range(recompute[rank], recompute[rank] + 1)
        most = self._streamable(tuple(ranges)).most

        def cost(recomputed: int, streamed: int) -> RankCost:
            return self.rank_cost(ranges, _split(recomputed, layers), moments, blocks, streamed)

        if stream == "auto" and most:
            fastest = self._fastest(cost, counts, most)
            if fastest is not None:
                return fastest
        fixed = most if stream == "auto" else stream[rank] if stream else 0
        costs = []
        for count in counts:
            costs.append(cost(count, fixed))
            if self.fits(costs[-1]):
                return costs[-1]
        return min(costs, key=lambda x: x.total_bytes)

    def _fastest(self, cost: Callable[[int, int], RankCost], recompute: range, most: int) -> RankCost | None:
        """Return the fastest `cost(recomputed, streamed)` that fits, with at most `most` streamed; None if none fits.

        Exact if recomputing more layers never asks for streaming more: each number of recomputed layers is tried with
        the fewest streamed layers that fit.
        """
        best: RankCost | None = None
        streamed = most
        for recomputed in recompute:
            resident = cost(recomputed, 0)  # two buffers may take more than one or two streamed layers save
            candidate = resident if self.fits(resident) else cost(recomputed, streamed)
            if not self.fits(candidate):
                continue
            while candidate is not resident and self.fits(fewer := cost(recomputed, streamed - 1)):
                candidate, streamed = fewer, streamed - 1
            if best is None or candidate.seconds < best.seconds:
                best = candidate
            if candidate is resident:  # recomputing more only takes longer
                break
        return best

    def rank_cost(
        self,
        ranges: Sequence[LayerRange],
        recompute: Sequence[int],
        moments: Sequence[Instant],
        blocks: int | None = None,
        streamed: int = 0,
    ) -> RankCost:
        """Return the cost of a rank if the first `recompute[s]` decoder layers of its stage s recompute.

        `streamed` layers of the rank are streamed; `blocks` as in `fitted`.
        """
        is_first = ranges[0][0] == 0
        if blocks is None:
            blocks = self.costs.encoder.blocks * is_first
        has_slice = is_first or blocks > 0
        streamable = self._streamable(tuple(ranges))
        places = streamable.places(streamed)
        # As many as may be whole at once come once a step, and stay.
        fetched = places if sum(map(len, places)) > WHOLE_AT_ONCE else ((),) * len(ranges)
        stages = tuple(
            self.stage(*layer_range, count, its_places)
            for layer_range, count, its_places in zip(ranges, recompute, fetched, strict=True)
        )
        trainable = sum(self._trainable[end] - self._trainable[begin] for begin, end in ranges)
        end_working = self.costs.optimizer.workspace_bytes * trainable
        encode_working = self.costs.encoder.working_of(blocks, first=is_first)
        most = peak(moments, [stage.bytes for stage in stages], encode_working, end_working)
        seconds = sum(stage.seconds for stage in stages)
        return RankCost(
            stages,
            tuple(recompute),
            seconds + (self.timings.encode_of(blocks, is_first) if has_slice else 0.0),
            self._weight_bytes(ranges)
            + (self.encoder_bytes(blocks) if has_slice else 0)
            - streamable.saved_bytes(streamed),
            sum(self._state[end] - self._state[begin] for begin, end in ranges),
            most.activations,
            most.working,
            places if any(places) else (),
            streamable.host_bytes(streamed),
        )

    def without_memory(self) -> StageCosts:
        """Costs for a limit of 0 bytes, so that every rank recomputes whatever takes the least memory."""
        return StageCosts(self.costs, self.timings, replace(self.setting, memory_bytes=0))

    def resident(self) -> StageCosts:
        """Costs if no layer is streamed."""
        return StageCosts(self.costs, self.timings, replace(self.setting, streaming=Streaming()))

    def fits(self, rank: RankCost) -> bool:
        """Whether a rank stays within the memory of its device and of its machine."""
        return self.overflow(rank) == 0

    def overflow(self, rank: RankCost) -> float:
        """Bytes beyond the limits, on the device and on the host."""
        most = self.setting.streaming.host_bytes
        on_host = 0 if most is None else max(0, rank.host_bytes - most)
        return max(0, rank.total_bytes - self.usable_bytes) + on_host

    def one_stage_rank(self, rank: int, begin: int, end: int, blocks: int | None = None) -> RankCost:
        """Return the cost of a rank of 1F1B whose only stage has layers [begin, end); `blocks` as in `fitted`.

        What its schedule keeps depends on the rest of the cut only by whether anything before it trains.
        """
        if end <= self.first_trainable:
            first = rank + 1
        else:
            first = rank if begin <= self.first_trainable else 0
        return self._one_stage_rank(rank, first, self.same_range(begin, end), blocks)

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
