"""Event simulation of a schedule: the very instruction lists that the engine runs, with seconds for each of them.

schedule --Program: one order of all ranks' instructions, dependencies resolved--> simulate(program, seconds of each
stage) --> step time, idle share of each rank, and when each rank did what

The order in which a rank works is fixed by its list, so a run over all instructions in any order that respects the
dependencies gives every time at once, without an event queue. A message moves when both sides have posted it and all
earlier ones of its channel have moved; sending and receiving also cost the two ranks time of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.plan.schedule import COMPUTES, RECEIVES, SENDS, Instruction, Message, Op, Schedule, carried, needed_before


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """What the instructions of a step cost, in seconds; per micro-batch where a stage is meant."""

    forward: tuple[float, ...]  # per stage, without the encoder
    backward: tuple[float, ...]  # per stage, recomputation included; 0 where nothing runs backward
    encode: float = 0.0
    send: float = 0.0  # of the sender, while it posts a message
    receive: float = 0.0  # of the receiver, when it takes one
    transfer: float = 0.0  # from the moment both sides have posted a message to its arrival
    end: float = 0.0  # reductions and optimizer


class Span(NamedTuple):
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
    spans: tuple[Span, ...]  # in each rank's order of work, without what took no time

    @property
    def mean_idle(self) -> float:
        """Idle share over all ranks."""
        return sum(self.idle) / len(self.idle)


class Step(NamedTuple):
    """An instruction in the common order; what it needs or makes is a number into the list of finish times."""

    rank: int
    instruction: Instruction
    local: int  # the compute on this rank that it waits for, -1: none
    message: int  # that it sends, posts or waits for, -1: none
    makes: int  # its own finish time, -1: nobody asks


class Program:
    """A schedule in one order over all ranks that respects every dependency; made once, simulated with many costs."""

    def __init__(self, schedule: Schedule, chunks_per_rank: int) -> None:
        """Raises ValueError where no rank can go on."""
        self.ranks = len(schedule)
        self.stages = self.ranks * chunks_per_rank
        self.steps: list[Step] = []
        self.channels: list[int] = []  # of each message
        self._messages: dict[Message, int] = {}
        self._channels: dict[tuple[int, int, str], int] = {}
        self._computes: dict[Instruction, int] = {}
        self._order(schedule)

    @property
    def computes(self) -> int:
        """Finish times that are kept."""
        return len(self._computes)

    def _order(self, schedule: Schedule) -> None:
        at = [0] * self.ranks
        posted: dict[Message, set[bool]] = defaultdict(set)
        moved = True
        while moved:
            moved = False
            for rank, instructions in enumerate(schedule):
                while at[rank] < len(instructions):
                    step = self._step(rank, instructions[at[rank]], posted)
                    if step is None:
                        break
                    self.steps.append(step)
                    at[rank] += 1
                    moved = True
        if any(a < len(instructions) for a, instructions in zip(at, schedule, strict=True)):
            raise ValueError("the schedule cannot finish: every rank waits")

    def _step(self, rank: int, x: Instruction, posted: dict[Message, set[bool]]) -> Step | None:
        """The instruction with its dependencies, None while one of them is not met."""
        stage, k = x.stage, x.microbatch
        if x.op in COMPUTES:
            needed = needed_before(x, self.ranks, self.stages)
            if needed is not None and len(posted[needed]) < 2:
                return None
            neighbour = Instruction(x.op, stage - 1 if x.op is Op.FORWARD else stage + 1, k)
            local = -1
            if needed is None and 0 <= neighbour.stage < self.stages:
                if neighbour not in self._computes:
                    return None
                local = self._computes[neighbour]
            made = self._computes.setdefault(x, len(self._computes))
            return Step(rank, x, local, -1 if needed is None else self._messages[needed], made)
        if x.op not in SENDS | RECEIVES:
            return Step(rank, x, -1, -1, -1)
        message = carried(x, self.ranks)
        number = self._messages.setdefault(message, len(self._messages))
        if number == len(self.channels):
            self.channels.append(self._channels.setdefault(message.channel, len(self._channels)))
        posted[message].add(x.op in SENDS)
        return Step(rank, x, -1, number, -1)


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
    assert len(seconds.forward) == len(seconds.backward) == program.stages
    clock, busy = [0.0] * program.ranks, [0.0] * program.ranks
    finished = [0.0] * program.computes
    posted: dict[int, float] = {}  # of one side, until the other has posted, too
    arrived: dict[int, float] = {}
    channel_free: dict[int, float] = defaultdict(float)
    history: list[Span] = []
    forward, backward = seconds.forward, seconds.backward
    for step in program.steps:
        rank, x, local, message, makes = step
        op, now = x.op, clock[rank]
        if op in COMPUTES:
            ready = arrived[message] if message >= 0 else finished[local] if local >= 0 else 0.0
            work = forward[x.stage] if op is Op.FORWARD else backward[x.stage]
            if message >= 0:
                work += seconds.receive
            if before is not None:
                other = before(step, now, ready)
                now += other
                busy[rank] += other
            begin = ready if ready > now else now
            finished[makes] = begin + work
        elif message >= 0:
            begin, work = now, seconds.send if op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT) else 0.0
            if message in posted:
                channel = program.channels[message]
                moves = max(posted.pop(message), begin + work, channel_free[channel])
                channel_free[channel] = arrived[message] = moves + seconds.transfer
            else:
                posted[message] = begin + work
        else:
            begin, work = now, seconds.encode if op is Op.ENCODE else 0.0
        if work:
            clock[rank] = begin + work
            busy[rank] += work
            if spans:
                history.append(Span(rank, x, begin, begin + work))
    total = max(clock) + seconds.end
    idle = tuple(1 - (b + seconds.end) / total if total else 0.0 for b in busy)
    if spans and seconds.end:
        history += [Span(rank, Instruction(Op.OPTIMIZER_STEP), max(clock), total) for rank in range(program.ranks)]
    return Simulation(total, idle, tuple(history))
