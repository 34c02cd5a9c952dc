"""Measure on each rank, at every step, what its time goes into.

A mark ends each instruction, and within one the time in which it only waited: for a message, or for all ranks. On a CPU
a mark is the time. On CUDA it is an event on the stream that computes, since kernels run when the host has long gone
on: the time of an instruction is what the stream spends between its marks, the host's delays included.

Cost: about a microsecond an instruction on a CPU.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mmtrain.engine.trace import WORK_OF, Interval, Work
from mmtrain.plan.instructions import Instruction

COMPUTING = (Work.ENCODE, Work.FORWARD, Work.BACKWARD)


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """One rank's part of a step: from the begin of `train_step` to the reduction of statistics."""

    window: float  # all of it; what the others leave is idle
    compute: float  # encoder, forward and backward, without the waits in them
    communication: float  # posting messages and reducing gradients, with the wait for other replicas
    data: float  # waiting for the loader and copying to the device
    fetching: float  # waiting for weights of streamed layers
    peak_memory_bytes: int  # allocated by torch on a GPU; on a CPU resident in the process, since that began

    @property
    def idle(self) -> float:
        """Seconds of waiting for a message or for other ranks."""
        return max(0.0, self.window - self.compute - self.communication - self.data - self.fetching)

    @property
    def idle_fraction(self) -> float:
        return self.idle / self.window if self.window > 0 else 0.0


class Reading(NamedTuple):
    """A rank's clock before the reduction that ends a step's work, in seconds."""

    since: float  # from leaving the last such reduction to the step's begin
    compute: float
    communication: float
    data: float
    fetching: float
    peak_memory_bytes: float


class _HostTimes:
    """Marks are times."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, earlier: Any, later: Any) -> float:
        return later - earlier


class _StreamTimes:
    """Marks are CUDA events on the current stream; `seconds` waits until that has reached the later one."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: Any, later: Any) -> float:
        later.synchronize()
        return earlier.elapsed_time(later) / 1000


class StepClock:
    """One rank's clock; all ranks make it at the same time.

    Call `begin`, then for each instruction `start`, `waited` where it has waited until now, and `done`; in the
    reduction that ends a step's work `read` before and `leave` after, when all ranks go on together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times = _StreamTimes() if device.type == "cuda" else _HostTimes()
        self._together = self._begun = self._times.mark()
        self._marks: list[tuple[Work, Instruction | None, Any]] = []
        self._left_at = 0  # marks that lie before `_together`
        self._instruction: Instruction | None = None
        self._is_done = True
        self.seconds = 0.0
        """When this rank last left a reduction, in seconds since its clock was made."""

    def begin(self) -> None:
        self._marks, self._left_at = [], 0
        self._begun = self._times.mark()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def start(self, instruction: Instruction | None) -> None:
        """Begin an instruction, or (None) the wait for what was sent."""
        self._instruction, self._is_done = instruction, False

    def waited(self) -> None:
        """Note that this rank has only waited since the last mark."""
        self._marks.append((Work.WAIT, self._instruction, self._times.mark()))

    def computed(self) -> None:
        """Note that the instruction waits for weights from now on, until `fetched`."""
        if self._instruction is not None:  # else no list runs
            self._marks.append((WORK_OF[self._instruction.op], self._instruction, self._times.mark()))

    def fetched(self) -> None:
        """Note that this rank has waited for weights since `computed`."""
        if self._instruction is not None:
            self._marks.append((Work.FETCH, self._instruction, self._times.mark()))

    def done(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._marks.append((WORK_OF[self._instruction.op], self._instruction, self._times.mark()))

    def read(self) -> Reading:
        """Return what `leave` needs of every rank; on CUDA the host waits for the device here."""
        self.done()
        spent = dict.fromkeys(Work, 0.0)
        earlier = self._begun
        for work, _, mark in self._marks:
            spent[work] += self._times.seconds(earlier, mark)
            earlier = mark
        return Reading(
            since=self._times.seconds(self._together, self._begun),
            compute=sum(spent[work] for work in COMPUTING),
            communication=spent[Work.COMMUNICATION],
            data=spent[Work.LOAD],
            fetching=spent[Work.FETCH],
            peak_memory_bytes=self._peak_memory_bytes(),
        )

    def leave(self, readings: Sequence[Reading]) -> tuple[RankSeconds, ...]:
        """Return where each rank's time has gone, from the `read()` of all, by global rank.

        All ranks have left the last reduction and this one together, so one rank's clock gives the windows of all.
        """
        self.waited()
        now = self._marks[-1][-1]
        common = self._times.seconds(self._together, now)
        self._together, self._left_at = now, len(self._marks)
        self.seconds += common
        return tuple(RankSeconds(common - rank.since, *rank[1:-1], int(rank.peak_memory_bytes)) for rank in readings)

    def intervals(self) -> list[Interval]:
        """Return what this rank has done since `begin`, without gaps, in seconds since its clock was made."""
        ends = [
            self.seconds - self._times.seconds(mark, self._together)
            if place < self._left_at
            else self.seconds + self._times.seconds(self._together, mark)
            for place, (*_, mark) in enumerate(self._marks)
        ]
        begins = [self.seconds - self._times.seconds(self._begun, self._together), *ends]
        return [
            Interval(work, instruction, begin, end)
            for (work, instruction, _), begin, end in zip(self._marks, begins, ends, strict=False)
        ]

    def _peak_memory_bytes(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
