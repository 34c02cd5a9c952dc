"""What an evaluation finds, as records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scores:
    """One evaluation, the same on every rank; what has nothing to be a share of is None.

    `loss` is in nats per supervised token; `token_accuracy` is the share of supervised tokens that are the arg max
    given the true tokens before them; `exact_match` the share of answers of which every token is, end mark included.
    """

    loss: float | None
    token_accuracy: float | None
    exact_match: float | None
    answers: int
    samples: int
    seconds: float


@dataclass(frozen=True)
class Answer:
    """A held-out question, what the model said and what it should have said; `right` compares all tokens."""

    key: str
    question: str
    given: str
    truth: str
    right: bool
