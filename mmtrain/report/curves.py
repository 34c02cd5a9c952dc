"""A curve of any length in bounded memory, with every extreme that the eye looks for.

(x, y), one at a time --add--> stretches of equally many, joined in pairs when there are too many --> points, means
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

MOST_POINTS = 2000


class Point(NamedTuple):
    """One value of a curve."""

    x: float
    y: float


@dataclass(slots=True)
class _Stretch:
    """Neighbouring points of a curve."""

    count: int
    middle: float  # x of the point in its middle, or near
    total: float
    lowest: Point
    highest: Point

    def join(self, later: _Stretch) -> _Stretch:
        lowest = min(self.lowest, later.lowest, key=lambda point: point.y)
        highest = max(self.highest, later.highest, key=lambda point: point.y)
        middle = (self.middle * self.count + later.middle * later.count) / (self.count + later.count)
        return _Stretch(self.count + later.count, middle, self.total + later.total, lowest, highest)


class Curve:
    """Points in the order of their x. Beyond `most` points each stretch keeps its lowest and its highest one."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._width = 1  # points of a stretch
        self._stretches: list[_Stretch] = []
        self.count = 0
        """Points that were added."""
        self.first: Point | None = None
        self.last: Point | None = None

    def add(self, x: float, y: float | None) -> None:
        """Add a point; what is no finite number leaves none."""
        if y is None or not math.isfinite(y) or not math.isfinite(x):
            return
        self.last = point = Point(x, y)
        self.first = self.first or point
        self.count += 1
        new = _Stretch(1, x, y, point, point)
        if self._stretches and self._stretches[-1].count < self._width:
            self._stretches[-1] = self._stretches[-1].join(new)
            return
        self._stretches.append(new)
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
        means = []
        for first in range(0, len(self._stretches), each):
            joined, *others = self._stretches[first : first + each]
            for other in others:
                joined = joined.join(other)
            means.append(Point(joined.middle, joined.total / joined.count))
        return means
