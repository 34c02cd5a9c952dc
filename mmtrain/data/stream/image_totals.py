"""Positions and tiles that the images of a shard take, from the sizes in its index."""

from __future__ import annotations

import numpy as np

from mmtrain.data.shards.index import Faults, IndexColumns
from mmtrain.models.layouts.layout import ImageLayout, UnfitImage


def image_totals(index: IndexColumns, layout: ImageLayout) -> tuple[np.ndarray, np.ndarray, Faults]:
    """Positions and tiles, (samples,) int64 and int32, that the images of each sample take; those that cannot be."""
    counts = np.diff(index.first_image)
    if not layout.takes_images:
        return np.zeros_like(counts), np.zeros(len(counts), np.int32), {}
    if not layout.is_sized:
        return counts * layout.positions_per_tile, counts.astype(np.int32), {}
    taken, faults = positions_and_tiles(index, layout)
    before = np.concatenate([[[0, 0]], np.cumsum(taken, axis=0)])
    sums = before[index.first_image[1:]] - before[index.first_image[:-1]]
    return sums[:, 0], np.minimum(sums[:, 1], np.iinfo(np.int32).max).astype(np.int32), faults


def positions_and_tiles(index: IndexColumns, layout: ImageLayout) -> tuple[np.ndarray, Faults]:
    """(images, 2) int64 that each image takes, 0 where its sample cannot be trained on; these samples.

    Images of one size are asked about once.
    """
    counts = np.diff(index.first_image)
    if not layout.takes_images:
        return np.zeros((counts.sum(), 2), np.int64), {}
    places = np.repeat(np.arange(len(counts)), counts)
    alone = counts[places] == 1
    kinds, kind_of_image = np.unique(np.column_stack([index.image_sizes, alone]), axis=0, return_inverse=True)
    kind_of_image = kind_of_image.reshape(-1)
    taken = np.zeros((len(kinds), 2), np.int64)
    unfit: dict[int, tuple[str, str]] = {}
    for kind, (width, height, is_alone) in enumerate(kinds.tolist()):
        try:
            if (width and height) or not layout.is_sized:
                tiling = layout.tiling(width, height, 1 if is_alone else 2)
                taken[kind] = tiling.positions, tiling.tiles
            else:
                unfit[kind] = "undecodable_image", "its header does not tell its size"
        except UnfitImage as error:
            unfit[kind] = "unfit_shape", str(error)
    wrong = np.flatnonzero(np.isin(kind_of_image, list(unfit))).tolist() if unfit else []
    return taken[kind_of_image], {int(places[image]): unfit[int(kind_of_image[image])] for image in wrong}
