"""Contestants that take turns, so that what else a machine does meets all of them alike.

{name: run() -> seconds}, repetitions --alternate--> {name: [seconds]} --ratios--> median, min, max of each turn's ratio
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Times = dict[str, list[float]]  # seconds of each repetition, by contestant


@dataclass(frozen=True)
class Spread:
    """What several repetitions gave."""

    median: float
    min: float
    max: float
    values: tuple[float, ...]  # in the order in which they were measured

    def text(self, form: str = ",.0f") -> str:
        """`median (min - max)`, each number in a format of str.format."""
        return f"{self.median:{form}} ({self.min:{form}} - {self.max:{form}})"


def spread(values: Sequence[float]) -> Spread:
    """Median, least and largest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


def alternate(contestants: Mapping[str, Callable[[], float]], repetitions: int) -> Times:
    """Let each contestant run once per repetition, each returning its seconds; every other repetition goes backwards.

    Backwards: a contestant would otherwise always follow the same one, and pay for what that left to be done.
    """
    times: Times = {name: [] for name in contestants}
    for repetition in range(repetitions):
        names = list(contestants)
        for name in reversed(names) if repetition % 2 else names:
            times[name].append(contestants[name]())
    return times


def quiet(probes: Mapping[str, Sequence[Sequence[float]]], noise: float) -> dict[str, list[bool]]:
    """Which measurements count: those whose probes' mean lies within `noise` of the median of all such means.

    `probes` are the seconds of one and the same work right before and right after each measurement.
    """
    means = {name: [statistics.fmean(pair) for pair in pairs] for name, pairs in probes.items()}
    usual = statistics.median(mean for of_one in means.values() for mean in of_one)
    return {name: [abs(mean / usual - 1) <= noise for mean in of_one] for name, of_one in means.items()}


def rates(times: Times, work: float) -> dict[str, Spread]:
    """Work done per second, by contestant."""
    return {name: spread([work / seconds for seconds in values]) for name, values in times.items()}


def ratios(times: Times, name: str, rival: str) -> Spread:
    """How many times as fast as its rival a contestant was in the same repetition."""
    return spread([theirs / ours for ours, theirs in zip(times[name], times[rival], strict=True)])
