"""The order of work of every rank in one step, as lists of instructions: what the engine runs and is simulated.

A rank holds `stages_per_rank` stages: stage `s` lives on pipeline rank `s % pipeline`. With one stage a rank, training
is 1F1B: rank r first runs `pipeline - r - 1` forwards, then one forward and one backward in turn, so it never keeps
more than `pipeline - r` micro-batches for backward. With several it is interleaved 1F1B: micro-batches go round the
ranks in groups of `pipeline`, and the idle share falls from (p - 1) / (m + p - 1) towards (p - 1) / (v m + p - 1) for v
stages a rank, at the price of v times the messages. Stages upstream of the first trainable one run forwards only:
nothing there needs a gradient.

The vision encoder has instructions of its own, LOAD and ENCODE: while it is frozen its features are
prefetched, for the next step too, wherever rank 0 would wait (`Encodes`).

Messages are part of the lists. A receive is posted one compute (FORWARD or BACKWARD) ahead of its use and waited for at
that use; a send is asynchronous and waited for at the step's end (waiting inside the step deadlocked 175 of 2,528
schedules of a prototype). Messages of one (source rank, destination rank, kind) arrive in the order they were sent, so
both sides must list them in the same order: tests prove that, and that every rank reaches its end.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MESSAGES_POSTED_AHEAD = 1


class Op(StrEnum):
    """What a rank can be told to do; `stage` and `microbatch` of the instruction say where and for which data."""

    LOAD = "load"  # stage 0: read a micro-batch
    ENCODE = "encode"  # stage 0: the vision encoder's forward, right after LOAD
    FORWARD = "forward"  # all but the encoder
    BACKWARD = "backward"
    SEND_ACTIVATION = "send_activation"  # output of `stage`, to stage + 1
    RECEIVE_ACTIVATION = "receive_activation"  # post the receive of the input of `stage`, from stage - 1
    SEND_GRADIENT = "send_gradient"  # gradient of the input of `stage`, to stage - 1
    RECEIVE_GRADIENT = "receive_gradient"  # post the receive of the gradient of the output of `stage`, from stage + 1
    REDUCE_GRADIENTS = "reduce_gradients"
    REDUCE_STATISTICS = "reduce_statistics"
    OPTIMIZER_STEP = "optimizer_step"


COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT})
# Every rank ends a step with these, also one with nothing to train: it takes part in the same collectives.
TRAINING_END = (Op.REDUCE_GRADIENTS, Op.REDUCE_STATISTICS, Op.OPTIMIZER_STEP)
EVALUATION_END = (Op.REDUCE_STATISTICS,)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One piece of work; stage and micro-batch are -1 where the whole rank is meant.

    Micro-batches count from 0 in each step; in LOAD and ENCODE, `microbatches_per_step` + k is the k-th of the next.
    """

    op: Op
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        return self.op.name if self.stage < 0 else f"{self.op.name}(stage {self.stage}, micro-batch {self.microbatch})"


Schedule = tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True)
class Encodes:
    """Where rank 0 runs the encoder: `before[i]` micro-batches right before its i-th compute, `before[-1]` at the end.

    A step begins with the features of its first `prefetched` micro-batches at hand, and leaves as many of the next.
    """

    prefetched: int
    before: tuple[int, ...]


class Message(NamedTuple):
    """What crosses from one rank to another."""

    source: int  # rank
    destination: int  # rank
    kind: str  # "activation" or "gradient"
    consumer: int  # stage that uses it
    microbatch: int

    @property
    def channel(self) -> tuple[int, int, str]:
        """Messages of one channel arrive in the order in which they were sent."""
        return self.source, self.destination, self.kind

    @property
    def receive(self) -> Instruction:
        """What its destination posts."""
        op = Op.RECEIVE_ACTIVATION if self.kind == "activation" else Op.RECEIVE_GRADIENT
        return Instruction(op, self.consumer, self.microbatch)


class Step(NamedTuple):
    """An instruction of a rank, with the message that it sends, posts the receive of or, if it computes, waits for."""

    rank: int
    instruction: Instruction
    message: Message | None


def training_schedule(
    pipeline: int,
    microbatches: int,
    first_trainable_stage: int,
    stages_per_rank: int = 1,
    encodes: Encodes | None = None,
) -> Schedule:
    """One training step, one list of instructions per pipeline rank.

    Backward runs on stages >= first_trainable_stage only; gradients are sent by stages > first_trainable_stage only.
    `encodes` None: each micro-batch is encoded right before stage 0's forward of it. Sources of the orders:
    PipeDream-flush and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    """
    stages = pipeline * stages_per_rank
    assert microbatches >= 1 and 0 <= first_trainable_stage < stages
    first_rank, *others = _training_orders(pipeline, microbatches, first_trainable_stage, stages_per_rank)
    orders = [_with_encodes(first_rank, microbatches, encodes), *others]
    return _with_messages(orders, stages, first_trainable_stage, TRAINING_END)


@functools.cache
def forward_schedule(pipeline: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """One evaluation pass: forwards only, then the statistics are reduced."""
    assert pipeline >= 1 and microbatches >= 1
    stages = pipeline * stages_per_rank
    orders = [_in_groups(rank, pipeline, stages, microbatches, Op.FORWARD) for rank in range(pipeline)]
    orders[0] = _with_encodes(orders[0], microbatches, None)
    return _with_messages(orders, stages, stages, EVALUATION_END)


def _in_groups(rank: int, pipeline: int, stages: int, microbatches: int, op: Op, first: int = 0) -> list[Instruction]:
    """A rank's computes of one kind, stages from `first` on: groups of `pipeline` micro-batches, stage by stage."""
    mine = range(rank, stages, pipeline)
    order = []
    for begin in range(0, microbatches, pipeline):
        group = range(begin, min(begin + pipeline, microbatches))
        for stage in reversed(mine) if op is Op.BACKWARD else mine:
            order += [Instruction(op, stage, k) for k in group if stage >= first]
    return order


@functools.lru_cache(maxsize=256)  # the search asks again for each place of the encoder
def _training_orders(pipeline: int, microbatches: int, first: int, stages_per_rank: int) -> list[list[Instruction]]:
    """Records a run in which every compute takes one tick and every rank does the first of its rules that it can.

    1. A backward, once warmed up; but after a backward a forward, if one may run. 2. A forward, if fewer computes are
    kept for backward than the rank's limit. With one stage a rank that is 1F1B. Recorded, not written as a formula:
    Megatron's closed form holds for multiples of `pipeline` micro-batches only, and not where a rank mixes frozen and
    trained stages.
    """
    stages = pipeline * stages_per_rank
    forwards = [_in_groups(rank, pipeline, stages, microbatches, Op.FORWARD) for rank in range(pipeline)]
    backwards = [_in_groups(rank, pipeline, stages, microbatches, Op.BACKWARD, first) for rank in range(pipeline)]
    # One more than the forwards that 1F1B and Megatron's interleaved 1F1B begin with.
    per_later_rank = 1 if stages_per_rank == 1 else 2
    limit = [per_later_rank * (pipeline - rank - 1) + (stages_per_rank - 1) * pipeline + 1 for rank in range(pipeline)]
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
            # A last group smaller than `pipeline` can leave all limits reached: the deepest forward may go on.
            waiting = [(forwards[rank][0].stage, rank) for rank in range(pipeline) if forwards[rank]]
            waiting = [(stage, rank) for stage, rank in waiting if ready(forwards[rank][0])]
            assert waiting, "the recorded run cannot go on"
            limit[max(waiting)[1]] += 1
        tick += 1
    return orders


def _with_encodes(order: list[Instruction], microbatches: int, encodes: Encodes | None) -> list[Instruction]:
    """Rank 0's computes with ENCODE among them."""
    if encodes is None:
        encodes = immediate_encodes(order)
    result, encoded = [], encodes.prefetched
    for compute, count in zip([*order, None], encodes.before, strict=True):
        result += [Instruction(Op.ENCODE, 0, encoded + i) for i in range(count)]
        encoded += count
        if compute is not None:
            result.append(compute)
    assert encoded == encodes.prefetched + microbatches, "a step encodes as many micro-batches as it uses"
    return result


def immediate_encodes(instructions: Sequence[Instruction]) -> Encodes:
    """No prefetch: each micro-batch is encoded right before stage 0's forward of it."""
    computes = [x for x in instructions if x.op in COMPUTES]
    return Encodes(0, (*(int(x.op is Op.FORWARD and x.stage == 0) for x in computes), 0))


def _with_messages(
    orders: Sequence[Sequence[Instruction]], stages: int, first_trainable_stage: int, end: Sequence[Op]
) -> Schedule:
    """Adds LOAD, sends, receives and the step's end to each rank's computes."""
    ranks = len(orders)
    incoming: dict[tuple[int, int, str], deque[Message]] = defaultdict(deque)  # by channel, in the order sent
    for order in orders:
        for compute in order:
            message = sent_after(compute, ranks, stages, first_trainable_stage)
            if message is not None:
                incoming[message.channel].append(message)
    schedule = []
    for order in orders:
        computes = [x for x in order if x.op in COMPUTES]
        begun, posted = 0, {None}
        instructions: list[Instruction] = []
        for x in order:
            for soon in computes[begun : begun + 1 + MESSAGES_POSTED_AHEAD]:
                needed = needed_before(soon, ranks, stages)
                # A channel is first in, first out: whatever was sent before the needed message is received before it.
                while needed not in posted:
                    message = incoming[needed.channel].popleft()
                    posted.add(message)
                    instructions.append(message.receive)
            if x.op is Op.ENCODE:
                instructions.append(Instruction(Op.LOAD, 0, x.microbatch))
            instructions.append(x)
            begun += x.op in COMPUTES
            if sent_after(x, ranks, stages, first_trainable_stage) is not None:
                op = Op.SEND_ACTIVATION if x.op is Op.FORWARD else Op.SEND_GRADIENT
                instructions.append(Instruction(op, x.stage, x.microbatch))
        schedule.append((*instructions, *map(Instruction, end)))
    return tuple(schedule)


def sent_after(compute: Instruction, ranks: int, stages: int, first_trainable_stage: int) -> Message | None:
    """The message another rank needs from this instruction; None where the next stage is here or needs nothing."""
    if compute.op is Op.FORWARD and compute.stage + 1 < stages:
        return _between(compute.stage, compute.stage + 1, compute.microbatch, ranks)
    if compute.op is Op.BACKWARD and compute.stage > first_trainable_stage:
        return _between(compute.stage, compute.stage - 1, compute.microbatch, ranks)
    return None


def needed_before(compute: Instruction, ranks: int, stages: int) -> Message | None:
    """The message from another rank that this instruction waits for."""
    if compute.op is Op.FORWARD and compute.stage > 0:
        return _between(compute.stage - 1, compute.stage, compute.microbatch, ranks)
    if compute.op is Op.BACKWARD and compute.stage + 1 < stages:
        return _between(compute.stage + 1, compute.stage, compute.microbatch, ranks)
    return None


def _between(stage: int, consumer: int, microbatch: int, ranks: int) -> Message | None:
    """None if both stages are on one rank."""
    kind = "activation" if stage < consumer else "gradient"
    return Message(stage % ranks, consumer % ranks, kind, consumer, microbatch) if ranks > 1 else None


# ---- reading the lists

_STAGES = {  # of the source and of the consumer, counted from the instruction's own
    Op.SEND_ACTIVATION: (0, 1),
    Op.RECEIVE_ACTIVATION: (-1, 0),
    Op.SEND_GRADIENT: (0, -1),
    Op.RECEIVE_GRADIENT: (1, 0),
}
_USERS = {Op.RECEIVE_ACTIVATION: Op.FORWARD, Op.RECEIVE_GRADIENT: Op.BACKWARD}


def carried(instruction: Instruction, ranks: int) -> Message:
    """What a send or a receive carries; in a schedule that is not fit to run its stage may be one that is not there."""
    source, consumer = (instruction.stage + offset for offset in _STAGES[instruction.op])
    kind = "activation" if source < consumer else "gradient"
    return Message(source % ranks, consumer % ranks, kind, consumer, instruction.microbatch)


def steps_of(schedule: Schedule, rank: int) -> Iterator[Step]:
    """A rank's list, each instruction with its message."""
    posted: dict[Instruction, Message] = {}  # by the compute that uses it
    for x in schedule[rank]:
        message = carried(x, len(schedule)) if x.op in _STAGES else posted.get(x)
        if x.op in _USERS:
            posted[Instruction(_USERS[x.op], x.stage, x.microbatch)] = message
        yield Step(rank, x, message)


def all_steps(schedule: Schedule) -> list[Step]:
    """All ranks' instructions in one order, a compute after the send of the message that it waits for.

    Of several computes that can run the one of the deepest stage comes first, backward before forward, so that few
    messages wait. Raises ValueError where no rank can go on.
    """
    lists = [steps_of(schedule, rank) for rank in range(len(schedule))]
    order: list[Step] = []
    sent: set[Message | None] = {None}
    waiting: dict[int, Step] = {}  # each rank's next compute

    def run_to_next_compute(rank: int) -> None:
        for step in lists[rank]:
            if step.instruction.op in COMPUTES:
                waiting[rank] = step
                return
            order.append(step)
            if step.instruction.op in SENDS:
                sent.add(step.message)

    for rank in range(len(schedule)):
        run_to_next_compute(rank)
    while runnable := [step for step in waiting.values() if step.message in sent]:
        step = max(runnable, key=lambda x: (x.instruction.op is Op.BACKWARD, x.instruction.stage))
        order.append(waiting.pop(step.rank))
        run_to_next_compute(step.rank)
    if waiting:
        raise ValueError("the schedule cannot finish: every rank waits")
    return order


def in_common_order(schedule: Schedule) -> Schedule:
    """The same work in the same order, with every receive where it cannot hang, whatever waits for what.

    All computes are put into one order for all ranks; a message is received at the place in that order at which it is
    sent. So the first operation in that order that is not done never waits for a later one, not even where devices and
    hosts wait for all that they were given (tests/deadlocks.py). Price: a receive may stand right before its use, and
    its message cannot arrive while the rank computes. In simulated steps that is 0.1% to 0.3% where a message takes 1%
    of a forward, 1% to 3% where it takes 10%.
    """
    ordered: list[list[Instruction]] = [[] for _ in schedule]
    for rank, x, message in all_steps(schedule):
        if x.op not in RECEIVES:
            ordered[rank].append(x)
        if x.op in SENDS:
            ordered[message.destination].append(message.receive)
    return tuple(map(tuple, ordered))
