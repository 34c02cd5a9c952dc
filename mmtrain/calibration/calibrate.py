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
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.printing import bytes_text, table_lines
from mmtrain.base.progress import ProgressBar
from mmtrain.calibration.allocations import Usage, bytes_used
from mmtrain.calibration.solution import (
    ENCODE,
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
from mmtrain.engine.optimizer import MasterWeights
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.engine.statistics import RankSums
from mmtrain.engine.step_clock import RankSeconds
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
        self._can_cut = can_cut and self._stages["front"].module.projector is not None and self._costs.encoder.frozen
        trained = {
            name: parameter
            for kind in self._kinds  # in one order on all ranks, whose gradients are reduced in turn
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
            m.shape[1]: torch.randn(tokens, m.shape[1], dtype=m.dtype, device=device) for m in self._matrices
        }
        for stage in self._stages.values():  # before any message: see `warm_up` of mmtrain.engine.single_stage
            stage.forward()
            stage.backward()
        self._messages: MessageCosts | None = None
        if plan.pipeline > 1:
            channels = Channels(plan, dist.get_rank(), device, timeout)
            self._messages = MessageCosts(plan, channels, self._message_tensors(), device, self._compute)
        self.seconds: dict[str, list[float]] = {}
        """Seconds in every round, by what was measured; see `solution`."""

    def _build(
        self, config: RunConfig, kind_of_window: LayerKind, first: int, last: int, count: int
    ) -> dict[str, SingleStage]:
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
        return stages

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
        front, window = self._stages["front"], self._stages[WINDOW]
        front.prepare()
        self._time(LOAD, lambda: to_device(self._host_batch, self._device))
        self._time(ENCODE, front.encode)
        for name, stage in self._stages.items():
            self._time_stage(name, stage)
        if window.runs_backward:  # one measure is enough: what a second forward costs relative to the first
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
            stage.module(stage.input, stage.batch.position_ids)

    @torch.no_grad()
    def _multiply(self) -> None:
        """Multiply all tokens with each matrix of a decoder layer."""
        for matrix in self._matrices:
            torch.nn.functional.linear(self._factors[matrix.shape[1]], matrix)

    def _reduce(self) -> None:
        """Run what ends a step but for its update."""
        self._weights.reduce_gradients(self._replicas)
        sums = RankSums(self._device)
        sums.add(squared_norm=self._weights.squared_norm(1, self._device))
        sums.reduce(RankSeconds(*[0.0] * len(RankSeconds._fields)))

    def _update(self) -> None:
        """Run OPTIMIZER_STEP, with a rate of 0; a step's first backward then makes new gradients."""
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
                    work = stage.forward, stage.release_output, stage.backward
                    sizes[recomputing(name) if recomputes else name] = _of_stage(
                        *bytes_used(*work, device=self._device)
                    )
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
        return {
            "front": of_front | {"kept": features + of_front["kept"]},
            ENCODE: {"kept": encoded.end - features, "forward": encoded.peak, "backward": 0},
        }

    def _bytes_of_slices(self) -> dict[str, int]:
        """Bytes that slices of the encoder work in: the first without a block, and one behind it."""
        if not self._can_cut:
            return {}
        blocks, front = self._costs.encoder.blocks, self._stages["front"]
        stem, later = self._slice(0, 0), self._slice(max(0, blocks - 2), blocks)
        tiles = front.batch.tiles
        hidden = torch.zeros(len(tiles), *later.hidden_shape, dtype=later.dtype, device=self._device)
        works = (
            functools.partial(stem.in_groups, tiles, front.module.normalised),
            functools.partial(later.in_groups, hidden),
        )
        of_stem, of_later = bytes_used(*works, device=self._device)
        return {"encode_stem_bytes": of_stem.peak, "encode_later_bytes": of_later.peak}

    def _slice(self, first: int, last: int) -> VisionTower:
        whole = self._stages["front"].module.vision
        part = whole.slice_of(first, last)
        weights = dict(whole.global_parameters())
        for name, parameter in part.global_parameters():
            parameter.data = weights[name].data
        return part

    def finish(self) -> Calibration:
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        of_ranks = all_gather_object((medians, self._bytes(), self._bytes_of_slices()))
        seconds = mean_of_ranks([medians for medians, *_ in of_ranks])
        _, sizes, of_slices = of_ranks[0]
        # Measured were a whole number of images, and an update of what trains in one layer of each kind.
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
            encode_block_seconds=seconds[ENCODE] / self._costs.encoder.blocks if self._can_cut else 0.0,
            messages=solve_messages(seconds, MESSAGE),
            features=solve_messages(seconds, FEATURES),
            end_seconds=seconds[REDUCE] + seconds[UPDATE],
            replicas=self._plan.data,
            matmul_flops_per_second=2.0 * tokens * sum(m.numel() for m in self._matrices) / seconds[MATMUL],
            **of_slices,
        )


def _of_stage(forward: Usage, sent: Usage, backward: Usage) -> dict[str, int]:
    return {"kept": forward.end + sent.end, "forward": forward.peak - forward.end, "backward": backward.peak}


def find_window(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """Return the first longest row of decoder layers, at most LAYERS, that run alike; with a backward if possible.

    `kinds` are those of all decoder layers on stages without the head.
    """
    rows, first = [], 0
    for alike, row in itertools.groupby(kinds, lambda kind: (kind.runs_backward, kind.input_gradient)):
        count = len(list(row))
        rows.append((min(count, LAYERS), alike, first))
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
    for source, rate in calibration.fetches.items():
        lines.append(f"weights from {source}: {rate / 1e9:,.2f} GB/s")
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
