"""What planning an epoch costs: seconds, memory, and how full the packs are against the best order known.

lengths (samples,) --plan_epoch--> seconds, MB, fill
                   --pack_best_fit over the whole epoch at once--> fill to compare with
index files --Catalog--> lengths --plan_epoch--> seconds, MB of a process that does nothing else

Nothing here imports torch. Memory is the kernel's own peak of a fresh process (VmHWM), reset before it is measured.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from bench_timing import Spread, spread

from mmtrain.config.limits import MAX_IMAGE_PIXELS
from mmtrain.config.schema import DataSection
from mmtrain.data.prepare.sharding import shard_name, tar_bytes
from mmtrain.data.samples.formats import LLAVA
from mmtrain.data.shards.index import Member, ShardIndex, TextLengths, write_index
from mmtrain.data.stream.catalog import Catalog, DataSet
from mmtrain.data.stream.order import Capacity, SampleSet, pack_best_fit, plan_epoch
from mmtrain.pretrained.layouts import ImageLayout

T = TypeVar("T")

KINDS = ("captions", "mixed")
TOKENS_PER_IMAGE = 576  # of CLIP ViT-L/14 at 336 pixels
FINGERPRINT = "0123456789abcdef"
BLOCK = 512  # bytes, of a tar
SHUFFLE_SHARDS = DataSection.model_fields["shuffle_shards"].default
PACK_WINDOW = DataSection.model_fields["pack_window"].default


@dataclass(frozen=True)
class Planned:
    """Planning an epoch of lengths that are in memory."""

    kind: str
    pack_length: int  # tokens
    packs: int
    fill: float  # share of the packs' tokens that hold a sample's
    whole_epoch_fill: float  # of best-fit decreasing over the whole epoch
    seconds: Spread
    peak_bytes: int  # of the whole process, interpreter and libraries included
    extra_peak_bytes: int  # of it, what came after the imports, the lengths included

    @property
    def fill_ratio(self) -> float:
        """1: as full as best-fit decreasing over the whole epoch."""
        return self.fill / self.whole_epoch_fill


@dataclass(frozen=True)
class Opened:
    """Reading all indexes and planning an epoch, each time in a process of its own."""

    shards: int
    samples: int
    index_bytes: int  # of all index files
    catalog_seconds: Spread
    plan_seconds: Spread
    both_seconds: Spread
    peak_bytes: Spread  # of the whole process, interpreter and libraries included
    extra_peak_bytes: Spread  # of it, what came after the imports


def sample_set(kind: str, samples: int, shards: int) -> SampleSet:
    """Lengths as LLaVA's data sets have them, from a fixed seed.

    captions: one image and a text of lognormal length, median 20. mixed: 60% of these, 30% one image and 100 to 900
    tokens, 10% text alone, lognormal with median 300, up to 2500.
    """
    draw = np.random.RandomState(1)
    captions = TOKENS_PER_IMAGE + np.exp(draw.normal(np.log(20), 0.5, samples)).round().clip(1)
    answers = TOKENS_PER_IMAGE + draw.randint(100, 901, samples)
    texts = np.exp(draw.normal(np.log(300), 1, samples)).clip(5, 2500)
    share = draw.random_sample(samples)
    images = np.ones(samples, np.int32)
    lengths = captions
    if kind == "mixed":
        lengths = np.where(share < 0.6, captions, np.where(share < 0.9, answers, texts))
        images[share >= 0.9] = 0
    sizes = np.full(shards, samples // shards)
    sizes[: samples % shards] += 1
    return SampleSet(1.0, sizes, lengths.astype(np.int32), images)


def plan_arrays(kind: str, pack_length: int, samples: int, shards: int, repetitions: int) -> Planned:
    """Plan in a fresh process."""
    return _in_fresh_process(_plan_arrays, kind, pack_length, samples, shards, repetitions)


def _plan_arrays(kind: str, pack_length: int, samples: int, shards: int, repetitions: int) -> Planned:
    before = _status_bytes("VmRSS")
    one, capacity = sample_set(kind, samples, shards), Capacity(pack_length)
    seconds, peaks = [], []
    for _ in range(repetitions):
        _reset_peak()
        started = time.perf_counter()
        plan = plan_epoch([one], 0, 0, capacity, SHUFFLE_SHARDS, PACK_WINDOW)
        seconds.append(time.perf_counter() - started)
        peaks.append(_status_bytes("VmHWM"))
    whole = len(pack_best_fit(one.lengths[one.lengths <= pack_length], capacity))
    tokens = int(one.lengths[plan.samples].sum(dtype=np.int64))
    return Planned(
        kind=kind,
        pack_length=pack_length,
        packs=len(plan),
        fill=tokens / (len(plan) * pack_length),
        whole_epoch_fill=tokens / (whole * pack_length),
        seconds=spread(seconds),
        peak_bytes=max(peaks),
        extra_peak_bytes=max(peaks) - before,
    )


def write_indexes(folder: Path, samples: int, shards: int) -> None:
    """Index files as the sharding tool writes them, beside tars that take no space: their bytes are all holes."""
    one, draw = sample_set("captions", samples, shards), np.random.RandomState(2)
    first = 0
    for number, size in enumerate(one.shard_sizes.tolist()):
        bytes_of = np.stack([draw.randint(250, 400, size), draw.randint(20_000, 90_000, size)], 1)
        taken = BLOCK + -(-bytes_of // BLOCK) * BLOCK
        offsets = (np.cumsum(taken) - taken.ravel() + BLOCK).reshape(-1, 2)
        checksums = draw.randint(0, 1 << 32, (size, 2), np.uint32)
        columns = (offsets.tolist(), bytes_of.tolist(), checksums.tolist())
        index = ShardIndex(
            tar_bytes=tar_bytes(bytes_of.ravel().tolist()) + 2 * BLOCK,
            keys=[f"{place:09d}" for place in range(first, first + size)],
            members=[
                tuple(map(Member, ("json", "jpg"), *sample))  # offsets, sizes, checksums of the two
                for sample in zip(*columns, strict=True)
            ],
            image_sizes=[((640, 480),)] * size,
            faults={LLAVA.reading: {}},
            texts={FINGERPRINT: TextLengths((one.lengths[first : first + size] - TOKENS_PER_IMAGE).tolist())},
        )
        tar = folder / shard_name(number)
        with tar.open("xb") as stream:
            stream.truncate(index.tar_bytes)
        write_index(tar, index)
        first += size


def plan_indexes(folder: Path, pack_length: int, repetitions: int) -> Opened:
    """Read the indexes of `write_indexes` and plan, `repetitions` times, each in a fresh process."""
    tars = sorted(folder.glob("*.tar"))
    runs = [_in_fresh_process(_plan_indexes, tars, pack_length) for _ in range(repetitions)]
    samples, catalogs, plans, peaks, extras = zip(*runs, strict=True)
    return Opened(
        shards=len(tars),
        samples=samples[0],
        index_bytes=sum(file.stat().st_size for file in folder.glob("*.index")),
        catalog_seconds=spread(catalogs),
        plan_seconds=spread(plans),
        both_seconds=spread([catalog + plan for catalog, plan in zip(catalogs, plans, strict=True)]),
        peak_bytes=spread(peaks),
        extra_peak_bytes=spread(extras),
    )


def _plan_indexes(tars: list[Path], pack_length: int) -> tuple[int, float, float, int, int]:
    """Samples, seconds of the catalog and of the plan, the process's peak, and what of it came after its start."""
    before = _reset_peak()
    started = time.perf_counter()
    catalog = Catalog([DataSet(tuple(tars))], [FINGERPRINT], ImageLayout("square", TOKENS_PER_IMAGE), MAX_IMAGE_PIXELS)
    opened = time.perf_counter()
    plan = plan_epoch(catalog.sample_sets, 0, 0, Capacity(pack_length), SHUFFLE_SHARDS, PACK_WINDOW)
    planned = time.perf_counter()
    assert plan.drawn == len(catalog)
    peak = _status_bytes("VmHWM")
    return len(catalog), opened - started, planned - opened, peak, peak - before


def _in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _reset_peak() -> int:
    """Let the kernel forget this process's peak of resident memory; returns what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel tells no {name}")
