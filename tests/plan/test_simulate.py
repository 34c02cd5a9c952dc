"""Simulated steps against drawings made by hand and known idle shares; encoder prefetch on rank
0.
"""

from __future__ import annotations

import itertools

import pytest
from made_up_steps import Step

from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.simulate import MessageCost, Program, Simulation, StageSeconds, simulate


def step_of(
    pipeline: int, microbatches: int, first: int, seconds: StageSeconds, **options: bool
) -> Simulation:
    stages_per_rank = len(seconds.forward) // pipeline
    return simulate(
        Program(training_schedule(pipeline, microbatches, first, stages_per_rank)),
        seconds,
        **options,
    )


def test_equal_stages_idle_by_the_known_share() -> None:
    for pipeline, stages_per_rank, groups in itertools.product(
        (1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 4)
    ):
        microbatches, stages = groups * pipeline, pipeline * stages_per_rank
        step = step_of(pipeline, microbatches, 0, StageSeconds((1.0,) * stages, (1.0,) * stages))
        known = (pipeline - 1) / (stages_per_rank * microbatches + pipeline - 1)
        assert step.idle == pytest.approx([known] * pipeline), (
            pipeline,
            stages_per_rank,
            microbatches,
        )
        assert step.seconds == pytest.approx(2 * (stages_per_rank * microbatches + pipeline - 1))


def test_a_step_by_hand_has_the_idle_shares_of_its_drawing() -> None:
    """p = 2, m = 2; forward 1 and 2, backward 3 and 1.

    Rank 0: F0 0-1, F1 1-2, B0 4-7, B1 7-10. Rank 1: F0 1-3, B0 3-4, F1 4-6, B1 6-7.
    """
    step = step_of(2, 2, 0, StageSeconds((1, 2), (3, 1)), spans=True)
    assert step.seconds == 10 and step.idle == pytest.approx((0.2, 0.4))
    drawn = {
        (0, Op.FORWARD, 0): (0, 1),
        (0, Op.FORWARD, 1): (1, 2),
        (0, Op.BACKWARD, 0): (4, 7),
        (0, Op.BACKWARD, 1): (7, 10),
        (1, Op.FORWARD, 0): (1, 3),
        (1, Op.BACKWARD, 0): (3, 4),
        (1, Op.FORWARD, 1): (4, 6),
        (1, Op.BACKWARD, 1): (6, 7),
    }
    assert {
        (x.rank, x.instruction.op, x.instruction.microbatch): (x.begin, x.end) for x in step.spans
    } == drawn


def test_a_step_with_messages_encoder_and_end_by_hand() -> None:
    """p = 2, m = 1: encode 1, forward 2 and 2, backward 3 and 4; sending 0.5, receiving 0.25, on
    the way 1, end 2.

    Rank 0: E 0-1, F 1-3, send 3-3.5. On the way 3.5-4.5. Rank 1: F 4.5-6.75, B 6.75-10.75, send
    10.75-11.25; 1 on the way. Rank 0: B 12.25-15.5, then the end.
    """
    seconds = StageSeconds((2, 2), (3, 4), encode=(1, 0), messages=MessageCost(0.5, 0.25, 1), end=2)
    step = step_of(2, 1, 0, seconds, spans=True)
    assert step.seconds == 17.5
    assert step.idle == pytest.approx(
        (1 - (1 + 2 + 0.5 + 3.25 + 2) / 17.5, 1 - (2.25 + 4 + 0.5 + 2) / 17.5)
    )
    ends = {(x.rank, x.instruction.op): (x.begin, x.end) for x in step.spans}
    assert ends[0, Op.ENCODE] == (0, 1) and ends[0, Op.SEND_ACTIVATION] == (3, 3.5)
    assert ends[1, Op.FORWARD] == (4.5, 6.75) and ends[0, Op.BACKWARD] == (12.25, 15.5)
    assert ends[0, Op.OPTIMIZER_STEP] == ends[1, Op.OPTIMIZER_STEP] == (15.5, 17.5)


def test_a_message_moves_once_its_receive_is_posted_one_compute_ahead() -> None:
    """A forward-only rank has sent all by 0.4; rank 1 posts the next receive when a forward of 0.1
    is done.
    """
    step = step_of(
        2, 4, 1, StageSeconds((0.1, 0.1), (0, 0.1), messages=MessageCost(transfer=1)), spans=True
    )
    begins = [x.begin for x in step.spans if x.rank == 1 and x.instruction.op is Op.FORWARD]
    assert begins == pytest.approx([1.1, 2.2, 3.3, 4.4])


def test_a_schedule_that_cannot_finish_has_no_program() -> None:
    lists = ((Instruction(Op.RECEIVE_GRADIENT, 0, 0), Instruction(Op.BACKWARD, 0, 0)), ())
    with pytest.raises(ValueError, match="every rank waits"):
        Program(lists)


# ---- the encoder on rank 0


def test_an_encoder_that_fits_into_what_is_idle_costs_nothing() -> None:
    """p = 4, m = 4: rank 0 waits 6 of 14; four encodes of 1 fit there, the first of them for the
    step that follows.
    """
    step = Step(4, 1, 4, 0, StageSeconds((1.0,) * 4, (1.0,) * 4, (1.0, 0.0, 0.0, 0.0)), (0,))
    chain = step.best()
    assert step.simulated().seconds == pytest.approx(15)
    assert step.simulated(chain).seconds == pytest.approx(14) and chain[0].ahead > 0
