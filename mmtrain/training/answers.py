"""Results of an evaluation: scores, and answers to held-out questions, written token by token.

a document's prompt + the tokens written so far --Writing.ask--> a document --the pipeline--> the
    next token --> Answer
"""

import itertools
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document

TOKENS_BEYOND_THE_TRUTH = 16  # of an answer that does not end by itself
LONGEST_ANSWER = 64  # tokens that are written of an answer: each costs a forward


@dataclass(frozen=True)
class Scores:
    """One evaluation, equal on every rank; a share of nothing is None.

    `loss` is in nats per supervised token; `token_accuracy` is the share of supervised tokens that
    are the arg max given the true tokens before them; `exact_match` the share of answers of which
    every token is, end mark included.
    """

    loss: float | None
    token_accuracy: float | None
    exact_match: float | None
    answers: int
    samples: int
    seconds: float


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


@dataclass
class Writing:
    """An answer while it is being written, after the prompt of a document up to its first
    supervised token.

    It ends at the token that ends the true one, at EOS, 16 tokens beyond the true one's length,
    after 64 tokens, or where the pack ends.
    """

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
        shown = sum(1 for end in ends if end <= seen)
        self.sample = replace(sample, images=sample.images[:shown], sizes=sample.sizes[:shown])
        self.tilings = self.source.tilings[:shown]
        before = itertools.takewhile(lambda turn: turn[0] != "gpt", sample.turns)
        asked = [text for speaker, text in before if speaker == "human"]
        self.question = " ".join(text.replace(IMAGE_MARK, "").strip() for text in asked)

    def is_finished(self, pack_length: int) -> bool:
        written = len(self.tokens)
        ended = written > 0 and self.tokens[-1] in (self.truth[-1], self.eos)
        limit = min(len(self.truth) + TOKENS_BEYOND_THE_TRUTH, LONGEST_ANSWER)
        return ended or written >= limit or len(self.prompt) + written > pack_length

    def ask(self) -> Document:
        """Return the prompt with the tokens so far; only its last position is supervised, by any
        token.
        """
        ids = (*self.prompt, *self.tokens)
        self.asked = Document(self.sample, ids, (*[IGNORE] * (len(ids) - 1), 0), self.tilings)
        return self.asked

    def finished(self, tokenizer: PreTrainedTokenizerBase) -> Answer:
        truth = self.truth[:LONGEST_ANSWER]
        given = tokenizer.decode(self.tokens, skip_special_tokens=True).strip()
        true = tokenizer.decode(truth, skip_special_tokens=True).strip()
        if len(truth) < len(self.truth):
            true += " ..."
        is_right = self.tokens == truth
        sample = self.sample
        return Answer(
            sample.key,
            self.question,
            given,
            true,
            is_right,
            sample.images,
        )
