"""What GPUs this process may use, asked in a short-lived child: CUDA must never start in a process that forks later.

driver file there? --child process: torch, libcuda, NVML--> one line of JSON --Machine--> usable, or refused with remedy

A process in which CUDA has started cannot fork children that use it, and the launcher forks indexing workers and CPU
ranks. So it never asks torch.cuda itself. Without a driver nothing is started and no torch imported.
"""

from __future__ import annotations

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
SECONDS = 120  # a cold disk takes half a minute to import torch, and a machine of eight GPUs seconds to answer
# The first driver of each major release of CUDA; any later one runs every minor release of it.
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
FIRST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
ON_THE_CPU = "set CUDA_VISIBLE_DEVICES= to run on the CPU"


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
    built_for: str | None  # CUDA release that torch was built with; None: a build without CUDA, or for AMD
    architectures: tuple[str, ...]  # that torch has kernels for, e.g. sm_90; empty: not known
    driver: str | None  # version of NVIDIA's kernel module
    driver_cuda: tuple[int, int] | None  # the newest CUDA release that the driver knows
    error: str | None  # what torch said where it could not start CUDA


def has_driver() -> bool:
    return any(Path(file).exists() for file in DRIVER_FILES)


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that ranks may use, in torch's order; none without a driver or where all are hidden.

    Raises UserError, with the remedy, for GPUs that cannot be used. Cost: seconds where there are GPUs.
    """
    if _chosen() == [] or not has_driver():
        return ()
    machine = ask_machine()
    refuse_unusable(machine)
    return machine.gpus


def ask_machine() -> Machine:
    """Ask torch, the driver and NVML in a child process. Raises UserError where no answer comes."""
    child = subprocess.Popen(**python_child(*CHILD), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        answer, errors = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # not waited for: a driver that hangs keeps it in the kernel
        raise UserError(
            f"the GPU driver did not answer within {SECONDS:g} s. Restart the machine if nvidia-smi hangs, too, or "
            f"{ON_THE_CPU}"
        ) from None
    facts = [line for line in answer.splitlines() if line.startswith("{")]  # libraries may print, too
    if child.returncode != 0 or not facts:
        cause = next(iter(errors.strip().splitlines()[-1:]), f"exit code {child.returncode}")
        raise UserError(f"asking for the GPUs failed ({cause}). See whether nvidia-smi works, or {ON_THE_CPU}")
    return TypeAdapter(Machine).validate_json(facts[-1])


def refuse_unusable(machine: Machine) -> None:
    """Raise UserError, with the remedy, for GPUs that this torch cannot use or see."""
    driver = f"the GPU driver{f' {machine.driver}' if machine.driver else ''}"
    build = f"torch {machine.torch}"
    if machine.built_for is not None and machine.driver_cuda is not None:
        major = int(machine.built_for.split(".")[0])
        if machine.driver_cuda[0] < major:
            needed = f"{FIRST_DRIVER[major]} or later" if major in FIRST_DRIVER else f"one that knows CUDA {major}"
            raise UserError(
                f"{driver} knows CUDA {'.'.join(map(str, machine.driver_cuda))}, and {build} is built for CUDA "
                f"{machine.built_for}: update the driver to {needed}, install a build of torch for CUDA "
                f"{machine.driver_cuda[0]}, or {ON_THE_CPU}"
            )
    if not machine.gpus:
        _refuse_invisible(machine, driver, build)
    for number, gpu in enumerate(machine.gpus):
        if machine.architectures and not any(_runs_on(name, gpu.capability) for name in machine.architectures):
            capability = ".".join(map(str, gpu.capability))
            raise UserError(
                f"GPU {number}, {gpu.name}, has compute capability {capability}, and {build} has code for "
                f"{', '.join(machine.architectures)} alone: install a build of torch that has sm_"
                f"{capability.replace('.', '')}, choose other GPUs by CUDA_VISIBLE_DEVICES, or {ON_THE_CPU}"
            )


def _refuse_invisible(machine: Machine, driver: str, build: str) -> None:
    """A run that was meant for GPUs must not begin on the CPU in silence."""
    if not Path(NVIDIA_DRIVER_FILE).exists():
        return
    chosen = _chosen()
    if machine.built_for is None:
        raise UserError(
            f"{driver} is there, and {build} is built without CUDA: install its CUDA build, or {ON_THE_CPU}"
        )
    if chosen is not None:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={','.join(chosen)} names no GPU of this machine; see nvidia-smi -L, or {ON_THE_CPU}"
        )
    error = f" ({machine.error})" if machine.error else ""
    raise UserError(
        f"{driver} is there, and {build} sees no GPU{error}; see whether nvidia-smi does, give the container or the "
        f"job its GPUs (docker run --gpus all, sbatch --gres=gpu:N), or {ON_THE_CPU}"
    )


def _chosen() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names, [] if it hides all GPUs, None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return [] if value.strip() in ("", "-1", "NoDevFiles") else value.split(",")


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for sm_XY, or compute_XY, which the driver compiles, runs on a GPU of this compute capability.

    Code for sm_XY runs from X.Y on within X, compute_XY from X.Y on; a suffix "a" binds either to X.Y.
    """
    matched = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if matched is None:
        return True  # AMD's gfx..., or what a later torch calls it: no reason to refuse
    kind, major, minor, suffix = matched[1], int(matched[2]), int(matched[3]), matched[4]
    if suffix == "a":
        return (major, minor) == capability
    if kind == "compute" and not suffix:
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


# ---- in the child


def _facts() -> dict[str, Any]:
    import torch

    error, gpus = None, []
    try:
        torch.cuda.init()
        gpus = [asdict(_gpu(torch, index)) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as caught:  # no GPU, an old driver, a build without CUDA
        error = str(caught).strip().split("\n")[0]
    return {
        "gpus": gpus,
        "torch": torch.__version__,
        "built_for": torch.version.cuda,
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
        "driver": _driver(),
        "driver_cuda": _driver_cuda(),
        "error": error,
    }


def _gpu(torch: Any, index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free = _free_by_nvml(str(getattr(properties, "uuid", "")))
    if free is None:
        free = torch.cuda.mem_get_info(index)[0]
    return Gpu(properties.name, properties.total_memory, free, (properties.major, properties.minor))


def _free_by_nvml(uuid: str) -> int | None:
    """Return a GPU's free bytes without a context on it, which takes half a GiB in each rank's child."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    works = (
        nvml.nvmlInit_v2() == 0
        and nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) == 0
        and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    )
    return memory[1] if works else None


def _driver() -> str | None:
    file = Path("/proc/driver/nvidia/version")
    matched = re.search(r"Module\s.*?(\d+\.\d+(\.\d+)?)", file.read_text()) if file.exists() else None
    return matched[1] if matched else None


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
    print("\n" + json.dumps(_facts()))
