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


def at_usual_speed(values: Sequence[float], factors: Sequence[float | None]) -> list[float]:
    """Those values whose factor is not None, each times it."""
    return [value * factor for value, factor in zip(values, factors, strict=True) if factor is not None]


def usual_speed(probes: Mapping[str, Sequence[Sequence[float]]], noise: float) -> dict[str, list[float | None]]:
    """What each measurement is to be multiplied by to be as at the machine's usual speed; None: it does not count.

    `probes` are the seconds of one and the same work right before and right after each measurement. Their mean tells
    the machine's speed meanwhile, the median of all means the usual one. Where they differ by more than `noise`, a
    share of their mean, the speed changed within the measurement, and nothing can be said of it.
    """
    means = {name: [statistics.fmean(pair) for pair in pairs] for name, pairs in probes.items()}
    usual = statistics.median(mean for of_one in means.values() for mean in of_one)
    return {
        name: [
            usual / mean if max(pair) - min(pair) <= noise * mean else None
            for pair, mean in zip(pairs, means[name], strict=True)
        ]
        for name, pairs in probes.items()
    }


def rates(times: Times, work: float) -> dict[str, Spread]:
    """Work done per second, by contestant."""
    return {name: spread([work / seconds for seconds in values]) for name, values in times.items()}


def ratios(times: Times, name: str, rival: str) -> Spread:
    """How many times as fast as its rival a contestant was in the same repetition."""
    return spread([theirs / ours for ours, theirs in zip(times[name], times[rival], strict=True)])
