"""Bytes of tensors that live at once: every allocation and release on the device, counted exactly.

On CUDA these are the allocator's own figures (`torch.cuda.max_memory_allocated`). A CPU's allocator
keeps none, but torch.profiler records each of its allocations and releases (`profile_memory`),
whose running sum is the same thing. Not counted is what libraries allocate past torch (oneDNN's
scratch buffers, gloo's), and what the heap holds back.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "mmtrain: counted work"


class Usage(NamedTuple):
    """Bytes alive during some work and at its end, beyond those at its begin (less, if some of
    those were released).
    """

    peak: int
    end: int


def bytes_used(*works: Callable[[], object], device: torch.device) -> list[Usage]:
    """Do one after the other and count, as alive at a work's end also what it returns, which is let
    go then.

    Only what the calling thread does is meant to be counted. On a CPU a release counts if the
    allocation was counted, in this call or in an earlier one, and counting takes long: nothing can
    be timed.
    """
    if device.type == "cuda":
        return [_used_on_gpu(work, device) for work in works]
    # else what an earlier call left in reference cycles could count as released in this one
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        for work in works:
            with record_function(MARK):
                result = work()
            del result
    events = sorted(traced.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    used = []
    for mark in (event for event in events if event.name() == MARK):
        begin, end = mark.start_ns(), mark.start_ns() + mark.duration_ns()
        alive = list(
            itertools.accumulate((size for at, size in changes if begin <= at <= end), initial=0)
        )
        used.append(Usage(max(alive), alive[-1]))
    return used


def _used_on_gpu(work: Callable[[], object], device: torch.device) -> Usage:
    torch.cuda.synchronize(device)
    begin = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _result = work()  # alive until this function ends
    torch.cuda.synchronize(device)
    peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return Usage(peak - begin, end - begin)
