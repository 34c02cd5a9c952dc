"""Answers that the model writes to held-out questions, by greedy decoding through the pipeline.

a document's prompt + the tokens written so far --Evaluator.evaluate, once a token--> the next token --> ... --> Answer
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from mmtrain.base.collectives import all_gather_object
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document
from mmtrain.training.held_out import pack_documents

if TYPE_CHECKING:
    from mmtrain.training.evaluations import Evaluator

TOKENS_BEYOND_THE_TRUTH = 16  # of an answer that does not end by itself
LONGEST_ANSWER = 64  # tokens that are written of an answer: each costs a forward


@dataclass(frozen=True)
class Answer:
    """A held-out question with the model's answer and the true one; `right` compares all tokens.

    `images` are those shown before the answer, as stored.
    """

    key: str
    question: str
    given: str
    truth: str
    right: bool
    images: tuple[bytes, ...] = ()


def write_answers(evaluator: Evaluator, count: int) -> list[Answer]:
    """Let the model answer the first question of `count` held-out samples, spread over all. Collective.

    An answer ends at the token that ends the true one, at EOS, 16 tokens beyond the true one's length, after 64
    tokens, or where the pack ends. Returns the answers on ranks that read data; an empty list elsewhere, and on every
    rank after the token at which the engine was requested to stop.

    Cost: one forward of all unfinished answers for each token, since nothing is cached.
    """
    held_out, engine = evaluator.held_out, evaluator.engine
    answers: list[_Writing] = []
    if held_out is not None:
        tokenizer = held_out.packed.processor.tokenizer
        answers = [_Writing(document, tokenizer.eos_token_id) for document in held_out.spread(count)]
    while True:
        batches, microbatches, asked = None, None, []
        if held_out is not None:
            unfinished = [answer for answer in answers if not answer.is_finished(held_out.capacity.tokens)]
            packs = pack_documents([answer.ask() for answer in unfinished], held_out.capacity)
            asked = [document for pack in packs for document in pack.entries]
            share = held_out.share(packs)
            batches, microbatches = held_out.batches(share), len(share)
        microbatches = all_gather_object(microbatches)[0]
        if not microbatches:
            return [answer.finished(tokenizer) for answer in answers]
        evaluator.evaluate("answers", batches, microbatches)
        if engine.requested_stop:
            return []
        predicted = evaluator.predicted()
        for document, token in zip(asked, predicted if asked else [], strict=True):
            next(answer for answer in answers if answer.asked is document).tokens.append(token)


@dataclass
class _Writing:
    """An answer while it is being written, after the prompt of a document up to its first supervised token."""

    source: Document
    eos: int | None
    tokens: list[int] = field(default_factory=list)
    asked: Document | None = None  # the document whose last position predicts the next token

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
        ended = bool(self.tokens) and self.tokens[-1] in (self.truth[-1], self.eos)
        limit = min(len(self.truth) + TOKENS_BEYOND_THE_TRUTH, LONGEST_ANSWER)
        return ended or len(self.tokens) >= limit or len(self.prompt) + len(self.tokens) > pack_length

    def ask(self) -> Document:
        """Return the prompt with the tokens so far; only its last position is supervised, by any token."""
        ids = (*self.prompt, *self.tokens)
        self.asked = Document(self.sample, ids, (*[IGNORE] * (len(ids) - 1), 0), self.tilings)
        return self.asked

    def finished(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        truth = self.truth[:LONGEST_ANSWER]
        given, true = (tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in (self.tokens, truth))
        more = " ..." if len(truth) < len(self.truth) else ""
        return Answer(self.sample.key, self.question, given, true + more, self.tokens == truth, self.sample.images)
