"""The order of work of every rank in one step, as lists of instructions: what the engine runs and
is simulated.

Stage `s` lives on pipeline rank `s % pipeline`. With one stage a rank, training is 1F1B: rank r
first runs `pipeline - r - 1` forwards, then one forward and one backward in turn, so it never keeps
more than `pipeline - r` micro-batches for backward. With several it is interleaved 1F1B:
micro-batches go round the ranks in groups of `pipeline`, and the idle share falls from (p - 1) / (m
+ p - 1) towards (p - 1) / (v m + p - 1) for v stages a rank, at the price of v times the messages.
Stages upstream of the first trainable one run forwards only.

The vision encoder has instructions of its own, LOAD and ENCODE. While it is frozen it may be cut
into **slices**, whole blocks, one a rank; the **chain** is the ranks with a slice, rank 0 first. A
micro-batch's tiles go through the chain ahead of need, into coming steps too, wherever its ranks
would wait (`Encodes`). A receive must know how many tiles a micro-batch has: in a chain of several
rank 0 loads one micro-batch ahead.

Messages are part of the lists. A receive is posted one compute (FORWARD or BACKWARD; for what
slices send, ENCODE too) ahead of its use and waited for at that use. A send is asynchronous and
waited for at the step's end: waiting inside the step can deadlock. Features for coming steps are
received at the end of the step that sends them.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmtrain.plan.instructions import (
    COMPUTES,
    EVALUATION_END,
    TRAINING_END,
    Instruction,
    Message,
    Op,
    Schedule,
    needed_before,
    sent_after,
)

MESSAGES_POSTED_AHEAD = 1


@dataclass(frozen=True, slots=True)
class Encodes:
    """Where a rank runs its slice: `before[i]` micro-batches right before its i-th compute,
    `before[-1]` at the end.

    The slice is `ahead` micro-batches of coming steps ahead when a step begins, and again when it
    ends.
    """

    ahead: int
    before: tuple[int, ...]


Chain = tuple[Encodes | None, ...]  # per pipeline rank; None: it holds no slice


def training_schedule(
    pipeline: int,
    microbatches: int,
    first_trainable_stage: int,
    stages_per_rank: int = 1,
    encodes: Chain | None = None,
) -> Schedule:
    """One training step, one list of instructions per pipeline rank.

    `encodes` None: rank 0 encodes each micro-batch right before stage 0's forward of it. Sources of
    the orders: PipeDream-flush and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2).
    """
    stages = pipeline * stages_per_rank
    assert microbatches >= 1 and 0 <= first_trainable_stage < stages
    orders = _training_orders(pipeline, microbatches, first_trainable_stage, stages_per_rank)
    encodes = encodes or leading_encodes(orders, (0,), 1)
    orders = _with_encodes(orders, microbatches, encodes)
    return _with_messages(orders, stages, first_trainable_stage, ranks_of(encodes), TRAINING_END)


@functools.cache
def forward_schedule(
    pipeline: int,
    microbatches: int,
    stages_per_rank: int = 1,
    chain: tuple[int, ...] = (0,),
    lead: int = 1,
) -> Schedule:
    """One evaluation pass: forwards only, then the statistics are reduced.

    Each slice, on the pipeline ranks `chain`, begins with `lead` micro-batches, then encodes one
    before each forward.
    """
    assert pipeline >= 1 and microbatches >= 1
    stages = pipeline * stages_per_rank
    orders = [
        _in_groups(rank, pipeline, stages, microbatches, Op.FORWARD) for rank in range(pipeline)
    ]
    encodes = leading_encodes(orders, chain, min(lead, microbatches))
    return _with_messages(
        _with_encodes(orders, microbatches, encodes), stages, stages, chain, EVALUATION_END
    )


def prelude(encodes: Chain) -> Schedule:
    """What comes before the first step of a process: every slice encodes what it is ahead when a
    step begins.
    """
    orders = [
        [] if place is None else [Instruction(Op.ENCODE, rank, k) for k in range(place.ahead)]
        for rank, place in enumerate(encodes)
    ]
    return _with_messages(orders, len(orders), len(orders), ranks_of(encodes), ())


def ranks_of(encodes: Chain) -> tuple[int, ...]:
    return tuple(rank for rank, place in enumerate(encodes) if place is not None)


def _in_groups(
    rank: int, pipeline: int, stages: int, microbatches: int, op: Op, first: int = 0
) -> list[Instruction]:
    """A rank's computes of one kind, stages from `first` on: groups of `pipeline` micro-batches,
    stage by stage.
    """
    stages_here = range(rank, stages, pipeline)
    order = []
    for begin in range(0, microbatches, pipeline):
        group = range(begin, min(begin + pipeline, microbatches))
        for stage in reversed(stages_here) if op is Op.BACKWARD else stages_here:
            order += [Instruction(op, stage, k) for k in group if stage >= first]
    return order


@functools.lru_cache(maxsize=256)  # the search asks again for each place of the encoder
def _training_orders(
    pipeline: int, microbatches: int, first: int, stages_per_rank: int
) -> list[list[Instruction]]:
    """Record a run in which every compute takes one tick and every rank does the first of its rules
    that it can.

    1. A backward, once warmed up; but after a backward a forward, if one may run. 2. A forward, if
       fewer computes are
    kept for backward than the rank's limit. Megatron's formula does not hold where a rank mixes
    frozen and trained stages, nor for a number of micro-batches that is no multiple of `pipeline`.
    """
    stages = pipeline * stages_per_rank
    forwards = [
        _in_groups(rank, pipeline, stages, microbatches, Op.FORWARD) for rank in range(pipeline)
    ]
    backwards = [
        _in_groups(rank, pipeline, stages, microbatches, Op.BACKWARD, first)
        for rank in range(pipeline)
    ]
    # One more than the forwards that 1F1B and Megatron's interleaved 1F1B begin with.
    per_later_rank = 1 if stages_per_rank == 1 else 2
    limit = [
        per_later_rank * (pipeline - rank - 1) + (stages_per_rank - 1) * pipeline + 1
        for rank in range(pipeline)
    ]
    orders: list[list[Instruction]] = [[] for _ in range(pipeline)]
    kept = [0] * pipeline
    done: dict[Instruction, int] = {}  # the tick after which it is done
    tick = 0

    def ready(compute: Instruction) -> bool:
        op, stage, k = compute.op, compute.stage, compute.microbatch
        if op is Op.FORWARD:
            needed = [Instruction(op, stage - 1, k)] if stage else []
        else:
            needed = [Instruction(Op.FORWARD, stage, k)]
            needed += [Instruction(op, stage + 1, k)] if stage + 1 < stages else []
        return all(done.get(x, tick) < tick for x in needed)

    def may_forward(rank: int) -> bool:
        return (
            bool(forwards[rank])
            and ready(forwards[rank][0])
            and (forwards[rank][0].stage < first or kept[rank] < limit[rank])
        )

    def choose(rank: int) -> Instruction | None:
        order = orders[rank]
        warm = not forwards[rank] or kept[rank] >= limit[rank] or len(order) >= limit[rank] - 1
        may_backward = warm and bool(backwards[rank]) and ready(backwards[rank][0])
        just_went_back = bool(order) and order[-1].op is Op.BACKWARD
        if may_backward and not (just_went_back and may_forward(rank) and kept[rank] < limit[rank]):
            return backwards[rank].pop(0)
        return forwards[rank].pop(0) if may_forward(rank) else None

    while any(forwards) or any(backwards):
        chosen = [choose(rank) for rank in range(pipeline)]
        for rank, compute in enumerate(chosen):
            if compute is not None:
                orders[rank].append(compute)
                done[compute] = tick
                if compute.stage >= first:
                    kept[rank] += 1 if compute.op is Op.FORWARD else -1
        if not any(chosen) and tick > max(done.values()):
            # A last group smaller than `pipeline` can leave all limits reached: the deepest forward
            # may go on.
            waiting = [
                (forwards[rank][0].stage, rank) for rank in range(pipeline) if forwards[rank]
            ]
            waiting = [(stage, rank) for stage, rank in waiting if ready(forwards[rank][0])]
            assert waiting, "the recorded run cannot go on"
            limit[max(waiting)[1]] += 1
        tick += 1
    return orders


def _with_encodes(
    orders: Sequence[Sequence[Instruction]], microbatches: int, encodes: Chain
) -> list[Sequence[Instruction]]:
    merged: list[Sequence[Instruction]] = []
    for rank, (order, place) in enumerate(zip(orders, encodes, strict=True)):
        if place is None:
            merged.append(order)
            continue
        result, encoded = [], place.ahead
        for compute, count in zip([*order, None], place.before, strict=True):
            result += [Instruction(Op.ENCODE, rank, encoded + i) for i in range(count)]
            encoded += count
            if compute is not None:
                result.append(compute)
        assert encoded == place.ahead + microbatches, (
            "a step encodes as many micro-batches as it uses"
        )
        merged.append(result)
    return merged


def leading_encodes(
    schedule: Sequence[Sequence[Instruction]], chain: Sequence[int], lead: int, ahead: int = 0
) -> Chain:
    """Each slice encodes `lead` micro-batches first, then one before each later forward of its
    rank's first stage.

    With one stage a rank, and in evaluations, any lead and chain finishes; other lists surely do
    where all is encoded first.
    """
    places: list[Encodes | None] = [None] * len(schedule)
    for rank in chain:
        computes = [x for x in schedule[rank] if x.op in COMPUTES]
        before = [int(x.op is Op.FORWARD and x.stage == rank) for x in computes] + [0]
        begins = [i for i, count in enumerate(before) if count]
        before[0] += lead - 1
        for i in begins[len(begins) - lead + 1 :]:
            before[i] -= 1
        places[rank] = Encodes(ahead, tuple(before))
    return tuple(places)


def _with_messages(
    orders: Sequence[Sequence[Instruction]],
    stages: int,
    first_trainable_stage: int,
    chain: Sequence[int],
    end: Sequence[Op],
) -> Schedule:
    """Add LOAD, sends, receives and the step's end to each rank's computes."""
    ranks = len(orders)
    # by channel, in the order sent
    incoming: dict[tuple[int, int, str], deque[Message]] = defaultdict(deque)
    for order in orders:
        for x in order:
            message = sent_after(x, ranks, stages, first_trainable_stage, chain)
            if message is not None:
                incoming[message.channel].append(message)
    # else an earlier step has sent it
    to_come = {message for messages in incoming.values() for message in messages}

    def receives_for(x: Instruction) -> Iterator[Instruction]:
        """What `x` needs and is not posted; a channel is first in, first out, so all that was sent
        before it, too.
        """
        needed = needed_before(x, ranks, stages, chain)
        while needed in to_come:
            message = incoming[needed.channel].popleft()
            to_come.remove(message)
            yield message.receive

    schedule = []
    for rank, order in enumerate(orders):
        computes = [x for x in order if x.op in COMPUTES]
        begun = 0
        instructions: list[Instruction] = []
        to_load = deque(x.microbatch for x in order if x.op is Op.ENCODE and rank == 0)
        if len(chain) > 1 and to_load:
            instructions.append(Instruction(Op.LOAD, 0, to_load.popleft()))
        for i, x in enumerate(order):
            for soon in computes[begun : begun + 1 + MESSAGES_POSTED_AHEAD]:
                if soon.op is Op.BACKWARD or soon.stage > 0:
                    instructions += receives_for(soon)
            if x.op is Op.ENCODE and to_load:
                instructions.append(Instruction(Op.LOAD, 0, to_load.popleft()))
            for soon in order[i : i + 1 + MESSAGES_POSTED_AHEAD]:
                if soon.op is Op.ENCODE or (soon.op is Op.FORWARD and soon.stage == 0):
                    instructions += receives_for(soon)
            instructions.append(x)
            begun += x.op in COMPUTES
            if (message := sent_after(x, ranks, stages, first_trainable_stage, chain)) is not None:
                instructions.append(Instruction(Op(f"send_{message.kind}"), x.stage, x.microbatch))
        for channel, messages in incoming.items():
            if channel[1] == rank and channel[2] == "features":
                instructions += [message.receive for message in messages]
        schedule.append((*instructions, *map(Instruction, end)))
    return tuple(schedule)
