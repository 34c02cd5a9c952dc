"""Placements of slices: what they promise of a step, against the lists that are made of them."""

from __future__ import annotations

import random

from made_up_steps import ahead_along, chains, made_up_step

from mmtrain.plan.placement import MOST_STEPS_AHEAD


def test_no_list_takes_less_than_its_placement_promises_and_most_take_no_more() -> None:
    draw = random.Random(2)
    excess = []
    for pipeline, stages_per_rank, microbatches in ((2, 1, 8), (3, 2, 5), (4, 1, 12), (4, 3, 8)):
        for ranks in ((0,), *chains(pipeline)):
            step = made_up_step(draw, pipeline, stages_per_rank, microbatches, ranks)
            options = step.placed()
            assert options == step.placed()
            for least, chain in options:
                assert ahead_along(chain)[0] <= MOST_STEPS_AHEAD * microbatches
                seconds = step.simulated(chain).seconds
                assert seconds >= least * (1 - 1e-9)
                excess.append(seconds / least - 1)
    assert sorted(excess)[len(excess) // 2] < 0.01
