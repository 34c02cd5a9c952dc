"""Where the frozen encoder runs: in the slots in which rank 0 would wait, up to a whole step ahead.

A frozen encoder needs no backward and does not depend on the optimizer, so rank 0 may encode coming micro-batches, also
those of the next step, whenever it waits for a message. Work in flight cannot be polled everywhere (gloo), so the
places are chosen before the run: a step is simulated, encodes go into its gaps, and the result is simulated in turn.
Features are the same whenever they are made, so results do not change by a bit; the price is the memory of features
that wait (`buffered`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mmtrain.plan.schedule import Encodes, Op, Schedule, Step, immediate_encodes, training_schedule
from mmtrain.plan.simulate import Program, Simulation, StageSeconds, simulate

GAPS = (1.0, 0.5)  # share of an encode that a gap must hold to be used
GAIN = 0.002  # less is not worth the buffer


def best_encodes(
    pipeline: int,
    microbatches: int,
    first_trainable_stage: int,
    stages_per_rank: int,
    seconds: StageSeconds,
    most: int,
    *,
    exactly: int | None = None,
) -> tuple[Schedule, Encodes, Simulation]:
    """The schedule whose encodes make the simulated step shortest, at most `most` micro-batches buffered.

    Without a gain of GAIN, or with `most` 0, each micro-batch is encoded right before its forward. `exactly`
    asks for steps that begin with so many encoded, whether that is faster or not.
    """
    shape = pipeline, microbatches, first_trainable_stage, stages_per_rank
    schedule = training_schedule(*shape)
    program = Program(schedule)
    found = schedule, immediate_encodes(schedule[0]), simulate(program, seconds)
    if exactly is None and (pipeline == 1 or most == 0 or seconds.encode == 0):
        return found
    filled: dict[Encodes, float] = {}  # to a lower bound of the step's seconds, in the order of `prefetched`
    for prefetched in _candidates(min(microbatches, most)) if exactly is None else (exactly,):
        for gap in GAPS:
            encodes, least = _fill_gaps(program, microbatches, seconds, prefetched, gap, max(most, prefetched))
            filled[encodes] = least
    limit = found[2].seconds * (1 - GAIN) if exactly is None else math.inf
    tried: dict[Encodes, tuple[Schedule, Encodes, Simulation]] = {}

    def run(encodes: Encodes) -> tuple[Schedule, Encodes, Simulation]:
        if encodes not in tried:  # building the lists takes ten times as long as one simulation
            changed = training_schedule(*shape, encodes)
            tried[encodes] = changed, encodes, simulate(Program(changed), seconds)
        return tried[encodes]

    for encodes, least in sorted(filled.items(), key=lambda pair: pair[1]):
        if least >= limit:
            break
        changed = run(encodes)
        if changed[2].seconds < limit:
            found, limit = changed, changed[2].seconds
    for encodes, least in filled.items():  # as good as the best, with a smaller buffer
        if encodes.prefetched < found[1].prefetched and least <= limit * (1 + GAIN):
            changed = run(encodes)
            if changed[2].seconds <= limit * (1 + GAIN):
                return changed
    return found


def _candidates(most: int) -> Iterator[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... and `most`: how many features a step may begin with."""
    prefetched = 0
    while prefetched < most:
        yield prefetched
        prefetched += max(1, 2 ** (prefetched.bit_length() - 2)) if prefetched > 1 else 1
    yield most


def _fill_gaps(
    program: Program, microbatches: int, seconds: StageSeconds, prefetched: int, gap: float, most: int
) -> tuple[Encodes, float]:
    """Encodes put into rank 0's gaps of at least `gap` encodes, in one simulated step that begins with `prefetched`.

    With a lower bound of the step's seconds.
    """
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
            if ready - now - count * seconds.encode < gap * seconds.encode:
                break
            count += 1
            encoded += 1
        if first_forward and encoded <= x.microbatch:
            count += 1
            encoded += 1
        used += first_forward
        before.append(count)
        work = seconds.forward[x.stage] if x.op is Op.FORWARD else seconds.backward[x.stage]
        done = max(now + count * seconds.encode, ready) + work
        return count * seconds.encode

    least = simulate(program, replace(seconds, encode=0.0), before=fill).seconds
    left = microbatches + prefetched - encoded
    return Encodes(prefetched, (*before, left)), max(least, done + left * seconds.encode + seconds.end)
