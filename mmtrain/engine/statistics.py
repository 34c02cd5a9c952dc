"""Sums of a step or an evaluation, by name: on each rank, then over all ranks in one reduction."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from mmtrain.engine.step_clock import RankSeconds

# fields of a StepResult that are whole sums
COUNTS = (
    "epoch",
    "samples",
    "images",
    "tiles",
    "tokens",
    "supervised_tokens",
    "quarantined",
)
Slot = tuple[int, int]  # stage or replica, and micro-batch of the step


@dataclass(frozen=True)
class StepResult:
    """The result of a training step, equal on every rank but for `ranks`, each global rank's times
    by this rank's clock.

    `loss` and `grad_norm` may be NaN or infinite in a step that was left out for it.
    """

    step: int
    epoch: int  # from 0, of the step's last pack
    loss: float | None  # nats per supervised token of the whole step; None without any
    grad_norm: float  # global L2 norm of the loss's gradient, before clipping
    lr: float
    lr_groups: Mapping[str, float]  # of `optimizer.groups`, by their patterns
    samples: int
    images: int
    tiles: int  # squares that the encoder saw
    tokens: int  # without padding
    supervised_tokens: int
    quarantined: int  # damaged samples, which left a gap
    no_update: str | None  # why no update was made
    ranks: tuple[RankSeconds, ...] = field(default=(), compare=False)


class Statistics(NamedTuple):
    """Sums over all ranks at the end of a step or an evaluation, all float64.

    An answer is a maximal run of supervised positions. It is exact if each of its tokens, end mark
    included, is the arg max given the true tokens before it. Correct tokens and answers are counted
    in evaluations alone.
    """

    loss_sum: float  # nats
    supervised_tokens: float
    squared_norm: float  # of the loss sum's gradient
    bad_ranks: float  # that hold a value that is not finite
    correct_tokens: float
    answers: float
    exact_answers: float
    tokens: float
    samples: float
    images: float
    tiles: float
    quarantined: float
    epoch: float  # of the last pack: only the rank that reads it adds one
    save: float  # ranks that were asked to save
    stop: float  # ranks that were asked to stop


class RankSums:
    """One rank's part of Statistics, in float64 on its device: adding does not wait for the
    device.
    """

    def __init__(self, device: torch.device) -> None:
        self._all = torch.zeros(
            len(Statistics._fields),
            dtype=torch.float64,
            device=device,
        )

    def add(self, **values: torch.Tensor | float) -> None:
        for name, value in values.items():
            self[name].add_(value)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._all[Statistics._fields.index(name)]

    def reduce(self, reading: RankSeconds) -> tuple[Statistics, list[RankSeconds]]:
        """Return the sums over all ranks, and the clock readings of all ranks, by global rank.
        Collective.
        """
        # each rank fills its own row
        readings = torch.zeros(dist.get_world_size(), len(reading), dtype=torch.float64)
        readings[dist.get_rank()] = torch.tensor(reading, dtype=torch.float64)
        both = torch.cat([self._all, readings.flatten().to(self._all.device)])
        dist.all_reduce(both)
        sums, of_ranks = both.cpu().split([len(self._all), readings.numel()])
        rows = of_ranks.view_as(readings).tolist()
        return Statistics(*sums.tolist()), [RankSeconds(*row) for row in rows]
