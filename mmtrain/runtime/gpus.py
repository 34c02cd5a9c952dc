"""Find cores and GPUs of this process. CUDA must never start where ranks are forked: ask a child.

driver file there? --child process: torch, libcuda, NVML--> one line of JSON --Machine--> usable, or
    refused with remedy

Without a driver nothing is started and no torch imported.
"""

import ctypes
import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mmtrain.base.errors import UserError
from mmtrain.runtime.child import die_with_parent, python_child

NVIDIA_DRIVER_FILE = "/dev/nvidiactl"
DRIVER_FILES = (NVIDIA_DRIVER_FILE, "/dev/dxg", "/dev/kfd")  # WSL has the second, AMD the third
CHILD = ("-m", "mmtrain.runtime.gpus")
# a cold disk takes half a minute to import torch, and a machine of eight GPUs seconds to answer
SECONDS = 120
CHOICE = "CUDA_VISIBLE_DEVICES"
ON_THE_CPU = f"set {CHOICE}= to run on the CPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU; `free_bytes` is what no process held when it was asked."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]  # compute capability, e.g. (9, 0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Visible GPUs, and what torch needs to use them."""

    gpus: tuple[Gpu, ...]
    torch: str  # version
    # CUDA release that torch was built with; None: a build without CUDA, or for AMD
    built_for: str | None
    architectures: tuple[str, ...]  # that torch has kernels for, e.g. sm_90; empty: not known
    driver_cuda: tuple[int, int] | None  # the newest CUDA release that the driver knows
    error: str | None  # what torch said where it could not start CUDA


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_rank(chosen: int | None, local_ranks: int, recorded: int | None = None) -> int:
    """Return a rank's CPU threads: `chosen`, OMP_NUM_THREADS, `recorded` or its share of the cores.

    The first number of OMP_NUM_THREADS counts where it is a list. A value without a number is
    ignored, as by libgomp.
    """
    asked = re.match(r"\s*([1-9]\d{0,3})\s*(,|$)", os.environ.get("OMP_NUM_THREADS", ""))
    if chosen is None and asked:
        chosen = int(asked[1])
    return chosen or recorded or max(1, usable_cores() // local_ranks)


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that ranks may use, in torch's order; none without a driver or if hidden.

    Raises UserError, with the remedy, for GPUs that cannot be used. Cost: seconds where there are
    GPUs.
    """
    all_hidden = os.environ.get(CHOICE, "0").strip() in ("", "-1", "NoDevFiles")
    if all_hidden or not any(Path(file).exists() for file in DRIVER_FILES):
        return ()
    machine = ask_machine()
    refuse_unusable(machine)
    return machine.gpus


def ask_machine() -> Machine:
    """Ask torch, the driver and NVML in a child process. Raises UserError where no answer comes."""
    child = subprocess.Popen(
        **python_child(*CHILD), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        answer, errors = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # not waited for: a driver that hangs keeps it in the kernel
        raise UserError(
            f"the GPU driver did not answer within {SECONDS:g} s. "
            f"Restart the machine if nvidia-smi hangs, too, or {ON_THE_CPU}"
        ) from None
    # libraries may print, too
    facts = [line for line in answer.splitlines() if line.startswith("{")]
    if child.returncode != 0 or not facts:
        cause = f"exit code {child.returncode}"
        if errors.strip():
            cause = errors.strip().splitlines()[-1]
        raise UserError(
            f"listing the GPUs failed ({cause}). Check whether nvidia-smi works, or {ON_THE_CPU}"
        )
    return TypeAdapter(Machine).validate_json(facts[-1])


def refuse_unusable(machine: Machine) -> None:
    """Raise UserError, with the remedy, for GPUs that this torch cannot use or see."""
    build = f"torch {machine.torch}"
    built_for = machine.built_for
    driver_cuda = machine.driver_cuda
    knows_both = built_for is not None and driver_cuda is not None
    if knows_both and driver_cuda[0] < int(built_for.split(".")[0]):
        major, minor = driver_cuda
        raise UserError(
            f"the GPU driver supports CUDA {major}.{minor}, but {build} has CUDA {built_for}. "
            f"Update the driver, install a build of torch for CUDA {major}, or {ON_THE_CPU}"
        )
    # a run for GPUs must not begin on the CPU in silence
    if not machine.gpus and Path(NVIDIA_DRIVER_FILE).exists():
        raise UserError(f"{_why_none(machine, build)}, or {ON_THE_CPU}")
    for number, gpu in enumerate(machine.gpus):
        fits = any(_runs_on(name, gpu.capability) for name in machine.architectures)
        if machine.architectures and not fits:
            major, minor = gpu.capability
            raise UserError(
                f"GPU {number}, {gpu.name}, has compute capability {major}.{minor}, but {build} "
                f"has code only for {', '.join(machine.architectures)}. Install a build of torch "
                f"that has sm_{major}{minor}, choose other GPUs by {CHOICE}, or {ON_THE_CPU}"
            )


def _why_none(machine: Machine, build: str) -> str:
    if machine.built_for is None:
        return f"there is a GPU driver, but {build} is built without CUDA. Install its CUDA build"
    if CHOICE in os.environ:
        return f"{CHOICE}={os.environ[CHOICE]} names no GPU of this machine. See nvidia-smi -L"
    error = f" ({machine.error})" if machine.error else ""
    return (
        f"there is a GPU driver, but {build} sees no GPU{error}. Check whether nvidia-smi does, "
        "give the container or the job its GPUs (docker run --gpus all, sbatch --gres=gpu:N)"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Tell whether a GPU of this compute capability runs code for sm_XY or compute_XY.

    The driver compiles the latter.
    """
    matched = re.match(r"(sm|compute)_(\d+)(\d)", architecture)
    if matched is None:
        return True  # AMD's gfx..., or what a later torch calls it: no reason to refuse
    needed = int(matched[2]), int(matched[3])
    return needed <= capability and (matched[1] == "compute" or needed[0] == capability[0])


# ---- in the child


def _machine() -> Machine:
    import torch

    error = None
    gpus = []
    try:
        torch.cuda.init()
        gpus = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as caught:  # no GPU, an old driver, a build without CUDA
        error = str(caught).strip().split("\n")[0]
    return Machine(
        tuple(gpus),
        torch.__version__,
        torch.version.cuda,
        tuple(torch.cuda.get_arch_list()),
        _driver_cuda(),
        error,
    )


def _gpu(torch: Any, index: int) -> Gpu:
    import pynvml

    properties = torch.cuda.get_device_properties(index)
    try:
        # without a context on the GPU, which takes half a GiB
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{getattr(properties, 'uuid', '')}")
        free = pynvml.nvmlDeviceGetMemoryInfo(handle).free
    except pynvml.NVMLError:
        free = torch.cuda.mem_get_info(index)[0]
    return Gpu(
        properties.name,
        properties.total_memory,
        free,
        (properties.major, properties.minor),
    )


def _driver_cuda() -> tuple[int, int] | None:
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


if __name__ == "__main__":
    die_with_parent()
    print("\n" + json.dumps(asdict(_machine())))
