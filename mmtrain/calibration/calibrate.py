"""Measure what the planner needs to know of a run on its device: a Calibration.

every rank: Calibrator --warm_up, then rounds--> seconds of single stages, of messages, of a step's
    end
            --finish: medians of each rank, means over ranks--> Calibration, the same everywhere
rank 0: --calibrate--> the file that the planner finds, a table of what was measured

All ranks do the same at the same time, since a run shares memory bandwidth, clocks and cores, too.
A round measures everything once, so that drift meets all alike. Stages are called as the engine
does it: with one layer, and with several in a row, whose difference tells what a layer adds and
what a call costs beyond its layers. A GPU is waited for after each call, so a call's cost there
includes launches that a run overlaps with computing.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.printing import bytes_text, table_lines
from mmtrain.base.progress import ProgressBar
from mmtrain.calibration.allocations import (
    ENCODE,
    Bytes,
    bytes_of_slices,
    bytes_of_stages,
    recomputing,
)
from mmtrain.calibration.transfers import (
    ECHO,
    FEATURES,
    MESSAGE,
    RECEIVE,
    SEND,
    MessageCosts,
    measure_fetches,
)
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import to_device
from mmtrain.engine.algorithms import compiler_of, use_algorithms
from mmtrain.engine.channels import Channels
from mmtrain.engine.optimizer import MasterWeights
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.single_stage import SingleStage, choose_kernels, expected_batch
from mmtrain.engine.statistics import RankSums
from mmtrain.engine.step_clock import RankSeconds
from mmtrain.facts.models import Models, models_of
from mmtrain.model.llm.compiled import compiling
from mmtrain.model.stage import Stage, build_stage
from mmtrain.plan.calibration import (
    Calibration,
    Device,
    Key,
    LayerMeasures,
    MessageSeconds,
    calibration_key,
)
from mmtrain.plan.costs import LayerKind, run_costs
from mmtrain.plan.plan import Plan, StagePlan
from mmtrain.runtime.rank import Rank

LAYERS = 4  # of the stage that holds several
WARM_UP_ROUNDS = 2
MIN_ROUNDS, MAX_ROUNDS = 7, 31
SECONDS = 40.0  # of rounds, within these limits
LOAD, REDUCE, UPDATE, MATMUL = "load", "reduce", "update", "matrix products"
WINDOW = "layers in a row"

# by stage and direction, as in "head forward"; of ENCODE; of messages
Seconds = Mapping[str, float]


class Calibrator:
    """One rank's part. Collective: every rank constructs it and calls the same methods.

    `plan` is any plan of the run, for its ranks and the channels between them; `can_cut`: a frozen
    encoder can be cut into slices. Loads the front, the head, one decoder layer of each kind, and
    LAYERS in a row.
    """

    def __init__(
        self,
        config: RunConfig,
        models: Models,
        plan: Plan,
        device: torch.device,
        key: Key,
        *,
        can_cut: bool = True,
    ) -> None:
        self._plan = plan
        self._device = device
        self._key = key
        self._synchronize = torch.get_device_module(device).synchronize
        self._costs = run_costs(config, models)
        self._kinds = {kind.name: kind for kind in self._costs.kinds}
        self._host_batch = expected_batch(config, models)
        self._stages = self._build(functools.partial(build_stage, config, device=device))
        front = self._stages["front"]
        alone = self._stages[self._window[0]]
        has_projector = front.module.projector is not None
        self._can_cut = can_cut and has_projector and self._costs.encoder.frozen

        # in one order on all ranks, whose gradients are reduced in turn
        trained = {}
        for kind in self._kinds:
            if kind in self._stages:
                trained |= dict(self._stages[kind].module.global_parameters())
        trained = {name: p for name, p in trained.items() if p.requires_grad}
        self._weights = MasterWeights(trained, config.optimizer)
        for group in self._weights.optimizer.param_groups:
            group["lr"] = 0.0
        timeout = config.parallel.timeout_seconds
        self._replicas = replica_group(plan, dist.get_rank(), device, timeout)

        self._matrices = [p for _, p in alone.module.language.global_parameters() if p.ndim == 2]
        self._factors = {}
        for matrix in self._matrices:
            shape = (alone.batch.position_ids.numel(), matrix.shape[1])
            self._factors[matrix.shape[1]] = torch.randn(shape, dtype=matrix.dtype, device=device)

        # before any message: see `warm_up` of mmtrain.engine.single_stage
        compiler = compiler_of(config.train, device)
        with compiling():
            if compiler is not None:
                choose_kernels(compiler, list(self._stages.values()))
            for stage in self._stages.values():
                stage.forward()
                stage.backward()
        self._messages: MessageCosts | None = None
        if plan.pipeline > 1:
            channels = Channels(plan, dist.get_rank(), device, timeout)
            integers = torch.zeros((2, *alone.input.shape[:2]), dtype=torch.int64)
            tensors = {MESSAGE: [integers, torch.zeros_like(alone.input)]}
            if self._can_cut:
                size = self._costs.encoder.hidden_bytes
                tensors[FEATURES] = [torch.zeros(size, dtype=torch.uint8, device=device)]
            self._messages = MessageCosts(
                plan,
                channels,
                tensors,
                device,
                self._compute,
            )
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """Seconds in every round, by what was measured."""

    def _build(self, build: Callable[[StagePlan], Stage]) -> dict[str, SingleStage]:
        """Make all stages that are measured, and choose the layers in a row."""
        layers = (*self._costs.layers[1:-2], self._costs.whole_last)
        kinds = [self._kinds[layer.kind] for layer in layers]
        first, last = find_window(kinds)
        self._window = tuple(kind.name for kind in kinds[first:last])
        parts = {
            "front": (self._kinds["front"], StagePlan(0, 0, 0, True, False)),
            "head": (self._kinds["head"], StagePlan(0, len(kinds), len(kinds), False, True)),
            WINDOW: (kinds[first], StagePlan(0, first, last, False, False)),
        }
        for kind in self._kinds.values():
            if (own := kind.layer) is not None:
                parts[kind.name] = (kind, StagePlan(0, own, own + 1, False, kind.on_rows))
        batch = to_device(self._host_batch, self._device)
        stages = {}
        for name, (kind, stage) in parts.items():
            stages[name] = SingleStage(
                build(stage),
                batch,
                input_gradient=kind.input_gradient,
                backward=kind.runs_backward,
            )
        return stages

    def warm_up(self, seconds: float) -> int:
        """Run everything twice; return how many rounds fit into `seconds`, equal on every rank."""
        for _ in range(WARM_UP_ROUNDS):
            began = time.perf_counter()
            self.round()
        took = torch.tensor([time.perf_counter() - began], device=self._device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        self.seconds.clear()
        return min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / float(took))))

    def round(self) -> None:
        """Measure everything once more."""
        front = self._stages["front"]
        window = self._stages[WINDOW]
        front.prepare()
        self._time(LOAD, lambda: to_device(self._host_batch, self._device))
        self._time(ENCODE, front.encode)
        for name, stage in self._stages.items():
            self._time_stage(name, stage)
        # one measure is enough: what a second forward costs relative to the first
        if window.runs_backward:
            self._time_stage(recomputing(WINDOW), window, recomputes=True)
        dist.barrier()
        self._time(MATMUL, self._multiply)
        if self._messages is not None:
            for name, seconds in self._messages.round().items():
                self.seconds[name].append(seconds)
        dist.barrier()
        self._time(REDUCE, self._reduce)
        self._time(UPDATE, self._update)

    def _time_stage(
        self,
        name: str,
        stage: SingleStage,
        *,
        recomputes: bool = False,
    ) -> None:
        stage.prepare(recomputes=recomputes)
        dist.barrier()
        self._time(f"{name} forward", stage.forward)
        stage.release_output()
        if stage.runs_backward:
            self._time(f"{name} backward", stage.backward)

    def _time(self, name: str, work: Callable[[], object]) -> None:
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        self.seconds[name].append(time.perf_counter() - began)

    def _compute(self) -> None:
        stage = self._stages[self._window[0]]
        with torch.no_grad():
            stage.module(stage.input, stage.batch.positions)

    @torch.no_grad()
    def _multiply(self) -> None:
        for matrix in self._matrices:
            torch.nn.functional.linear(self._factors[matrix.shape[1]], matrix)

    def _reduce(self) -> None:
        """Run what ends a step but for its update."""
        self._weights.reduce_gradients(self._replicas)
        sums = RankSums(self._device)
        sums.add(squared_norm=self._weights.squared_norm(1, self._device))
        sums.reduce(RankSeconds(*[0.0] * len(RankSeconds._fields)))

    def _update(self) -> None:
        """Run OPTIMIZER_STEP, with a rate of 0; a step's first backward then makes new
        gradients.
        """
        for master in self._weights.by_name.values():
            master.grad.mul_(1.0)
        self._weights.optimizer.step()
        self._weights.write_back()
        self._weights.zero_grad()

    def _bytes(self) -> tuple[Bytes, dict[str, int]]:
        """Return bytes by stage, and those of the encoder's slices; nothing on a CPU."""
        if self._device.type == "cpu":
            return {}, {}
        slices = {}
        sizes = bytes_of_stages(self._stages, self._device)
        if self._can_cut:
            blocks = self._costs.encoder.blocks
            slices = bytes_of_slices(self._stages["front"], blocks, self._device)
        return sizes, slices

    def finish(self) -> Calibration:
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        of_ranks = all_gather_object((medians, *self._bytes()))
        seconds = mean_of_ranks([medians for medians, *_ in of_ranks])
        _, sizes, of_slices = of_ranks[0]

        # Measured were a whole number of images, and an update of what trains in one layer of each
        # kind.
        if (tiles := self._host_batch.tiles) is not None:
            seconds[ENCODE] *= self._costs.work.tiles / len(tiles)
        elements = sum(map(torch.numel, self._weights.by_name.values()))
        seconds[UPDATE] *= max(rank.trainable for rank in self._plan.ranks) / elements

        # The patch embedding before the blocks takes less than a hundredth of them.
        of_block = 0.0
        if self._can_cut:
            of_block = seconds[ENCODE] / self._costs.encoder.blocks
        tokens = self._host_batch.position_ids.numel()
        products = 2.0 * tokens * sum(map(torch.numel, self._matrices))
        layers, call_seconds = solve_layers(seconds, sizes, self._kinds, self._window)
        return Calibration(
            key=self._key,
            layers=layers,
            compute_seconds=call_seconds,
            encode_seconds=seconds[LOAD],
            encode_block_seconds=of_block,
            messages=solve_messages(seconds, MESSAGE),
            features=solve_messages(seconds, FEATURES),
            end_seconds=seconds[REDUCE] + seconds[UPDATE],
            replicas=self._plan.data,
            matmul_flops_per_second=products / seconds[MATMUL],
            **of_slices,
        )


def find_window(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """Return the first longest row of decoder layers, at most LAYERS, that run alike; with a
    backward if possible.

    `kinds` are those of all decoder layers on stages without the head.
    """
    rows, first = [], 0
    needs = [(kind.runs_backward, kind.input_gradient) for kind in kinds]
    for alike, row in itertools.groupby(needs):
        count = len(list(row))
        rows.append((min(count, LAYERS), alike, -first))
        first += count
    length, _, first = max(rows)
    return -first, length - first


# ---- what one more layer adds to a stage


def mean_of_ranks(of_ranks: Sequence[Seconds]) -> dict[str, float]:
    """Return means over the ranks that have measured something, by its name."""
    found = defaultdict(list)
    for rank in of_ranks:
        for name, seconds in rank.items():
            found[name].append(seconds)
    return {name: statistics.fmean(values) for name, values in found.items()}


def solve_messages(seconds: Seconds, kind: str) -> MessageSeconds | None:
    """Return the seconds of a message of this kind, None if not measured; never below 0."""
    if not {f"{SEND} {kind}", f"{RECEIVE} {kind}"} <= seconds.keys():
        return None
    send = max(0.0, seconds[f"{SEND} {kind}"])
    receive = max(0.0, seconds[f"{RECEIVE} {kind}"])
    transfer = seconds.get(f"{ECHO} {kind}")
    if transfer is not None:
        transfer = max(0.0, transfer - (send + receive))
    return MessageSeconds(send, receive, transfer)


def solve_layers(
    seconds: Seconds,
    sizes: Bytes,
    kinds: Mapping[str, LayerKind],
    window: Sequence[str],
) -> tuple[dict[str, LayerMeasures], float]:
    """Return the measures of each kind of layer, by name, and the seconds of a call beyond its
    layers. Nothing is below 0.

    `window` names the kinds of n layers in a row, which take n layers and one call: alone they take
    n calls. Bytes are None where there are no `sizes`.
    """
    forward, forward_call = _seconds_of_layers(seconds, "forward", kinds, window)
    backward, backward_call = _seconds_of_layers(seconds, "backward", kinds, window)
    second_forward = _second_forward(seconds, forward, window)
    layers = {}
    for name, kind in kinds.items():
        recomputing_seconds = backward[name]
        if kind.layer is not None and kind.runs_backward:
            recomputing_seconds += second_forward * forward[name]
        layers[name] = LayerMeasures(
            forward[name],
            backward[name],
            recomputing_seconds,
            **_bytes_of_layer(sizes, kind, window),
        )
    calls = [forward_call]
    if any(kind.runs_backward for kind in kinds.values()):
        calls.append(backward_call)
    return layers, statistics.fmean(calls)


def _bytes_of_layer(
    sizes: Bytes,
    kind: LayerKind,
    window: Sequence[str],
) -> dict[str, int]:
    if not sizes:
        return {}
    own = sizes[kind.name]
    recomputed = sizes.get(recomputing(kind.name), own)
    kept = own["kept"]
    kept_recomputing = recomputed["kept"]
    if kind.layer is not None and kind.runs_backward:
        kept += _inner_input(sizes, WINDOW, window)
        alone = list(map(recomputing, window))
        kept_recomputing += _inner_input(sizes, recomputing(WINDOW), alone)
    if kind.on_rows:
        kept -= sizes["head"]["kept"]
        kept_recomputing -= sizes["head"]["kept"]
    return {
        "kept_bytes": max(0, kept),
        "kept_bytes_recomputing": max(0, kept_recomputing),
        "forward_working_bytes": own["forward"],
        "backward_working_bytes": own["backward"],
        "recomputing_working_bytes": recomputed["backward"],
    }


def _seconds_of_layers(
    seconds: Seconds,
    direction: str,
    kinds: Mapping[str, LayerKind],
    window: Sequence[str],
) -> tuple[dict[str, float], float]:
    """Return the seconds of each kind of layer in one direction, and those of a call beyond its
    layers.
    """

    def of(stage: str) -> float:
        return seconds.get(f"{stage} {direction}", 0.0)

    row = of(WINDOW)
    alone = sum(map(of, window))
    count = len(window)
    call = 0.0
    if count > 1:
        call = max(0.0, alone - row) / (count - 1)
    # of each layer, where the row takes longer than its layers alone
    more = max(0.0, row - alone) / count
    layers = dict.fromkeys(kinds, 0.0)
    for name, kind in kinds.items():
        seconds_alone = of(name)
        if name == "front":
            # without a decoder layer behind it, nothing of the LLM's own code is called
            layers[name] = seconds_alone
        elif kind.on_rows:
            layers[name] = max(0.0, seconds_alone - of("head"))
        elif name == "head":
            layers[name] = max(0.0, seconds_alone - call)
        elif seconds_alone:
            layers[name] = max(0.0, seconds_alone - call + more)
    if direction == "forward":
        layers["encoder"] = seconds[ENCODE]
    return layers, call


def _second_forward(
    seconds: Seconds,
    forward: Mapping[str, float],
    window: Sequence[str],
) -> float:
    """Return the time of a layer's recomputation as a multiple of its forward; 1 without any."""
    first = sum(forward[name] for name in window)
    if f"{recomputing(WINDOW)} backward" not in seconds or not first:
        return 1.0
    more = 0.0
    for way in ("forward", "backward"):
        more += seconds[f"{recomputing(WINDOW)} {way}"] - seconds[f"{WINDOW} {way}"]
    return max(0.0, more) / first


def _inner_input(
    sizes: Bytes,
    row: str,
    alone: Sequence[str],
) -> int:
    """Return the bytes of a layer's input, which a layer behind another may keep; one that begins
    a stage does not.

    Less those that every stage keeps besides its layers, such as the rotations of its tokens.
    """
    count = len(alone)
    if count == 1 or row not in sizes:
        return 0
    return (sizes[row]["kept"] - sum(sizes[name]["kept"] for name in alone)) // (count - 1)


# ---- a run of its own


def table(calibration: Calibration) -> list[str]:
    """Return a calibration as lines for a terminal: a table of layers, then all else.

    A row has the seconds and bytes that one more layer of its kind adds.
    """
    columns: tuple[str, ...] = ("one more", ">forward\nms", ">backward\nms", ">recomputing\nms")
    layers = []
    for name, layer in calibration.layers.items():
        times = (layer.forward_seconds, layer.backward_seconds, layer.recomputing_seconds)
        layers.append([name, *map(_milliseconds, times)])
        if layer.kept_bytes is not None:
            working = max(layer.forward_working_bytes, layer.backward_working_bytes)
            sizes = (layer.kept_bytes, layer.kept_bytes_recomputing, working)
            layers[-1] += map(bytes_text, sizes)
    if len(layers[0]) > len(columns):
        columns += (">kept", ">kept\nrecomputing", ">working")

    call = _milliseconds(calibration.compute_seconds)
    end = _milliseconds(calibration.end_seconds)
    lines = [
        *table_lines(columns, layers),
        f"call {call} ms; end of a step {end} ms; "
        f"matrix products {calibration.matmul_flops_per_second / 1e12:,.3f} TFLOP/s a rank",
    ]
    if calibration.encode_block_seconds:
        lines.append(f"encoder: each block {_milliseconds(calibration.encode_block_seconds)} ms")
    for kind, cost in ((MESSAGE, calibration.messages), (FEATURES, calibration.features)):
        if cost is None:
            lines.append(f"{kind} was not measured; plans use an assumed value")
            continue
        transfer = "assumed"
        if cost.transfer is not None:
            transfer = f"{_milliseconds(cost.transfer)} ms"
        send, receive = map(_milliseconds, (cost.send, cost.receive))
        lines.append(f"{kind}: send {send} ms, receive {receive} ms, transfer {transfer}")
    for source, rate in calibration.fetches.items():
        lines.append(f"weights from {source}: {rate / 1e9:,.2f} GB/s")
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def calibrate(
    config: RunConfig,
    plan: Plan,
    device: Device,
    file: Path,
    rank: Rank,
    *,
    can_cut: bool = True,
) -> None:
    """Run a rank of a calibration; rank 0 writes the file and prints what was measured.

    `device` is what the ranks share, `plan` any plan of the run; `can_cut` as in Calibrator.
    """
    own_device = torch.device(rank.device)
    models = models_of(config)
    timeout = config.parallel.timeout_seconds
    use_algorithms(config.train)
    join_process_group(own_device, timeout)
    rank.print_info(f"calibrating on {device.name}: loading layers")
    key = calibration_key(config, models, device)
    calibrator = Calibrator(
        config,
        models,
        plan,
        own_device,
        key,
        can_cut=can_cut,
    )
    rounds = calibrator.warm_up(SECONDS)
    with ProgressBar("rounds", rounds, rank.console, "measurements") as progress:
        for done in range(rounds):
            rank.progress.at(done, "calibrating")
            calibrator.round()
            progress.show(done + 1, sum(map(len, calibrator.seconds.values())))
    calibration = calibrator.finish()
    rank.progress.at(rounds, "fetching layers")
    fetches = measure_fetches(config.model.llm, plan, own_device, timeout)
    calibration = dataclasses.replace(calibration, fetches=fetches)
    if rank.rank == 0:
        rank.print_info(*table(calibration))
        rank.print_info(f"written to {calibration.save(file)}")
    dist.barrier()
    dist.destroy_process_group()
