"""One row of a benchmark on its ranks: the work in everybody's form, the race, and what tables need of both.

Settings, row --Work--> packs, padded batches --run_row--> FOLDER/ROW.json
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_contestant import Contestant
from bench_device import synchronise
from bench_flops import least_flops, matmul_rate
from bench_models import SHAPES, noise_image, run_config
from bench_race import TOLERANCES, race
from bench_samples import PaddedBatch, equal_steps, packed, padded, ragged_steps

from mmtrain.base.progress import ProgressBar
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.images import image_transform
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.plan.planner import models_of
from mmtrain.processes.rank import Rank

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


class Work:
    """The samples of a row, packed for mmtrain and padded for everybody else; all in memory."""

    def __init__(self, settings: Settings, row: str, parts: Path, device: torch.device) -> None:
        """`parts` holds the encoder, whose preprocessing is used; on CUDA padded batches lie in page-locked memory."""
        shape = SHAPES[settings.shape]
        decode, transform = noise_image(shape), image_transform(str(parts / "vision"))
        self.planned = WORKLOADS[row](shape, settings.steps, settings.microbatches, settings.samples_per_pack)
        self.packed = [packed(step, self.planned.pack_length, decode) for step in self.planned.steps]
        self.padded = [padded(shape, step, decode, transform) for step in self.planned.steps]
        if device.type == "cuda":
            self.padded = [[batch.pinned() for batch in step] for step in self.padded]

    def packed_batches(self) -> Iterator[PackedBatch]:
        """mmtrain's micro-batches, without end."""
        return itertools.cycle(itertools.chain(*self.packed))

    def padded_batches(self) -> Iterator[PaddedBatch]:
        """The rivals' micro-batches, without end."""
        return itertools.cycle(itertools.chain(*self.padded))

    def padded_steps(self) -> Iterator[Sequence[PaddedBatch]]:
        """The rivals' steps, without end."""
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
            "padded_fill": sum(one["tokens"] for one in of_steps) / sum(batch.input_ids.numel() for batch in batches),
            "steps": of_steps,
        }


def make_config(
    settings: Settings, parts: Path, pipeline: int, *, llm: str | None = None, calibration: Path | None = None
) -> RunConfig:
    """mmtrain's configuration of a row."""
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
    """Race, and write what was found with `facts` to rank 0's FOLDER/ROW.json; leaves the process group.

    `weights` are multiplied with as many rows as a pack has tokens, in turn with the steps. `afterwards` finds more
    facts, on every rank, once nothing is timed any more.
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
    found["step_of_turn"] = [(turn + 1) % settings.steps for turn in range(settings.repetitions)]  # 0: the warm-up
    facts |= afterwards()
    if rank.rank == 0:
        (rank.folder / f"{row}.json").write_text(json.dumps(found | facts))
    dist.barrier()
    dist.destroy_process_group()
