"""Measures on the device what the planner needs to know of a run: a Calibration.

every rank: Calibrator --warm_up, then rounds--> seconds of single stages, of messages, of a step's end
            --finish: medians of each rank, means over ranks--> Calibration, the same everywhere
rank 0: --calibrate--> the file that the planner finds, a table of what was measured

All ranks do the same at the same time, since memory bandwidth, clocks and cores are shared in a run, too. A round
measures everything once, so that what drifts meets all alike, and so that between two turns of a stage others have been
through the caches. Stages are built and called as the engine does it: with one layer, and with several in a row, whose
difference tells what a layer adds and what a call costs beyond its layers. A GPU is waited for after each, so there a
call's cost holds launches that a run overlaps with computing.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.progress import ProgressBar
from mmtrain.calibration.allocations import Usage, bytes_used
from mmtrain.calibration.fetch_costs import measure_fetches
from mmtrain.calibration.message_costs import FEATURES, MESSAGE, MessageCosts
from mmtrain.calibration.solution import (
    ENCODE,
    ENCODE_HALF,
    ENCODE_LATER,
    ENCODE_STEM,
    MATMUL,
    WINDOW,
    mean_of_ranks,
    recomputing,
    solve_encoder,
    solve_layers,
    solve_messages,
)
from mmtrain.calibration.table import table
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import to_device
from mmtrain.engine.channels import Channels
from mmtrain.engine.optimizer import MasterWeights, make_optimizer
from mmtrain.engine.process_groups import join_process_group, replica_group
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.engine.statistics import RankSums
from mmtrain.engine.step_clock import Reading
from mmtrain.models.modules.stage import Front, build_stage
from mmtrain.plan.calibration import Calibration, Device, Key, calibration_key
from mmtrain.plan.costs import LayerKind, Models, run_costs
from mmtrain.plan.plan import Plan, StagePlan
from mmtrain.plan.planner import models_of
from mmtrain.runtime.rank import Rank

LAYERS = 4  # of the stage that holds several
WARM_UP_ROUNDS = 2
MIN_ROUNDS, MAX_ROUNDS = 7, 31
SECONDS = 40.0  # of rounds, if that gives as many
LOAD, REDUCE, UPDATE = "load", "reduce", "update"


class Calibrator:
    """One rank's part; every rank of the job constructs it at the same time and calls the same methods.

    `plan` is any plan of the run, for its ranks and the channels between them; `can_cut` says whether a frozen encoder
    can be cut into slices. Loads the front, the head and one decoder layer of each kind, and LAYERS in a row, from the
    run's own model files.
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
        can_cut = can_cut and self._stages["front"].module.front is not None and self._costs.encoder.frozen
        self._half = self._slice(0, self._costs.encoder.blocks // 2) if can_cut else None
        self._multiply, self._flops = matrix_products(self._stages[self._window[0]])
        for stage in self._stages.values():  # before any message: see `warm_up` of mmtrain.engine.single_stage
            stage.forward()
            stage.backward()
        self._messages: MessageCosts | None = None
        if plan.pipeline > 1:
            timeout = timedelta(seconds=config.parallel.timeout_seconds)
            channels = Channels(plan, dist.get_rank(), device, timeout)
            messages = self._message_tensors()
            self._messages = MessageCosts(plan, dist.get_rank(), channels, messages, device, self._compute)
        self.seconds: dict[str, list[float]] = {}
        """Of every round, by what was measured; see `solution`."""

    def _build(
        self, config: RunConfig, kind_of_window: LayerKind, first: int, last: int, count: int
    ) -> dict[str, SingleStage]:
        """The stages by name; those that recompute share the module of the one that does not."""
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

    def _slice(self, first: int, last: int) -> Front:
        """Blocks [first, last) of the encoder, over the whole one's weights."""
        whole = self._stages["front"].module.front
        assert whole is not None, "an encoder is cut that is there"
        part = whole.vision.slice_of(first, last)
        weights = dict(whole.vision.global_parameters())
        for name, parameter in part.global_parameters():
            parameter.data = weights[name].data
        return Front(part, whole.projector, whole.transform)

    def _message_tensors(self) -> dict[str, list[torch.Tensor]]:
        """What a micro-batch's messages hold, by their kind."""
        hidden = self._stages["front"].input
        found = {MESSAGE: [torch.zeros((2, *hidden.shape[:2]), dtype=torch.int64), torch.zeros_like(hidden)]}
        if self._half is not None:
            size = self._costs.encoder.hidden_bytes
            found[FEATURES] = [torch.zeros(size, dtype=torch.uint8, device=self._device)]
        return found

    # ---- time

    def warm_up(self, seconds: float) -> int:
        """Let everything run once or twice; how many rounds fit into so many seconds, the same on every rank."""
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
                continue  # of recomputation one measure is enough: what a second forward costs, in terms of the first
            stage.prepare()
            if name == "front":
                self._time(LOAD, lambda: to_device(self._host_batch, self._device))
                self._time(ENCODE, stage.encode)
                if self._half is not None:
                    self._time(ENCODE_HALF, functools.partial(self._half.encode, stage.batch.tiles))
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
        """Work as long as a micro-batch's, to send and receive beside."""
        stage = self._stages[self._window[0]]
        with torch.no_grad():
            stage.module(stage.input, stage.batch.position_ids)

    # ---- memory

    def _bytes(self) -> dict[str, dict[str, int]]:
        """Bytes by stage: kept until its backward, working in forward and in backward."""
        found = {}
        for name, stage in self._stages.items():
            stage.prepare()
            stage.forward()
            stage.backward()  # makes gradients, which then are there
            stage.prepare()
            if name == "front":
                found |= self._bytes_of_front(stage)
                continue
            work = (stage.forward, stage.release_output, stage.backward)
            found[name] = _of_stage(*bytes_used(*work, device=self._device))
        return found

    def _bytes_of_front(self, stage: SingleStage) -> dict[str, dict[str, int]]:
        """The same of the encoder, whose work includes what it makes, and of the front, which may keep features."""
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
        found = {
            "front": of_front | {"kept": features + of_front["kept"]},
            ENCODE: {"kept": encoded.end - features, "forward": encoded.peak, "backward": 0},
        }
        if self._half is not None:
            blocks, tiles = self._costs.encoder.blocks, stage.batch.tiles
            stem, later = self._slice(0, 0), self._slice(max(0, blocks - 2), blocks).vision
            hidden = torch.zeros(len(tiles), *later.hidden_shape, dtype=later.dtype, device=self._device)
            works = functools.partial(stem.encode, tiles), functools.partial(later.in_groups, hidden)
            of_stem, of_later = bytes_used(*works, device=self._device)
            found |= {ENCODE_STEM: {"forward": of_stem.peak}, ENCODE_LATER: {"forward": of_later.peak}}
        return found

    # ---- the result

    def finish(self) -> Calibration:
        """The calibration of all rounds so far."""
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        of_ranks = all_gather_object((medians, self._bytes()))
        seconds = mean_of_ranks([medians for medians, _ in of_ranks])
        # The ranks have measured a whole number of images, and an update of what trains in one layer of each kind.
        tiles = self._host_batch.tiles
        for name in (ENCODE, ENCODE_HALF) if tiles is not None else ():
            if name in seconds:
                seconds[name] *= self._costs.work.tiles / len(tiles)
        seconds[UPDATE] *= max(rank.trainable for rank in self._plan.ranks) / self._end.elements
        used = of_ranks[0][1]
        layers, call_seconds = solve_layers(seconds, used, self._kinds, self._window)
        return Calibration(
            key=self._key,
            layers=layers,
            compute_seconds=call_seconds,
            encode_seconds=seconds[LOAD],
            encode_block_seconds=solve_encoder(seconds, self._costs.encoder.blocks),
            messages=solve_messages(seconds, MESSAGE),
            features=solve_messages(seconds, FEATURES),
            end_seconds=seconds[REDUCE] + seconds[UPDATE],
            replicas=self._plan.data,
            matmul_flops_per_second=self._flops / seconds[MATMUL],
            encode_stem_bytes=used[ENCODE_STEM]["forward"] if ENCODE_STEM in used else None,
            encode_later_bytes=used[ENCODE_LATER]["forward"] if ENCODE_LATER in used else None,
        )


def _of_stage(forward: Usage, sent: Usage, backward: Usage) -> dict[str, int]:
    return {"kept": forward.end + sent.end, "forward": forward.peak - forward.end, "backward": backward.peak}


class _StepEnd:
    """Gradients and statistics reduced, norm, AdamW update: the end of a step on a rank that trains these weights.

    The update leaves the weights as they are: its rate is 0.
    """

    def __init__(
        self, config: RunConfig, plan: Plan, parameters: Mapping[str, torch.nn.Parameter], device: torch.device
    ) -> None:
        self._masters = MasterWeights(parameters)
        self.elements = sum(master.numel() for master in self._masters.by_name.values())
        self._optimizer = make_optimizer(torch.nn.Module(), self._masters.by_name, config.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._device = device
        self._replicas = replica_group(plan, dist.get_rank(), device, config.parallel.timeout_seconds)

    def reduce(self) -> None:
        """REDUCE_GRADIENTS and REDUCE_STATISTICS."""
        self._masters.reduce_gradients(self._replicas)
        sums = RankSums(self._device)
        sums.add(squared_norm=self._masters.squared_norm(1, self._device))
        sums.reduce(Reading(*[0.0] * len(Reading._fields)))

    def update(self) -> None:
        """OPTIMIZER_STEP; a step's first backward then makes new gradients."""
        for master in self._masters.by_name.values():
            master.grad.mul_(1.0)
        self._optimizer.step()
        self._masters.write_back()
        self._masters.zero_grad()


def matrix_products(stage: SingleStage) -> tuple[Callable[[], None], float]:
    """Products of all tokens with each matrix of the stage's decoder layers, and their FLOPs (2 a multiply-add)."""
    weights = [p for _, p in stage.module.language.global_parameters() if p.ndim == 2]
    tokens = stage.batch.position_ids.numel()
    rows = {w.shape[1]: torch.randn(tokens, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def multiply() -> None:
        with torch.no_grad():
            for weight in weights:
                torch.nn.functional.linear(rows[weight.shape[1]], weight)

    return multiply, 2.0 * tokens * sum(w.numel() for w in weights)


def find_window(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    """The first longest row of decoder layers, at most LAYERS, that all run alike; with a backward, if there is one.

    `kinds` are those of all decoder layers as they are on a stage without the head.
    """
    runs = [(kind.runs_backward, kind.input_gradient) for kind in kinds]
    best = (0, 1)
    for first in range(len(kinds)):
        last = first + 1
        while last < min(len(kinds), first + LAYERS) and runs[last] == runs[first]:
            last += 1
        if (last - first, runs[first]) > (best[1] - best[0], runs[best[0]]):
            best = (first, last)
    return best


def calibrate(
    config: RunConfig, plan: Plan, device: Device, file: Path | None, rank: Rank, *, can_cut: bool = True
) -> None:
    """What every rank of a calibration runs; rank 0 writes the file (None: the cache's) and prints what was measured.

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
    found = calibrator.finish()
    rank.progress.at(rounds, "fetching layers")
    found = dataclasses.replace(found, fetches=measure_fetches(config, plan, torch.device(rank.device)))
    if rank.rank == 0:
        written = found.save(file)
        rank.print_info(*table(found, calibrator.seconds))
        rank.print_info(f"written to {written}")
    dist.barrier()
    dist.destroy_process_group()
