"""Instruction lists: some written by hand, all small pipelines through the checker, and the checker itself tested."""

from __future__ import annotations

import itertools
import random

import pytest
from made_up_steps import ahead_along, chains, made_up_step
from schedule_check import ahead_of, check_prelude, check_schedule, most_buffered

from mmtrain.plan.instructions import COMPUTES, Instruction, Op, Schedule
from mmtrain.plan.schedule import Encodes, forward_schedule, leading_encodes, prelude, ranks_of, training_schedule

END = ("reduce_gradients", "reduce_statistics", "optimizer_step")


def written(schedule: Schedule) -> list[list[str]]:
    """`op stage.microbatch`, short enough to write a whole schedule by hand."""
    return [[x.op.value if x.stage < 0 else f"{x.op.value} {x.stage}.{x.microbatch}" for x in r] for r in schedule]


def changed(schedule: Schedule, rank: int, instructions: list[Instruction]) -> Schedule:
    return (*schedule[:rank], tuple(instructions), *schedule[rank + 1 :])


def test_two_ranks_and_two_microbatches_run_the_hand_written_lists() -> None:
    assert written(training_schedule(2, 2, 0)) == [
        [
            "load 0.0",
            "encode 0.0",
            "forward 0.0",
            "send_activation 0.0",
            "receive_gradient 0.0",
            "load 0.1",
            "encode 0.1",
            "forward 0.1",
            "send_activation 0.1",
            "receive_gradient 0.1",
            "backward 0.0",
            "backward 0.1",
            *END,
        ],
        [
            "receive_activation 1.0",
            "forward 1.0",
            "receive_activation 1.1",
            "backward 1.0",
            "send_gradient 1.0",
            "forward 1.1",
            "backward 1.1",
            "send_gradient 1.1",
            *END,
        ],
    ]


def test_a_rank_upstream_of_the_first_trainable_stage_only_runs_forwards() -> None:
    assert written(training_schedule(2, 2, 1)) == [
        [
            "load 0.0",
            "encode 0.0",
            "forward 0.0",
            "send_activation 0.0",
            "load 0.1",
            "encode 0.1",
            "forward 0.1",
            "send_activation 0.1",
            *END,
        ],
        [
            "receive_activation 1.0",
            "forward 1.0",
            "receive_activation 1.1",
            "backward 1.0",
            "forward 1.1",
            "backward 1.1",
            *END,
        ],
    ]


def test_one_rank_is_plain_gradient_accumulation() -> None:
    assert written(training_schedule(1, 2, 0)) == [
        [
            "load 0.0",
            "encode 0.0",
            "forward 0.0",
            "backward 0.0",
            "load 0.1",
            "encode 0.1",
            "forward 0.1",
            "backward 0.1",
            *END,
        ]
    ]


def test_evaluation_runs_forwards_and_reduces_statistics_only() -> None:
    assert written(forward_schedule(2, 1)) == [
        ["load 0.0", "encode 0.0", "forward 0.0", "send_activation 0.0", "reduce_statistics"],
        ["receive_activation 1.0", "forward 1.0", "reduce_statistics"],
    ]


def test_encodes_stand_where_they_are_told_and_reach_into_the_next_step() -> None:
    """Two micro-batches, the first encoded when a step begins: it encodes the second, and at its end the next one."""
    schedule = training_schedule(2, 2, 0, encodes=(Encodes(1, (0, 0, 0, 1, 1)), None))
    with pytest.raises(ValueError, match=r"FORWARD\(stage 0, micro-batch 1\): the ENCODE that it needs does not stand"):
        check_schedule(schedule, 2, 0)
    schedule = training_schedule(2, 2, 0, encodes=(Encodes(1, (0, 1, 0, 0, 1)), None))
    check_schedule(schedule, 2, 0)
    assert written(schedule)[0] == [
        "forward 0.0",
        "send_activation 0.0",
        "receive_gradient 0.0",
        "load 0.1",
        "encode 0.1",
        "forward 0.1",
        "send_activation 0.1",
        "receive_gradient 0.1",
        "backward 0.0",
        "backward 0.1",
        "load 0.2",
        "encode 0.2",
        *END,
    ]
    assert written(schedule)[1] == written(training_schedule(2, 2, 0))[1], "the other ranks do not notice"
    assert most_buffered(schedule) == 1


def schedules(pipeline: int):
    """Every shape of p ranks: (micro-batches, stages a rank, first trainable stage)."""
    for microbatches, stages_per_rank in itertools.product(range(1, 17), (1, 2, 3)):
        if pipeline > 1 or stages_per_rank == 1:
            for first in range(pipeline * stages_per_rank):
                yield microbatches, stages_per_rank, first


RANKS = [1, 2, 3, 4, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (5, 6))]


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
            trained = sum(stage >= first for stage in range(rank, pipeline * stages_per_rank, pipeline))
            assert ops.count(Op.FORWARD) == stages_per_rank * microbatches
            assert ops.count(Op.BACKWARD) == trained * microbatches
            assert ops.count(Op.LOAD) == ops.count(Op.ENCODE) == (microbatches if rank == 0 else 0)
            assert_receives_are_posted_at_most_one_compute_ahead(instructions, first_in_first_out=stages_per_rank > 1)
            if stages_per_rank == 1:
                assert {x.stage for x in instructions} <= {rank, -1}
                assert most_in_flight(instructions) <= (pipeline - rank if rank >= first else 0)
    for microbatches, stages_per_rank in {(m, v) for m, v, _ in schedules(pipeline)}:
        schedule = forward_schedule(pipeline, microbatches, stages_per_rank)
        check_schedule(schedule, microbatches, None, stages_per_rank=stages_per_rank)


@pytest.mark.parametrize("pipeline", RANKS[1:])
def test_every_schedule_with_prefetch_passes_the_checker(pipeline: int) -> None:
    draw = random.Random(pipeline)
    with_prefetch = 0
    for microbatches, stages_per_rank in itertools.product((1, 2, 5, 8, 16), (1, 2, 3)):
        step = made_up_step(draw, pipeline, stages_per_rank, microbatches, (0,))
        for exactly in (None, draw.randrange(microbatches + 1)):
            chain = step.best(exactly)
            schedule = step.lists(chain)
            check_schedule(schedule, microbatches, step.first_trainable_stage, stages_per_rank=stages_per_rank)
            check_prelude(prelude(chain), ahead_along(chain))
            assert exactly is None or ahead_along(chain) == [exactly]
            with_prefetch += ahead_along(chain) != [0]
    assert with_prefetch > 5


# ---- slices on several ranks


def test_a_chain_of_two_slices_runs_the_hand_written_lists() -> None:
    """Two micro-batches, one stage a rank, only the last one trains; rank 0's slice is one ahead."""
    chain = (Encodes(1, (0, 2, 0)), Encodes(0, (1, 0, 1, 0, 0)))
    schedule = training_schedule(2, 2, 1, encodes=chain)
    check_schedule(schedule, 2, 1)
    assert written(schedule) == [
        [
            "load 0.1",
            "receive_features 0.0",
            "forward 0.0",
            "send_activation 0.0",
            "load 0.2",
            "encode 0.1",
            "send_features 0.1",
            "receive_features 0.1",
            "encode 0.2",
            "send_features 0.2",
            "forward 0.1",
            "send_activation 0.1",
            *END,
        ],
        [
            "receive_activation 1.0",
            "encode 1.0",
            "send_features 1.0",
            "forward 1.0",
            "receive_activation 1.1",
            "receive_features 1.1",
            "backward 1.0",
            "encode 1.1",
            "send_features 1.1",
            "forward 1.1",
            "backward 1.1",
            "receive_features 1.2",
            *END,
        ],
    ]
    begin = prelude(chain)
    check_prelude(begin, [1, 0])
    assert written(begin) == [["load 0.0", "encode 0.0", "send_features 0.0"], ["receive_features 1.0"]]


@pytest.mark.parametrize("pipeline", RANKS[1:])
def test_every_chain_passes_the_checker_with_its_prelude_and_evaluation(pipeline: int) -> None:
    """Whatever the planner may place, also far beyond the next step, and slices that lead by any number."""
    draw = random.Random(pipeline)
    far = 0
    for ranks, stages_per_rank in itertools.product(chains(pipeline), (1, 2)):
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
                check_schedule(schedule, microbatches, step.first_trainable_stage, stages_per_rank=stages_per_rank)
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


def test_the_checker_refuses_any_single_missing_or_repeated_instruction_of_a_chain() -> None:
    schedule = training_schedule(3, 3, 0, encodes=CHAIN_OF_THREE)
    check_schedule(schedule, 3, 0)
    for rank, instructions in enumerate(schedule):
        for i in range(len(instructions)):
            for broken in ([*instructions[:i], *instructions[i + 1 :]], [*instructions[: i + 1], *instructions[i:]]):
                with pytest.raises(ValueError):
                    check_schedule(changed(schedule, rank, broken), 3, 0)


def test_the_checker_names_a_slice_that_is_further_ahead_than_the_one_before_it() -> None:
    chain = (CHAIN_OF_THREE[1], CHAIN_OF_THREE[0], CHAIN_OF_THREE[2])
    with pytest.raises(ValueError, match=r"slices of the chain \(0, 1, 2\) are ahead by \[1, 3, 1\]: none may be more"):
        check_schedule(training_schedule(3, 3, 0, encodes=chain), 3, 0)


def test_the_checker_names_features_that_are_used_before_they_come() -> None:
    """Rank 0 uses what the last slice makes after rank 0's forward of it."""
    schedule = training_schedule(2, 2, 0, encodes=(Encodes(0, (1, 1, 0, 0, 0)), Encodes(0, (0, 0, 2, 0, 0))))
    with pytest.raises(ValueError, match="every rank waits"):
        check_schedule(schedule, 2, 0)


def test_the_checker_names_a_load_that_comes_too_late() -> None:
    schedule = training_schedule(3, 3, 0, encodes=CHAIN_OF_THREE)
    instructions = list(schedule[0])
    load = instructions.pop(instructions.index(Instruction(Op.LOAD, 0, 5)))
    instructions.insert(instructions.index(Instruction(Op.ENCODE, 0, 5)), load)
    with pytest.raises(ValueError, match="LOADs must be one ahead"):
        check_schedule(changed(schedule, 0, instructions), 3, 0)


@pytest.mark.parametrize("ahead", [(2, 1, 1), (3, 1, 0), (3, 2, 1)])
def test_the_checker_refuses_a_prelude_that_makes_too_little_or_too_much(ahead: tuple[int, ...]) -> None:
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
    """With several stages a rank some are posted earlier: what was sent before one that is needed comes first."""
    used_by = {Op.RECEIVE_ACTIVATION: Op.FORWARD, Op.RECEIVE_GRADIENT: Op.BACKWARD}
    for i, x in enumerate(instructions):
        if x.op in used_by:
            use = instructions.index(Instruction(used_by[x.op], x.stage, x.microbatch), i)
            computes = [y for y in instructions[i:use] if y.op in COMPUTES]
            assert first_in_first_out or len(computes) <= 1, (str(x), [str(y) for y in computes])


@pytest.mark.parametrize(("pipeline", "microbatches", "first"), [(2, 2, 0), (3, 4, 1)])
def test_the_checker_refuses_any_single_missing_instruction(pipeline: int, microbatches: int, first: int) -> None:
    schedule = training_schedule(pipeline, microbatches, first)
    for rank, instructions in enumerate(schedule):
        for i in range(len(instructions)):
            with pytest.raises(ValueError):
                broken = changed(schedule, rank, [*instructions[:i], *instructions[i + 1 :]])
                check_schedule(broken, microbatches, first)


@pytest.mark.parametrize(("pipeline", "microbatches", "first"), [(2, 2, 0), (3, 4, 1)])
def test_the_checker_refuses_any_single_repeated_instruction(pipeline: int, microbatches: int, first: int) -> None:
    schedule = training_schedule(pipeline, microbatches, first)
    for rank, instructions in enumerate(schedule):
        for i in range(len(instructions)):
            with pytest.raises(ValueError):
                broken = changed(schedule, rank, [*instructions[: i + 1], *instructions[i:]])
                check_schedule(broken, microbatches, first)


def test_the_checker_names_a_dropped_send() -> None:
    schedule = training_schedule(2, 2, 0)
    broken = changed(schedule, 0, [x for x in schedule[0] if x != Instruction(Op.SEND_ACTIVATION, 0, 1)])
    with pytest.raises(
        ValueError, match=r"rank 0 to rank 1: rank 1, .*RECEIVE_ACTIVATION\(stage 1, micro-batch 1\): no matching send"
    ):
        check_schedule(broken, 2, 0)


def test_the_checker_names_a_swapped_pair_of_sends() -> None:
    schedule = training_schedule(2, 3, 0)
    instructions = list(schedule[1])
    a, b = (instructions.index(Instruction(Op.SEND_GRADIENT, 1, k)) for k in (0, 1))
    instructions[a], instructions[b] = instructions[b], instructions[a]
    with pytest.raises(ValueError, match=r"SEND_GRADIENT\(stage 1, micro-batch 1\) meets .*micro-batch 0\)"):
        check_schedule(changed(schedule, 1, instructions), 3, 0)


def test_the_checker_names_a_message_that_is_sent_and_received_twice() -> None:
    schedule = training_schedule(2, 1, 0)
    send, receive = Instruction(Op.SEND_ACTIVATION, 0, 0), Instruction(Op.RECEIVE_ACTIVATION, 1, 0)
    at = schedule[0].index(send)
    twice = changed(schedule, 0, [*schedule[0][:at], send, *schedule[0][at:]])
    twice = changed(twice, 1, [receive, *schedule[1]])
    with pytest.raises(ValueError, match=r"SEND_ACTIVATION\(stage 0, micro-batch 0\): sent a second time"):
        check_schedule(twice, 1, 0)


def test_the_checker_names_a_backward_before_its_forward() -> None:
    schedule = training_schedule(2, 2, 0)
    instructions = list(schedule[1])
    a, b = (instructions.index(Instruction(op, 1, 0)) for op in (Op.FORWARD, Op.BACKWARD))
    instructions[a], instructions[b] = instructions[b], instructions[a]
    with pytest.raises(ValueError, match=r"rank 1, .*BACKWARD\(stage 1, micro-batch 0\): comes before its FORWARD"):
        check_schedule(changed(schedule, 1, instructions), 2, 0)


def test_the_checker_names_a_send_before_its_compute() -> None:
    schedule = training_schedule(2, 1, 0)
    instructions = list(schedule[0])
    send = instructions.pop(instructions.index(Instruction(Op.SEND_ACTIVATION, 0, 0)))
    with pytest.raises(ValueError, match=r"SEND_ACTIVATION\(stage 0, micro-batch 0\): sent before it is computed"):
        check_schedule(changed(schedule, 0, [send, *instructions]), 1, 0)


def test_the_checker_names_all_ranks_of_a_deadlock() -> None:
    schedule = training_schedule(2, 2, 0)
    forwards_wait_for_backward = [
        Instruction(Op.RECEIVE_GRADIENT, 0, 0),
        Instruction(Op.LOAD, 0, 0),
        Instruction(Op.ENCODE, 0, 0),
        Instruction(Op.FORWARD, 0, 0),
        Instruction(Op.BACKWARD, 0, 0),  # rank 1 cannot have sent this gradient: its activation is sent only below
        Instruction(Op.SEND_ACTIVATION, 0, 0),
    ]
    rest = [x for x in schedule[0] if x not in forwards_wait_for_backward]
    with pytest.raises(ValueError, match=r"deadlock.*rank 0, instruction 4, BACKWARD.*rank 1, .*FORWARD\(stage 1"):
        check_schedule(changed(schedule, 0, forwards_wait_for_backward + rest), 2, 0)


def test_the_checker_refuses_gradient_work_upstream_of_the_first_trainable_stage() -> None:
    with pytest.raises(ValueError, match=r"BACKWARD\(stage 0, micro-batch 0\): nothing at or before this stage trains"):
        check_schedule(training_schedule(2, 1, 0), 1, 1)
    schedule = training_schedule(2, 1, 1)
    with_gradient_message = changed(
        changed(schedule, 0, [Instruction(Op.RECEIVE_GRADIENT, 0, 0), *schedule[0]]),
        1,
        [*schedule[1][:-3], Instruction(Op.SEND_GRADIENT, 1, 0), *schedule[1][-3:]],
    )
    with pytest.raises(ValueError, match="gradient traffic upstream of the first trainable stage"):
        check_schedule(with_gradient_message, 1, 1)


def test_the_checker_understands_several_stages_per_rank() -> None:
    """Four stages on two ranks, written by hand: stages 0 and 2 on rank 0, 1 and 3 on rank 1, one micro-batch."""

    def lists(*ranks: str) -> Schedule:
        ops = {
            "L": Op.LOAD,
            "E": Op.ENCODE,
            "F": Op.FORWARD,
            "B": Op.BACKWARD,
            "a": Op.SEND_ACTIVATION,
            "g": Op.SEND_GRADIENT,
        }
        ops |= {"A": Op.RECEIVE_ACTIVATION, "G": Op.RECEIVE_GRADIENT}
        end = [Instruction(Op(op)) for op in END]
        return tuple((*(Instruction(ops[x[0]], int(x[1]), 0) for x in r.split()), *end) for r in ranks)

    good = lists("L0 E0 F0 a0 A2 F2 a2 G2 B2 g2 G0 B0", "A1 F1 a1 A3 F3 B3 g3 G1 B1 g1")
    check_schedule(good, 1, 0, stages_per_rank=2)
    with pytest.raises(ValueError, match=r"deadlock"):
        late_forward = lists("L0 E0 F0 a0 G2 A2 F2 B2 a2 g2 G0 B0", "A1 F1 a1 A3 F3 B3 g3 G1 B1 g1")
        check_schedule(late_forward, 1, 0, stages_per_rank=2)
    with pytest.raises(ValueError, match=r"this stage is not on this rank"):
        check_schedule(good, 1, 0)
