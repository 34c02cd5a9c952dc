"""What bench_gpu.py tells beside speed: the device's state, and what a step asks of host and device.

nvidia-smi --device_state--> clocks, power, driver; a step --host_waits, launches--> counts

On a CPU there is nothing to count: None. Each count takes a step of its own, since counting slows it down.
"""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Of nvidia-smi --query-gpu, whose names and units `nvidia-smi --help-query-gpu` explains.
STATE = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "highest_sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "celsius": "temperature.gpu",
    "watts": "power.draw",
    "most_watts": "power.limit",
}
COPIES = ("Memcpy", "Memset")


def device_state(device: torch.device) -> dict[str, str]:
    """What nvidia-smi says of a CUDA device now, by the names of STATE; {} on a CPU and without nvidia-smi."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return {}
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = [f"--query-gpu={','.join(STATE.values())}", "--format=csv,noheader,nounits", f"--id={uuid}"]
    asked = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=60)
    return read_state(asked.stdout) if asked.returncode == 0 else {}


def read_state(line: str) -> dict[str, str]:
    """A line of that query by the names of STATE; {} for anything else."""
    values = [value.strip() for value in line.strip().split(",")]
    return dict(zip(STATE, values, strict=True)) if len(values) == len(STATE) else {}


def host_waits(step: Callable[[], object], device: torch.device) -> int | None:
    """How often the host waits for the device in a step, as torch notices it (torch.cuda.set_sync_debug_mode).

    torch does not notice what libraries do past it, NCCL say, and explicit waits of the caller's own.
    """
    if device.type != "cuda":
        return None
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchronizing CUDA operation" in str(one.message) for one in said)


def launches(step: Callable[[], object], device: torch.device) -> int | None:
    """How many kernels a step runs on the device, copies left out."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize(device)
    return kernels(seen.events())


def kernels(events: Iterable[Any]) -> int:
    """Kernels among a profile's events."""
    return sum(
        event.device_type == DeviceType.CUDA
        and not event.name.startswith(COPIES)
        and not getattr(event, "is_user_annotation", False)
        for event in events
    )
