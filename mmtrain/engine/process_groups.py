"""The process groups of a run: the only module that makes any. (DeepSpeed makes those of its own grid.)

On CUDA the default group has two backends, NCCL for tensors on GPUs and gloo for those on the host and for objects;
elsewhere it is gloo's. torch picks the backend by where a tensor is.

torch has two implementations of "nccl": ProcessGroupNCCL, and since 2.15 ProcessGroupNCCL2. There a new group splits
the job's communicator, which all ranks do together; a group has one queue for all that a rank sends and receives,
whoever the peers are; and each communicator registers all of torch's GPU memory. With one group per channel both
implementations queue the same messages in the same order (tests/deadlocks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mmtrain.plan.plan import Plan

MAX_CTAS = 8  # of NCCL, for each channel: a receive that is posted ahead keeps as many of a GPU's processors busy
# Both implementations time a message from when it is issued, not from when its peer could take it: with the
# configured timeout a message that is issued far ahead would count as hung. A peer that hangs shows in what the host
# waits for: the numbers beside hidden states, and the statistics that end a step, which have the configured timeout.
NEVER = timedelta(days=365)


def join_process_group(device: torch.device, timeout_seconds: int) -> None:
    """Join the job described by the launcher's environment, as the default group, on this rank's device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))


def backend_name(device: torch.device) -> str:
    """Return the name of torch's class that carries tensors on `device` between the ranks of the job."""
    return type(dist.group.WORLD._get_backend(device)).__name__


def replica_group(plan: Plan, rank: int, device: torch.device, timeout_seconds: int) -> dist.ProcessGroup | None:
    """The ranks that hold the same stages as `rank`, this one, for tensors on `device`; None with one replica.

    Every rank of the job calls it at the same time. DeepSpeed's own groups of these ranks have torch's timeout.
    """
    if plan.data == 1:
        return None
    mine, backend = None, "nccl" if device.type == "cuda" else "gloo"
    for place in range(plan.pipeline):  # every rank makes all groups, its own or not, in one order
        ranks = [other.rank for other in plan.ranks if other.pipeline == place]
        group = dist.new_group(ranks, timedelta(seconds=timeout_seconds), backend)
        if rank in ranks:
            mine = group
    return mine


def shard_group(plan: Plan, rank: int, device: torch.device, timeout_seconds: int) -> dist.ProcessGroup:
    """The replicas of `rank` that keep a part each of the layers that it streams, for tensors on `device`.

    Of a plan that streams. Every rank of the job calls it at the same time.
    """
    mine, backend, size = None, "nccl" if device.type == "cuda" else "gloo", plan.streaming.weight_shards
    for place in range(plan.pipeline):
        for first in range(0, plan.data, size):
            ranks = [other.rank for other in plan.ranks if other.pipeline == place and 0 <= other.data - first < size]
            group = dist.new_group(ranks, timedelta(seconds=timeout_seconds), backend)
            if rank in ranks:
                mine = group
    assert mine is not None
    return mine


def host_group(replicas: Sequence[Sequence[int]], rank: int, timeout_seconds: int) -> dist.ProcessGroup:
    """The ranks of this rank's replica, for tensors on the host; every rank of the job calls it, in one order."""
    groups = {tuple(ranks): dist.new_group(ranks, timedelta(seconds=timeout_seconds), "gloo") for ranks in replicas}
    return next(group for ranks, group in groups.items() if rank in ranks)


def channel_group(ranks: Sequence[int], device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """Make the group of two ranks that send each other tensors on `device`; all ranks of the job call it in one order.

    `timeout` is for messages between hosts. On a GPU a message has none of its own.
    """
    if device.type != "cuda":
        return dist.new_group(sorted(ranks), timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = NEVER  # torch warns where the group's is another one
    options.config.max_ctas = MAX_CTAS
    return dist.new_group(sorted(ranks), timeout=NEVER, backend="nccl", pg_options=options)
