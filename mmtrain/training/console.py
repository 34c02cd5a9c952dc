"""Console output of a run: its progress, scores and answers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from mmtrain.base.printing import escape, message, percent, print_info
from mmtrain.base.progress import SECONDS_BETWEEN_LINES, clock, open_bar

if TYPE_CHECKING:  # they bring torch
    from mmtrain.training.answers import Answer, Scores

FIRST_STEPS = 3


class Console:
    """Progress of a run for people: a live bar on a terminal, otherwise lines.

    Lines tell of the first 3 steps, then of one in 5 seconds.

    `stream` is None on ranks that print nothing. Time left is estimated from the steps after the
    first one. Details go to the log, and with `verbose` to the console, too.
    """

    def __init__(
        self,
        stream: TextIO | None,
        max_steps: int,
        done_steps: int = 0,
        verbose: bool = False,
    ) -> None:
        self._stream = stream
        self._verbose = verbose
        self._max_steps = max_steps
        self._first_step = done_steps
        self._printed_at = -math.inf
        self._timed_from: tuple[int, float] | None = None
        self._bar = open_bar(stream, "step", max_steps, done_steps)

    def step(
        self,
        step: int,
        loss: float | None,
        tokens_per_second: float,
        note: str = "",
    ) -> None:
        """Show that `step` (counted from 0) is done; loss in nats per supervised token, None when
        there was none.
        """
        if self._stream is None:
            return
        now = time.monotonic()
        done = step + 1
        if self._timed_from is None:
            self._timed_from = done, now
        left = self._seconds_left(done, now)
        text = f"loss {_number(loss)}  {tokens_per_second:,.0f} tokens/s"
        if left is not None:
            text += f"  ETA {clock(left)}"
        if self._bar is not None:
            self._bar.update(0, completed=done, said=text, note=note)
            return
        early_or_last = step - self._first_step < FIRST_STEPS or done == self._max_steps
        if early_or_last or note or now - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = now
            self.line("  ".join(filter(None, (f"step {done}/{self._max_steps}", text, note))))

    def evaluating(self, done: int, total: int) -> None:
        """Show that `done` of an evaluation's `total` micro-batches are done, at its begin (0), its
        end and between.
        """
        if self._bar is not None:
            note = f"evaluating {done}/{total}" if done < total else ""
            self._bar.update(0, note=note)
        elif done == 0:
            self._printed_at = time.monotonic()
        elif done < total and time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            self.line(f"evaluating: {done} of {total} micro-batches done")

    def evaluation(self, step: int, scores: Scores) -> None:
        self.line(
            f"eval at step {step}: loss {_number(scores.loss)}, exact match "
            f"{percent(scores.exact_match)} of "
            f"{scores.answers} answers, token accuracy {percent(scores.token_accuracy)}"
        )

    def control(
        self,
        control: Scores,
        scores: Scores,
        permuted: int,
    ) -> None:
        """Show the scores with permuted images beside the true ones; `permuted` of the samples got
        other images.
        """
        kept = ""
        if unchanged := scores.samples - permuted:
            kept = f"; {unchanged} of {scores.samples} samples kept theirs"
        self.line(
            f"control with shuffled images: exact match {percent(control.exact_match)} "
            f"(with the right images: {percent(scores.exact_match)}{kept})"
        )

    def answers(self, answers: Sequence[Answer]) -> None:
        """Show held-out questions with the model's answers and the true ones; texts of the data are
        escaped.
        """
        right = sum(answer.right for answer in answers)
        self.line("")
        self.line(f"{len(answers)} held-out questions, answered one token at a time: {right} right")
        for answer in answers:
            mark = "right" if answer.right else "wrong"
            lines = (
                f"  {mark}  {escape(answer.key)}: {escape(answer.question)}",
                f"         given  {escape(answer.given)}",
                f"         true   {escape(answer.truth)}",
            )
            self.line("\n".join(lines))

    def line(self, text: str) -> None:
        text = message(text)
        if self._bar is not None:
            self._bar.console.print(
                text,
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        elif self._stream is not None:
            self._stream.write(text + "\n")

    def detail(self, text: str) -> None:
        if self._stream is not None:
            print_info(text)  # stdout of a rank is the log
            if self._verbose:
                self.line(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _seconds_left(self, done: int, now: float) -> float | None:
        start, started_at = self._timed_from
        if done == self._max_steps:
            return 0.0
        if done == start:
            return None
        return (now - started_at) / (done - start) * (self._max_steps - done)


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"
