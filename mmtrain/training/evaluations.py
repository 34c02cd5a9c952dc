"""What a run does with its held-out samples: scores, the control and answers, recorded and shown."""

from __future__ import annotations

from dataclasses import asdict

from mmtrain.checkpoint.write import Checkpointer
from mmtrain.config.schema import EvalSection
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.runtime.failures import RankProgress
from mmtrain.training.answers import Answer, write_answers
from mmtrain.training.console import Console
from mmtrain.training.evaluator import Evaluator, Scores
from mmtrain.training.held_out import HeldOut
from mmtrain.training.records import Records


def read_held_out(packed: PackedBatches) -> HeldOut:
    """Read the held-out samples of a run, before its weights are loaded: what is wrong with them shows early."""
    return HeldOut(packed)


class Evaluations:
    """The evaluations of a run; every rank calls the same methods in the same order."""

    def __init__(
        self,
        section: EvalSection,
        engine: FrozenPipelineEngine,
        held_out: HeldOut | None,
        progress: RankProgress,
        records: Records,
        console: Console,
        saver: Checkpointer,
    ) -> None:
        """Agree with all ranks on what to evaluate; `held_out` is None on the ranks that read no data."""
        self._section, self._evaluator = section, Evaluator(engine, held_out, progress, console.evaluating)
        self._records, self._console, self._saver = records, console, saver
        console.line(self._evaluator.extent.summary)

    def make(self, step: int) -> bool:
        """Evaluate after `step` updates, before the first one with answers; False if the run is to stop.

        All of it is recorded then, or nothing: a run that was stopped here goes on with all of it.
        """
        before = self._answer("before the first step, to compare") if step == 0 else []
        if self._stops or self._evaluate(step) is None:
            return False
        self._records.answers(step, before)
        return True

    def make_last(self, step: int) -> bool:
        """Evaluate, see whether the model needs to look at the images for that, and answer; False as `make` says."""
        scores = self._evaluate(step)
        if self._section.permuted_control and scores is not None:
            self._control(step, scores)
        if not self._stops and (answers := self._answer()):
            self._console.answers(answers)
            self._records.answers(step, answers)
        return not self._stops

    @property
    def _stops(self) -> bool:
        return self._evaluator.engine.requested_stop

    def _evaluate(self, step: int) -> Scores | None:
        """Evaluate and record after `step` updates; None if the run is to stop."""
        scores = self._evaluator.scores()
        if scores is not None:
            self._records.write("eval", step=step, **asdict(scores))
            self._console.evaluation(step, scores)
            self._saver.scored(step, asdict(scores))
        return scores

    def _control(self, step: int, scores: Scores) -> None:
        """Evaluate with the images permuted among the samples, and record that beside the true `scores`."""
        permuted = self._evaluator.extent.permuted
        if permuted == 0:
            text_alone = self._evaluator.engine.plan.vision is None
            why = "text alone has no images" if text_alone else "no held-out sample has another image to take"
            self._console.line(f"the control is left out: {why}")
            return
        control = self._evaluator.scores(permuted=True)
        if control is not None:
            self._records.write("eval_permuted", step=step, **asdict(control), permuted_samples=permuted)
            self._console.control(control, scores, permuted)

    def _answer(self, when: str = "") -> list[Answer]:
        """Answers to some held-out questions, on ranks that read data; none if the run is to stop."""
        if not self._section.show_answers:
            return []
        what = " ".join(filter(None, ("answering held-out questions", when)))
        self._console.line(f"{what}: one forward of the pipeline for each token")
        return write_answers(self._evaluator, self._section.show_answers)
