"""Measurements in turns, their medians and ratios, and the tables of bench.py; imports no torch.

{name: run() -> seconds}, repetitions --alternate--> {name: [seconds]} --ratios--> median, min, max
    of each turn's ratio
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmtrain.base.printing import print_info, show_error, table_lines
from mmtrain.launching.machine import RANK_MODULES
from mmtrain.runtime.job import Job
from mmtrain.runtime.supervise import prepared, run_ranks

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
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


def alternate(contestants: Mapping[str, Callable[[], float]], repetitions: int) -> Times:
    """Let each contestant run once per repetition, each returning its seconds.

    Every other repetition goes backwards: a contestant pays for what the one before it left to be
    done.
    """
    times: Times = {name: [] for name in contestants}
    for repetition in range(repetitions):
        names = list(contestants)
        for name in reversed(names) if repetition % 2 else names:
            times[name].append(contestants[name]())
    return times


def rates(times: Times, work: float) -> dict[str, Spread]:
    return {name: spread([work / seconds for seconds in values]) for name, values in times.items()}


def ratios(times: Times, name: str, rival: str) -> Spread:
    """How many times as fast as its rival a contestant was in the same repetition."""
    return spread([theirs / ours for ours, theirs in zip(times[name], times[rival], strict=True)])


WIDTH = 120  # characters of a line, where there is no terminal that tells


def run_target(
    target: str,
    ranks: int,
    folder: Path,
    threads: int,
    timeout_seconds: int,
    *,
    on_gpus: bool = False,
    **arguments: Any,
) -> int:
    """Call `target`, "module:function", on each rank with these arguments; print a failure and
    return its exit code.
    """
    job = Job(
        places=tuple(f"stage {rank}" for rank in range(ranks)),
        folder=folder,
        threads=threads,
        timeout_seconds=timeout_seconds,
        target=target,
        arguments=arguments,
        on_gpus=on_gpus,
        preload=RANK_MODULES,
    )
    with prepared(job):
        failure = run_ranks(job)
    if failure is None:
        return 0
    show_error(failure.message)
    return failure.exit_code


def positive(text: str) -> int:
    """Parse a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return number


def finish(result: dict[str, Any], file: Path | None) -> None:
    """Say how loaded the machine was, and write all numbers to the file, if there is one."""
    result["machine"]["load_average_after"] = os.getloadavg()[0]
    found = result["machine"]
    print_info(
        f"\n{found['cores']} cores; load average of the last minute "
        f"{found['load_average_before']:.1f} at the "
        f"beginning, {found['load_average_after']:.1f} at the end"
    )
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def speeds(found: Mapping[str, Any]) -> dict[str, dict[str, Spread]]:
    """Of each contestant its seconds a step, and how many times as fast as it the first contestant
    was.
    """
    names, times = list(found["losses"]), found["seconds"]
    return {
        "step_seconds": {name: spread(times[name]) for name in names},
        f"{names[0]}_is_faster_by": {name: ratios(times, names[0], name) for name in names[1:]},
    }


def per_second(found: Mapping[str, Any], name: str, fact: str) -> Spread:
    """A fact of the steps that a contestant made, by its seconds."""
    return spread(
        [amount / seconds for amount, seconds in zip(*_of_turns(found, name, fact), strict=True)]
    )


def utilisation(found: Mapping[str, Any], name: str, peak_flops: float | None = None) -> Spread:
    """Minimal exact FLOPs a second, over `peak_flops` a second or those of matrix products in the
    same repetition.
    """
    flops, seconds = _of_turns(found, name, "minimal_flops")
    (matmul,) = set(found["seconds"]) - set(found["losses"])
    rates = [
        peak_flops or found["matmul_flops"] / multiplying
        for multiplying in found["seconds"][matmul]
    ]
    return spread([f / s / rate for f, s, rate in zip(flops, seconds, rates, strict=True)])


def _of_turns(found: Mapping[str, Any], name: str, fact: str) -> tuple[list[float], list[float]]:
    """The fact and the seconds of each timed step."""
    return [found["steps"][step][fact] for step in found["step_of_turn"]], found["seconds"][name]


def as_dict(numbers: Mapping[str, Mapping[str, Spread]]) -> dict[str, Any]:
    return {
        key: {name: asdict(value) for name, value in of_names.items()}
        for key, of_names in numbers.items()
    }


def describe_samples(found: Mapping[str, Any]) -> str:
    """What a step holds, and how full packs and padded batches are."""
    turns = [found["steps"][step] for step in found["step_of_turn"]]
    samples, tokens = ([step[name] for step in turns] for name in ("samples", "tokens"))
    return (
        f"{sum(samples) / len(samples):.1f} samples and {sum(tokens) / len(tokens):,.0f} tokens a "
        "step; packs of "
        f"{found['pack_length']:,} are {found['pack_fill']:.1%} full, padded batches "
        f"{found['padded_fill']:.1%}"
    )


def describe_differences(found: Mapping[str, Any]) -> str:
    worst = found["first_step_differences"]
    return (
        f"first step: losses within {worst['loss']:.1e}, gradients within "
        f"{worst['gradient']:.1e} of each other"
    )


def print_table(columns: Sequence[str], rows: Any) -> None:
    """A table as wide as the terminal; a column whose name begins with > is set to the right."""
    print_info(*table_lines(columns, rows, shutil.get_terminal_size((WIDTH, 24)).columns))
