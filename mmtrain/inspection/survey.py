"""Summarise shards by their indexes alone.

index files --survey-->
    Survey: counts; images and text tokens of a sample; size, tiles and positions of an image
sets of samples --order.PackOrder, as training plans-->
    Fill: packs, share of their tokens that is no padding
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from mmtrain.config.schema import DataSection
from mmtrain.data.samples.formats import LLAVA, SampleFormat
from mmtrain.data.shards.index import faults_of, other_reading, read_tables, sums_of
from mmtrain.data.shards.remote import Tar
from mmtrain.data.stream.catalog import Catalog
from mmtrain.data.stream.order import UNUSABLE, Capacity, PackOrder, SampleSet
from mmtrain.data.stream.stored import Measure, count_samples, positions_and_tiles
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.square import ONE_SQUARE


@dataclass(frozen=True, eq=False)
class Survey:
    """All samples of some shards."""

    shards: int
    bytes: int  # of the tars
    images: ndarray  # (samples,) uint32 images of each sample
    # (images, 2) int32 width and height in pixels, of those whose header tells
    image_sizes: ndarray
    fingerprint: str | None  # of the text lengths; None: there are none
    text_tokens: ndarray | None  # (usable samples,) int64 tokens without those of images
    # of samples that cannot be trained on; without fingerprint: whatever the tokenizer
    reasons: Counter[str]
    catalog: Catalog | None  # None without text lengths
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
    tars: Sequence[Tar],
    fingerprint: str | None = None,
    layout: ImageLayout = ONE_SQUARE,
    form: SampleFormat = LLAVA,
) -> Survey:
    """Read the index of every shard, as training does.

    Raises what `read_tables` and `count_samples` raise.

    `fingerprint` names tokenizer and template; None: those that all shards were indexed for, if
    there is exactly one.
    """
    parts = {"samples": [], "images": []}
    tar_bytes = 0
    reasons = Counter()
    texts = set()
    for tar in tars:
        header, tables = read_tables(tar)
        tar_bytes += header.tar_bytes
        for name, of_shards in parts.items():
            of_shards.append(tables[name].copy())  # else all of the index stays in memory
        if form.reading not in header.readings:
            raise other_reading(tar, header)
        faults = faults_of(tables, form.reading)
        reasons.update(reason for reason, _ in faults.values())
        texts.add((tuple(header.texts), tuple(header.readings)))
    if fingerprint is None and len(texts) == 1:
        fingerprints, readings = texts.pop()
        if len(fingerprints) == len(readings) == 1:
            fingerprint = fingerprints[0]

    tables = {name: np.concatenate(of_shards) for name, of_shards in parts.items()}
    of_samples = tables["samples"]["images"]
    of_images, _ = positions_and_tiles(tables, layout)
    sizes = tables["images"].view("<i4").reshape(-1, 2)
    is_known = of_images[:, 0] > 0
    text_tokens = None
    catalog = None
    if fingerprint is not None:
        catalog = Catalog([count_samples(tars, Measure(form, fingerprint, layout))])
        reasons = catalog.reasons
        lengths = catalog.sample_sets[0].lengths
        is_usable = lengths != UNUSABLE
        text_tokens = (lengths - sums_of(of_images[:, 0], of_samples))[is_usable]
        is_known &= np.repeat(is_usable, of_samples)
    return Survey(
        shards=len(tars),
        bytes=tar_bytes,
        images=of_samples,
        image_sizes=sizes[sizes.any(axis=1)],
        fingerprint=fingerprint,
        text_tokens=text_tokens,
        reasons=reasons,
        catalog=catalog,
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


def epoch_fill(one: SampleSet, capacity: Capacity) -> Fill:
    """Plan an epoch as a run with seed 0 and the default windows does.

    558,000 samples take a second.
    """
    fits = sums_of(capacity.fit(one.lengths, one.tiles), np.diff(one.firsts))
    if not fits.any():
        return Fill(capacity.tokens, 0, 0.0, int((one.lengths > 0).sum()))
    sets = [replace(one, fits=fits)]
    defaults = DataSection.model_construct()
    order = PackOrder(sets, 0, capacity, defaults.shuffle_shards, defaults.pack_window)
    epoch = order.epoch(0)
    packs = tokens = 0
    for number in range(epoch.groups):
        group = order.group(0, number)
        packs += len(group)
        tokens += int(one.lengths[group.samples].sum(dtype=np.int64))
    return Fill(capacity.tokens, packs, tokens / (packs * capacity.tokens), epoch.overlong)
