"""Send and receive on a rank: messages between stages, and its part of the encoder in slices.

Messages are matched by the order in which they are posted. NCCL has no tags, so there is one
two-rank group for each (source rank, destination rank, kind): hidden states downstream, gradients
upstream as far as the first trainable stage, features along the chain of slices. Position ids and
labels travel beside the hidden states from host to host: through the default group where the others
are NCCL's.

rank 0: LOAD --number of tiles, to every rank of the chain--> ENCODE --hidden--> next slice ... last
    slice --features-->
rank 0: FORWARD of stage 0

A receive must know the number of a micro-batch's tiles: it goes from host to host, to the whole
chain at once, with the grids of its images where the encoder takes images of any size. It is
NO_DATA where the run or the data end. Such a micro-batch, like one without images, is neither
encoded nor sent.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.process_groups import channel_group, own_group, replica_ranks
from mmtrain.model.encoder.vision_tower import Grids
from mmtrain.model.stage import Stage
from mmtrain.plan.instructions import SENDS, Instruction, Message, Op, carried
from mmtrain.plan.plan import Plan
from mmtrain.plan.schedule import ranks_of

NO_DATA = -1
Sends = list[tuple[dist.Work, Tensor]]  # each tensor is kept until it is sent


class _Channel(NamedTuple):
    group: dist.ProcessGroup
    peer: int

    def post(
        self,
        operation: Callable[..., dist.Work],
        tensors: Sequence[Tensor],
    ) -> list[dist.Work]:
        by_nccl = dist.get_backend(self.group) == "nccl"
        works = []
        for tensor in tensors:
            group = self.group
            if by_nccl and tensor.device.type == "cpu":
                group = None
            works.append(operation(tensor, self.peer, group=group))
        return works


class Channels:
    """The channels on which one rank sends and receives. Collective: make it on every rank.

    Sends are asynchronous: their tensors are kept until `wait_for_sends`, which ends a step.
    Receives are posted ahead and taken later.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        device: torch.device,
        timeout_seconds: int,
    ) -> None:
        self._sends: Sends = []
        # by what posted the receive
        self._awaited: dict[Instruction, tuple[list[dist.Work], list[Tensor]]] = {}
        # by source, destination (pipeline ranks) and kind
        self._channels: dict[tuple[int, int, str], _Channel] = {}
        self._ranks = plan.pipeline
        self._chain = ranks_of(plan.chain)

        # Every rank creates all groups, its own or not: torch names them by a counter that must
        # agree everywhere, so their order is the same on every rank.
        instructions = itertools.chain.from_iterable(plan.schedule)
        in_order = dict.fromkeys(self._message(x).channel for x in instructions if x.op in SENDS)
        for replica in range(plan.data):
            ranks = replica_ranks(plan, replica)
            for channel in in_order:
                pair = [ranks[channel[0]], ranks[channel[1]]]
                group = channel_group(pair, device, timeout_seconds)
                if rank in pair:
                    pair.remove(rank)
                    self._channels[channel] = _Channel(group, peer=pair[0])

        # NCCL connects at the first message and blocks until the peer does too: connect now, in one
        # order for all.
        own = plan.ranks[rank].pipeline
        for (source, _, _), channel in self._channels.items():
            probe = [torch.zeros(1, device=device)]
            operation = dist.isend if source == own else dist.irecv
            _wait_for(channel.post(operation, probe))

    def _message(self, x: Instruction) -> Message:
        return carried(x, self._ranks, self._chain)

    def send(self, x: Instruction, tensors: Sequence[Tensor]) -> None:
        """Send contiguous tensors as the message of `x`."""
        # Let go of what has left the device; gloo's work cannot be polled.
        self._sends = [
            (work, sent) for work, sent in self._sends if not (sent.is_cuda and work.is_completed())
        ]
        channel = self._channels[self._message(x).channel]
        self._sends += zip(channel.post(dist.isend, tensors), tensors, strict=True)

    def post_receive(
        self,
        x: Instruction,
        tensors: list[Tensor],
    ) -> None:
        channel = self._channels[self._message(x).channel]
        self._awaited[x] = channel.post(dist.irecv, tensors), tensors

    def take(self, receive: Instruction) -> list[Tensor]:
        """Wait for what the instruction `receive` has posted."""
        works, tensors = self._awaited.pop(receive)
        _wait_for(works)
        return tensors

    def posted(self, op: Op) -> list[Instruction]:
        return [receive for receive in self._awaited if receive.op is op]

    def wait_for_sends(self) -> None:
        _finish(self._sends)


def _wait_for(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def _finish(sends: Sends) -> None:
    _wait_for(work for work, _ in sends)
    sends.clear()


class Encoded(NamedTuple):
    """A micro-batch of stage 0, with features (N, T, W) of its tiles, None without tiles."""

    batch: PackedBatch  # on the device, but for position ids and labels; without its tiles
    features: Tensor | None
    tiles: int


class _Ahead:
    """Micro-batches that have begun and are not yet used, by their number in the step."""

    def __init__(self) -> None:
        self.batches: dict[int, PackedBatch] = {}  # rank 0
        self.tiles: dict[int, int] = {}  # the chain
        # ranks of the chain behind rank 0
        self.grids: dict[int, Grids] = {}
        # by this rank's slice, and not yet sent or used
        self.made: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}  # in an earlier step

    def after(self, microbatches: int) -> _Ahead:
        """Return what is left for the next step, numbered as that step does."""
        left = _Ahead()
        for name, kind in vars(self).items():
            coming = {k - microbatches: x for k, x in kind.items() if k >= microbatches}
            setattr(left, name, coming)
        return left


class ChainLink:
    """One rank's end of the encoder pipeline. Collective: construct it on every rank, also outside
    the chain.

    `stage` is the rank's first, which holds its slice. `waited` is called where this rank has only
    waited until then.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stage: Stage,
        channels: Channels,
        waited: Callable[[], None],
        timeout_seconds: int,
    ) -> None:
        self._stage = stage
        self._channels = channels
        self._waited = waited
        self._device = next(stage.parameters()).device
        self._rank = plan.ranks[rank].pipeline
        chain = ranks_of(plan.chain)
        self._is_alone = len(chain) == 1
        # from rank 0: how many tiles each micro-batch has
        self._receives_counts = self._rank in chain[1:]

        replicas = [replica_ranks(plan, replica) for replica in range(plan.data)]
        own = replicas[plan.ranks[rank].data]
        self._reader, *self._others = [own[other] for other in chain]
        if not self._is_alone:
            self._group = own_group(replicas, rank, torch.device("cpu"), timeout_seconds)

        self._sent: Sends = []
        self._of_training = _Ahead()
        self._now = _Ahead()
        self._trains = True
        self._to_read = 0

    def begin(self, loads: int, *, trains: bool) -> None:
        """Begin a step, or an evaluation beside what is there for the next step; rank 0 reads
        `loads` micro-batches.
        """
        self._trains = trains
        self._now = self._of_training if trains else _Ahead()
        if self._receives_counts:
            self._to_read = loads

    def end(self, microbatches: int) -> None:
        """End a step or evaluation that has used `microbatches`; nothing stays under way."""
        for x in self._channels.posted(Op.RECEIVE_FEATURES):
            (self._now.received[x.microbatch],) = self._channels.take(x)
        while self._to_read:
            self._read_count()
        _finish(self._sent)
        self._waited()
        if self._trains:
            self._of_training = self._now.after(microbatches)

    def load(self, microbatch: int, batch: PackedBatch | None) -> None:
        """Take a micro-batch that rank 0 has read, or None at the end of the data."""
        tiles = NO_DATA
        grids = ()
        if batch is not None:
            self._now.batches[microbatch] = batch
            tiles = 0 if batch.tiles is None else len(batch.tiles)
            vision = self._stage.vision
            if vision is not None and vision.needs_grids:
                grids = batch.grids
        self._now.tiles[microbatch] = tiles

        messages = [torch.tensor([microbatch, tiles, len(grids)])]
        if grids:
            messages.append(torch.tensor(grids))
        for other in self._others:
            for message in messages:
                self._sent.append((dist.isend(message, other, group=self._group), message))

    def encode(self, x: Instruction) -> None:
        microbatch = x.microbatch
        made = None
        if self._rank:
            grids = self._now.grids.pop(microbatch)
            if self._now.tiles.pop(microbatch) > 0:
                made = self._stage.encode(self._take(microbatch), grids)
        elif microbatch in self._now.batches:
            batch = self._now.batches[microbatch]
            with torch.set_grad_enabled(self._trains):
                made = self._stage.encode(batch)
            # `replace` would ask the device for image_places
            kept = copy.copy(batch)
            kept.tiles = None
            self._now.batches[microbatch] = kept
        if made is not None:
            self._now.made[microbatch] = made

    def send(self, x: Instruction) -> None:
        made = self._now.made.pop(x.microbatch, None)
        if made is not None:
            self._channels.send(x, [made.contiguous()])

    def receive(self, x: Instruction) -> None:
        """Post the receive of this rank's input: of its slice, or of stage 0's FORWARD."""
        while x.microbatch not in self._now.tiles:
            self._read_count()
            self._waited()
        tiles = self._now.tiles[x.microbatch]
        if tiles > 0:
            vision = self._stage.vision
            shape = vision.hidden_shape if self._rank else vision.feature_shape
            room = torch.empty(
                tiles,
                *shape,
                dtype=vision.dtype,
                device=self._device,
            )
            self._channels.post_receive(x, [room])

    def take(self, microbatch: int) -> Encoded:
        batch = self._now.batches.pop(microbatch)
        tiles = self._now.tiles.pop(microbatch)
        features = self._now.made.pop(microbatch, None)
        if not self._is_alone and tiles > 0:
            features = self._take(microbatch)
        return Encoded(batch, features, tiles)

    def _take(self, microbatch: int) -> Tensor:
        if microbatch in self._now.received:
            return self._now.received.pop(microbatch)
        (received,) = self._channels.take(Instruction(Op.RECEIVE_FEATURES, self._rank, microbatch))
        self._waited()
        return received

    def _read_count(self) -> None:
        count = torch.empty(3, dtype=torch.int64)
        dist.recv(count, self._reader, group=self._group)
        microbatch, tiles, images = count.tolist()
        grids = torch.empty(images, 2, dtype=torch.int64)
        if images:
            dist.recv(grids, self._reader, group=self._group)
        self._now.tiles[microbatch] = tiles
        self._now.grids[microbatch] = grids.tolist()
        self._to_read -= 1
