"""Measure on the device what the planner needs to know of a run: a Calibration.

every rank: Calibrator --warm_up, then rounds--> seconds of single stages, of messages, of a step's end
            --finish: medians of each rank, means over ranks--> Calibration, the same everywhere
rank 0: --calibrate--> the file that the planner finds, a table of what was measured

All ranks do the same at the same time, since a run shares memory bandwidth, clocks and cores, too. A round measures
everything once, so that drift meets all alike. Stages are called as the engine does it: with one layer, and with
several in a row, whose difference tells what a layer adds and what a call costs beyond its layers. A GPU is waited for
after each call, so a call's cost there includes launches that a run overlaps with computing.
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
from mmtrain.calibration.solution import (
    ENCODE,
    ENCODE_LATER,
    ENCODE_STEM,
    WINDOW,
    mean_of_ranks,
    recomputing,
    solve_layers,
    solve_messages,
)
from mmtrain.calibration.transfers import FEATURES, MESSAGE, MessageCosts, measure_fetches
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import to_device
from mmtrain.engine.channels import Channels
from mmtrain.engine.optimizer import MasterWeights, make_optimizer
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.engine.statistics import RankSums
from mmtrain.engine.step_clock import Reading
from mmtrain.models.modules.stage import build_stage
from mmtrain.models.modules.vision_tower import VisionTower
from mmtrain.plan.calibration import Calibration, Device, Key, calibration_key
from mmtrain.plan.costs import LayerKind, Models, run_costs
from mmtrain.plan.plan import Plan, StagePlan
from mmtrain.plan.planner import models_of
from mmtrain.runtime.rank import Rank

LAYERS = 4  # of the stage that holds several
WARM_UP_ROUNDS = 2
MIN_ROUNDS, MAX_ROUNDS = 7, 31
SECONDS = 40.0  # of rounds, within these limits
LOAD, REDUCE, UPDATE, MATMUL = "load", "reduce", "update", "matrix products"


class Calibrator:
    """One rank's part. Collective: every rank constructs it and calls the same methods.

    `plan` is any plan of the run, for its ranks and the channels between them; `can_cut`: a frozen encoder can be cut
    into slices. Loads the front, the head, one decoder layer of each kind, and LAYERS in a row.
    """

    def __init__(
        self, config: RunConfig, models: Models, plan: Plan, device: torch.device, key: Key, *, can_cut: bool = True
    ) -> None:
        self._plan, self._device, self._key = plan, device, key
        self._synchronize = torch.get_device_module(device).synchronize
        self._costs = run_costs(config, models)
        self._kinds = {kind.name: kind for kind in self._costs.kinds}
        of_layers = [self._kinds[layer.kind] for layer in (*self._costs.layers[1:-2], self._costs.whole_last)]
        first, last = find_window(of_layers)
        self._window = tuple(kind.name for kind in of_layers[first:last])
        self._host_batch = expected_batch(config, models)
        self._stages = self._build(config, of_layers[first], first, last, len(of_layers))
        trained = {
            name: parameter
            for kind in self._kinds  # in one order on all ranks, whose gradients are reduced in turn
            if kind in self._stages
            for name, parameter in self._stages[kind].module.global_parameters()
            if parameter.requires_grad
        }
        self._end = _StepEnd(config, plan, trained, device)
        self._can_cut = can_cut and self._stages["front"].module.projector is not None and self._costs.encoder.frozen
        self._multiply, self._flops = matrix_products(self._stages[self._window[0]])
        for stage in self._stages.values():  # before any message: see `warm_up` of mmtrain.engine.single_stage
            stage.forward()
            stage.backward()
        self._messages: MessageCosts | None = None
        if plan.pipeline > 1:
            channels = Channels(plan, dist.get_rank(), device, config.parallel.timeout_seconds)
            self._messages = MessageCosts(plan, channels, self._message_tensors(), device, self._compute)
        self.seconds: dict[str, list[float]] = {}
        """Seconds in every round, by what was measured; see `solution`."""

    def _build(
        self, config: RunConfig, kind_of_window: LayerKind, first: int, last: int, count: int
    ) -> dict[str, SingleStage]:
        """Build the stages by name; those that recompute share the module of the one that does not."""
        batch = to_device(self._host_batch, self._device)

        def build(kind: LayerKind, first: int, last: int, *, front: bool = False, head: bool = False) -> SingleStage:
            module = build_stage(config, StagePlan(0, first, last, front, head), device=self._device)
            return SingleStage(module, batch, input_gradient=kind.input_gradient, backward=kind.runs_backward)

        stages = {
            "front": build(self._kinds["front"], 0, 0, front=True),
            "head": build(self._kinds["head"], count, count, head=True),
            WINDOW: build(kind_of_window, first, last),
        }
        for kind in self._kinds.values():
            if kind.layer is not None:
                stages[kind.name] = build(kind, kind.layer, kind.layer + 1, head=kind.on_rows)
        for name, stage in list(stages.items()):
            if name not in ("front", "head") and stage.runs_backward:
                stages[recomputing(name)] = stage.recomputing()
        return stages

    def _slice(self, first: int, last: int) -> VisionTower:
        whole = self._stages["front"].module.vision
        assert whole is not None, "only a model with an encoder is cut"
        part = whole.slice_of(first, last)
        weights = dict(whole.global_parameters())
        for name, parameter in part.global_parameters():
            parameter.data = weights[name].data
        return part

    def _message_tensors(self) -> dict[str, list[torch.Tensor]]:
        hidden = self._stages["front"].input
        tensors = {MESSAGE: [torch.zeros((2, *hidden.shape[:2]), dtype=torch.int64), torch.zeros_like(hidden)]}
        if self._can_cut:
            size = self._costs.encoder.hidden_bytes
            tensors[FEATURES] = [torch.zeros(size, dtype=torch.uint8, device=self._device)]
        return tensors

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
        for name, stage in self._stages.items():
            if stage.recompute and name != recomputing(WINDOW):
                continue  # one measure of recomputation is enough: what a second forward costs relative to the first
            stage.prepare()
            if name == "front":
                self._time(LOAD, lambda: to_device(self._host_batch, self._device))
                self._time(ENCODE, stage.encode)
            dist.barrier()
            self._time(f"{name} forward", stage.forward)
            stage.release_output()
            if stage.runs_backward:
                self._time(f"{name} backward", stage.backward)
        dist.barrier()
        self._time(MATMUL, self._multiply)
        if self._messages is not None:
            for name, seconds in self._messages.round().items():
                self.seconds.setdefault(name, []).append(seconds)
        dist.barrier()
        self._time(REDUCE, self._end.reduce)
        self._time(UPDATE, self._end.update)

    def _time(self, name: str, work: Callable[[], object]) -> None:
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def _compute(self) -> None:
        stage = self._stages[self._window[0]]
        with torch.no_grad():
            stage.module(stage.input, stage.batch.position_ids)

    def _bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by stage: kept until its backward, working in forward and in backward."""
        sizes = {}
        for name, stage in self._stages.items():
            stage.prepare()
            stage.forward()
            stage.backward()  # makes gradients, which then are there
            stage.prepare()
            if name == "front":
                sizes |= self._bytes_of_front(stage)
            else:
                work = (stage.forward, stage.release_output, stage.backward)
                sizes[name] = _of_stage(*bytes_used(*work, device=self._device))
        return sizes

    def _bytes_of_front(self, stage: SingleStage) -> dict[str, dict[str, int]]:
        """Bytes of the encoder, which works in what it makes, and of the front, which may keep features."""
        features = 0 if stage.features is None else stage.features.untyped_storage().nbytes()
        stage.features = None

        def encode() -> None:
            stage.features = stage.encode()

        def release() -> None:
            stage.release_output()
            stage.features = None

        encoded, *others = bytes_used(encode, stage.forward, release, stage.backward, device=self._device)
        encode()
        of_front = _of_stage(*others)
        sizes = {
            "front": of_front | {"kept": features + of_front["kept"]},
            ENCODE: {"kept": encoded.end - features, "forward": encoded.peak, "backward": 0},
        }
        if self._can_cut:
            blocks, tiles = self._costs.encoder.blocks, stage.batch.tiles
            stem, later = self._slice(0, 0), self._slice(max(0, blocks - 2), blocks)
            hidden = torch.zeros(len(tiles), *later.hidden_shape, dtype=later.dtype, device=self._device)
            works = (
                functools.partial(stem.in_groups, tiles, stage.module.normalised),
                functools.partial(later.in_groups, hidden),
            )
            of_stem, of_later = bytes_used(*works, device=self._device)
            sizes |= {ENCODE_STEM: {"forward": of_stem.peak}, ENCODE_LATER: {"forward": of_later.peak}}
        return sizes

    def finish(self) -> Calibration:
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        of_ranks = all_gather_object((medians, self._bytes()))
        seconds = mean_of_ranks([medians for medians, _ in of_ranks])
        # Measured were a whole number of images, and an update of what trains in one layer of each kind.
        if (tiles := self._host_batch.tiles) is not None:
            seconds[ENCODE] *= self._costs.work.tiles / len(tiles)
        seconds[UPDATE] *= max(rank.trainable for rank in self._plan.ranks) / self._end.elements
        sizes = of_ranks[0][1]
        layers, call_seconds = solve_layers(seconds, sizes, self._kinds, self._window)
        return Calibration(
            key=self._key,
            layers=layers,
            compute_seconds=call_seconds,
            encode_seconds=seconds[LOAD],
            # The patch embedding before the blocks takes less than a hundredth of them.
            encode_block_seconds=seconds[ENCODE] / self._costs.encoder.blocks if self._can_cut else 0.0,
            messages=solve_messages(seconds, MESSAGE),
            features=solve_messages(seconds, FEATURES),
            end_seconds=seconds[REDUCE] + seconds[UPDATE],
            replicas=self._plan.data,
            matmul_flops_per_second=self._flops / seconds[MATMUL],
            encode_stem_bytes=sizes[ENCODE_STEM]["forward"] if ENCODE_STEM in sizes else None,
            encode_later_bytes=sizes[ENCODE_LATER]["forward"] if ENCODE_LATER in sizes else None,
        )


def _of_stage(forward: Usage, sent: Usage, backward: Usage) -> dict[str, int]:
    return {"kept": forward.end + sent.end, "forward": forward.peak - forward.end, "backward": backward.peak}


class _StepEnd:
    """The end of a step on a rank that trains these weights. The update has a rate of 0."""

    def __init__(
        self, config: RunConfig, plan: Plan, parameters: Mapping[str, torch.nn.Parameter], device: torch.device
    ) -> None:
        self._masters = MasterWeights(parameters)
        self.elements = sum(master.numel() for master in self._masters.by_name.values())
        self._optimizer = make_optimizer(self._masters.by_name, config.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._device = device
        self._replicas = replica_group(plan, dist.get_rank(), device, config.parallel.timeout_seconds)

    def reduce(self) -> None:
        self._masters.reduce_gradients(self._replicas)
        sums = RankSums(self._device)
        sums.add(squared_norm=self._masters.squared_norm(1, self._device))
        sums.reduce(Reading(*[0.0] * len(Reading._fields)))

    def update(self) -> None:
        """Run OPTIMIZER_STEP; a step's first backward then makes new gradients."""
        for master in self._masters.by_name.values():
            master.grad.mul_(1.0)
        self._optimizer.step()
        self._masters.write_back()
        self._masters.zero_grad()


def matrix_products(stage: SingleStage) -> tuple[Callable[[], None], float]:
    """Return a function that multiplies all tokens with each matrix of the stage's decoder layers, and its FLOPs."""
    weights = [p for _, p in stage.module.language.global_parameters() if p.ndim == 2]
    tokens = stage.batch.position_ids.numel()
    rows = {w.shape[1]: torch.randn(tokens, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def multiply() -> None:
        with torch.no_grad():
            for weight in weights:
                torch.nn.functional.linear(rows[weight.shape[1]], weight)

    return multiply, 2.0 * tokens * sum(w.numel() for w in weights)


def find_window(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """Return the first longest row of decoder layers, at most LAYERS, that run alike; with a backward if possible.

    `kinds` are those of all decoder layers on stages without the head.
    """
    rows, first = [], 0
    for runs, row in itertools.groupby(kinds, lambda kind: (kind.runs_backward, kind.input_gradient)):
        count = len(list(row))
        rows.append((min(count, LAYERS), runs, first))
        first += count
    length, _, first = max(rows, key=lambda row: row[:2])
    return first, first + length


def table(calibration: Calibration) -> list[str]:
    """Return a calibration as lines for a terminal: what one more layer adds to a stage, and what else was measured."""
    layers = []
    for name, layer in calibration.layers.items():
        times = layer.forward_seconds, layer.backward_seconds, layer.recomputing_seconds
        working = max(layer.forward_working_bytes, layer.backward_working_bytes)
        sizes = map(bytes_text, (layer.kept_bytes, layer.kept_bytes_recomputing, working))
        layers.append((name, *map(_milliseconds, times), *sizes))
    times = (">forward\nms", ">backward\nms", ">recomputing\nms")
    lines = [
        *table_lines(("one more", *times, ">kept", ">kept\nrecomputing", ">working"), layers),
        f"call {_milliseconds(calibration.compute_seconds)} ms; end of a step "
        f"{_milliseconds(calibration.end_seconds)} ms; "
        f"matrix products {calibration.matmul_flops_per_second / 1e12:,.3f} TFLOP/s a rank",
    ]
    if calibration.encode_block_seconds:
        lines.append(f"encoder: each block {_milliseconds(calibration.encode_block_seconds)} ms")
    for kind, cost in ((MESSAGE, calibration.messages), (FEATURES, calibration.features)):
        if cost is None:
            lines.append(f"{kind} was not measured: plans assume it")
        else:
            send, receive = _milliseconds(cost.send), _milliseconds(cost.receive)
            transfer = "assumed" if cost.transfer is None else f"{_milliseconds(cost.transfer)} ms"
            lines.append(f"{kind}: send {send} ms, receive {receive} ms, transfer {transfer}")
    for source, rates in calibration.fetches.items():
        alone, beside = (f"{rate / 1e9:,.2f}" for rate in (rates.alone, rates.beside))
        lines.append(f"weights from {source}: {alone} GB/s alone, {beside} beside computing")
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def calibrate(config: RunConfig, plan: Plan, device: Device, file: Path, rank: Rank, *, can_cut: bool = True) -> None:
    """Run a rank of a calibration; rank 0 writes the file and prints what was measured.

    `device` is what the ranks share, `plan` any plan of the run; `can_cut` as in Calibrator.
    """
    join_process_group(torch.device(rank.device), config.parallel.timeout_seconds)
    models = models_of(config)
    rank.print_info(f"calibrating on {device.name}: loading layers")
    key = calibration_key(config, models, device)
    calibrator = Calibrator(config, models, plan, torch.device(rank.device), key, can_cut=can_cut)
    rounds = calibrator.warm_up(SECONDS)
    with ProgressBar("rounds", rounds, rank.console, "measurements") as progress:
        for done in range(rounds):
            rank.progress.at(done, "calibrating")
            calibrator.round()
            progress.show(done + 1, sum(map(len, calibrator.seconds.values())))
    calibration = calibrator.finish()
    rank.progress.at(rounds, "fetching layers")
    calibration = dataclasses.replace(calibration, fetches=measure_fetches(config, plan, torch.device(rank.device)))
    if rank.rank == 0:
        rank.print_info(*table(calibration))
        rank.print_info(f"written to {calibration.save(file)}")
    dist.barrier()
    dist.destroy_process_group()
