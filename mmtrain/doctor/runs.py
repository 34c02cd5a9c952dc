"""Short runs of the demo by the real launcher, for checks that compare runs; each is made once in a doctor's life."""

from __future__ import annotations

from collections.abc import Sequence

from mmtrain.api.run import Run, train
from mmtrain.config.load import DEMO, load_config
from mmtrain.config.schema import RunConfig
from mmtrain.doctor.check import Here

STEPS = 6
SHORT = (
    f"train.max_steps={STEPS}",
    "optimizer.warmup_fraction=0",  # else the first steps would train next to nothing
    "eval.shards=null",
    "checkpoint.every_minutes=null",
    "parallel.threads_per_rank=1",
)
SAME = 1e-4  # relative: losses of two layouts on one kind of device


def short_run(here: Here, name: str, *overrides: str) -> list[str]:
    """Overrides for a run of the demo; later ones win."""
    return [*SHORT, f"run.dir={here.runs}", f"run.name={name}", *overrides]


def demo_config(here: Here, name: str, *overrides: str) -> RunConfig:
    """The configuration of such a run."""
    return load_config(DEMO, short_run(here, name, *overrides))


def demo(here: Here, name: str, *overrides: str) -> Run:
    """A run of the demo; the one of this name, if a check before has made it. Raises UserError, RunError."""
    run = Run(here.runs / name)
    return run if run.metrics("end") else train(demo_config(here, name, *overrides)).wait()


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
