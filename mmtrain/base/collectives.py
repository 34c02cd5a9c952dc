"""Objects of all ranks, gathered; every rank of the job, or of the group, calls these at the same
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def all_gather_object(value: T) -> list[T]:
    """Return every rank's value, by global rank."""
    import torch.distributed as dist

    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_to_rank_0(value: T, group: ProcessGroup | None = None) -> list[T] | None:
    """Return every rank's value on rank 0 of `group` (None: of the job), None on the others."""
    import torch.distributed as dist

    values = None
    if dist.get_rank(group) == 0:
        values = [value] * dist.get_world_size(group)
    dist.gather_object(value, values, group=group)
    return values
