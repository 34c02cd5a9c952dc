"""The doctor's checks of what was foreseen: a plan's memory and step time against what then happens."""

from __future__ import annotations

import functools
import json
import os
import statistics

from mmtrain.base.printing import bytes_text
from mmtrain.doctor.check import FailedError, Here, Seen
from mmtrain.doctor.layouts import on_ranks
from mmtrain.doctor.numbers import BFLOAT16
from mmtrain.doctor.runs import demo, demo_config
from mmtrain.launching.calibrating import calibrate

# Of the plan's bytes: what kernels work in is estimated, and allocators round; and what cuBLAS takes for itself.
MEMORY_TOLERANCE, WORKSPACE_BYTES = 0.1, 64 * 2**20
LARGE = (BFLOAT16, "train.packs_per_microbatch=256", "train.packs_per_step=512")  # a GiB, much more than the workspace
CALIBRATED_STEPS = 12
CALIBRATION_FACTOR = 2.0  # a step's launches overlap with its work, a calibrated piece's do not


def memory(here: Here) -> Seen:
    """Bytes that the plan foresees for a rank against the most that were allocated at once in a step."""
    from mmtrain.doctor.rank import measure_memory

    config = demo_config(here, "memory", "parallel.pipeline=1", *(LARGE if here.gpus else ("train.packs_per_step=2",)))
    on_ranks(here, 1, functools.partial(measure_memory, config, here.folder))
    found = json.loads((here.folder / "memory.json").read_text())
    planned, allocated = found["planned_bytes"], found["allocated_bytes"]
    text = f"planned {bytes_text(planned)}, allocated {bytes_text(allocated)}"
    if here.gpus:
        text += f", reserved {bytes_text(found['reserved_bytes'])}, on the GPU {bytes_text(found['held_bytes'])}"
    if not abs(allocated - planned) <= MEMORY_TOLERANCE * planned + (WORKSPACE_BYTES if here.gpus else 0):
        raise FailedError(text, facts=found)
    return Seen(text, found)


def calibration(here: Here) -> Seen:
    """Seconds that a calibration foresees for a step of the demo against the median of those that follow."""
    file = here.folder / "calibration.json"
    alike = ("parallel.pipeline=1", f"train.max_steps={CALIBRATED_STEPS}", f"parallel.calibration={file}")
    if calibrate(demo_config(here, "calibrating", *alike), 1):
        raise FailedError("measuring failed; the check's log says why")
    run = demo(here, "calibrated", *alike)
    planned = run.plan["step_seconds"]
    measured = statistics.median(record["seconds"] for record in run.metrics("train")[1:])
    text = f"a step planned {planned * 1e3:,.1f} ms, measured {measured * 1e3:,.1f} ms"
    facts = {"planned_seconds": planned, "measured_seconds": measured, "load_average": os.getloadavg()[0]}
    if not 1 / CALIBRATION_FACTOR <= planned / measured <= CALIBRATION_FACTOR:
        raise FailedError(f"{text}; load average {facts['load_average']:.1f}", facts=facts)
    return Seen(text, facts)
