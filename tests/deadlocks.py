"""Whether ranks on GPUs can wait for each other for ever while they run their instruction lists.

The engine gives a device its work through one host thread, and the device runs it on streams: one
for all that computes, one for each process group. NCCL has no buffers: a send is done once its
receive runs too. An operation is issued (by the host), starts and is done (on its stream). What
must come before what is a graph over these three events of every operation; nothing in it depends
on how long anything takes, so one walk over it decides for all timings: what the walk does not
reach never happens. (Operations are only ever waited for, never chosen between.)

- A compute (encode, forward, backward, optimizer step) starts after the computes issued before it
  and after the messages that it uses are there; the host goes on at once.
- A message moves on the stream of its process group, and starts after the computes issued before
  it. A rank has one queue a group for all that it sends and receives there, in order of issue,
  whoever the peers are: so does torch's ProcessGroupNCCL2. (Its ProcessGroupNCCL has one a group
  and peer, which is the same where a group has two ranks.) The engine makes one group a channel.
- Collectives of the whole job run on the computes' stream (ProcessGroupNCCL2), or make it wait
  (ProcessGroupNCCL).
- A forward's positions and labels come through a channel between hosts: the host waits for them
  before it issues that forward. The last stage's forward, and statistics that are reduced over all
  ranks, make the host wait for the device.
- Before a rank of the encoder's chain posts the receive of what a slice sends, its host waits for
  the number of tiles, which rank 0's host sends when it loads that micro-batch. Rank 0 itself knows
  it.
- A step ends with the computes' stream waiting for what was posted for coming steps; then the
  chain's hosts read the numbers that they have not needed, and rank 0's waits for that; then the
  stream waits for everything sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from mmtrain.plan.instructions import RECEIVES, SENDS, Message, Op, Schedule, chain_of, steps_of


class Ordering(Enum):
    """In which order a device and its host do what they were given."""

    IDEAL = "every stream by itself"
    LAUNCH_ORDER = (
        "all streams start in the order of issue (CUDA_DEVICE_MAX_CONNECTIONS=1, "
        "NCCL_LAUNCH_ORDER_IMPLICIT=1)"
    )
    BLOCKING = "an operation is issued once all before it are done (CUDA_LAUNCH_BLOCKING=1)"
    HOST_WAITS = "the host waits for each message that is used (TORCH_NCCL_BLOCKING_WAIT=1)"
    DEVICE_WIDE_WAITS = (
        "every compute waits for all that was issued before it "
        "(kernels that load, "
        "memory given back)"
    )


class Stuck(NamedTuple):
    """Where a rank stops for ever."""

    rank: int
    step: int  # from 0
    instruction: int  # of its list in that step; past the end: where it waits for what it sent


Load = tuple[int, int]
"""Kind of step (0: training, which its prelude begins; else an evaluation) and micro-batch, counted
from the first.
"""


@dataclass(slots=True)
class _Operation:
    """Something that a rank issues; its events are 3 i (issued), 3 i + 1 (started) and 3 i + 2
    (done), i its index.
    """

    step: int
    instruction: int  # of the rank's list in that step
    message: Message | None = None  # that this sends or receives
    sends: bool = False
    uses: Sequence[int] = ()  # sends or receives of this rank that must be done first
    collective: bool = False
    host_waits: bool = False  # for this, before it issues what follows
    load: Load | None = None  # that this is
    # whose numbers of tiles the host must have before it issues this
    after_loads: Sequence[Load] = ()
    end: int | None = None  # of this step on a rank of the chain


def group_a_channel(message: Message) -> Hashable:
    """The process group that carries a message, as engine/channels.py makes them."""
    return message.channel


def find_deadlock(
    steps: Sequence[Schedule],
    ordering: Ordering,
    group_of: Callable[[Message], Hashable] = group_a_channel,
) -> list[Stuck]:
    """Where each rank that cannot go on stops, when all run these steps one after the other; empty:
    all reach the end.

    A step is what runs from one reduction of statistics to the next, training or evaluation, or the
    prelude; in the lists of each, what an instruction needs of its own rank stands before it.
    """
    operations: list[_Operation] = []
    begins = [0]
    for rank in range(len(steps[0])):
        used = 0  # micro-batches of training
        for number, schedule in enumerate(steps):
            is_evaluation = {x.op for x in schedule[rank]} & {
                Op.REDUCE_STATISTICS,
                Op.OPTIMIZER_STEP,
            } == {Op.REDUCE_STATISTICS}
            _issue(
                operations, number, schedule, rank, (number + 1, 0) if is_evaluation else (0, used)
            )
            if not is_evaluation:
                used += sum(x.op is Op.FORWARD and x.stage == 0 for x in schedule[0])
        begins.append(len(operations))
    happened = _events(operations, begins, ordering, group_of)
    stuck = []
    for rank, (begin, end) in enumerate(pairwise(begins)):
        for i in range(begin, end):
            if operations[i].message is None and not happened[3 * i + 2]:
                stuck.append(Stuck(rank, operations[i].step, operations[i].instruction))
                break
    return stuck


def _issue(
    operations: list[_Operation], step: int, schedule: Schedule, rank: int, first: Load
) -> None:
    """Append what the host of `rank` issues in a step, whose micro-batch 0 is `first`."""
    last_stage = max((x.stage for instructions in schedule for x in instructions), default=0)
    kind, begin = first
    chain = chain_of(schedule)
    listens = len(chain) > 1 and rank in chain[1:]
    received: dict[Message, int] = {}
    sent: list[int] = []
    for place, (_, x, message) in enumerate(steps_of(schedule, rank)):
        if x.op in SENDS:
            sent.append(len(operations))
            operations.append(_Operation(step, place, message, sends=True))
        elif x.op in RECEIVES:
            received[message] = len(operations)
            loads = (
                [(kind, begin + x.microbatch)] if x.op is Op.RECEIVE_FEATURES and listens else []
            )
            operations.append(_Operation(step, place, message, after_loads=loads))
        else:
            reduces = x.op is Op.REDUCE_STATISTICS
            waits = reduces or (x.op is Op.FORWARD and x.stage == last_stage)
            uses = [received.pop(message)] if message else []
            load = (kind, begin + x.microbatch) if x.op is Op.LOAD else None
            operations.append(
                _Operation(step, place, uses=uses, collective=reduces, host_waits=waits, load=load)
            )
    operations.append(_Operation(step, len(schedule[rank]), uses=list(received.values())))
    loads = [(kind, begin + x.microbatch) for x in schedule[0] if x.op is Op.LOAD and listens]
    end = step if len(chain) > 1 and rank in chain else None
    operations.append(_Operation(step, len(schedule[rank]), uses=sent, after_loads=loads, end=end))


def _events(
    operations: Sequence[_Operation],
    begins: Sequence[int],
    ordering: Ordering,
    group_of: Callable[[Message], Hashable],
) -> bytearray:
    """Whether each event ever happens."""
    after: list[list[int]] = [[] for _ in range(3 * len(operations))]
    waits = [0] * len(after)

    def wait(event: int, until: int) -> None:
        after[until].append(event)
        waits[event] += 1

    queues: dict[Hashable, int] = {}  # the latest message of each rank and group
    # receives and sends
    pairs: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    collectives: dict[int, list[int]] = defaultdict(list)
    device_wide = ordering is Ordering.DEVICE_WIDE_WAITS
    # The number of tiles goes out after its load, where the host waits for that before it issues
    # anything else.
    loaded = 2 if device_wide or ordering is Ordering.BLOCKING else 0
    loads = {x.load: 3 * i + loaded for i, x in enumerate(operations) if x.load is not None}
    # on rank 0
    readers = {x.end: 3 * i for i, x in enumerate(operations[: begins[1]]) if x.end is not None}
    for rank, (begin, end) in enumerate(pairwise(begins)):
        compute: int | None = None  # the latest
        pending: list[int] = []  # messages that no device-wide wait has waited for
        reduced = 0
        for i in range(begin, end):
            x = operations[i]
            issued, started, done = 3 * i, 3 * i + 1, 3 * i + 2
            wait(started, issued)
            for load in x.after_loads:
                if load in loads:  # else it came in an earlier step
                    wait(issued, loads[load])
            if begin and x.end is not None:
                wait(readers[x.end], issued)
            if i > begin:
                held = ordering is Ordering.BLOCKING or operations[i - 1].host_waits
                held = held or (device_wide and operations[i - 1].message is None)
                wait(issued, done - 3 if held else issued - 3)
                if ordering is Ordering.LAUNCH_ORDER:
                    wait(started, started - 3)
            if compute is not None:
                wait(started, 3 * compute + 2)
            if x.message is not None:
                group = group_of(x.message)
                if (rank, group) in queues:
                    wait(started, 3 * queues[rank, group] + 2)
                queues[rank, group] = i
                # Within a group NCCL matches what one rank sends another by order alone.
                pairs[group, x.message.source, x.message.destination][x.sends].append(i)
                pending.append(i)
                continue
            for message in x.uses:
                wait(issued if ordering is Ordering.HOST_WAITS else started, 3 * message + 2)
            if device_wide:
                for message in pending:
                    wait(started, 3 * message + 2)
                pending = []
            if x.collective:
                collectives[reduced].append(i)
                reduced += 1
            else:
                wait(done, started)
            compute = i
    partner: dict[int, int] = {}
    for receives, sends in pairs.values():
        for receive, send in zip(receives, sends, strict=True):
            partner[receive], partner[send] = send, receive
            for one in (receive, send):
                wait(3 * one + 2, 3 * receive + 1)
                wait(3 * one + 2, 3 * send + 1)
    for i, x in enumerate(operations):  # integers go from host to host, once both have issued them
        for used in x.uses:
            if operations[used].message.kind == "activation":
                wait(3 * i, 3 * partner[used])
    for members in collectives.values():
        for member in members:
            for other in members:
                wait(3 * member + 2, 3 * other + 1)

    happened = bytearray(len(after))
    ready = [event for event, count in enumerate(waits) if count == 0]
    while ready:
        event = ready.pop()
        happened[event] = True
        for later in after[event]:
            waits[later] -= 1
            if waits[later] == 0:
                ready.append(later)
    return happened
