"""Measures on each rank, at every step, what its time goes into.

A mark ends each instruction, and within one the time in which it only waited: for a message, or for all ranks. On a CPU
a mark is the time. On CUDA it is an event on the stream that computes: kernels run when the host has long gone on, and
waiting for a message makes only that stream wait. There the time of an instruction is the time that the stream spends
between its marks, with what the host is late in giving it. Price: about a microsecond an instruction on a CPU, and
50 microseconds a step for the process's peak memory; two marks more for each fetch of a streamed layer.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mmtrain.engine.trace import WORK_OF, Interval, Work
from mmtrain.plan.instructions import Instruction

COMPUTING = (Work.ENCODE, Work.FORWARD, Work.BACKWARD)


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """One rank's part of a step, from its `train_step`'s begin to the end of the reduction that ends the step's work.

    All ranks leave that reduction together; the optimizer comes after it and is not in here. `compute` is the encoder,
    forward and backward without the waits in them; `communication` is posting sends and receives and reducing
    gradients, where waiting for other replicas cannot be told from it; `data` is waiting for the loader, and copying
    what it gives to the device; `fetching` is waiting for weights of streamed layers, also for the peers that send
    them. The rest of `window` is idle. `peak_memory_bytes` is of the same time: allocated by torch on a GPU, resident
    in the process on a CPU (where the kernel cannot reset that: since the process began).
    """

    window: float
    compute: float
    communication: float
    data: float
    fetching: float
    peak_memory_bytes: int

    @property
    def idle(self) -> float:
        """Seconds of waiting for a message or for the other ranks."""
        return max(0.0, self.window - self.compute - self.communication - self.data - self.fetching)

    @property
    def idle_fraction(self) -> float:
        """`idle` as a share of the window."""
        return self.idle / self.window if self.window > 0 else 0.0


class Reading(NamedTuple):
    """What a rank's clock says before the reduction that ends a step's work, in seconds."""

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

    def settle(self, mark: Any) -> None:
        """A time is known at once."""


class _StreamTimes(_HostTimes):
    """Marks are CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: Any, later: Any) -> float:
        return earlier.elapsed_time(later) / 1000

    def settle(self, mark: Any) -> None:
        """Wait until the stream has come to the mark."""
        mark.synchronize()


class StepClock:
    """One rank's clock; every rank makes it at the same time, and calls it in the order of its instructions.

    `begin`, then for each instruction `start`, `waited` where it has waited until now, and `done`; in the reduction
    that ends a step's work `read` before, `leave` after, when all ranks go on together.
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
        """When this rank last left a reduction, seconds since its clock was made."""

    def begin(self) -> None:
        """A step, or an evaluation, begins."""
        self._marks, self._left_at = [], 0
        self._begun = self._times.mark()
        self._reset_peak_memory()

    def start(self, instruction: Instruction | None) -> None:
        """An instruction begins, or (None) the wait for what was sent."""
        self._instruction, self._is_done = instruction, False

    def waited(self) -> None:
        """Since the last mark this rank has only waited."""
        self._marks.append((Work.WAIT, self._instruction, self._times.mark()))

    def computed(self) -> None:
        """The instruction goes on, and waits now for weights: until `fetched`."""
        if self._instruction is not None:  # else no list runs
            self._marks.append((WORK_OF[self._instruction.op], self._instruction, self._times.mark()))

    def fetched(self) -> None:
        """Since `computed` this rank has waited for weights of a streamed layer."""
        if self._instruction is not None:
            self._marks.append((Work.FETCH, self._instruction, self._times.mark()))

    def done(self) -> None:
        """The instruction has ended; of the reduction that `read` has marked this is known."""
        if not self._is_done:
            self._is_done = True
            self._marks.append((WORK_OF[self._instruction.op], self._instruction, self._times.mark()))

    def read(self) -> Reading:
        """What `leave` needs of every rank; on CUDA the host waits for the device here."""
        self.done()
        self._times.settle(self._marks[-1][-1])
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
        """All ranks have given their `read()`, here by global rank, and go on together: where the time has gone.

        Each rank measures from leaving one reduction to leaving the next, and all have left both together, so one
        rank's clock tells the windows of all.
        """
        self.waited()
        now = self._marks[-1][-1]
        self._times.settle(now)
        common = self._times.seconds(self._together, now)
        self._together, self._left_at = now, len(self._marks)
        self.seconds += common
        return tuple(RankSeconds(common - one.since, *one[1:-1], int(one.peak_memory_bytes)) for one in readings)

    def intervals(self) -> list[Interval]:
        """What this rank has done since `begin`, without gaps, in seconds since its clock was made."""
        if self._marks:
            self._times.settle(self._marks[-1][-1])
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

    def _reset_peak_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with contextlib.suppress(OSError):  # not Linux, or a container that keeps it: the peak stays that of before
            Path("/proc/self/clear_refs").write_text("5")

    def _peak_memory_bytes(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        except OSError:  # not Linux
            return 0.0
        return float(found[1]) * 1024 if found else 0.0
