"""How much memory a schedule takes on a rank, from a walk over the rank's very instructions.

schedule --moments--> what lives while each instruction runs: activations kept, messages, features, the work itself
         --peak, with the bytes of stages--> the most bytes at once

A message that was sent is kept by its sender until it is known to be gone: once another message has come from its
receiver that was sent after it was used. Backends without a way to ask (gloo) keep all of them until the step's end.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.plan.schedule import COMPUTES, SENDS, Instruction, Message, Op, Schedule, needed_before, sent_after


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes of what waits between instructions, of one micro-batch."""

    hidden: int  # an activation's hidden states, or a gradient
    integers: int  # which cross a border with an activation
    features: int  # from ENCODE to stage 0's FORWARD
    batch: int  # from LOAD to stage 0's FORWARD


class StageBytes(NamedTuple):
    """Of one stage and micro-batch; what is `kept` is part of the other two."""

    kept: int  # from FORWARD to BACKWARD
    forward: int  # most at once while FORWARD runs
    backward: int  # most at once while BACKWARD runs


class Moment(NamedTuple):
    """What lives on a rank while one instruction runs."""

    op: Op  # FORWARD, BACKWARD, ENCODE, or OPTIMIZER_STEP for the step's end
    place: int  # of the stage among those of the rank; 0 where no stage is meant
    kept: tuple[int, ...]  # micro-batches that each stage of the rank keeps, without the one that runs
    buffers: int  # bytes of messages, features and batches


class Peak(NamedTuple):
    """The most bytes at once beyond weights and optimizer state, and what they are at that moment."""

    activations: int  # kept for backwards, messages, features, batches
    working: int  # of the instruction that runs

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.working


def moments(
    schedule: Schedule, chunks_per_rank: int, first_trainable_stage: int, buffers: Buffers, *, polls: bool
) -> tuple[tuple[Moment, ...], ...]:
    """Per pipeline rank, every moment of a training step that takes more than all others in something.

    `polls`: sends that are known to be gone are let go at the next send; else all are kept until the step's end.
    """
    stages = len(schedule) * chunks_per_rank
    gone = _known_gone(schedule, stages, first_trainable_stage) if polls else None
    return tuple(
        _largest(
            _walk(
                instructions, len(schedule), stages, first_trainable_stage, buffers, None if gone is None else gone[r]
            )
        )
        for r, instructions in enumerate(schedule)
    )


def _walk(
    instructions: Sequence[Instruction],
    ranks: int,
    stages: int,
    first: int,
    buffers: Buffers,
    gone: Mapping[int, int] | None,
) -> list[Moment]:
    found: dict[tuple[Op, int, tuple[int, ...]], int] = {}
    kept = [0] * (stages // ranks)
    activation = buffers.hidden + buffers.integers
    ahead = next((x.microbatch for x in instructions if x.op is Op.ENCODE), 0)
    waiting = ahead * (buffers.features + buffers.batch)
    on_their_way: list[tuple[int, int]] = []  # (index at which it is known to be gone, bytes)

    def note(op: Op, place: int) -> None:
        key = op, place, tuple(kept)
        found[key] = max(found.get(key, 0), waiting)

    for i, x in enumerate(instructions):
        op, place = x.op, max(x.stage, 0) // ranks
        if op is Op.LOAD:
            waiting += buffers.batch
        elif op is Op.ENCODE:
            note(op, 0)
            waiting += buffers.features
        elif op is Op.RECEIVE_ACTIVATION:
            waiting += activation
        elif op is Op.RECEIVE_GRADIENT:
            waiting += buffers.hidden
        elif op in SENDS and gone is not None:
            waiting -= sum(size for index, size in on_their_way if index < i)
            on_their_way = [(index, size) for index, size in on_their_way if index >= i]
            on_their_way.append((gone[i], activation if op is Op.SEND_ACTIVATION else buffers.hidden))
        elif op in COMPUTES:
            kept[place] -= op is Op.BACKWARD
            note(op, place)
            if needed_before(x, ranks, stages) is not None:
                waiting -= activation if op is Op.FORWARD else buffers.hidden
            if op is Op.FORWARD and x.stage == 0:
                waiting -= buffers.features + buffers.batch
            kept[place] += op is Op.FORWARD and x.stage >= first
            if sent_after(x, ranks, stages, first) is not None:
                waiting += activation if op is Op.FORWARD else buffers.hidden
    note(Op.OPTIMIZER_STEP, 0)
    return [Moment(*key, size) for key, size in found.items()]


def _known_gone(schedule: Schedule, stages: int, first_trainable_stage: int) -> list[dict[int, int]]:
    """Per rank, for each send by index: the index of the compute whose input tells that the message was taken."""
    ranks = len(schedule)
    sent: dict[Message, int] = {}  # where its sender lists it
    used: dict[Message, int] = {}  # where its receiver uses it
    flows: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by source and destination
    for instructions in schedule:
        made: Message | None = None
        for i, x in enumerate(instructions):
            if x.op in COMPUTES:
                made = sent_after(x, ranks, stages, first_trainable_stage)
                needed = needed_before(x, ranks, stages)
                if needed is not None:
                    used[needed] = i
            elif x.op in SENDS:
                assert made is not None, "a send follows the compute that made it"
                flows[made.source, made.destination].append(made)
                sent[made] = i
    gone: list[dict[int, int]] = [{} for _ in range(ranks)]
    for (source, destination), messages in flows.items():
        answers = flows.get((destination, source), [])  # in the order sent
        places = [sent[answer] for answer in answers]
        never = len(schedule[source])
        known = [never, *itertools.accumulate((used[a] for a in reversed(answers)), min)][::-1]
        for message in messages:
            gone[source][sent[message]] = known[bisect_right(places, used[message])]
    return gone


def _largest(found: Sequence[Moment]) -> tuple[Moment, ...]:
    """Without moments that another one of the same work exceeds in everything, so that a peak is found quickly."""
    result: list[Moment] = []
    for moment in sorted(found, key=lambda x: (-sum(x.kept), -x.buffers)):
        if not any(
            larger.op is moment.op
            and larger.place == moment.place
            and larger.buffers >= moment.buffers
            and all(a >= b for a, b in zip(larger.kept, moment.kept, strict=True))
            for larger in result
        ):
            result.append(moment)
    return tuple(result)


def peak(found: Sequence[Moment], stages: Sequence[StageBytes], encode_working: int, end_working: int) -> Peak:
    """The moment that takes most, given the bytes of a rank's stages, and of the encoder's and optimizer's work."""
    most = Peak(0, 0)
    for op, place, kept, buffers in found:
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
