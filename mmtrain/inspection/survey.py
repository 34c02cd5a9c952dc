"""Summarise shards by their indexes alone.

index files --survey-->
    Survey: counts; images and text tokens of a sample; size, tiles and positions of an image
sets of samples --order.PackOrder, as training plans-->
    Fill: packs, share of their tokens that is no padding
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy import ndarray

from mmtrain.base.errors import UserError
from mmtrain.config.limits import MAX_IMAGE_PIXELS
from mmtrain.config.schema import DataSection
from mmtrain.data.samples.formats import LLAVA, SampleFormat
from mmtrain.data.shards.index import MAKE, read_index
from mmtrain.data.stream.catalog import Catalog, DataSet, positions_and_tiles
from mmtrain.data.stream.order import UNUSABLE, Capacity, PackOrder, SampleSet
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.square import ONE_SQUARE


@dataclass(frozen=True, eq=False)
class Survey:
    """All samples of some shards."""

    shards: int
    bytes: int  # of the tars
    images: ndarray  # (samples,) int32 images of each sample
    # (images, 2) int32 width and height in pixels, of those whose header tells
    image_sizes: ndarray
    fingerprint: str | None  # of the text lengths; None: there are none
    text_tokens: ndarray | None  # (usable samples,) int64 tokens without those of images
    # of samples that cannot be trained on; without fingerprint: whatever the tokenizer
    reasons: Counter[str]
    sample_set: SampleSet | None  # what planning needs of them; None without text lengths
    layout: ImageLayout
    # (N, 2) int64 positions and tiles of each image that can be trained on, where the layout tells
    taken: ndarray

    @property
    def longer_sides(self) -> ndarray:
        """(images,) pixels."""
        return self.image_sizes.max(axis=1, initial=0)

    @property
    def expected(self) -> dict[str, float]:
        """Keys of the configuration that describe a typical sample to the planner."""
        keys = {}
        if self.text_tokens is not None and len(self.text_tokens):
            keys["data.expected_text_tokens"] = max(1, round(float(self.text_tokens.mean())))
        if self.layout.is_sized and len(self.taken):
            positions, tiles = self.taken.mean(axis=0).tolist()
            keys |= {
                "data.expected_image_tiles": round(tiles, 3),
                "data.expected_image_positions": round(positions, 1),
            }
            if self.layout.attends_across:
                counts = self.taken[:, 1].astype(float)
                attended = float((counts**2).sum() / counts.sum())
                keys["data.expected_attended_tiles"] = round(attended, 3)
        return keys


def survey(
    tars: Sequence[Path],
    fingerprint: str | None = None,
    layout: ImageLayout = ONE_SQUARE,
    form: SampleFormat = LLAVA,
) -> Survey:
    """Read the index of every shard, as training does.

    Raises what `read_index` and `Catalog` raise.

    `fingerprint` names tokenizer and template; None: those that all shards were indexed for, if
    there is exactly one.
    """
    images = []
    sizes = []
    tar_bytes = 0
    reasons = Counter()
    taken = []
    texts = set()
    for tar in tars:
        index = read_index(tar)
        tar_bytes += index.tar_bytes
        images.append(index.image_counts)
        all_sizes = index.flat_image_sizes
        sizes.append(all_sizes[all_sizes.any(axis=1)])
        taken.append(positions_and_tiles(index, layout)[0])
        faults = index.faults.get(form.reading)
        if faults is None:
            raise UserError(
                f"{tar}: its index has samples of format {', '.join(index.faults)} only. "
                f"Index it: {MAKE} {tar}"
            )
        reasons.update(reason for reason, _ in faults.values())
        texts.add((tuple(index.texts), tuple(index.faults)))
    if fingerprint is None and len(texts) == 1:
        fingerprints, readings = texts.pop()
        if len(fingerprints) == len(readings) == 1:
            fingerprint = fingerprints[0]

    of_samples = np.concatenate(images).astype(np.int32)
    of_images = np.concatenate(taken)
    is_known = of_images[:, 0] > 0
    text_tokens = None
    sample_set = None
    if fingerprint is not None:
        data_set = DataSet(tuple(tars), form=form)
        catalog = Catalog([data_set], [fingerprint], layout, MAX_IMAGE_PIXELS)
        reasons = Counter(fault.reason for fault in catalog.faults.values())
        sample_set = catalog.sample_sets[0]
        is_usable = catalog.lengths != UNUSABLE
        places = np.repeat(np.arange(len(of_samples)), of_samples)
        of_images_alone = np.bincount(places, of_images[:, 0], len(of_samples))
        text_tokens = (catalog.lengths - of_images_alone.astype(np.int64))[is_usable]
        is_known &= is_usable[places]
    return Survey(
        shards=len(tars),
        bytes=tar_bytes,
        images=of_samples,
        image_sizes=np.concatenate(sizes).astype(np.int32),
        fingerprint=fingerprint,
        text_tokens=text_tokens,
        reasons=reasons,
        sample_set=sample_set,
        layout=layout,
        taken=of_images[is_known],
    )


def quantile(values: ndarray, share: float) -> int:
    """Return the smallest value that at least this share of the values does not exceed."""
    return int(np.quantile(values, share, method="inverted_cdf"))


@dataclass(frozen=True)
class Fill:
    """The first epoch with packs of one length."""

    pack_length: int  # tokens
    packs: int
    fill: float  # share of the packs' tokens that hold a sample's, 0 without packs
    overlong: int  # samples that do not fit into a pack


def epoch_fill(sets: Sequence[SampleSet], capacity: Capacity) -> Fill:
    """Plan an epoch as a run with seed 0 and the default windows does.

    558,000 samples take a second.
    """
    defaults = DataSection.model_construct()
    order = PackOrder(sets, 0, capacity, defaults.shuffle_shards, defaults.pack_window)
    plan = order.plan(0)
    tokens = int(order.lengths[plan.samples].sum(dtype=np.int64))
    room = max(len(plan), 1) * capacity.tokens
    return Fill(capacity.tokens, len(plan), tokens / room, plan.overlong)
