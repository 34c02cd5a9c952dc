"""Evaluation on held-out samples through the pipeline, recorded and shown.

packs --replicas' shares--> micro-batches --engine.evaluate, round by round--> sums over all
    replicas --> Scores

Every rank constructs the same objects here and calls the same methods in the same order.
"""

import time
from dataclasses import asdict

import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.write import Checkpointer
from mmtrain.config.schema import EvalSection
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.statistics import Statistics
from mmtrain.plan.placement import EVALUATION_ROUND
from mmtrain.training.answers import Answer, Scores, Writing
from mmtrain.training.console import Console
from mmtrain.training.held_out import HeldOut, pack_documents
from mmtrain.training.records import Records


class Evaluations:
    """The evaluations of a run: scores, the control with permuted images, and answers.

    `held_out` is None on the ranks that read no data.
    """

    def __init__(
        self,
        section: EvalSection,
        engine: FrozenPipelineEngine,
        held_out: HeldOut | None,
        records: Records,
        console: Console,
        saver: Checkpointer,
    ) -> None:
        """Agree with all ranks on what to evaluate; raises UserError where they have read different
        samples.
        """
        self._section = section
        self._engine = engine
        self._held_out = held_out
        self._records = records
        self._console = console
        self._saver = saver
        extents = all_gather_object(held_out and held_out.extent)
        self.extent = extents[0]
        for rank, extent in enumerate(extents):
            # they would wait for each other for ever, or score in silence
            if extent not in (None, self.extent):
                raise UserError(
                    f"eval.shards: ranks 0 and {rank} have read different samples "
                    f"({self.extent.samples} and {extent.samples}). "
                    "The files must be equal on every machine"
                )
        console.line(self.extent.summary)

    def make(self, step: int) -> bool:
        """Evaluate after `step` updates, before the first one with answers; return False if the run
        is to stop.

        All of it is recorded or nothing: a run that stops in between makes all of it again.
        """
        before = []
        if step == 0:
            before = self._answer("before the first step, to compare them with those at the end")
        if self._engine.requested_stop or self._evaluate(step) is None:
            return False
        self._records.answers(step, before)
        return True

    def make_last(self, step: int) -> bool:
        """Evaluate, then with permuted images, then answer questions; return False if the run is to
        stop.
        """
        scores = self._evaluate(step)
        if self._section.permuted_control and scores is not None:
            self._control(step, scores)
        if not self._engine.requested_stop and (answers := self._answer()):
            self._console.answers(answers)
            self._records.answers(step, answers)
        return not self._engine.requested_stop

    def _evaluate(self, step: int) -> Scores | None:
        scores = self.scores()
        if scores is not None:
            self._records.write("eval", step=step, **asdict(scores))
            self._console.evaluation(step, scores)
            self._saver.scored(step, asdict(scores))
        return scores

    def _control(self, step: int, scores: Scores) -> None:
        """Evaluate with the images permuted among the samples, and record that beside the true
        `scores`.
        """
        permuted = self.extent.permuted
        if permuted == 0:
            self._console.line(
                "the control is left out: no held-out sample can take another one's image"
            )
            return
        control = self.scores(permuted=True)
        if control is not None:
            self._records.write(
                "eval_permuted",
                step=step,
                **asdict(control),
                permuted_samples=permuted,
            )
            self._console.control(control, scores, permuted)

    def _answer(self, when: str = "at the end") -> list[Answer]:
        if not self._section.show_answers:
            return []
        self._console.detail(f"answering held-out questions {when}")
        return self.answers(self._section.show_answers)

    def scores(self, *, permuted: bool = False) -> Scores | None:
        """Evaluate all held-out samples once; `permuted`, as a control, with images permuted among
        them.

        Returns None, on every rank, after the round in which the engine was requested to stop.
        """
        start = time.perf_counter()
        batches = None
        if self._held_out is not None:
            packs = self._held_out.packs
            if permuted:
                packs = self._held_out.packs_permuted
            batches = self._held_out.batches(self._held_out.share(packs))
        total = self.extent.microbatches
        in_round = EVALUATION_ROUND * self._engine.plan.pipeline
        rounds = []
        for done in range(0, total, in_round):
            self._console.evaluating(done, total)
            rounds.append(self._engine.evaluate(batches, min(in_round, total - done)))
            if self._engine.requested_stop:
                return None
        self._console.evaluating(total, total)
        sums = Statistics(*map(sum, zip(*rounds, strict=True)))
        return Scores(
            loss=_mean(sums.loss_sum, sums.supervised_tokens),
            token_accuracy=_mean(sums.correct_tokens, sums.supervised_tokens),
            exact_match=_mean(sums.exact_answers, sums.answers),
            answers=int(sums.answers),
            samples=self.extent.samples,
            seconds=time.perf_counter() - start,
        )

    def answers(self, count: int) -> list[Answer]:
        """Let the model answer the first question of `count` held-out samples by greedy decoding.

        Returns the answers on ranks that read data; an empty list elsewhere, and on every rank
        after the token at which the engine was requested to stop. Cost: one forward of all
        unfinished answers for each token.
        """
        held_out = self._held_out
        answers: list[Writing] = []
        if held_out is not None:
            tokenizer = held_out.packed.processor.tokenizer
            room = held_out.capacity.tokens
            for document in held_out.spread(count):
                answers.append(Writing(document, tokenizer.eos_token_id))

        # each round writes one token of every answer that is not finished
        while True:
            batches, microbatches, asked = None, None, []
            if held_out is not None:
                unfinished = [answer for answer in answers if not answer.is_finished(room)]
                documents = [answer.ask() for answer in unfinished]
                packs = pack_documents(documents, held_out.capacity)
                for pack in packs:
                    asked += pack.entries
                share = held_out.share(packs)
                batches = held_out.batches(share)
                microbatches = len(share)

            microbatches = all_gather_object(microbatches)[0]
            if not microbatches:
                return [answer.finished(tokenizer) for answer in answers]
            self._engine.evaluate(batches, microbatches)
            if self._engine.requested_stop:
                return []

            predicted = self.predicted()
            if not asked:
                continue
            for document, token in zip(asked, predicted, strict=True):
                next(answer for answer in answers if answer.asked is document).tokens.append(token)

    def predicted(self) -> list[int]:
        """Return all predicted tokens of the engine's last `evaluate`, in the order of its
        packs.
        """
        place = self._engine.plan.ranks[dist.get_rank()]
        here = []
        for _, tokens in sorted(self._engine.predicted.items()):
            here += tokens.tolist()
        predicted = []
        last = self._engine.plan.pipeline - 1
        for pipeline, _, tokens in sorted(all_gather_object((place.pipeline, place.data, here))):
            if pipeline == last:
                predicted += tokens
        return predicted


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None
