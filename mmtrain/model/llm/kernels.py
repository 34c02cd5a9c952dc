"""The ways in which a stage computes attention, recurrent layers and classes of layers.

layers note a Backend while they run --record_backends--> those of a stage --describe_backends,
    of all ranks--> a record and a line of text for each
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Backend(NamedTuple):
    """A way to compute layers: documents of a pack in attention or in recurrent layers (mixers.py),
    the layers of a class (compiled.py).
    """

    layers: str  # "attention", "recurrent layers" or a class
    kernel: str  # one of _KERNELS
    reason: str | None = None  # why it is not one call, or not compiled
    slow: bool = False  # a GPU does not do what it could
    factor: float | None = None  # seconds of the code in use before, over this one's
    seconds: float | None = None  # that compiling took


_KERNELS = {
    "flash": "flash attention, all documents in one call",
    "library": "all documents in one call",
    "document": "documents one by one",
    "compiled": "compiled",
    "eager": "not compiled",
    "fp8": "frozen matrices multiplied in FP8",
    "dequantised": "frozen matrices dequantised",
}
_RECORD: ContextVar[set[Backend] | None] = ContextVar("record", default=None)


@contextmanager
def record_backends() -> Iterator[set[Backend]]:
    """Collect the backends that compute attention and recurrent layers within this context."""
    backends = set()
    token = _RECORD.set(backends)
    try:
        yield backends
    finally:
        _RECORD.reset(token)


def note_backend(backend: Backend) -> None:
    if (record := _RECORD.get()) is not None:
        record.add(backend)


def describe_backends(
    backends: Sequence[Collection[Backend]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a record and a line of text for each backend; `backends` are those of each rank in
    turn.
    """
    ranks_of = {}
    # of all ranks the least gain and the longest compilation
    factors = {}
    seconds = {}
    for rank, used in enumerate(backends):
        for backend in sorted(used, key=str):
            key = backend._replace(factor=None, seconds=None)
            ranks_of.setdefault(key, []).append(rank)
            if backend.factor is not None:
                factors[key] = min(backend.factor, factors.get(key, backend.factor))
            if backend.seconds is not None:
                seconds[key] = max(backend.seconds, seconds.get(key, backend.seconds))

    records = []
    lines = []
    for key, ranks in ranks_of.items():
        backend = key._replace(factor=factors.get(key), seconds=seconds.get(key))
        records.append({**backend._asdict(), "ranks": ranks})
        line = f"{backend.layers}: {_KERNELS[backend.kernel]}"
        if backend.factor is not None:
            line += f", {backend.factor:.2f} times as fast"
        if backend.seconds is not None:
            line += f", after {backend.seconds:.0f} s of compiling"
        if backend.slow:
            line += f", which is slow: {backend.reason}"
        elif backend.reason:
            line += f" ({backend.reason})"
        if len(ranks) < len(backends) and len(ranks_of) > 1:
            line += f" (ranks {', '.join(map(str, ranks))})"
        lines.append(line)
    return records, lines
