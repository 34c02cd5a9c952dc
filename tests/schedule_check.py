"""Proof that every rank can finish a schedule: the instruction lists run against each other,
message by message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

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
    chain_of,
)

OF_SLICES = frozenset({Op.ENCODE, Op.SEND_FEATURES, Op.RECEIVE_FEATURES})
MADE_BY = {
    Op.SEND_ACTIVATION: Op.FORWARD,
    Op.SEND_GRADIENT: Op.BACKWARD,
    Op.SEND_FEATURES: Op.ENCODE,
}
INPUT_OF = {Op.FORWARD: Op.RECEIVE_ACTIVATION, Op.BACKWARD: Op.RECEIVE_GRADIENT}


def check_schedule(
    schedule: Schedule,
    microbatches: int,
    first_trainable_stage: int | None,
    *,
    stages_per_rank: int = 1,
) -> None:
    """Raises ValueError, naming rank and instruction, unless the schedule is one that every rank
    can finish.

    Proves: each FORWARD once, each BACKWARD once from the first trainable stage on and none before
    it (None: an evaluation, no BACKWARD at all); micro-batches loaded once each and encoded once by
    each slice, in order, along the chain, before stage 0's FORWARD, as many left for the next step
    as were at hand; the sends and receives of each channel are the same messages in the same order;
    nothing is sent before it is computed; all ranks reach their end with sends asynchronous and a
    message arriving once both sides have posted it; every rank ends with the same collectives.
    Steps one after the other follow: each begins with what the one before it leaves, the first with
    what `check_prelude` proves.
    """
    ranks, stages = len(schedule), len(schedule) * stages_per_rank
    first_backward = stages if first_trainable_stage is None else first_trainable_stage
    end = EVALUATION_END if first_trainable_stage is None else TRAINING_END
    for rank, instructions in enumerate(schedule):
        _check_places(rank, instructions, ranks, stages, end)
    chain = chain_of(schedule)
    ahead = ahead_of(schedule)
    if first_trainable_stage is None and any(ahead):
        raise ValueError(
            f"rank 0 has {max(ahead)} micro-batches encoded before an evaluation begins"
        )
    if sorted(ahead, reverse=True) != ahead:
        raise ValueError(
            f"slices of the chain {chain} are ahead by {ahead}: "
            "none may be more than the one before it"
        )
    _check_turns(
        schedule,
        chain,
        {rank: range(n, n + microbatches) for rank, n in zip(chain, ahead, strict=True)},
    )
    _check_order(schedule, stages)
    expected = {Instruction(Op.FORWARD, s, k) for s in range(stages) for k in range(microbatches)}
    expected |= {
        Instruction(Op.BACKWARD, s, k)
        for s in range(first_backward, stages)
        for k in range(microbatches)
    }
    if wrong := expected ^ {
        x for instructions in schedule for x in instructions if x.op in COMPUTES
    }:
        raise ValueError(f"missing, or not part of this step: {', '.join(sorted(map(str, wrong)))}")
    _check_channels(schedule, stages, first_backward)
    left = _features_after(schedule, chain, _features_ahead(chain, ahead))
    if left != _features_ahead(chain, [microbatches + n for n in ahead], microbatches):
        raise ValueError(
            f"a step that begins with slices {ahead} ahead must end so; it leaves {left}"
        )
    _check_progress(schedule)


def check_prelude(schedule: Schedule, ahead: Sequence[int]) -> None:
    """Raises ValueError unless a prelude makes what each slice, in the chain's order, is `ahead`,
    and can finish.
    """
    chain = chain_of(schedule)
    if any(x.op in COMPUTES for instructions in schedule for x in instructions):
        raise ValueError("a prelude uses nothing")
    _check_turns(schedule, chain, {rank: range(n) for rank, n in zip(chain, ahead, strict=False)})
    _check_order(schedule, len(schedule))
    _check_channels(schedule, len(schedule), len(schedule))
    if _features_after(schedule, chain, {}) != _features_ahead(chain, ahead[: len(chain)]):
        raise ValueError(f"a prelude must leave slices {ahead} ahead")
    _check_progress(schedule)


def ahead_of(schedule: Schedule) -> list[int]:
    """Micro-batches that each slice of the chain has encoded before its first ENCODE of this
    step.
    """
    chain = chain_of(schedule)
    return [next((x.microbatch for x in schedule[rank] if x.op is Op.ENCODE), 0) for rank in chain]


def _place(rank: int, index: int, instruction: Instruction) -> str:
    return f"rank {rank}, instruction {index}, {instruction}"


def _check_places(
    rank: int, instructions: Sequence[Instruction], ranks: int, stages: int, end: Sequence[Op]
) -> None:
    """Stages are on their ranks, the end is the agreed one and comes last."""
    body, tail = instructions[: -len(end)], instructions[-len(end) :]
    if tuple(tail) != tuple(Instruction(op) for op in end):
        raise ValueError(f"rank {rank} must end with {', '.join(op.name for op in end)}")
    for i, instruction in enumerate(body):
        if instruction.op in TRAINING_END:
            raise ValueError(f"{_place(rank, i, instruction)}: belongs to the end of the step")
        if not 0 <= instruction.stage < stages or instruction.stage % ranks != rank:
            raise ValueError(f"{_place(rank, i, instruction)}: this stage is not on this rank")
        if instruction.op is Op.LOAD and instruction.stage != 0:
            raise ValueError(f"{_place(rank, i, instruction)}: only stage 0 reads data")
        if instruction.op in OF_SLICES and instruction.stage >= ranks:
            raise ValueError(
                f"{_place(rank, i, instruction)}: a slice belongs to its rank's first stage"
            )


def _check_turns(
    schedule: Schedule, chain: Sequence[int], expected: Mapping[int, Sequence[int]]
) -> None:
    """Each slice encodes its micro-batches in turn; rank 0 loads each before that, in a chain of
    several one ahead.
    """
    for rank, microbatches in expected.items():
        for op in (Op.LOAD, Op.ENCODE) if rank == 0 else (Op.ENCODE,):
            if [x.microbatch for x in schedule[rank] if x.op is op] != list(microbatches):
                name = f"{microbatches[0]} to {microbatches[-1]}" if microbatches else "none"
                raise ValueError(f"rank {rank} must {op.name} each of micro-batches {name} in turn")
    found = [i for i, x in enumerate(schedule[0]) if x.op in (Op.LOAD, Op.ENCODE)]
    ops = [schedule[0][i].op for i in found]
    pairs = [Op.LOAD, Op.ENCODE] * (len(ops) // 2)
    if len(chain) == 1:
        if ops != pairs or any(b - a != 1 for a, b in zip(found[::2], found[1::2], strict=True)):
            raise ValueError("rank 0: LOAD and ENCODE must come in pairs, LOAD first")
    elif ops and (found[0] != 0 or ops != [Op.LOAD, *pairs[:-2], *pairs[-1:]]):
        raise ValueError(
            "rank 0: LOADs must be one ahead of ENCODEs, the first of them at the list's begin"
        )


def _features_ahead(
    chain: Sequence[int], ahead: Sequence[int], used: int = 0
) -> dict[int, list[int]]:
    """What is at hand on each rank between steps: of each slice's input what it has not encoded,
    features last.

    Micro-batches count from those of the step; `used` have been used by stage 0.
    """
    found = {0: range(used, ahead[-1])}
    for rank, made, taken in zip(chain[1:], ahead, ahead[1:], strict=False):
        found[rank] = range(taken, made)
    return {rank: list(ks) for rank, ks in found.items() if ks}


def _features_after(
    schedule: Schedule, chain: Sequence[int], at_hand: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """What is at hand after a list that begins with `at_hand`; each is used once, and after it has
    come.
    """
    found: dict[int, list[int]] = {}
    for rank in chain:
        there = set(at_hand.get(rank, ()))
        for i, x in enumerate(schedule[rank]):
            comes = Op.ENCODE if len(chain) == 1 else Op.RECEIVE_FEATURES
            takes = Op.ENCODE if rank else Op.FORWARD
            if x.op is comes:
                there.add(x.microbatch)
            elif x.op is takes and x.stage == rank:
                if x.microbatch not in there:
                    raise ValueError(
                        f"{_place(rank, i, x)}: the ENCODE that it needs does not stand before it"
                    )
                there.remove(x.microbatch)
        if there:
            found[rank] = sorted(there)
    return found


def _check_order(schedule: Schedule, stages: int) -> None:
    """No instruction comes twice, and what one needs of its own rank stands before it."""
    for rank, instructions in enumerate(schedule):
        before: set[Instruction] = set()
        for i, x in enumerate(instructions):
            if x in before:
                raise ValueError(f"{_place(rank, i, x)}: runs a second time")
            for needed in _needs(x, len(schedule), stages):
                if needed not in before:
                    raise ValueError(f"{_place(rank, i, x)}: {needed} does not stand before it")
            before.add(x)


def _needs(x: Instruction, ranks: int, stages: int) -> list[Instruction]:
    """What an instruction needs of its own rank, features aside."""
    if x.op in SENDS:
        return [Instruction(MADE_BY[x.op], x.stage, x.microbatch)]
    if x.op not in COMPUTES:
        return []
    needed = [Instruction(Op.FORWARD, x.stage, x.microbatch)] if x.op is Op.BACKWARD else []
    neighbour = x.stage - 1 if x.op is Op.FORWARD else x.stage + 1
    if 0 <= neighbour < stages and ranks == 1:
        needed.append(Instruction(x.op, neighbour, x.microbatch))
    elif 0 <= neighbour < stages:
        needed.append(Instruction(INPUT_OF[x.op], x.stage, x.microbatch))
    return needed


def _check_channels(schedule: Schedule, stages: int, first_backward: int) -> None:
    """Message i that a channel's source sends is message i that its destination receives."""
    chain = chain_of(schedule)
    sides: tuple[dict, dict] = (defaultdict(list), defaultdict(list))
    for rank, instructions in enumerate(schedule):
        for i, x in enumerate(instructions):
            if x.op not in SENDS | RECEIVES:
                continue
            message = carried(x, len(schedule), chain)
            if not 0 <= message.consumer < stages or message.source == message.destination:
                raise ValueError(f"{_place(rank, i, x)}: there is no other rank at that end")
            if message.kind == "gradient" and message.consumer < first_backward:
                raise ValueError(
                    f"{_place(rank, i, x)}: gradient traffic upstream of the first trainable stage"
                )
            sides[x.op in RECEIVES][message.channel].append(message)
    for channel in sides[0].keys() | sides[1].keys():
        if sides[0][channel] != sides[1][channel]:
            raise ValueError(
                f"{channel}: sends {sides[0][channel]} meet receives {sides[1][channel]}"
            )


def _check_progress(schedule: Schedule) -> None:
    """The ranks do not wait for each other for ever."""
    if stuck := find_deadlock([schedule], Ordering.IDEAL):
        places = (_place(rank, at, schedule[rank][at]) for rank, _, at in stuck)
        raise ValueError(f"deadlock: every rank waits: {'; '.join(places)}")
