"""The words of a schedule: instructions, the messages that they send and receive, and how lists are
read.

`mmtrain.plan.schedule` makes the lists; engine, simulation and memory walk read them here. They
also tell which frozen decoder layers a rank fetches, in which order, and how long it waits for
them.

A **streamed** layer is whole on the device only right before and while it computes. At most two
layers are whole at once: the one that computes, and the next one, which is fetched meanwhile. A
layer that is used again soon stays.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """The kinds of work of a rank; `stage` and `microbatch` of the instruction name the data."""

    LOAD = "load"  # stage 0: read a micro-batch, and tell the chain how many tiles it has
    ENCODE = "encode"  # forward of the slice that the rank of `stage` holds
    FORWARD = "forward"  # all but the encoder
    BACKWARD = "backward"
    SEND_ACTIVATION = "send_activation"  # output of `stage`, to stage + 1
    # post the receive of the input of `stage`, from stage - 1
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"  # gradient of the input of `stage`, to stage - 1
    # post the receive of the gradient of the output of `stage`, from stage + 1
    RECEIVE_GRADIENT = "receive_gradient"
    # output of the slice of `stage`, to the next of the chain or, the last, to stage 0
    SEND_FEATURES = "send_features"
    # post the receive of what ENCODE of `stage`, or stage 0's FORWARD, takes
    RECEIVE_FEATURES = "receive_features"
    REDUCE_GRADIENTS = "reduce_gradients"
    REDUCE_STATISTICS = "reduce_statistics"
    OPTIMIZER_STEP = "optimizer_step"


COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.SEND_FEATURES})
RECEIVES = frozenset({Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT, Op.RECEIVE_FEATURES})
# Every rank ends a step with these, also one with nothing to train: it takes part in the same
# collectives.
TRAINING_END = (Op.REDUCE_GRADIENTS, Op.REDUCE_STATISTICS, Op.OPTIMIZER_STEP)
EVALUATION_END = (Op.REDUCE_STATISTICS,)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One piece of work; stage and micro-batch are -1 where the whole rank is meant.

    Micro-batches count from 0 in each step; in LOAD, ENCODE and messages of slices
    `microbatches_per_step` + k is the k-th of the next step, and so on.
    """

    op: Op
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        if self.stage < 0:
            return self.op.name
        return f"{self.op.name}(stage {self.stage}, micro-batch {self.microbatch})"


Schedule = tuple[tuple[Instruction, ...], ...]
Orders = Sequence[Sequence[Instruction]]
"""Instructions of each pipeline rank, perhaps of some kinds only."""


class Message(NamedTuple):
    """Tensors that cross from one rank to another."""

    source: int  # rank
    destination: int  # rank
    kind: str  # "activation", "gradient" or "features"
    # stage that uses it; of features the stage of the ENCODE, or stage 0 for its FORWARD
    consumer: int
    microbatch: int

    @property
    def channel(self) -> tuple[int, int, str]:
        return self.source, self.destination, self.kind

    @property
    def receive(self) -> Instruction:
        return Instruction(Op(f"receive_{self.kind}"), self.consumer, self.microbatch)


class Step(NamedTuple):
    """An instruction of a rank, with the message that it sends, posts the receive of or, if it
    computes, waits for.
    """

    rank: int
    instruction: Instruction
    message: Message | None


# ---- which messages there are


def chain_of(schedule: Orders) -> tuple[int, ...]:
    """The pipeline ranks that hold a slice of the encoder, by what they do; rank 0 always is
    one.
    """
    chain = [0]
    for rank, order in enumerate(schedule):
        ops = {x.op for x in order}
        if rank and not ops.isdisjoint((Op.ENCODE, Op.RECEIVE_FEATURES)):
            chain.append(rank)
    return tuple(chain)


def sent_after(
    x: Instruction,
    ranks: int,
    stages: int,
    first_trainable_stage: int,
    chain: Sequence[int],
) -> Message | None:
    """The message that another rank needs from this instruction; None if there is none."""
    if x.op is Op.FORWARD and x.stage + 1 < stages:
        return between(x.stage, x.stage + 1, x.microbatch, ranks)
    if x.op is Op.BACKWARD and x.stage > first_trainable_stage:
        return between(x.stage, x.stage - 1, x.microbatch, ranks)
    if x.op is Op.ENCODE:
        return _features(x.stage, _after(chain, x.stage), x.microbatch)
    return None


def needed_before(
    x: Instruction,
    ranks: int,
    stages: int,
    chain: Sequence[int],
) -> Message | None:
    """The message from another rank that this instruction waits for, of this step or an earlier
    one.
    """
    if x.op is Op.FORWARD and x.stage > 0:
        return between(x.stage - 1, x.stage, x.microbatch, ranks)
    if x.op is Op.BACKWARD and x.stage + 1 < stages:
        return between(x.stage + 1, x.stage, x.microbatch, ranks)
    if x.op is Op.FORWARD or (x.op is Op.ENCODE and x.stage > 0):
        return _features(_after(chain, x.stage, -1), x.stage, x.microbatch)
    return None


def _after(chain: Sequence[int], rank: int, distance: int = 1) -> int:
    if rank not in chain:
        return rank
    return chain[(chain.index(rank) + distance) % len(chain)]


def between(
    stage: int,
    consumer: int,
    microbatch: int,
    ranks: int,
) -> Message | None:
    """A message from a stage to the one after or before it; None if both are on one rank."""
    if ranks == 1:
        return None
    kind = "activation" if stage < consumer else "gradient"
    return Message(stage % ranks, consumer % ranks, kind, consumer, microbatch)


def _features(source: int, consumer: int, microbatch: int) -> Message | None:
    if source == consumer:
        return None
    return Message(source, consumer, "features", consumer, microbatch)


# ---- reading the lists

_STAGES = {  # of the source and of the consumer, counted from the instruction's own
    Op.SEND_ACTIVATION: (0, 1),
    Op.RECEIVE_ACTIVATION: (-1, 0),
    Op.SEND_GRADIENT: (0, -1),
    Op.RECEIVE_GRADIENT: (1, 0),
}
_USERS = {Op.RECEIVE_ACTIVATION: Op.FORWARD, Op.RECEIVE_GRADIENT: Op.BACKWARD}


def carried(x: Instruction, ranks: int, chain: Sequence[int]) -> Message:
    if x.op is Op.SEND_FEATURES:
        return _features(x.stage, _after(chain, x.stage), x.microbatch)
    if x.op is Op.RECEIVE_FEATURES:
        return _features(_after(chain, x.stage, -1), x.stage, x.microbatch)
    source, consumer = _STAGES[x.op]
    return between(x.stage + source, x.stage + consumer, x.microbatch, ranks)


def user_of(receive: Instruction) -> Instruction:
    of_features = Op.ENCODE if receive.stage else Op.FORWARD
    return Instruction(_USERS.get(receive.op, of_features), receive.stage, receive.microbatch)


def steps_of(schedule: Schedule, rank: int) -> Iterator[Step]:
    """A rank's list, each instruction with its message."""
    chain = chain_of(schedule)
    posted: dict[Instruction, Message] = {}  # by the instruction that uses it
    for x in schedule[rank]:
        message = posted.get(x)
        if x.op in SENDS or x.op in RECEIVES:
            message = carried(x, len(schedule), chain)
        if x.op in RECEIVES:
            posted[user_of(x)] = message
        yield Step(rank, x, message)


def all_steps(schedule: Schedule) -> list[Step]:
    """All ranks' instructions in one order, each after the send of the message that it waits for.

    Of several ranks that can go on, a backward comes before a forward before an encode, and of
    these the deepest stage, so that few messages wait. Raises ValueError where no rank can go on.
    """
    lists = [steps_of(schedule, rank) for rank in range(len(schedule))]
    order = []
    sent: set[Message | None] = {None}
    waiting: dict[int, Step] = {}  # what each rank does next

    def waits(step: Step) -> bool:
        return step.instruction.op not in SENDS | RECEIVES and step.message not in sent

    def urgency(step: Step) -> tuple[int, int]:
        return _URGENCY.get(step.instruction.op, 0), step.instruction.stage

    def run_to_next_compute(rank: int) -> None:
        for step in lists[rank]:
            if step.instruction.op in COMPUTES or waits(step):
                waiting[rank] = step
                return
            done(step)

    def done(step: Step) -> None:
        order.append(step)
        if step.instruction.op in SENDS:
            sent.add(step.message)

    for rank in range(len(schedule)):
        run_to_next_compute(rank)
    while runnable := [step for step in waiting.values() if not waits(step)]:
        step = max(runnable, key=urgency)
        done(waiting.pop(step.rank))
        run_to_next_compute(step.rank)
    if waiting:
        raise ValueError("the schedule cannot finish: every rank waits")
    return order


_URGENCY = {Op.BACKWARD: 2, Op.FORWARD: 1}


def in_common_order(schedule: Schedule) -> Schedule:
    """Return the schedule with every receive moved to where it cannot hang; computes keep their
    order.

    All computes are put into one order for all ranks; a message is received at the point of that
    order at which it is sent. So the first operation that is not done never waits for a later one
    (tests/deadlocks.py).
    """
    ordered: list[list[Instruction]] = [[] for _ in schedule]
    for rank, x, message in all_steps(schedule):
        if x.op not in RECEIVES and x.stage >= 0:
            ordered[rank].append(x)
        if x.op in SENDS:
            ordered[message.destination].append(message.receive)

    # Ranks end together: one that has nothing left to compute may still be sent features for coming
    # steps.
    for order, instructions in zip(ordered, schedule, strict=True):
        order += [x for x in instructions if x.stage < 0]
    return tuple(map(tuple, ordered))


WHOLE_AT_ONCE = 2
"""Streamed layers of a rank."""
ALIGNMENT = 512
"""Bytes: each parameter of a streamed layer begins at a multiple, as memory from CUDA's allocator
does.
"""
BOTH_ENDS = 2
"""Fetches saved by a compute whose neighbours on its rank run its stage in the other direction: one
at each end.
"""


def offsets_of(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where parameters of these sizes begin in the buffer of their layer, and the buffer's
    bytes.
    """
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def uses_of(
    instructions: Iterable[Instruction],
    streamed: Mapping[int, Sequence[int]],
    first_trainable_layer: int,
) -> list[int]:
    """The streamed decoder layers that a list uses, in order; those from `first_trainable_layer` on
    run backward.
    """
    uses: list[int] = []
    for x in instructions:
        layers = streamed.get(x.stage, ())
        if x.op is Op.FORWARD:
            uses += layers
        elif x.op is Op.BACKWARD:
            uses += [layer for layer in reversed(layers) if layer >= first_trainable_layer]
    return uses


def with_following(uses: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """Return pairs of each used layer and the next other one, fetched while the first computes."""
    following = None
    pairs = []
    for i in range(len(uses) - 1, -1, -1):
        if i + 1 < len(uses) and uses[i + 1] != uses[i]:
            following = uses[i + 1]
        pairs.append((uses[i], following))
    return reversed(pairs)


def fetches_of(uses: Sequence[int]) -> list[int]:
    """Return the layers that are fetched for these uses, in order, if no layer is whole before and
    after them.
    """
    whole: tuple[int | None, ...] = (None,)
    fetches = []
    for layer, following in with_following(uses):
        if layer not in whole:
            fetches.append(layer)
        if following not in (*whole, None):
            fetches.append(following)
        whole = layer, following
    return fetches


class Waits(NamedTuple):
    """The waits of a FORWARD or BACKWARD of one micro-batch for fetches of streamed layers."""

    fetches: int  # if its neighbours on the rank use none of its layers
    each: float  # seconds by which a fetch takes longer than the computing that it hides behind
    # seconds of all fetches over those of the decoder layers that they hide behind
    share: float = 0.0

    def seconds(self, spared: int = BOTH_ENDS) -> float:
        return max(0, self.fetches - spared) * self.each


NO_WAITS = Waits(0, 0.0)


def waits_of(fetches: int, fetch_seconds: float, compute_seconds: float) -> Waits:
    """The waits of a stage that fetches `fetches` layers while its decoder layers compute
    `compute_seconds`.

    Streamed layers are spread evenly, so each fetch has the same share of the computing to hide
    behind.
    """
    if not fetches:
        return NO_WAITS
    share = 0.0
    if compute_seconds:
        share = fetches * fetch_seconds / compute_seconds
    return Waits(fetches, max(0.0, fetch_seconds - compute_seconds / fetches), share)


def spread(count: int, of: int) -> list[int]:
    """Return `count` of `of` entries, evenly spread, with as much room before the first as behind
    the last.
    """
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]
