"""Peak memory of schedules: instants by hand, and against a plain walk that keeps every single tensor apart."""

from __future__ import annotations

import random

import pytest
from made_up_steps import Step, chains, made_up_step
from schedule_check import ahead_of

from mmtrain.plan.instructions import COMPUTES, SENDS, Op, Schedule, chain_of, needed_before, sent_after
from mmtrain.plan.memory import Buffers, Peak, StageBytes, instants, peak
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.simulate import StageSeconds


def peaks_of(schedule: Schedule, stages: list[StageBytes], buffers: Buffers, polls: bool) -> list[int]:
    found = instants(schedule, buffers, polls=polls)
    ranks = len(schedule)
    return [sum(peak(found[rank], stages[rank::ranks], encode_working=7, end_working=3)) for rank in range(ranks)]


def plain_walk(
    schedule: Schedule, rank: int, first: int, stages: list[StageBytes], buffers: Buffers, polls: bool
) -> int:
    """The same with a dictionary of everything that is alive, by name, and messages let go by looking into lists."""
    ranks, count, chain = len(schedule), len(stages), chain_of(schedule)
    instructions = schedule[rank]
    sizes = {"activation": buffers.hidden + buffers.integers, "gradient": buffers.hidden}
    alive: dict = {}
    if rank in chain:
        ahead, place = ahead_of(schedule), chain.index(rank)
        if rank == 0:
            alive = {("batch", k): buffers.batch for k in range(ahead[0])}
            alive |= {("features", k): buffers.features for k in range(ahead[-1])}
        else:
            alive = {("features", k): buffers.between_slices for k in range(ahead[place], ahead[place - 1])}
    at_begin, most = sum(alive.values()), 0

    def size_of(message) -> int:
        if message.kind == "features":
            return buffers.between_slices if message.destination else buffers.features
        return sizes[message.kind]

    def is_known_to_be_gone(message, now: int) -> bool:
        """Whether this rank has used a message that its receiver sent after using this one, or what became of it."""
        if message.kind == "features" and any(
            x.op is Op.FORWARD and x.microbatch == message.microbatch for x in instructions[:now]
        ):
            return True
        other = schedule[message.destination]
        uses = (Op.FORWARD, Op.BACKWARD, Op.ENCODE)
        used = [i for i, x in enumerate(other) if x.op in uses and needed_before(x, ranks, count, chain) == message]
        later = (
            [sent_after(x, ranks, count, first, chain) for x in other[used[0] :] if x.op in COMPUTES] if used else []
        )
        # What that very compute makes is sent after it, too.
        answers = {m for m in later if m is not None and m.destination == rank}
        return any(x.op in COMPUTES and needed_before(x, ranks, count, chain) in answers for x in instructions[:now])

    for i, x in enumerate(instructions):
        working = 0
        if x.op is Op.LOAD:
            alive["batch", x.microbatch] = buffers.batch
            alive["pixels", x.microbatch] = buffers.pixels
        elif x.op is Op.ENCODE:
            working = 7
        elif x.op is Op.RECEIVE_FEATURES:
            alive["features", x.microbatch] = buffers.between_slices if rank else buffers.features
        elif x.op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            kind = "activation" if x.op is Op.RECEIVE_ACTIVATION else "gradient"
            alive["received", kind, x.stage, x.microbatch] = sizes[kind]
        elif x.op in SENDS and polls:
            for key in [key for key in alive if key[0] == "sent" and is_known_to_be_gone(key[1], i)]:
                if key[2] < i:
                    del alive[key]
        elif x.op is Op.FORWARD:
            working = stages[x.stage].forward
        elif x.op is Op.BACKWARD:
            del alive["kept", x.stage, x.microbatch]
            working = stages[x.stage].backward
        elif x.op is Op.OPTIMIZER_STEP:
            working = 3
        most = max(most, sum(alive.values()) + working)
        if x.op is Op.ENCODE:
            del alive["features" if rank else "pixels", x.microbatch]
            if len(chain) == 1:
                alive["features", x.microbatch] = buffers.features
        elif x.op in COMPUTES:
            kind = "activation" if x.op is Op.FORWARD else "gradient"
            alive.pop(("received", kind, x.stage, x.microbatch), None)
            if x.op is Op.FORWARD and x.stage == 0:
                del alive["batch", x.microbatch], alive["features", x.microbatch]
            if x.op is Op.FORWARD and x.stage >= first:
                alive["kept", x.stage, x.microbatch] = stages[x.stage].kept
        message = sent_after(x, ranks, count, first, chain)
        if message is not None:
            alive["sent", message, i + 1] = size_of(message)
    assert sum(size for key, size in alive.items() if key[0] != "sent") == at_begin, "as much waits at its end"
    return most


def test_peaks_are_those_of_a_plain_walk_over_the_lists() -> None:
    draw = random.Random(0)
    with_prefetch = in_slices = 0
    for _ in range(60):
        pipeline, stages_per_rank, microbatches = draw.randrange(1, 5), draw.randrange(1, 4), draw.randrange(1, 9)
        stages_per_rank = 1 if pipeline == 1 else stages_per_rank
        count = pipeline * stages_per_rank
        ranks = draw.choice([(0,), *chains(pipeline)]) if pipeline > 1 else (0,)
        step = made_up_step(draw, pipeline, stages_per_rank, microbatches, ranks)
        chain = draw.choice(step.placed())[1]
        schedule, first = step.lists(chain), step.first_trainable_stage
        with_prefetch += len(ranks) == 1 and chain[0].ahead > 0
        in_slices += len(ranks) > 1 and chain[0].ahead > 0
        stages = []
        for stage in range(count):
            kept = draw.randrange(20) * (stage >= first)
            stages.append(StageBytes(kept, kept + draw.randrange(20), kept + draw.randrange(20)))
        buffers = Buffers(*(draw.randrange(9) for _ in range(6)))
        for polls in (True, False):
            found = peaks_of(schedule, stages, buffers, polls)
            plain = [plain_walk(schedule, rank, first, stages, buffers, polls) for rank in range(pipeline)]
            assert found == plain
    assert min(with_prefetch, in_slices) >= 5, (with_prefetch, in_slices)


def test_a_rank_of_1f1b_keeps_as_many_microbatches_as_ranks_follow() -> None:
    stages, buffers = [StageBytes(100, 110, 120)] * 4, Buffers(0, 0, 0, 0)
    schedule = training_schedule(4, 8, 0)
    assert peaks_of(schedule, stages, buffers, True) == [3 * 100 + 120, 220 + 100, 220, 120]
    found = instants(schedule, buffers, polls=True)
    assert peak(found[0], stages[:1], 7, 3) == Peak(activations=400, working=20)
    only_forward = training_schedule(4, 8, 3)
    assert peaks_of(only_forward, stages, buffers, True) == [110, 110, 110, 120]


@pytest.mark.parametrize("polls", [True, False])
def test_what_a_rank_sends_that_never_hears_back_waits_until_the_end(polls: bool) -> None:
    """Only the last of two ranks trains: nothing comes back, so nothing is known to be gone."""
    schedule = training_schedule(2, 8, 1)
    found = peaks_of(schedule, [StageBytes(0, 1, 0)] * 2, Buffers(100, 10, 0, 0), polls)
    assert found[0] == 8 * 110 + 3


def test_an_answer_tells_that_a_message_is_gone() -> None:
    """Two ranks that train, eight micro-batches: a gradient that comes back lets the activation go."""
    schedule, stages, buffers = training_schedule(2, 8, 0), [StageBytes(0, 0, 0)] * 2, Buffers(100, 10, 0, 0)
    kept_all = peaks_of(schedule, stages, buffers, False)[0]
    let_go = peaks_of(schedule, stages, buffers, True)[0]
    assert kept_all == 8 * 110 + 2 * 100, "all activations, and the gradients that are expected next"
    assert let_go <= 3 * 110 + 2 * 100


def test_features_that_wait_are_counted() -> None:
    step = Step(4, 1, 4, 0, StageSeconds((1.0,) * 4, (1.0,) * 4, (1.0, 0.0, 0.0, 0.0)), (0,))
    chain = step.best()
    without = instants(step.lists(), Buffers(0, 0, 0, 0), polls=True)
    buffers = Buffers(0, 0, 1000, 10)
    stages = [StageBytes(0, 0, 0)]
    assert chain[0].ahead > 0
    most = sum(peak(instants(step.lists(chain), buffers, polls=True)[0], stages, 0, 0))
    assert chain[0].ahead * 1010 <= most
    assert sum(peak(without[0], stages, 0, 0)) == 0
