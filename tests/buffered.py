"""How many micro-batches a schedule has encoded at once: counted from its lists, to compare with what was allowed."""

from __future__ import annotations

from mmtrain.plan.schedule import COMPUTES, Op, Schedule


def most_buffered(schedule: Schedule) -> int:
    """Most micro-batches whose features exist at once, on rank 0."""
    first = next((x.microbatch for x in schedule[0] if x.op is Op.ENCODE), 0)
    waiting = most = first
    for x in schedule[0]:
        waiting += x.op is Op.ENCODE
        most = max(most, waiting)
        waiting -= x.op in COMPUTES and x.op is Op.FORWARD and x.stage == 0
    return most
