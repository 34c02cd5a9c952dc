"""What benchmarks ask a device: to finish its work, and how much memory a step takes on it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_of(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Peak bytes of a step on a GPU: allocated by tensors, reserved by torch, held by all processes; {} on a CPU."""
    if device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "held_bytes": total - free,
    }
