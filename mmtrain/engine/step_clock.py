"""Measure on each rank how the time of every step is spent.

A mark ends each instruction, and within one the time in which it only waited: for a message, or for
all ranks. On a CPU a mark is the time. On CUDA it is an event on the stream that computes, since
kernels run when the host has long gone on; the host's delays count, too.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mmtrain.base.devices import seconds_between, time_mark
from mmtrain.engine.trace import WORK_OF, Interval, Work
from mmtrain.plan.instructions import Instruction


class RankSeconds(NamedTuple):
    """One rank's part of a step: from the begin of `train_step` to the reduction of statistics."""

    window: float  # all of it; what the others leave is idle
    compute: float  # encoder, forward and backward, without the waits in them
    # posting messages and reducing gradients, with the wait for other replicas
    communication: float
    data: float  # waiting for the loader and copying to the device
    fetching: float  # waiting for weights of streamed layers
    # of tensors; on a CPU of the heap, beyond what the process held before its weights
    peak_memory_bytes: float

    @property
    def idle(self) -> float:
        """Seconds of waiting for a message or for other ranks."""
        return max(0.0, self.window - self.compute - self.communication - self.data - self.fetching)

    @property
    def idle_fraction(self) -> float:
        return self.idle / self.window if self.window > 0 else 0.0


class HeapUse(ctypes.Structure):
    """The result of glibc's mallinfo2.

    `uordblks` bytes are in use, and `hblkhd` bytes in blocks with pages of their own.
    """

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


# finding it takes five times as long as a call, of which a step makes one an instruction
@functools.cache
def _mallinfo() -> Callable[[], HeapUse] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = HeapUse
    return function


def heap_bytes() -> int:
    """Return the bytes that this process has allocated from glibc and not released, 0 with another
    allocator.
    """
    mallinfo = _mallinfo()
    if mallinfo is None:
        return 0
    use = mallinfo()
    return use.uordblks + use.hblkhd


class StepClock:
    """One rank's clock; all ranks make it at the same time.

    Call `begin`, then for each instruction `start`, `waited` where it has waited since the last
    mark, for weights `fetched`, and `done`; in the reduction that ends a step's work `read` before
    and `leave` after, when all go on.
    """

    def __init__(
        self,
        device: torch.device,
        held_bytes: int = 0,
    ) -> None:
        """`held_bytes` is what weights and optimizer take by now: a CPU's peak is that and what the
        heap grows by.
        """
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._before_weights = heap_bytes() - held_bytes
        self._peak_bytes = 0
        self._together = self._begun = time_mark(self._device)
        self._marks: list[tuple[Work, Instruction | None, Any]] = []
        self._instruction: Instruction | None = None  # which runs; None: none does, or it is done
        self.seconds = 0.0
        """When this rank last left a reduction, in seconds since its clock was made."""

    def begin(self) -> None:
        self._marks = []
        self._begun = time_mark(self._device)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_bytes = 0

    def start(self, instruction: Instruction | None) -> None:
        """Begin an instruction, or (None) the wait for what was sent."""
        self._instruction = instruction

    def _mark(self, work: Work) -> None:
        self._marks.append((work, self._instruction, time_mark(self._device)))

    def waited(self) -> None:
        self._mark(Work.WAIT)

    def fetched(self) -> None:
        if self._instruction is not None:
            self._mark(Work.FETCH)

    def done(self) -> None:
        """Note that the instruction is done, or waits for weights from now on."""
        if self._instruction is not None:
            if not self._on_gpu:
                self._peak_bytes = max(self._peak_bytes, heap_bytes() - self._before_weights)
            self._mark(WORK_OF[self._instruction.op])

    def read(self) -> RankSeconds:
        """Return what `leave` needs of every rank; on CUDA the host waits for the device here."""
        self.done()
        spent = dict.fromkeys(Work, 0.0)
        earlier = self._begun
        for work, _, mark in self._marks:
            spent[work] += seconds_between(earlier, mark)
            earlier = mark
        if self._on_gpu:
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)
        return RankSeconds(
            # `leave` adds the time since the last reduction
            window=-seconds_between(self._together, self._begun),
            compute=spent[Work.ENCODE] + spent[Work.FORWARD] + spent[Work.BACKWARD],
            communication=spent[Work.COMMUNICATION],
            data=spent[Work.LOAD],
            fetching=spent[Work.FETCH],
            peak_memory_bytes=float(self._peak_bytes),
        )

    def leave(self, readings: Sequence[RankSeconds]) -> tuple[RankSeconds, ...]:
        """Return where each rank's time has gone, from the `read()` of all, by global rank.

        All ranks have left the last reduction and this one together, so one rank's clock gives the
        windows of all.
        """
        self.waited()
        self._instruction = None
        now = self._marks[-1][-1]
        common = seconds_between(self._together, now)
        self._together = now
        self.seconds += common
        return tuple(rank._replace(window=common + rank.window) for rank in readings)

    def intervals(self) -> list[Interval]:
        """Return what this rank has done since `begin`, without gaps, in seconds since its clock
        was made.
        """
        begun = begin = self.seconds - seconds_between(self._begun, self._together)
        intervals = []
        for work, instruction, mark in self._marks:
            end = begun + seconds_between(self._begun, mark)
            intervals.append(Interval(work, instruction, begin, end))
            begin = end
        return intervals
