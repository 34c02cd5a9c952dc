"""Proof that every rank can finish a schedule: the instruction lists run against each other, message by message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from deadlocks import Ordering, find_deadlock

from mmtrain.plan.instructions import (
    COMPUTES,
    EVALUATION_END,
    RECEIVES,
    SENDS,
    TRAINING_END,
    Instruction,
    Op,
    Schedule,
    carried,
    needed_before,
)


def check_schedule(
    schedule: Schedule, microbatches: int, first_trainable_stage: int | None, *, stages_per_rank: int = 1
) -> None:
    """Raises ValueError, naming rank and instruction, unless the schedule is one that every rank can finish.

    Proves: each FORWARD once, each BACKWARD once from the first trainable stage on and none before it (None: an
    evaluation, no BACKWARD at all); micro-batches loaded and encoded once each, in order, before stage 0's FORWARD, as
    many left for the next step as were at hand; the sends and receives of each channel are the same messages in the
    same order; nothing is sent before it is computed; all ranks reach their end with sends asynchronous and a message
    arriving once both sides have posted it; every rank ends with the same collectives.
    """
    ranks, stages = len(schedule), len(schedule) * stages_per_rank
    first_backward = stages if first_trainable_stage is None else first_trainable_stage
    end = EVALUATION_END if first_trainable_stage is None else TRAINING_END
    for rank, instructions in enumerate(schedule):
        _check_places(rank, instructions, ranks, stages, end)
    _check_encodes(schedule[0], microbatches, may_prefetch=first_trainable_stage is not None)
    _check_computes(schedule, microbatches, stages, first_backward)
    _check_channels(schedule, ranks, stages, first_backward)
    _check_progress(schedule, ranks, stages)


def _place(rank: int, index: int, instruction: Instruction) -> str:
    return f"rank {rank}, instruction {index}, {instruction}"


def _check_places(rank: int, instructions: Sequence[Instruction], ranks: int, stages: int, end: Sequence[Op]) -> None:
    """Stages are on their ranks, the end is the agreed one and comes last."""
    body, tail = instructions[: -len(end)], instructions[-len(end) :]
    if tuple(tail) != tuple(Instruction(op) for op in end):
        raise ValueError(f"rank {rank} must end with {', '.join(op.name for op in end)}")
    for i, instruction in enumerate(body):
        if instruction.op in TRAINING_END:
            raise ValueError(f"{_place(rank, i, instruction)}: belongs to the end of the step")
        if not 0 <= instruction.stage < stages or instruction.stage % ranks != rank:
            raise ValueError(f"{_place(rank, i, instruction)}: this stage is not on this rank")
        if instruction.op in (Op.LOAD, Op.ENCODE) and instruction.stage != 0:
            raise ValueError(f"{_place(rank, i, instruction)}: only stage 0 reads data")


def _check_encodes(instructions: Sequence[Instruction], microbatches: int, *, may_prefetch: bool) -> None:
    """LOAD and ENCODE come in pairs, micro-batch after micro-batch, and always before stage 0's FORWARD."""
    found = [i for i, x in enumerate(instructions) if x.op is Op.ENCODE]
    if [i for i, x in enumerate(instructions) if x.op is Op.LOAD] != [i - 1 for i in found]:
        raise ValueError("rank 0: LOAD and ENCODE must come in pairs, LOAD first")
    prefetched = instructions[found[0]].microbatch if found else 0
    if prefetched and not may_prefetch:
        raise ValueError(f"rank 0 has {prefetched} micro-batches encoded before an evaluation begins")
    expected = list(range(prefetched, prefetched + microbatches))
    for op, pairs in ((Op.LOAD, [i - 1 for i in found]), (Op.ENCODE, found)):
        if [instructions[i].microbatch for i in pairs] != expected:
            raise ValueError(
                f"rank 0 must {op.name} each of micro-batches {prefetched} to {prefetched + microbatches - 1} in turn"
            )
    encoded = prefetched
    for i, x in enumerate(instructions):
        encoded += x.op is Op.ENCODE
        if x.op is Op.FORWARD and x.stage == 0 and x.microbatch >= encoded:
            raise ValueError(f"{_place(0, i, x)}: its ENCODE does not stand before it")


def _check_computes(schedule: Schedule, microbatches: int, stages: int, first_backward: int) -> None:
    """Each compute once, a backward after its forward, and no backward upstream of the first trainable stage."""
    done: set[Instruction] = set()
    for rank, instructions in enumerate(schedule):
        for i, instruction in enumerate(instructions):
            op, stage, k = instruction.op, instruction.stage, instruction.microbatch
            if op not in COMPUTES:
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


def _check_channels(schedule: Schedule, ranks: int, stages: int, first_backward: int) -> None:
    """Message i that a channel's source sends is message i that its destination receives, and none is sent twice."""
    sides: tuple[dict, dict] = (defaultdict(list), defaultdict(list))
    for rank, instructions in enumerate(schedule):
        for i, instruction in enumerate(instructions):
            if instruction.op not in SENDS | RECEIVES:
                continue
            message, where = carried(instruction, ranks), _place(rank, i, instruction)
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
    """What an instruction needs of its own rank stands before it, and the ranks do not wait for each other for ever."""
    for rank, instructions in enumerate(schedule):
        before: set[Instruction] = set()
        for i, x in enumerate(instructions):
            op, stage, k = x.op, x.stage, x.microbatch
            if op in SENDS:
                made_by = Op.FORWARD if op is Op.SEND_ACTIVATION else Op.BACKWARD
                if Instruction(made_by, stage, k) not in before:
                    raise ValueError(f"{_place(rank, i, x)}: sent before it is computed")
            elif op in COMPUTES and needed_before(x, ranks, stages) is not None:
                receive = Op.RECEIVE_ACTIVATION if op is Op.FORWARD else Op.RECEIVE_GRADIENT
                if Instruction(receive, stage, k) not in before:
                    raise ValueError(f"{_place(rank, i, x)}: its receive was not posted before it")
            elif op in COMPUTES:  # the neighbouring stage, if there is one, is on this very rank
                neighbour = Instruction(op, stage - 1 if op is Op.FORWARD else stage + 1, k)
                if 0 <= neighbour.stage < stages and neighbour not in before:
                    raise ValueError(f"{_place(rank, i, x)}: comes before {neighbour}")
            before.add(x)
    stuck = find_deadlock([schedule], Ordering.IDEAL)
    if stuck:
        places = (_place(rank, at, schedule[rank][at]) for rank, _, at in stuck)
        raise ValueError(f"deadlock: every rank waits: {'; '.join(places)}")


def most_buffered(schedule: Schedule) -> int:
    """Most micro-batches whose features exist at once, on rank 0."""
    first = next((x.microbatch for x in schedule[0] if x.op is Op.ENCODE), 0)
    waiting = most = first
    for x in schedule[0]:
        waiting += x.op is Op.ENCODE
        most = max(most, waiting)
        waiting -= x.op in COMPUTES and x.op is Op.FORWARD and x.stage == 0
    return most
