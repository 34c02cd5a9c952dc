"""The doctor's checks of the machine itself: GPUs, driver, memory, shared memory, environment. No CUDA starts here."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from mmtrain.base.cache import cache_folder
from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text
from mmtrain.config.load import DEMO, load_config
from mmtrain.doctor.check import FailedError, Here, LeftOutError, Seen
from mmtrain.launching.machine import FEWEST_OPEN_FILES
from mmtrain.launching.starters import TORCHRUN_VARIABLES
from mmtrain.plan.refusals import check_environment
from mmtrain.processes.gpus import ask_machine, has_driver, refuse_unusable
from mmtrain.processes.pool import usable_cores

MOSTLY_FREE = 0.9  # share of a GPU's memory that nobody should hold before a run
SHARED_MEMORY_BYTES = 2**30  # data workers hand on their images there, NCCL its buffers
SHARED_MEMORY = Path("/dev/shm")
HOST_BYTES_A_RANK = 4 * 2**30  # a rank's libraries, its CUDA context and weights on their way

NO_TIMEOUT = "a rank that hangs hangs all others, whatever parallel.timeout_seconds says"
LIBRARIES = ("deepspeed", "torch", "transformers", "timm", "pillow")
THREE_DIGITS = "float32 products keep 3 digits: results differ from other machines'"
TRAPS = (  # variable, value, what it does to runs; see `check_environment` for those that make them hang
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", NO_TIMEOUT),
    ("NCCL_ASYNC_ERROR_HANDLING", "0", NO_TIMEOUT),
    ("NVIDIA_TF32_OVERRIDE", "1", THREE_DIGITS),
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", THREE_DIGITS),
    ("NCCL_P2P_DISABLE", "1", "GPUs send each other everything through the host's memory"),
    ("NCCL_SHM_DISABLE", "1", "GPUs send each other everything through the network"),
)


def describe_machine() -> dict[str, Any]:
    """Where, and with what, something is measured."""
    return {
        "cores": usable_cores(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "load_average_before": os.getloadavg()[0],
    }


def driver(here: Here) -> Seen:
    """Whether torch can use the GPUs with this driver."""
    if not has_driver():
        raise LeftOutError("this machine has no GPU driver")
    machine = ask_machine()
    refuse_unusable(machine)
    if not machine.gpus:
        raise LeftOutError("CUDA_VISIBLE_DEVICES hides all GPUs")
    knows = "" if machine.driver_cuda is None else f" knows CUDA {'.'.join(map(str, machine.driver_cuda))}"
    return Seen(
        f"driver {machine.driver or 'unknown'}{knows}, torch {machine.torch} is built for CUDA {machine.built_for}",
        asdict(machine),
    )


def architectures(here: Here) -> Seen:
    """What the GPUs are, and whether they have what fast runs need."""
    names = [f"{gpu.name} {'.'.join(map(str, gpu.capability))}" for gpu in here.gpus]
    text = ", ".join(f"{len(list(same))} x {name}" for name, same in itertools.groupby(names))
    if min(gpu.capability for gpu in here.gpus) < (8, 0):
        raise FailedError(f"{text}: below 8.0 there is no bfloat16 arithmetic and no kernel for packed attention")
    if len(set(names)) > 1:
        raise FailedError(f"{text}: plans take all GPUs for equal", "choose equal ones by CUDA_VISIBLE_DEVICES")
    return Seen(text)


def memory(here: Here) -> Seen:
    """Whether GPUs and host have the memory free that they seem to have."""
    for number, gpu in enumerate(here.gpus):
        if gpu.free_bytes < MOSTLY_FREE * gpu.total_bytes:
            free, total = bytes_text(gpu.free_bytes), bytes_text(gpu.total_bytes)
            raise FailedError(f"GPU {number}: {free} of {total} free, other processes hold the rest")
    host = host_memory_bytes()
    needed = HOST_BYTES_A_RANK * max(1, len(here.gpus))
    if host < needed:
        raise FailedError(
            f"{bytes_text(host)} of the host's memory are free; ranks want {bytes_text(needed)}",
            "end other programs, or give the container or the job more memory",
        )
    gpus = f"{bytes_text(min(gpu.free_bytes for gpu in here.gpus))} free on every GPU, " if here.gpus else ""
    return Seen(f"{gpus}{bytes_text(host)} of the host's", {"host_bytes": host})


def host_memory_bytes() -> int:
    """Bytes that programs may still take, by the kernel and by the control group that this process is in."""
    available = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def topology(here: Here) -> Seen:
    """How neighbouring GPUs are joined."""
    if shutil.which("nvidia-smi") is None:
        raise LeftOutError("nvidia-smi is not on PATH")
    asked = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    if asked.returncode != 0:
        raise LeftOutError(f"nvidia-smi topo -m: exit code {asked.returncode}")
    links = gpu_links(asked.stdout)
    neighbours = [f"{a}-{b} {links[a, b]}" for a, b in links if b == a + 1]
    return Seen(f"GPUs by PCI number: {', '.join(neighbours)}", {"nvidia-smi topo -m": asked.stdout})


def gpu_links(table: str) -> dict[tuple[int, int], str]:
    """What `nvidia-smi topo -m` calls the link between GPUs a < b, e.g. NV18, PIX or SYS."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", table)  # headings are underlined
    rows = {int(row[1]): row[2].split() for row in re.finditer(r"^GPU(\d+)[ \t]+(.+)$", plain, re.MULTILINE)}
    return {(a, b): rows[a][b] for a, b in itertools.combinations(sorted(rows), 2)}


def shared_memory(here: Here) -> Seen:
    """Whether data workers have room to hand on what they have read."""
    if not SHARED_MEMORY.is_dir():
        raise FailedError(f"there is no {SHARED_MEMORY}")
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="mmtrain-doctor-") as file:
        file.write(b"\0" * 2**20)
    size = shutil.disk_usage(SHARED_MEMORY)
    text = f"{bytes_text(size.free)} of {bytes_text(size.total)} free in {SHARED_MEMORY}"
    if size.free < SHARED_MEMORY_BYTES:
        raise FailedError(f"{text}; data workers and NCCL want {bytes_text(SHARED_MEMORY_BYTES)}")
    return Seen(text, {"free_bytes": size.free, "total_bytes": size.total})


def environment(here: Here) -> Seen:
    """Whether nothing in the environment breaks what runs rely on."""
    problems = [*traps(os.environ), *_folders(), *_limits()]
    if problems:
        raise FailedError("; ".join(problems), facts={"problems": problems})
    folder, cache = tempfile.gettempdir(), cache_folder("")
    return Seen(f"no variable in the way; {folder} and {cache} can be written", {"tmpdir": folder, "cache": str(cache)})


def traps(variables: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with these variables, for a pipeline on GPUs and otherwise."""
    try:
        check_environment(load_config(DEMO, ["parallel.pipeline=2"]), variables)
    except UserError as error:
        yield str(error)
    for variable, value, effect in TRAPS:
        if variables.get(variable, "").strip() == value:
            yield f"{variable}={variables[variable]}: {effect}; unset it"
    if all(variable in variables for variable in TORCHRUN_VARIABLES):
        names = ", ".join(TORCHRUN_VARIABLES)
        yield f"{names} are set: mmtrain train takes itself for a rank that torchrun started; unset RANK"


def _folders() -> Iterator[str]:
    cache = cache_folder("")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        yield f"{cache} cannot be written ({error.strerror}); XDG_CACHE_HOME names another place"


def _limits() -> Iterator[str]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < FEWEST_OPEN_FILES:
        yield f"a process may open {most} files, and a rank needs {FEWEST_OPEN_FILES}; have ulimit -Hn raised"
