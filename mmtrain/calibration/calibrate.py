"""Measures on the device what the planner needs to know of a run: a Calibration.

every rank: Calibrator --warm_up, then rounds--> seconds of each piece, of messages, of a step's end
            --finish: medians of each rank, means over ranks--> Calibration, the same everywhere
rank 0: --calibrate--> the file that the planner finds, a table of what was measured

All ranks do the same at the same time, since memory bandwidth, clocks and cores are shared in a run, too. A round
measures everything once, so that what drifts meets all alike, and so that between two turns of a piece others have been
through the caches. Pieces are stages as the engine runs them: with one layer, and with several in a row, whose
difference tells what a layer adds and what a call costs beyond its layers. A GPU is waited for after each, so there a
call's cost holds launches that a run overlaps with computing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.base.printing import bytes_text
from mmtrain.base.progress import Progress
from mmtrain.calibration.allocations import MemoryTrace
from mmtrain.calibration.message_costs import MessageCosts, median_of
from mmtrain.calibration.solution import (
    ENCODE,
    LOAD,
    MATMUL,
    REDUCE,
    UPDATE,
    WINDOW,
    Found,
    Scales,
    recomputing,
    solve,
)
from mmtrain.calibration.work import StepEnd, matrix_products
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import to_device
from mmtrain.engine.channels import Channels
from mmtrain.engine.process_groups import join_process_group
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.model.stage import build_chunk
from mmtrain.plan.calibration import Calibration, Device, Key, calibration_key
from mmtrain.plan.costs import LayerKind, Models, run_costs
from mmtrain.plan.layout import Plan, StagePlan
from mmtrain.plan.planner import models_of
from mmtrain.processes.rank import Rank

LAYERS = 4  # of the stage that holds several
WARM_UP_ROUNDS = 2
MIN_ROUNDS, MAX_ROUNDS = 7, 31
SECONDS = 40.0  # of rounds, if that gives as many


class Calibrator:
    """One rank's part; every rank of the job constructs it at the same time and calls the same methods.

    `plan` is any plan of the run, for its ranks and the channels between them. Loads the front, the head and one
    decoder layer of each kind, and LAYERS in a row, from the run's own model files.
    """

    def __init__(self, config: RunConfig, models: Models, plan: Plan, device: torch.device, key: Key) -> None:
        self._plan, self._device, self._key = plan, device, key
        timeout = timedelta(seconds=config.parallel.timeout_seconds)
        self._costs = run_costs(config, models)
        self._kinds = {kind.name: kind for kind in self._costs.kinds}
        of_layers = [self._kinds[layer.kind] for layer in (*self._costs.layers[1:-2], self._costs.whole_last)]
        first, last = find_window(of_layers)
        self._window = tuple(kind.name for kind in of_layers[first:last])
        self._host_batch = expected_batch(config, models)
        self._pieces = self._build(config, of_layers[first], first, last, len(of_layers))
        trained = {
            name: parameter
            for kind in self._kinds  # in one order on all ranks, whose gradients are reduced in turn
            if kind in self._pieces
            for name, parameter in self._pieces[kind].chunk.global_parameters()
            if parameter.requires_grad
        }
        self._end = StepEnd(config, plan, trained)
        self._multiply, self._flops = matrix_products(self._pieces[self._window[0]])
        for piece in self._pieces.values():  # before any message: see mmtrain.engine.single_stage
            piece.forward()
            piece.backward()
        self._messages: MessageCosts | None = None
        if plan.pipeline > 1:
            self._messages = MessageCosts(
                plan,
                dist.get_rank(),
                device,
                Channels(plan, dist.get_rank(), device, timeout),
                self._pieces["front"].input,
                self._compute,
            )
        self.seconds: dict[str, list[float]] = {}
        """Of every round, by what was measured; see `calibration_solution`."""

    def _build(
        self, config: RunConfig, kind_of_window: LayerKind, first: int, last: int, count: int
    ) -> dict[str, SingleStage]:
        """The pieces by name; those that recompute share the chunk of the one that does not."""
        batch = to_device(self._host_batch, self._device)

        def piece(kind: LayerKind, first: int, last: int, *, front: bool = False, head: bool = False) -> SingleStage:
            chunk = build_chunk(config, StagePlan(0, first, last, front, head), device=self._device)
            return SingleStage(chunk, batch, input_gradient=kind.input_gradient, backward=kind.runs_backward)

        pieces = {
            "front": piece(self._kinds["front"], 0, 0, front=True),
            "head": piece(self._kinds["head"], count, count, head=True),
            WINDOW: piece(kind_of_window, first, last),
        }
        for kind in self._kinds.values():
            if kind.layer is not None:
                pieces[kind.name] = piece(kind, kind.layer, kind.layer + 1, head=kind.on_rows)
        for name, piece in list(pieces.items()):
            if name not in ("front", "head") and piece.runs_backward:
                pieces[recomputing(name)] = piece.recomputing()
        return pieces

    # ---- time

    def warm_up(self, seconds: float) -> int:
        """Let everything run once or twice; how many rounds fit into so many seconds, the same on every rank."""
        for _ in range(WARM_UP_ROUNDS):
            began = time.perf_counter()
            self.round()
        took = torch.tensor([time.perf_counter() - began], device=self._device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        self.forget()
        return min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / float(took))))

    def forget(self) -> None:
        """Drop the rounds so far."""
        self.seconds = {}
        if self._messages is not None:
            self._messages.forget()

    def round(self) -> None:
        """Measure everything once more."""
        for name, piece in self._timed_pieces():
            piece.prepare()
            if name == "front":
                self._time(LOAD, lambda: to_device(self._host_batch, self._device))
                self._time(ENCODE, piece.encode)
            dist.barrier()
            self._time(f"{name} forward", piece.forward)
            piece.release_output()
            if piece.runs_backward:
                self._time(f"{name} backward", piece.backward)
        dist.barrier()
        self._time(MATMUL, self._multiply)
        if self._messages is not None:
            self._messages.round()
        dist.barrier()
        self._time(REDUCE, self._end.reduce)
        self._time(UPDATE, self._end.update)

    def _timed_pieces(self) -> Iterator[tuple[str, SingleStage]]:
        """Of recomputation one measure is enough: what a second forward costs, in terms of the first."""
        for name, piece in self._pieces.items():
            if piece.recompute == 0 or name == recomputing(WINDOW):
                yield name, piece

    def _time(self, name: str, work: Callable[[], object]) -> None:
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def _compute(self) -> None:
        """Work as long as a micro-batch's, to send and receive beside."""
        piece = self._pieces[self._window[0]]
        with torch.no_grad():
            piece.chunk(piece.input, piece.batch.position_ids)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ---- memory

    def _usage(self) -> dict[str, dict[str, int]]:
        """Bytes by piece: kept until its backward, working in forward and in backward."""
        found = {}
        for name, piece in self._pieces.items():
            piece.prepare()
            piece.forward()
            piece.backward()  # makes gradients, which then are there
            piece.prepare()
            with MemoryTrace(self._device) as trace:
                if name == "front":
                    with trace.span("encode"):
                        features = piece.encode()
                    del features
                with trace.span("forward"):
                    piece.forward()
                with trace.span("keep"):
                    piece.release_output()
                with trace.span("backward"):
                    piece.backward()
            spans = trace.spans
            found[name] = {
                "kept": spans["keep"].end - spans["forward"].begin,
                "forward": spans["forward"].peak - spans["forward"].end,
                "backward": spans["backward"].peak - spans["backward"].begin,
            }
            if name == "front":
                encode, features = spans["encode"], piece.features.untyped_storage().nbytes()
                kept = 0 if piece.chunk.encoder_is_frozen else encode.end - encode.begin - features
                found[ENCODE] = {"kept": kept, "forward": encode.peak - encode.end, "backward": 0}
        return found

    # ---- the result

    def finish(self, factors: Sequence[float | None] | None = None) -> Calibration:
        """The calibration of all rounds so far.

        `factors`, one for each round: what its seconds are multiplied by, None for a round that does not count.
        """
        factors = factors or [1.0] * len(self.seconds[MATMUL])
        medians = {name: median_of(values, factors) for name, values in self.seconds.items()}
        messages = self._messages.found(factors) if self._messages is not None else {}
        of_ranks: list[Found] = [Found({}, {}, {})] * dist.get_world_size()
        dist.all_gather_object(of_ranks, Found(medians, self._usage(), messages))
        images = len(self._host_batch.images)
        here = sum(master.numel() for master in self._end.masters.by_name.values())
        scales = Scales(
            images=self._costs.work.images / images,
            trained=max(rank.trainable for rank in self._plan.ranks) / here,
            matmul_flops=self._flops,
            replicas=self._plan.data,
        )
        return solve(of_ranks, self._kinds, self._window, scales, self._key)


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


def calibrate(config: RunConfig, plan: Plan, device: Device, file: Path | None, rank: Rank) -> None:
    """What every rank of a calibration runs; rank 0 writes the file (None: the cache's) and prints what was measured.

    `device` is what the ranks share, `plan` any plan of the run.
    """

    join_process_group(torch.device(rank.device), config.parallel.timeout_seconds)
    models = models_of(config)
    rank.tell(f"calibrating on {device.name}: loading layers")
    calibrator = Calibrator(config, models, plan, torch.device(rank.device), calibration_key(config, models, device))
    rounds = calibrator.warm_up(SECONDS)
    with Progress("rounds", rounds, rank.tell, rank.console, "measurements") as progress:
        for done in range(rounds):
            rank.progress.at(done, "calibrating")
            calibrator.round()
            progress.show(done + 1, sum(map(len, calibrator.seconds.values())))
    found = calibrator.finish()
    if rank.rank == 0:
        written = found.save(file)
        rank.tell(*table(found, calibrator.seconds))
        rank.tell(f"written to {written}")
    dist.barrier()
    dist.destroy_process_group()


def table(found: Calibration, seconds: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """What one more layer adds to a stage, and what else was measured; then each measurement's spread on a rank."""
    name_width = max(map(len, found.layers))
    yield f"{'one more':{name_width}}  forward, ms  backward  recomputing      kept  recomputing   working"
    for name, layer in found.layers.items():
        times = layer.forward_seconds, layer.backward_seconds, layer.recomputing_seconds
        working = max(layer.forward_working_bytes, layer.backward_working_bytes)
        yield (
            f"{name:{name_width}}  {times[0] * 1e3:11,.3f}  {times[1] * 1e3:8,.3f}  {times[2] * 1e3:11,.3f}"
            f"  {bytes_text(layer.kept_bytes):>8}  {bytes_text(layer.kept_bytes_recomputing):>11}"
            f"  {bytes_text(working):>8}"
        )
    yield (
        f"call {found.compute_seconds * 1e3:,.3f} ms; step's end {found.end_seconds * 1e3:,.3f} ms; matrix products "
        f"{found.matmul_flops_per_second / 1e12:,.3f} TFLOP/s a rank"
    )
    for name, line in (("send", found.send), ("receive", found.receive), ("transfer", found.transfer)):
        if line is None:
            yield f"{name} was not measured: plans assume it"
        elif line.fixed or line.per_byte:
            rate = f", {line.per_byte * 1e9:,.3f} ms a MB" if line.per_byte else ""
            yield f"{name} {line.fixed * 1e3:,.3f} ms{rate}"
    width = max(map(len, seconds))
    yield f"{'rank 0, ms':{width}}  median (least - largest) of {len(seconds[MATMUL])} rounds"
    for name, values in seconds.items():
        low, high = min(values) * 1e3, max(values) * 1e3
        yield f"{name:{width}}  {statistics.median(values) * 1e3:,.3f} ({low:,.3f} - {high:,.3f})"
