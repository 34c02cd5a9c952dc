"""The pipeline layout with the shortest simulated step: cut, stages a rank, recomputation, place of the encoder.

for 1, 2, ... stages a rank: the best cuts (`cuts`)
    --the encoder on rank 0, or in slices on several ranks, run where those would wait (`placement`)--> the fastest

Fewer stages a rank and the encoder on rank 0 are kept where they are as fast. Every step is simulated from the
instruction lists that the engine will run, and memory is walked on the same lists. The search is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mmtrain.config.schema import RunConfig
from mmtrain.plan.cuts import SIMULATED_INSTRUCTIONS, Cut, Cuts, EncoderShare, Slices, ranges_of
from mmtrain.plan.instructions import Schedule
from mmtrain.plan.memory import instants
from mmtrain.plan.placement import GAIN, chain_of_slices, moved_blocks, placements
from mmtrain.plan.schedule import Chain, forward_schedule, leading_encodes, ranks_of, training_schedule
from mmtrain.plan.simulate import Program, Simulation, StageSeconds, simulate
from mmtrain.plan.stage_costs import RankCost, StageCosts

MOST_STAGES_PER_RANK = 4
STAGE_GAIN = 0.01
"""Share of a step that more stages a rank must save: they cost messages, which may be dearer than assumed."""
SLICES_GAIN = 0.005
"""Share of a step that slices of the encoder must save over the encoder on rank 0, likewise."""
MOST_WORK = 1.04
"""Times the mean of all ranks: what a rank may work so that slices fit idle slots better. Times are estimates."""
MOST_PLACEMENTS = 4
"""Placements of the slices of one cut that are simulated, the most promising first. If none of them fits in memory, all
follow in which nothing waits from one step to the next: without them, tight runs took 1.6 times as long."""


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """A cut and where the encoder runs, with all that follows from them."""

    cut: Cut
    stages_per_rank: int
    first_trainable_stage: int
    ranks: tuple[RankCost, ...]  # per pipeline rank
    seconds: StageSeconds
    schedule: Schedule
    slices: Slices
    chain: Chain
    simulation: Simulation

    @property
    def recompute_layers(self) -> tuple[int, ...]:
        """Number of layers that recompute, of each stage."""
        return tuple(count for turn in zip(*(x.recompute_layers for x in self.ranks), strict=True) for count in turn)


class Search:
    """Looks for pipeline layouts with the costs of one run."""

    def __init__(
        self,
        costs: StageCosts,
        prefetch: Literal["auto"] | int,
        encoder_ranks: Literal["auto"] | Sequence[int] = (0,),
    ) -> None:
        """`prefetch`: number of micro-batches that are encoded when a step begins; auto: whatever is fastest.

        `encoder_ranks`: the pipeline ranks that hold blocks of the encoder; auto: whatever is fastest.
        """
        self.costs = costs
        self.prefetch = prefetch
        self.cuts = Cuts(costs)
        self.pipeline, self.microbatches = self.cuts.pipeline, self.cuts.microbatches
        encoder = costs.costs.encoder
        self.encoder_ranks = encoder_ranks if self.pipeline > 1 and encoder.frozen and encoder.blocks else (0,)

    # ---- the best of all cuts

    def find(self, stages_per_rank: Literal["auto"] | int) -> PipelineLayout | None:
        """Return the fastest layout that fits; None if none is found.

        The search with the encoder on rank 0 does not depend on whether slices may follow, and slices must beat it.
        """
        counts = self._possible_counts() if stages_per_rank == "auto" else (stages_per_rank,)
        cuts: dict[int, list[Cut]] = {count: [] for count in counts}
        best: PipelineLayout | None = None
        if self.encoder_ranks in ("auto", (0,)):
            best = self._best(cuts, self._shares_on_rank_0(), self._on_rank_0, None)
            if best is None and 1 in cuts:
                best = self._fastest(self.cuts.roomy(self.cuts.whole), self._on_rank_0, math.inf)
        if self.encoder_ranks != (0,):
            best = self._best(cuts, self._shares_in_slices(), self._in_slices, best) or best
            if best is None and 1 in cuts:
                best = self._fastest(self.cuts.roomy(self.equal_slices), self._in_slices, math.inf)
        return best

    def _possible_counts(self) -> tuple[int, ...]:
        """Return the stages a rank to try: only 1 if 1F1B idles for less than more stages must save."""
        if (self.pipeline - 1) / (self.microbatches + self.pipeline - 1) < STAGE_GAIN:
            return (1,)
        return tuple(v for v in range(1, MOST_STAGES_PER_RANK + 1) if v == 1 or v * self.pipeline <= self.costs.count)

    def _shares_on_rank_0(self) -> list[EncoderShare]:
        """The whole encoder before each forward, or in idle slots."""
        shares = [EncoderShare(self.costs.timings.encode, self.cuts.whole)]
        return shares + [EncoderShare(0.0, self.cuts.whole)] * self._may_prefetch()

    def _shares_in_slices(self) -> list[EncoderShare]:
        """Equal slices in idle slots; if the config asks for rank 0 among others, also all of them on rank 0."""
        asks_for_0 = self.encoder_ranks != "auto" and 0 in self.encoder_ranks
        return [*self._shares_on_rank_0() * asks_for_0, EncoderShare(0.0, self.equal_slices)]

    @property
    def equal_slices(self) -> Slices:
        """The same number of blocks on every rank that may hold some, rounded up."""
        holders = range(self.pipeline) if self.encoder_ranks == "auto" else self.encoder_ranks
        each = -(-self.costs.costs.encoder.blocks // len(holders))
        return tuple(each * (rank in holders) for rank in range(self.pipeline))

    def _best(
        self,
        cuts: dict[int, list[Cut]],
        shares: Sequence[EncoderShare],
        place: Callable[[Cut, float], PipelineLayout | None],
        on_rank_0: PipelineLayout | None,
    ) -> PipelineLayout | None:
        """Return the fastest layout over all numbers of stages a rank; more stages must save STAGE_GAIN.

        A layout must also save SLICES_GAIN of `on_rank_0`, or STAGE_GAIN if that has fewer stages a rank. `cuts` are
        those tried before, by their number of stages a rank; more are added.
        """
        best: PipelineLayout | None = None
        for count, candidates in cuts.items():
            limit = self._to_beat(best, STAGE_GAIN)
            if on_rank_0 is not None:
                gain = STAGE_GAIN if count > on_rank_0.stages_per_rank else SLICES_GAIN
                limit = min(limit, self._to_beat(on_rank_0, gain))
            for share in shares:
                self.cuts.instructions_left = SIMULATED_INSTRUCTIONS * count // (sum(cuts) * len(shares))
                candidates += self.cuts.candidates(count, share, limit)
            best = self._fastest(dict.fromkeys(candidates), place, limit) or best
        return best

    def _to_beat(self, layout: PipelineLayout | None, gain: float) -> float:
        """Seconds of a step that is shorter by `gain`; infinite if there is no layout to beat."""
        return math.inf if layout is None else layout.simulation.seconds * (1 - gain)

    def _fastest(
        self, cuts: Iterable[Cut], place: Callable[[Cut, float], PipelineLayout | None], limit: float
    ) -> PipelineLayout | None:
        """Return the fastest layout of these cuts that takes less than `limit` seconds."""
        best: PipelineLayout | None = None
        # The encoder takes no time of any rank, if that is possible: a lower bound.
        elsewhere = self._may_prefetch() or self.encoder_ranks != (0,)
        nothing = EncoderShare(0.0 if elsewhere else self.costs.timings.encode, (0,) * self.pipeline)
        for cut in cuts:
            if limit < math.inf and self.cuts.plain_seconds(cut, nothing) >= limit:
                continue
            layout = place(cut, limit)
            if layout is not None:
                best, limit = layout, layout.simulation.seconds
        return best

    # ---- one cut

    def at_cut(self, cut: Cut) -> PipelineLayout | None:
        """Return a cut with the encoder where it is best, or as the config asks; None if that does not fit."""
        on_rank_0 = self._on_rank_0(cut, math.inf)
        return self._in_slices(cut, self._to_beat(on_rank_0, SLICES_GAIN)) or on_rank_0

    def plain(self, cut: Cut) -> PipelineLayout:
        """Return a cut with the encoder on rank 0, each micro-batch encoded right before its forward."""
        whole = self.cuts.whole
        plain, ranks = self.cuts.placed(cut, whole)
        seconds = self._stage_seconds(ranks, whole)
        chain = leading_encodes(plain.schedule, (0,), 1)
        simulation = simulate(plain.program, seconds)
        return PipelineLayout(cut, *plain[:2], ranks, seconds, plain.schedule, whole, chain, simulation)

    def fits(self, layout: PipelineLayout) -> bool:
        """Whether every rank of a layout fits."""
        return self.cuts.overflow(layout.ranks) == 0

    def seconds_of(self, cut: Cut, slices: Slices) -> StageSeconds | None:
        """Return what the stages of a cut with these slices take; None if they do not fit."""
        ranks = self.cuts.placed(cut, slices)[1]
        return None if self.cuts.overflow(ranks) else self._stage_seconds(ranks, slices)

    def smallest(self, stages_per_rank: int, given: Cut | None = None) -> tuple[Cut, tuple[RankCost, ...]]:
        """Return the cut, or `given`, whose largest rank takes the least memory, and the cost of its ranks.

        The encoder is where the config asks for it, and nothing is encoded ahead.
        """
        options = []
        if self.encoder_ranks in ("auto", (0,)):
            cut = given or self.cuts.smallest_cut(stages_per_rank, self.cuts.whole)
            options.append((cut, self.cuts.placed(cut, self.cuts.whole)[1]))
        if self.encoder_ranks != (0,):
            cut = given or self.cuts.smallest_cut(stages_per_rank, self.equal_slices)
            options.append((cut, self.cuts.placed(cut, self._slices(cut))[1]))
        return min(options, key=lambda option: max(rank.total_bytes for rank in option[1]))

    def evaluation_lead(self, layout: PipelineLayout, microbatches: int) -> int:
        """Return how many of `microbatches` each slice encodes first in the fastest evaluation."""
        chain, fastest, best = ranks_of(layout.chain), math.inf, 1
        for lead in (1, len(chain), 2 * len(chain)) if len(chain) > 1 else (1,):
            schedule = forward_schedule(self.pipeline, microbatches, layout.stages_per_rank, chain, lead)
            seconds = simulate(Program(schedule), layout.seconds).seconds
            if seconds < fastest * (1 - GAIN):
                fastest, best = seconds, lead
        return best

    def _on_rank_0(self, cut: Cut, limit: float) -> PipelineLayout | None:
        """Return the cut with the whole encoder on rank 0; None if the config asks for another place."""
        return self._placed(cut, self.cuts.whole, limit) if self.encoder_ranks in ("auto", (0,)) else None

    def _in_slices(self, cut: Cut, limit: float) -> PipelineLayout | None:
        """Return the cut with the encoder on several ranks; blocks move to where idle slots fit them."""
        if self.encoder_ranks == (0,):
            return None
        slices = self._slices(cut)
        layout = self._placed(cut, slices, limit)
        if layout is None and self.encoder_ranks == "auto":  # fewer slices take less memory: 5% in a tight run
            works = [rank.seconds for rank in self.cuts.placed(cut, (0,) * self.pipeline)[1]]
            slices = self._shared_out(cut, (0, min(range(1, self.pipeline), key=works.__getitem__)))
            layout = self._placed(cut, slices, limit)
        if layout is None:
            return None
        moved = self._moved(cut, slices)
        if moved == slices:
            return layout
        return self._placed(cut, moved, self._to_beat(layout, GAIN)) or layout

    # ---- the encoder of one cut

    def _may_prefetch(self) -> bool:
        return self.pipeline > 1 and self.prefetch != 0 and self.costs.costs.encoder.frozen

    def _stage_seconds(self, ranks: Sequence[RankCost], slices: Slices) -> StageSeconds:
        chain, encode_of = chain_of_slices(slices), self.costs.timings.encode_of
        encode = [encode_of(blocks, rank == 0) if rank in chain else 0.0 for rank, blocks in enumerate(slices)]
        return self.cuts.stage_seconds(ranks, encode)

    def _slices(self, cut: Cut) -> Slices:
        """Share out the blocks over all ranks, or those that the config asks for, so that they have the same work."""
        if self.encoder_ranks != "auto":
            return self._shared_out(cut, self.encoder_ranks, self.encoder_ranks)
        ranks = range(self.pipeline)
        slices = self._shared_out(cut, ranks)
        # Even a rank 0 that has the least work with all blocks may keep others waiting while it encodes.
        return slices if slices != self.cuts.whole else self._shared_out(cut, ranks, ranks[1:])

    def _shared_out(self, cut: Cut, ranks: Sequence[int], holders: Sequence[int] = ()) -> Slices:
        """Give each block to the rank with the least work that has room, once each of `holders` has one."""
        costs = self.cuts.placed(cut, (0,) * self.pipeline)[1]
        blocks, block = self.costs.costs.encoder.blocks, self.costs.timings.encode_block
        slices = tuple(int(rank in holders[:blocks]) for rank in range(self.pipeline))
        work = {rank: costs[rank].seconds + slices[rank] * block for rank in ranks}
        while sum(slices) < blocks:
            least_first = sorted(work, key=lambda rank: (work[rank], rank))
            options = {rank: (*slices[:rank], slices[rank] + 1, *slices[rank + 1 :]) for rank in least_first}
            fitting = (rank for rank, x in options.items() if self.costs.fits(self.cuts.placed(cut, x)[1][rank]))
            rank = next(fitting, least_first[0])
            slices = options[rank]
            work[rank] += block
        return slices

    def _moved(self, cut: Cut, slices: Slices) -> Slices:
        """Move blocks among ranks so that they fit idle slots better: a rank with little work may have little room."""
        plain, ranks = self.cuts.placed(cut, slices)
        works = [rank.seconds for rank in ranks]
        most = max(*works, MOST_WORK * sum(works) / len(works))

        def seconds_of(changed: Slices) -> StageSeconds | None:
            ranks = self.cuts.placed(cut, changed)[1]
            holders = {rank for rank, blocks in enumerate(changed) if blocks}
            may_hold = self.encoder_ranks == "auto" or holders == set(self.encoder_ranks)
            may_be = may_hold and self.cuts.overflow(ranks) == 0 and max(rank.seconds for rank in ranks) <= most
            return self._stage_seconds(ranks, changed) if may_be else None

        return moved_blocks(plain.program, self.microbatches, slices, seconds_of)

    def _placed(self, cut: Cut, slices: Slices, limit: float) -> PipelineLayout | None:
        """Return the layout whose slices run where that is fastest; None if none fits and takes less than `limit`."""
        plain, ranks = self.cuts.placed(cut, slices)
        chain = chain_of_slices(slices)
        best: PipelineLayout | None = None
        if len(chain) == 1:
            immediate = self.plain(cut)
            may_be = self.fits(immediate) and immediate.simulation.seconds < limit
            if not self._may_prefetch() or self.costs.timings.encode == 0:
                return immediate if may_be else None
            if self.prefetch == "auto" and may_be:
                best, limit = immediate, immediate.simulation.seconds * (1 - GAIN)
        elif self.cuts.overflow(ranks) or self._least_seconds(ranks) >= limit:
            return None
        seconds = self._stage_seconds(ranks, slices)
        exactly = None if self.prefetch == "auto" else self.prefetch
        tried, enough = 0, best is not None
        for option in placements(plain.schedule, plain.program, self.microbatches, seconds, chain, exactly=exactly):
            if tried >= MOST_PLACEMENTS and (enough or option.ahead):
                continue
            if option.least_seconds >= limit or (exactly is None and not self._has_room(option.chain, ranks)):
                continue
            tried += 1
            layout = self._built(cut, slices, option.chain, ranks, seconds)
            if layout.simulation.seconds < limit and self.fits(layout):
                best, limit = layout, layout.simulation.seconds * (1 - GAIN)
                enough = enough or option.ahead > 0
        return best

    def _least_seconds(self, ranks: Sequence[RankCost]) -> float:
        """Seconds of a step in which the rank with the most work never waits."""
        return self.microbatches * max(rank.seconds for rank in ranks) + self.costs.timings.end

    def _has_room(self, chain: Chain, ranks: Sequence[RankCost]) -> bool:
        """Whether what waits when a step begins fits on each rank: a bound that spares making lists."""
        buffers, before = self.costs.buffers, 0
        for encodes, rank in zip(chain, ranks, strict=True):
            if encodes is None:
                continue
            waiting = (before - encodes.ahead) * buffers.between_slices if before else encodes.ahead * buffers.batch
            before = encodes.ahead
            if rank.weight_bytes + rank.state_bytes + waiting > self.costs.usable_bytes:
                return False
        return True

    def _built(
        self, cut: Cut, slices: Slices, chain: Chain, ranks: Sequence[RankCost], seconds: StageSeconds
    ) -> PipelineLayout:
        """Return the layout with its lists and the memory that they take; a rank that does not fit recomputes more."""
        (stages_per_rank, first, *_), _ = self.cuts.placed(cut, slices)
        schedule = training_schedule(self.pipeline, self.microbatches, first, stages_per_rank, chain)
        walked = instants(schedule, self.costs.buffers, polls=self.costs.setting.polls_sends)
        changed = []
        for rank, (moments, cost, blocks) in enumerate(zip(walked, ranks, slices, strict=True)):
            ranges = ranges_of(cut, rank, self.pipeline)
            now = self.costs.rank_cost(ranges, cost.recompute_layers, moments, blocks, cost.streamed_count)
            changed.append(now if self.costs.fits(now) else self.costs.fitted(rank, ranges, moments, blocks))
        seconds = self.cuts.stage_seconds(changed, seconds.encode)
        simulation = simulate(Program(schedule), seconds)
        return PipelineLayout(cut, stages_per_rank, first, tuple(changed), seconds, schedule, slices, chain, simulation)


def search_of(config: RunConfig, costs: StageCosts, prefetch: Literal["auto"] | int = "auto") -> Search:
    """Return the search for a layout as the config asks for it; `prefetch` as in `Search`."""
    ranks = config.parallel.encoder_ranks
    return Search(costs, prefetch, (0,) if ranks == 0 else ranks)
