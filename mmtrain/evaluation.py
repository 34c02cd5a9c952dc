"""How good the model is on samples that training never sees, measured through the pipeline.

eval.shards --read once, in shard order--> documents --pack--> packs, kept in memory by the ranks that read data
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

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mmtrain.data.loader import PackedBatches
from mmtrain.data.records import IMAGE_MARK
from mmtrain.data.samples import IGNORE, Document, Pack, PackedBatch, make_batch, pack, read_sample
from mmtrain.data.shard_list import expand_shards
from mmtrain.data.shards import read_members
from mmtrain.engine import Evaluation, FrozenPipelineEngine
from mmtrain.errors import UserError
from mmtrain.metrics import Answer, Scores
from mmtrain.rank import Progress

# Micro-batches of one `engine.evaluate`, per pipeline rank. The first stage may be so many ahead of the last one, so
# this bounds the hidden states that wait in between, and the idle share of a round to (p - 1) / (5p - 1).
MICROBATCHES_PER_ROUND = 4
TOKENS_BEYOND_THE_TRUTH = 16  # of an answer that does not end by itself


@dataclass(frozen=True)
class Extent:
    """What of the held-out samples every rank must know."""

    samples: int
    overlong: int  # left out
    exchanged: int  # of the samples: get another image in the control
    packs: int
    microbatches: int  # of each replica
    digest: str

    @property
    def summary(self) -> str:
        """The same for people."""
        left_out = f"; {self.overlong} longer than data.pack_length left out" if self.overlong else ""
        return f"evaluating on {self.samples} held-out samples in {self.packs} packs{left_out}"


class HeldOut:
    """The samples of `eval.shards`, read and packed, with this replica's share of them as micro-batches.

    Price: each rank that reads data keeps all of them in memory, images as encoded bytes: 5,000 photographs of 100 kB
    are 500 MB (`eval.max_samples` limits them). Images are decoded again at each evaluation, by the rank itself.
    """

    def __init__(self, packed: PackedBatches) -> None:
        """Read all held-out samples, with template and tokenizer of `packed`; raises UserError naming eval.shards."""
        config = packed.config
        shards = expand_shards(config.eval.shards, "eval.shards")
        self.packed = packed
        with _naming_eval_shards():
            samples = (read_sample(members) for shard in shards for members in read_members(shard))
            documents = (packed.template(sample) for sample in itertools.islice(samples, config.eval.max_samples))
            self.packs = list(pack(documents, config.data.pack_length, config.data.overlong))
        if not self.packs:
            raise UserError(
                f"eval.shards: no sample in {len(shards)} shards fits into a pack: they are empty, or every sample is "
                f"longer than data.pack_length={config.data.pack_length} tokens"
            )
        self.documents = [document for members in self.packs for document in members.documents]
        self.control, exchanged = exchange_images(self.packs)
        said = repr([(document.sample.key, document.input_ids, document.labels) for document in self.documents])
        self.extent = Extent(
            samples=len(self.documents),
            overlong=sum(members.skipped for members in self.packs),
            exchanged=exchanged,
            packs=len(self.packs),
            microbatches=len(self.share(self.packs)),
            digest=hashlib.sha256(said.encode()).hexdigest(),
        )

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
        """Micro-batches with their images decoded; raises UserError naming eval.shards for a damaged one."""
        packed = self.packed
        for members in microbatches:
            with _naming_eval_shards():
                batch = make_batch(members, packed.config.data.pack_length, packed.padding_id, packed.transform)
            yield batch

    def spread(self, count: int) -> list[Document]:
        """`count` documents that have an answer, spread evenly over all."""
        asked = [document for document in self.documents if any(label != IGNORE for label in document.labels)]
        count = min(count, len(asked))
        return [asked[i * len(asked) // count] for i in range(count)]


@contextlib.contextmanager
def _naming_eval_shards() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"eval.shards: {error}") from error


def exchange_images(packs: Sequence[Pack]) -> tuple[list[Pack], int]:
    """The same packs with images exchanged among samples that have as many, and how many samples got others.

    Each sample gets those of the one half the group further on. Texts, labels and places stay. A sample without images,
    or alone with their number, keeps what it has.
    """
    images = [document.sample.images for members in packs for document in members.documents]
    groups: dict[int, list[int]] = defaultdict(list)
    for place, own in enumerate(images):
        groups[len(own)].append(place)
    given = list(images)
    for places in groups.values():
        shift = max(1, len(places) // 2)
        for i, place in enumerate(places):
            given[place] = images[places[(i + shift) % len(places)]]
    following = iter(given)
    exchanged = []
    for members in packs:
        documents = (replace(d, sample=replace(d.sample, images=next(following))) for d in members.documents)
        exchanged.append(replace(members, documents=tuple(documents)))
    return exchanged, sum(new != own for new, own in zip(given, images, strict=True))


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

    def scores(self, *, control: bool = False) -> Scores:
        """Evaluate all held-out samples once; as a `control`, with images exchanged among them."""
        start = time.perf_counter()
        batches = None
        if self.held_out is not None:
            packs = self.held_out.control if control else self.held_out.packs
            batches = self.held_out.batches(self.held_out.share(packs))
        what = "control" if control else "evaluation"
        total, in_round = self.extent.microbatches, MICROBATCHES_PER_ROUND * self.engine.plan.pipeline
        rounds = []
        for done in range(0, total, in_round):
            self.show(done, total)
            rounds.append(self._evaluate(f"{what}, {done} of {total} done", batches, min(in_round, total - done)))
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

        An answer ends at the token that ends the true one, at EOS, 16 tokens beyond the true one's length, or where the
        pack ends. Price: one forward of all that are not finished for each token, nothing being cached. Returns the
        answers on ranks that read data, an empty list elsewhere.
        """
        if self.held_out is None:
            while microbatches := self._from_rank_0(None):
                self._evaluate("answers", None, microbatches)
                self._predicted()
            return []
        packed = self.held_out.packed
        length = packed.config.data.pack_length
        all_writing = [_Writing(document, packed.tokenizer.eos_token_id) for document in self.held_out.spread(count)]
        while True:
            packs = list(pack((writing.ask() for writing in all_writing if not writing.is_finished(length)), length))
            share = self.held_out.share(packs)
            if not self._from_rank_0(len(share)):
                return [writing.answer(packed.tokenizer) for writing in all_writing]
            self._evaluate("answers", self.held_out.batches(share), len(share))
            asked = [document for members in packs for document in members.documents]
            for document, token in zip(asked, self._predicted(), strict=True):
                next(writing for writing in all_writing if writing.asked is document).given.append(token)

    def _evaluate(self, what: str, batches: Iterator[PackedBatch] | None, microbatches: int) -> Evaluation:
        """engine.evaluate, whose instructions are recorded as part of `what`: a failure then is known to be in it."""
        engine = self.engine
        in_training = engine.on_instruction
        engine.on_instruction = lambda step, instruction: self.progress.at(step, f"{what}: {instruction}")
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
    eos: int | None
    given: list[int] = field(default_factory=list)
    asked: Document | None = None  # the document whose last position says the next token

    def __post_init__(self) -> None:
        labels = self.source.labels
        begin = next(t for t, label in enumerate(labels) if label != IGNORE)
        self.prompt = self.source.input_ids[: begin + 1]
        self.truth = list(itertools.takewhile(lambda label: label != IGNORE, labels[begin:]))

    def is_finished(self, pack_length: int) -> bool:
        ended = bool(self.given) and self.given[-1] in (self.truth[-1], self.eos)
        too_long = len(self.given) >= len(self.truth) + TOKENS_BEYOND_THE_TRUTH
        return ended or too_long or len(self.prompt) + len(self.given) > pack_length

    def ask(self) -> Document:
        """Prompt and what was said so far; only the last position is supervised, by any token: its arg max counts."""
        ids = (*self.prompt, *self.given)
        self.asked = Document(self.source.sample, ids, (*[IGNORE] * (len(ids) - 1), 0))
        return self.asked

    def answer(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        human = next(text for speaker, text in self.source.sample.turns if speaker == "human")
        return Answer(
            key=self.source.sample.key,
            question=human.replace(IMAGE_MARK, "").strip(),
            given=tokenizer.decode(self.given, skip_special_tokens=True).strip(),
            truth=tokenizer.decode(self.truth, skip_special_tokens=True).strip(),
            right=self.given == self.truth,
        )
