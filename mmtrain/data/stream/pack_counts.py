"""Count the packs of each group of a run's epochs, on all cores, once.

order of a run --groups packed-->
    <key>-<epochs>.npy in the view of its first data set: (groups,) int32
"""

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from typing import TextIO

import numpy as np

from mmtrain.base.durable import whole_file
from mmtrain.config.schema import RunConfig
from mmtrain.data.shards.pool import Advance, results_of
from mmtrain.data.stream.catalog import Catalog
from mmtrain.data.stream.order import BEGIN, Capacity, PackOrder, Position
from mmtrain.data.stream.stored import UNREADABLE, StoredData, writing


def pack_order(
    config: RunConfig,
    catalog: Catalog,
    pack_counts: Sequence[int] = (),
    start: Position = BEGIN,
) -> PackOrder:
    """Return a run's order."""
    return PackOrder(catalog.sample_sets, *_settings(config, catalog), pack_counts, start)


def _settings(config: RunConfig, catalog: Catalog) -> tuple[int, Capacity, int, int]:
    data = config.data
    return config.run.seed, catalog.capacity, data.shuffle_shards, data.pack_window


def order_key(config: RunConfig, catalog: Catalog) -> str:
    """Return an identity of a run's order."""
    weights = [one.weight for one in catalog.sample_sets]
    text = f"{catalog.fingerprint} {weights} {_settings(config, catalog)}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def with_packs(
    config: RunConfig,
    data: StoredData,
    workers: int = 1,
    stream: TextIO | None = None,
) -> StoredData:
    """Return the data with the packs of each group of train.epochs.

    Raises UserError. Cost: 1 us of one core for each sample of each epoch, where the cache does not
    hold them.
    """
    epochs = config.train.epochs
    if epochs is None:
        return data
    catalog = Catalog(data.train)
    path = data.train[0].view / f"{order_key(config, catalog)}-{epochs}.npy"
    with contextlib.suppress(*UNREADABLE):
        return data._replace(pack_counts=np.lib.format.open_memmap(path, "r").tolist())
    order = pack_order(config, catalog)
    groups = []
    samples = 0
    for epoch in range(epochs):
        made = order.epoch(epoch)
        samples += made.planned
        groups += [(epoch, group) for group in range(made.groups)]
    count = functools.partial(_count, order)
    packs = results_of(count, groups, workers, "samples packed", samples, stream)
    with writing(path), whole_file(path) as unfinished, unfinished.open("wb") as file:
        np.save(file, np.array(packs, np.int32))
    return data._replace(pack_counts=packs)


def _count(order: PackOrder, task: tuple[int, int], advance: Advance) -> int:
    group = order.group(*task)
    advance(len(group.samples))
    return len(group)
