"""How many of a rank's layers recompute, and how many are streamed, so that it fits and takes the fewest seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar


class Need(Protocol):
    """What a rank takes."""

    @property
    def seconds(self) -> float: ...


N = TypeVar("N", bound=Need)


def fastest(need: Callable[[int, int], N], fits: Callable[[N], bool], recompute: range, most: int) -> N | None:
    """The fastest choice that fits, of how many layers recompute and how many are streamed; None if none fits.

    `need(r, s)`: what a rank takes with r and s, r one of `recompute`, s at most `most`. Exact where more layers that
    recompute never ask for more that are streamed: each r is tried with the fewest s that fit.
    """
    best: N | None = None
    streamed = most
    for recomputed in recompute:
        none = need(recomputed, 0)  # two buffers may take more than one or two streamed layers save
        found = none if fits(none) else need(recomputed, streamed)
        if not fits(found):
            continue
        while found is not none and fits(fewer := need(recomputed, streamed - 1)):
            found, streamed = fewer, streamed - 1
        if best is None or found.seconds < best.seconds:
            best = found
        if found is none:  # more that recompute only take longer
            break
    return best
