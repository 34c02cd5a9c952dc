"""Copies of tensors between the host and a device, and the device's clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def copied(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to `device`, from page-locked memory, so that only the kernels that use it
    wait.
    """
    import torch

    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def time_mark(device: torch.device) -> float | torch.cuda.Event:
    """Return the time or, on CUDA, an event on the current stream."""
    import torch

    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(earlier: float | torch.cuda.Event, later: float | torch.cuda.Event) -> float:
    """Return the seconds between two marks; on CUDA the host waits until the device has reached the
    later one.
    """
    if isinstance(later, float):
        return later - earlier
    later.synchronize()
    return earlier.elapsed_time(later) / 1000
