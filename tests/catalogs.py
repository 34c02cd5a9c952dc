"""Data sets that are counted and mapped as a run does it."""

import hashlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmtrain.data.samples.formats import LLAVA, SampleFormat
from mmtrain.data.stream.catalog import Catalog
from mmtrain.data.stream.order import ANY_SIZE, Capacity, SampleSet
from mmtrain.data.stream.stored import Measure, StoredSet, count_samples
from mmtrain.layouts.layout import ImageLayout


def stored_set(
    tars: Sequence[Path],
    layout: ImageLayout,
    text: str = "feed",
    *,
    max_image_pixels: int = 10**6,
    capacity: Capacity = ANY_SIZE,
    held_out: float | None = None,
    form: SampleFormat = LLAVA,
    weight: float = 1.0,
    name: str = "",
) -> StoredSet:
    measure = Measure(form, text, layout, max_image_pixels, capacity, held_out)
    return count_samples(tars, measure)._replace(weight=weight, name=name)


def opened(tars: Sequence[Path], layout: ImageLayout, text: str = "feed", **more) -> Catalog:
    """The catalog of one data set whose texts have lengths under the fingerprint `text`."""
    return Catalog([stored_set(tars, layout, text, **more)])


def lengths(catalog: Catalog) -> list[int]:
    return [catalog.length(number) for number in range(len(catalog))]


def reasons(catalog: Catalog) -> dict[int, str]:
    """The reason of each sample that can never be trained on, by number."""
    faults = {number: catalog.fault(number) for number in range(len(catalog))}
    return {number: fault.reason for number, fault in faults.items() if fault is not None}


def sample_set(lengths, sizes, weight=1.0, tiles=None, capacity=ANY_SIZE) -> SampleSet:
    """Return a data set for planning, its samples in shards of these sizes, counted one by one."""
    lengths = np.asarray(lengths, np.int32)
    tiles = np.zeros(len(lengths), np.int32) if tiles is None else np.asarray(tiles, np.int32)
    firsts = np.cumsum([0, *sizes])
    counts = []
    for begin, end in itertools.pairwise(firsts):
        own = list(zip(lengths[begin:end].tolist(), tiles[begin:end].tolist(), strict=True))
        most = sys.maxsize if capacity.tiles is None else capacity.tiles
        counts.append(
            (
                sum(length >= 0 for length, _ in own),
                sum(0 < length <= capacity.tokens and held <= most for length, held in own),
                sum(length == 0 for length, _ in own),
            )
        )
    kept, fits, unusable = np.array(counts, np.int64).reshape(-1, 3).T
    return SampleSet(weight, lengths, tiles, firsts, kept, fits, unusable)


def is_held_out(key: str, fraction: float) -> bool:
    """Tell whether a key is in the share kept for evaluation, which never moves."""
    digest = hashlib.blake2b(key.encode(), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
