"""From samples to a micro-batch's tensors.

sample --template--> document: input_ids and labels; its length must be the planned one
packs: lists of documents, and of gaps where samples are quarantined
    --make_batch--> PackedBatch: (B, L) tensors and tiles of images (N, 3, S, S)
    --to_device--> the tensors where the model is
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmtrain.base.devices import copied
from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, QuarantinedSample
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.data.shards.index import MEND
from mmtrain.data.stream.catalog import Reader
from mmtrain.data.stream.images import ImageTransform, transform_of
from mmtrain.facts.models import models_of
from mmtrain.layouts.layout import Tiling
from mmtrain.layouts.mrope import grid_positions

# the tiles (n, 3, S, S) of an image file, and whether it is a control; raises BadSample
Decode = Callable[[bytes, Tiling, bool], Tensor]


@dataclass(frozen=True)
class Gap:
    """A quarantined sample's place in its pack: the order of everything else stays as planned."""

    fault: QuarantinedSample
    length: int  # tokens, as planned


@dataclass(frozen=True)
class Pack:
    """Whole documents and gaps that share a token sequence; `epoch` counts from 0."""

    entries: tuple[Document | Gap, ...]
    epoch: int = 0


@dataclass
class PackedBatch:
    """One micro-batch: B packs of L tokens.

    labels are already shifted: labels[b, t] is the token that position t must predict, IGNORE where
    there is none; the last token of a document never has a label. position_ids restart at 0 in each
    document; a gap is a document without labels, and so is the padding at the row's end. tiles and
    tilings are in row-major order of their positions. grid_positions, for M-RoPE, are each token's
    time, row and column.
    """

    input_ids: Tensor  # (B, L) int64, IMAGE_POSITION at image positions
    position_ids: Tensor  # (B, L) int64
    labels: Tensor  # (B, L) int64
    tiles: Tensor | None  # (N, 3, S, S) uint8, or normalised float32; None: there are none
    keys: tuple[str, ...]  # of the samples that are trained on, in row-major order
    # of each image: how many of the tiles are its, and which positions they become
    tilings: tuple[Tiling, ...]
    tokens: int  # without padding and gaps
    epochs: tuple[int, ...]  # (B,) of each pack
    samples_of_packs: tuple[int, ...]  # (B,) trained on
    # row and reason of each quarantined sample
    faults: tuple[tuple[int, QuarantinedSample], ...] = ()
    grid_positions: Tensor | None = None  # (3, B, L) int64

    @property
    def positions(self) -> Tensor:
        """Positions for decoder layers: position_ids (B, L), or (4, B, L) with grid positions."""
        if self.grid_positions is None:
            return self.position_ids
        return torch.cat([self.position_ids[None], self.grid_positions])

    @property
    def samples(self) -> int:
        """Samples that are trained on."""
        return len(self.keys)

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each image's grid of tiles."""
        return tuple((tiling.rows, tiling.columns) for tiling in self.tilings)

    @functools.cached_property
    def image_places(self) -> Tensor:
        """Places (P,) int64 of all image positions, over rows laid end to end."""
        return (self.input_ids.flatten() == IMAGE_POSITION).nonzero().squeeze(1)


class Processor:
    """A run's tokenizer, template and image transform."""

    def __init__(self, config: RunConfig) -> None:
        """Open tokenizer and template; raises UserError for what is missing or unfit."""
        models = models_of(config)
        self.layout = models.layout
        self.tokenizer = load_tokenizer(config.model.llm.path)
        self.template = make_template(
            config.data.template,
            self.tokenizer,
            self.layout,
            models.published_llm.vocab_size,
        )
        self.transform: ImageTransform | None = None
        if config.model.vision is not None:
            self.transform = transform_of(models, config.data.max_image_pixels)
        self.pack_length = config.data.pack_length

    def read(self, reader: Reader, number: int) -> Document | QuarantinedSample:
        """Return the document of a sample; raises UserError where its length is not its index's."""
        sample = reader.read(number)
        if isinstance(sample, QuarantinedSample):
            return sample
        try:
            document = self.template(sample)
        except BadSample as error:
            return sample.quarantined(error)
        planned = reader.catalog.length(number)
        if len(document.input_ids) != planned:
            raise UserError(
                f"{sample.where}: {len(document.input_ids)} tokens, but the index of its shard "
                f"says {planned}: the index is from another version of the tokenizer's library, "
                f"or for another shard. Index it again: {MEND} {sample.shard}"
            )
        return document

    def decode(self, content: bytes, tiling: Tiling, is_control: bool = False) -> Tensor:
        """Return an image file as (tiles, 3, S, S) uint8; raises BadSample."""
        return self.transform.decode(content, tiling, is_control)

    def batch(self, packs: list[Pack], buffer: Tensor | None = None) -> PackedBatch:
        """Make a micro-batch of packs, its tiles uint8, in `buffer` if there is one."""
        return make_batch(
            packs,
            self.pack_length,
            self.decode,
            buffer,
            has_grid=self.layout.has_grid_positions,
        )

    def normalised(self, batch: PackedBatch) -> PackedBatch:
        """Return the micro-batch with its tiles in float32, as a stock encoder takes them."""
        if batch.tiles is None:
            return batch
        return replace(batch, tiles=self.transform.normalise(batch.tiles))


def make_batch(
    packs: Sequence[Pack],
    pack_length: int,
    decode: Decode,
    buffer: Tensor | None = None,
    *,
    has_grid: bool = False,
) -> PackedBatch:
    """Turn B packs into one micro-batch.

    `decode` makes (tiles, 3, S, S) of an image file or raises BadSample.

    A document with such an image becomes a gap. `buffer`, (M, 3, S, S) with M at least the number
    of tiles, takes the tiles; without one they get memory of their own. `has_grid`: with grid
    positions.
    """
    shape = (len(packs), pack_length)
    # Filled by numpy: torch.tensor takes seven times as long for a tuple of integers.
    # Padding is row 0 of the embedding; any row does: nothing looks at it.
    input_ids = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORE, np.int64)
    # of each token its place in its document, then the three of a grid
    positions = np.empty((4, *shape), np.int64)
    tiles = []
    tilings = []
    keys = []
    faults = []
    samples_of_packs = []
    tokens = 0
    for row, pack in enumerate(packs):
        start = 0
        before = len(keys)
        for entry in pack.entries:
            if isinstance(entry, Gap):
                length = entry.length
                fault = entry.fault
            else:
                length = len(entry.input_ids)
                fault = None
                try:
                    tiles += _decoded_images(entry, decode)
                    tilings += entry.tilings
                except BadSample as error:
                    fault = entry.sample.quarantined(error)
            end = start + length
            assert end <= pack_length, (
                f"documents of {end} tokens or more in a pack of {pack_length}"
            )

            positions[:, row, start:end] = np.arange(length)
            if fault is None:
                input_ids[row, start:end] = entry.input_ids
                labels[row, start:end] = entry.labels
                if has_grid:
                    positions[1:, row, start:end] = positions_of(entry)
                keys.append(entry.sample.key)
                tokens += length
            else:
                faults.append((row, fault))
            start = end
        positions[:, row, start:] = np.arange(pack_length - start)
        samples_of_packs.append(len(keys) - before)

    used = None if buffer is None else buffer[: sum(map(len, tiles))]
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions[0]),
        labels=torch.from_numpy(labels),
        tiles=torch.cat(tiles, out=used) if tiles else None,
        keys=tuple(keys),
        tilings=tuple(tilings),
        tokens=tokens,
        epochs=tuple(pack.epoch for pack in packs),
        samples_of_packs=tuple(samples_of_packs),
        faults=tuple(faults),
        grid_positions=torch.from_numpy(positions[1:]) if has_grid else None,
    )


def positions_of(document: Document) -> np.ndarray:
    """Return a document's grid positions (3, T)."""
    is_image = np.array(document.input_ids) == IMAGE_POSITION
    return grid_positions(is_image, [(tiling.rows, tiling.columns) for tiling in document.tilings])


def _decoded_images(
    document: Document,
    decode: Decode,
) -> list[Tensor]:
    """Return the tiles of each image; raises BadSample for the first that cannot be decoded."""
    tiles = []
    images = zip(document.sample.images, document.tilings, strict=True)
    for number, (content, tiling) in enumerate(images):
        try:
            tiles.append(decode(content, tiling, document.is_control))
        except BadSample as error:
            raise BadSample(error.reason, f"image {number}: {error.detail}") from None
    return tiles


def to_device(batch: PackedBatch, device: torch.device | str) -> PackedBatch:
    """Return the micro-batch with token ids, tiles and their places on `device`.

    The host uses the rest.
    """
    if torch.device(device).type == "cpu":
        return batch
    moved = copy.copy(batch)
    for name in ("input_ids", "tiles", "image_places"):
        tensor = getattr(batch, name)
        setattr(moved, name, None if tensor is None else copied(tensor, device))
    return moved
