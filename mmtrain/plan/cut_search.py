"""The cuts whose simulated steps are shortest, before it is said where the encoder runs.

seeds (the best cut by its slowest rank, the uniform one, the even one, the front alone on stage 0) --move a layer to
another stage while that is faster--> the best cut for each way in which the encoder may count (`Charge`)

Where there are few cuts, all are tried. A bound spares most simulations: a rank cannot begin before its first input has
passed the ranks before it, works microbatches x its seconds, and its last gradient must pass them back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mmtrain.plan.cut import Cut, best_cut, even_cut, first_trainable_stage, ranges_of, smallest_cut, uniform_cut
from mmtrain.plan.instructions import Schedule
from mmtrain.plan.memory import Instant, instants
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.simulate import Program, StageSeconds, simulate
from mmtrain.plan.stage_costs import LayerRange, RankNeed, StageCosts

SIMULATED_INSTRUCTIONS = 2_000_000
"""Of all moves of one search, with the encoder on rank 0 or in slices: a fraction of a second. The largest layouts then
end at a cut that one more move might better.

The first cut of each kind is simulated in any case."""
FEW_CUTS = 400
"""So many are all tried."""
FEW_STAGES = 12
"""Of so many all layers are moved anywhere, else those of the two slowest ranks."""
MOST_SEEDS = 3
HOPEFUL = 1.08
"""Times the step to beat: a first cut that is slower is not worth moves."""
MOST_TRIALS = 16
"""Moves simulated before a cut counts as the best of its neighbours, those with the lowest bound first."""

Slices = tuple[int, ...]
"""Blocks of the encoder that each pipeline rank holds."""


class Charge(NamedTuple):
    """What the encoder counts for while cuts are compared."""

    seconds: float  # of rank 0, for each micro-batch
    slices: Slices  # whose weights count


class Form(NamedTuple):
    """What depends on a layout's form alone; the encoder runs on rank 0, right before each forward."""

    stages_per_rank: int
    first_trainable_stage: int
    schedule: Schedule
    program: Program
    instants: tuple[tuple[Instant, ...], ...]  # per rank


class _Bound(NamedTuple):
    """What a cut takes at least, to be compared in this order."""

    overflow: int  # bytes beyond the limit, over all ranks
    seconds: float
    squares: float  # of ranks' seconds, so that descending does not stop at the first of several slow ranks
    ranks: tuple[float, ...]


class _Score(NamedTuple):
    """How good a cut is; less is better, and what does not fit is worst."""

    overflow: int  # bytes beyond the limit, over all ranks
    seconds: float


class CutSearch:
    """Looks for cuts with the costs of one run; everything that is costly to make is made once."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self.pipeline = costs.setting.pipeline
        self.microbatches = costs.setting.microbatches_per_step
        self.alone: Slices = (costs.costs.encoder.blocks, *[0] * (self.pipeline - 1))
        """The whole encoder on rank 0."""
        self.left = SIMULATED_INSTRUCTIONS
        """Instructions that may still be simulated."""
        self._forms: dict[tuple[int, int], Form] = {}
        self._needs: dict[tuple[tuple[int, int], int, tuple[LayerRange, ...], int], RankNeed] = {}

    def placed(self, cut: Cut, slices: Slices) -> tuple[Form, tuple[RankNeed, ...]]:
        """The form of a cut, and what its ranks take with these slices, nothing being encoded ahead."""
        kind = (len(cut) - 1) // self.pipeline, first_trainable_stage(self.costs, cut)
        if kind not in self._forms:
            schedule = training_schedule(self.pipeline, self.microbatches, kind[1], kind[0])
            found = instants(schedule, self.costs.buffers, polls=self.costs.setting.polls_sends)
            self._forms[kind] = Form(*kind, schedule, Program(schedule), found)
        form, needs = self._forms[kind], []
        for rank in range(self.pipeline):
            ranges = tuple(self.costs.same_range(*layer_range) for layer_range in ranges_of(cut, rank, self.pipeline))
            blocks = slices[rank]
            key = kind, rank, ranges, blocks
            if key not in self._needs:
                self._needs[key] = self.costs.need(rank, ranges, form.instants[rank], blocks)
            needs.append(self._needs[key])
        return form, tuple(needs)

    def overflow(self, needs: Sequence[RankNeed]) -> int:
        """Bytes beyond the limit, over all ranks."""
        return sum(map(self.costs.overflow, needs))

    def stage_seconds(self, needs: Sequence[RankNeed], encode: float | Sequence[float]) -> StageSeconds:
        """`encode`: seconds of the encoder on rank 0, or of the slice of each rank."""
        if isinstance(encode, float):
            encode = (encode, *[0.0] * (self.pipeline - 1))
        timings, stages = self.costs.timings, range(len(needs) * len(needs[0].stages))
        found = [needs[s % len(needs)].stages[s // len(needs)] for s in stages]
        streams = any(need.streamed for need in needs)
        return StageSeconds(
            forward=tuple(stage.forward for stage in found),
            backward=tuple(stage.backward for stage in found),
            encode=tuple(encode),
            send=timings.send,
            receive=timings.receive,
            transfer=timings.transfer,
            end=timings.end,
            send_features=timings.send_features,
            receive_features=timings.receive_features,
            transfer_features=timings.transfer_features,
            forward_waits=tuple(stage.forward_waits for stage in found) if streams else (),
            backward_waits=tuple(stage.backward_waits for stage in found) if streams else (),
        )

    # ---- moving layers

    def _bound(self, cut: Cut, charge: Charge) -> _Bound:
        """What a cut takes at least, without simulation."""
        (stages_per_rank, first, *_), needs = self.placed(cut, charge.slices)
        works = [sum(stage.seconds for stage in need.stages) for need in needs]
        works[0] += charge.seconds
        ranks = []
        before, behind, downstream = 0.0, 0.0, sum(works)
        for rank, (need, work) in enumerate(zip(needs, works, strict=True)):
            downstream -= work
            least = before + self.microbatches * work + (behind if rank >= first else 0.0)
            pairs = self.microbatches - self.pipeline + rank  # after the first backward, before the last forward
            if stages_per_rank == 1 and rank >= first and pairs >= 0:
                least = max(least, before + behind + (pairs + 1) * work + 2 * downstream)
            ranks.append(least)
            before += need.stages[0].forward + charge.seconds * (rank == 0)
            behind += need.stages[0].backward
        seconds = max(ranks) + self.costs.timings.end
        return _Bound(self.overflow(needs), seconds, sum(x * x for x in ranks), tuple(ranks))

    def _score(self, cut: Cut, charge: Charge, *, must: bool = False) -> _Score | None:
        """None where no more may be simulated, unless it must be."""
        form, needs = self.placed(cut, charge.slices)
        if self.left < len(form.program.steps) and not must:
            return None
        self.left -= len(form.program.steps)
        return _Score(self.overflow(needs), simulate(form.program, self.stage_seconds(needs, charge.seconds)).seconds)

    def _moves(self, cut: Cut, bound: _Bound) -> Iterator[Cut]:
        """Cuts with one layer less in one stage and one more in another; of many stages those of the slowest ranks."""
        stages = len(cut) - 1
        slowest = sorted(range(self.pipeline), key=lambda rank: -bound.ranks[rank])
        sources = set(slowest if stages <= FEW_STAGES else slowest[:2])
        for source, target in itertools.permutations(range(stages), 2):
            if source % self.pipeline in sources and cut[source + 1] - cut[source] > 1:
                low, high, step = (source, target, -1) if source < target else (target, source, 1)
                yield tuple(border + step * (low < i <= high) for i, border in enumerate(cut))

    def _improve(self, cut: Cut, charge: Charge) -> tuple[_Score, Cut]:
        """Moves one layer at a time from a cut that may not fit, while its step gets shorter."""
        best = self._score(cut, charge)
        if best is None:
            return _Score(0, math.inf), cut
        moved = True
        while moved:
            moved = False
            limit = best.overflow, best.seconds * (1 - 1e-9)
            options = sorted((self._bound(x, charge), x) for x in self._moves(cut, self._bound(cut, charge)))
            for bound, changed in options if len(cut) <= FEW_STAGES else options[:MOST_TRIALS]:
                score = self._score(changed, charge) if bound[:2] < limit else None
                if score is None:
                    break
                if score < limit:
                    best, cut, moved = score, changed, True
                    break
        return best, cut

    # ---- the best

    def candidates(
        self, stages_per_rank: int, charge: Charge, one_stage: Cut | None = None, limit: float = math.inf
    ) -> list[Cut]:
        """Cuts that fit and are worth a closer look: the best one found, and the front alone on stage 0."""
        (score, cut), *others = self._find(stages_per_rank, charge, one_stage, limit)
        return [x for score, x in [(score, cut), *others] if score.overflow == 0 and score.seconds < math.inf]

    def roomy(self, slices: Slices) -> list[Cut]:
        """Cuts, one stage a rank, of which one may fit though no candidate did: all if they are few, the smallest."""
        if self._are_few(self.pipeline):
            return self._all(self.pipeline)
        return [smallest_cut(self.costs, slices)]

    def _are_few(self, stages: int) -> bool:
        return math.comb(self.costs.count - 1, stages - 1) <= FEW_CUTS

    def _all(self, stages: int) -> list[Cut]:
        borders = itertools.combinations(range(1, self.costs.count), stages - 1)
        return [(0, *inner, self.costs.count) for inner in borders]

    def smallest_cut(self, stages_per_rank: int, slices: Slices) -> Cut:
        """For what fits nowhere: a cut that comes near."""
        if stages_per_rank == 1:
            return smallest_cut(self.costs, slices)
        encode = self.costs.timings.encode if slices == self.alone else 0.0
        return self._find(stages_per_rank, Charge(encode, slices))[0][1]

    def _find(
        self, stages_per_rank: int, charge: Charge, one_stage: Cut | None = None, limit: float = math.inf
    ) -> list[tuple[_Score, Cut]]:
        """The best of all cuts if they are few, else the best that moves make of some first cuts; the front alone.

        A first cut that is far beyond `limit` is left as it is.
        """
        stages, decoder = self.pipeline * stages_per_rank, self.costs.count - 2
        if self._are_few(stages):
            return [self._best_of_all(stages, charge)]
        seeds: list[Cut | None] = [even_cut(self.costs, stages, charge.seconds)]
        if stages_per_rank == 1:
            seeds.append(best_cut(self.costs, charge.slices))
        alone = even_cut(self.costs, stages, charge.seconds, front_alone=True) if stages <= decoder + 1 else None
        seeds.append(alone)
        if stages <= decoder:
            seeds.append(uniform_cut(decoder, stages))
        if one_stage is not None and stages_per_rank > 1:
            seeds.append(_divided(one_stage, stages_per_rank))
        known: list[tuple[_Score, Cut]] = []
        for seed in dict.fromkeys(seeds):
            score = self._score(seed, charge, must=not known) if seed is not None else None
            if score is not None:
                known.append((score, seed))
        known.sort()
        results = known[:1]
        for score, seed in known[:MOST_SEEDS]:
            if score.overflow or score.seconds < limit * HOPEFUL:
                results.append(self._improve(seed, charge))
        best = min(results)
        return [best, *(pair for pair in known if pair[1] == alone != best[1])]

    def _best_of_all(self, stages: int, charge: Charge) -> tuple[_Score, Cut]:
        """The best of all cuts into so many stages, those with the lowest bound first."""
        cuts = self._all(stages)
        best = _Score(0, math.inf), cuts[0]
        known = False
        for bound, cut in sorted((self._bound(cut, charge), cut) for cut in cuts):
            if known and bound[:2] >= best[0]:
                break
            score = self._score(cut, charge, must=not known)
            if score is None:
                break
            if not known or score < best[0]:
                best, known = (score, cut), True
        return best


def _divided(cut: Cut, stages_per_rank: int) -> Cut | None:
    """Each rank's layers of a cut with one stage a rank in so many stages; None if a rank has fewer layers."""
    counts = [end - begin for begin, end in itertools.pairwise(cut)]
    if min(counts) < stages_per_rank:
        return None
    # What does not divide goes to late stages, whose activations are kept for less long; the front counts as a layer.
    sizes = [(count + turn) // stages_per_rank for turn in range(stages_per_rank) for count in counts]
    return tuple(itertools.accumulate(sizes, initial=0))
