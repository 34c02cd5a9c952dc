"""Parts of a run's record that are made of several lines of its files."""

from __future__ import annotations

from dataclasses import dataclass

from mmtrain.report.lines import Answer


@dataclass(frozen=True)
class Event:
    """Something that happened in a run, after `step` updates; `at` is in seconds from its begin, None: unknown."""

    kind: str  # begin, resume, checkpoint not saved, bad step, no update, quarantine, end
    step: int
    at: float | None
    text: str = ""
    last: int | None = None  # step of a stretch of quarantine
    samples: int = 0  # of it


@dataclass(frozen=True)
class Question:
    """A held-out question, answered before training and after it; None: not asked then."""

    before: Answer | None
    after: Answer | None

    @property
    def asked(self) -> Answer:
        """What both have: key, question, true answer, pictures."""
        answer = self.after or self.before
        assert answer is not None
        return answer


@dataclass
class RankTime:
    """Seconds of one rank, over the steps that count, and its peak of memory over all steps."""

    compute: float = 0.0
    communication: float = 0.0
    data: float = 0.0
    fetching: float = 0.0
    idle: float = 0.0
    peak_bytes: float = 0.0

    @property
    def window(self) -> float:
        """All of them."""
        return self.compute + self.communication + self.data + self.fetching + self.idle
