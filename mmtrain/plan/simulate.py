"""Event simulation of a schedule: the very instruction lists that the engine runs, with seconds for each of them.

schedule --Program: one order of all ranks' instructions--> simulate(program, seconds of each stage) --> step time, idle
share of each rank, and when each rank did what

The order in which a rank works is fixed by its list, so a run over all instructions in any order that respects the
dependencies gives every time at once, without an event queue. A message moves when both sides have posted it and all
earlier ones of its channel have moved; sending and receiving also cost the two ranks time of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.plan.instructions import COMPUTES, SENDS, Instruction, Message, Op, Schedule, Step, all_steps


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
    send_features: float = 0.0  # these three: the same of what slices send
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


_OF_FEATURES = frozenset({Op.SEND_FEATURES, Op.RECEIVE_FEATURES})


class Program:
    """A schedule in one order of all ranks' instructions; made once, simulated with many costs."""

    def __init__(self, schedule: Schedule) -> None:
        """Raises ValueError where no rank can go on."""
        self.ranks = len(schedule)
        self.steps: list[tuple[Step, int, int]] = []  # with the numbers of its message and channel, -1: none
        messages: dict[Message, int] = {}
        channels: dict[tuple[int, int, str], int] = {}
        for step in all_steps(schedule):
            number = channel = -1
            if step.message is not None:
                number = messages.setdefault(step.message, len(messages))
                channel = channels.setdefault(step.message.channel, len(channels))
            self.steps.append((step, number, channel))


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
    clock, busy = [0.0] * program.ranks, [0.0] * program.ranks
    posted: dict[int, float] = {}  # of one side, until the other has posted, too
    arrived: dict[int, float] = {}
    channel_free: dict[int, float] = defaultdict(float)
    history: list[TimeSpan] = []
    forward, backward = seconds.forward, seconds.backward
    for step, message, channel in program.steps:
        rank, x, _ = step
        op, begin = x.op, clock[rank]
        of_features = op in _OF_FEATURES
        work = 0.0
        if op in COMPUTES:
            ready = arrived[message] if message >= 0 else 0.0
            if before is not None:
                other = before(step, begin, ready)
                begin += other
                busy[rank] += other
            begin = max(begin, ready)
            work = forward[x.stage] if op is Op.FORWARD else backward[x.stage]
            if message >= 0:
                work += seconds.receive if op is Op.BACKWARD or x.stage else seconds.receive_features
        elif op is Op.ENCODE:
            work = seconds.encode[rank]
            if message >= 0:
                begin = max(begin, arrived[message])
                work += seconds.receive_features
        elif message >= 0:
            if op in SENDS:
                work = seconds.send_features if of_features else seconds.send
            if message in posted:
                moves = max(posted.pop(message), begin + work, channel_free[channel])
                takes = seconds.transfer_features if of_features else seconds.transfer
                channel_free[channel] = arrived[message] = moves + takes
            else:
                posted[message] = begin + work
        clock[rank] = begin + work
        if work:
            busy[rank] += work
            if spans:
                history.append(TimeSpan(rank, x, begin, begin + work))
    total = max(clock) + seconds.end
    idle = tuple(1 - (b + seconds.end) / total if total else 0.0 for b in busy)
    if spans and seconds.end:
        history += [TimeSpan(rank, Instruction(Op.OPTIMIZER_STEP), max(clock), total) for rank in range(program.ranks)]
    return Simulation(total, idle, tuple(history))
