"""A race on its ranks: all contestants compute the same, then their steps take turns.

Settings, row --Work--> packs, padded batches --race--> equal losses and gradients, seconds
    --run_row--> FOLDER/ROW.json
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from bench_models import (
    SHAPES,
    PaddedBatch,
    Step,
    equal_steps,
    noise_image,
    packed,
    padded,
    ragged_steps,
    run_config,
)
from bench_tables import Times, alternate
from torch import nn

from mmtrain.base.progress import ProgressBar
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE
from mmtrain.data.stream.images import image_transform
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.facts.models import models_of
from mmtrain.plan.costs import Models, Workload, minimal_flops
from mmtrain.runtime.rank import Rank

Gradients = dict[str, torch.Tensor]


class Contestant(Protocol):
    """One way of training the same projector."""

    def step(self) -> float:
        """Make one optimizer step; the loss per supervised token before it, in nats, the same on
        every rank.
        """
        ...

    @property
    def gradients(self) -> Gradients | None:
        """Of the first step's loss; None before it, and on ranks without the projector."""
        ...


class FirstGradients:
    """Keeps the gradients with which an optimizer makes its first step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.found: Gradients | None = None
        self._parameters = dict(parameters)
        self._hook = optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        self.found = {name: p.grad.detach().clone() for name, p in self._parameters.items()}
        self._hook.remove()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    """Return the greatest relative differences of losses and gradients. Raises UnequalError for too
    large ones.
    """
    reference, *others = losses
    worst = {"loss": 0.0, "gradient": 0.0}
    expected = gradients[reference]
    for name in others:
        difference = abs(losses[name] - losses[reference]) / abs(losses[reference])
        worst["loss"] = max(worst["loss"], difference)
        if not difference <= tolerance.loss:
            raise UnequalError(
                f"{name} has a loss of {losses[name]:.7f} where {reference} has "
                f"{losses[reference]:.7f}; "
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
                    f"{name}'s gradient of {parameter} differs from {reference}'s by "
                    f"{distance:.2g} of its norm, "
                    f"{tolerance.gradient:g} is allowed"
                )
    return worst


def check_losses(losses: Mapping[str, list[float]], tolerance: float) -> None:
    """Raise UnequalError unless the contestants' losses stayed together over all steps."""
    reference, *others = losses
    for name in others:
        for step, (one, other) in enumerate(zip(losses[reference], losses[name], strict=True)):
            if not abs(one - other) <= tolerance * abs(one):
                raise UnequalError(
                    f"step {step}: {name} has a loss of {other:.7f} where {reference} has {one:.7f}"
                )


def race(
    contestants: Mapping[str, Contestant],
    repetitions: int,
    tolerance: Tolerance,
    device: torch.device,
    others: Mapping[str, Callable[[], float]] | None = None,
    show: Callable[[str, int], None] | None = None,
) -> dict[str, Any]:
    """Every rank calls this with contestants of the same names. The first step of each is its
    warm-up and its proof.

    `others` only take their turns. Returns times, losses, and the worst differences of first steps.
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
    differences = check_first_step(
        first, {name: c.gradients for name, c in contestants.items()}, tolerance
    )
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


def least_flops(models: Models, trainable: Sequence[str], step: Step) -> int:
    """FLOPs that every exact way of making this step computes, matrix products only, 2 for a
    multiply-add.
    """
    documents = [entry for pack in step for entry in pack.entries]
    lengths = [len(document.input_ids) for document in documents]
    tiles = sum(tiling.tiles for document in documents for tiling in document.tilings)
    supervised = sum(label != IGNORE for document in documents for label in document.labels)
    # as the attention of all of them asks
    document = sum(n * n for n in lengths) / max(1, sum(lengths))
    work = Workload(sum(lengths), document, tiles, 0, supervised)
    return minimal_flops(models, trainable, work).total


def matmul_rate(
    weights: Sequence[torch.Tensor], tokens: int, synchronise: Callable[[], None]
) -> tuple[Callable[[], float], float]:
    """A contestant that only multiplies (tokens, inputs) by each (outputs, inputs) weight, and its
    FLOPs a run.
    """
    device, dtype = weights[0].device, weights[0].dtype
    rows = {
        w.shape[1]: torch.randn(tokens, w.shape[1], device=device, dtype=dtype) for w in weights
    }
    flops = 2.0 * tokens * sum(w.numel() for w in weights)

    def run() -> float:
        synchronise()
        began = time.perf_counter()
        with torch.no_grad():
            for weight in weights:
                torch.nn.functional.linear(rows[weight.shape[1]], weight)
        synchronise()
        return time.perf_counter() - began

    return run, flops


MATMUL = "matrix products"
WORKLOADS = {"equal": equal_steps, "ragged": ragged_steps, "pipeline": equal_steps}


@dataclass(frozen=True)
class Settings:
    """What is raced: sizes of everything in a row."""

    shape: str
    dtype: str
    repetitions: int
    steps: int  # different ones; they come round again
    samples_per_pack: int
    microbatches: int  # of a step
    threads: int  # of a rank
    timeout_seconds: int = 600
    compiles: bool = False  # layers of mmtrain


class Work:
    """The samples of a row, packed for mmtrain and padded for everybody else; all in memory."""

    def __init__(self, settings: Settings, row: str, parts: Path, device: torch.device) -> None:
        """`parts` holds the encoder, whose preprocessing is used; on CUDA padded batches lie in
        page-locked memory.
        """
        shape = SHAPES[settings.shape]
        decode, transform = noise_image(shape), image_transform(str(parts / "vision"))
        self.planned = WORKLOADS[row](
            shape, settings.steps, settings.microbatches, settings.samples_per_pack
        )
        self.packed = [
            packed(step, self.planned.pack_length, decode) for step in self.planned.steps
        ]
        self.padded = [padded(shape, step, decode, transform) for step in self.planned.steps]
        if device.type == "cuda":
            self.padded = [[batch.pinned() for batch in step] for step in self.padded]

    def packed_batches(self) -> Iterator[PackedBatch]:
        return itertools.cycle(itertools.chain(*self.packed))

    def padded_batches(self) -> Iterator[PaddedBatch]:
        return itertools.cycle(itertools.chain(*self.padded))

    def padded_steps(self) -> Iterator[Sequence[PaddedBatch]]:
        return itertools.cycle(self.padded)

    def facts(self, config: RunConfig) -> dict[str, Any]:
        """Sizes, by step; step i of a race is `i % number of steps`."""
        batches = [batch for step in self.padded for batch in step]
        models = models_of(config)
        of_steps = [
            {
                "samples": sum(len(batch.input_ids) for batch in step),
                "tokens": sum(int(batch.attention_mask.sum()) for batch in step),
                "supervised_tokens": sum(batch.supervised for batch in step),
                "minimal_flops": least_flops(models, config.model.trainable, packs),
            }
            for step, packs in zip(self.padded, self.planned.steps, strict=True)
        ]
        return {
            "pack_length": self.planned.pack_length,
            "pack_fill": self.planned.fill,
            "padded_fill": sum(one["tokens"] for one in of_steps)
            / sum(batch.input_ids.numel() for batch in batches),
            "steps": of_steps,
        }


def make_config(
    settings: Settings,
    parts: Path,
    pipeline: int,
    *,
    llm: str | None = None,
    calibration: Path | None = None,
) -> RunConfig:
    shape = SHAPES[settings.shape]
    return run_config(
        shape,
        parts,
        dtype=settings.dtype,
        pack_length=settings.samples_per_pack * shape.sample_tokens,
        microbatches=settings.microbatches,
        pipeline=pipeline,
        threads=settings.threads,
        llm=llm,
        calibration=calibration,
        compiles=settings.compiles,
    )


def run_row(
    settings: Settings,
    row: str,
    contestants: dict[str, Contestant],
    rank: Rank,
    facts: dict[str, Any],
    weights: Sequence[torch.Tensor] = (),
    afterwards: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Race, and write the times with `facts` to rank 0's FOLDER/ROW.json; leaves the process group.

    `weights` are multiplied in turn with the steps. `afterwards` finds more facts on every rank,
    untimed.
    """
    device = torch.device(rank.device)
    others = {}
    if weights:
        others[MATMUL], facts["matmul_flops"] = matmul_rate(
            weights, facts["pack_length"], functools.partial(synchronise, device)
        )
    turns = itertools.count(1)
    tokens_per_turn = facts["steps"][0]["tokens"]

    def show(name: str, step: int) -> None:
        rank.progress.at(step, name)
        if rank.console is not None:
            turn = next(turns)
            progress.show(turn, turn * tokens_per_turn, name)

    total = (settings.repetitions + 1) * len(contestants)
    with ProgressBar(f"{row} turns", total, rank.console, "tokens") as progress:
        tolerance = TOLERANCES[settings.dtype]
        found = race(contestants, settings.repetitions, tolerance, device, others, show)
    # 0: the warm-up
    found["step_of_turn"] = [(turn + 1) % settings.steps for turn in range(settings.repetitions)]
    facts |= afterwards()
    if rank.rank == 0:
        (rank.folder / f"{row}.json").write_text(json.dumps(found | facts))
    dist.barrier()
    dist.destroy_process_group()
