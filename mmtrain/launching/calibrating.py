"""`mmtrain calibrate`: ranks that measure what layers and messages take here, and the plan that follows from that."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_info, show_error
from mmtrain.config.schema import RunConfig
from mmtrain.launching.machine import (
    can_slice_encoder,
    device_here,
    job_here,
    plan_here,
    refuse_missing_quantisation,
    refuse_short_host_memory,
)
from mmtrain.plan.calibration import cached_file, calibration_key
from mmtrain.plan.plan import render
from mmtrain.plan.planner import models_of
from mmtrain.runtime.gpus import visible_gpus
from mmtrain.runtime.supervise import prepared, run_ranks


def calibrate(config: RunConfig, ranks: int) -> int:
    """Measure on as many ranks as the run has, all on this machine, then print the plan; return the exit code."""
    gpus = visible_gpus()
    device = device_here(config, gpus)
    file = cached_file(calibration_key(config, models_of(config), device))
    if config.parallel.calibration is not None:
        file = Path(config.parallel.calibration).expanduser()
    _refuse_unwritable(file)
    # Tried whatever the configuration asks for: a calibration serves plans with slices and without.
    can_cut = can_slice_encoder(config, may_stay_whole=config.parallel.encoder_ranks in ("auto", 0))
    if not can_cut:
        config = config.changed({"parallel.encoder_ranks": 0})
    uncalibrated = config.changed({"parallel.calibration": None})
    assumed = plan_here(uncalibrated, gpus, ranks, dataclasses.replace(device, name=""))  # its costs are assumed
    refuse_missing_quantisation(config)
    refuse_short_host_memory(assumed.ranks)
    folder = Path(tempfile.mkdtemp(prefix="mmtrain-calibration-"))
    job = job_here(config, assumed, gpus, ranks, folder, "mmtrain.calibration.calibrate:calibrate")
    arguments = {"config": uncalibrated, "plan": assumed, "device": device, "file": file, "can_cut": can_cut}
    job = dataclasses.replace(job, arguments=arguments)
    with prepared(job):
        failure = run_ranks(job)
    if failure is not None:
        show_error(failure.message)
        return failure.exit_code
    shutil.rmtree(folder)
    print_info("", *render(plan_here(config, gpus, ranks)))
    return 0


def _refuse_unwritable(file: Path) -> None:
    """Raise UserError before a minute of measuring, not after it."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
        raise UserError(f"the calibration cannot be written to {file}. Name another file by parallel.calibration")
