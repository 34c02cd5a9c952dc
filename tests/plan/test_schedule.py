"""Instruction lists: some written by hand, all small pipelines through the checker, and the checker
itself tested.
"""

from __future__ import annotations

import itertools
import random

import pytest
from made_up_steps import ahead_along, chains, made_up_step
from schedule_check import ahead_of, check_prelude, check_schedule
from sweeps import sweep

from mmtrain.plan.instructions import COMPUTES, Instruction, Op, Schedule
from mmtrain.plan.schedule import (
    Encodes,
    forward_schedule,
    leading_encodes,
    prelude,
    ranks_of,
    training_schedule,
)

END = "reduce_gradients reduce_statistics optimizer_step"


def written(schedule: Schedule) -> list[str]:
    """`op:stage.microbatch`, short enough to write a whole schedule by hand."""
    names = [
        [x.op.value if x.stage < 0 else f"{x.op.value}:{x.stage}.{x.microbatch}" for x in r]
        for r in schedule
    ]
    return [" ".join(rank) for rank in names]


def changed(schedule: Schedule, rank: int, instructions: list[Instruction]) -> Schedule:
    return (*schedule[:rank], tuple(instructions), *schedule[rank + 1 :])


def test_two_ranks_and_two_microbatches_run_the_hand_written_lists() -> None:
    assert written(training_schedule(2, 2, 0)) == [
        "load:0.0 encode:0.0 forward:0.0 send_activation:0.0 receive_gradient:0.0 "
        "load:0.1 encode:0.1 "
        f"forward:0.1 send_activation:0.1 receive_gradient:0.1 backward:0.0 backward:0.1 {END}",
        "receive_activation:1.0 forward:1.0 receive_activation:1.1 backward:1.0 "
        "send_gradient:1.0 forward:1.1 "
        f"backward:1.1 send_gradient:1.1 {END}",
    ]


def test_evaluation_runs_forwards_and_reduces_statistics_only() -> None:
    assert written(forward_schedule(2, 1)) == [
        "load:0.0 encode:0.0 forward:0.0 send_activation:0.0 reduce_statistics",
        "receive_activation:1.0 forward:1.0 reduce_statistics",
    ]


def test_encodes_stand_where_they_are_told_and_reach_into_the_next_step() -> None:
    """Two micro-batches, the first encoded when a step begins: it encodes the second, and at its
    end the next one.
    """
    schedule = training_schedule(2, 2, 0, encodes=(Encodes(1, (0, 0, 0, 1, 1)), None))
    with pytest.raises(
        ValueError,
        match=r"FORWARD\(stage 0, micro-batch 1\): the ENCODE that it needs does not stand",
    ):
        check_schedule(schedule, 2, 0)
    schedule = training_schedule(2, 2, 0, encodes=(Encodes(1, (0, 1, 0, 0, 1)), None))
    check_schedule(schedule, 2, 0)
    assert written(schedule)[0] == (
        "forward:0.0 send_activation:0.0 receive_gradient:0.0 load:0.1 encode:0.1 forward:0.1 "
        "send_activation:0.1 receive_gradient:0.1 backward:0.0 backward:0.1 load:0.2 "
        f"encode:0.2 {END}"
    )
    assert written(schedule)[1] == written(training_schedule(2, 2, 0))[1], (
        "the other ranks do not notice"
    )


def schedules(pipeline: int):
    """Every shape of p ranks: (micro-batches, stages a rank, first trainable stage)."""
    for microbatches, stages_per_rank in itertools.product(range(1, 17), (1, 2, 3)):
        if pipeline > 1 or stages_per_rank == 1:
            for first in range(pipeline * stages_per_rank):
                yield microbatches, stages_per_rank, first


RANKS = sweep(range(1, 7), (1, 2, 3))


@pytest.mark.parametrize("pipeline", RANKS)
def test_every_schedule_passes_the_checker_and_keeps_its_promises(pipeline: int) -> None:
    draw = random.Random(pipeline)
    for microbatches, stages_per_rank, first in schedules(pipeline):
        if stages_per_rank > 1 and first > 0 and draw.random() < 0.75:
            continue  # of first trainable stages a quarter, to stay within seconds
        schedule = training_schedule(pipeline, microbatches, first, stages_per_rank)
        check_schedule(schedule, microbatches, first, stages_per_rank=stages_per_rank)
        for rank, instructions in enumerate(schedule):
            ops = [x.op for x in instructions]
            trained = sum(
                stage >= first for stage in range(rank, pipeline * stages_per_rank, pipeline)
            )
            assert ops.count(Op.FORWARD) == stages_per_rank * microbatches
            assert ops.count(Op.BACKWARD) == trained * microbatches
            assert ops.count(Op.LOAD) == ops.count(Op.ENCODE) == (microbatches if rank == 0 else 0)
            assert_receives_are_posted_at_most_one_compute_ahead(
                instructions, first_in_first_out=stages_per_rank > 1
            )
            if stages_per_rank == 1:
                assert {x.stage for x in instructions} <= {rank, -1}
                assert most_in_flight(instructions) <= (pipeline - rank if rank >= first else 0)
    for microbatches, stages_per_rank in {(m, v) for m, v, _ in schedules(pipeline)}:
        schedule = forward_schedule(pipeline, microbatches, stages_per_rank)
        check_schedule(schedule, microbatches, None, stages_per_rank=stages_per_rank)


# ---- slices on several ranks


def test_a_chain_of_two_slices_runs_the_hand_written_lists() -> None:
    """Two micro-batches, one stage a rank, only the last one trains; rank 0's slice is one
    ahead.
    """
    chain = (Encodes(1, (0, 2, 0)), Encodes(0, (1, 0, 1, 0, 0)))
    schedule = training_schedule(2, 2, 1, encodes=chain)
    check_schedule(schedule, 2, 1)
    assert written(schedule) == [
        "load:0.1 receive_features:0.0 forward:0.0 send_activation:0.0 load:0.2 encode:0.1 "
        "send_features:0.1 "
        f"receive_features:0.1 encode:0.2 send_features:0.2 forward:0.1 send_activation:0.1 {END}",
        "receive_activation:1.0 encode:1.0 send_features:1.0 forward:1.0 receive_activation:1.1 "
        "receive_features:1.1 backward:1.0 encode:1.1 send_features:1.1 forward:1.1 backward:1.1 "
        f"receive_features:1.2 {END}",
    ]
    begin = prelude(chain)
    check_prelude(begin, [1, 0])
    assert written(begin) == ["load:0.0 encode:0.0 send_features:0.0", "receive_features:1.0"]


@pytest.mark.parametrize("pipeline", RANKS[1:])
def test_every_chain_passes_the_checker_with_its_prelude_and_evaluation(pipeline: int) -> None:
    """Whatever the planner may place, also far beyond the next step, and slices that lead by any
    number.
    """
    draw = random.Random(pipeline)
    far = 0
    for ranks, stages_per_rank in itertools.product(((0,), *chains(pipeline)), (1, 2)):
        for microbatches in (1, 2, 5, 12):
            step = made_up_step(draw, pipeline, stages_per_rank, microbatches, ranks)
            options = [chain for _, chain in step.placed()]
            options = draw.sample(options, min(3, len(options)))
            if stages_per_rank == 1:
                lead, ahead = draw.randrange(1, microbatches + 1), draw.randrange(3 * microbatches)
                options.append(leading_encodes(step.lists(), ranks, lead, ahead))
            for chain in options:
                assert ranks_of(chain) == ranks
                schedule = step.lists(chain)
                check_schedule(
                    schedule,
                    microbatches,
                    step.first_trainable_stage,
                    stages_per_rank=stages_per_rank,
                )
                assert ahead_of(schedule) == ahead_along(chain)
                check_prelude(prelude(chain), ahead_along(chain))
                far += ahead_along(chain)[0] > microbatches
            rounds, lead = draw.randrange(1, 4 * pipeline), draw.randrange(1, 2 * pipeline)
            evaluation = forward_schedule(pipeline, rounds, stages_per_rank, ranks, lead)
            check_schedule(evaluation, rounds, None, stages_per_rank=stages_per_rank)
    assert far >= 3


CHAIN_OF_THREE = (
    Encodes(3, (0, 1, 1, 1, 0, 0, 0)),
    Encodes(1, (1, 1, 1, 0, 0, 0, 0)),
    Encodes(1, (0, 1, 1, 1, 0, 0, 0)),
)


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "first", "encodes"),
    [(2, 2, 0, None), (3, 4, 1, None), (3, 3, 0, CHAIN_OF_THREE)],
)
def test_the_checker_refuses_any_single_missing_or_repeated_instruction(
    pipeline, microbatches, first, encodes
) -> None:
    schedule = training_schedule(pipeline, microbatches, first, encodes=encodes)
    check_schedule(schedule, microbatches, first)
    for rank, instructions in enumerate(schedule):
        for i in range(len(instructions)):
            for broken in (
                [*instructions[:i], *instructions[i + 1 :]],
                [*instructions[: i + 1], *instructions[i:]],
            ):
                with pytest.raises(ValueError):
                    check_schedule(changed(schedule, rank, broken), microbatches, first)


@pytest.mark.parametrize("ahead", [(2, 1, 1), (3, 1, 0), (3, 2, 1)])
def test_the_checker_refuses_a_prelude_that_makes_too_little_or_too_much(
    ahead: tuple[int, ...],
) -> None:
    check_prelude(prelude(CHAIN_OF_THREE), [3, 1, 1])
    with pytest.raises(ValueError):
        check_prelude(prelude(CHAIN_OF_THREE), ahead)


def most_in_flight(instructions: tuple[Instruction, ...]) -> int:
    """Largest number of micro-batches that are kept for a backward which is still to come."""
    backwards = {(x.stage, x.microbatch) for x in instructions if x.op is Op.BACKWARD}
    kept, most = set(), 0
    for x in instructions:
        if x.op is Op.FORWARD and (x.stage, x.microbatch) in backwards:
            kept.add((x.stage, x.microbatch))
        elif x.op is Op.BACKWARD:
            kept.remove((x.stage, x.microbatch))
        most = max(most, len(kept))
    return most


def assert_receives_are_posted_at_most_one_compute_ahead(
    instructions: tuple[Instruction, ...], *, first_in_first_out: bool
) -> None:
    """With several stages a rank some are posted earlier: what was sent before one that is needed
    comes first.
    """
    used_by = {Op.RECEIVE_ACTIVATION: Op.FORWARD, Op.RECEIVE_GRADIENT: Op.BACKWARD}
    for i, x in enumerate(instructions):
        if x.op in used_by:
            use = instructions.index(Instruction(used_by[x.op], x.stage, x.microbatch), i)
            computes = [y for y in instructions[i:use] if y.op in COMPUTES]
            assert first_in_first_out or len(computes) <= 1, (str(x), [str(y) for y in computes])
