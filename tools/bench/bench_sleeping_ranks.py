"""The rank's part of `bench.py encoder_slices sleep`: the engine with stages that take the seconds they are planned to.

Case + models in a folder --make_calibration--> made-up seconds --make_plan--> plans --run_case--> FOLDER/NAME.json

A machine with few cores cannot compute like eight devices, but it can wait like them. Processes, messages and lists are
those of a run, and stages hold a tiny model with as many layers and blocks as the real one; each of their calls lasts
until the planned time is over. Transfers are planned to take none: a tiny model's messages take well below 1 ms.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_models import SHAPES, run_config

from mmtrain.base.progress import ProgressBar
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import join_process_group
from mmtrain.engine.single_stage import expected_batch
from mmtrain.model.stage import Stage, build_stage
from mmtrain.plan.calibration import Calibration, LayerMeasures, MessageSeconds, calibration_key, cpu_device
from mmtrain.plan.costs import Models, run_costs
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan, models_of
from mmtrain.plan.schedule import prelude
from mmtrain.plan.simulate import Program, simulate
from mmtrain.processes.rank import Rank

FRONT, HEAD = 0.01, 0.1  # forward of each, and backward, in forwards of a decoder layer
TIMEOUT_SECONDS = 600
WAYS = ("slices", "rank 0")


@dataclass(frozen=True)
class Case:
    """What is run with the encoder in slices, and with the encoder on rank 0."""

    name: str
    pipeline: int
    microbatches: int
    share: float  # of the encoder in a step's exact work
    work_seconds: float  # of each rank in a step, if all did the same
    steps: int  # of each way, besides the first
    shape: str = "48 layers"


def case_config(case: Case, folder: Path, way: str, calibration: Path | None) -> RunConfig:
    """The run of one way, planned from made-up seconds."""
    config = run_config(
        SHAPES[case.shape],
        folder,
        dtype="float32",
        pack_length=SHAPES[case.shape].sample_tokens,
        microbatches=case.microbatches,
        pipeline=case.pipeline,
        threads=1,
        calibration=calibration,
    )
    tree = config.model_dump()
    tree["parallel"]["encoder_ranks"] = "auto" if way == "slices" else 0
    return RunConfig.model_validate(tree)


def make_calibration(case: Case, config: RunConfig, models: Models) -> Calibration:
    """Seconds as if measured: decoder layers backward as forward, and the encoder's share of all."""
    costs = run_costs(config, models)
    of_ends = {"front": FRONT, "head": HEAD}
    of_kinds = {kind.name: of_ends.get(kind.name, 1.0) for kind in costs.kinds}
    language = 2 * sum(of_kinds[layer.kind] for layer in costs.layers)
    of_kinds["encoder"] = language * case.share / (1 - case.share)
    unit = case.work_seconds * case.pipeline / case.microbatches / (language + of_kinds["encoder"])
    layers = {}
    for name, units in of_kinds.items():
        forward = units * unit
        backward = 0.0 if name == "encoder" else forward
        layers[name] = LayerMeasures(forward, backward, forward + backward, 0, 0, 0, 0, 0)
    at_once = MessageSeconds(0.0, 0.0, 0.0)
    return Calibration(
        key=calibration_key(config, models, cpu_device(config)),
        layers=layers,
        compute_seconds=0.0,
        encode_seconds=0.0,
        encode_block_seconds=layers["encoder"].forward_seconds / costs.encoder.blocks,
        messages=at_once,
        features=at_once,
        end_seconds=0.0,
        replicas=1,
        matmul_flops_per_second=1.0,
    )


class SleepingStage(Stage):
    """The same stage, whose forwards, backwards and encodes take these seconds, if what they do takes no longer."""

    def __init__(self, stage: Stage, forward: float, backward: float, encode: float) -> None:
        super().__init__(stage.language, stage.front, stage.dtype, stage.later_slice)
        self._forward, self._backward, self._encode = forward, backward, encode
        self._began = 0.0
        self.eval()

    def encode(self, taken: PackedBatch | torch.Tensor | None) -> torch.Tensor | None:
        end = time.perf_counter() + self._encode
        found = super().encode(taken)
        sleep_until(end)
        return found

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self._timed(super().forward, hidden, position_ids)

    def loss(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._timed(super().loss, hidden, position_ids, labels)

    def predict(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._timed(super().predict, hidden, position_ids, labels)

    def _timed(self, work: Callable[..., Any], hidden: torch.Tensor, *others: torch.Tensor) -> Any:
        """A forward whose graph is timed, too, from its output's gradient to its input's."""
        end = time.perf_counter() + self._forward
        found = work(_InBackward.apply(hidden, self.backward_ends), *others)
        first, *more = found if isinstance(found, tuple) else (found,)
        first = _InBackward.apply(first, self.backward_begins)
        sleep_until(end)
        return (first, *more) if more else first

    def backward_begins(self) -> None:
        self._began = time.perf_counter()

    def backward_ends(self) -> None:
        sleep_until(self._began + self._backward)


class _InBackward(torch.autograd.Function):
    """Nothing, but calls something when the gradient comes by."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


def sleep_until(end: float) -> None:
    """Give up the core until then."""
    time.sleep(max(0.0, end - time.perf_counter()))


class Sleeper:
    """One way of a case on this rank."""

    def __init__(self, case: Case, config: RunConfig, models: Models, plan: Plan) -> None:
        self.plan = plan
        mine = plan.ranks[dist.get_rank()]
        planned, encode = plan.seconds, plan.seconds.encode[mine.pipeline]
        stages = {
            s.stage: SleepingStage(build_stage(config, s), planned.forward[s.stage], planned.backward[s.stage], encode)
            for s in mine.stages
        }
        self._engine = FrozenPipelineEngine(config, plan, stages)
        self._batches: Iterator[PackedBatch] | None = None
        if mine.pipeline == 0:
            self._batches = itertools.repeat(expected_batch(config, models))
        self.seconds: list[float] = []

    def step(self) -> None:
        """One step, from when all ranks are ready until all have ended it."""
        dist.barrier()
        began = time.perf_counter()
        self._engine.train_step(self._batches)
        dist.barrier()
        self.seconds.append(time.perf_counter() - began)

    def describe(self) -> dict[str, Any]:
        """What was planned, and how long each step took; the first one begins with what is ahead."""
        plan, planned = self.plan, self.plan.seconds
        first = (
            simulate(Program(prelude(plan.chain)), planned).seconds + simulate(Program(plan.schedule), planned).seconds
        )
        return {
            "boundaries": plan.boundaries,
            "stages_per_rank": plan.stages_per_rank,
            "blocks": [0 if s is None else s[1] - s[0] for s in (rank.stages[0].encoder for rank in plan.ranks)],
            "ahead": [None if encodes is None else encodes.ahead for encodes in plan.chain],
            "predicted_seconds": plan.step_seconds,
            "predicted_first_seconds": first,
            "first_seconds": self.seconds[0],
            "measured_seconds": self.seconds[1:],
        }


def run_case(case: Case, folder: Path, rank: Rank) -> None:
    """What every rank runs; rank 0 writes what was found."""
    join_process_group(torch.device("cpu"), TIMEOUT_SECONDS)
    file = rank.folder / f"{case.name}-seconds.json"
    plain = case_config(case, folder, WAYS[0], None)
    models = models_of(plain)
    plans: list[Plan | None] = [None] * len(WAYS)
    if rank.rank == 0:  # once: on few cores that many searches at the same time would take minutes
        make_calibration(case, plain, models).save(file)
        configs = [case_config(case, folder, way, file) for way in WAYS]
        plans = [make_plan(config, device=cpu_device(config)) for config in configs]
    dist.broadcast_object_list(plans)
    sleepers = {}
    for way, plan in zip(WAYS, plans, strict=True):
        assert plan is not None
        sleepers[way] = Sleeper(case, case_config(case, folder, way, file), models, plan)
    with ProgressBar("steps", case.steps, rank.console, "steps") as progress:
        for done in range(case.steps + 1):
            for way in reversed(WAYS) if done % 2 else WAYS:
                rank.progress.at(done, way)
                sleepers[way].step()
            progress.show(done, done * len(WAYS))
    if rank.rank == 0:
        found = dataclasses.asdict(case) | {way: sleepers[way].describe() for way in WAYS}
        (rank.folder / f"{case.name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
