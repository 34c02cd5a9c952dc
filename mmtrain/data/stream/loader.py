"""From shards to one replica's micro-batches. The life of a sample:

1. index    its place, checksums and length are known before the run starts (`index`, `catalog`)
2. order    `order`: (seed, epoch) -> one global list of packs, the same for any number of replicas
   and workers
3. share    step s takes packs [s*G, (s+1)*G); replica r the r-th contiguous part of them
4. read     `Reader`: by offset, checksum compared; a damaged sample leaves a gap in its pack
5. text     the template: turns -> input_ids and labels; a length that is not the planned one ends
   the run
6. images   `make_batch`: decoded, resized, cut into tiles
7. ahead    with workers, steps 4-6 run in other processes, each making every n-th micro-batch
8. device   `to_device`: copied as they are; tiles become float32 where the encoder runs

The whole state is the number of the next step: nothing was drawn that it does not tell.
"""

import functools
import itertools
import math
import mmap
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import QuarantinedSample
from mmtrain.data.stream.catalog import Reader, data_sets, load_catalog
from mmtrain.data.stream.order import HELD_OUT, PackOrder, PlannedPack
from mmtrain.data.stream.packs import Gap, Pack, PackedBatch, Processor
from mmtrain.runtime.child import die_with_parent
from mmtrain.runtime.stop import ignore_in_worker

PREFETCH = 2  # micro-batches that each worker makes ahead
# micro-batches of a worker that keep their tiles: those ahead, and the one being copied out
SLOTS = PREFETCH + 1


@dataclass(eq=False)
class PackedBatches:
    """One replica's micro-batches from `first_step` on, without end; a step may span two epochs.

    Every iteration starts again at `first_step`.
    """

    config: RunConfig
    replica: int
    replicas: int
    first_step: int = 0

    def __post_init__(self) -> None:
        """Open tokenizer and indexes.

        Raises UserError for what is missing, and for data without a single pack.
        """
        assert 0 <= self.replica < self.replicas, f"replica {self.replica} of {self.replicas}"
        config = self.config
        self.processor = Processor(config)
        data = config.data
        self.catalog = load_catalog(config, data_sets(data), config.eval.fraction)
        if data.overlong == "refuse":
            self.catalog.refuse_overlong(self.processor.capacity)
        for section, sample_set in zip(data.sets or (), self.catalog.sample_sets, strict=False):
            kept = int((sample_set.lengths != HELD_OUT).sum())
            if round(section.weight * kept) == 0:
                raise UserError(
                    f"data.sets: {section.name} is never drawn: weight {section.weight:g} x "
                    f"{kept:,} samples not held out gives none per epoch. "
                    "Raise its weight, or leave it out"
                )
        self.order = PackOrder(
            self.catalog.sample_sets,
            config.run.seed,
            self.processor.capacity,
            data.shuffle_shards,
            data.pack_window,
        )
        try:
            self.order.epoch_plan(0)  # before workers are forked, which would each plan it again
        except UserError as error:
            raise UserError(f"{error}{self.catalog.why_unusable()}") from error
        self.reader = Reader(self.catalog, data.io_retry_seconds)

    @property
    def summary(self) -> str:
        """Describe the epochs for people."""
        plan = self.order.epoch_plan(0)
        capacity = self.processor.capacity
        fill = self.catalog.lengths[plan.samples].sum() / (len(plan) * capacity.tokens)
        overlong = "too long for a pack"
        if capacity.tiles is not None:
            overlong += f" or with more than {capacity.tiles} tiles"
        left_out = {
            overlong: plan.overlong,
            "unusable": plan.unusable,
            "held out": len(self.catalog.held_out),
        }
        without = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)

        packs = self.config.train.packs_per_step
        steps = self.max_steps
        epochs = steps * packs / len(plan)
        shown = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
        summary = (
            f"an epoch: {len(plan.samples):,} samples in {len(plan):,} packs of "
            f"{capacity.tokens:,} tokens, {fill:.1%} full{without}; "
            f"{steps:,} steps of {packs:,} packs are {shown} epochs"
        )
        if packs > len(plan):
            summary += (
                f"\na step takes {packs:,} packs, but the data fill only {len(plan):,}: each step "
                f"reads them {packs / len(plan):.1f} times. Lower train.packs_per_step, or add data"
            )
        return summary

    @property
    def max_steps(self) -> int:
        train = self.config.train
        return train.max_steps or self.order.steps(train.epochs, train.packs_per_step)

    @property
    def most_tiles(self) -> int:
        """Bound on the tiles of a pack, from the sample with most tiles a token."""
        capacity = self.processor.capacity
        lengths = self.order.lengths
        packed = (lengths > 0) & (lengths <= capacity.tokens)
        tiles_a_token = self.order.tiles[packed] / lengths[packed]
        bound = math.ceil(capacity.tokens * tiles_a_token.max(initial=0.0))
        return bound if capacity.tiles is None else min(bound, capacity.tiles)

    def __iter__(self) -> Iterator[PackedBatch]:
        workers = self.config.data.workers
        if workers == 0:
            yield from self._share(0, 1, itertools.repeat(None))
            return

        tiles = self.config.train.packs_per_microbatch * self.most_tiles
        transform = self.processor.transform
        image_size = 1 if transform is None else transform.image_size
        slots = _shared_memory(workers, tiles, image_size)
        batches = DataLoader(
            _Worker(self, slots),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=PREFETCH,
            # torch is imported already; spawn would import it again, seconds each
            multiprocessing_context="fork",
            worker_init_fn=functools.partial(_live_with_parent, os.getpid()),
        )
        for number, sent in enumerate(batches):
            if isinstance(sent, UserError):
                raise sent
            yield sent.received(slots[number % workers, number // workers % SLOTS])

    def _share(
        self,
        worker: int,
        workers: int,
        buffers: Iterable[Tensor | None],
    ) -> Iterator[PackedBatch]:
        """Yield every `workers`-th micro-batch of this replica, from the `worker`-th on.

        Its tiles lie in the next buffer.
        """
        buffers = iter(buffers)
        train = self.config.train
        share = train.packs_per_step // self.replicas
        numbers = itertools.count()
        for step in itertools.count(self.first_step):
            first = step * train.packs_per_step + self.replica * share
            for start in range(first, first + share, train.packs_per_microbatch):
                if next(numbers) % workers == worker:
                    packs = self.order.packs(start, train.packs_per_microbatch)
                    yield self.processor.batch([self._read(pack) for pack in packs], next(buffers))

    def _read(self, pack: PlannedPack) -> Pack:
        entries = []
        for number in pack.samples:
            entry = self.processor.read(self.reader, number)
            if isinstance(entry, QuarantinedSample):
                entry = Gap(entry, int(self.catalog.lengths[number]))
            entries.append(entry)
        return Pack(tuple(entries), pack.epoch)


def _shared_memory(workers: int, tiles: int, image_size: int) -> Tensor:
    """Return (workers, SLOTS, tiles, 3, S, S) uint8 that forked processes share; raises UserError.

    torch's queues make a file in /dev/shm of every tensor instead, of which a container has 64 MB
    by default.
    """
    shape = (workers, SLOTS, max(tiles, 1), 3, image_size, image_size)
    try:
        memory = mmap.mmap(-1, math.prod(shape))
    except (OSError, OverflowError) as error:
        raise UserError(
            f"data.workers: {workers} workers need {math.prod(shape) / 2**30:,.1f} GiB shared with "
            f"their rank, for {SLOTS} micro-batches each of up to {tiles:,} tiles, "
            f"but the system refuses it ({error}). Lower data.workers or data.max_tiles_per_pack"
        ) from None
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


@dataclass(frozen=True)
class _Sent:
    """A micro-batch on its way from a worker; its tiles lie in the worker's slot."""

    # of PackedBatch, the tokens' tensors as arrays, which a queue takes as they are
    fields: dict[str, Any]
    tiles: int

    @classmethod
    def of(cls, batch: PackedBatch) -> Self:
        fields = {**vars(batch), "tiles": None}
        for name, value in fields.items():
            if isinstance(value, Tensor):
                fields[name] = value.numpy()
        return cls(fields, 0 if batch.tiles is None else len(batch.tiles))

    def received(self, slot: Tensor) -> PackedBatch:
        fields = dict(self.fields)
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                fields[name] = torch.from_numpy(value)
        # Copied: the worker writes over the slot once the next micro-batch is asked for.
        if self.tiles:
            fields["tiles"] = slot[: self.tiles].clone()
        return PackedBatch(**fields)


@dataclass(eq=False)
class _Worker(IterableDataset):
    """A worker process's part of the stream.

    What the user can mend travels as a value, with its message unchanged.
    """

    batches: PackedBatches
    slots: Tensor

    def __iter__(self) -> Iterator[_Sent | UserError]:
        worker = get_worker_info()
        try:
            slots = itertools.cycle(self.slots[worker.id])
            yield from map(_Sent.of, self.batches._share(worker.id, worker.num_workers, slots))
        except UserError as error:
            yield error


def _live_with_parent(parent: int, worker: int) -> None:
    """Let a worker end when its rank does, and leave signals to the rank.

    Signals reach all processes.

    A worker that outlived a killed rank would hold the rank's sockets open: its peers would wait
    instead of failing.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_in_worker()
    die_with_parent(parent)
