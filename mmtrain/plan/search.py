"""The layout whose simulated step is shortest: cut x stages per rank x recomputation x where the encoder runs.

seeds (the best cut by its slowest rank, the uniform one, the even one) --move a layer to another stage while that is
faster--> a cut for each number of stages a rank --encoder prefetch--> the fastest, unless fewer are as fast

Where there are few cuts, all are tried.

Every step is simulated from the instruction lists that the engine will run, with memory walked on the same lists. A
bound spares most simulations: a rank cannot begin before its first input has passed the ranks before it, works
microbatches x its seconds, and its last gradient must pass them back. The search is deterministic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mmtrain.plan.cut import Cut, best_cut, even_cut, first_trainable_stage, ranges_of, smallest_cut, uniform_cut
from mmtrain.plan.memory import Instant, instants
from mmtrain.plan.prefetch import best_encodes
from mmtrain.plan.schedule import Schedule, training_schedule
from mmtrain.plan.simulate import Program, Simulation, StageSeconds, simulate
from mmtrain.plan.stage_costs import LayerRange, RankNeed, StageCosts

MOST_STAGES_PER_RANK = 4
STAGE_GAIN = 0.01
"""Share of a step that more stages a rank must save: they cost messages, which may be dearer than assumed."""
SIMULATED_INSTRUCTIONS = 500_000
"""Of all moves together, a quarter of a second; the largest layouts then end at a cut that one more move might better.

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


class _Form(NamedTuple):
    """What depends on a layout's form alone."""

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


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout with all that follows from it."""

    cut: Cut
    stages_per_rank: int
    first_trainable_stage: int
    needs: tuple[RankNeed, ...]  # per pipeline rank
    seconds: StageSeconds
    schedule: Schedule
    prefetched: int
    simulation: Simulation

    @property
    def recompute_layers(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(
            self.needs[s % len(self.needs)].recompute_layers[s // len(self.needs)] for s in range(len(self.cut) - 1)
        )


class Search:
    """Looks for layouts with the costs of one run; everything that is costly to make is made once."""

    def __init__(self, costs: StageCosts, prefetch: Literal["auto"] | int) -> None:
        """`prefetch`: how many micro-batches a step begins with encoded; auto: whatever is fastest."""
        self.costs = costs
        self.prefetch = prefetch
        self.pipeline = costs.setting.pipeline
        self.microbatches = costs.setting.microbatches_per_step
        self._forms: dict[tuple[int, int], _Form] = {}
        self._needs: dict[tuple[tuple[int, int], int, tuple[LayerRange, ...]], RankNeed] = {}
        self._left = SIMULATED_INSTRUCTIONS

    # ---- one layout

    def layout(self, cut: Cut) -> Layout:
        """A given cut, each micro-batch encoded right before its forward."""
        form, needs = self._placed(cut)
        seconds = self._stage_seconds(needs, self.costs.timings.encode)
        simulation = simulate(form.program, seconds)
        return Layout(cut, *form[:2], needs, seconds, form.schedule, 0, simulation)

    def fits(self, layout: Layout) -> bool:
        """Whether every rank of it fits."""
        return all(self.costs.fits(need) for need in layout.needs)

    def _placed(self, cut: Cut) -> tuple[_Form, tuple[RankNeed, ...]]:
        """The form of a cut, and what its ranks take."""
        kind = (len(cut) - 1) // self.pipeline, first_trainable_stage(self.costs, cut)
        if kind not in self._forms:
            schedule = training_schedule(self.pipeline, self.microbatches, kind[1], kind[0])
            found = instants(schedule, self.costs.buffers, polls=self.costs.setting.polls_sends)
            self._forms[kind] = _Form(*kind, schedule, Program(schedule), found)
        form, needs = self._forms[kind], []
        for rank in range(self.pipeline):
            ranges = tuple(self.costs.same_range(*layer_range) for layer_range in ranges_of(cut, rank, self.pipeline))
            key = kind, rank, ranges
            if key not in self._needs:
                self._needs[key] = self.costs.need(rank, ranges, form.instants[rank])
            needs.append(self._needs[key])
        return form, tuple(needs)

    def _overflow(self, needs: Sequence[RankNeed]) -> int:
        """Bytes beyond the limit, over all ranks."""
        return sum(max(0, need.total_bytes - self.costs.usable_bytes) for need in needs)

    def _stage_seconds(self, needs: Sequence[RankNeed], encode: float) -> StageSeconds:
        timings, stages = self.costs.timings, range(len(needs) * len(needs[0].stages))
        found = [needs[s % len(needs)].stages[s // len(needs)] for s in stages]
        return StageSeconds(
            forward=tuple(stage.forward for stage in found),
            backward=tuple(stage.backward for stage in found),
            encode=encode,
            send=timings.send,
            receive=timings.receive,
            transfer=timings.transfer,
            end=timings.end,
        )

    # ---- moving layers

    def _bound(self, cut: Cut, encode: float) -> _Bound:
        """What a cut takes at least, without simulation."""
        (stages_per_rank, first, *_), needs = self._placed(cut)
        works = [sum(stage.forward + stage.backward for stage in need.stages) for need in needs]
        works[0] += encode
        ranks = []
        before, behind, downstream = 0.0, 0.0, sum(works)
        for rank, (need, work) in enumerate(zip(needs, works, strict=True)):
            downstream -= work
            least = before + self.microbatches * work + (behind if rank >= first else 0.0)
            pairs = self.microbatches - self.pipeline + rank  # after the first backward, before the last forward
            if stages_per_rank == 1 and rank >= first and pairs >= 0:
                least = max(least, before + behind + (pairs + 1) * work + 2 * downstream)
            ranks.append(least)
            before += need.stages[0].forward + encode * (rank == 0)
            behind += need.stages[0].backward
        seconds = max(ranks) + self.costs.timings.end
        return _Bound(self._overflow(needs), seconds, sum(x * x for x in ranks), tuple(ranks))

    def _score(self, cut: Cut, encode: float, *, must: bool = False) -> _Score | None:
        """None where no more may be simulated, unless it must be."""
        form, needs = self._placed(cut)
        if self._left < len(form.program.steps) and not must:
            return None
        self._left -= len(form.program.steps)
        return _Score(self._overflow(needs), simulate(form.program, self._stage_seconds(needs, encode)).seconds)

    def _moves(self, cut: Cut, bound: _Bound) -> Iterator[Cut]:
        """Cuts with one layer less in one stage and one more in another; of many stages those of the slowest ranks."""
        stages = len(cut) - 1
        slowest = sorted(range(self.pipeline), key=lambda rank: -bound.ranks[rank])
        sources = set(slowest if stages <= FEW_STAGES else slowest[:2])
        for source, target in itertools.permutations(range(stages), 2):
            if source % self.pipeline in sources and cut[source + 1] - cut[source] > 1:
                low, high, step = (source, target, -1) if source < target else (target, source, 1)
                yield tuple(border + step * (low < i <= high) for i, border in enumerate(cut))

    def improve(self, cut: Cut, encode: float) -> tuple[_Score, Cut]:
        """Moves one layer at a time from a cut that may not fit, while its step gets shorter."""
        best = self._score(cut, encode)
        if best is None:
            return _Score(0, math.inf), cut
        moved = True
        while moved:
            moved = False
            limit = best.overflow, best.seconds * (1 - 1e-9)
            options = sorted((self._bound(x, encode), x) for x in self._moves(cut, self._bound(cut, encode)))
            for bound, changed in options if len(cut) <= FEW_STAGES else options[:MOST_TRIALS]:
                score = self._score(changed, encode) if bound[:2] < limit else None
                if score is None:
                    break
                if score < limit:
                    best, cut, moved = score, changed, True
                    break
        return best, cut

    # ---- everything

    def find(self, stages_per_rank: Literal["auto"] | int) -> tuple[Layout, ...]:
        """The fastest layout that fits, of a number of stages a rank or of any; empty if none was found.

        Where it has several stages a rank, the best one with fewer that was found before follows.
        """
        counts = self._possible_counts() if stages_per_rank == "auto" else (stages_per_rank,)
        found: list[Layout] = []
        for count in counts:
            self._left = SIMULATED_INSTRUCTIONS * count // sum(counts)
            best: Layout | None = None
            limit = found[-1].simulation.seconds * (1 - STAGE_GAIN) if found else math.inf
            one_stage = found[0].cut if found and found[0].stages_per_rank == 1 else None
            for cut in self._cuts(count, one_stage, limit):
                if self._without_encoder(cut) >= limit:
                    continue
                layout = self.with_encodes(cut)
                if layout.simulation.seconds < limit and self.fits(layout):
                    best, limit = layout, layout.simulation.seconds
            if best is not None:
                found.append(best)
        return tuple(found[:-3:-1])

    def _without_encoder(self, cut: Cut) -> float:
        """Seconds if the encoder took none of rank 0's: prefetch makes no step shorter than that."""
        form, needs = self._placed(cut)
        encode = 0.0 if self._may_prefetch() else self.costs.timings.encode
        return simulate(form.program, self._stage_seconds(needs, encode)).seconds

    def _possible_counts(self) -> tuple[int, ...]:
        """Stages a rank to try: 1 alone where the idle share of an even cut in 1F1B is less than more must save."""
        if (self.pipeline - 1) / (self.microbatches + self.pipeline - 1) < STAGE_GAIN:
            return (1,)
        return tuple(v for v in range(1, MOST_STAGES_PER_RANK + 1) if v == 1 or v * self.pipeline <= self.costs.count)

    def _cuts(self, stages_per_rank: int, one_stage: Cut | None, limit: float) -> list[Cut]:
        """The best cuts found that fit, with the encoder before each forward, and with it in idle slots."""
        found = []
        encode = self.costs.timings.encode
        counted = (encode, 0.0) if self._may_prefetch() else (encode,)
        share = self._left // len(counted)
        for seconds in counted:
            self._left = share
            score, cut = self.improved(stages_per_rank, seconds, one_stage, limit)
            if score.overflow == 0 and score.seconds < math.inf:
                found.append(cut)
        return list(dict.fromkeys(found))

    def improved(
        self, stages_per_rank: int, encode: float, one_stage: Cut | None = None, limit: float = math.inf
    ) -> tuple[_Score, Cut]:
        """The best of all cuts if they are few, else the best that moves make of some first cuts.

        A first cut that is far beyond `limit` is left as it is.
        """
        stages, decoder = self.pipeline * stages_per_rank, self.costs.count - 2
        if math.comb(decoder + 1, stages - 1) <= FEW_CUTS:
            return self._best_of_all(stages, encode)
        seeds: list[Cut | None] = [best_cut(self.costs) if stages_per_rank == 1 else even_cut(self.costs, stages)]
        if stages <= decoder:
            seeds.append(uniform_cut(decoder, stages))
        if one_stage is not None and stages_per_rank > 1:
            seeds.append(_divided(one_stage, stages_per_rank))
        known: list[tuple[_Score, Cut]] = []
        for seed in dict.fromkeys(seeds):
            score = self._score(seed, encode, must=not known) if seed is not None else None
            if score is not None:
                known.append((score, seed))
        known.sort()
        results = known[:1]
        for score, seed in known[:MOST_SEEDS]:
            if score.overflow or score.seconds < limit * HOPEFUL:
                results.append(self.improve(seed, encode))
        return min(results)

    def _best_of_all(self, stages: int, encode: float) -> tuple[_Score, Cut]:
        """The best of all cuts into so many stages, those with the lowest bound first."""
        borders = itertools.combinations(range(1, self.costs.count), stages - 1)
        cuts = [(0, *inner, self.costs.count) for inner in borders]
        best = _Score(0, math.inf), cuts[0]
        known = False
        for bound, cut in sorted((self._bound(cut, encode), cut) for cut in cuts):
            if known and bound[:2] >= best[0]:
                break
            score = self._score(cut, encode, must=not known)
            if score is None:
                break
            if not known or score < best[0]:
                best, known = (score, cut), True
        return best

    # ---- prefetch

    def _may_prefetch(self) -> bool:
        return self.pipeline > 1 and self.prefetch != 0 and self.costs.costs.encoder.frozen

    def smallest_cut(self, stages_per_rank: int) -> Cut:
        """For what fits nowhere: a cut that comes near."""
        if stages_per_rank == 1:
            return smallest_cut(self.costs)
        return self.improved(stages_per_rank, self.costs.timings.encode)[1]

    def with_encodes(self, cut: Cut) -> Layout:
        """A given cut with the encoder where it is best, as far as memory allows, or as the config asks."""
        layout = self.layout(cut)
        if self.prefetch == 0 or not self.costs.costs.encoder.frozen:
            return layout
        buffered = max(1, self.costs.buffers.features + self.costs.buffers.batch)
        most = self.microbatches if self.prefetch == "auto" else self.prefetch
        if self.prefetch == "auto" and self.costs.usable_bytes < math.inf:
            room = self.costs.usable_bytes - layout.needs[0].total_bytes
            most = min(most, max(0, math.floor(room / buffered)))
        while True:
            found = self._prefetch(layout, most)
            if self.prefetch != "auto" or most == 0 or self.costs.fits(found.needs[0]):
                return found
            most //= 2

    def _prefetch(self, layout: Layout, most: int) -> Layout:
        """The layout with at most `most` micro-batches prefetched; recomputes more only where that is asked for."""
        exactly = None if self.prefetch == "auto" else self.prefetch
        shape = self.pipeline, self.microbatches, layout.first_trainable_stage, layout.stages_per_rank
        schedule, encodes, simulation = best_encodes(*shape, layout.seconds, most, exactly=exactly)
        found = instants(schedule, self.costs.buffers, polls=self.costs.setting.polls_sends)[0]
        seconds, ranges = layout.seconds, ranges_of(layout.cut, 0, self.pipeline)
        need = self.costs.need_of(ranges, layout.needs[0].recompute_layers, found)
        if exactly is not None and not self.costs.fits(need):
            need = self.costs.need(0, ranges, found)
            seconds = self._stage_seconds((need, *layout.needs[1:]), seconds.encode)
            simulation = simulate(Program(schedule), seconds)
        return replace(
            layout,
            needs=(need, *layout.needs[1:]),
            seconds=seconds,
            schedule=schedule,
            prefetched=encodes.prefetched,
            simulation=simulation,
        )


def _divided(cut: Cut, stages_per_rank: int) -> Cut | None:
    """Each rank's layers of a cut with one stage a rank in so many stages; None if a rank has fewer layers."""
    counts = [end - begin for begin, end in itertools.pairwise(cut)]
    if min(counts) < stages_per_rank:
        return None
    # What does not divide goes to late stages, whose activations are kept for less long; the front counts as a layer.
    sizes = [(count + turn) // stages_per_rank for turn in range(stages_per_rank) for count in counts]
    return tuple(itertools.accumulate(sizes, initial=0))
