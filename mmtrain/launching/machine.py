"""Find what this machine gives a run: GPUs, cores, open files, memory, and who started us."""

import contextlib
import importlib.util
import multiprocessing
import os
import re
import resource
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from mmtrain.base.errors import EncoderSliceError, MemoryLimitError, UserError
from mmtrain.base.printing import bytes_text, counted, print_note
from mmtrain.config.model import ModelSection
from mmtrain.config.parallel import ParallelSection
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.facts.quantised import BLOCK
from mmtrain.model.probe import probe_encoder
from mmtrain.plan.calibration import Device, cpu_device, gpu_device
from mmtrain.plan.plan import Plan, RankPlan
from mmtrain.plan.planner import make_plan
from mmtrain.plan.refusals import check_environment
from mmtrain.plan.suggest import Suggestion, suggest, what_fits
from mmtrain.runtime.gpus import Gpu, threads_of_rank, visible_gpus
from mmtrain.runtime.job import Job

WANTED_OPEN_FILES = 4096  # connections, pipes and shards of a process
LOOPBACK = "127.0.0.1"
SECONDS_TO_CONNECT = 5.0
CGROUP = Path("/sys/fs/cgroup")
# the first AdamW imports _dynamo: 2 s in every rank
RANK_MODULES = ("torch._dynamo", "mmtrain.training.loop")
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# (rank, number of processes) as others name them who start several: Open MPI, MPICH and Intel MPI,
# and cluster managers that set a part of what torchrun sets, once a machine
OTHER_STARTERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)


def plan_here(
    config: RunConfig,
    gpus: Sequence[Gpu],
    local_ranks: int | None = None,
    device: Device | None = None,
) -> Plan:
    """Return the plan with the memory and calibration of this machine's devices, or of `device`.

    `local_ranks` None: any number of ranks. Raises UserError for more ranks than GPUs.
    """
    if gpus:
        if local_ranks is not None and local_ranks > len(gpus):
            raise UserError(
                f"{local_ranks} ranks on this machine, which has {counted(len(gpus), 'GPU')}: "
                "each rank needs its own; use fewer ranks or more machines, or set "
                "CUDA_VISIBLE_DEVICES= to run on the CPU"
            )
        check_environment(config.parallel.pipeline, os.environ)
    memory = min((gpu.total_bytes for gpu in gpus[:local_ranks]), default=None)
    device = device or device_here(config, gpus, local_ranks)
    try:
        return make_plan(config, memory, device)
    except MemoryLimitError as error:
        raise UserError(f"{error}\n{what_fits(config, memory, device)}") from None


def plan_for_here(config: RunConfig) -> Plan:
    """Return the plan of ranks that are like this machine's devices, however many it has."""
    return plan_here(config, visible_gpus())


def suggest_for_here(config: RunConfig, devices: int) -> Suggestion:
    """Return the best layouts for `devices` devices like this machine's."""
    gpus = visible_gpus()
    memory = min((gpu.total_bytes for gpu in gpus), default=None)
    device = gpu_device(gpus[0].name) if gpus else None
    return suggest(config, devices, memory, device)


def device_here(config: RunConfig, gpus: Sequence[Gpu], local_ranks: int | None = None) -> Device:
    """Return the device that ranks compute on, by its name in calibrations."""
    return gpu_device(gpus[0].name) if gpus else cpu_device(config.parallel, local_ranks)


def can_slice_encoder(config: RunConfig, *, may_stay_whole: bool) -> bool:
    """Tell whether the encoder can be sliced. Raises UserError unless it may stay whole."""
    try:
        probe_encoder(models_of(config))
    except EncoderSliceError as error:
        if not may_stay_whole:
            raise
        print_note(f"the encoder stays whole on rank 0: {error}")
        return False
    return True


def refuse_missing_libraries(model: ModelSection, trackers: Sequence[str] = ()) -> None:
    """Raise UserError for a missing library of `model.llm.quantize` or `run.report_to`."""
    needed = [("run.report_to", name, name) for name in trackers]
    if model.llm.quantize in BLOCK:  # bitsandbytes alone quantises in blocks
        needed.append(("model.llm.quantize", "bitsandbytes", "quantize"))
    for key, library, extra in needed:
        spec = importlib.util.find_spec(library)
        if spec is None or spec.origin is None:  # a folder ./wandb is no library
            raise UserError(
                f"{key}: {library} is not installed. Install it: "
                f"pip install 'mmtrain[{extra}]', or leave it out"
            )


def refuse_short_host_memory(ranks: Sequence[RankPlan]) -> None:
    """Raise UserError where this machine's memory has no room for the layers that its ranks stream.

    Ranks of one stage share one copy.
    """
    needed = sum({rank.pipeline: rank.host_bytes for rank in ranks}.values())
    if not needed or needed <= (free := free_host_memory()):
        return
    raise UserError(
        f"parallel.streamed_layers: this machine's ranks need {bytes_text(needed)} of its memory "
        f"for decoder layers, and {bytes_text(free)} are free; stream fewer "
        "(parallel.host_memory_gib bounds what a rank keeps, and streamed_layers=auto plans with "
        "that), or use a machine with more memory"
    )


def free_host_memory() -> int:
    """Return the bytes that processes here may still take, by kernel and by container."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # cgroup v2; without a limit it says "max"
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        statistics = (CGROUP / "memory.stat").read_text()
        if cached := re.search(r"^inactive_file (\d+)", statistics, re.MULTILINE):
            used -= int(cached[1])
        free = min(free, limit - used)
    return free


def job_here(
    parallel: ParallelSection,
    plan: Plan,
    gpus: Sequence[Gpu],
    local_ranks: int,
    folder: Path,
    target: str,
    recorded_threads: int | None = None,
    **more: Any,
) -> Job:
    """Return a plan's processes as this machine runs them; `more` are other fields of the job.

    `recorded_threads` is what a rank of the run that is resumed had.
    """
    places = []
    for rank in plan.ranks:
        place = f"stage {', '.join(str(stage.stage) for stage in rank.stages)}"
        if plan.data > 1:
            place += f", replica {rank.data}"
        places.append(place)
    return Job(
        places=tuple(places),
        folder=folder,
        threads=threads_of_rank(parallel.threads_per_rank, local_ranks, recorded_threads),
        timeout_seconds=parallel.timeout_seconds,
        target=target,
        on_gpus=bool(gpus),
        preload=RANK_MODULES,
        **more,
    )


def allow_open_files() -> None:
    """Let this process and its ranks open as many files as they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = WANTED_OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        reachable = min(hard, WANTED_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))


def refuse_unusable_loopback() -> None:
    """Raise UserError where 127.0.0.1 cannot be reached: ranks of one machine meet there."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise UserError(
            f"{LOOPBACK} cannot be reached ({error.strerror or error}), and the ranks of a machine "
            "meet there. Bring the loopback interface up: ip link set lo up"
        ) from error


def try_shared_memory() -> None:
    """Make a semaphore, as torch and data workers do. Raises OSError."""
    multiprocessing.get_context("fork").Lock()


def rank_of_torchrun() -> int | None:
    """Return this process's rank if torchrun has started it."""
    values = {name: os.environ.get(name, "") for name in TORCHRUN_VARIABLES}
    has_address = values.pop("MASTER_ADDR") != ""
    are_numbers = all(map(str.isdecimal, values.values()))
    return int(values["RANK"]) if has_address and are_numbers else None


def refuse_other_starters() -> None:
    """Raise UserError if this is one of several processes, each of which would start all ranks."""
    for rank, size in OTHER_STARTERS:
        if rank in os.environ and os.environ.get(size, "1") != "1":
            raise UserError(
                f"this is one of {os.environ[size]} processes, says the environment "
                f"({rank}={os.environ[rank]}, {size}={os.environ[size]}: mpirun, or a cluster's "
                "manager), and each would start the whole run. Start it once on each machine, with "
                "--nnodes where there are several, or use torchrun. If they are left over from "
                f"something else: unset {rank} {size}"
            )
