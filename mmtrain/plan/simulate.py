"""Seconds and bytes of a schedule, from the instruction lists that the engine runs.

schedule --Program: one order of all ranks' instructions--> simulate(program, seconds of stages)
    --> step time, idle share of each rank, when each rank did what
schedule --instants: what lives while each instruction runs--> peak(instants, bytes of stages)
    --> the most at once

One pass over all instructions, each after what it depends on, gives every time. A message moves
when both sides have posted it and all earlier ones of its channel have moved; sending and receiving
also take the two ranks time.

A sender keeps a message until it knows that it has arrived: until its receiver has sent something
after using it. Backends that cannot be asked (gloo) keep all messages until the step's end.
"""

import itertools
import operator
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.plan.instructions import (
    COMPUTES,
    RECEIVES,
    SENDS,
    Instruction,
    Message,
    Op,
    Schedule,
    Step,
    Waits,
    all_steps,
    chain_of,
    needed_before,
    steps_of,
)

# ---- seconds


@dataclass(frozen=True)
class MessageCost:
    send: float = 0.0  # of the sender, while it posts a message
    receive: float = 0.0  # of the receiver, when it takes one
    transfer: float = 0.0  # from the moment both sides have posted a message to its arrival


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a step's instructions; per micro-batch where a stage is meant."""

    forward: tuple[float, ...]  # per stage, without the encoder
    backward: tuple[float, ...]  # per stage, recomputation included; 0 where nothing runs backward
    encode: tuple[float, ...] = (0.0,)  # per pipeline rank, of the slice that it holds
    messages: MessageCost = MessageCost()  # between stages
    features: MessageCost = MessageCost()  # between slices of the encoder
    end: float = 0.0  # reductions and optimizer
    # per stage, for weights of streamed layers; empty: there are none
    forward_waits: tuple[Waits, ...] = ()
    backward_waits: tuple[Waits, ...] = ()


class TimeSpan(NamedTuple):
    """One instruction of a rank, from `begin` to `end`, seconds from the step's begin."""

    rank: int
    instruction: Instruction
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    seconds: float
    # share of the step in which each pipeline rank waits for a message or the other ranks
    idle: tuple[float, ...]
    spans: tuple[TimeSpan, ...]  # in each rank's order of work, without what took no time


_COMPUTE, _ENCODE, _FIRST_POST, _SECOND_POST = range(4)


class _Kind(NamedTuple):
    """Instructions with equal costs."""

    op: Op
    stage: int  # or the rank of an ENCODE
    takes: bool  # a message, of this step or an earlier one
    # ends of a compute at which its rank turns round: the same layers come next, or came before
    spared: int


class Program:
    """A schedule in one order of all ranks' instructions; made once, simulated with many costs."""

    def __init__(self, schedule: Schedule) -> None:
        """Raises ValueError where no rank can go on."""
        self.ranks = len(schedule)
        self.steps: list[tuple[int, int, int, int, int, Step]] = []
        """What works or carries a message: what it is, rank, its kind, its message and channel (-1:
        none).
        """
        self.kinds: list[_Kind] = []
        self.counts: Counter[tuple[int, int]] = Counter()  # by rank and kind
        self.channels: dict[tuple[int, int, str], int] = {}
        self.messages: dict[Message, int] = {}
        posted: set[int] = set()  # by one side
        kinds: dict[tuple[Op, int, int], int] = {}
        spared = [*map(_spared, schedule)]
        chain = chain_of(schedule)
        steps = all_steps(schedule)
        stages = 1 + max((step.instruction.stage for step in steps), default=0)

        for step in steps:
            rank, x, message = step
            number = channel = -1
            if message is not None:
                number = self.messages.setdefault(message, len(self.messages))
                channel = self.channels.setdefault(message.channel, len(self.channels))

            turns = 0
            if x.op in COMPUTES:
                does = _COMPUTE
                turns = next(spared[rank])
            elif x.op is Op.ENCODE:
                does = _ENCODE
            elif message is None:
                continue
            else:
                does = _SECOND_POST if number in posted else _FIRST_POST
                posted.add(number)

            kind = kinds.setdefault((x.op, x.stage, turns), len(kinds))
            if kind == len(self.kinds):
                takes = needed_before(x, self.ranks, stages, chain) is not None
                self.kinds.append(_Kind(x.op, x.stage, takes, turns))
            self.counts[rank, kind] += 1
            self.steps.append((does, rank, kind, number, channel, step))


def simulate(
    program: Program,
    seconds: StageSeconds,
    *,
    spans: bool = False,
    before: Callable[[Step, float, float], float] | None = None,
) -> Simulation:
    """Seconds of a step, and the share of it in which each pipeline rank waits.

    `spans` asks for what happened when. `before(step, now, ready)` is called before each compute
    and returns seconds of other work that its rank does first, where it is `now` and could begin
    the compute at `ready`.
    """
    works = [_work(kind, seconds) for kind in program.kinds]
    transfers = [
        _message_cost(kind == "features", seconds).transfer for _, _, kind in program.channels
    ]
    clock = [0.0] * program.ranks
    other_work = [0.0] * program.ranks
    # a message is posted by one side, then arrives; the last: no message
    when = [0.0] * (len(program.messages) + 1)
    channel_free = [0.0] * len(program.channels)
    history = []

    for does, rank, kind, message, channel, step in program.steps:
        begin = clock[rank]
        work = works[kind]
        if does <= _ENCODE:
            ready = when[message]
            if before is not None and does == _COMPUTE:
                other = before(step, begin, ready)
                begin += other
                other_work[rank] += other
            if ready > begin:
                begin = ready
            clock[rank] = begin + work
        elif does == _FIRST_POST:
            clock[rank] = when[message] = begin + work
        else:
            clock[rank] = moves = begin + work
            if when[message] > moves:
                moves = when[message]
            if channel_free[channel] > moves:
                moves = channel_free[channel]
            channel_free[channel] = when[message] = moves + transfers[channel]
        if spans and work:
            history.append(TimeSpan(rank, step.instruction, begin, begin + work))

    end = max(clock)
    total = end + seconds.end
    busy = [work + seconds.end for work in other_work]
    for (rank, kind), count in program.counts.items():
        busy[rank] += count * works[kind]
    idle = [0.0] * program.ranks
    if total:
        idle = [max(0.0, 1 - work / total) for work in busy]
    if spans and seconds.end:
        last = Instruction(Op.OPTIMIZER_STEP)
        history += [TimeSpan(rank, last, end, total) for rank in range(program.ranks)]
    return Simulation(total, tuple(idle), tuple(history))


def _spared(order: Sequence[Instruction]) -> Iterator[int]:
    """Yield for each compute of a rank the number of its ends at which the neighbour is its stage's
    other direction.
    """
    computes = [x for x in order if x.op in COMPUTES]
    turned = False
    for x, y in itertools.zip_longest(computes, computes[1:]):
        turns = y is not None and x.stage == y.stage and x.op is not y.op
        yield turned + turns
        turned = turns


def _message_cost(is_of_slices: bool, seconds: StageSeconds) -> MessageCost:
    return seconds.features if is_of_slices else seconds.messages


def _work(kind: _Kind, seconds: StageSeconds) -> float:
    """Seconds of an instruction, with those of taking a message."""
    op, stage, takes, spared = kind
    if op in SENDS:
        return _message_cost(op is Op.SEND_FEATURES, seconds).send
    if op is Op.ENCODE:
        work = seconds.encode[stage]
        received = seconds.features.receive
    elif op is Op.FORWARD:
        work = seconds.forward[stage]
        waits = seconds.forward_waits
        received = _message_cost(stage == 0, seconds).receive
    elif op is Op.BACKWARD:
        work = seconds.backward[stage]
        waits = seconds.backward_waits
        received = seconds.messages.receive
    else:
        return 0.0
    if takes:
        work += received
    if op in COMPUTES and waits:
        work += waits[stage].seconds(spared)
    return work


# ---- memory


@dataclass(frozen=True)
class Buffers:
    """Bytes of what waits between instructions, of one micro-batch."""

    hidden: int  # an activation's hidden states, or a gradient
    integers: int  # which cross a border with an activation
    features: int  # from the last slice's ENCODE to stage 0's FORWARD
    batch: int  # from LOAD to stage 0's FORWARD, without pixels
    pixels: int = 0  # from LOAD to the first slice's ENCODE
    between_slices: int = 0  # from a slice's ENCODE to the next one's


class StageBytes(NamedTuple):
    """The bytes of one stage and micro-batch; what is `kept` is part of the other two."""

    kept: int  # from FORWARD to BACKWARD
    forward: int  # most at once while FORWARD runs
    backward: int  # most at once while BACKWARD runs


class Instant(NamedTuple):
    """The contents of a rank's memory while one instruction runs."""

    op: Op  # FORWARD, BACKWARD, ENCODE, or OPTIMIZER_STEP for the step's end
    slot: int  # of the stage among those of the rank; 0 where no stage is meant
    # micro-batches that each stage of the rank keeps, without the one that runs
    kept: tuple[int, ...]
    buffers: int  # bytes of messages, features and batches


class Peak(NamedTuple):
    """The most bytes at once beyond weights and optimizer state, and what they are at that
    instant.
    """

    activations: int  # kept for backwards, messages, features, batches
    working: int  # of the instruction that runs


def instants(
    schedule: Schedule,
    buffers: Buffers,
    *,
    polls: bool,
) -> tuple[tuple[Instant, ...], ...]:
    """Per pipeline rank, every instant of a training step that takes more than all others in
    something.

    `polls`: sends that are known to be gone are let go at the next send; else all are kept until
    the step's end.
    """
    gone: list[dict[int, int]] = [{} for _ in schedule]
    if polls:
        gone = _known_gone(schedule)
    walks = (_walk(schedule, rank, buffers, its) for rank, its in enumerate(gone))
    return tuple(map(_largest, walks))


def _walk(
    schedule: Schedule,
    rank: int,
    buffers: Buffers,
    gone: Mapping[int, int],
) -> list[Instant]:
    """Every instant of a rank; `gone`: for sends by index, the index at which they are known to be
    gone.
    """
    ranks = len(schedule)
    instructions = schedule[rank]
    buffered: dict[tuple[Op, int, tuple[int, ...]], int] = {}
    kept = [0] * (max(x.stage for x in instructions) // ranks + 1)
    with_backward = {x.stage for x in instructions if x.op is Op.BACKWARD}
    chain = chain_of(schedule)
    waiting = _waiting_at_begin(schedule, rank, buffers)
    on_their_way: list[tuple[int, int]] = []  # (index at which it is known to be gone, bytes)

    def note(op: Op, slot: int) -> None:
        key = op, slot, tuple(kept)
        buffered[key] = max(buffered.get(key, 0), waiting)

    for i, (_, x, message) in enumerate(steps_of(schedule, rank)):
        slot = max(x.stage, 0) // ranks
        size = 0
        if message is not None:
            size = _size(message, buffers)
        if x.op is Op.LOAD:
            waiting += buffers.batch + buffers.pixels
        elif x.op is Op.ENCODE:
            note(x.op, 0)
            waiting -= buffers.between_slices if rank else buffers.pixels
            if len(chain) == 1:
                waiting += buffers.features
        elif x.op is Op.BACKWARD:
            kept[slot] -= 1
            note(x.op, slot)
            waiting -= size
        elif x.op is Op.FORWARD:
            note(x.op, slot)
            if x.stage in with_backward:
                kept[slot] += 1
            waiting -= size if x.stage else buffers.features + buffers.batch
        else:
            if i in gone:
                waiting -= sum(size for index, size in on_their_way if index < i)
                on_their_way = [(index, size) for index, size in on_their_way if index >= i]
                on_their_way.append((gone[i], size))
            waiting += size
    note(Op.OPTIMIZER_STEP, 0)
    return [Instant(*key, size) for key, size in buffered.items()]


def _waiting_at_begin(schedule: Schedule, rank: int, buffers: Buffers) -> int:
    """Bytes that wait when a step begins: messages of the slice before, on rank 0 batches and
    features.
    """
    chain = chain_of(schedule)
    if rank not in chain:
        return 0
    # A slice encodes in turn, from the first micro-batch that it has not.
    ahead = [next((x.microbatch for x in schedule[r] if x.op is Op.ENCODE), 0) for r in chain]
    if rank == 0:
        return ahead[0] * buffers.batch + ahead[-1] * buffers.features
    entry = chain.index(rank)
    return (ahead[entry - 1] - ahead[entry]) * buffers.between_slices


def _size(message: Message, buffers: Buffers) -> int:
    if message.kind == "activation":
        return buffers.hidden + buffers.integers
    if message.kind == "gradient":
        return buffers.hidden
    return buffers.between_slices if message.consumer else buffers.features


def _known_gone(schedule: Schedule) -> list[dict[int, int]]:
    """Per rank, for each send by index: the index of the compute whose input tells that the message
    was taken.

    A slice's message is gone, too, when its sender runs a FORWARD of that micro-batch: its features
    have been used.
    """
    sent: dict[Message, int] = {}  # where its sender lists it
    used: dict[Message, int] = {}  # where its receiver uses it, if it does in this step
    forwards: dict[tuple[int, int], int] = {}  # by rank and micro-batch, the first
    flows: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by source and destination
    for rank in range(len(schedule)):
        for i, (_, x, message) in enumerate(steps_of(schedule, rank)):
            if x.op is Op.FORWARD:
                forwards.setdefault((rank, x.microbatch), i)
            if x.op in SENDS:
                sent[message] = i
                flows[message.source, message.destination].append(message)
            elif message is not None and x.op not in RECEIVES:
                used[message] = i

    gone: list[dict[int, int]] = [{} for _ in schedule]
    for (source, destination), messages in flows.items():
        # In the order sent; a slice's may be used in another step.
        back = flows.get((destination, source), ())
        answers = [answer for answer in back if answer.kind != "features"]
        answered = [sent[answer] for answer in answers]
        uses = [used[answer] for answer in reversed(answers)]
        never = len(schedule[source])
        earliest = [never, *itertools.accumulate(uses, min)][::-1]
        for message in messages:
            taken = never
            if message in used:
                taken = earliest[bisect_right(answered, used[message])]
            if message.kind == "features":
                taken = min(taken, forwards.get((source, message.microbatch), never))
            gone[source][sent[message]] = taken
    return gone


def _largest(moments: Sequence[Instant]) -> tuple[Instant, ...]:
    """Drop instants that another one of the same work exceeds in everything: fewer to look at for
    each peak.
    """
    result: list[Instant] = []
    for instant in sorted(moments, key=lambda x: (-sum(x.kept), -x.buffers)):
        if not any(_exceeds(larger, instant) for larger in result):
            result.append(instant)
    return tuple(result)


def _exceeds(larger: Instant, instant: Instant) -> bool:
    return (
        larger[:2] == instant[:2]
        and larger.buffers >= instant.buffers
        and all(map(operator.ge, larger.kept, instant.kept))
    )


def peak(
    moments: Sequence[Instant],
    stages: Sequence[StageBytes],
    encode_working: int,
    end_working: int,
) -> Peak:
    """Return the most bytes at once, from the bytes of a rank's stages and of the encoder's and
    optimizer's work.
    """
    most = Peak(0, 0)
    for op, slot, kept, buffers in moments:
        activations = buffers
        for count, stage in zip(kept, stages, strict=True):
            activations += count * stage.kept
        if op in COMPUTES:
            running = stages[slot]
            activations += running.kept
            working = (running.forward if op is Op.FORWARD else running.backward) - running.kept
        else:
            working = encode_working if op is Op.ENCODE else end_working
        if activations + working > most[0] + most[1]:
            most = Peak(activations, working)
    return most
