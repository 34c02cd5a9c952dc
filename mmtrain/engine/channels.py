"""Messages between neighbouring ranks of a pipeline, matched by the order in which they are posted.

NCCL has no tags, so there is one two-rank group for each (source rank, destination rank, kind): hidden states
downstream, gradients upstream as far as the first trainable stage, encoder features along the chain of slices. With
several stages a rank the ranks form a ring, and a channel carries the messages of several stages. Position ids and
labels travel beside the hidden states from host to host: through the default group where the others are NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mmtrain.engine.process_groups import channel_group
from mmtrain.plan.instructions import Message
from mmtrain.plan.plan import Plan
from mmtrain.plan.schedule import ranks_of


class _Channel(NamedTuple):
    """One direction between this rank and a neighbour."""

    group: dist.ProcessGroup
    peer: int

    def post(self, operation: Callable[..., dist.Work], tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        """`dist.isend` or `dist.irecv`; on the host through the default group where the channel's is NCCL's."""
        by_nccl = dist.get_backend(self.group) == "nccl"
        groups = (None if by_nccl and tensor.device.type == "cpu" else self.group for tensor in tensors)
        return [operation(tensor, self.peer, group=group) for tensor, group in zip(tensors, groups, strict=True)]


class Channels:
    """All channels of one rank; all ranks of the job construct this at the same time.

    Sends are asynchronous: their tensors are kept until `wait_for_sends`, which ends a step. Receives are posted ahead
    and taken later.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device, timeout_seconds: int) -> None:
        """Open this rank's channels and connect them."""
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []
        self._awaited: dict[Message, tuple[list[dist.Work], list[torch.Tensor]]] = {}
        self._channels: dict[tuple[str, int, int], _Channel] = {}  # by (kind, source, destination), pipeline ranks
        places = {(other.pipeline, other.data): other.rank for other in plan.ranks}
        flows: dict[tuple[str, int, int], None] = {}  # a set in order: the same on every rank
        for stage in range(plan.pipeline * plan.stages_per_rank - 1):
            near, far = stage % plan.pipeline, (stage + 1) % plan.pipeline
            flows["activation", near, far] = None
            if stage >= plan.first_trainable_stage:
                flows["gradient", far, near] = None
        chain = ranks_of(plan.chain)
        for near, far in zip(chain, (*chain[1:], chain[0]), strict=True):
            if near != far:
                flows["features", near, far] = None
        # Every rank creates all groups, its own or not: torch names them by a counter that must agree everywhere.
        for replica in range(plan.data):
            for kind, source, destination in flows:
                ranks = places[source, replica], places[destination, replica]
                group = channel_group(ranks, device, timeout_seconds)
                if rank in ranks:
                    self._channels[kind, source, destination] = _Channel(group, peer=ranks[rank == ranks[0]])
        # NCCL connects at the first message and blocks until the peer does too: connect now, in one order for all.
        for (_, source, _), channel in self._channels.items():
            probe = [torch.zeros(1, device=device)]
            operation = dist.isend if source == plan.ranks[rank].pipeline else dist.irecv
            for work in channel.post(operation, probe):
                work.wait()

    def _channel(self, message: Message) -> _Channel:
        return self._channels[message.kind, message.source, message.destination]

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous tensors as a message that leaves this rank."""
        # Let go of what has left the device; gloo's work cannot be polled.
        self._sends = [(work, sent) for work, sent in self._sends if not (sent.is_cuda and work.is_completed())]
        self._sends += zip(self._channel(message).post(dist.isend, tensors), tensors, strict=True)

    def post_receive(self, message: Message, tensors: list[torch.Tensor]) -> None:
        """Begin to receive a message that comes to this rank into `tensors`."""
        self._awaited[message] = self._channel(message).post(dist.irecv, tensors), tensors

    def take(self, message: Message) -> list[torch.Tensor]:
        """Return the tensors of a posted receive, once they have arrived."""
        works, tensors = self._awaited.pop(message)
        for work in works:
            work.wait()
        return tensors

    def posted(self, kind: str) -> list[Message]:
        """Return the messages of a kind that were posted and not yet taken."""
        return [message for message in self._awaited if message.kind == kind]

    def wait_for_sends(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sends:
            work.wait()
        self._sends = []
