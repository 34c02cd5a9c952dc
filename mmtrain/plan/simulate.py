"""Event simulation of a schedule: the very instruction lists that the engine runs, with seconds for each of them.

schedule --Program: one order of all ranks' instructions--> simulate(program, seconds of each stage) --> step time, idle
share of each rank, and when each rank did what

The order in which a rank works is fixed by its list, so a run over all instructions in any order that respects the
dependencies gives every time at once, without an event queue. A message moves when both sides have posted it and all
earlier ones of its channel have moved; sending and receiving also cost the two ranks time of their own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.plan.instructions import (
    COMPUTES,
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
)


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """What the instructions of a step cost, in seconds; per micro-batch where a stage is meant."""

    forward: tuple[float, ...]  # per stage, without the encoder
    backward: tuple[float, ...]  # per stage, recomputation included; 0 where nothing runs backward
    encode: tuple[float, ...] = (0.0,)  # per pipeline rank, of the slice that it holds
    send: float = 0.0  # of the sender, while it posts a message
    receive: float = 0.0  # of the receiver, when it takes one
    transfer: float = 0.0  # from the moment both sides have posted a message to its arrival
    end: float = 0.0  # reductions and optimizer
    forward_waits: tuple[Waits, ...] = ()  # per stage, for weights of streamed layers; empty: there are none
    backward_waits: tuple[Waits, ...] = ()
    send_features: float = 0.0  # these three: of messages between slices
    receive_features: float = 0.0
    transfer_features: float = 0.0


class TimeSpan(NamedTuple):
    """What a rank did from `begin` to `end`, seconds from the step's begin."""

    rank: int
    instruction: Instruction
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step."""

    seconds: float
    idle: tuple[float, ...]  # share of the step in which each pipeline rank waits for a message or the other ranks
    spans: tuple[TimeSpan, ...]  # in each rank's order of work, without what took no time

    @property
    def mean_idle(self) -> float:
        """Idle share over all ranks."""
        return sum(self.idle) / len(self.idle)


_COMPUTE, _ENCODE, _FIRST_POST, _SECOND_POST = range(4)


class _Kind(NamedTuple):
    """Instructions with equal costs."""

    op: Op
    place: int  # stage, or rank of an ENCODE
    takes: bool  # a message, of this step or an earlier one
    spared: int  # ends of a compute at which its rank turns round: the same layers come next, or came before


class Program:
    """A schedule in one order of all ranks' instructions; made once, simulated with many costs.

    It holds what depends on that order alone: who posts a message first, and how often each rank does what.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Raises ValueError where no rank can go on."""
        self.ranks = len(schedule)
        self.steps: list[tuple[int, int, int, int, int, Step]] = []
        """What works or carries a message: what it is, rank, its kind, its message and channel (-1: none)."""
        self.kinds: list[_Kind] = []
        self.counts: Counter[tuple[int, int]] = Counter()  # by rank and kind
        self.channels: dict[tuple[int, int, str], int] = {}
        self.messages: dict[Message, int] = {}
        posted: set[int] = set()  # by one side
        kinds: dict[tuple[Op, int, int], int] = {}
        spared = [_spared([x for x in order if x.op in COMPUTES]) for order in schedule]
        chain = chain_of(schedule)
        stages = 1 + max((x.stage for instructions in schedule for x in instructions), default=0)
        for step in all_steps(schedule):
            rank, x, message = step
            number = -1 if message is None else self.messages.setdefault(message, len(self.messages))
            if x.op in COMPUTES or x.op is Op.ENCODE:
                does = _ENCODE if x.op is Op.ENCODE else _COMPUTE
            elif message is None:
                continue
            else:
                does = _SECOND_POST if number in posted else _FIRST_POST
                posted.add(number)
            channel = -1 if message is None else self.channels.setdefault(message.channel, len(self.channels))
            turns = next(spared[rank]) if x.op in COMPUTES else 0
            number_of_kind = kinds.setdefault((x.op, x.stage, turns), len(kinds))
            if number_of_kind == len(self.kinds):
                takes = needed_before(x, self.ranks, stages, chain) is not None
                self.kinds.append(_Kind(x.op, x.stage, takes, turns))
            self.counts[rank, number_of_kind] += 1
            self.steps.append((does, rank, number_of_kind, number, channel, step))


def simulate(
    program: Program,
    seconds: StageSeconds,
    *,
    spans: bool = False,
    before: Callable[[Step, float, float], float] | None = None,
) -> Simulation:
    """Seconds of a step, and the share of it in which each pipeline rank waits.

    `spans` asks for what happened when. `before(step, now, ready)`, if given, is called before each compute and returns
    seconds of other work that its rank does first, where it is `now` and could begin the compute at `ready`.
    """
    works = [_work(kind, seconds) for kind in program.kinds]
    transfers = [
        seconds.transfer_features if kind == "features" else seconds.transfer for _, _, kind in program.channels
    ]
    clock, other_work = [0.0] * program.ranks, [0.0] * program.ranks
    when = [0.0] * (len(program.messages) + 1)  # a message is posted by one side, then arrives; the last: no message
    channel_free = [0.0] * len(program.channels)
    history: list[TimeSpan] = []
    for does, rank, kind, message, channel, step in program.steps:
        begin, work = clock[rank], works[kind]
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
    total = max(clock) + seconds.end
    busy = [work + seconds.end for work in other_work]
    for (rank, kind), count in program.counts.items():
        busy[rank] += count * works[kind]
    idle = tuple(max(0.0, 1 - work / total) if total else 0.0 for work in busy)
    if spans and seconds.end:
        history += [TimeSpan(rank, Instruction(Op.OPTIMIZER_STEP), max(clock), total) for rank in range(program.ranks)]
    return Simulation(total, idle, tuple(history))


def _spared(computes: Sequence[Instruction]) -> Iterator[int]:
    """Of each compute of a rank, at how many of its ends the neighbour is its stage's other direction."""
    turns = [x.stage == y.stage and x.op is not y.op for x, y in itertools.pairwise(computes)]
    return (before + behind for before, behind in zip([False, *turns], [*turns, False], strict=True))


def _work(kind: _Kind, seconds: StageSeconds) -> float:
    """Seconds of an instruction, with those of taking a message."""
    op, place, takes, spared = kind
    if op is Op.FORWARD:
        received = seconds.receive if place else seconds.receive_features
        waited = seconds.forward_waits[place].seconds(spared) if seconds.forward_waits else 0.0
        return seconds.forward[place] + received * takes + waited
    if op is Op.BACKWARD:
        waited = seconds.backward_waits[place].seconds(spared) if seconds.backward_waits else 0.0
        return seconds.backward[place] + seconds.receive * takes + waited
    if op is Op.ENCODE:
        return seconds.encode[place] + seconds.receive_features * takes
    if op in SENDS:
        return seconds.send_features if op is Op.SEND_FEATURES else seconds.send
    return 0.0
