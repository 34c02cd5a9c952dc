"""How good the model is on samples that training never sees, measured through the pipeline.

held-out samples --read once, in shard order--> documents --pack--> packs, kept in memory by the ranks that read data
packs --replicas' shares--> micro-batches --engine.evaluate, round by round--> sums over all replicas --> Scores
a document's prompt + the tokens said so far --engine.evaluate, once a token--> the next token --> ... --> Answer

Every rank takes part in everything here: all construct the same objects and call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Fault
from mmtrain.data.shards.shard_list import expand_shards
from mmtrain.data.stream.catalog import Catalog, DataSet
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.order import Capacity, pack_best_fit
from mmtrain.data.stream.packs import Pack, PackedBatch
from mmtrain.data.stream.reader import Reader
from mmtrain.engine.engine import Evaluation, FrozenPipelineEngine
from mmtrain.evaluation.scores import Answer, Scores
from mmtrain.plan.schedule import Instruction
from mmtrain.processes.rank_records import Progress

# Micro-batches of one `engine.evaluate`, per pipeline rank. The first stage may be so many ahead of the last one, so
# this bounds the hidden states that wait in between, and the idle share of a round to (p - 1) / (5p - 1).
MICROBATCHES_PER_ROUND = 4
TOKENS_BEYOND_THE_TRUTH = 16  # of an answer that does not end by itself
LONGEST_ANSWER = 64  # tokens that are written of an answer: each costs a forward


@dataclass(frozen=True)
class Extent:
    """What of the held-out samples every rank must know."""

    samples: int
    overlong: int  # left out
    damaged: int  # left out
    permuted: int  # of the samples: get other images in the control
    packs: int
    microbatches: int  # of each replica
    digest: str

    @property
    def summary(self) -> str:
        """The same for people."""
        counts = {"too long for a pack": self.overlong, "damaged": self.damaged}
        left_out = "".join(f"; {count} {what} left out" for what, count in counts.items() if count)
        return f"evaluating on {self.samples} held-out samples in {self.packs} packs{left_out}"


class HeldOut:
    """The held-out samples, of `eval.shards` or `eval.fraction`, packed, with this replica's share as micro-batches.

    Price: each rank that reads data keeps all of them in memory, images as encoded bytes: 5,000 photographs of 100 kB
    are 500 MB (`eval.max_samples` limits them). Images are decoded again at each evaluation, by the rank itself.
    """

    def __init__(self, packed: PackedBatches) -> None:
        """Read all held-out samples, with template and tokenizer of `packed`.

        Damaged ones of `eval.fraction` are left out: `faults` says why. One of `eval.shards` is a UserError: scores of
        a set that is kept to compare runs would not be comparable.
        """
        config = packed.config
        self.packed = packed
        self.capacity = packed.documents.capacity
        self.faults: list[Fault] = []
        with _naming_the_source(config):
            catalog, numbers = self._samples()
            if not numbers:
                raise UserError(f"none of {len(catalog):,} samples is held out; raise the fraction, or set eval.shards")
            reader = Reader(catalog, config.data.io_retry_seconds)
            found = [document for number in numbers if (document := self._read(catalog, reader, number)) is not None]
            reader.close()
            if config.data.overlong == "refuse":
                catalog.refuse_overlong(self.capacity)
            self.documents = [document for document in found if fits_a_pack(document, self.capacity)]
            if not self.documents:
                raise UserError(
                    f"none of {len(numbers):,} held-out samples can be used: {len(self.faults):,} are damaged, the "
                    f"others do not fit into a pack of data.pack_length={config.data.pack_length}"
                )
        self.packs = pack_documents(self.documents, self.capacity)
        self.packs_permuted, permuted = permute_images(self.packs)
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(repr((document.sample.key, document.input_ids, document.labels)).encode())
            for image in document.sample.images:
                digest.update(hashlib.sha256(image).digest())
        self.extent = Extent(
            samples=len(self.documents),
            overlong=len(found) - len(self.documents),
            damaged=len(self.faults),
            permuted=permuted,
            packs=len(self.packs),
            microbatches=len(self.share(self.packs)),
            digest=digest.hexdigest(),
        )

    def _read(self, catalog: Catalog, reader: Reader, number: int) -> Document | None:
        """The document of a sample, None if it is damaged and may be left out."""
        source = self.packed.documents
        found = catalog.faults.get(number) or source.read(reader, number)
        if self.packed.config.eval.fraction is None:
            if isinstance(found, Fault):
                raise UserError(f"{found.where}; mend it, or take its shard out of the list")
            return found
        if isinstance(found, Document):  # of shards that are trained on, in which damage has to be expected
            for _, fault in source.batch([Pack((found,))]).faults:
                found = fault
        if isinstance(found, Fault):
            self.faults.append(found)
            return None
        return found

    def _samples(self) -> tuple[Catalog, list[int]]:
        """The catalog that holds the held-out samples, and their numbers in it."""
        packed, section = self.packed, self.packed.config.eval
        if section.fraction is not None:
            return packed.catalog, packed.catalog.held_out[: section.max_samples]
        shards = expand_shards(section.shards, "eval.shards", allow_pipe=packed.config.data.allow_pipe)
        catalog = packed.documents.catalog([DataSet(shards)])
        return catalog, list(range(len(catalog)))[: section.max_samples]

    def share(self, packs: Sequence[Pack]) -> list[list[Pack]]:
        """This replica's contiguous part of `packs` in micro-batches, the last ones filled up with empty packs.

        Each replica gets the same number of micro-batches, which may leave the last replicas with empty packs alone.
        """
        packed, size = self.packed, self.packed.config.train.packs_per_microbatch
        count = math.ceil(len(packs) / (packed.replicas * size))
        mine = list(packs[packed.replica * count * size : (packed.replica + 1) * count * size])
        mine += [Pack(())] * (count * size - len(mine))
        return [mine[first : first + size] for first in range(0, count * size, size)]

    def batches(self, microbatches: Sequence[Sequence[Pack]]) -> Iterator[PackedBatch]:
        """Micro-batches with their images decoded; raises UserError for one that cannot be."""
        packed = self.packed
        for packs in microbatches:
            batch = packed.documents.batch(packs)
            for _, fault in batch.faults:
                with _naming_the_source(packed.config):
                    raise UserError(f"{fault.where}; mend it, or take its shard out of the list")
            yield batch

    def spread(self, count: int) -> list[Document]:
        """`count` documents that have an answer, spread evenly over all."""
        asked = [document for document in self.documents if any(label != IGNORE for label in document.labels)]
        count = min(count, len(asked))
        return [asked[i * len(asked) // count] for i in range(count)]


@contextlib.contextmanager
def _naming_the_source(config: RunConfig) -> Iterator[None]:
    key = "eval.shards" if config.eval.fraction is None else "eval.fraction"
    try:
        yield
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(key) else f"{key}: {error}") from error


def pack_documents(documents: Sequence[Document], capacity: Capacity) -> list[Pack]:
    """Documents, each of which fits a pack, in packs, best-fit decreasing."""
    lengths = np.array([len(document.input_ids) for document in documents], np.int64)
    images = np.array([len(document.sample.images) for document in documents], np.int64)
    packs = pack_best_fit(lengths, capacity, images)
    return [Pack(tuple(documents[place] for place in pack)) for pack in packs]


def fits_a_pack(document: Document, capacity: Capacity) -> bool:
    """Whether a pack of this capacity holds the document."""
    images = len(document.sample.images)
    return len(document.input_ids) <= capacity.tokens and (capacity.images is None or images <= capacity.images)


def permute_images(packs: Sequence[Pack]) -> tuple[list[Pack], int]:
    """The same packs with images permuted among samples that have as many, and how many samples got other images.

    Each sample gets those of the one a fixed number of places further on in its group: half the group, unless another
    shift gives more samples other images (a data set may list its pictures twice). Texts, labels and places stay.
    """
    images = [document.sample.images for pack in packs for document in pack.entries]
    groups: dict[int, list[int]] = defaultdict(list)
    for place, own in enumerate(images):
        groups[len(own)].append(place)
    given = list(images)
    for places in groups.values():
        shifted = max((_shifted(places, shift, images) for shift in _shifts(len(places))), key=lambda found: found[0])[
            1
        ]
        for place, source in zip(places, shifted, strict=True):
            given[place] = images[source]
    following = iter(given)
    permuted = []
    for pack in packs:
        documents = (replace(d, sample=replace(d.sample, images=next(following))) for d in pack.entries)
        permuted.append(replace(pack, entries=tuple(documents)))
    return permuted, sum(new != own for new, own in zip(given, images, strict=True))


def _shifts(size: int) -> list[int]:
    """Shifts to try for a group of `size`, the first preferred."""
    return list(dict.fromkeys(max(1, shift) for shift in (size // 2, size // 2 + 1, size // 3, 1)))


def _shifted(places: Sequence[int], shift: int, images: Sequence[tuple[bytes, ...]]) -> tuple[int, list[int]]:
    """How many samples get other images by a shift, and from which place each gets its own."""
    sources = [places[(i + shift) % len(places)] for i in range(len(places))]
    return sum(images[place] != images[source] for place, source in zip(places, sources, strict=True)), sources


class Evaluator:
    """Evaluates the engine's model; `held_out` is None on the ranks that read no data.

    `show` is called with (micro-batches done, of all) as an evaluation goes on; `progress` gets the current work.
    """

    def __init__(
        self,
        engine: FrozenPipelineEngine,
        held_out: HeldOut | None,
        progress: Progress,
        show: Callable[[int, int], None],
    ) -> None:
        """Agree with all ranks on what to evaluate; raises UserError where they have read different samples."""
        self.engine = engine
        self.held_out = held_out
        self.progress = progress
        self.show = show
        extents = self._of_all_ranks(None if held_out is None else held_out.extent)
        self.extent: Extent = extents[0]
        for rank, extent in enumerate(extents):
            if extent not in (None, self.extent):  # they would wait for each other for ever, or score in silence
                raise UserError(
                    f"eval.shards: ranks 0 and {rank} have read different samples ({self.extent.samples} and "
                    f"{extent.samples}): the files must be the same on every machine"
                )

    def scores(self, *, permuted: bool = False) -> Scores | None:
        """Evaluate all held-out samples once; `permuted`, as a control, with images permuted among them.

        Returns None, on every rank, after the round in which the engine was requested to stop.
        """
        start = time.perf_counter()
        batches = None
        if self.held_out is not None:
            packs = self.held_out.packs_permuted if permuted else self.held_out.packs
            batches = self.held_out.batches(self.held_out.share(packs))
        what = "evaluation with permuted images" if permuted else "evaluation"
        total, in_round = self.extent.microbatches, MICROBATCHES_PER_ROUND * self.engine.plan.pipeline
        rounds = []
        for done in range(0, total, in_round):
            self.show(done, total)
            rounds.append(self._evaluate(f"{what}, {done} of {total} done", batches, min(in_round, total - done)))
            if self.engine.requested_stop:
                return None
        self.show(total, total)
        sums = Evaluation(*map(sum, zip(*map(astuple, rounds), strict=True)))
        return Scores(
            loss=sums.loss_sum / sums.supervised_tokens if sums.supervised_tokens else None,
            token_accuracy=sums.correct_tokens / sums.supervised_tokens if sums.supervised_tokens else None,
            exact_match=sums.exact_answers / sums.answers if sums.answers else None,
            answers=sums.answers,
            samples=self.extent.samples,
            seconds=time.perf_counter() - start,
        )

    def answers(self, count: int) -> list[Answer]:
        """Let the model answer the first question of `count` held-out samples, spread over all, by greedy decoding.

        An answer ends at the token that ends the true one, at EOS, 16 tokens beyond the true one's length, after 64
        tokens, or where the pack ends. Price: one forward of all that are not finished for each token, nothing being
        cached. Returns the answers on ranks that read data; an empty list elsewhere, and on every rank after the token
        at which the engine was requested to stop.
        """
        if self.held_out is None:
            while microbatches := self._from_rank_0(None):
                self._evaluate("answers", None, microbatches)
                if self.engine.requested_stop:
                    return []
                self._predicted()
            return []
        source, length = self.held_out.packed.documents, self.held_out.capacity.tokens
        tokenizer, per_image = source.tokenizer, source.tokens_per_image
        all_writing = [
            _Writing(document, per_image, tokenizer.eos_token_id) for document in self.held_out.spread(count)
        ]
        while True:
            asking = [writing.ask() for writing in all_writing if not writing.is_finished(length)]
            packs = pack_documents(asking, self.held_out.capacity)
            share = self.held_out.share(packs)
            if not self._from_rank_0(len(share)):
                return [writing.answer(tokenizer) for writing in all_writing]
            self._evaluate("answers", self.held_out.batches(share), len(share))
            if self.engine.requested_stop:
                return []
            asked = [document for pack in packs for document in pack.entries]
            for document, token in zip(asked, self._predicted(), strict=True):
                next(writing for writing in all_writing if writing.asked is document).given.append(token)

    def _evaluate(self, what: str, batches: Iterator[PackedBatch] | None, microbatches: int) -> Evaluation:
        """engine.evaluate, whose instructions are recorded as part of `what`: a failure then is known to be in it."""
        engine = self.engine
        in_training = engine.on_instruction

        def in_evaluation(step: int, instruction: Instruction) -> None:
            if in_training is not None:  # it may listen for a request to stop: an evaluation can take long
                in_training(step, instruction)
            self.progress.at(step, f"{what}: {instruction}")

        engine.on_instruction = in_evaluation
        try:
            return engine.evaluate(batches, microbatches)
        finally:
            engine.on_instruction = in_training

    def _predicted(self) -> list[int]:
        """All predicted tokens of the last engine.evaluate, in the order of its packs."""
        mine = self.engine.plan.ranks[dist.get_rank()]
        said = [token for _, tokens in sorted(self.engine.predicted.items()) for token in tokens.tolist()]
        by_rank = self._of_all_ranks((mine.pipeline, mine.data, said))
        last = (replica for replica in by_rank if replica[0] == self.engine.plan.pipeline - 1)
        return [token for *_, tokens in sorted(last) for token in tokens]

    def _of_all_ranks(self, value: Any) -> list[Any]:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.engine.host_group)
        return values

    def _from_rank_0(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.engine.host_group)
        return values[0]


@dataclass
class _Writing:
    """An answer while it is being written, after the prompt of a document up to its first supervised token."""

    source: Document
    tokens_per_image: int
    eos: int | None
    given: list[int] = field(default_factory=list)
    asked: Document | None = None  # the document whose last position says the next token

    def __post_init__(self) -> None:
        labels = self.source.labels
        begin = next(t for t, label in enumerate(labels) if label != IGNORE)
        self.prompt = self.source.input_ids[: begin + 1]
        self.truth = list(itertools.takewhile(lambda label: label != IGNORE, labels[begin:]))
        sample = self.source.sample
        # The answer itself and later turns may bring more images.
        shown = self.prompt.count(IMAGE_POSITION) // self.tokens_per_image
        self.sample = replace(sample, images=sample.images[:shown])
        before = itertools.takewhile(lambda turn: turn[0] != "gpt", sample.turns)
        questions = [text.replace(IMAGE_MARK, "").strip() for speaker, text in before if speaker == "human"]
        self.question = " ".join(questions)

    def is_finished(self, pack_length: int) -> bool:
        ended = bool(self.given) and self.given[-1] in (self.truth[-1], self.eos)
        limit = min(len(self.truth) + TOKENS_BEYOND_THE_TRUTH, LONGEST_ANSWER)
        return ended or len(self.given) >= limit or len(self.prompt) + len(self.given) > pack_length

    def ask(self) -> Document:
        """Prompt and what was said so far; only the last position is supervised, by any token: its arg max counts."""
        ids = (*self.prompt, *self.given)
        self.asked = Document(self.sample, ids, (*[IGNORE] * (len(ids) - 1), 0))
        return self.asked

    def answer(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        truth = self.truth[:LONGEST_ANSWER]
        given, true = (tokenizer.decode(said, skip_special_tokens=True).strip() for said in (self.given, truth))
        more = " ..." if len(truth) < len(self.truth) else ""
        return Answer(self.sample.key, self.question, given, true + more, right=self.given == truth)
