"""Measure on the device what the planner needs to know of a run: a Calibration.

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

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.printing import bytes_text, table_lines
from mmtrain.base.progress import ProgressBar
from mmtrain.calibration.allocations import Usage, bytes_used
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
from mmtrain.engine.channels import Channels
from mmtrain.engine.optimizer import MasterWeights
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.engine.statistics import RankSums
from mmtrain.engine.step_clock import RankSeconds
from mmtrain.facts.models import Models, models_of
from mmtrain.model.stage import build_stage
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
ENCODE = "encode"

# by stage and direction, as in "head forward"; of ENCODE; of messages
Seconds = Mapping[str, float]
# by stage: "kept" until its backward, working in "forward" and "backward"
Bytes = Mapping[str, Mapping[str, int]]


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
        self._plan, self._device, self._key = plan, device, key
        self._synchronize = torch.get_device_module(device).synchronize
        self._costs = run_costs(config, models)
        self._kinds = {kind.name: kind for kind in self._costs.kinds}
        of_layers = [
            self._kinds[layer.kind] for layer in (*self._costs.layers[1:-2], self._costs.whole_last)
        ]
        first, last = find_window(of_layers)
        self._window = tuple(kind.name for kind in of_layers[first:last])
        self._host_batch = expected_batch(config, models)
        self._stages = self._build(config, of_layers[first], first, last, len(of_layers))
        self._can_cut = (
            can_cut
            and self._stages["front"].module.projector is not None
            and self._costs.encoder.frozen
        )
        trained = {
            name: parameter
            # in one order on all ranks, whose gradients are reduced in turn
            for kind in self._kinds
            if kind in self._stages
            for name, parameter in self._stages[kind].module.global_parameters()
            if parameter.requires_grad
        }
        self._weights = MasterWeights(trained, config.optimizer)
        for group in self._weights.optimizer.param_groups:
            group["lr"] = 0.0
        timeout = config.parallel.timeout_seconds
        self._replicas = replica_group(plan, dist.get_rank(), device, timeout)
        alone = self._stages[self._window[0]]
        self._matrices = [p for _, p in alone.module.language.global_parameters() if p.ndim == 2]
        tokens = alone.batch.position_ids.numel()
        self._factors = {
            m.shape[1]: torch.randn(tokens, m.shape[1], dtype=m.dtype, device=device)
            for m in self._matrices
        }
        # before any message: see `warm_up` of mmtrain.engine.single_stage
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
            self._messages = MessageCosts(plan, channels, tensors, device, self._compute)
        self.seconds: dict[str, list[float]] = {}
        """Seconds in every round, by what was measured."""

    def _build(
        self, config: RunConfig, kind_of_window: LayerKind, first: int, last: int, count: int
    ) -> dict[str, SingleStage]:
        batch = to_device(self._host_batch, self._device)

        def build(
            kind: LayerKind, first: int, last: int, *, front: bool = False, head: bool = False
        ) -> SingleStage:
            module = build_stage(
                config, StagePlan(0, first, last, front, head), device=self._device
            )
            return SingleStage(
                module, batch, input_gradient=kind.input_gradient, backward=kind.runs_backward
            )

        stages = {
            "front": build(self._kinds["front"], 0, 0, front=True),
            "head": build(self._kinds["head"], count, count, head=True),
            WINDOW: build(kind_of_window, first, last),
        }
        for kind in self._kinds.values():
            if kind.layer is not None:
                stages[kind.name] = build(kind, kind.layer, kind.layer + 1, head=kind.on_rows)
        return stages

    def warm_up(self, seconds: float) -> int:
        """Run everything twice; return how many rounds fit into `seconds`, equal on every rank."""
        for _ in range(WARM_UP_ROUNDS):
            began = time.perf_counter()
            self.round()
        took = torch.tensor([time.perf_counter() - began], device=self._device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        self.seconds = {}
        return min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / float(took))))

    def round(self) -> None:
        """Measure everything once more."""
        front, window = self._stages["front"], self._stages[WINDOW]
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
                self.seconds.setdefault(name, []).append(seconds)
        dist.barrier()
        self._time(REDUCE, self._reduce)
        self._time(UPDATE, self._update)

    def _time_stage(self, name: str, stage: SingleStage, *, recomputes: bool = False) -> None:
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
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

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

    def _bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by stage: kept until its backward, working in forward and in backward."""
        sizes = {}
        for name, stage in self._stages.items():
            layers = name not in ("front", "head")
            for recomputes in (False, True) if layers and stage.runs_backward else (False,):
                stage.prepare(recomputes=recomputes)
                stage.forward()
                stage.backward()  # makes gradients, which then are there
                stage.prepare(recomputes=recomputes)
                if name == "front":
                    sizes |= self._bytes_of_front(stage)
                else:
                    used = bytes_used(
                        stage.forward, stage.release_output, stage.backward, device=self._device
                    )
                    sizes[recomputing(name) if recomputes else name] = _of_stage(*used)
        return sizes

    def _bytes_of_front(self, stage: SingleStage) -> dict[str, dict[str, int]]:
        """Bytes of the encoder, which works in what it makes, and of the front, which may keep
        features.
        """
        features = 0 if stage.features is None else stage.features.untyped_storage().nbytes()
        stage.features = None

        def encode() -> None:
            stage.features = stage.encode()

        def release() -> None:
            stage.release_output()
            stage.features = None

        encoded, *others = bytes_used(
            encode, stage.forward, release, stage.backward, device=self._device
        )
        encode()
        of_front = _of_stage(*others)
        return {
            "front": of_front | {"kept": features + of_front["kept"]},
            ENCODE: {"kept": encoded.end - features, "forward": encoded.peak, "backward": 0},
        }

    def _bytes_of_slices(self) -> dict[str, int]:
        """Bytes that slices of the encoder work in: the first without a block, and one behind
        it.
        """
        if not self._can_cut:
            return {}
        blocks, front = self._costs.encoder.blocks, self._stages["front"]
        tiles, grids, vision = front.batch.tiles, front.batch.grids, front.module.vision
        stem, later = vision.slice_of(0, 0), vision.slice_of(max(0, blocks - 2), blocks)
        hidden = torch.zeros(
            len(tiles), *later.hidden_shape, dtype=later.dtype, device=self._device
        )
        works = (
            functools.partial(stem.in_groups, tiles, front.module.normalised, grids),
            functools.partial(later.in_groups, hidden, grids=grids),
        )
        of_stem, of_later = bytes_used(*works, device=self._device)
        return {"encode_stem_bytes": of_stem.peak, "encode_later_bytes": of_later.peak}

    def finish(self) -> Calibration:
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        of_ranks = all_gather_object((medians, self._bytes(), self._bytes_of_slices()))
        seconds = mean_of_ranks([medians for medians, *_ in of_ranks])
        _, sizes, of_slices = of_ranks[0]
        # Measured were a whole number of images, and an update of what trains in one layer of each
        # kind.
        if (tiles := self._host_batch.tiles) is not None:
            seconds[ENCODE] *= self._costs.work.tiles / len(tiles)
        elements = sum(master.numel() for master in self._weights.by_name.values())
        seconds[UPDATE] *= max(rank.trainable for rank in self._plan.ranks) / elements
        tokens = self._host_batch.position_ids.numel()
        layers, call_seconds = solve_layers(seconds, sizes, self._kinds, self._window)
        return Calibration(
            key=self._key,
            layers=layers,
            compute_seconds=call_seconds,
            encode_seconds=seconds[LOAD],
            # The patch embedding before the blocks takes less than a hundredth of them.
            encode_block_seconds=seconds[ENCODE] / self._costs.encoder.blocks
            if self._can_cut
            else 0.0,
            messages=solve_messages(seconds, MESSAGE),
            features=solve_messages(seconds, FEATURES),
            end_seconds=seconds[REDUCE] + seconds[UPDATE],
            replicas=self._plan.data,
            matmul_flops_per_second=2.0
            * tokens
            * sum(m.numel() for m in self._matrices)
            / seconds[MATMUL],
            **of_slices,
        )


def _of_stage(forward: Usage, sent: Usage, backward: Usage) -> dict[str, int]:
    return {
        "kept": forward.end + sent.end,
        "forward": forward.peak - forward.end,
        "backward": backward.peak,
    }


def find_window(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """Return the first longest row of decoder layers, at most LAYERS, that run alike; with a
    backward if possible.

    `kinds` are those of all decoder layers on stages without the head.
    """
    rows, first = [], 0
    for alike, row in itertools.groupby(
        kinds, lambda kind: (kind.runs_backward, kind.input_gradient)
    ):
        count = len(list(row))
        rows.append((min(count, LAYERS), alike, first))
        first += count
    length, _, first = max(rows, key=lambda row: row[:2])
    return first, first + length


# ---- what one more layer adds to a stage


def recomputing(name: str) -> str:
    return f"{name}, recomputing"


def mean_of_ranks(of_ranks: Sequence[Seconds]) -> dict[str, float]:
    """Return means over the ranks that have measured something, by its name."""
    names = dict.fromkeys(name for rank in of_ranks for name in rank)
    return {
        name: statistics.fmean(rank[name] for rank in of_ranks if name in rank) for name in names
    }


def solve_messages(seconds: Seconds, kind: str) -> MessageSeconds | None:
    """Return what a message of this kind takes from sender and receiver, and its transfer; None if
    not measured.
    """
    both = [
        max(0.0, seconds[f"{name} {kind}"])
        for name in (SEND, RECEIVE)
        if f"{name} {kind}" in seconds
    ]
    if len(both) < 2:
        return None
    echo = seconds.get(f"{ECHO} {kind}")
    return MessageSeconds(*both, transfer=None if echo is None else max(0.0, echo - sum(both)))


def solve_layers(
    seconds: Seconds, sizes: Bytes, kinds: Mapping[str, LayerKind], window: Sequence[str]
) -> tuple[dict[str, LayerMeasures], float]:
    """Return what each kind of layer adds, by name, and the seconds of a call beyond its layers.
    Nothing is below 0.

    `window` names the kinds of n layers in a row, which take n layers and one call: alone they take
    n calls.
    """
    forward, forward_call = _seconds_of_layers(seconds, "forward", kinds, window)
    backward, backward_call = _seconds_of_layers(seconds, "backward", kinds, window)
    second_forward = _second_forward(seconds, forward, window)
    input_bytes = _inner_input(sizes, WINDOW, window)
    recomputing_input_bytes = _inner_input(
        sizes, recomputing(WINDOW), [recomputing(name) for name in window]
    )
    layers = {}
    for name, kind in kinds.items():
        own = sizes[ENCODE if name == "encoder" else name]
        recomputed = sizes.get(recomputing(name), own)
        kept, kept_recomputing, recomputing_seconds = (
            own["kept"],
            recomputed["kept"],
            backward[name],
        )
        if kind.layer is not None and kind.runs_backward:
            kept += input_bytes
            kept_recomputing += recomputing_input_bytes
            recomputing_seconds += second_forward * forward[name]
        of_head = sizes["head"]["kept"] if kind.on_rows else 0
        layers[name] = LayerMeasures(
            forward_seconds=forward[name],
            backward_seconds=backward[name],
            recomputing_seconds=recomputing_seconds,
            kept_bytes=max(0, kept - of_head),
            kept_bytes_recomputing=max(0, kept_recomputing - of_head),
            forward_working_bytes=own["forward"],
            backward_working_bytes=own["backward"],
            recomputing_working_bytes=recomputed["backward"],
        )
    calls = (
        [forward_call, backward_call]
        if any(kind.runs_backward for kind in kinds.values())
        else [forward_call]
    )
    return layers, statistics.fmean(calls)


def _seconds_of_layers(
    seconds: Seconds, direction: str, kinds: Mapping[str, LayerKind], window: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Seconds that each kind of layer adds in one direction, and those of a call beyond its
    layers.
    """

    def of(stage: str) -> float:
        return seconds.get(f"{stage} {direction}", 0.0)

    row, alone, count = of(WINDOW), sum(map(of, window)), len(window)
    call = max(0.0, alone - row) / (count - 1) if count > 1 else 0.0
    # of each layer, where the row takes longer than its layers alone
    more = max(0.0, row - alone) / count
    layers = {}
    for name, kind in kinds.items():
        if name == "encoder":
            layers[name] = seconds[ENCODE] if direction == "forward" else 0.0
        elif name == "front":
            # without a decoder layer behind it, nothing of the LLM's own code is called
            layers[name] = of(name)
        elif kind.on_rows:
            layers[name] = max(0.0, of(name) - of("head"))
        elif name == "head":
            layers[name] = max(0.0, of(name) - call)
        else:
            layers[name] = max(0.0, of(name) - call + more) if of(name) else 0.0
    return layers, call


def _second_forward(seconds: Seconds, forward: Mapping[str, float], window: Sequence[str]) -> float:
    """Time that recomputing a layer adds, as a multiple of its forward; 1 where nothing
    recomputes.
    """
    first = sum(forward[name] for name in window)
    if f"{recomputing(WINDOW)} backward" not in seconds or not first:
        return 1.0
    more = sum(
        seconds[f"{recomputing(WINDOW)} {way}"] - seconds[f"{WINDOW} {way}"]
        for way in ("forward", "backward")
    )
    return max(0.0, more) / first


def _inner_input(sizes: Bytes, row: str, alone: Sequence[str]) -> int:
    """Bytes that a layer behind another keeps more than one that begins a stage: its input, where
    that is kept.

    Less what every stage keeps besides its layers, such as the rotations of its tokens.
    """
    count = len(alone)
    if count == 1 or row not in sizes:
        return 0
    return (sizes[row]["kept"] - sum(sizes[name]["kept"] for name in alone)) // (count - 1)


# ---- a run of its own


def table(calibration: Calibration) -> list[str]:
    """Return a calibration as lines for a terminal: what one more layer adds to a stage, and what
    else was measured.
    """
    layers = []
    for name, layer in calibration.layers.items():
        times = layer.forward_seconds, layer.backward_seconds, layer.recomputing_seconds
        working = max(layer.forward_working_bytes, layer.backward_working_bytes)
        sizes = layer.kept_bytes, layer.kept_bytes_recomputing, working
        layers.append((name, *map(_milliseconds, times), *map(bytes_text, sizes)))
    times = (">forward\nms", ">backward\nms", ">recomputing\nms")
    call, end = _milliseconds(calibration.compute_seconds), _milliseconds(calibration.end_seconds)
    lines = [
        *table_lines(("one more", *times, ">kept", ">kept\nrecomputing", ">working"), layers),
        f"call {call} ms; end of a step {end} ms; "
        f"matrix products {calibration.matmul_flops_per_second / 1e12:,.3f} TFLOP/s a rank",
    ]
    if calibration.encode_block_seconds:
        lines.append(f"encoder: each block {_milliseconds(calibration.encode_block_seconds)} ms")
    for kind, cost in ((MESSAGE, calibration.messages), (FEATURES, calibration.features)):
        if cost is None:
            lines.append(f"{kind} was not measured; plans use an assumed value")
            continue
        parts = {"send": cost.send, "receive": cost.receive, "transfer": cost.transfer}
        texts = [f"{name} {_milliseconds(x)} ms" for name, x in parts.items() if x is not None]
        lines.append(f"{kind}: {', '.join(texts)}" + ", transfer assumed" * (cost.transfer is None))
    for source, rate in calibration.fetches.items():
        lines.append(f"weights from {source}: {rate / 1e9:,.2f} GB/s")
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def calibrate(
    config: RunConfig, plan: Plan, device: Device, file: Path, rank: Rank, *, can_cut: bool = True
) -> None:
    """Run a rank of a calibration; rank 0 writes the file and prints what was measured.

    `device` is what the ranks share, `plan` any plan of the run; `can_cut` as in Calibrator.
    """
    own_device, models = torch.device(rank.device), models_of(config)
    join_process_group(own_device, config.parallel.timeout_seconds)
    rank.print_info(f"calibrating on {device.name}: loading layers")
    key = calibration_key(config, models, device)
    calibrator = Calibrator(config, models, plan, own_device, key, can_cut=can_cut)
    rounds = calibrator.warm_up(SECONDS)
    with ProgressBar("rounds", rounds, rank.console, "measurements") as progress:
        for done in range(rounds):
            rank.progress.at(done, "calibrating")
            calibrator.round()
            progress.show(done + 1, sum(map(len, calibrator.seconds.values())))
    calibration = calibrator.finish()
    rank.progress.at(rounds, "fetching layers")
    calibration = dataclasses.replace(
        calibration, fetches=measure_fetches(config, plan, own_device)
    )
    if rank.rank == 0:
        rank.print_info(*table(calibration))
        rank.print_info(f"written to {calibration.save(file)}")
    dist.barrier()
    dist.destroy_process_group()
