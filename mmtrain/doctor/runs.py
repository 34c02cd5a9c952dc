"""Checks by short runs of the demo: one process against the losses on record, other layouts against
one process.
"""

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mmtrain.api.run import WRONG_INPUT
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import recorded
from mmtrain.checkpoint.run_folder import METRICS
from mmtrain.config.load import DEMO
from mmtrain.doctor.check import COMPARE, FailedError, SkippedError
from mmtrain.runtime.child import python_child
from mmtrain.runtime.gpus import visible_gpus

# made on a CPU; the log of a failed check has the losses to renew it
RECORD = Path(__file__).with_name("record.json")
STEPS = 6
SETTINGS = (
    f"train.max_steps={STEPS}",
    "optimizer.warmup_fraction=0",  # else the first steps would train next to nothing
    "eval.shards=null",
    "checkpoint.every_minutes=null",
    "parallel.threads_per_rank=1",
)
# Relative differences of a step's loss from the record. CPUs differ by the order of sums. A GPU's
# float32 convolutions round factors to 10 bits (TF32, torch's default). bfloat16 keeps 8 bits of
# everything: 1.2e-3 off float32.
RECORD_TOLERANCES = {
    "float32": {"cpu": 1e-4, "cuda": 2e-3},
    "bfloat16": {"cpu": 5e-3, "cuda": 5e-3},
}
SAME = 1e-4  # relative difference of a step's loss between two runs on one machine
WRONG_NUMBERS = (
    "do not train on this machine; report this line with the versions of torch, driver and GPU"
)


def demo(folder: Path) -> str:
    """Compare the demo's losses in float32 and bfloat16 with those on record."""
    record = json.loads(RECORD.read_text())["losses"]
    device = "cuda" if visible_gpus() else "cpu"
    losses = {dtype: losses_of(_one_process(folder, dtype)) for dtype in RECORD_TOLERANCES}
    print(json.dumps({"losses": losses}))
    texts = []
    for dtype, tolerances in RECORD_TOLERANCES.items():
        first, *_, last = losses[dtype]
        difference = largest_difference(losses[dtype], record[dtype])
        texts.append(f"{dtype}: loss {first:.4f} to {last:.4f}, {difference:.1e} off the record")
        if not difference <= tolerances[device]:
            raise FailedError(
                f"{texts[-1]}; at most {tolerances[device]:g} is rounding", WRONG_NUMBERS
            )
    return "; ".join(texts)


def pipeline(folder: Path) -> str:
    """Compare the losses of a pipeline of two ranks with those of one process."""
    if len(visible_gpus()) == 1:
        raise SkippedError("needs 2 GPUs, but 1 is visible")
    return _compare(folder, "pipeline", "parallel.pipeline=2")


def streaming(folder: Path) -> str:
    """Compare the losses of a run that streams its decoder layers with those of one that keeps
    them.
    """
    return _compare(folder, "streaming", "parallel.pipeline=1", "parallel.streamed_layers=4")


def _compare(folder: Path, name: str, *overrides: str) -> str:
    expected = losses_of(_one_process(folder, "float32"))
    difference = largest_difference(losses_of(run_demo(folder, name, *overrides)), expected)
    text = f"{STEPS} steps, losses {difference:.1e} off those of one process that keeps all layers"
    if not difference <= SAME:
        raise FailedError(f"{text}; at most {SAME:g} is rounding", WRONG_NUMBERS)
    return text


def _one_process(folder: Path, dtype: str) -> Path:
    return run_demo(folder, dtype, "parallel.pipeline=1", f"model.llm.dtype={dtype}")


def run_demo(folder: Path, name: str, *overrides: str) -> Path:
    """Train the demo for a few steps, unless an earlier check has; return the run's folder. Raises
    FailedError.
    """
    run = folder / name
    if not any(recorded(run / METRICS, "end")):
        settings = (*SETTINGS, f"run.dir={folder}", f"run.name={name}", *overrides)
        launched = subprocess.run(
            **python_child("-m", "mmtrain.launch", DEMO, *settings),
            stderr=subprocess.PIPE,
            text=True,
        )
        print(launched.stderr)
        if launched.returncode != 0:
            message = launched.stderr.strip().removeprefix("error: ")
            if launched.returncode == WRONG_INPUT:  # and the message says what to do
                raise UserError(message)
            raise FailedError(
                f"the demo ended with exit code {launched.returncode}: {message}", COMPARE
            )
    return run


def losses_of(run: Path) -> list[float]:
    """Return the loss of each step, in nats per supervised token."""
    return [record["loss"] for record in recorded(run / METRICS, "train")]


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; infinite for NaN, and for fewer or more losses."""
    if len(losses) != len(expected):
        return math.inf
    differences = [abs(ours / theirs - 1) for ours, theirs in zip(losses, expected, strict=True)]
    if any(map(math.isnan, differences)):
        return math.inf
    return max(differences)
