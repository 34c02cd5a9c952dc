"""A lower bound of steps against the steps that the search finds, for layers with unrelated costs
and for real ones.
"""

from __future__ import annotations

import math
import random

import pytest
from made_up_costs import equal_costs, made_up_costs

from mmtrain.plan.search import Search, least_step_seconds


@pytest.mark.parametrize("seed", range(60))
def test_no_step_is_shorter_than_the_bound_and_what_it_calls_impossible_does_not_fit(seed) -> None:
    draw = random.Random(seed)
    pipeline, memory = draw.randrange(1, 5), draw.choice([None, 100, 200, 300, 500])
    decoder, microbatches = draw.randrange(max(2, pipeline - 1), 9), draw.randrange(1, 9)
    costs = made_up_costs(
        draw, decoder, pipeline=pipeline, microbatches=microbatches, memory_bytes=memory
    )
    bound = least_step_seconds(costs)
    found = Search(costs, draw.choice(["auto", 0])).find("auto")
    seconds = math.inf if found is None else found.simulation.seconds
    assert 0 < bound <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(("pipeline", "microbatches"), [(1, 4), (4, 12), (4, 4), (4, 2), (6, 24)])
def test_equal_layers_that_can_be_shared_out_evenly_take_the_bound(pipeline, microbatches) -> None:
    """12 layers in stages of one or two; the law (p - 1) / v micro-batches beside m."""
    costs = equal_costs([1.0] * 12, pipeline=pipeline, microbatches=microbatches)
    found = Search(costs).find("auto")
    bound = least_step_seconds(costs)
    assert bound <= found.simulation.seconds <= bound * 1.02
