"""Steps of random costs, and where the slices of an encoder of random blocks run in them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from mmtrain.plan.instructions import Schedule
from mmtrain.plan.placement import GAIN, placements
from mmtrain.plan.schedule import Chain, leading_encodes, training_schedule
from mmtrain.plan.simulate import MessageCost, Program, Simulation, StageSeconds, simulate


class Step(NamedTuple):
    """A training step and what it costs."""

    pipeline: int
    stages_per_rank: int
    microbatches: int
    first_trainable_stage: int
    seconds: StageSeconds
    ranks: tuple[int, ...]  # with a slice

    def lists(self, chain: Chain | None = None) -> Schedule:
        """None: rank 0 encodes each micro-batch right before its forward."""
        shape = self.pipeline, self.microbatches, self.first_trainable_stage, self.stages_per_rank
        return training_schedule(*shape, chain)

    def simulated(self, chain: Chain | None = None) -> Simulation:
        """The very lists, simulated."""
        return simulate(Program(self.lists(chain)), self.seconds)

    def placed(self) -> list[tuple[float, Chain]]:
        """The planner's placements with their bounds, the most promising first."""
        without = self.lists()
        shape = without, Program(without), self.microbatches, self.seconds, self.ranks
        return [(found.least_seconds, found.chain) for found in placements(*shape)]

    def best(self) -> Chain:
        """The fastest of all placements, as simulated; of equally fast ones the first."""
        best: Chain | None = None
        if len(self.ranks) == 1:
            best = leading_encodes(self.lists(), self.ranks, 1)
        limit = self.simulated(best).seconds * (1 - GAIN) if best else math.inf
        for least, chain in self.placed():
            if least < limit and (found := self.simulated(chain).seconds) < limit:
                best, limit = chain, found * (1 - GAIN)
        assert best is not None
        return best


def ahead_along(chain: Chain) -> list[int]:
    """How many micro-batches each slice is ahead."""
    return [one.ahead for one in chain if one is not None]


def chains(pipeline: int) -> list[tuple[int, ...]]:
    """Rank 0 with the last, every rank, every other one."""
    return sorted(
        {(0, pipeline - 1), tuple(range(pipeline)), tuple(range(0, pipeline, 2))} - {(0,)}
    )


def made_up_step(
    draw: random.Random,
    pipeline: int,
    stages_per_rank: int,
    microbatches: int,
    ranks: Sequence[int],
) -> Step:
    """Encoders of 1% to 60% of the work, in slices of unequal size; rank 0's may be the stem
    alone.
    """
    stages = pipeline * stages_per_rank
    first = draw.choice([0, 0, draw.randrange(stages)])
    forward = [draw.uniform(0.5, 1.5) for _ in range(stages)]
    backward = [draw.uniform(0.5, 2) if stage >= first else 0.0 for stage in range(stages)]
    work, share = sum(forward) + sum(backward), draw.choice([0.01, 0.1, 0.2, 0.36, 0.6])
    weights = [draw.uniform(0.5, 1.5) if rank in ranks else 0.0 for rank in range(pipeline)]
    if len(ranks) > 1 and draw.random() < 0.3:
        weights[0] = 0.05
    encode = [x / sum(weights) * work * share / (1 - share) for x in weights]
    message = draw.choice([0.0, 0.02, 0.2])
    seconds = StageSeconds(
        forward=tuple(forward),
        backward=tuple(backward),
        encode=tuple(encode),
        messages=MessageCost(message / 4, message / 4, message),
        features=MessageCost(message / 2, message / 2, 2 * message),
        end=draw.choice([0.0, 0.3]),
    )
    return Step(pipeline, stages_per_rank, microbatches, first, seconds, tuple(ranks))
