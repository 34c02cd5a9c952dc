"""Cuts: which layers each stage holds, and the cuts whose simulated steps are shortest.

first cuts (the even, the uniform one, the front alone on stage 0)
    --move one layer to another stage while the step gets shorter--> the best cut

A cut is contiguous: stage s holds layers [cut[s], cut[s + 1]). Layer 0 is the front, the last one
the head. How the encoder counts while cuts are compared is an `EncoderShare`; where it runs is
chosen later (`search`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mmtrain.plan.instructions import Schedule
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.simulate import Instant, Program, StageSeconds, instants, simulate
from mmtrain.plan.stage_costs import Ranges, RankCost, StageCosts

SIMULATED_INSTRUCTIONS = 2_000_000
"""In all moves of one search: a fraction of a second. The largest layouts then end at a cut that
one more move might better. The first cut of each search is simulated in any case."""
FEW_STAGES = 12
"""With at most this many stages all layers may move, else those of the two slowest ranks. With the
latter alone 3 of 227 runs are refused, and others take up to 2.9% longer."""
HOPEFUL = 1.08
"""Times the step to beat: a slower first cut is not improved. Spares most of the time that planning
would take.
"""
MOST_TRIALS = 16
"""Moves simulated before a cut of many stages counts as better than all its neighbours, the lowest
bound first.
"""

Cut = tuple[int, ...]
"""Borders of stages, one more than stages."""
Slices = tuple[int, ...]
"""Blocks of the encoder that each pipeline rank holds."""


def given_cut(boundaries: Sequence[int], costs: StageCosts) -> Cut:
    return (0, *(boundary + 1 for boundary in boundaries), costs.count)


def boundaries_of(cut: Cut) -> tuple[int, ...]:
    """Return the decoder layers at which stage 1, 2, ... begin."""
    return tuple(border - 1 for border in cut[1:-1])


def ranges_of(cut: Cut, rank: int, pipeline: int) -> Ranges:
    return tuple(itertools.pairwise(cut))[rank::pipeline]


def first_trainable_stage(costs: StageCosts, cut: Cut) -> int:
    return next(stage for stage, end in enumerate(cut[1:]) if costs.first_trainable < end)


# ---- cuts by formula


def uniform_cut(decoder_layers: int, stages: int) -> Cut:
    """The decoder layers in equal parts, front and head on top; needs as many decoder layers as
    stages.
    """
    inner = [round(decoder_layers * stage / stages) + 1 for stage in range(1, stages)]
    return (0, *inner, decoder_layers + 2)


def even_cut(
    costs: StageCosts,
    stages: int,
    encode: float,
    *,
    front_alone: bool = False,
) -> Cut:
    """Return the cut whose slowest stage takes the fewest seconds, without regard to memory and
    recomputation.

    The encoder counts for `encode` seconds on stage 0; `front_alone`: stage 0 holds the front and
    nothing else. By dynamic programming over stages; of equally fast cuts the one whose late stages
    hold the most layers.
    """
    layers = costs.count
    least = costs.costs.first_layers
    # before each stage: end -> (seconds, begin of the last)
    rows: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(stages):
        row: dict[int, tuple[float, int]] = {}
        ends = range(stage + least, layers - stages + stage + 2)
        if stage == stages - 1:
            ends = range(layers, layers + 1)
        if front_alone and stage == 0:
            ends = range(1, 2)
        for end in ends:
            best = math.inf, 0
            for begin in range(end - 1, stage - 1, -1):
                cost = costs.stage(begin, end, 0)
                seconds = cost.forward + cost.backward
                if begin == 0:
                    seconds += encode
                if seconds > best[0]:  # and so is a stage with more layers
                    break
                if begin in rows[-1]:
                    slowest = max(rows[-1][begin][0], seconds)
                    if slowest <= best[0]:
                        best = slowest, begin
            row[end] = best
        rows.append(row)

    borders = [layers]
    for row in reversed(rows[1:]):
        borders.append(row[borders[-1]][1])
    return tuple(reversed(borders))


# ---- cuts by simulation


class EncoderShare(NamedTuple):
    """The seconds and weights of the encoder that count while cuts are compared."""

    seconds: float  # of rank 0, for each micro-batch
    slices: Slices  # whose weights count


class PlainSchedule(NamedTuple):
    """The lists of all cuts with this shape; the encoder is on rank 0 and runs right before each
    forward.
    """

    stages_per_rank: int
    first_trainable_stage: int
    schedule: Schedule
    program: Program
    instants: tuple[tuple[Instant, ...], ...]  # per rank


class _Bound(NamedTuple):
    """Lower bounds of a cut, compared in this order."""

    overflow: int  # bytes beyond the limit, over all ranks
    seconds: float
    # of ranks' seconds, so that moves do not stop at the first of several slow ranks
    squares: float
    ranks: tuple[float, ...]


class _Score(NamedTuple):
    """Sort key of a cut: less is better, and a cut that does not fit is worst."""

    overflow: int  # bytes beyond the limit, over all ranks
    seconds: float


class Cuts:
    """The cuts of one run: what their ranks cost, and the best of them. What is costly to make is
    made once.
    """

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self.pipeline = costs.setting.pipeline
        self.microbatches = costs.setting.microbatches_per_step
        self.whole: Slices = (costs.costs.encoder.blocks, *[0] * (self.pipeline - 1))
        self.instructions_left = SIMULATED_INSTRUCTIONS  # that may still be simulated
        self._plain: dict[tuple[int, int], PlainSchedule] = {}
        self._ranks: dict[tuple[tuple[int, int], int, Ranges, int], RankCost] = {}

    def placed(self, cut: Cut, slices: Slices) -> tuple[PlainSchedule, tuple[RankCost, ...]]:
        """Return the plain schedule of a cut, and what its ranks cost with these slices if nothing
        is encoded ahead.
        """
        kind = (len(cut) - 1) // self.pipeline, first_trainable_stage(self.costs, cut)
        if kind not in self._plain:
            schedule = training_schedule(self.pipeline, self.microbatches, kind[1], kind[0])
            moments = instants(schedule, self.costs.buffers, polls=self.costs.setting.polls_sends)
            self._plain[kind] = PlainSchedule(*kind, schedule, Program(schedule), moments)
        plain = self._plain[kind]

        ranks = []
        for rank, blocks in enumerate(slices):
            own = ranges_of(cut, rank, self.pipeline)
            ranges = tuple(self.costs.same_range(begin, end) for begin, end in own)
            key = kind, rank, ranges, blocks
            if key not in self._ranks:
                self._ranks[key] = self.costs.fitted(rank, ranges, plain.instants[rank], blocks)
            ranks.append(self._ranks[key])
        return plain, tuple(ranks)

    def overflow(self, ranks: Sequence[RankCost]) -> int:
        return sum(map(self.costs.overflow, ranks))

    def stage_seconds(self, ranks: Sequence[RankCost], encode: Sequence[float]) -> StageSeconds:
        timings = self.costs.timings
        turns = zip(*(rank.stages for rank in ranks), strict=True)
        stages = [*itertools.chain.from_iterable(turns)]
        # the columns of StageCost, without its bytes
        forward, backward, _, *waits = zip(*stages, strict=True)
        if not any(rank.streamed for rank in ranks):
            waits = [(), ()]
        return StageSeconds(
            forward,
            backward,
            tuple(encode),
            timings.messages,
            timings.features,
            timings.end,
            *waits,
        )

    def plain_seconds(self, cut: Cut, share: EncoderShare) -> float:
        plain, ranks = self.placed(cut, share.slices)
        encode = share.seconds, *[0.0] * (self.pipeline - 1)
        return simulate(plain.program, self.stage_seconds(ranks, encode)).seconds

    def ranked(
        self,
        stages_per_rank: int,
        share: EncoderShare,
        limit: float = math.inf,
    ) -> list[tuple[_Score, Cut]]:
        """Return the best cut that moves make of first cuts, then the front alone; `limit`: seconds
        of a step to beat.

        The best may not fit: it then exceeds the memory limit by the fewest bytes.
        """
        stages = self.pipeline * stages_per_rank
        decoder = self.costs.count - 2
        least = self.costs.costs.first_layers
        seeds = [even_cut(self.costs, stages, share.seconds)]
        alone = None
        # saves 4% to 6% where an encoder of a third of the work stays on rank 0
        if least == 1 < stages <= decoder + 1:
            alone = even_cut(self.costs, stages, share.seconds, front_alone=True)
            seeds.append(alone)
        if stages <= decoder and uniform_cut(decoder, stages)[1] >= least:
            seeds.append(uniform_cut(decoder, stages))

        scored: list[tuple[_Score, Cut]] = []
        for seed in dict.fromkeys(seeds):
            score = self._score(seed, share, must=not scored)
            if score is not None:
                scored.append((score, seed))
        scored.sort()
        best = scored[0]
        for score, seed in scored:
            if score.overflow or score.seconds < limit * HOPEFUL:
                best = min(best, self._improved(seed, share))
        return [best, *(pair for pair in scored if pair[1] == alone != best[1])]

    def _improved(self, cut: Cut, share: EncoderShare) -> tuple[_Score, Cut]:
        """Move one layer at a time from a cut that may not fit, while its step gets shorter."""
        best = self._score(cut, share)
        if best is None:
            return _Score(0, math.inf), cut
        moved = True
        while moved:
            moved = False
            limit = best.overflow, best.seconds * (1 - 1e-9)
            moves = self._moves(cut, self._bound(cut, share))
            options = sorted((self._bound(x, share), x) for x in moves)
            if len(cut) > FEW_STAGES:
                options = options[:MOST_TRIALS]
            for bound, changed in options:
                if bound[:2] >= limit:
                    break
                score = self._score(changed, share)
                if score is None:
                    break
                if score < limit:
                    best = score
                    cut = changed
                    moved = True
                    break
        return best, cut

    def _moves(self, cut: Cut, bound: _Bound) -> Iterator[Cut]:
        """Yield cuts with one layer less in one stage and one more in another; of many stages those
        of slow ranks.
        """
        stages = len(cut) - 1
        sources = sorted(range(self.pipeline), key=lambda rank: -bound.ranks[rank])
        if stages > FEW_STAGES:
            sources = sources[:2]
        for source, target in itertools.permutations(range(stages), 2):
            least = 1 if source else self.costs.costs.first_layers
            may_give = cut[source + 1] - cut[source] > least
            if source % self.pipeline in sources and may_give:
                moved = [*cut]
                for border in range(source + 1, target + 1):
                    moved[border] -= 1
                for border in range(target + 1, source + 1):
                    moved[border] += 1
                yield tuple(moved)

    def _bound(self, cut: Cut, share: EncoderShare) -> _Bound:
        """Return lower bounds of a cut, without simulation.

        A rank waits until its first input has passed the ranks before it, then works; so does its
        last gradient.
        """
        (stages_per_rank, first, *_), costs = self.placed(cut, share.slices)
        works = [sum(stage.seconds for stage in rank.stages) for rank in costs]
        works[0] += share.seconds
        ranks = []
        before = behind = 0.0
        downstream = sum(works)
        for rank, (cost, work) in enumerate(zip(costs, works, strict=True)):
            downstream -= work
            least = before + self.microbatches * work
            if rank >= first:
                least += behind
            # after the first backward, before the last forward
            pairs = self.microbatches - self.pipeline + rank
            if stages_per_rank == 1 and rank >= first and pairs >= 0:
                least = max(least, before + behind + (pairs + 1) * work + 2 * downstream)
            ranks.append(least)
            before += cost.stages[0].forward
            if rank == 0:
                before += share.seconds
            behind += cost.stages[0].backward
        seconds = max(ranks) + self.costs.timings.end
        return _Bound(self.overflow(costs), seconds, sum(x * x for x in ranks), tuple(ranks))

    def _score(self, cut: Cut, share: EncoderShare, *, must: bool = False) -> _Score | None:
        """Simulate a cut; None if no more may be simulated, unless it must be."""
        plain, ranks = self.placed(cut, share.slices)
        if self.instructions_left < len(plain.program.steps) and not must:
            return None
        self.instructions_left -= len(plain.program.steps)
        return _Score(self.overflow(ranks), self.plain_seconds(cut, share))
