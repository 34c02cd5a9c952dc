"""Make the process groups of a run. (DeepSpeed makes those of its own grid.)

On CUDA the default group has two backends, NCCL for tensors on GPUs and gloo for those on the host
and for objects; elsewhere it has gloo alone. torch picks the backend by where a tensor is.

torch has two implementations of "nccl": ProcessGroupNCCL, and since 2.15 ProcessGroupNCCL2, in
which a group has one queue for all that a rank sends and receives. With one group per channel both
queue the same messages in the same order (tests/deadlocks.py).
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mmtrain.plan.plan import Plan

# of NCCL, for each channel: processors of the GPU that a receive posted ahead keeps busy
MAX_CTAS = 8
# NCCL times a message from when it is issued, not from when its peer could take it: with the
# configured timeout a message that is issued far ahead would count as hung. A peer that hangs shows
# in what the host waits for: the numbers beside hidden states, and the statistics that end a step.
NEVER = timedelta(days=365)


def join_process_group(
    device: torch.device,
    timeout_seconds: int,
) -> None:
    """Join the job described by the launcher's environment, as the default group, on this rank's
    device.
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))


def backend_name(device: torch.device) -> str:
    """Return the name of torch's class that carries tensors on `device` between the ranks of the
    job.
    """
    return type(dist.group.WORLD._get_backend(device)).__name__


def own_group(
    groups: Sequence[Sequence[int]],
    rank: int,
    device: torch.device,
    timeout_seconds: int,
) -> dist.ProcessGroup:
    """Make all `groups`, for tensors on `device`, and return the one with `rank`. Collective, in
    one order.
    """
    timeout = timedelta(seconds=timeout_seconds)
    backend = "nccl" if device.type == "cuda" else "gloo"
    for ranks in groups:
        group = dist.new_group(ranks, timeout, backend)
        if rank in ranks:
            own = group
    return own


def replica_ranks(plan: Plan, replica: int) -> Sequence[int]:
    """Return the global ranks of a replica, in the order of the pipeline."""
    return range(replica, plan.pipeline * plan.data, plan.data)


def replica_group(
    plan: Plan,
    rank: int,
    device: torch.device,
    timeout_seconds: int,
    size: int | None = None,
) -> dist.ProcessGroup | None:
    """Return the group of `size` replicas (None: all) with the stages of `rank`; None with one
    replica. Collective.
    """
    size = size or plan.data
    if size == 1:
        return None
    # ranks with the same stages have adjacent numbers, and `size` divides the replicas
    firsts = range(0, plan.pipeline * plan.data, size)
    groups = [range(first, first + size) for first in firsts]
    return own_group(groups, rank, device, timeout_seconds)


def channel_group(
    ranks: Sequence[int],
    device: torch.device,
    timeout_seconds: int,
) -> dist.ProcessGroup:
    """Make the group of two ranks that send each other tensors on `device`. Collective, in one
    order.
    """
    if device.type != "cuda":
        return dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER  # torch warns where the group's timeout differs
    options.config.max_ctas = MAX_CTAS
    return dist.new_group(
        ranks,
        timeout=NEVER,
        backend="nccl",
        pg_options=options,
    )
