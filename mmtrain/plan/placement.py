"""Slots for a frozen encoder: its ranks run it where they would wait, for coming steps, too.

a step without encoder --simulated, encodes put into its gaps (`_fill`)--> when each slice encodes
    which micro-batch
    --how early that must be for its use--> how many micro-batches each slice is ahead (`Encodes`)

A frozen encoder does not depend on the optimizer, so each rank may encode coming micro-batches
while it waits for a message. Results do not change by a bit; the price is the memory of what waits
between slices and of features.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mmtrain.plan.instructions import Op, Schedule, Step
from mmtrain.plan.schedule import Chain, Encodes, leading_encodes
from mmtrain.plan.simulate import MessageCost, Program, StageSeconds, simulate

GAPS = (1.0, 0.6, 0.4, 0.25, 0.1)
"""Shares of an encode that a gap must hold to be used; with SHARES this saves 5.6% over one way,
and up to 1.6% over three gaps and two shares."""
SHARES = (0.0, 0.125, 0.5)
"""Shares of a rank's encodes that come before its first compute, whatever they delay."""
GAIN = 0.002
"""Share of a step that being further ahead must save."""
MOVED_INSTRUCTIONS = 400_000
"""Simulated in all moves of blocks of one cut: a fraction of a second. Moves save 1.9%."""
MOST_STEPS_AHEAD = 3
"""Steps that the first slice may be ahead: what waits takes memory, and a run begins by making
it.
"""
EVALUATION_ROUND = 4
"""Micro-batches of one pass of an evaluation, per pipeline rank. The first stage may be that far
ahead of the last one, so this bounds the hidden states that wait in between, and the idle share of
a pass to (p - 1) / (5p - 1)."""
SLACK = 0.25
"""Share of an encode by which a slice's output should come earlier than simulated."""


class Placement(NamedTuple):
    """The encodes of each slice, and a lower bound of the step's seconds."""

    least_seconds: float
    chain: Chain

    @property
    def ahead(self) -> int:
        return sum(encodes.ahead for encodes in self.chain if encodes is not None)


def placements(
    schedule: Schedule,
    program: Program,
    microbatches: int,
    seconds: StageSeconds,
    chain: Sequence[int],
) -> list[Placement]:
    """Return placements of the slices on the ranks `chain`, the most promising first.

    `program` is the step that encodes nothing ahead. Of equally fast placements those come first
    that are least ahead. Those without gaps come last, since their bound is far from what their
    lists take.
    """
    bounds: dict[Chain, float] = {}
    for filled, least in _fills(program, microbatches, seconds, chain).values():
        if filled[0].ahead <= MOST_STEPS_AHEAD * microbatches:
            bounds[filled] = least

    leading = []
    if len(chain) > 1:  # the plain schedule has the whole encoder on rank 0
        leads = {microbatches}
        if len(seconds.forward) == len(schedule):
            leads |= {1, len(chain), 2 * len(chain)}
        for lead in sorted(leads):
            if lead <= microbatches:
                leading.append(leading_encodes(schedule, chain, lead))
    # With none ahead the first forward comes after a whole chain, and the rest of the step after
    # that forward.
    loose = simulate(program, _without_encoder(seconds)).seconds + sum(seconds.encode)
    for encodes in leading:
        bounds.setdefault(encodes, loose)

    best = min(bounds.values(), default=0.0) * (1 + GAIN)
    return sorted(
        (Placement(least, encodes) for encodes, least in bounds.items()),
        key=lambda x: (x.chain in leading, max(x.least_seconds, best), x.ahead, x.least_seconds),
    )


@dataclass
class _Slice:
    """One slice of a chain, while its encodes are put into the gaps of its rank."""

    seconds: float  # of one encode, with its messages
    left: int  # micro-batches to encode
    first: int  # number of encodes before the first compute in any case
    before: list[int] = field(default_factory=list)  # number of encodes before each compute
    begins: list[float] = field(default_factory=list)  # of each encode
    compute: tuple[Step, float] = field(init=False)  # the latest one, and when it begins

    def encode(self, count: int, now: float) -> float:
        self.before.append(count)
        if not count:
            return 0.0
        self.begins += [now + i * self.seconds for i in range(count)]
        self.left -= count
        return count * self.seconds

    def fill(self, gap: float, now: float, ready: float) -> float:
        """Put encodes before a compute, as many as each have room for `gap` of their seconds;
        return their seconds.
        """
        count = 0 if self.before else self.first
        if self.left > count:
            fitting = self.left
            if self.seconds:
                fitting = math.floor((ready - now) / self.seconds - gap) + 1
            count = min(max(count, fitting), self.left)
        return self.encode(count, now)

    def least_ahead(self, needed: Sequence[float], first: int, transfer: float) -> int:
        """Return how many micro-batches ahead the slice must be so that each comes when it is
        `needed`.

        `needed`: the times of micro-batch `first`, `first` + 1, ... The output of earlier steps is
        there in any case.
        """
        latest = transfer + (1 + SLACK) * self.seconds
        ahead = 0
        for number, when in enumerate(needed, first + 1):
            ahead = max(ahead, number - bisect_right(self.begins, when - latest))
        return ahead


def _fills(
    program: Program,
    microbatches: int,
    seconds: StageSeconds,
    chain: Sequence[int],
) -> dict[tuple[float, int], tuple[Chain, float]]:
    """Fill gaps in many ways, by the share of an encode that a gap must hold and the encodes that
    come first.
    """
    firsts = dict.fromkeys(round(share * microbatches) for share in SHARES)
    fills = {}
    for gap, first in itertools.product(GAPS, firsts):
        fills[gap, first] = _fill(program, microbatches, seconds, chain, gap, first)
    return fills


def moved_blocks(
    program: Program,
    microbatches: int,
    slices: tuple[int, ...],
    seconds_of: Callable[[tuple[int, ...]], StageSeconds | None],
) -> tuple[int, ...]:
    """Move blocks of the encoder between ranks, one at a time, while the filled step gets shorter.

    `seconds_of` gives the seconds of a step with other slices, or None if they do not fit. The
    ranks of the chain stay.
    """
    chain = chain_of_slices(slices)
    fills = _fills(program, microbatches, seconds_of(slices), chain)
    gap, first = min(fills, key=lambda x: fills[x][1])
    least = fills[gap, first][1]
    left = MOVED_INSTRUCTIONS // len(program.steps)
    moved = True
    while moved:
        moved = False
        for source, target in itertools.permutations(chain, 2):
            blocks = [*slices]
            blocks[source] -= 1
            blocks[target] += 1
            changed = tuple(blocks)
            if left == 0 or min(changed) < 0 or chain_of_slices(changed) != chain:
                continue
            seconds = seconds_of(changed)
            if seconds is None:
                continue
            left -= 1
            bound = _fill(program, microbatches, seconds, chain, gap, first)[1]
            if bound < least * (1 - 1e-4):
                slices = changed
                least = bound
                moved = True
    return slices


def chain_of_slices(slices: Sequence[int]) -> tuple[int, ...]:
    """The pipeline ranks of the chain: rank 0, which makes the patches, and those that hold
    blocks.
    """
    return tuple(rank for rank, blocks in enumerate(slices) if blocks or rank == 0)


def _fill(
    program: Program,
    microbatches: int,
    seconds: StageSeconds,
    chain: Sequence[int],
    gap: float,
    first: int,
) -> tuple[Chain, float]:
    """Put each slice into its rank's gaps of at least `gap` of its encodes, `first` of them before
    the first compute.

    Encodes that find no gap come at the step's end. Returns the encodes of each slice and a lower
    bound of the step's seconds.
    """
    slices: dict[int, _Slice] = {}
    if len(chain) == 1:  # no messages
        seconds = replace(seconds, features=MessageCost())
    for rank in chain:
        messages = seconds.features.send
        if rank:
            messages += seconds.features.receive
        slices[rank] = _Slice(seconds.encode[rank] + messages, microbatches, first)
    forwards = []  # begins of stage 0's, by micro-batch
    first_forward = seconds.forward[0] + seconds.features.receive
    others = replace(_without_encoder(seconds), forward=(first_forward, *seconds.forward[1:]))

    def fill(step: Step, now: float, ready: float) -> float:
        rank, x, _ = step
        here = slices.get(rank)
        spent = 0.0
        if here is not None:
            spent = here.fill(gap, now, ready)
        begin = max(now + spent, ready)
        if here is not None:
            here.compute = step, begin
        if x.stage == 0 and x.op is Op.FORWARD:
            forwards.append(begin)
        return spent

    least = simulate(program, others, before=fill).seconds
    for rank in chain:
        step, begin = slices[rank].compute
        x = step.instruction
        done = begin + (others.forward if x.op is Op.FORWARD else others.backward)[x.stage]
        least = max(least, done + slices[rank].encode(slices[rank].left, done) + seconds.end)

    placed: list[Encodes | None] = [None] * len(seconds.encode)
    needed = forwards
    ahead = 0
    for rank in reversed(chain):
        here = slices[rank]
        ahead = max(ahead, here.least_ahead(needed, ahead, seconds.features.transfer))
        placed[rank] = Encodes(ahead, tuple(here.before))
        needed = here.begins
    return tuple(placed), least


def _without_encoder(seconds: StageSeconds) -> StageSeconds:
    return replace(seconds, encode=(0.0,) * len(seconds.encode))
