"""Memory that a schedule takes on a rank, from a walk over the rank's instructions.

schedule --instants--> what lives while each instruction runs: activations kept, messages, features, the work itself
         --peak, with the bytes of stages--> the most bytes at once

A sender keeps a message until it knows that it is gone: until its receiver has sent something after using it. Backends
that cannot be asked (gloo) keep all messages until the step's end.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.plan.instructions import COMPUTES, RECEIVES, SENDS, Message, Op, Schedule, chain_of, steps_of


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes of what waits between instructions, of one micro-batch."""

    hidden: int  # an activation's hidden states, or a gradient
    integers: int  # which cross a border with an activation
    features: int  # from the last slice's ENCODE to stage 0's FORWARD
    batch: int  # from LOAD to stage 0's FORWARD, without pixels
    pixels: int = 0  # from LOAD to the first slice's ENCODE
    between_slices: int = 0  # from a slice's ENCODE to the next one's


class StageBytes(NamedTuple):
    """Of one stage and micro-batch; what is `kept` is part of the other two."""

    kept: int  # from FORWARD to BACKWARD
    forward: int  # most at once while FORWARD runs
    backward: int  # most at once while BACKWARD runs


class Instant(NamedTuple):
    """What lives on a rank while one instruction runs."""

    op: Op  # FORWARD, BACKWARD, ENCODE, or OPTIMIZER_STEP for the step's end
    place: int  # of the stage among those of the rank; 0 where no stage is meant
    kept: tuple[int, ...]  # micro-batches that each stage of the rank keeps, without the one that runs
    buffers: int  # bytes of messages, features and batches


class Peak(NamedTuple):
    """The most bytes at once beyond weights and optimizer state, and what they are at that instant."""

    activations: int  # kept for backwards, messages, features, batches
    working: int  # of the instruction that runs


def instants(schedule: Schedule, buffers: Buffers, *, polls: bool) -> tuple[tuple[Instant, ...], ...]:
    """Per pipeline rank, every instant of a training step that takes more than all others in something.

    `polls`: sends that are known to be gone are let go at the next send; else all are kept until the step's end.
    """
    gone = _known_gone(schedule) if polls else [{}] * len(schedule)
    return tuple(_largest(_walk(schedule, rank, buffers, gone[rank])) for rank in range(len(schedule)))


def _walk(schedule: Schedule, rank: int, buffers: Buffers, gone: Mapping[int, int]) -> list[Instant]:
    """Every instant of a rank; `gone`: for sends by index, the index at which they are known to be gone."""
    ranks, instructions = len(schedule), schedule[rank]
    buffered: dict[tuple[Op, int, tuple[int, ...]], int] = {}
    kept = [0] * (max(x.stage for x in instructions) // ranks + 1)
    with_backward = {x.stage for x in instructions if x.op is Op.BACKWARD}
    chain = chain_of(schedule)
    waiting = _waiting_at_begin(schedule, rank, buffers)
    on_their_way: list[tuple[int, int]] = []  # (index at which it is known to be gone, bytes)

    def note(op: Op, place: int) -> None:
        key = op, place, tuple(kept)
        buffered[key] = max(buffered.get(key, 0), waiting)

    for i, (_, x, message) in enumerate(steps_of(schedule, rank)):
        op, place = x.op, max(x.stage, 0) // ranks
        size = 0 if message is None else _size(message, buffers)
        if op is Op.LOAD:
            waiting += buffers.batch + buffers.pixels
        elif op is Op.ENCODE:
            note(op, 0)
            waiting -= buffers.between_slices if rank else buffers.pixels
            waiting += buffers.features * (len(chain) == 1)
        elif op in COMPUTES:
            kept[place] -= op is Op.BACKWARD
            note(op, place)
            if op is Op.FORWARD:
                kept[place] += x.stage in with_backward
            waiting -= buffers.features + buffers.batch if op is Op.FORWARD and x.stage == 0 else size
        else:
            if i in gone:
                waiting -= sum(size for index, size in on_their_way if index < i)
                on_their_way = [(index, size) for index, size in on_their_way if index >= i]
                on_their_way.append((gone[i], size))
            waiting += size
    note(Op.OPTIMIZER_STEP, 0)
    return [Instant(*key, size) for key, size in buffered.items()]


def _waiting_at_begin(schedule: Schedule, rank: int, buffers: Buffers) -> int:
    """Bytes of what waits when a step begins: what came from the slice before, on rank 0 batches and features."""
    chain = chain_of(schedule)
    if rank not in chain:
        return 0
    # A slice encodes in turn, from the first micro-batch that it has not.
    ahead = [next((x.microbatch for x in schedule[r] if x.op is Op.ENCODE), 0) for r in chain]
    if rank == 0:
        return ahead[0] * buffers.batch + ahead[-1] * buffers.features
    place = chain.index(rank)
    return (ahead[place - 1] - ahead[place]) * buffers.between_slices


def _size(message: Message, buffers: Buffers) -> int:
    if message.kind == "features":
        return buffers.between_slices if message.consumer else buffers.features
    return buffers.hidden + buffers.integers * (message.kind == "activation")


def _known_gone(schedule: Schedule) -> list[dict[int, int]]:
    """Per rank, for each send by index: the index of the compute whose input tells that the message was taken.

    A slice's message is gone, too, when its sender runs a FORWARD of that micro-batch: its features have been used.
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
        answers = [answer for answer in flows.get((destination, source), ()) if answer.kind != "features"]
        places = [sent[answer] for answer in answers]
        never = len(schedule[source])
        earliest = [never, *itertools.accumulate((used[a] for a in reversed(answers)), min)][::-1]
        for message in messages:
            taken = earliest[bisect_right(places, used[message])] if message in used else never
            if message.kind == "features":
                taken = min(taken, forwards.get((source, message.microbatch), never))
            gone[source][sent[message]] = taken
    return gone


def _largest(moments: Sequence[Instant]) -> tuple[Instant, ...]:
    """Drop instants that another one of the same work exceeds in everything: fewer to look at for each peak."""
    result: list[Instant] = []
    for instant in sorted(moments, key=lambda x: (-sum(x.kept), -x.buffers)):
        if not any(
            larger.op is instant.op
            and larger.place == instant.place
            and larger.buffers >= instant.buffers
            and all(a >= b for a, b in zip(larger.kept, instant.kept, strict=True))
            for larger in result
        ):
            result.append(instant)
    return tuple(result)


def peak(moments: Sequence[Instant], stages: Sequence[StageBytes], encode_working: int, end_working: int) -> Peak:
    """Return the most bytes at once, from the bytes of a rank's stages and of the encoder's and optimizer's work."""
    most = Peak(0, 0)
    for op, place, kept, buffers in moments:
        activations = buffers
        for count, stage in zip(kept, stages, strict=True):
            activations += count * stage.kept
        if op in COMPUTES:
            running = stages[place]
            activations += running.kept
            working = (running.forward if op is Op.FORWARD else running.backward) - running.kept
        else:
            working = encode_working if op is Op.ENCODE else end_working
        if activations + working > most[0] + most[1]:
            most = Peak(activations, working)
    return most
