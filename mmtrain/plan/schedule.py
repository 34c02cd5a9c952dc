"""The order of work of every rank in one step, as lists of instructions: what the engine runs and
is simulated.

Stage `s` lives on pipeline rank `s % pipeline`. With one stage a rank, training is 1F1B: rank r
first runs `pipeline - r - 1` forwards, then one forward and one backward in turn, so it never keeps
more than `pipeline - r` micro-batches for backward. With several it is interleaved 1F1B:
micro-batches go round the ranks in groups of `pipeline`, and the idle share falls from (p - 1) / (m
+ p - 1) towards (p - 1) / (v m + p - 1) for v stages a rank, at the price of v times the messages.
Stages upstream of the first trainable one run forwards only.

The vision encoder has instructions of its own, LOAD and ENCODE. While it is frozen it may be cut
into **slices**, whole blocks, one a rank; the **chain** is the ranks with a slice, rank 0 first. A
micro-batch's tiles go through the chain ahead of need, into coming steps too, wherever its ranks
would wait (`Encodes`). A receive must know how many tiles a micro-batch has: in a chain of several
rank 0 loads one micro-batch ahead.

Messages are part of the lists. A receive is posted one compute (FORWARD or BACKWARD; for what
slices send, ENCODE too) ahead of its use and waited for at that use. A send is asynchronous and
waited for at the step's end: waiting inside the step can deadlock. Features for coming steps are
received at the end of the step that sends them.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmtrain.plan.instructions import (
    COMPUTES,
    EVALUATION_END,
    TRAINING_END,
    Instruction,
    Message,
    Op,
    Orders,
    Schedule,
    needed_before,
    sent_after,
)

MESSAGES_POSTED_AHEAD = 1


@dataclass(frozen=True)
class Encodes:
    """The times at which a rank runs its slice: `before[i]` micro-batches right before its i-th
    compute, `before[-1]` at the end.

    The slice is `ahead` micro-batches of coming steps ahead when a step begins, and again when it
    ends.
    """

    ahead: int
    before: tuple[int, ...]


Chain = tuple[Encodes | None, ...]  # per pipeline rank; None: it holds no slice


def training_schedule(
    pipeline: int,
    microbatches: int,
    first_trainable_stage: int,
    stages_per_rank: int = 1,
    encodes: Chain | None = None,
) -> Schedule:
    """One training step, one list of instructions per pipeline rank.

    `encodes` None: rank 0 encodes each micro-batch right before stage 0's forward of it. Sources of
    the orders: PipeDream-flush and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2).
    """
    stages = pipeline * stages_per_rank
    orders = _training_orders(pipeline, microbatches, first_trainable_stage, stages_per_rank)
    encodes = encodes or leading_encodes(orders, (0,), 1)
    orders = _with_encodes(orders, microbatches, encodes)
    return _with_messages(orders, stages, first_trainable_stage, ranks_of(encodes), TRAINING_END)


@functools.cache
def forward_schedule(
    pipeline: int,
    microbatches: int,
    stages_per_rank: int = 1,
    chain: tuple[int, ...] = (0,),
    lead: int = 1,
) -> Schedule:
    """One evaluation pass: forwards only, then the statistics are reduced.

    Each slice, on the pipeline ranks `chain`, begins with `lead` micro-batches, then encodes one
    before each forward.
    """
    stages = pipeline * stages_per_rank
    orders = _all_in_groups(pipeline, stages, microbatches, Op.FORWARD)
    encodes = leading_encodes(orders, chain, min(lead, microbatches))
    merged = _with_encodes(orders, microbatches, encodes)
    return _with_messages(merged, stages, stages, chain, EVALUATION_END)


def prelude(encodes: Chain) -> Schedule:
    """The lists before the first step of a process: every slice encodes what it is ahead when a
    step begins.
    """
    orders: list[list[Instruction]] = [[] for _ in encodes]
    for rank in ranks_of(encodes):
        orders[rank] = [Instruction(Op.ENCODE, rank, k) for k in range(encodes[rank].ahead)]
    return _with_messages(orders, len(orders), len(orders), ranks_of(encodes), ())


def ranks_of(chain: Chain) -> tuple[int, ...]:
    return tuple(rank for rank, encodes in enumerate(chain) if encodes is not None)


def _all_in_groups(
    pipeline: int,
    stages: int,
    microbatches: int,
    op: Op,
    first: int = 0,
) -> list[list[Instruction]]:
    """Each rank's computes of one kind, stages from `first` on: groups of `pipeline` micro-batches,
    stage by stage.
    """
    orders = []
    for rank in range(pipeline):
        stages_here = [stage for stage in range(rank, stages, pipeline) if stage >= first]
        if op is Op.BACKWARD:
            stages_here.reverse()
        order = []
        for begin in range(0, microbatches, pipeline):
            group = range(begin, min(begin + pipeline, microbatches))
            for stage in stages_here:
                order += [Instruction(op, stage, k) for k in group]
        orders.append(order)
    return orders


@functools.lru_cache(maxsize=256)  # the search asks again for each slot of the encoder
def _training_orders(
    pipeline: int,
    microbatches: int,
    first: int,
    stages_per_rank: int,
) -> Orders:
    """Record a run in which every compute takes one tick and every rank does the first of its rules
    that it can.

    1. A backward, once warmed up; but after a backward a forward, if one may run.
    2. A forward, if fewer computes are kept for backward than the rank's limit.

    Megatron's formula does not hold where a rank mixes frozen and trained stages, nor for a number
    of micro-batches that is no multiple of `pipeline`.
    """
    recorded = _Recorded(pipeline, microbatches, first, stages_per_rank)
    while any(recorded.forwards) or any(recorded.backwards):
        recorded.run_tick()
    return recorded.orders


class _Recorded:
    """The run of `_training_orders` so far."""

    def __init__(
        self,
        pipeline: int,
        microbatches: int,
        first: int,
        stages_per_rank: int,
    ) -> None:
        self.first = first
        self.stages = pipeline * stages_per_rank
        # that are still to come
        self.forwards = _all_in_groups(pipeline, self.stages, microbatches, Op.FORWARD)
        self.backwards = _all_in_groups(pipeline, self.stages, microbatches, Op.BACKWARD, first)
        # One more than the forwards that 1F1B and Megatron's interleaved 1F1B begin with.
        per_later_rank = min(stages_per_rank, 2)
        least = (stages_per_rank - 1) * pipeline + 1
        self.limit = [least + per_later_rank * later for later in reversed(range(pipeline))]
        self.orders: list[list[Instruction]] = [[] for _ in range(pipeline)]
        self.kept = [0] * pipeline
        self.done: dict[Instruction, int] = {}  # the tick after which it is done
        self.tick = 0

    def run_tick(self) -> None:
        chosen = [self._choose(rank) for rank in range(len(self.orders))]
        for rank, compute in enumerate(chosen):
            if compute is None:
                continue
            self.orders[rank].append(compute)
            self.done[compute] = self.tick
            if compute.op is Op.BACKWARD:
                self.kept[rank] -= 1
            elif compute.stage >= self.first:
                self.kept[rank] += 1
        if not any(chosen) and self.tick > max(self.done.values()):
            self._raise_limit()
        self.tick += 1

    def _choose(self, rank: int) -> Instruction | None:
        order = self.orders[rank]
        forwards = self.forwards[rank]
        backwards = self.backwards[rank]
        has_room = self.kept[rank] < self.limit[rank]
        is_warm = not (forwards and has_room) or len(order) >= self.limit[rank] - 1
        may_backward = is_warm and self._ready(backwards)
        may_forward = self._ready(forwards) and (has_room or forwards[0].stage < self.first)

        just_went_back = bool(order) and order[-1].op is Op.BACKWARD
        turn_of_forward = just_went_back and may_forward and has_room
        if may_backward and not turn_of_forward:
            return backwards.pop(0)
        if may_forward:
            return forwards.pop(0)
        return None

    def _ready(self, computes: Sequence[Instruction]) -> bool:
        """Return whether there is a next compute and all that it needs is done."""
        if not computes:
            return False
        op = computes[0].op
        stage = computes[0].stage
        k = computes[0].microbatch
        needed = []
        if op is Op.BACKWARD:
            needed.append(Instruction(Op.FORWARD, stage, k))
        before = stage - 1 if op is Op.FORWARD else stage + 1
        if 0 <= before < self.stages:
            needed.append(Instruction(op, before, k))
        return all(self.done.get(x, self.tick) < self.tick for x in needed)

    def _raise_limit(self) -> None:
        """Let the deepest forward go on: a last group smaller than `pipeline` can leave all limits
        reached.
        """
        stage = max(computes[0].stage for computes in filter(self._ready, self.forwards))
        self.limit[stage % len(self.limit)] += 1


def _with_encodes(
    orders: Orders,
    microbatches: int,
    chain: Chain,
) -> Orders:
    merged = [*orders]
    for rank in ranks_of(chain):
        encodes = chain[rank]
        result = []
        encoded = encodes.ahead
        for compute, count in zip([*orders[rank], None], encodes.before, strict=True):
            result += [Instruction(Op.ENCODE, rank, encoded + i) for i in range(count)]
            encoded += count
            if compute is not None:
                result.append(compute)
        assert encoded == encodes.ahead + microbatches, (
            "a step encodes as many micro-batches as it uses"
        )
        merged[rank] = result
    return merged


def leading_encodes(
    schedule: Orders,
    chain: Sequence[int],
    lead: int,
    ahead: int = 0,
) -> Chain:
    """Each slice encodes `lead` micro-batches first, then one before each later forward of its
    rank's first stage.

    With one stage a rank, and in evaluations, any lead and chain finishes; other lists surely do
    where all is encoded first.
    """
    encodes: list[Encodes | None] = [None] * len(schedule)
    for rank in chain:
        computes = [x for x in schedule[rank] if x.op in COMPUTES]
        before = [int(x.op is Op.FORWARD and x.stage == rank) for x in computes] + [0]
        begins = [i for i, count in enumerate(before) if count]
        before[0] += lead - 1
        for i in begins[len(begins) - lead + 1 :]:
            before[i] -= 1
        encodes[rank] = Encodes(ahead, tuple(before))
    return tuple(encodes)


def _with_messages(
    orders: Orders,
    stages: int,
    first_trainable_stage: int,
    chain: Sequence[int],
    end: Sequence[Op],
) -> Schedule:
    """Add LOAD, sends, receives and the step's end to each rank's computes."""
    ranks = len(orders)
    # by channel, in the order sent
    incoming: dict[tuple[int, int, str], deque[Message]] = defaultdict(deque)
    # else an earlier step has sent it
    to_come: set[Message | None] = set()
    for order in orders:
        for x in order:
            message = sent_after(x, ranks, stages, first_trainable_stage, chain)
            if message is not None:
                incoming[message.channel].append(message)
                to_come.add(message)

    def receives_for(x: Instruction) -> Iterator[Instruction]:
        """Yield the receives that `x` needs and that are not posted; a channel is first in, first
        out, so also those of all that was sent before it.
        """
        needed = needed_before(x, ranks, stages, chain)
        while needed in to_come:
            message = incoming[needed.channel].popleft()
            to_come.remove(message)
            yield message.receive

    schedule = []
    for rank, order in enumerate(orders):
        computes = [x for x in order if x.op in COMPUTES]
        begun = 0
        instructions = []
        to_load = deque(x.microbatch for x in order if x.op is Op.ENCODE and rank == 0)
        if len(chain) > 1 and to_load:
            instructions.append(Instruction(Op.LOAD, 0, to_load.popleft()))

        for i, x in enumerate(order):
            for soon in computes[begun : begun + 1 + MESSAGES_POSTED_AHEAD]:
                if soon.op is Op.BACKWARD or soon.stage > 0:
                    instructions += receives_for(soon)
            if x.op is Op.ENCODE and to_load:
                instructions.append(Instruction(Op.LOAD, 0, to_load.popleft()))
            for soon in order[i : i + 1 + MESSAGES_POSTED_AHEAD]:
                if soon.op is Op.ENCODE or (soon.op is Op.FORWARD and soon.stage == 0):
                    instructions += receives_for(soon)
            instructions.append(x)
            begun += x.op in COMPUTES
            message = sent_after(x, ranks, stages, first_trainable_stage, chain)
            if message is not None:
                instructions.append(Instruction(Op(f"send_{message.kind}"), x.stage, x.microbatch))

        # features for coming steps
        for channel, messages in incoming.items():
            if channel[1:] == (rank, "features"):
                instructions += [message.receive for message in messages]
        schedule.append((*instructions, *map(Instruction, end)))
    return tuple(schedule)
