"""The order of work of every rank in one step, as lists of instructions: what the engine runs and estimates simulate.

Stage `s` lives on pipeline rank `s % pipeline`. Training runs 1F1B: rank r first runs `pipeline - r - 1` forwards, then
one forward and one backward in turn, so it never keeps more than `pipeline - r` micro-batches for backward. Stages
upstream of the first trainable one run forwards only: nothing there needs a gradient.

Messages are part of the lists. A receive is posted one compute (FORWARD or BACKWARD) ahead of its use and waited for at
that use; a send is asynchronous and waited for at the step's end (waiting inside the step deadlocked 175 of 2,528
schedules of a prototype). Messages of one (source rank, destination rank, kind) arrive in the order they were sent, so
both sides must list them in the same order: `check_schedule` proves that, and that every rank reaches its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MESSAGES_POSTED_AHEAD = 1


class Op(StrEnum):
    """What a rank can be told to do; `stage` and `microbatch` of the instruction say where and for which data."""

    LOAD = "load"  # stage 0: read a micro-batch
    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_ACTIVATION = "send_activation"  # output of `stage`, to stage + 1
    RECEIVE_ACTIVATION = "receive_activation"  # post the receive of the input of `stage`, from stage - 1
    SEND_GRADIENT = "send_gradient"  # gradient of the input of `stage`, to stage - 1
    RECEIVE_GRADIENT = "receive_gradient"  # post the receive of the gradient of the output of `stage`, from stage + 1
    REDUCE_GRADIENTS = "reduce_gradients"
    REDUCE_STATISTICS = "reduce_statistics"
    OPTIMIZER_STEP = "optimizer_step"


SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT})
RECEIVES = frozenset({Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT})
# Every rank ends a step with these, also one with nothing to train: it takes part in the same collectives.
TRAINING_END = (Op.REDUCE_GRADIENTS, Op.REDUCE_STATISTICS, Op.OPTIMIZER_STEP)
EVALUATION_END = (Op.REDUCE_STATISTICS,)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One piece of work; stage and micro-batch are -1 where the whole rank is meant."""

    op: Op
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        return self.op.name if self.stage < 0 else f"{self.op.name}(stage {self.stage}, micro-batch {self.microbatch})"


Schedule = tuple[tuple[Instruction, ...], ...]


class _Message(NamedTuple):
    source: int  # rank
    destination: int  # rank
    kind: str  # "activation" or "gradient"
    consumer: int  # stage that uses it
    microbatch: int

    @property
    def channel(self) -> tuple[int, int, str]:
        return self.source, self.destination, self.kind


def training_schedule(pipeline: int, microbatches: int, first_trainable_stage: int) -> Schedule:
    """One training step of 1F1B, one list of instructions per pipeline rank.

    Backward runs on stages >= first_trainable_stage only; gradients are sent by stages > first_trainable_stage only.
    Source of the order: PipeDream-flush (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
    """
    assert pipeline >= 1 and microbatches >= 1 and 0 <= first_trainable_stage < pipeline
    orders = []
    for rank in range(pipeline):
        forwards = [Instruction(Op.FORWARD, rank, k) for k in range(microbatches)]
        if rank < first_trainable_stage:
            orders.append(forwards)
            continue
        warmup = min(microbatches, pipeline - rank - 1)
        order = forwards[:warmup]
        for k in range(microbatches):
            order += forwards[warmup + k : warmup + k + 1]
            order.append(Instruction(Op.BACKWARD, rank, k))
        orders.append(order)
    return _with_messages(orders, pipeline, first_trainable_stage, TRAINING_END)


def forward_schedule(pipeline: int, microbatches: int) -> Schedule:
    """One evaluation pass: forwards only, then the statistics are reduced."""
    assert pipeline >= 1 and microbatches >= 1
    orders = [[Instruction(Op.FORWARD, rank, k) for k in range(microbatches)] for rank in range(pipeline)]
    return _with_messages(orders, pipeline, pipeline, EVALUATION_END)


def _with_messages(
    orders: Sequence[Sequence[Instruction]], stages: int, first_trainable_stage: int, end: Sequence[Op]
) -> Schedule:
    """Adds LOAD, sends, receives and the step's end to each rank's computes; holds for several stages a rank."""
    ranks = len(orders)
    sent: dict[tuple[int, int, str], list[_Message]] = defaultdict(list)
    place: dict[_Message, int] = {}
    for order in orders:
        for compute in order:
            message = _sent_after(compute, ranks, stages, first_trainable_stage)
            if message is not None:
                place[message] = len(sent[message.channel])
                sent[message.channel].append(message)

    schedule = []
    for order in orders:
        posted: dict[tuple[int, int, str], int] = defaultdict(int)
        instructions = []
        for i, compute in enumerate(order):
            for soon in order[i : i + 1 + MESSAGES_POSTED_AHEAD]:
                needed = _needed_before(soon, ranks, stages)
                if needed is None:
                    continue
                # A channel is first in, first out: whatever was sent before the needed message is received before it.
                while posted[needed.channel] <= place[needed]:
                    message = sent[needed.channel][posted[needed.channel]]
                    posted[needed.channel] += 1
                    op = Op.RECEIVE_ACTIVATION if message.kind == "activation" else Op.RECEIVE_GRADIENT
                    instructions.append(Instruction(op, message.consumer, message.microbatch))
            if compute.op is Op.FORWARD and compute.stage == 0:
                instructions.append(Instruction(Op.LOAD, 0, compute.microbatch))
            instructions.append(compute)
            if _sent_after(compute, ranks, stages, first_trainable_stage) is not None:
                op = Op.SEND_ACTIVATION if compute.op is Op.FORWARD else Op.SEND_GRADIENT
                instructions.append(Instruction(op, compute.stage, compute.microbatch))
        instructions += [Instruction(op) for op in end]
        schedule.append(tuple(instructions))
    return tuple(schedule)


def _sent_after(compute: Instruction, ranks: int, stages: int, first_trainable_stage: int) -> _Message | None:
    """The message another rank needs from this compute; None where the next stage is here or needs nothing."""
    stage, k = compute.stage, compute.microbatch
    if compute.op is Op.FORWARD and stage + 1 < stages:
        message = _Message(stage % ranks, (stage + 1) % ranks, "activation", stage + 1, k)
    elif compute.op is Op.BACKWARD and stage > first_trainable_stage:
        message = _Message(stage % ranks, (stage - 1) % ranks, "gradient", stage - 1, k)
    else:
        return None
    return message if message.source != message.destination else None


def _needed_before(compute: Instruction, ranks: int, stages: int) -> _Message | None:
    """The message from another rank that this compute waits for."""
    stage, k = compute.stage, compute.microbatch
    if compute.op is Op.FORWARD and stage > 0:
        message = _Message((stage - 1) % ranks, stage % ranks, "activation", stage, k)
    elif compute.op is Op.BACKWARD and stage + 1 < stages:
        message = _Message((stage + 1) % ranks, stage % ranks, "gradient", stage, k)
    else:
        return None
    return message if message.source != message.destination else None


def check_schedule(
    schedule: Schedule, microbatches: int, first_trainable_stage: int | None, *, chunks_per_rank: int = 1
) -> None:
    """Raises ValueError, naming rank and instruction, unless the schedule is one that every rank can finish.

    Proves: each FORWARD once, each BACKWARD once from the first trainable stage on and none before it (None: an
    evaluation, no BACKWARD at all); LOAD right before each FORWARD of stage 0; the sends and receives of each channel
    are the same messages in the same order; nothing is sent before it is computed; all ranks reach their end with sends
    asynchronous and a message arriving once both sides have posted it; every rank ends with the same collectives.
    """
    ranks, stages = len(schedule), len(schedule) * chunks_per_rank
    first_backward = stages if first_trainable_stage is None else first_trainable_stage
    end = EVALUATION_END if first_trainable_stage is None else TRAINING_END
    for rank, instructions in enumerate(schedule):
        _check_places(rank, instructions, ranks, stages, end)
    _check_computes(schedule, microbatches, stages, first_backward)
    _check_channels(schedule, ranks, stages, first_backward)
    _check_progress(schedule, ranks, stages)


def _place(rank: int, index: int, instruction: Instruction) -> str:
    return f"rank {rank}, instruction {index}, {instruction}"


def _check_places(rank: int, instructions: Sequence[Instruction], ranks: int, stages: int, end: Sequence[Op]) -> None:
    """Stages are on their ranks, LOAD stands right before its FORWARD, the end is the agreed one and comes last."""
    body, tail = instructions[: -len(end)], instructions[-len(end) :]
    if tuple(tail) != tuple(Instruction(op) for op in end):
        raise ValueError(f"rank {rank} must end with {', '.join(op.name for op in end)}")
    for i, instruction in enumerate(body):
        if instruction.op in TRAINING_END:
            raise ValueError(f"{_place(rank, i, instruction)}: belongs to the end of the step")
        if not 0 <= instruction.stage < stages or instruction.stage % ranks != rank:
            raise ValueError(f"{_place(rank, i, instruction)}: this stage is not on this rank")
        after = body[i + 1] if i + 1 < len(body) else None
        if instruction.op is Op.LOAD and after != Instruction(Op.FORWARD, 0, instruction.microbatch):
            raise ValueError(f"{_place(rank, i, instruction)}: must stand right before that micro-batch's FORWARD")
        if instruction.op is Op.FORWARD and instruction.stage == 0:
            before = body[i - 1] if i else None
            if before != Instruction(Op.LOAD, 0, instruction.microbatch):
                raise ValueError(f"{_place(rank, i, instruction)}: no LOAD right before it")


def _check_computes(schedule: Schedule, microbatches: int, stages: int, first_backward: int) -> None:
    """Each compute once, a backward after its forward, and no backward upstream of the first trainable stage."""
    done: set[Instruction] = set()
    for rank, instructions in enumerate(schedule):
        for i, instruction in enumerate(instructions):
            op, stage, k = instruction.op, instruction.stage, instruction.microbatch
            if op not in (Op.FORWARD, Op.BACKWARD):
                continue
            if instruction in done:
                raise ValueError(f"{_place(rank, i, instruction)}: runs a second time")
            if op is Op.BACKWARD and stage < first_backward:
                raise ValueError(f"{_place(rank, i, instruction)}: nothing at or before this stage trains")
            if op is Op.BACKWARD and Instruction(Op.FORWARD, stage, k) not in done:
                raise ValueError(f"{_place(rank, i, instruction)}: comes before its FORWARD")
            done.add(instruction)
    expected = {Instruction(Op.FORWARD, s, k) for s in range(stages) for k in range(microbatches)}
    expected |= {Instruction(Op.BACKWARD, s, k) for s in range(first_backward, stages) for k in range(microbatches)}
    for what, found in (("missing", expected - done), ("not part of this step", done - expected)):
        if found:
            least = min(found, key=lambda x: (x.stage, x.microbatch, x.op))
            raise ValueError(f"rank {least.stage % len(schedule)}: {least} is {what}")


def _messages(
    rank: int, instructions: Sequence[Instruction], ranks: int
) -> Iterator[tuple[int, Instruction, _Message]]:
    """Position, instruction and message of each send and receive of one rank."""
    for i, instruction in enumerate(instructions):
        stage, k = instruction.stage, instruction.microbatch
        if instruction.op is Op.SEND_ACTIVATION:
            yield i, instruction, _Message(rank, (stage + 1) % ranks, "activation", stage + 1, k)
        elif instruction.op is Op.SEND_GRADIENT:
            yield i, instruction, _Message(rank, (stage - 1) % ranks, "gradient", stage - 1, k)
        elif instruction.op is Op.RECEIVE_ACTIVATION:
            yield i, instruction, _Message((stage - 1) % ranks, rank, "activation", stage, k)
        elif instruction.op is Op.RECEIVE_GRADIENT:
            yield i, instruction, _Message((stage + 1) % ranks, rank, "gradient", stage, k)


def _check_channels(schedule: Schedule, ranks: int, stages: int, first_backward: int) -> None:
    """Message i that a channel's source sends is message i that its destination receives, and none is sent twice."""
    sides: tuple[dict, dict] = (defaultdict(list), defaultdict(list))
    for rank, instructions in enumerate(schedule):
        for i, instruction, message in _messages(rank, instructions, ranks):
            where = _place(rank, i, instruction)
            if not 0 <= message.consumer < stages or message.source == message.destination:
                raise ValueError(f"{where}: there is no other rank at that end")
            if message.kind == "gradient" and message.consumer < first_backward:
                raise ValueError(f"{where}: gradient traffic upstream of the first trainable stage")
            sides[instruction.op in RECEIVES][message.channel].append((message, where))
    for channel in sorted(sides[0].keys() | sides[1].keys()):
        sends, receives = sides[0][channel], sides[1][channel]
        name = f"{channel[2]} channel from rank {channel[0]} to rank {channel[1]}"
        seen = set()
        for (sent, send_place), (received, receive_place) in zip(sends, receives, strict=False):
            if sent != received:
                raise ValueError(f"{name}: {send_place} meets {receive_place}")
            if sent in seen:
                raise ValueError(f"{name}: {send_place}: sent a second time")
            seen.add(sent)
        if len(sends) != len(receives):
            more, kind = (sends, "receive") if len(sends) > len(receives) else (receives, "send")
            raise ValueError(f"{name}: {more[min(len(sends), len(receives))][1]}: no matching {kind}")


def _check_progress(schedule: Schedule, ranks: int, stages: int) -> None:
    """Runs the lists: receives posted, sends never waited for; raises where no rank can go on."""
    at = [0] * ranks
    done: set[Instruction] = set()
    sent: set[_Message] = set()
    posted: set[_Message] = set()
    messages = [{i: m for i, _, m in _messages(r, instructions, ranks)} for r, instructions in enumerate(schedule)]

    def can_run(rank: int, index: int, instruction: Instruction) -> bool:
        stage, k = instruction.stage, instruction.microbatch
        needed = _needed_before(instruction, ranks, stages)
        if needed is not None:
            if needed not in posted:
                raise ValueError(f"{_place(rank, index, instruction)}: its receive was not posted before it")
            return needed in sent
        if instruction.op is Op.FORWARD and stage > 0:  # the neighbouring chunk is on this very rank
            return Instruction(Op.FORWARD, stage - 1, k) in done
        if instruction.op is Op.BACKWARD and stage + 1 < stages:
            return Instruction(Op.BACKWARD, stage + 1, k) in done
        return True

    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(schedule):
            while at[rank] < len(instructions) and can_run(rank, at[rank], instructions[at[rank]]):
                instruction = instructions[at[rank]]
                message = messages[rank].get(at[rank])
                if instruction.op in SENDS:
                    made_by = Op.FORWARD if instruction.op is Op.SEND_ACTIVATION else Op.BACKWARD
                    if Instruction(made_by, instruction.stage, instruction.microbatch) not in done:
                        raise ValueError(f"{_place(rank, at[rank], instruction)}: sent before it is computed")
                    sent.add(message)
                elif instruction.op in RECEIVES:
                    posted.add(message)
                else:
                    done.add(instruction)
                at[rank] += 1
                moved = True
    stuck = [_place(r, i, schedule[r][i]) for r, i in enumerate(at) if i < len(schedule[r])]
    if stuck:
        raise ValueError(f"deadlock: every rank waits: {'; '.join(stuck)}")
