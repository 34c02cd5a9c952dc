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
    """Of what fits, the `need` of so many layers that recompute and so many that are streamed that takes least.

    `recompute`: how many may; `most`: how many may be streamed. None: nothing fits. With more layers that recompute
    fewer need to be streamed, and what is fetched for these may hide behind computing: seconds fall, then rise.
    """
    found: dict[int, N | None] = {}

    def fewest_streamed(recomputed: int) -> N | None:
        if recomputed not in found:
            low, high, found[recomputed] = 0, most, None
            while low <= high:
                middle = (low + high) // 2 if low else 0  # none first
                tried = need(recomputed, middle)
                if fits(tried):
                    found[recomputed], high = tried, middle - 1
                else:
                    low = middle + 1
        return found[recomputed]

    low, high = recompute[0], recompute[-1]
    if fewest_streamed(high) is None:
        return None
    while low < high:  # to the fewest that fit
        middle = (low + high) // 2
        low, high = (low, middle) if fewest_streamed(middle) is not None else (middle + 1, high)
    high = recompute[-1]
    while low < high:  # to the bottom
        middle = (low + high) // 2
        here, further = fewest_streamed(middle), fewest_streamed(middle + 1)
        better = here is not None and further is not None and further.seconds < here.seconds
        low, high = (middle + 1, high) if better else (low, middle)
    return fewest_streamed(low)
