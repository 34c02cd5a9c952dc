"""How good the model is on held-out samples, measured through the pipeline.

packs --replicas' shares--> micro-batches --engine.evaluate, round by round--> sums over all replicas --> Scores

Every rank takes part in everything here: all construct the same objects and call the same methods in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.errors import UserError
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.statistics import Statistics
from mmtrain.plan.instructions import Instruction
from mmtrain.plan.placement import EVALUATION_ROUND
from mmtrain.runtime.failures import RankProgress
from mmtrain.training.held_out import Extent, HeldOut


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


class Evaluator:
    """Evaluates the engine's model; `held_out` is None on the ranks that read no data.

    `show` is called with (micro-batches done, of all) as an evaluation goes on; `progress` gets the current work.
    """

    def __init__(
        self,
        engine: FrozenPipelineEngine,
        held_out: HeldOut | None,
        progress: RankProgress,
        show: Callable[[int, int], None],
    ) -> None:
        """Agree with all ranks on what to evaluate; raises UserError where they have read different samples."""
        self.engine = engine
        self.held_out = held_out
        self.progress = progress
        self.show = show
        extents = all_gather_object(None if held_out is None else held_out.extent)
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
        total, in_round = self.extent.microbatches, EVALUATION_ROUND * self.engine.plan.pipeline
        rounds = []
        for done in range(0, total, in_round):
            self.show(done, total)
            rounds.append(self.evaluate(f"{what}, {done} of {total} done", batches, min(in_round, total - done)))
            if self.engine.requested_stop:
                return None
        self.show(total, total)
        sums = Statistics(*map(sum, zip(*rounds, strict=True)))
        tokens = sums.supervised_tokens
        return Scores(
            loss=sums.loss_sum / tokens if tokens else None,
            token_accuracy=sums.correct_tokens / tokens if tokens else None,
            exact_match=sums.exact_answers / sums.answers if sums.answers else None,
            answers=int(sums.answers),
            samples=self.extent.samples,
            seconds=time.perf_counter() - start,
        )

    def evaluate(self, what: str, batches: Iterator[PackedBatch] | None, microbatches: int) -> Statistics:
        """The engine's evaluation, recorded as part of `what`: a failure then is known to be in it."""
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

    def predicted(self) -> list[int]:
        """All predicted tokens of the last engine.evaluate, in the order of its packs."""
        mine = self.engine.plan.ranks[dist.get_rank()]
        said = [token for _, tokens in sorted(self.engine.predicted.items()) for token in tokens.tolist()]
        by_rank = all_gather_object((mine.pipeline, mine.data, said))
        last = (replica for replica in by_rank if replica[0] == self.engine.plan.pipeline - 1)
        return [token for *_, tokens in sorted(last) for token in tokens]
