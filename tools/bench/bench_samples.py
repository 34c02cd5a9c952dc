"""The same samples as packs and as padded batches: one image and its caption each, every caption token supervised.

text lengths --draw_steps--> Pack[] of each step --packed--> PackedBatch (mmtrain)
                                                 --padded--> PaddedBatch (everybody else)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from bench_models import Decode, ModelSize

from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.stream.images import ImageTransform
from mmtrain.data.stream.packs import Pack, PackedBatch, make_batch
from mmtrain.pretrained.tiling import Tiling

BEGIN, PADDING, FIRST_WORD = 1, 0, 3
WINDOW = 16  # samples among which the last of a pack is looked for
MEDIAN_TEXT, SIGMA = 0.75, 0.75  # of ragged text: log-normal, median as a share of the typical length

Step = tuple[Pack, ...]


@dataclass(frozen=True)
class PaddedBatch:
    """What a collator hands to stock LLaVA: (B, L) int64 padded on the right, and pixels (B, 3, S, S) float32."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor  # (B, L) int64, 0 at padding
    labels: torch.Tensor  # as transformers wants them: not shifted
    pixel_values: torch.Tensor

    @property
    def shifted_labels(self) -> torch.Tensor:
        """(B, L): labels[b, t] is the token that position t must predict."""
        return torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORE)

    def pinned(self) -> PaddedBatch:
        """The same in page-locked memory, from where copies to a CUDA device run beside its work."""
        return PaddedBatch(**{name: tensor.pin_memory() for name, tensor in vars(self).items()})

    @property
    def supervised(self) -> int:
        """Tokens that the loss counts."""
        return int((self.labels[:, 1:] != IGNORE).sum())


@dataclass(frozen=True)
class Workload:
    """Steps of packs of one length; all contestants go through them in the same order, again and again."""

    steps: tuple[Step, ...]
    pack_length: int

    @property
    def fill(self) -> float:
        """Share of the packs' positions that hold a token."""
        packs = [pack for step in self.steps for pack in step]
        tokens = sum(len(entry.input_ids) for pack in packs for entry in pack.entries)
        return tokens / (len(packs) * self.pack_length)


def draw_document(shape: ModelSize, number: int, text_tokens: int) -> Document:
    """Sample `number`: a beginning mark, an image, words; the words are to be predicted."""
    draw = random.Random(number)
    words = [draw.randrange(FIRST_WORD, shape.image_token) for _ in range(text_tokens - 1)]
    ids = (BEGIN, *[IMAGE_POSITION] * shape.image_tokens, *words)
    image = str(number).encode()  # see bench_models.noise_image
    labels = [ids[t + 1] if t >= shape.image_tokens else IGNORE for t in range(len(ids) - 1)]
    tiling = Tiling(0, 0, shape.image_tokens)
    return Document(Sample(str(number), "", (), (image,)), ids, (*labels, IGNORE), (tiling,))


def equal_steps(shape: ModelSize, steps: int, packs: int, samples_per_pack: int) -> Workload:
    """Samples of the typical length, and packs that these fill exactly."""
    documents = iter([draw_document(shape, n, shape.text_tokens) for n in range(steps * packs * samples_per_pack)])
    drawn = tuple(
        tuple(Pack(tuple(next(documents) for _ in range(samples_per_pack))) for _ in range(packs)) for _ in range(steps)
    )
    return Workload(drawn, samples_per_pack * shape.sample_tokens)


def ragged_steps(shape: ModelSize, steps: int, packs: int, samples_per_pack: int) -> Workload:
    """Long-tailed text lengths, in packs as long as those of `equal_steps`.

    A pack takes samples as they are drawn while they fit, then the longest of the next `WINDOW` that still does. Best
    fit over an epoch would fill as well, but would put samples of like length together, and so into one step of a few
    packs: that would spare the padded batches their padding.
    """
    pack_length = samples_per_pack * shape.sample_tokens
    longest = min(6 * shape.text_tokens, pack_length - shape.image_tokens)
    draw, numbers = random.Random(0), itertools.count()

    def documents() -> Iterator[Document]:
        while True:
            text = draw.lognormvariate(math.log(MEDIAN_TEXT * shape.text_tokens), SIGMA)
            yield draw_document(shape, next(numbers), max(2, min(longest, round(text))))

    stream, waiting = documents(), []

    def pack() -> Pack:
        entries, free = [], pack_length
        while True:
            waiting.extend(next(stream) for _ in range(WINDOW - len(waiting)))
            fitting = [i for i, document in enumerate(waiting) if len(document.input_ids) <= free]
            if not fitting:
                return Pack(tuple(entries))
            best = max(fitting, key=lambda i: len(waiting[i].input_ids))
            entries.append(waiting.pop(0 if fitting[0] == 0 else best))
            free -= len(entries[-1].input_ids)

    return Workload(tuple(tuple(pack() for _ in range(packs)) for _ in range(steps)), pack_length)


def packed(step: Step, pack_length: int, decode: Decode) -> list[PackedBatch]:
    """A step's micro-batches of one pack each, as mmtrain's loader makes them: images in uint8."""
    return [make_batch([pack], pack_length, PADDING, lambda content, *_: decode(content)[None]) for pack in step]


def padded(shape: ModelSize, step: Step, decode: Decode, transform: ImageTransform) -> list[PaddedBatch]:
    """The same samples in the order in which they were drawn, in as many batches as the step has packs.

    Each batch is padded to its longest sample.
    """
    documents = sorted((entry for pack in step for entry in pack.entries), key=lambda entry: int(entry.sample.key))
    bounds = [round(len(documents) * i / len(step)) for i in range(len(step) + 1)]
    return [_collate(shape, documents[a:b], decode, transform) for a, b in itertools.pairwise(bounds)]


def _collate(shape: ModelSize, documents: Sequence[Document], decode: Decode, transform: ImageTransform) -> PaddedBatch:
    size = (len(documents), max(len(document.input_ids) for document in documents))
    input_ids = torch.full(size, PADDING)
    attention_mask = torch.zeros(size, dtype=torch.int64)
    labels = torch.full(size, IGNORE)
    for row, document in enumerate(documents):
        ids = torch.tensor([shape.image_token if i == IMAGE_POSITION else i for i in document.input_ids])
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        labels[row, 1 : len(ids)] = torch.tensor(document.labels[:-1])
    pixels = torch.stack([decode(document.sample.images[0]) for document in documents])
    return PaddedBatch(input_ids, attention_mask, labels, transform.normalise(pixels))
