"""A curve of any length in bounded memory, with every extreme that the eye looks for.

(x, y), one at a time --add--> stretches of equally many, joined in pairs when there are too many --> points, means
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

MOST_POINTS = 2000
LARGEST = 1e30  # beyond it a record is damaged, and sums of its numbers would be infinite


class Point(NamedTuple):
    """One value of a curve."""

    x: float
    y: float


@dataclass(slots=True)
class _Stretch:
    """Neighbouring points of a curve."""

    count: int
    x_sum: float
    y_sum: float
    lowest: Point
    highest: Point

    def add(self, x: float, y: float) -> None:
        self.count += 1
        self.x_sum += x
        self.y_sum += y
        if y < self.lowest.y:
            self.lowest = Point(x, y)
        elif y > self.highest.y:
            self.highest = Point(x, y)

    def join(self, later: _Stretch) -> _Stretch:
        lowest = self.lowest if self.lowest.y <= later.lowest.y else later.lowest
        highest = self.highest if self.highest.y >= later.highest.y else later.highest
        sums = self.x_sum + later.x_sum, self.y_sum + later.y_sum
        return _Stretch(self.count + later.count, *sums, lowest, highest)

    @property
    def mean(self) -> Point:
        return Point(self.x_sum / self.count, self.y_sum / self.count)


class Curve:
    """Points in the order of their x. Beyond `most` points each stretch keeps its lowest and its highest one."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1  # points of a stretch
        self._stretches: list[_Stretch] = []
        self.count = 0
        """Points that were added."""

    def add(self, x: float, y: float | None) -> None:
        """Add a point; what is no number, or no sane one, leaves none."""
        if y is None or not (abs(y) <= LARGEST and abs(x) <= LARGEST):  # NaN is neither
            return
        self.count += 1
        if self._stretches and self._stretches[-1].count < self._width:
            self._stretches[-1].add(x, y)
            return
        point = Point(x, y)
        self._stretches.append(_Stretch(1, x, y, point, point))
        while len(self._stretches) * min(self._width, 2) > self._most:
            pairs = itertools.zip_longest(self._stretches[::2], self._stretches[1::2])
            self._stretches = [one if other is None else one.join(other) for one, other in pairs]
            self._width *= 2

    @property
    def is_whole(self) -> bool:
        """Whether `points` are all that were added."""
        return self._width == 1

    def points(self) -> list[Point]:
        """At most `most` points: all, or the extremes of each stretch, in the order of their x."""
        return [point for s in self._stretches for point in sorted({s.lowest, s.highest})]

    def means(self, count: int) -> list[Point]:
        """The mean of each of about `count` stretches, at its middle."""
        each = max(1, math.ceil(len(self._stretches) / count))
        groups = (self._stretches[first : first + each] for first in range(0, len(self._stretches), each))
        return [functools.reduce(_Stretch.join, group).mean for group in groups]
