"""From documents to a micro-batch's tensors.

packs: lists of documents, and of gaps where samples are quarantined --make_batch--> PackedBatch: (B, L) tensors and
images (N, 3, S, S)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mmtrain.data.records import Rejected
from mmtrain.data.samples import IGNORE, Document, Fault


@dataclass(frozen=True)
class Gap:
    """A quarantined sample's place in its pack: the order of everything else stays as planned."""

    fault: Fault
    length: int  # tokens, as planned


@dataclass(frozen=True)
class Pack:
    """Whole documents and gaps that share a token sequence; `epoch` counts passes over the data, from 0."""

    entries: tuple[Document | Gap, ...]
    epoch: int = 0


@dataclass
class PackedBatch:
    """One micro-batch: B packs of L tokens.

    labels are already shifted: labels[b, t] is the token that position t must predict, IGNORE where there is none; the
    last token of a document never has a label. position_ids restart at 0 in each document; a gap is a document without
    labels, and so is the padding at the row's end. images are in row-major order of their positions.
    """

    input_ids: torch.Tensor  # (B, L) int64, IMAGE_POSITION at image positions
    position_ids: torch.Tensor  # (B, L) int64
    labels: torch.Tensor  # (B, L) int64
    images: torch.Tensor | None  # (N, 3, S, S) float32, normalised; None without images
    keys: tuple[str, ...]  # of the samples that are trained on, in row-major order
    tokens: int = 0  # without padding and gaps
    epochs: tuple[int, ...] = ()  # (B,) of each pack
    samples_of_packs: tuple[int, ...] = ()  # (B,) trained on
    faults: tuple[tuple[int, Fault], ...] = ()  # row and reason of each quarantined sample

    @property
    def samples(self) -> int:
        """Samples that are trained on."""
        return len(self.keys)


def make_batch(
    packs: Sequence[Pack], pack_length: int, padding_id: int, decode: Callable[[bytes], torch.Tensor]
) -> PackedBatch:
    """Turn B packs into one micro-batch; `decode` makes (3, S, S) of an image file or raises Rejected.

    A document with such an image becomes a gap.
    """
    shape = (len(packs), pack_length)
    input_ids = torch.full(shape, padding_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORE, dtype=torch.int64)
    position_ids = torch.empty(shape, dtype=torch.int64)
    images: list[torch.Tensor] = []
    keys: list[str] = []
    faults: list[tuple[int, Fault]] = []
    samples_of_packs: list[int] = []
    tokens = 0
    for row, pack in enumerate(packs):
        start, before = 0, len(keys)
        for entry in pack.entries:
            if isinstance(entry, Document):
                length = len(entry.input_ids)
                fault = _decode_images(entry, decode, images)
            else:
                length, fault = entry.length, entry.fault
            end = start + length
            assert end <= pack_length, f"documents of {end} tokens or more in a pack of {pack_length}"
            position_ids[row, start:end] = torch.arange(length)
            if fault is None:
                input_ids[row, start:end] = torch.tensor(entry.input_ids)
                labels[row, start:end] = torch.tensor(entry.labels)
                keys.append(entry.sample.key)
                tokens += length
            else:
                faults.append((row, fault))
            start = end
        position_ids[row, start:] = torch.arange(pack_length - start)
        samples_of_packs.append(len(keys) - before)
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        images=torch.stack(images) if images else None,
        keys=tuple(keys),
        tokens=tokens,
        epochs=tuple(pack.epoch for pack in packs),
        samples_of_packs=tuple(samples_of_packs),
        faults=tuple(faults),
    )


def _decode_images(
    document: Document, decode: Callable[[bytes], torch.Tensor], images: list[torch.Tensor]
) -> Fault | None:
    """Append the document's images; if one cannot be decoded, none, and say why."""
    sample, decoded = document.sample, []
    for number, content in enumerate(sample.images):
        try:
            decoded.append(decode(content))
        except Rejected as error:
            detail = f"image {number}: {error.detail}"
            return Fault(sample.key, sample.shard, sample.offset, error.reason, detail)
    images += decoded
    return None
