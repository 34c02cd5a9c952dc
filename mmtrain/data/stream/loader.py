"""From shards to one replica's micro-batches. The life of a sample:

1. index    its place, checksums and length are known before the run starts (`index`, `catalog`)
2. order    `order`: (seed, epoch) -> one global list of packs, computed group by group, equal for
   any number of replicas and workers
3. share    step s takes packs [s*G, (s+1)*G); replica r the r-th contiguous part of them
4. read     `Reader`: by offset, checksum compared; a damaged sample leaves a gap in its pack
5. text     the template: turns -> input_ids and labels; a length that is not the planned one ends
   the run
6. images   `make_batch`: decoded, resized, cut into tiles
7. ahead    with workers, steps 4-6 run in other processes, each making every n-th micro-batch
8. device   `to_device`: copied as they are; tiles become float32 where the encoder runs

The whole state is the number of the next step, and the position of its group of packs, which would
else be counted again: nothing was drawn that they do not tell.
"""

import functools
import itertools
import math
import mmap
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import QuarantinedSample
from mmtrain.data.shards.shard_list import cache_bound
from mmtrain.data.stream.catalog import Catalog, Reader
from mmtrain.data.stream.copies import Copies, FetchTask
from mmtrain.data.stream.fetching import Fetching
from mmtrain.data.stream.order import BEGIN, PlannedPack, Position
from mmtrain.data.stream.pack_counts import order_key, pack_order, with_packs
from mmtrain.data.stream.packs import Gap, Pack, PackedBatch, Processor
from mmtrain.data.stream.stored import (
    StoredData,
    data_sets,
    evaluated_set,
    store_set,
    stored_data,
)
from mmtrain.runtime.child import die_with_parent
from mmtrain.runtime.stop import ignore_in_worker

PREFETCH = 2  # micro-batches that each worker makes ahead
# micro-batches of a worker that keep their tiles: those ahead, and the one being copied out
SLOTS = PREFETCH + 1


@dataclass(eq=False)
class PackedBatches:
    """One replica's micro-batches from `first_step` on, without end; a step may span two epochs.

    Every iteration starts again at `first_step`. `data` is what the launcher has counted, None to
    count it here; `position` is the `position` of the checkpoint that the first step follows.
    """

    config: RunConfig
    replica: int
    replicas: int
    first_step: int = 0
    data: StoredData | None = None
    position: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Open tokenizer and data.

        Raises UserError for what is missing, and for data without a single pack.
        """
        assert 0 <= self.replica < self.replicas, f"replica {self.replica} of {self.replicas}"
        config = self.config
        if self.data is None:
            self.data = with_packs(config, stored_data(config))
        self.processor = Processor(config)
        self.catalog = Catalog(self.data.train)
        if config.data.overlong == "refuse":
            self.catalog.refuse_overlong()
        for section, one in zip(config.data.sets or (), self.catalog.sample_sets, strict=False):
            kept = int(one.kept.sum())
            if round(section.weight * kept) == 0:
                raise UserError(
                    f"data.sets: {section.name} is never drawn: weight {section.weight:g} x "
                    f"{kept:,} samples not held out gives none per epoch. "
                    "Raise its weight, or leave it out"
                )
        self._order_key = order_key(config, self.catalog)
        start = BEGIN
        self.keeps_order = self.position is not None and self.position["order"] == self._order_key
        if self.keeps_order:
            start = Position(*self.position["group"])
        self.order = pack_order(config, self.catalog, self.data.pack_counts, start)
        try:
            self.order.epoch(0)
        except UserError as error:
            raise UserError(f"{error}{self.catalog.why_unusable()}") from error
        self.reader = Reader(self.catalog, config.data.io_retry_seconds)

    def fetch(self, folder: Path, replicas: Sequence[int], steps: int) -> Fetching | None:
        """Read remote shards, if there are any, from copies in `folder`, which is new.

        `replicas` are those that read on this machine, this one among them. The first one starts
        and returns the process that makes the copies for all of them, up to step `steps`.
        """
        config = self.config
        sets = list(self.data.train)
        if self.data.held_out is not None:
            sets.append(self.data.held_out)
        if not Catalog(sets).has_remote_shards:
            return None

        readers = max(1, config.data.workers)  # of each replica
        self.reader.copies = Copies(folder, replicas.index(self.replica) * readers)
        if self.replica != replicas[0]:
            return None

        catalog = self.catalog
        numbers = np.empty(0, int)
        if config.eval.is_on:
            catalog, numbers = evaluated_samples(config, self)
            numbers = np.asarray(numbers[: config.eval.max_samples])
        task = FetchTask(
            config,
            self.data,
            (catalog.sets, numbers),
            replicas,
            config.train.packs_per_step // self.replicas,
            self.order.start,
            self.first_step,
            steps,
            cache_bound(config.data.cache_gib),
        )
        return Fetching(folder, task)

    def position_at(self, step: int) -> dict[str, Any]:
        """Return the order, and the position of the group that step `step` begins in."""
        group = self.order.position(step * self.config.train.packs_per_step)
        return {"order": self._order_key, "group": group}

    @property
    def summary(self) -> str:
        """Describe the epochs for people, by the first one.

        Its packs are an estimate by its first group, unless all are counted.
        """
        epoch = self.order.epoch(0)
        group = self.order.group(0, 0)
        capacity = self.order.capacity
        tokens = sum(self.catalog.length(number) for number in group.samples.tolist())
        fill = tokens / (len(group) * capacity.tokens)
        packs = round(epoch.planned / len(group.samples) * len(group))
        about = ""
        if self.order.pack_counts:
            packs = self.order.first_pack(1)
        elif epoch.groups > 1:
            about = "about "
        overlong = "too long for a pack"
        if capacity.tiles is not None:
            overlong += f" or with more than {capacity.tiles} tiles"
        left_out = {
            overlong: epoch.overlong,
            "unusable": epoch.unusable,
            "held out": self.catalog.held_out_samples,
        }
        without = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)

        a_step = self.config.train.packs_per_step
        steps = self.max_steps
        epochs = steps * a_step / packs
        shown = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
        summary = (
            f"an epoch: {epoch.planned:,} samples in {about}{packs:,} packs of "
            f"{capacity.tokens:,} tokens, {fill:.1%} full{without}; "
            f"{steps:,} steps of {a_step:,} packs are {shown} epochs"
        )
        if a_step > packs:
            summary += (
                f"\na step takes {a_step:,} packs, but the data fill only {packs:,}: each step "
                f"reads them {a_step / packs:.1f} times. Lower train.packs_per_step, or add data"
            )
        return summary

    @property
    def max_steps(self) -> int:
        train = self.config.train
        return train.max_steps or self.order.steps(train.epochs, train.packs_per_step)

    @property
    def most_tiles(self) -> int:
        """Bound on the tiles of a pack, from the sample with most tiles a token."""
        capacity = self.order.capacity
        bound = math.ceil(capacity.tokens * self.catalog.tiles_per_token)
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
                    if self.reader.copies is not None:
                        self.reader.copies.note(worker, start, self.reader.waited)
                    packs = self.order.packs(start, train.packs_per_microbatch)
                    yield self.processor.batch([self._read(pack) for pack in packs], next(buffers))

    def _read(self, pack: PlannedPack) -> Pack:
        entries = []
        for number in pack.samples:
            entry = self.processor.read(self.reader, number)
            if isinstance(entry, QuarantinedSample):
                entry = Gap(entry, self.catalog.length(number))
            entries.append(entry)
        return Pack(tuple(entries), pack.epoch)


def evaluated_samples(
    config: RunConfig, packed: PackedBatches | None = None
) -> tuple[Catalog, Sequence[int]]:
    """Return a catalog and the numbers of its held-out samples, or of all if the run holds out
    none.

    `packed` are the run's own data, counted here if None.
    """
    if packed is None:
        # Samples of eval.shards do not need the run's own data, which may be elsewhere now.
        own = evaluated_set(config)
        sets = [own]
        if own is None:
            sets = data_sets(config.data)
        catalog = Catalog([store_set(config, one) for one in sets])
    elif packed.data.held_out is None:
        catalog = packed.catalog
    else:
        catalog = Catalog([packed.data.held_out])
    if config.eval.fraction is None:
        return catalog, range(len(catalog))
    return catalog, catalog.held_out


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
