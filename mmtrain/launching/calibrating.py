"""`--calibrate`: ranks that measure what layers and messages take here, and the plan that follows from that."""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.errors import EncoderSliceError, UserError
from mmtrain.base.printing import print_info, print_note, show_error
from mmtrain.config.schema import RunConfig
from mmtrain.launching.machine import (
    device_here,
    job_here,
    memory_here,
    plan_here,
    refuse_missing_quantisation,
    refuse_short_host_memory,
)
from mmtrain.models.probing.probe import probe_encoder
from mmtrain.plan.calibration import Device, cached_file, calibration_key
from mmtrain.plan.plan import Plan, render
from mmtrain.plan.planner import models_of, step_seconds
from mmtrain.runtime.gpus import Gpu, visible_gpus
from mmtrain.runtime.rank import Rank
from mmtrain.runtime.supervise import prepared, run_ranks


def calibrate(config: RunConfig, ranks: int) -> int:
    """Measure on as many ranks as the run has, all on this machine, then print the plan; the exit code."""
    gpus = visible_gpus()
    device = device_here(config, gpus)
    file = cached_file(calibration_key(config, models_of(config), device))
    if config.parallel.calibration is not None:
        file = Path(config.parallel.calibration).expanduser()
    _refuse_unwritable(file)
    config, can_cut = _tried(config)
    unmeasured = dataclasses.replace(device, name="")  # the plan's costs are assumed there
    uncalibrated = config.changed({"parallel.calibration": None})
    assumed = plan_here(uncalibrated, gpus, ranks, unmeasured)
    refuse_missing_quantisation(config)
    refuse_short_host_memory(assumed.ranks)
    folder = Path(tempfile.mkdtemp(prefix="mmtrain-calibration-"))
    job = job_here(config, assumed, gpus, ranks, folder)
    with prepared(job):
        failure = run_ranks(functools.partial(_measure, uncalibrated, assumed, device, file, can_cut), job)
    if failure is not None:
        show_error(failure.message)
        return failure.exit_code
    shutil.rmtree(folder)
    plan = plan_here(config, gpus, ranks)
    print_info("", *render(plan))
    print_info(
        "Without the calibration mmtrain would have planned stages that begin at decoder layers "
        f"{list(assumed.boundaries)}, {assumed.stages_per_rank} a rank, {assumed.encode_ahead} micro-batches "
        f"prefetched: {_against(config, gpus, ranks, assumed, plan)}"
    )
    return 0


def _tried(config: RunConfig) -> tuple[RunConfig, bool]:
    """The configuration, with the encoder whole on rank 0 if it cannot be cut into slices, and whether it can.

    It is tried whatever the configuration asks for: a calibration serves plans with slices and without. Raises
    UserError where ranks are named that cannot hold slices.
    """
    asked = config.parallel.encoder_ranks
    try:
        probe_encoder(config)
    except EncoderSliceError as error:
        if asked not in ("auto", 0):
            raise
        if asked == "auto":
            print_note(f"the encoder stays whole on rank 0: {error}")
        return config.changed({"parallel.encoder_ranks": 0}), False
    return config, True


def _measure(config: RunConfig, plan: Plan, device: Device, file: Path, can_cut: bool, rank: Rank) -> None:
    """What every rank of a calibration runs."""
    from mmtrain.calibration.calibrate import calibrate

    calibrate(config, plan, device, file, rank, can_cut=can_cut)


def _refuse_unwritable(file: Path) -> None:
    """Before a minute of measuring, not after it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(
            f"the calibration cannot be written to {file} ({error.strerror}); name a file that can be by "
            "parallel.calibration"
        ) from error


def _against(config: RunConfig, gpus: Sequence[Gpu], ranks: int, assumed: Plan, plan: Plan) -> str:
    """What a layout that was planned with assumed costs is worth by those of a calibrated plan."""
    seconds = step_seconds(assumed, config, memory_here(gpus, ranks), device_here(config, gpus, ranks))
    if seconds is None:
        return "by these measurements it does not fit in memory"
    return f"by these measurements its step takes {seconds / plan.step_seconds:.3f} times as long"
