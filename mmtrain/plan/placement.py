"""Where the slices of a frozen encoder run: in the slots in which their ranks would wait, also for coming steps.

A frozen encoder needs no backward and does not depend on the optimizer, so each rank may run its slice for coming
micro-batches, also those of later steps, whenever it waits for a message. Work in flight cannot be polled everywhere
(gloo), so the places are chosen before the run: a step without encoder is simulated, encodes go into its gaps, and how
far each slice must be ahead follows from the simulated times. Results do not change by a bit; the price is the memory
of what waits between slices and of features.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mmtrain.plan.instructions import Op, Schedule, Step
from mmtrain.plan.schedule import Chain, Encodes, leading_encodes
from mmtrain.plan.simulate import Program, StageSeconds, simulate

GAPS = (1.0, 0.6, 0.4, 0.25, 0.1)
"""Shares of an encode that a gap must hold to be used."""
SHARES = (0.0, 0.125, 0.5)
"""Of a rank's encodes that come before its first compute, whatever they delay."""
NEARER = 0.85
"""Times a gap, or once less: what is tried near the best of these, twice, beside one encode more or less at first."""
GAIN = 0.002
"""Share of a step that is not worth being further ahead."""
FILLED_INSTRUCTIONS = 400_000
"""Of all moves of blocks of one cut: a fraction of a second."""
MOST_STEPS_AHEAD = 3
"""That the first slice of a chain may be ahead: what waits takes memory, and a run begins by making it."""
EVALUATION_ROUND = 4
"""Micro-batches of one pass of an evaluation, per pipeline rank. The first stage may be so many ahead of the last one,
so this bounds the hidden states that wait in between, and the idle share of a pass to (p - 1) / (5p - 1)."""
SLACK = 0.25
"""Of an encode: how much earlier than simulated what a slice makes should be needed."""


class Placement(NamedTuple):
    """Where slices run, and the least that a step then takes, in seconds."""

    least_seconds: float
    chain: Chain

    @property
    def ahead(self) -> int:
        """Micro-batches that all slices together are ahead."""
        return sum(encodes.ahead for encodes in self.chain if encodes is not None)


def placements(
    schedule: Schedule,
    program: Program,
    microbatches: int,
    seconds: StageSeconds,
    chain: Sequence[int],
    *,
    most: float = math.inf,
    exactly: int | None = None,
) -> list[Placement]:
    """Placements of the slices on the ranks `chain` into a step whose `program` encodes nothing ahead, the best first.

    Of placements that are as fast as the best one those come first that are least ahead; where several ranks encode,
    those without gaps come last, since little is known of their seconds. Features wait for `most` micro-batches at
    most; `exactly` asks for steps that begin with so many, whether that is faster or not.
    """
    found: dict[Chain, float] = {}
    leading: list[Chain] = []
    if len(chain) == 1:
        counts = _candidates(int(min(microbatches, most))) if exactly is None else (exactly,)
        for count in counts:
            for gap in (1.0, 0.5):
                encodes, least = _fill_rank_0(program, microbatches, seconds, count, gap, max(most, count))
                found[(encodes, *[None] * (len(schedule) - 1))] = least
    else:
        # With none ahead the first forward comes after a whole chain, and the rest of the step after that forward.
        bound = simulate(program, _without_encoder(seconds)).seconds + sum(seconds.encode) * (not exactly)
        one_stage = len(seconds.forward) == len(schedule)
        for lead in {1, len(chain), 2 * len(chain), microbatches} if one_stage else {microbatches}:
            if lead <= microbatches:
                leading.append(leading_encodes(schedule, chain, lead, exactly or 0))
        if exactly != 0:
            for filled, least in _fills(program, microbatches, seconds, chain).values():
                features = filled[chain[-1]].ahead
                more = 0 if exactly is None else exactly - features
                within = filled[0].ahead + more <= MOST_STEPS_AHEAD * microbatches and features <= most
                if within and more >= 0:  # further ahead all slices run in the same slots
                    found[tuple(one and replace(one, ahead=one.ahead + more) for one in filled)] = least
        for encodes in leading:
            found.setdefault(encodes, bound)
    options = [Placement(least, encodes) for encodes, least in found.items()]
    best = min(option.least_seconds for option in options) * (1 + GAIN)
    # In a chain of several, the bound of what is not put into gaps is far from what its lists take.
    loosely = set(leading)
    return sorted(options, key=lambda x: (x.chain in loosely, max(x.least_seconds, best), x.ahead, x.least_seconds))


def _candidates(most: int) -> Iterator[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... and `most`: how many features a step may begin with."""
    prefetched = 0
    while prefetched < most:
        yield prefetched
        prefetched += max(1, 2 ** (prefetched.bit_length() - 2)) if prefetched > 1 else 1
    yield most


def _fill_rank_0(
    program: Program, microbatches: int, seconds: StageSeconds, prefetched: int, gap: float, most: float
) -> tuple[Encodes, float]:
    """The whole encoder put into rank 0's gaps of at least `gap` encodes; each step begins with `prefetched` encoded.

    At most `most` micro-batches are encoded and wait. With a lower bound of the step's seconds.
    """
    encode = seconds.encode[0]
    before: list[int] = []
    encoded, used = prefetched, 0
    done = 0.0  # when rank 0's latest compute ends, at the earliest

    def fill(step: Step, now: float, ready: float) -> float:
        nonlocal encoded, used, done
        if step.rank != 0:
            return 0.0
        x, count = step.instruction, 0
        first_forward = x.op is Op.FORWARD and x.stage == 0
        while encoded < microbatches + prefetched and encoded - used < most:
            if ready - now - count * encode < gap * encode:
                break
            count += 1
            encoded += 1
        if first_forward and encoded <= x.microbatch:
            count += 1
            encoded += 1
        used += first_forward
        before.append(count)
        done = max(now + count * encode, ready) + _work(step, seconds)
        return count * encode

    least = simulate(program, _without_encoder(seconds), before=fill).seconds
    left = microbatches + prefetched - encoded
    return Encodes(prefetched, (*before, left)), max(least, done + left * encode + seconds.end)


class _Slice:
    """One slice of a chain, while its encodes are put into the gaps of its rank."""

    def __init__(self, seconds: float, microbatches: int, first: int) -> None:
        self.seconds = seconds  # of one encode, with its messages
        self.left = microbatches
        self.first = first  # so many come before the first compute in any case
        self.before: list[int] = []
        self.begins: list[float] = []  # of each encode
        self.compute: tuple[Step, float]  # the latest one, and when it begins

    def place(self, count: int, now: float) -> float:
        """Put so many encodes here; returns their seconds."""
        self.before.append(count)
        if not count:
            return 0.0
        self.begins += [now + i * self.seconds for i in range(count)]
        self.left -= count
        return count * self.seconds

    def fill(self, gap: float, now: float, ready: float) -> float:
        """Put encodes before a compute, as many as each find `gap` of its seconds; returns their seconds."""
        count = 0 if self.before else self.first
        if self.left > count:
            fitting = math.floor((ready - now) / self.seconds - gap) + 1 if self.seconds else self.left
            count = min(max(count, fitting), self.left)
        return self.place(count, now)

    def least_ahead(self, needed: Sequence[float], first: int, transfer: float) -> int:
        """So many micro-batches ahead that each is made when it is `needed`: micro-batch `first`, `first` + 1, ...

        What is made in an earlier step is there in any case.
        """
        latest = transfer + (1 + SLACK) * self.seconds
        made = (bisect_right(self.begins, when - latest) for when in needed)
        return max((first + i - count + 1 for i, count in enumerate(made)), default=0)


def _fills(
    program: Program, microbatches: int, seconds: StageSeconds, chain: Sequence[int]
) -> dict[tuple[float, int], tuple[Chain, float]]:
    """Slices put into gaps in many ways, then in ways near the fastest, each with a lower bound of a step's seconds.

    By the share of an encode that a gap must hold, and how many come first.
    """
    found: dict[tuple[float, int], tuple[Chain, float]] = {}

    def fill(gap: float, first: int) -> None:
        if 0 <= first <= microbatches and (gap, first) not in found:
            found[gap, first] = _fill(program, microbatches, seconds, chain, gap, first)

    for gap in GAPS:
        for share in SHARES:
            fill(gap, round(share * microbatches))
    for _ in range(2):
        gap, first = min(found, key=lambda x: found[x][1])
        for near in (gap * NEARER, first), (gap / NEARER, first), (gap, first - 1), (gap, first + 1):
            fill(*near)
    return found


def moved_blocks(
    program: Program,
    microbatches: int,
    slices: tuple[int, ...],
    seconds_of: Callable[[tuple[int, ...]], StageSeconds | None],
) -> tuple[int, ...]:
    """Blocks of the encoder that the ranks hold, moved one at a time while the filled step gets shorter.

    `seconds_of`: of a step with such slices; None where they do not fit. The ranks of the chain stay the same.
    """
    chain = chain_of_slices(slices)
    fills = _fills(program, microbatches, seconds_of(slices), chain)
    gap, first = min(fills, key=lambda x: fills[x][1])
    least, left = fills[gap, first][1], FILLED_INSTRUCTIONS // len(program.steps)
    moved = True
    while moved:
        moved = False
        for source, target in itertools.permutations(chain, 2):
            changed = tuple(blocks - (rank == source) + (rank == target) for rank, blocks in enumerate(slices))
            if left == 0 or min(changed) < 0 or chain_of_slices(changed) != chain:
                continue
            seconds = seconds_of(changed)
            if seconds is None:
                continue
            left -= 1
            found = _fill(program, microbatches, seconds, chain, gap, first)[1]
            if found < least * (1 - 1e-4):
                slices, least, moved = changed, found, True
    return slices


def chain_of_slices(slices: Sequence[int]) -> tuple[int, ...]:
    """The pipeline ranks of the chain: rank 0, which makes the patches, and whoever holds blocks."""
    return tuple(rank for rank, blocks in enumerate(slices) if blocks or rank == 0)


def _fill(
    program: Program, microbatches: int, seconds: StageSeconds, chain: Sequence[int], gap: float, first: int
) -> tuple[Chain, float]:
    """Each slice put into its rank's gaps of at least `gap` of its encodes, `first` of them before the first compute.

    What finds no gap comes at the step's end. With a lower bound of the step's seconds.
    """
    slices = [None] * len(seconds.encode)
    for rank in chain:
        messages = seconds.send_features + seconds.receive_features * (rank > 0)
        slices[rank] = _Slice(seconds.encode[rank] + messages, microbatches, first)
    forwards: list[float] = []  # begins of stage 0's, by micro-batch
    first_forward = seconds.forward[0] + seconds.receive_features
    others = replace(_without_encoder(seconds), forward=(first_forward, *seconds.forward[1:]))

    def fill(step: Step, now: float, ready: float) -> float:
        rank, x, _ = step
        here = slices[rank]
        spent = 0.0 if here is None else here.fill(gap, now, ready)
        begin = max(now + spent, ready)
        if here is not None:
            here.compute = step, begin
        if x.stage == 0 and x.op is Op.FORWARD:
            forwards.append(begin)
        return spent

    least = simulate(program, others, before=fill).seconds
    for rank in chain:
        step, begin = slices[rank].compute
        done = begin + _work(step, others)
        least = max(least, done + slices[rank].place(slices[rank].left, done) + seconds.end)
    ahead: dict[int, int] = {}
    needed, at_least = forwards, 0
    for rank in reversed(chain):
        at_least = ahead[rank] = max(at_least, slices[rank].least_ahead(needed, at_least, seconds.transfer_features))
        needed = slices[rank].begins
    found = [one and Encodes(ahead[rank], tuple(one.before)) for rank, one in enumerate(slices)]
    return tuple(found), least


def _work(step: Step, seconds: StageSeconds) -> float:
    x = step.instruction
    return seconds.forward[x.stage] if x.op is Op.FORWARD else seconds.backward[x.stage]


def _without_encoder(seconds: StageSeconds) -> StageSeconds:
    return replace(seconds, encode=(0.0,) * len(seconds.encode))
