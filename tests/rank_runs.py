"""Whole runs without a launcher's start-up: `training.loop.main` on forked ranks, from where
`--resume` would begin.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from json_files import read_lines
from ranks import run_ranks
from scenes import DEVICE, with_slices

from mmtrain.base.printing import logs_shown, print_info
from mmtrain.checkpoint.resume import AUTO, ResumePoint, find_start
from mmtrain.checkpoint.run_folder import prepare_folder, run_folder
from mmtrain.checkpoint.step_folder import StepFolder, find, step_path, why_damaged
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.launching.data import with_formats
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan
from mmtrain.runtime.failures import RankProgress
from mmtrain.runtime.rank import Rank
from mmtrain.runtime.stop import StopRequest
from mmtrain.training.loop import main


@dataclass(frozen=True)
class Run:
    """A run's folder and what rank 0 printed."""

    folder: Path
    printed: str

    def lines(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """Records of a file of the run, of these kinds if there are any, without the time at which
        each was written.
        """
        path = self.folder / name
        records = read_lines(path) if path.exists() else []
        for record in records:
            record.pop("time", None)
        return [record for record in records if not kinds or record["kind"] in kinds]

    def losses(self) -> dict[int, float]:
        """Loss by step, as last recorded."""
        steps = self.lines("metrics.jsonl", "train")
        assert [line["step"] for line in steps] == list(range(len(steps))), (
            "each step once, in order"
        )
        return {line["step"]: line["loss"] for line in steps}

    def checkpoint(self, step: int) -> StepFolder:
        path = step_path(self.folder, step)
        assert why_damaged(path) is None
        return find(path)


def _be_rank(
    config: RunConfig, plan: Plan, start: ResumePoint | None, trace_steps: int
) -> str | None:
    rank, folder = int(os.environ["RANK"]), run_folder(config)
    with (folder / f"console-{rank}.txt").open("w") as console:
        me = Rank(
            rank,
            len(plan.ranks),
            str(DEVICE),
            folder,
            console if rank == 0 else None,
            RankProgress(),
            StopRequest(),
        )
        return main(config, plan, me, start if rank == 0 else None, trace_steps)


def _prefetching(plan: Plan, prefetched: int) -> Plan:
    """The plan with `prefetched` micro-batches encoded by each slice when a step begins."""
    held = (rank.stages[0].encoder or (0, 0) for rank in plan.ranks if rank.data == 0)
    slices = tuple(last - first for first, last in held)
    if not any(slices):  # the encoder is whole on rank 0
        slices = (1, *[0] * (plan.pipeline - 1))
    lead = 1 if sum(map(bool, slices)) == 1 and slices[0] else plan.microbatches_per_step
    return with_slices(plan, slices, (prefetched,) * plan.pipeline, lead)


def train(
    file: Path,
    *overrides: str,
    resume: str | Path = AUTO,
    allow: Sequence[str] = (),
    prefetch: Literal["auto"] | int = "auto",
    trace: int = 0,
) -> Run:
    """Run to the end what `mmtrain train FILE OVERRIDES --resume RESUME --allow-change ALLOW
    --trace TRACE` would.

    Each step begins with `prefetch` micro-batches encoded.
    """
    with contextlib.redirect_stdout(io.StringIO()) as said, logs_shown(print_info):
        config = with_formats(load_config(file, overrides))
        plan, start = make_plan(config), find_start(config, str(resume), allow)
        if prefetch != "auto":
            plan = _prefetching(plan, prefetch)
        prepare_folder(config, plan, goes_on=start is not None)
    world = len(plan.ranks)
    stopped = run_ranks(
        world, _be_rank, config, plan, start, trace, timeout=200, daemons=config.data.workers == 0
    )
    assert stopped == [None] * world
    folder = run_folder(config)
    return Run(folder, said.getvalue() + (folder / "console-0.txt").read_text())
