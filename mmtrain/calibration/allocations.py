"""Bytes of tensors that live at once: every allocation and release on the device, counted exactly.

work in named spans --MemoryTrace--> {span: bytes at its begin, at its peak, at its end}, from the trace's begin

On CUDA these are the allocator's own figures (`torch.cuda.max_memory_allocated`). A CPU's allocator keeps none, but
torch.profiler records each of its allocations and releases (`profile_memory`), whose running sum is the same thing.
Not counted is what libraries allocate past torch (oneDNN's scratch buffers, gloo's), and what the heap holds back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "mmtrain span "


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes alive during a span, beyond those at the trace's begin (less, if some of those were released)."""

    begin: int
    peak: int
    end: int


class MemoryTrace:
    """A context whose `spans` may be read once it is left. Only what the calling thread does is meant to be traced.

    On a CPU it slows down what it traces: nothing in it can be timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.spans: dict[str, Usage] = {}
        self._device = device
        self._profile = None
        if device.type != "cuda":
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Self:
        if self._profile is None:
            torch.cuda.synchronize(self._device)
            self._base = torch.cuda.memory_allocated(self._device)
        else:
            self._profile.__enter__()
        return self

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What runs in here is the span `name`; spans follow each other, each name once."""
        if self._profile is not None:
            with record_function(MARK + name):
                yield
            return
        begin = torch.cuda.memory_allocated(self._device) - self._base
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - self._base
        self.spans[name] = Usage(begin, peak, torch.cuda.memory_allocated(self._device) - self._base)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(kind, error, trace)
        if kind is None:
            self._read_events()

    def _read_events(self) -> None:
        events = sorted(self._profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        open_name, ends = None, 0
        begin = peak = alive = 0
        for event in events:
            if open_name is not None and event.start_ns() > ends:
                self.spans[open_name] = Usage(begin, peak, alive)
                open_name = None
            if event.name() == "[memory]":
                alive += event.nbytes()
                peak = max(peak, alive)
            elif event.name().startswith(MARK):
                open_name, ends = event.name().removeprefix(MARK), event.start_ns() + event.duration_ns()
                begin = peak = alive
        if open_name is not None:
            self.spans[open_name] = Usage(begin, peak, alive)


def tensor_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Bytes that tensors take in memory; storage that several of them share counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
