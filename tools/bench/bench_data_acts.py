"""Acts of a run on its data, before and between steps; each runs in a process of its own.

python bench_data_acts.py ACT FOLDER [ARGUMENT] --> JSON, the last line of the output

FOLDER/shards    the data set, by `write`
FOLDER/starts.json   steps to begin with, and the positions of their checkpoints, by `prepare`

A position's group is the true one. The number of its first pack is made up, since counting the
packs of 10^8 samples takes minutes: a checkpoint knows it, and it costs nothing.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_data_memory import private_bytes
from bench_data_shards import SAMPLES, SyntheticShards, run_config, write_real_tars
from numpy import ndarray

from mmtrain.base.printing import print_result
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.catalog import Catalog
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.order import BEGIN, Capacity, PackOrder, Position
from mmtrain.data.stream.pack_counts import order_key, pack_order
from mmtrain.data.stream.packs import Processor
from mmtrain.data.stream.stored import StoredData, stored_data
from mmtrain.facts.models import models_of
from mmtrain.launching.data import check_data

MANY_TILES = 2048  # of a pack: more than its tokens leave room for
GROUPS_PLANNED = 8
MB = 1e6


class Start(NamedTuple):
    """A step to begin with, and the group that it begins in."""

    step: int
    group: Position


def write(folder: Path, samples: str) -> dict[str, float]:
    """Write the shards of a number of samples."""
    started = time.perf_counter()
    SyntheticShards(folder / "shards").write(int(samples) // SAMPLES)
    return {"seconds": time.perf_counter() - started}


def write_real(folder: Path, samples: str) -> dict[str, float]:
    """Write whole tars of tiny pictures."""
    started = time.perf_counter()
    write_real_tars(folder / "tars", int(samples) // SAMPLES)
    return {"seconds": time.perf_counter() - started}


def count(folder: Path, by: str) -> dict[str, float]:
    """Count the samples by one worker, or as the launcher does, by one for each core."""
    config = run_config(folder / "shards")
    models_of(config).read()  # imports what it needs
    processor = time.process_time()
    started = time.perf_counter()
    if by == "one":
        stored_data(config)
    else:
        check_data(config, others_wait=False)
    seconds = time.perf_counter() - started
    processor = time.process_time() - processor
    return {"seconds": seconds, "processor_seconds": processor}


def _run(folder: Path) -> tuple[RunConfig, StoredData]:
    """Return configuration and counted data, as ranks get them."""
    config = run_config(folder / "shards")
    data = stored_data(config)
    gc.collect()  # of what no rank does, not while others are timed
    return config, data


def prepare(folder: Path) -> dict[str, int]:
    """Choose the steps to measure, and write what they read into the tars."""
    config, data = _run(folder)
    catalog = Catalog(data.train)
    order = pack_order(config, catalog)
    packs_per_step = config.train.packs_per_step
    groups = order.epoch(0).groups
    middle = groups // 2
    steps_of_epochs = 3 * groups * len(order.group(0, 0)) // packs_per_step
    starts = {
        "fresh": Start(0, BEGIN),
        "resumed": Start(steps_of_epochs, Position(3, middle, steps_of_epochs * packs_per_step)),
        "border of groups": _before_border(order, 0, middle, packs_per_step),
        "border of epochs": _before_border(order, 0, groups - 1, packs_per_step),
    }
    (folder / "starts.json").write_text(json.dumps(starts))

    read: set[int] = set()
    for start in starts.values():
        of_start = pack_order(config, catalog, start=start.group)
        packs = of_start.packs(start.step * packs_per_step, packs_per_step)
        read.update(itertools.chain.from_iterable(pack.samples for pack in packs))
    SyntheticShards(folder / "shards").write_contents(sorted(read))
    return {"samples_with_contents": len(read), "groups": groups}


def _before_border(order: PackOrder, epoch: int, group: int, packs_per_step: int) -> Start:
    """Return a step in whose middle a group ends."""
    packs = len(order.group(epoch, group))
    step = -(-packs // packs_per_step)
    return Start(step, Position(epoch, group, step * packs_per_step + packs_per_step // 2 - packs))


def open_data(folder: Path) -> dict[str, float]:
    """Open the data as a rank does: the catalogue alone, then with tokenizer and first epoch."""
    config, data = _run(folder)
    Processor(config)  # imports what it needs
    before = private_bytes()
    started = time.perf_counter()
    catalog = Catalog(data.train)
    catalog_seconds = time.perf_counter() - started
    catalog_bytes = private_bytes() - before
    started = time.perf_counter()
    batches = PackedBatches(config, 0, 1, data=data)
    seconds = time.perf_counter() - started
    found = {
        "catalog_seconds": catalog_seconds,
        "catalog_megabytes": catalog_bytes / MB,
        "seconds": seconds,
        "megabytes": (private_bytes() - before) / MB,
    }
    del catalog, batches
    return found


def batch(folder: Path, name: str) -> dict[str, float]:
    """Make the micro-batches of a step in this process."""
    config, data = _run(folder)
    start = Start(*json.loads((folder / "starts.json").read_text())[name])
    Processor(config)  # imports what it needs
    position = None
    if start.step:
        position = {"order": order_key(config, Catalog(data.train)), "group": start.group}
    before = private_bytes()
    seconds = []
    started = time.perf_counter()
    batches = iter(PackedBatches(config, 0, 1, start.step, data, position))
    for _ in range(config.train.packs_per_step):
        made = next(batches)
        seconds.append(time.perf_counter() - started)
        assert not made.faults, f"{name}: {made.faults[0]}"
        started = time.perf_counter()
    first, *later = seconds
    usual = statistics.median(later)
    return {
        "first_seconds": first,
        "median_seconds": usual,
        "longest_wait_seconds": max(later) - usual,
        "megabytes": (private_bytes() - before) / MB,
    }


def plan(folder: Path) -> dict[str, float]:
    """Plan groups from all over an epoch, of samples of one tile, and of many."""
    config, data = _run(folder)
    catalog = Catalog(data.train)
    order = pack_order(config, catalog)
    started = time.perf_counter()
    order.epoch(0)
    epoch_seconds = time.perf_counter() - started

    (samples,) = catalog.sample_sets
    draw = np.random.RandomState(0)
    made: ndarray = np.resize(draw.randint(200, 1400, 1_000_003, np.int32), len(samples.lengths))
    tiled = replace(order, capacity=Capacity(order.capacity.tokens, MANY_TILES))
    tiled.sets = [replace(samples, tiles=made)]
    return {
        "epoch_seconds": epoch_seconds,
        "samples_per_second": _planned_per_second(order),
        "samples_per_second_with_tiles": _planned_per_second(tiled),
    }


def _planned_per_second(order: PackOrder) -> float:
    """Return the samples planned in a second of one core."""
    groups = order.epoch(0).groups
    chosen = np.linspace(0, groups - 1, min(groups, GROUPS_PLANNED)).astype(int)
    samples = 0
    started = time.process_time()
    for group in chosen.tolist():
        samples += len(order.group(0, group).samples)
    return samples / (time.process_time() - started)


ACTS: dict[str, Callable[..., dict[str, Any]]] = {
    "write": write,
    "write_real": write_real,
    "count": count,
    "prepare": prepare,
    "open": open_data,
    "batch": batch,
    "plan": plan,
}


if __name__ == "__main__":
    act, folder, *arguments = sys.argv[1:]
    print_result(json.dumps(ACTS[act](Path(folder), *arguments)))
