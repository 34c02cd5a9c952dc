"""Checks of the machine: GPUs, memory, environment variables. They start no CUDA."""

import importlib.metadata
import itertools
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmtrain.base.errors import MORE_SHARED_MEMORY, UserError
from mmtrain.base.printing import bytes_text
from mmtrain.doctor.check import FailedError, SkippedError
from mmtrain.launching.machine import TORCHRUN_VARIABLES, free_host_memory
from mmtrain.plan.refusals import check_environment
from mmtrain.runtime.gpus import usable_cores, visible_gpus

# of a GPU: older ones lack bfloat16 arithmetic and a kernel for packed attention
LEAST_CAPABILITY = (8, 0)
MOSTLY_FREE = 0.9  # share of a GPU's memory
HOST_BYTES_A_RANK = 4 * 2**30  # libraries, a CUDA context, weights that are being loaded
SHARED_MEMORY = Path("/dev/shm")  # data workers hand on images there, NCCL has its buffers there
SHARED_MEMORY_BYTES = 2**30

LIBRARIES = ("deepspeed", "torch", "transformers", "timm", "pillow")
NO_TIMEOUT = "a rank that hangs blocks all others, regardless of parallel.timeout_seconds"
THREE_DIGITS = "float32 products keep 3 digits, so results differ from other machines'"
TRAPS = (  # variable, value, effect; `check_environment` has those that make a pipeline hang
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", NO_TIMEOUT),
    ("NCCL_ASYNC_ERROR_HANDLING", "0", NO_TIMEOUT),
    ("NVIDIA_TF32_OVERRIDE", "1", THREE_DIGITS),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", THREE_DIGITS),
    ("NCCL_P2P_DISABLE", "1", "GPUs exchange messages through the host's memory"),
    ("NCCL_SHM_DISABLE", "1", "GPUs exchange messages through the network"),
)


def describe_machine() -> dict[str, Any]:
    """Return cores, load and versions, to be kept beside measurements."""
    return {
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "load_average_before": os.getloadavg()[0],
    }


def driver(folder: Path) -> str:
    """Check that this torch is built for the driver and the GPUs, and that all GPUs are of one
    kind.
    """
    gpus = visible_gpus()
    if not gpus:
        raise SkippedError(
            "no GPU driver, or CUDA_VISIBLE_DEVICES hides all GPUs; ranks run on the CPU"
        )
    names = [
        f"{gpu.name} (compute capability {'.'.join(map(str, gpu.capability))})" for gpu in gpus
    ]
    text = ", ".join(f"{len(list(group))} x {name}" for name, group in itertools.groupby(names))
    if min(gpu.capability for gpu in gpus) < LEAST_CAPABILITY:
        raise FailedError(
            f"{text}; bfloat16 and packed attention need 8.0", "use newer GPUs, or train in float32"
        )
    if len(set(names)) > 1:
        raise FailedError(
            f"{text}; a plan needs equal GPUs", "choose equal ones by CUDA_VISIBLE_DEVICES"
        )
    return f"{text}; torch is built for them"


def memory(folder: Path) -> str:
    """Check that GPUs, host and /dev/shm have memory free."""
    gpus = visible_gpus()
    texts = []
    choose = "end the processes that nvidia-smi names, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    for place, free, needed, remedy in (
        *(
            (f"GPU {n}", gpu.free_bytes, MOSTLY_FREE * gpu.total_bytes, choose)
            for n, gpu in enumerate(gpus)
        ),
        (
            "host",
            free_host_memory(),
            HOST_BYTES_A_RANK * max(1, len(gpus)),
            "end other programs, or give the job more",
        ),
        (SHARED_MEMORY, shared, SHARED_MEMORY_BYTES, MORE_SHARED_MEMORY),
    ):
        texts.append(f"{place}: {bytes_text(free)} free")
        if free < needed:
            raise FailedError(f"{texts[-1]}, but {bytes_text(needed)} are needed", remedy)
    return "; ".join(texts)


def environment(folder: Path) -> str:
    """Check that no environment variable breaks what runs rely on."""
    problems = list(traps(os.environ))
    if problems:
        raise FailedError(
            "; ".join(problems), "change these variables in the shell or in the job's script"
        )
    return "no variable breaks a pipeline"


def traps(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each of these environment variables that harms a pipeline."""
    try:
        check_environment(2, variables)
    except UserError as error:
        yield str(error)
    for variable, value, effect in TRAPS:
        if variables.get(variable, "").strip() == value:
            yield f"{variable}={variables[variable]}: {effect}; unset it"
    if all(variable in variables for variable in TORCHRUN_VARIABLES):
        yield (
            f"{', '.join(TORCHRUN_VARIABLES)} are set: mmtrain train would act as a rank that "
            "torchrun started; unset RANK"
        )
