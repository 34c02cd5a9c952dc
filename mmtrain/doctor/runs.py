"""Short runs of the demo by the real launcher, for checks that compare runs; each is made once in a doctor's life."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from mmtrain.api.run import Run
from mmtrain.base.printing import say
from mmtrain.doctor.check import FailedError, Here
from mmtrain.processes.parent import die_with_parent

DEMO = "demo:llava_pp4"
STEPS = 6
SHORT = (
    f"train.max_steps={STEPS}",
    "optimizer.warmup_fraction=0",  # else the first steps would train next to nothing
    "eval.shards=null",
    "checkpoint.every_minutes=null",
    "parallel.threads_per_rank=1",
)
SAME = 1e-4  # relative: losses of two layouts on one kind of device


def launcher(here: Here, name: str, *overrides: str) -> list[str]:
    """The command line of a run of the demo; later overrides win."""
    return [DEMO, *SHORT, f"run.dir={here.runs}", f"run.name={name}", *overrides]


def launch(arguments: Sequence[str]) -> str:
    """Run `mmtrain train`; what it printed. Raises FailedError with its message if it fails."""
    command = [sys.executable, "-m", "mmtrain.launch", *arguments]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=die_with_parent)
    say(" ".join(command), *ran.stdout.splitlines(), *ran.stderr.splitlines())  # into the check's log
    if ran.returncode != 0:
        said = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        raise FailedError(said[0].removeprefix("error: "))
    return ran.stdout


def demo(here: Here, name: str, *overrides: str) -> Run:
    """A run of the demo; the one of this name, if a check before has made it."""
    run = Run(here.runs / name)
    if not run.metrics("end"):
        launch(launcher(here, name, *overrides))
    return run


def pipeline_1(here: Here) -> Run:
    """The run that others are compared with."""
    return demo(here, "pp1", "parallel.pipeline=1")


def losses(run: Run) -> list[float]:
    """In nats per supervised token, by step."""
    return [record["loss"] for record in run.metrics("train")]


def worst(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite if there are not as many, or for NaN."""
    if len(found) != len(expected):
        return float("inf")
    differences = [abs(ours / theirs - 1) for ours, theirs in zip(found, expected, strict=True)]
    return max(d if d == d else float("inf") for d in differences)
