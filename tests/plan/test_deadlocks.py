"""Which pipelines can hang on GPUs: hand-made cases, a part of the grid, and that what hangs is
refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import pytest
from deadlocks import Ordering, Stuck, find_deadlock
from made_up_steps import chains, made_up_step
from schedule_check import check_schedule

from mmtrain.base.errors import UserError
from mmtrain.plan.instructions import Instruction, Op, Schedule, in_common_order
from mmtrain.plan.refusals import check_environment
from mmtrain.plan.schedule import (
    Chain,
    Encodes,
    forward_schedule,
    leading_encodes,
    prelude,
    training_schedule,
)

pytestmark = pytest.mark.slow

SETTING = {
    Ordering.LAUNCH_ORDER: (
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1"),
    ),
    Ordering.BLOCKING: (("CUDA_LAUNCH_BLOCKING", "1"),),
    Ordering.HOST_WAITS: (("TORCH_NCCL_BLOCKING_WAIT", "1"),),
    Ordering.DEVICE_WIDE_WAITS: (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
}


class Run(NamedTuple):
    """A run, and what its lists are."""

    what: str
    pipeline: int
    steps: tuple[Schedule, ...]  # prelude, two steps, an evaluation, a step


def made_up_runs(seed: int, pipelines: Iterable[int], microbatches: Iterable[int]) -> Iterator[Run]:
    """Encoders whole on rank 0 and in slices on every rank or some; placed by the planner, and with
    any lead.
    """
    draw = random.Random(seed)
    for p, v, m in product(pipelines, (1, 2), microbatches):
        for ranks in ((0,), *chains(p)):
            step = made_up_step(draw, p, v, m, ranks)
            options: list[Chain] = [chain for _, chain in step.placed()]
            options = draw.sample(options, min(2, len(options)))
            if v == 1:
                lead, ahead = draw.randrange(1, m + 1), draw.randrange(2 * m)
                options.append(leading_encodes(step.lists(), ranks, lead, ahead))
            evaluation = forward_schedule(
                p, draw.randrange(1, 4 * p), v, ranks, draw.choice([1, len(ranks), 2 * p])
            )
            for chain in options:
                training = step.lists(chain)
                what = (
                    f"pipeline {p}, {v} stages a rank, {m} micro-batches: "
                    f"{step.first_trainable_stage}, {chain}"
                )
                yield Run(what, p, (prelude(chain), training, training, evaluation, training))


@pytest.fixture(
    scope="module",
    params=[
        ((2, 4), (1, 5)),
        pytest.param(((2, 3, 4, 5, 8), range(1, 13)), marks=pytest.mark.nightly),
    ],
)
def runs(request) -> list[Run]:
    return list(made_up_runs(0, *request.param))


def lists(*ranks: str) -> Schedule:
    """`F0.1`: forward of stage 0, micro-batch 1; a and A send and receive what it makes, g and G
    its gradient.

    L0.1 loads and E0.1 encodes micro-batch 1 on rank 0; e sends what E makes, X receives what E or
    stage 0's F takes.
    """
    ops = {"F": Op.FORWARD, "B": Op.BACKWARD, "a": Op.SEND_ACTIVATION, "g": Op.SEND_GRADIENT}
    ops |= {"A": Op.RECEIVE_ACTIVATION, "G": Op.RECEIVE_GRADIENT}
    ops |= {"L": Op.LOAD, "E": Op.ENCODE, "e": Op.SEND_FEATURES, "X": Op.RECEIVE_FEATURES}
    return tuple(
        tuple(Instruction(ops[x[0]], int(x[1]), int(x[3])) for x in rank.split()) for rank in ranks
    )


def hangs(schedule: Schedule) -> set[Ordering]:
    return {ordering for ordering in Ordering if find_deadlock([schedule], ordering)}


def test_a_receive_that_both_ranks_post_ahead_hangs_where_computes_wait_for_all_before_them():
    """Rank 0 forwards 1 after it has asked for gradient 0, which rank 1 makes after it has asked
    for forward 1.
    """
    schedule = lists("F0.0 a0.0 G0.0 F0.1 a0.1 B0.0", "A1.0 F1.0 A1.1 B1.0 g1.0 F1.1")
    assert hangs(schedule) == {Ordering.BLOCKING, Ordering.DEVICE_WIDE_WAITS}
    assert find_deadlock([schedule], Ordering.DEVICE_WIDE_WAITS) == [Stuck(0, 0, 3), Stuck(1, 0, 3)]


def test_a_rank_that_uses_what_is_made_of_its_own_later_work_hangs_always():
    assert hangs(lists("F0.0 G0.0 B0.0 a0.0", "A1.0 F1.0 B1.0 g1.0")) == set(Ordering)


def test_the_common_order_of_two_ranks_is_the_hand_written_one():
    plain = lists(
        "F0.0 a0.0 G0.0 F0.1 a0.1 G0.1 B0.0 B0.1", "A1.0 F1.0 A1.1 B1.0 g1.0 F1.1 B1.1 g1.1"
    )
    ordered = lists(
        "F0.0 a0.0 G0.0 F0.1 a0.1 B0.0 G0.1 B0.1", "A1.0 F1.0 B1.0 g1.0 A1.1 F1.1 B1.1 g1.1"
    )
    assert in_common_order(plain) == ordered


def test_no_run_hangs_where_streams_work_by_themselves_or_hosts_wait(runs):
    """Nor where the first steps, which may load kernels, run in the common order."""
    assert len(runs) > 50
    for run in runs:
        first, second, *others = run.steps
        begun_safely = [in_common_order(first), in_common_order(second), *others]
        assert not find_deadlock(run.steps, Ordering.IDEAL), run.what
        assert not find_deadlock(run.steps, Ordering.HOST_WAITS), run.what
        assert not find_deadlock(begun_safely, Ordering.IDEAL), run.what


@pytest.mark.parametrize(
    ("group_of", "hangs"),
    [
        pytest.param(lambda message: "world", True, id="one for the job"),
        pytest.param(lambda message: message.kind, True, id="one a kind"),
        pytest.param(
            lambda message: frozenset(message.channel[:2]), True, id="one a pair of ranks"
        ),
        pytest.param(lambda message: message.channel, False, id="one a channel"),
    ],
)
def test_messages_that_share_a_process_group_hang_and_a_group_a_channel_does_not(group_of, hangs):
    """A rank has one queue a group: what it sends waits there for what it has asked for before."""
    shapes = [(p, 5, first, v) for p, v in product((2, 3, 4), (1, 2)) for first in range(p * v)]
    assert (
        any(
            find_deadlock([training_schedule(*shape)], Ordering.IDEAL, group_of) for shape in shapes
        )
        is hangs
    )


def test_no_run_hangs_in_the_common_order_under_any_ordering(runs):
    for run in runs[::3]:
        common = [in_common_order(schedule) for schedule in run.steps]
        assert not [ordering for ordering in Ordering if find_deadlock(common, ordering)], run.what


def test_whatever_hangs_for_a_setting_is_refused_with_that_setting(runs):
    hung = {
        (run.pipeline, ordering)
        for run in runs[::3]
        for ordering in Ordering
        if find_deadlock(run.steps, ordering)
    }
    assert {ordering for _, ordering in hung} == {
        Ordering.LAUNCH_ORDER,
        Ordering.BLOCKING,
        Ordering.DEVICE_WIDE_WAITS,
    }
    for pipeline, ordering in hung:
        for name, value in SETTING[ordering]:
            with pytest.raises(
                UserError, match=rf"^{name}={value} in the environment: .* Unset it"
            ):
                check_environment(pipeline, {name: value})


def test_settings_that_cannot_hang_are_not_refused():
    for settings in ([], *SETTING.values()):
        check_environment(1, dict(settings))
    check_environment(4, dict(SETTING[Ordering.HOST_WAITS]))
    for name, value in product(("CUDA_LAUNCH_BLOCKING", "NCCL_LAUNCH_ORDER_IMPLICIT"), ("0", "")):
        check_environment(4, {name: value})
    check_environment(4, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})


@pytest.mark.parametrize(
    ("pipeline", "stages_per_rank", "microbatches", "first"),
    [(2, 1, 3, 0), (4, 1, 5, 3), (3, 2, 7, 2)],
)
def test_the_common_order_does_the_same_work(
    pipeline: int, stages_per_rank: int, microbatches: int, first: int
):
    plain = training_schedule(pipeline, microbatches, first, stages_per_rank)
    ordered = in_common_order(plain)
    check_schedule(ordered, microbatches, first, stages_per_rank=stages_per_rank)
    for before, after in zip(plain, ordered, strict=True):
        receives = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT, Op.RECEIVE_FEATURES)
        assert [x for x in before if x.op not in receives] == [
            x for x in after if x.op not in receives
        ]


# ---- slices of the encoder on several ranks


def test_a_load_that_is_not_one_ahead_hangs_where_hosts_wait():
    """Rank 1 asks for micro-batch 1, whose number of tiles it must know, before it makes the
    features of 0.
    """
    other = "X1.0 X1.1 E1.0 e1.0 E1.1 e1.1 A1.0 F1.0 A1.1 F1.1"
    late = lists("L0.0 E0.0 e0.0 X0.0 F0.0 a0.0 L0.1 E0.1 e0.1 X0.1 F0.1 a0.1", other)
    assert Ordering.HOST_WAITS in hangs(late) and Ordering.IDEAL not in hangs(late)
    ahead = lists("L0.0 L0.1 E0.0 e0.0 X0.0 E0.1 e0.1 X0.1 F0.0 a0.0 F0.1 a0.1", other)
    assert Ordering.HOST_WAITS not in hangs(ahead)


def test_ranks_end_together_in_the_common_order_whatever_is_still_sent_to_them():
    """Rank 0 has nothing left to compute when the last slice makes features for the next step."""
    chain = (Encodes(2, (1, 1, 0)), Encodes(1, (0, 1, 0, 0, 1)))
    ordered = in_common_order(training_schedule(2, 2, 1, encodes=chain))
    check_schedule(ordered, 2, 1)
    assert ordered[0][-4] == Instruction(Op.RECEIVE_FEATURES, 0, 2)
