"""A race: first that all contestants compute the same, then their steps in turns.

contestants --check_first_step--> equal losses and gradients --alternate--> seconds --check_losses--> still equal
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from bench_contestant import Contestant, Gradients
from bench_device import synchronise
from bench_timing import Times, alternate


class UnequalError(RuntimeError):
    """Contestants do not compute the same, so comparing their times would say nothing."""


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that arithmetic in another order explains."""

    loss: float  # of the first step
    gradient: float  # of the first step: norm of the difference over the norm
    later_loss: float  # once different roundings have entered the weights


TOLERANCES = {"float32": Tolerance(1e-5, 1e-3, 1e-3), "bfloat16": Tolerance(1e-2, 1e-1, 2e-2)}


def check_first_step(
    losses: Mapping[str, float], gradients: Mapping[str, Gradients | None], tolerance: Tolerance
) -> dict[str, float]:
    """Raise UnequalError unless all losses, and all gradients that are here, equal the first contestant's.

    Returns the greatest relative differences that were seen: {"loss": ..., "gradient": ...}.
    """
    reference, *others = losses
    worst = {"loss": 0.0, "gradient": 0.0}
    expected = gradients[reference]
    for name in others:
        difference = abs(losses[name] - losses[reference]) / abs(losses[reference])
        worst["loss"] = max(worst["loss"], difference)
        if not difference <= tolerance.loss:
            raise UnequalError(
                f"{name} has a loss of {losses[name]:.7f} where {reference} has {losses[reference]:.7f}; "
                f"they may differ by {tolerance.loss:g} of it"
            )
        found = gradients[name]
        if (found is None) != (expected is None) or (found and found.keys() != expected.keys()):
            raise UnequalError(f"{name} and {reference} have gradients of different parameters")
        for parameter, gradient in (found or {}).items():
            wanted = expected[parameter].double()
            distance = float((gradient.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))
            worst["gradient"] = max(worst["gradient"], distance)
            if not distance <= tolerance.gradient:
                raise UnequalError(
                    f"{name}'s gradient of {parameter} differs from {reference}'s by {distance:.2g} of its norm, "
                    f"{tolerance.gradient:g} is allowed"
                )
    return worst


def check_losses(losses: Mapping[str, list[float]], tolerance: float) -> None:
    """Raise UnequalError unless the contestants' losses stayed together over all steps."""
    reference, *others = losses
    for name in others:
        for step, (one, other) in enumerate(zip(losses[reference], losses[name], strict=True)):
            if not abs(one - other) <= tolerance * abs(one):
                raise UnequalError(f"step {step}: {name} has a loss of {other:.7f} where {reference} has {one:.7f}")


def race(
    contestants: Mapping[str, Contestant],
    repetitions: int,
    tolerance: Tolerance,
    device: torch.device,
    others: Mapping[str, Callable[[], float]] | None = None,
    show: Callable[[str, int], None] | None = None,
) -> dict[str, Any]:
    """Every rank calls this with contestants of the same names. The first step of each is its warm-up and its proof.

    `others` only take their turns. Returns seconds by name, losses by contestant, the seconds and the worst differences
    of first steps and, on CUDA, each contestant's peak memory in bytes.
    """
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    peak: dict[str, int] = {}

    def timed(name: str) -> float:
        contestant = contestants[name]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronise(device)
        dist.barrier()
        began = time.perf_counter()
        losses[name].append(contestant.step())
        synchronise(device)
        dist.barrier()
        seconds = time.perf_counter() - began
        if device.type == "cuda":
            peak[name] = max(peak.get(name, 0), torch.cuda.max_memory_allocated(device))
        if show is not None:
            show(name, len(losses[name]) - 1)
        return seconds

    first_seconds = {name: timed(name) for name in contestants}
    first = {name: of_steps[0] for name, of_steps in losses.items()}
    differences = check_first_step(first, {name: c.gradients for name, c in contestants.items()}, tolerance)
    for run in (others or {}).values():
        run()
    turns = {name: functools.partial(timed, name) for name in contestants} | dict(others or {})
    times: Times = alternate(turns, repetitions)
    check_losses(losses, tolerance.later_loss)
    return {
        "seconds": times,
        "losses": losses,
        "first_step_seconds": first_seconds,
        "first_step_differences": differences,
        "peak_memory_bytes": peak,
    }
