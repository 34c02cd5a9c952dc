"""Held-out samples, packed and kept in memory by the ranks that read data, and each replica's share
of them.

held-out samples --read once, in shard order--> documents --pack--> packs --replicas' shares-->
    micro-batches
                                                          --permute_images--> the control's packs
"""

import contextlib
import functools
import hashlib
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmtrain.base.errors import UserError
from mmtrain.config.schema import EvalSection
from mmtrain.data.samples.sample import IGNORE, Document, QuarantinedSample
from mmtrain.data.stream.catalog import Catalog, Reader
from mmtrain.data.stream.loader import PackedBatches, evaluated_samples
from mmtrain.data.stream.order import Capacity, pack_best_fit
from mmtrain.data.stream.packs import Pack, PackedBatch


@dataclass(frozen=True)
class Extent:
    """Sizes and digest of the held-out samples, which every rank must know."""

    samples: int
    beyond: int  # eval.max_samples: left out
    overlong: int  # left out
    damaged: int  # left out
    permuted: int  # of the samples: get other images in the control
    packs: int
    microbatches: int  # of each replica
    digest: str

    @property
    def summary(self) -> str:
        summary = f"evaluating on {self.samples} held-out samples in {self.packs} packs"
        if self.beyond:
            summary += f"; {self.beyond:,} beyond eval.max_samples left out"
        if self.overlong:
            summary += f"; {self.overlong} too long for a pack left out"
        if self.damaged:
            summary += f"; {self.damaged} damaged left out"
        return summary


class HeldOut:
    """The held-out samples, of `eval.shards` or `eval.fraction`, packed, with this replica's share
    as micro-batches.

    Cost: each rank that reads data keeps `eval.max_samples` of them in memory, images as encoded
    bytes: 5,000 photographs of 100 kB are 500 MB. Images are decoded again at each evaluation, by
    the rank itself.
    """

    def __init__(self, packed: PackedBatches) -> None:
        """Read all held-out samples; damaged ones of `eval.fraction` are left out and listed in
        `faults`.

        One of `eval.shards` is a UserError: scores of a set that is kept to compare runs would not
        be comparable.
        """
        config = packed.config
        self.packed = packed
        self.capacity = packed.order.capacity
        self.faults: list[QuarantinedSample] = []
        with _naming_the_source(config.eval):
            catalog, numbers = evaluated_samples(config, packed)
            chosen = numbers[: config.eval.max_samples]
            if not len(numbers):
                usable = len(catalog) - catalog.reasons.total()
                share = min(0.5, 10 / max(usable, 1))
                raise UserError(
                    f"none of {usable:,} usable samples{catalog.why_unusable()} is held out. "
                    f"Set {share:.2g}, or set eval.shards"
                )

            reader = Reader(catalog, config.data.io_retry_seconds, packed.reader.copies)
            found = [self._read(catalog, reader, int(number)) for number in chosen]
            read = [document for document in found if document is not None]
            reader.close()

            if config.data.overlong == "refuse":
                catalog.refuse_overlong()
            self.documents = [document for document in read if self._fits(document)]
            if not self.documents:
                raise UserError(
                    f"none of {len(chosen):,} held-out samples can be used: "
                    f"{len(self.faults):,} are damaged, and the "
                    f"others do not fit into a pack of data.pack_length={config.data.pack_length}"
                )

        self.packs = pack_documents(self.documents, self.capacity)
        self.packs_permuted, permuted = permute_images(self.packs)

        # of all that is evaluated: ranks compare it, since they have read by themselves
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(repr((document.sample.key, document.input_ids, document.labels)).encode())
            for image in document.sample.images:
                digest.update(hashlib.sha256(image).digest())
        self.extent = Extent(
            samples=len(self.documents),
            beyond=len(numbers) - len(chosen),
            overlong=len(read) - len(self.documents),
            damaged=len(self.faults),
            permuted=permuted,
            packs=len(self.packs),
            microbatches=len(self.share(self.packs)),
            digest=digest.hexdigest(),
        )

    def _read(
        self,
        catalog: Catalog,
        reader: Reader,
        number: int,
    ) -> Document | None:
        """Return the document of a sample, None if it is damaged and may be left out."""
        processor = self.packed.processor
        sample = catalog.fault(number) or processor.read(reader, number)
        by_fraction = self.packed.config.eval.fraction is not None
        if by_fraction and isinstance(sample, Document) and self._fits(sample):
            # damage that decoding alone shows
            for _, fault in processor.batch([Pack((sample,))]).faults:
                sample = fault
        if isinstance(sample, Document):
            return sample
        if not by_fraction:
            raise UserError(f"{sample.where}. Fix it, or take its shard out of the list")
        self.faults.append(sample)
        return None

    def _fits(self, document: Document) -> bool:
        tiles = self.capacity.tiles
        if tiles is not None and _tiles(document) > tiles:
            return False
        return len(document.input_ids) <= self.capacity.tokens

    def share(self, packs: Sequence[Pack]) -> list[list[Pack]]:
        """Return this replica's contiguous part of `packs` in micro-batches, filled up with empty
        packs.

        All replicas get equally many micro-batches; those of the last replicas may be empty.
        """
        size = self.packed.config.train.packs_per_microbatch
        count = size * math.ceil(len(packs) / (self.packed.replicas * size))
        begin = self.packed.replica * count
        share = list(packs[begin : begin + count])
        share += [Pack(())] * (count - len(share))
        return [share[first : first + size] for first in range(0, count, size)]

    def batches(self, microbatches: Sequence[Sequence[Pack]]) -> Iterator[PackedBatch]:
        """Yield micro-batches with their images decoded; raises UserError for an image that cannot
        be.
        """
        for packs in microbatches:
            batch = self.packed.processor.batch(packs)
            for _, fault in batch.faults:
                with _naming_the_source(self.packed.config.eval):
                    raise UserError(f"{fault.where}. Fix it, or take its shard out of the list")
            yield batch

    def spread(self, count: int) -> list[Document]:
        """Return `count` documents that have an answer, spread evenly over all."""
        answered = [one for one in self.documents if set(one.labels) - {IGNORE}]
        count = min(count, len(answered))
        return [answered[i * len(answered) // count] for i in range(count)]


@contextlib.contextmanager
def _naming_the_source(section: EvalSection) -> Iterator[None]:
    key = "eval.shards" if section.fraction is None else "eval.fraction"
    try:
        yield
    except UserError as error:
        if str(error).startswith(key):
            raise
        raise UserError(f"{key}: {error}") from error


def _tiles(document: Document) -> int:
    return sum(tiling.tiles for tiling in document.tilings)


def pack_documents(documents: Sequence[Document], capacity: Capacity) -> list[Pack]:
    """Pack documents, each of which fits a pack, best-fit decreasing."""
    lengths = np.array([len(document.input_ids) for document in documents], np.int64)
    tiles = np.array([_tiles(document) for document in documents], np.int64)
    packs = []
    for places in pack_best_fit(lengths, capacity, tiles):
        packs.append(Pack(tuple(documents[place] for place in places)))
    return packs


def permute_images(packs: Sequence[Pack]) -> tuple[list[Pack], int]:
    """Permute images among samples that have equally many; return the packs and the number of
    samples that got other images.

    Each sample gets those half its group further on, unless another shift gives more samples other
    images (a data set may list its pictures twice). Texts and labels stay: an image is stretched to
    the size of the one that it replaces.
    """
    images: list[tuple[bytes, ...]] = []
    for pack in packs:
        images += [document.sample.images for document in pack.entries]
    groups: dict[int, list[int]] = defaultdict(list)
    for place, own in enumerate(images):
        groups[len(own)].append(place)
    others = list(images)
    for places in groups.values():
        size = len(places)
        own = [images[place] for place in places]
        candidates = []
        for shift in (size // 2, size // 2 + 1, size // 3, 1):
            shift = max(1, shift) % size
            candidates.append(own[shift:] + own[:shift])
        best = max(candidates, key=functools.partial(_differing, own))
        for place, new in zip(places, best, strict=True):
            others[place] = new
    following = iter(others)

    def permuted(document: Document) -> Document:
        return replace(
            document, sample=replace(document.sample, images=next(following)), is_control=True
        )

    control = [replace(pack, entries=tuple(map(permuted, pack.entries))) for pack in packs]
    return control, _differing(images, others)


def _differing(some: Sequence[object], others: Sequence[object]) -> int:
    return sum(map(operator.ne, some, others))
