"""Peak memory of schedules: instants by hand, and against a plain walk that keeps every single
tensor apart.
"""

from __future__ import annotations

import pytest
from made_up_steps import Step

from mmtrain.plan.instructions import Schedule
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.simulate import Buffers, Peak, StageBytes, StageSeconds, instants, peak


def peaks_of(
    schedule: Schedule, stages: list[StageBytes], buffers: Buffers, polls: bool
) -> list[int]:
    found = instants(schedule, buffers, polls=polls)
    ranks = len(schedule)
    return [
        sum(peak(found[rank], stages[rank::ranks], encode_working=7, end_working=3))
        for rank in range(ranks)
    ]


def test_a_rank_of_1f1b_keeps_as_many_microbatches_as_ranks_follow() -> None:
    stages, buffers = [StageBytes(100, 110, 120)] * 4, Buffers(0, 0, 0, 0)
    schedule = training_schedule(4, 8, 0)
    assert peaks_of(schedule, stages, buffers, True) == [3 * 100 + 120, 220 + 100, 220, 120]
    found = instants(schedule, buffers, polls=True)
    assert peak(found[0], stages[:1], 7, 3) == Peak(activations=400, working=20)
    only_forward = training_schedule(4, 8, 3)
    assert peaks_of(only_forward, stages, buffers, True) == [110, 110, 110, 120]


@pytest.mark.parametrize("polls", [True, False])
def test_what_a_rank_sends_that_never_hears_back_waits_until_the_end(polls: bool) -> None:
    """Only the last of two ranks trains: nothing comes back, so nothing is known to be gone."""
    schedule = training_schedule(2, 8, 1)
    found = peaks_of(schedule, [StageBytes(0, 1, 0)] * 2, Buffers(100, 10, 0, 0), polls)
    assert found[0] == 8 * 110 + 3


def test_an_answer_tells_that_a_message_is_gone() -> None:
    """Two ranks that train, eight micro-batches: a gradient that comes back lets the activation
    go.
    """
    schedule, stages, buffers = (
        training_schedule(2, 8, 0),
        [StageBytes(0, 0, 0)] * 2,
        Buffers(100, 10, 0, 0),
    )
    kept_all = peaks_of(schedule, stages, buffers, False)[0]
    let_go = peaks_of(schedule, stages, buffers, True)[0]
    assert kept_all == 8 * 110 + 2 * 100, (
        "all activations, and the gradients that are expected next"
    )
    assert let_go <= 3 * 110 + 2 * 100


def test_features_that_wait_are_counted() -> None:
    step = Step(4, 1, 4, 0, StageSeconds((1.0,) * 4, (1.0,) * 4, (1.0, 0.0, 0.0, 0.0)), (0,))
    chain = step.best()
    without = instants(step.lists(), Buffers(0, 0, 0, 0), polls=True)
    buffers = Buffers(0, 0, 1000, 10)
    stages = [StageBytes(0, 0, 0)]
    assert chain[0].ahead > 0
    most = sum(peak(instants(step.lists(chain), buffers, polls=True)[0], stages, 0, 0))
    assert chain[0].ahead * 1010 <= most
    assert sum(peak(without[0], stages, 0, 0)) == 0
