"""Peak memory of schedules: instants by hand, and against a plain walk that keeps every single tensor apart."""

from __future__ import annotations

import random

import pytest
from mmtrain.plan.prefetch import best_encodes

from mmtrain.plan.instructions import COMPUTES, Op, Schedule, needed_before, sent_after
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
    ranks, count = len(schedule), len(stages)
    instructions = schedule[rank]
    prefetched = next((x.microbatch for x in instructions if x.op is Op.ENCODE), 0)
    alive: dict = {("input", k): buffers.batch + buffers.features for k in range(prefetched)}
    activation, most = buffers.hidden + buffers.integers, 0

    def is_known_to_be_gone(message, now: int) -> bool:
        """Whether this rank has used a message that its receiver sent after using this one."""
        other = schedule[message.destination]
        used = next(i for i, x in enumerate(other) if x.op in COMPUTES and needed_before(x, ranks, count) == message)
        later = [sent_after(x, ranks, count, first) for x in other[used:] if x.op in COMPUTES]
        # What that very compute makes is sent after it, too.
        answers = {m for m in later if m is not None and m.destination == rank}
        return any(x.op in COMPUTES and needed_before(x, ranks, count) in answers for x in instructions[:now])

    for i, x in enumerate(instructions):
        working = 0
        if x.op is Op.LOAD:
            alive["input", x.microbatch] = buffers.batch
        elif x.op is Op.ENCODE:
            working = 7
        elif x.op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            kind = "activation" if x.op is Op.RECEIVE_ACTIVATION else "gradient"
            alive["received", kind, x.stage, x.microbatch] = activation if kind == "activation" else buffers.hidden
        elif x.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT) and polls:
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
            alive["input", x.microbatch] += buffers.features
        if x.op not in COMPUTES:
            continue
        kind = "activation" if x.op is Op.FORWARD else "gradient"
        alive.pop(("received", kind, x.stage, x.microbatch), None)
        if x.op is Op.FORWARD:
            if x.stage == 0:
                del alive["input", x.microbatch]
            if x.stage >= first:
                alive["kept", x.stage, x.microbatch] = stages[x.stage].kept
        message = sent_after(x, ranks, count, first)
        if message is not None:
            alive["sent", message, i + 1] = activation if kind == "activation" else buffers.hidden
    return most


def test_peaks_are_those_of_a_plain_walk_over_the_lists() -> None:
    draw = random.Random(0)
    with_prefetch = 0
    for _ in range(40):
        pipeline, stages_per_rank, microbatches = draw.randrange(1, 5), draw.randrange(1, 4), draw.randrange(1, 9)
        stages_per_rank = 1 if pipeline == 1 else stages_per_rank
        count = pipeline * stages_per_rank
        first = draw.randrange(count)
        seconds = StageSeconds((1.0,) * count, tuple(1.0 * (s >= first) for s in range(count)), encode=0.7)
        schedule, encodes, _ = best_encodes(pipeline, microbatches, first, stages_per_rank, seconds, draw.randrange(9))
        with_prefetch += encodes.prefetched > 0
        stages = []
        for stage in range(count):
            kept = draw.randrange(20) * (stage >= first)
            stages.append(StageBytes(kept, kept + draw.randrange(20), kept + draw.randrange(20)))
        buffers = Buffers(draw.randrange(9), draw.randrange(3), draw.randrange(9), draw.randrange(9))
        for polls in (True, False):
            found = peaks_of(schedule, stages, buffers, polls)
            plain = [plain_walk(schedule, rank, first, stages, buffers, polls) for rank in range(pipeline)]
            assert found == plain
    assert with_prefetch >= 5


def test_a_rank_of_1f1b_keeps_as_many_microbatches_as_ranks_follow() -> None:
    stages, buffers = [StageBytes(100, 110, 120)] * 4, Buffers(0, 0, 0, 0)
    schedule = training_schedule(4, 8, 0)
    assert peaks_of(schedule, stages, buffers, True) == [3 * 100 + 120, 220 + 100, 220, 120]
    found = instants(schedule, buffers, polls=True)
    assert peak(found[0], stages[:1], 7, 3) == Peak(activations=400, working=20)
    only_forward = training_schedule(4, 8, 3)
    assert peaks_of(only_forward, stages, buffers, True) == [110, 110, 110, 120]


@pytest.mark.parametrize(("polls", "waiting"), [(True, 8), (False, 8)])
def test_what_a_rank_sends_that_never_hears_back_waits_until_the_end(polls: bool, waiting: int) -> None:
    """Only the last of two ranks trains: nothing comes back, so nothing is known to be gone."""
    schedule = training_schedule(2, 8, 1)
    found = peaks_of(schedule, [StageBytes(0, 1, 0)] * 2, Buffers(100, 10, 0, 0), polls)
    assert found[0] == waiting * 110 + 3


def test_an_answer_tells_that_a_message_is_gone() -> None:
    """Two ranks that train, eight micro-batches: a gradient that comes back lets the activation go."""
    schedule, stages, buffers = training_schedule(2, 8, 0), [StageBytes(0, 0, 0)] * 2, Buffers(100, 10, 0, 0)
    kept_all = peaks_of(schedule, stages, buffers, False)[0]
    let_go = peaks_of(schedule, stages, buffers, True)[0]
    assert kept_all == 8 * 110 + 2 * 100, "all activations, and the gradients that are expected next"
    assert let_go <= 3 * 110 + 2 * 100


def test_features_that_wait_are_counted() -> None:
    seconds = StageSeconds((1.0,) * 4, (1.0,) * 4, encode=1.0)
    schedule, encodes, _ = best_encodes(4, 4, 0, 1, seconds, 4)
    without = instants(training_schedule(4, 4, 0), Buffers(0, 0, 0, 0), polls=True)
    buffers = Buffers(0, 0, 1000, 10)
    stages = [StageBytes(0, 0, 0)]
    assert encodes.prefetched > 0
    most = sum(peak(instants(schedule, buffers, polls=True)[0], stages, 0, 0))
    assert encodes.prefetched * 1010 <= most <= 4 * 1010
    assert sum(peak(without[0], stages, 0, 0)) == 0
