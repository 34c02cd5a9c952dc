"""The layout whose simulated step is shortest: cut x stages per rank x recomputation x where the encoder runs.

cuts for each number of stages a rank (`cut_search`) --the encoder on rank 0, or in slices on several, and where those
run (`placement`)--> the fastest, unless fewer stages a rank or fewer slices are as fast

Every step is simulated from the instruction lists that the engine will run, with memory walked on the same lists. The
search is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mmtrain.plan.cut import Cut, ranges_of
from mmtrain.plan.cut_search import SIMULATED_INSTRUCTIONS, Charge, CutSearch, Slices
from mmtrain.plan.instructions import Schedule
from mmtrain.plan.memory import instants
from mmtrain.plan.placement import GAIN, chain_of_slices, moved_blocks, placements
from mmtrain.plan.schedule import Chain, forward_schedule, leading_encodes, ranks_of, training_schedule
from mmtrain.plan.simulate import Program, Simulation, StageSeconds, simulate
from mmtrain.plan.stage_costs import RankNeed, StageCosts

MOST_STAGES_PER_RANK = 4
STAGE_GAIN = 0.01
"""Share of a step that more stages a rank must save: they cost messages, which may be dearer than assumed."""
SLICES_GAIN = 0.005
"""Share of a step that more slices of the encoder must save, likewise."""
EVALUATION_SHARE = 0.05
"""Of training's micro-batches that evaluations forward: steps in slices that differ by less than SLICES_GAIN are
compared with that, too, since evaluations may differ by a quarter where steps are the same."""
MOST_WORK = 1.04
"""Times the mean of all ranks: what a rank may work so that slices fit idle slots better. Times are estimates."""
MOST_PLACEMENTS = 4
"""Of a cut and its slices whose lists are made and simulated, the most promising first.

Where none fits in memory, those follow with which nothing waits from one step to the next."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout with all that follows from it."""

    cut: Cut
    stages_per_rank: int
    first_trainable_stage: int
    needs: tuple[RankNeed, ...]  # per pipeline rank
    seconds: StageSeconds
    schedule: Schedule
    slices: Slices
    chain: Chain
    simulation: Simulation

    @property
    def recompute_layers(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(
            self.needs[s % len(self.needs)].recompute_layers[s // len(self.needs)] for s in range(len(self.cut) - 1)
        )


class Search:
    """Looks for layouts with the costs of one run."""

    def __init__(
        self,
        costs: StageCosts,
        prefetch: Literal["auto"] | int,
        encoder_ranks: Literal["auto"] | Sequence[int] = (0,),
    ) -> None:
        """`prefetch`: how many micro-batches a step begins with encoded; auto: whatever is fastest.

        `encoder_ranks`: the pipeline ranks that hold blocks of the encoder; auto: whatever is fastest.
        """
        self.costs = costs
        self.prefetch = prefetch
        self.cuts = CutSearch(costs)
        self.on_rank_0: Layout | None = None
        """The best with the whole encoder on rank 0, once something was found, if that may be and fits."""
        self.pipeline, self.microbatches = self.cuts.pipeline, self.cuts.microbatches
        encoder = costs.costs.encoder
        self.encoder_ranks = encoder_ranks if self.pipeline > 1 and encoder.frozen and encoder.blocks else (0,)

    # ---- one layout

    def seconds_of(self, cut: Cut, slices: Slices) -> StageSeconds | None:
        """What the stages of a cut and these slices take; None where they do not fit."""
        needs = self.cuts.placed(cut, slices)[1]
        return None if self.cuts.overflow(needs) else self._stage_seconds(needs, slices)

    def layout(self, cut: Cut) -> Layout:
        """A given cut, the encoder on rank 0 and each micro-batch encoded right before its forward."""
        slices = self.cuts.alone
        form, needs = self.cuts.placed(cut, slices)
        seconds = self.cuts.stage_seconds(needs, self.costs.timings.encode)
        chain = leading_encodes(form.schedule, (0,), 1)
        simulation = simulate(form.program, seconds)
        return Layout(cut, *form[:2], needs, seconds, form.schedule, slices, chain, simulation)

    def fits(self, layout: Layout) -> bool:
        """Whether every rank of it fits."""
        return self.cuts.overflow(layout.needs) == 0

    def smallest(self, stages_per_rank: int, given: Cut | None = None) -> tuple[Cut, tuple[RankNeed, ...]]:
        """Of all cuts, or the `given` one, that whose largest rank takes the least, and what its ranks take.

        The encoder is where the config asks for it, on rank 0 or in slices, and nothing is encoded ahead.
        """
        found = []
        if self.encoder_ranks in ("auto", (0,)):
            cut = given or self.cuts.smallest_cut(stages_per_rank, self.cuts.alone)
            found.append((cut, self.cuts.placed(cut, self.cuts.alone)[1]))
        if self.encoder_ranks != (0,):
            cut = given or self.cuts.smallest_cut(stages_per_rank, self.equal_slices)
            found += [(cut, self.cuts.placed(cut, slices)[1]) for slices in self._slices(cut)[-1:]]
        return min(found, key=lambda x: max(need.total_bytes for need in x[1]))

    def with_encodes(self, cut: Cut) -> Layout | None:
        """A given cut with the encoder where it is best, or as the config asks; None where that does not fit."""
        self.on_rank_0 = self._on_rank_0(cut, math.inf)
        return self._in_slices(cut, self._to_beat(self.on_rank_0, SLICES_GAIN)) or self.on_rank_0

    def _to_beat(self, layout: Layout | None, gain: float) -> float:
        """Seconds of a step that would be so much shorter, where there is a layout to beat."""
        return math.inf if layout is None else layout.simulation.seconds * (1 - gain)

    def _on_rank_0(self, cut: Cut, limit: float) -> Layout | None:
        """The cut with the whole encoder on rank 0; None where the config asks for another place."""
        return self._placed(cut, self.cuts.alone, limit) if self.encoder_ranks in ("auto", (0,)) else None

    def _in_slices(self, cut: Cut, limit: float) -> Layout | None:
        """The cut with the encoder on several ranks; fewer slices come before slightly faster ones."""
        best: Layout | None = None
        for slices in self._slices(cut):
            best = self._placed(cut, slices, limit) or best
            limit = min(limit, self._to_beat(best, SLICES_GAIN))
        moved = None if best is None else self._moved(cut, best.slices)
        if best is None or moved == best.slices:
            return best
        return self._placed(cut, moved, self._to_beat(best, GAIN)) or best

    def _moved(self, cut: Cut, slices: Slices) -> Slices:
        """Slices of the same ranks that fit idle slots better: a rank with less work may have less room for them."""
        form, needs = self.cuts.placed(cut, slices)
        works = [need.seconds for need in needs]
        most = max(*works, MOST_WORK * sum(works) / len(works))

        def seconds_of(changed: Slices) -> StageSeconds | None:
            needs = self.cuts.placed(cut, changed)[1]
            holders = {rank for rank, blocks in enumerate(changed) if blocks}
            may_hold = self.encoder_ranks == "auto" or holders == set(self.encoder_ranks)
            may_be = may_hold and self.cuts.overflow(needs) == 0 and max(need.seconds for need in needs) <= most
            return self._stage_seconds(needs, changed) if may_be else None

        return moved_blocks(form.program, self.microbatches, slices, seconds_of)

    def _stage_seconds(self, needs: Sequence[RankNeed], slices: Slices) -> StageSeconds:
        ranks, encode_of = chain_of_slices(slices), self.costs.timings.encode_of
        encode = [encode_of(blocks, rank == 0) if rank in ranks else 0.0 for rank, blocks in enumerate(slices)]
        return self.cuts.stage_seconds(needs, encode)

    def _slices(self, cut: Cut) -> list[Slices]:
        """Ways to share out the blocks over several ranks: 2, half of them, all; or as the config asks."""
        if self.encoder_ranks != "auto":
            return [self._shared_out(cut, self.encoder_ranks, self.encoder_ranks)] if self.encoder_ranks != (0,) else []
        works = [need.seconds for need in self.cuts.placed(cut, (0,) * self.pipeline)[1]]
        others = sorted(range(1, self.pipeline), key=lambda rank: works[rank])
        counts = sorted({2, self.pipeline // 2, self.pipeline} - {0, 1})
        options = dict.fromkeys(self._shared_out(cut, (0, *others[: count - 1])) for count in counts)
        found = [slices for slices in options if slices != self.cuts.alone]
        # Even a rank 0 that has the least work with all blocks may keep others waiting while it encodes.
        return found or [self._shared_out(cut, range(self.pipeline), others)]

    def _shared_out(self, cut: Cut, ranks: Sequence[int], holders: Sequence[int] = ()) -> Slices:
        """Each block to the one of these ranks that has the least work so far, and room, once `holders` have one."""
        needs = self.cuts.placed(cut, (0,) * self.pipeline)[1]
        blocks, block = self.costs.costs.encoder.blocks, self.costs.timings.encode_block
        slices = tuple(int(rank in holders[:blocks]) for rank in range(self.pipeline))
        filled = {rank: needs[rank].seconds + slices[rank] * block for rank in ranks}
        while sum(slices) < blocks:
            least_first = sorted(filled, key=lambda rank: (filled[rank], rank))
            options = {rank: (*slices[:rank], slices[rank] + 1, *slices[rank + 1 :]) for rank in least_first}
            fitting = (rank for rank, x in options.items() if self.costs.fits(self.cuts.placed(cut, x)[1][rank]))
            rank = next(fitting, least_first[0])
            slices = options[rank]
            filled[rank] += block
        return slices

    def _placed(self, cut: Cut, slices: Slices, limit: float) -> Layout | None:
        """The layout with these slices where they run best; None where none fits and takes less than `limit`."""
        form, needs = self.cuts.placed(cut, slices)
        ranks = chain_of_slices(slices)
        best: Layout | None = None
        if len(ranks) == 1:
            immediate = self.layout(cut)
            may_be = self.fits(immediate) and immediate.simulation.seconds < limit
            if self.prefetch == 0 or not self._may_prefetch() or self.costs.timings.encode == 0:
                return immediate if may_be else None
            if self.prefetch == "auto" and may_be:
                best, limit = immediate, immediate.simulation.seconds * (1 - GAIN)
        elif self.cuts.overflow(needs) or self._least_seconds(needs) >= limit:
            return None
        seconds = self._stage_seconds(needs, slices)
        exactly = None if self.prefetch == "auto" else self.prefetch
        shape = form.schedule, form.program, self.microbatches, seconds, ranks
        tried = 0
        for option in placements(*shape, exactly=exactly):
            if tried >= MOST_PLACEMENTS and (best is not None or option.ahead):
                continue
            if option.least_seconds >= limit or (exactly is None and not self._has_room(option.chain, needs)):
                continue
            tried += 1
            found = self._built(cut, slices, option.chain, needs, seconds)
            if found.simulation.seconds < limit and self.fits(found):
                best, limit = found, found.simulation.seconds * (1 - GAIN)
        return best

    def _least_seconds(self, needs: Sequence[RankNeed]) -> float:
        """Of a step in which the rank with the most work never waits."""
        return self.microbatches * max(need.seconds for need in needs) + self.costs.timings.end

    def _may_prefetch(self) -> bool:
        return self.pipeline > 1 and self.prefetch != 0 and self.costs.costs.encoder.frozen

    def _has_room(self, chain: Chain, needs: Sequence[RankNeed]) -> bool:
        """Whether what waits at a step's begin fits on each rank: a bound that spares lists."""
        buffers, before = self.costs.buffers, 0
        for encodes, need in zip(chain, needs, strict=True):
            if encodes is None:
                continue
            waiting = (before - encodes.ahead) * buffers.between_slices if before else encodes.ahead * buffers.batch
            before = encodes.ahead
            if need.weight_bytes + need.state_bytes + waiting > self.costs.usable_bytes:
                return False
        return True

    def _built(
        self, cut: Cut, slices: Slices, chain: Chain, needs: Sequence[RankNeed], seconds: StageSeconds
    ) -> Layout:
        """The layout with its lists, and with the memory that they take; what does not fit recomputes more."""
        (stages_per_rank, first, *_), _ = self.cuts.placed(cut, slices)
        schedule = training_schedule(self.pipeline, self.microbatches, first, stages_per_rank, chain)
        walked = instants(schedule, self.costs.buffers, polls=self.costs.setting.polls_sends)
        changed = []
        for rank, (found, need, blocks) in enumerate(zip(walked, needs, slices, strict=True)):
            ranges = ranges_of(cut, rank, self.pipeline)
            now = self.costs.need_of(ranges, need.recompute_layers, found, blocks, need.streamed_count)
            changed.append(now if self.costs.fits(now) else self.costs.need(rank, ranges, found, blocks))
        seconds = self.cuts.stage_seconds(changed, seconds.encode)
        simulation = simulate(Program(schedule), seconds)
        return Layout(cut, stages_per_rank, first, tuple(changed), seconds, schedule, slices, chain, simulation)

    def evaluation(self, layout: Layout, microbatches: int) -> tuple[float, int]:
        """Seconds of an evaluation of so many micro-batches, and how many of them each slice encodes first for that."""
        chain, fastest, best = ranks_of(layout.chain), math.inf, 1
        for lead in (1, len(chain), 2 * len(chain)) if len(chain) > 1 else (1,):
            schedule = forward_schedule(self.pipeline, microbatches, layout.stages_per_rank, chain, lead)
            found = simulate(Program(schedule), layout.seconds).seconds
            if found < fastest * (1 - GAIN):
                fastest, best = found, lead
        return fastest, best

    # ---- everything

    def find(self, stages_per_rank: Literal["auto"] | int) -> tuple[Layout, ...]:
        """The fastest layout that fits, of a number of stages a rank or of any; empty if none was found.

        Where it has several stages a rank, the best one with fewer that was found before follows. The search with the
        encoder on rank 0 is the same whether or not slices may follow, and slices must beat what it finds.
        """
        counts = self._possible_counts() if stages_per_rank == "auto" else (stages_per_rank,)
        cuts: dict[int, list[Cut]] = {count: [] for count in counts}
        found: list[Layout] = []
        self.on_rank_0 = None
        if self.encoder_ranks in ("auto", (0,)):
            found = self._better_and_better(cuts, self._charges_on_rank_0(), self._on_rank_0)
            found = found or self._with_room(cuts, self.cuts.alone, self._on_rank_0)
            self.on_rank_0 = found[-1] if found else None
        if self.encoder_ranks != (0,):
            found += self._better_and_better(cuts, self._charges_in_slices(), self._in_slices)
            found = found or self._with_room(cuts, self.equal_slices, self._in_slices)
        fewer = [layout for layout in found if layout.stages_per_rank < found[-1].stages_per_rank]
        return (*found[-1:], *fewer[-1:])

    def _better_and_better(
        self,
        cuts: dict[int, list[Cut]],
        charges: Sequence[Charge],
        placed: Callable[[Cut, float], Layout | None],
    ) -> list[Layout]:
        """For each number of stages a rank the fastest layout, if it saves STAGE_GAIN of the one before and fits.

        It must also save SLICES_GAIN of what was found on rank 0, or STAGE_GAIN where that has fewer stages a rank.
        `cuts` are those known by their number of stages a rank; more are added.
        """
        found: list[Layout] = []
        alone = self.on_rank_0
        for count, known in cuts.items():
            limit = self._to_beat(found[-1] if found else None, STAGE_GAIN)
            if alone is not None:
                more = STAGE_GAIN if count > alone.stages_per_rank else SLICES_GAIN
                limit = min(limit, self._to_beat(alone, more))
            one_stage = found[0].cut if found and found[0].stages_per_rank == 1 else None
            for charge in charges:
                self.cuts.left = SIMULATED_INSTRUCTIONS * count // (sum(cuts) * len(charges))
                known += self.cuts.candidates(count, charge, one_stage, limit)
            best = self._fastest(dict.fromkeys(known), placed, limit)
            if best is not None:
                found.append(best)
        return found

    def _with_room(
        self, counts: Collection[int], slices: Slices, placed: Callable[[Cut, float], Layout | None]
    ) -> list[Layout]:
        """Where none was found: the fastest of cuts that leave room for what waits, if one stage a rank may be."""
        best = self._fastest(self.cuts.roomy(slices), placed, math.inf) if 1 in counts else None
        return [] if best is None else [best]

    def _fastest(
        self, cuts: Iterable[Cut], placed: Callable[[Cut, float], Layout | None], limit: float
    ) -> Layout | None:
        """The fastest layout of these cuts that takes less than `limit` seconds; in slices see EVALUATION_SHARE."""
        found: list[Layout] = []
        most = limit
        for cut in cuts:
            if most < math.inf and self._without_encoder(cut) >= most:
                continue
            layout = placed(cut, most)
            if layout is not None:
                found.append(layout)
                least = min(layout.simulation.seconds for layout in found)
                most = min(limit, least * (1 + SLICES_GAIN * (len(ranks_of(layout.chain)) > 1)))
        best = [layout for layout in found if layout.simulation.seconds <= most]
        if len(best) < 2:
            return best[0] if best else None
        return min(
            best, key=lambda x: x.simulation.seconds + EVALUATION_SHARE * self.evaluation(x, self.microbatches)[0]
        )

    def _without_encoder(self, cut: Cut) -> float:
        """Seconds if the encoder took none of any rank's, where that is possible at all: a bound."""
        form, needs = self.cuts.placed(cut, (0,) * self.pipeline)
        elsewhere = self._may_prefetch() or self.encoder_ranks != (0,)
        encode = 0.0 if elsewhere else self.costs.timings.encode
        return simulate(form.program, self.cuts.stage_seconds(needs, encode)).seconds

    def _possible_counts(self) -> tuple[int, ...]:
        """Stages a rank to try: 1 alone where the idle share of an even cut in 1F1B is less than more must save."""
        if (self.pipeline - 1) / (self.microbatches + self.pipeline - 1) < STAGE_GAIN:
            return (1,)
        return tuple(v for v in range(1, MOST_STAGES_PER_RANK + 1) if v == 1 or v * self.pipeline <= self.costs.count)

    def _charges_on_rank_0(self) -> list[Charge]:
        """The whole encoder before each forward, or in idle slots."""
        charges = [Charge(self.costs.timings.encode, self.cuts.alone)]
        return charges + [Charge(0.0, self.cuts.alone)] * self._may_prefetch()

    def _charges_in_slices(self) -> list[Charge]:
        """Equal slices in idle slots; where the config asks for rank 0 among others, also all of them there."""
        asks_for_0 = self.encoder_ranks != "auto" and 0 in self.encoder_ranks
        return [*self._charges_on_rank_0() * asks_for_0, Charge(0.0, self.equal_slices)]

    @property
    def equal_slices(self) -> Slices:
        """At least as many blocks as there are, the same number on every rank that may hold some."""
        several = range(self.pipeline) if self.encoder_ranks == "auto" else self.encoder_ranks
        each = -(-self.costs.costs.encoder.blocks // len(several))
        return tuple(each * (rank in several) for rank in range(self.pipeline))
