"""The rank's part of bench_plan.py: one calibration and many layouts, in turns, in the same
processes.

Settings + models in a folder --measure--> FOLDER/found.json: for each layout what was predicted and
    measured

Layouts share the frozen weights; each has its own stages, projector, engine and process groups.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_models import SHAPES, ModelSize, run_config

from mmtrain.base.progress import ProgressBar
from mmtrain.calibration.calibrate import Calibrator
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import join_process_group
from mmtrain.engine.single_stage import expected_batch
from mmtrain.facts.models import models_of
from mmtrain.model.stage import Stage, build_stage
from mmtrain.plan.calibration import calibration_key, cpu_device
from mmtrain.plan.costs import Models
from mmtrain.plan.plan import StagePlan
from mmtrain.plan.planner import make_plan
from mmtrain.plan.simulate import Program, simulate
from mmtrain.runtime.rank import Rank

# An encoder whose forward is a quarter of the LLM's; 8 layers of 28 MB in fp32, more than a
# processor's caches hold.
SIZES = {**SHAPES, "quarter": ModelSize(8, 768, 2048, 12, 2304, 10, 384, 6, 168, 14, 24)}
DEVICE = torch.device("cpu")
SAMPLES_PER_PACK = 1
WORLD = 2  # ranks; replicas fill up pipeline 1


@dataclass(frozen=True)
class Layout:
    """How one and the same model is run; `name` tells it to people."""

    name: str
    pipeline: int
    microbatches: int  # of a replica's step
    boundaries: tuple[int, ...] | None = None  # None: the planner's choice
    stages_per_rank: int | str = 1
    recompute: tuple[int, ...] | int = 0


@dataclass(frozen=True)
class Settings:
    """What is measured: layouts of the model `shape`."""

    shape: str
    layouts: tuple[Layout, ...]
    repetitions: int
    calibration_rounds: int  # before, from which the layouts are planned that are run
    timeout_seconds: int = 600


def layout_config(
    settings: Settings, layout: Layout, folder: Path, calibration: Path | None
) -> RunConfig:
    """The run of a layout; with a file it is planned from that calibration."""
    shape = SIZES[settings.shape]
    replicas = WORLD // layout.pipeline
    config = run_config(
        shape,
        folder,
        dtype="float32",
        pack_length=SAMPLES_PER_PACK * shape.sample_tokens,
        microbatches=layout.microbatches * replicas,
        pipeline=layout.pipeline,
        threads=torch.get_num_threads(),
        calibration=calibration,
    )
    tree = config.model_dump()
    tree["parallel"] |= {
        "data": replicas,
        "boundaries": layout.boundaries,
        "stages_per_rank": layout.stages_per_rank,
        "recompute_layers": layout.recompute,
        "encoder_ranks": 0,
    }
    return RunConfig.model_validate(tree)


class Runner:
    """One layout on this rank: its engine over weights that it shares with others."""

    def __init__(self, config: RunConfig, models: Models, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.plan = make_plan(config, device=cpu_device(config.parallel))
        mine = self.plan.ranks[dist.get_rank()]
        stages = {stage.stage: _shared_stage(config, stage, weights) for stage in mine.stages}
        self.engine = FrozenPipelineEngine(config, self.plan, stages)
        replicas = range(mine.data, 1 << 30, self.plan.data)
        self._batches = _batches(config, models, replicas) if mine.pipeline == 0 else None
        self.seconds: list[float] = []
        self.idle: list[list[float]] = []  # of each step, by rank
        self.engine.train_step(self._batches)

    def step(self) -> None:
        """One step, from when all ranks are ready until all have ended it."""
        dist.barrier()
        began = time.perf_counter()
        result = self.engine.train_step(self._batches)
        dist.barrier()
        self.seconds.append(time.perf_counter() - began)
        self.idle.append([rank.idle_fraction for rank in result.ranks])


def _shared_stage(config: RunConfig, stage: StagePlan, weights: dict[str, torch.Tensor]) -> Stage:
    module = build_stage(config, stage)
    for name, parameter in module.global_parameters():
        if not parameter.requires_grad:
            parameter.data = weights.setdefault(name, parameter.data)
    return module


def _batches(config: RunConfig, models: Models, seeds: range) -> Iterator[PackedBatch]:
    """Yield copies of a few micro-batches in turn: what was used is let go, as in a run."""
    few = [expected_batch(config, models, seed) for seed in seeds[:4]]
    return map(copy.deepcopy, itertools.cycle(few))


def measure(settings: Settings, parts: Path, rank: Rank) -> None:
    """What every rank runs; rank 0 writes what was found."""
    join_process_group(DEVICE, settings.timeout_seconds)
    file = rank.folder / "calibration.json"
    longest = max(settings.layouts, key=lambda layout: layout.pipeline)
    config = layout_config(settings, longest, parts, None)
    models = models_of(config)
    key = calibration_key(config, models, cpu_device(config.parallel))
    calibrator = Calibrator(config, models, make_plan(config), DEVICE, key)
    calibrator.warm_up(0.0)
    with ProgressBar(
        "rounds", settings.calibration_rounds, rank.console, "measurements"
    ) as progress:
        for done in range(settings.calibration_rounds):
            calibrator.round()
            progress.show(done + 1, sum(map(len, calibrator.seconds.values())))
    _save(calibrator, file)

    weights: dict[str, torch.Tensor] = {}
    runners: dict[str, Runner] = {}
    for layout in settings.layouts:
        rank.progress.at(0, layout.name)
        runners[layout.name] = Runner(layout_config(settings, layout, parts, file), models, weights)

    calibrator.seconds.clear()
    _race(settings, runners, calibrator, rank)
    _save(calibrator, file)  # from here on it is that of the race's own minutes
    found: dict[str, Any] = {
        "calibration": json.loads(file.read_text()),
        "calibration_seconds": calibrator.seconds,
        "layouts": [describe(runner, name) for name, runner in runners.items()],
    }
    if rank.rank == 0:
        (rank.folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _save(calibrator: Calibrator, file: Path) -> None:
    found = calibrator.finish()
    if dist.get_rank() == 0:
        found.save(file)
    dist.barrier()


def _race(
    settings: Settings, runners: Mapping[str, Runner], calibrator: Calibrator, rank: Rank
) -> None:
    """Run all layouts and two rounds of the calibration in each repetition, every other
    backwards.
    """
    steps: list[tuple[str, Callable[[], None]]] = [
        (name, runner.step) for name, runner in runners.items()
    ]
    calibration = ("calibration", calibrator.round)
    half = len(steps) // 2
    turns = [*steps[:half], calibration, *steps[half:], calibration]
    with ProgressBar("repetitions", settings.repetitions, rank.console, "steps") as progress:
        for repetition in range(settings.repetitions):
            for name, work in reversed(turns) if repetition % 2 else turns:
                rank.progress.at(repetition, name)
                work()
            progress.show(repetition + 1, (repetition + 1) * len(steps))


def describe(runner: Runner, name: str) -> dict[str, Any]:
    """Return what the planner predicts for the schedule that was run, and what was measured; every
    rank calls this.
    """
    plan, device = runner.plan, cpu_device(runner.config.parallel)
    seconds = make_plan(runner.config, device=device).seconds
    predicted = simulate(Program(plan.schedule), seconds)
    # a window of the engine's clock ends before the optimizer
    working = predicted.seconds - seconds.end
    return {
        "name": name,
        "pipeline": plan.pipeline,
        "stages_per_rank": plan.stages_per_rank,
        "predicted_seconds": predicted.seconds,
        "measured_seconds": runner.seconds,
        "predicted_idle": [
            predicted.idle[r.pipeline] * predicted.seconds / working for r in plan.ranks
        ],
        "measured_idle": runner.idle,
    }
