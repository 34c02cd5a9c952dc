"""Answers that the model writes to held-out questions, by greedy decoding through the pipeline.

a document's prompt + the tokens said so far --Evaluator.evaluate, once a token--> the next token --> ... --> Answer
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from mmtrain.base.collectives import all_gather_object
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document
from mmtrain.training.evaluator import Evaluator
from mmtrain.training.held_out import pack_documents

TOKENS_BEYOND_THE_TRUTH = 16  # of an answer that does not end by itself
LONGEST_ANSWER = 64  # tokens that are written of an answer: each costs a forward


@dataclass(frozen=True)
class Answer:
    """A held-out question, what the model said and what it should have said; `right` compares all tokens.

    `images` are those shown before the answer, as stored.
    """

    key: str
    question: str
    given: str
    truth: str
    right: bool
    images: tuple[bytes, ...] = ()


def write_answers(evaluator: Evaluator, count: int) -> list[Answer]:
    """Let the model answer the first question of `count` held-out samples, spread over all, by greedy decoding.

    An answer ends at the token that ends the true one, at EOS, 16 tokens beyond the true one's length, after 64
    tokens, or where the pack ends. Price: one forward of all that are not finished for each token, nothing being
    cached. Every rank calls this. Returns the answers on ranks that read data; an empty list elsewhere, and on every
    rank after the token at which the engine was requested to stop.
    """
    held_out, engine = evaluator.held_out, evaluator.engine
    answers: list[_Writing] = []
    if held_out is not None:
        source = held_out.packed.processor
        chosen = held_out.spread(count)
        answers = [_Writing(document, source.tokenizer.eos_token_id) for document in chosen]
    while True:
        batches, microbatches, asked = None, None, []
        if held_out is not None:
            waiting = [answer for answer in answers if not answer.is_finished(held_out.capacity.tokens)]
            packs = pack_documents([answer.ask() for answer in waiting], held_out.capacity)
            asked = [document for pack in packs for document in pack.entries]
            share = held_out.share(packs)
            batches, microbatches = held_out.batches(share), len(share)
        microbatches = all_gather_object(microbatches)[0]
        if not microbatches:
            return [answer.finished(source.tokenizer) for answer in answers]
        evaluator.evaluate("answers", batches, microbatches)
        if engine.requested_stop:
            return []
        said = evaluator.predicted()
        for document, token in zip(asked, said if asked else [], strict=True):
            next(answer for answer in answers if answer.asked is document).given.append(token)


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
        sample = self.source.sample
        # The answer itself and later turns may bring more images.
        ends = itertools.accumulate(tiling.positions for tiling in self.source.tilings)
        seen = self.prompt.count(IMAGE_POSITION)
        shown = sum(end <= seen for end in ends)
        self.sample = replace(sample, images=sample.images[:shown], sizes=sample.sizes[:shown])
        self.tilings = self.source.tilings[:shown]
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
        self.asked = Document(self.sample, ids, (*[IGNORE] * (len(ids) - 1), 0), self.tilings)
        return self.asked

    def finished(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        truth = self.truth[:LONGEST_ANSWER]
        given, true = (tokenizer.decode(said, skip_special_tokens=True).strip() for said in (self.given, truth))
        more = " ..." if len(truth) < len(self.truth) else ""
        return Answer(self.sample.key, self.question, given, true + more, self.given == truth, self.sample.images)
