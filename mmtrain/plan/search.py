"""The pipeline layout with the shortest simulated step: cut, stages a rank, recomputation, place of
the encoder.

for 1, 2, ... stages a rank: the best cuts (`cuts`)
    --the encoder on rank 0, or in slices on several ranks, run where those would wait
        (`placement`)--> the fastest

Every step is simulated from the instruction lists that the engine will run, and memory is walked on
the same lists. The search is deterministic. `least_step_seconds` is a lower bound of a step,
without a cut or a schedule.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from mmtrain.plan.calibration import LayerSeconds
from mmtrain.plan.costs import LayerCost
from mmtrain.plan.cuts import SIMULATED_INSTRUCTIONS, Cut, Cuts, EncoderShare, Slices, ranges_of
from mmtrain.plan.instructions import Op, Schedule
from mmtrain.plan.placement import GAIN, chain_of_slices, moved_blocks, placements
from mmtrain.plan.schedule import Chain, leading_encodes, training_schedule
from mmtrain.plan.simulate import Instant, Program, Simulation, StageSeconds, instants, simulate
from mmtrain.plan.stage_costs import RankCost, StageCosts

MOST_STAGES_PER_RANK = 4
STAGE_GAIN = 0.01
"""Share of a step that more stages a rank must save: they cost messages, which may be dearer than
assumed.
"""
SLICES_GAIN = 0.005
"""Share of a step that slices of the encoder must save: for 0.2% one plan's fullest rank took 20%
more memory.
"""
MOST_WORK = 1.04
"""Times the mean of all ranks: what a rank may work so that slices fit idle slots better; saves up
to 3.5%.
"""
MOST_PLACEMENTS = 4
"""Placements of the slices of one cut that are simulated, the most promising first. If none of them
fits in memory, all follow in which nothing waits from one step to the next: tight runs else took
1.6 times as long."""


@dataclass(frozen=True)
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
        turns = zip(*(x.recompute_layers for x in self.ranks), strict=True)
        return tuple(itertools.chain.from_iterable(turns))


class Search:
    """Looks for pipeline layouts with the costs of one run."""

    def __init__(
        self, costs: StageCosts, encoder_ranks: Literal["auto", 0] | Sequence[int] = 0
    ) -> None:
        """`encoder_ranks`: the pipeline ranks that hold blocks of the encoder; auto: whatever is
        fastest.
        """
        self.costs = costs
        self.cuts = Cuts(costs)
        self.pipeline = self.cuts.pipeline
        self.microbatches = self.cuts.microbatches
        self.encoder_ranks: Literal["auto"] | Sequence[int] = (0,)
        if encoder_ranks != 0 and costs.encodes_anywhere and costs.costs.encoder.blocks:
            self.encoder_ranks = encoder_ranks

    def find(self, stages_per_rank: Literal["auto"] | int) -> PipelineLayout | None:
        """Return the fastest layout that fits; None if none is found. Slices must beat the encoder
        on rank 0.
        """
        if stages_per_rank == "auto":
            counts = self._possible_counts()
        else:
            counts = (stages_per_rank,)
        cuts: dict[int, list[Cut]] = {count: [] for count in counts}
        best = None
        if self.encoder_ranks in ("auto", (0,)):
            best = self._best(cuts, self._shares_on_rank_0(), self._on_rank_0, None)
        if self.encoder_ranks != (0,):
            best = self._best(cuts, self._shares_in_slices(), self._in_slices, best) or best
        return best

    def surely_fits(self) -> bool:
        """Whether the first cut that `find("auto")` tries fits, so that it returns a layout; in a
        tenth of its time.
        """
        shares = self._shares_on_rank_0()
        shared_by = sum(self._possible_counts()) * len(shares)
        self.cuts.instructions_left = SIMULATED_INSTRUCTIONS // shared_by
        return self.cuts.ranked(1, shares[0])[0][0].overflow == 0

    def _possible_counts(self) -> Sequence[int]:
        if (self.pipeline - 1) / (self.microbatches + self.pipeline - 1) < STAGE_GAIN:
            return (1,)
        return range(1, 1 + _most_stages_per_rank(self.costs))

    def _shares_on_rank_0(self) -> list[EncoderShare]:
        shares = [EncoderShare(self.costs.timings.encode, self.cuts.whole)]
        if self.costs.encodes_anywhere:
            shares.append(EncoderShare(0.0, self.cuts.whole))
        return shares

    def _shares_in_slices(self) -> list[EncoderShare]:
        """Equal slices in idle slots; if the config names rank 0 among others, also all of them
        there (7% in one).
        """
        shares = []
        holders: Sequence[int] = range(self.pipeline)
        if self.encoder_ranks != "auto":
            holders = self.encoder_ranks
            if 0 in holders:
                shares = self._shares_on_rank_0()
        each = -(-self.costs.costs.encoder.blocks // len(holders))
        equal = [0] * self.pipeline
        for rank in holders:
            equal[rank] = each
        return [*shares, EncoderShare(0.0, tuple(equal))]

    def _best(
        self,
        cuts: dict[int, list[Cut]],
        shares: Sequence[EncoderShare],
        build: Callable[[Cut, float], PipelineLayout | None],
        on_rank_0: PipelineLayout | None,
    ) -> PipelineLayout | None:
        """Return the fastest layout over all numbers of stages a rank; more stages must save
        STAGE_GAIN.

        A layout must also save SLICES_GAIN of `on_rank_0`, or STAGE_GAIN if that has fewer stages a
        rank. Tried cuts are added to `cuts`, by their number of stages a rank.
        """
        best = None
        for count, candidates in cuts.items():
            limit = _to_beat(best, STAGE_GAIN)
            if on_rank_0 is not None:
                gain = STAGE_GAIN if count > on_rank_0.stages_per_rank else SLICES_GAIN
                limit = min(limit, _to_beat(on_rank_0, gain))
            shared_by = sum(cuts) * len(shares)
            for share in shares:
                self.cuts.instructions_left = SIMULATED_INSTRUCTIONS * count // shared_by
                ranked = self.cuts.ranked(count, share, limit)
                candidates += [cut for score, cut in ranked if score.overflow == 0]
            best = self._fastest(dict.fromkeys(candidates), build, limit) or best
        return best

    def _fastest(
        self,
        cuts: Iterable[Cut],
        build: Callable[[Cut, float], PipelineLayout | None],
        limit: float,
    ) -> PipelineLayout | None:
        """Return the fastest layout of these cuts that takes less than `limit` seconds."""
        best = None
        # A lower bound: the encoder takes no time of any rank, if that is possible.
        encode = 0.0 if self.costs.encodes_anywhere else self.costs.timings.encode
        nothing = EncoderShare(encode, (0,) * self.pipeline)
        for cut in cuts:
            if limit < math.inf and self.cuts.plain_seconds(cut, nothing) >= limit:
                continue
            layout = build(cut, limit)
            if layout is not None:
                best = layout
                limit = layout.simulation.seconds
        return best

    def at_cut(self, cut: Cut) -> PipelineLayout | None:
        """Return a cut with the encoder where it is best, or as the config asks; None if that does
        not fit.
        """
        on_rank_0 = self._on_rank_0(cut, math.inf)
        return self._in_slices(cut, _to_beat(on_rank_0, SLICES_GAIN)) or on_rank_0

    def plain(self, cut: Cut) -> PipelineLayout:
        """Return a cut with the encoder on rank 0, each micro-batch encoded right before its
        forward.
        """
        whole = self.cuts.whole
        plain, ranks = self.cuts.placed(cut, whole)
        seconds = self._stage_seconds(ranks, whole)
        chain = leading_encodes(plain.schedule, (0,), 1)
        simulation = simulate(plain.program, seconds)
        return PipelineLayout(
            cut,
            *plain[:2],
            ranks,
            seconds,
            plain.schedule,
            whole,
            chain,
            simulation,
        )

    def fits(self, layout: PipelineLayout) -> bool:
        return self.cuts.overflow(layout.ranks) == 0

    def nearest(self, stages_per_rank: int, given: Cut | None) -> tuple[Cut, tuple[RankCost, ...]]:
        """Return the cut, or `given`, that exceeds the memory limit by the fewest bytes, and the
        cost of its ranks.

        The encoder is where the config asks for it, and nothing is encoded ahead.
        """
        options = []
        if self.encoder_ranks in ("auto", (0,)):
            cut = given or self.cuts.ranked(stages_per_rank, self._shares_on_rank_0()[-1])[0][1]
            options.append((cut, self.cuts.placed(cut, self.cuts.whole)[1]))
        if self.encoder_ranks != (0,):
            cut = given or self.cuts.ranked(stages_per_rank, self._shares_in_slices()[-1])[0][1]
            options.append((cut, self.cuts.placed(cut, self._slices(cut))[1]))
        return min(options, key=lambda option: self.cuts.overflow(option[1]))

    def _on_rank_0(self, cut: Cut, limit: float) -> PipelineLayout | None:
        if self.encoder_ranks in ("auto", (0,)):
            return self._placed(cut, self.cuts.whole, limit)
        return None

    def _in_slices(self, cut: Cut, limit: float) -> PipelineLayout | None:
        """Return the cut with the encoder on several ranks; blocks move to where idle slots fit
        them.
        """
        if self.encoder_ranks == (0,):
            return None
        slices = self._slices(cut)
        layout = self._placed(cut, slices, limit)
        # a step of few micro-batches ends before a long chain pays
        if layout is None and self.encoder_ranks == "auto":
            ranks = self.cuts.placed(cut, (0,) * self.pipeline)[1]
            least_busy = min(range(1, self.pipeline), key=lambda rank: ranks[rank].seconds)
            slices = self._shared_out(cut, (0, least_busy))
            layout = self._placed(cut, slices, limit)
        if layout is None:
            return None
        moved = self._moved(cut, slices)
        if moved == slices:
            return layout
        return self._placed(cut, moved, _to_beat(layout, GAIN)) or layout

    def _stage_seconds(self, ranks: Sequence[RankCost], slices: Slices) -> StageSeconds:
        encode = [0.0] * len(slices)
        for rank in chain_of_slices(slices):
            encode[rank] = self.costs.timings.encode_of(slices[rank], rank == 0)
        return self.cuts.stage_seconds(ranks, encode)

    def _slices(self, cut: Cut) -> Slices:
        """Share out the blocks over all ranks, or those that the config asks for, so that they have
        the same work.
        """
        if self.encoder_ranks != "auto":
            return self._shared_out(cut, self.encoder_ranks, self.encoder_ranks)
        ranks = range(self.pipeline)
        slices = self._shared_out(cut, ranks)
        if slices != self.cuts.whole:
            return slices
        # Even a rank 0 that has the least work with all blocks may keep others waiting while it
        # encodes.
        return self._shared_out(cut, ranks, ranks[1:])

    def _shared_out(
        self,
        cut: Cut,
        ranks: Sequence[int],
        holders: Sequence[int] = (),
    ) -> Slices:
        """Give each block to the rank with the least work that has room, once each of `holders` has
        one.
        """
        costs = self.cuts.placed(cut, (0,) * self.pipeline)[1]
        blocks = self.costs.costs.encoder.blocks
        block = self.costs.timings.encode_block
        slices = tuple(int(rank in holders[:blocks]) for rank in range(self.pipeline))
        work = {rank: costs[rank].seconds + slices[rank] * block for rank in ranks}
        while sum(slices) < blocks:
            least_first = sorted(work, key=lambda rank: (work[rank], rank))
            options = []
            for rank in least_first:
                option = (*slices[:rank], slices[rank] + 1, *slices[rank + 1 :])
                options.append((option, rank))
                if self.costs.fits(self.cuts.placed(cut, option)[1][rank]):
                    break
            else:
                option, rank = options[0]
            slices = option
            work[rank] += block
        return slices

    def _moved(self, cut: Cut, slices: Slices) -> Slices:
        """Move blocks among ranks so that they fit idle slots better: a rank with little work may
        have little room.
        """
        plain, ranks = self.cuts.placed(cut, slices)
        works = [rank.seconds for rank in ranks]
        most = max(*works, MOST_WORK * sum(works) / len(works))

        def seconds_of(changed: Slices) -> StageSeconds | None:
            ranks = self.cuts.placed(cut, changed)[1]
            holders = {rank for rank, blocks in enumerate(changed) if blocks}
            may_hold = self.encoder_ranks == "auto" or holders == set(self.encoder_ranks)
            if not may_hold or self.cuts.overflow(ranks):
                return None
            if max(rank.seconds for rank in ranks) > most:
                return None
            return self._stage_seconds(ranks, changed)

        return moved_blocks(plain.program, self.microbatches, slices, seconds_of)

    def _placed(self, cut: Cut, slices: Slices, limit: float) -> PipelineLayout | None:
        """Return the layout whose slices run where that is fastest; None if none fits and takes
        less than `limit`.
        """
        plain, ranks = self.cuts.placed(cut, slices)
        chain = chain_of_slices(slices)
        best = None
        if len(chain) == 1:
            immediate = self.plain(cut)
            if self.fits(immediate) and immediate.simulation.seconds < limit:
                best = immediate
                limit = _to_beat(best, GAIN)
            if not self.costs.encodes_anywhere or self.costs.timings.encode == 0:
                return best
        else:
            busiest = max(rank.seconds for rank in ranks)
            least = self.microbatches * busiest + self.costs.timings.end
            if least >= limit or self.cuts.overflow(ranks):
                return None

        seconds = self._stage_seconds(ranks, slices)
        tried = 0
        enough = best is not None
        for option in placements(plain.schedule, plain.program, self.microbatches, seconds, chain):
            is_needed = tried < MOST_PLACEMENTS or not (enough or option.ahead)
            if option.least_seconds >= limit or not is_needed:
                continue
            tried += 1
            layout = self._built(cut, slices, option.chain, ranks, seconds)
            if layout.simulation.seconds < limit and self.fits(layout):
                best = layout
                limit = _to_beat(best, GAIN)
                enough = enough or option.ahead > 0
        return best

    def _built(
        self,
        cut: Cut,
        slices: Slices,
        chain: Chain,
        ranks: Sequence[RankCost],
        seconds: StageSeconds,
    ) -> PipelineLayout:
        """Return the layout with its lists and the memory that they take; a rank that does not fit
        recomputes more.
        """
        (stages_per_rank, first, *_), _ = self.cuts.placed(cut, slices)
        schedule = training_schedule(
            self.pipeline,
            self.microbatches,
            first,
            stages_per_rank,
            chain,
        )
        walked = instants(schedule, self.costs.buffers, polls=self.costs.setting.polls_sends)

        changed = []
        for rank, (moments, cost, blocks) in enumerate(zip(walked, ranks, slices, strict=True)):
            ranges = ranges_of(cut, rank, self.pipeline)
            now = self.costs.rank_cost(
                ranges,
                cost.recompute_layers,
                moments,
                blocks,
                cost.streamed_count,
            )
            if not self.costs.fits(now):
                now = self.costs.fitted(rank, ranges, moments, blocks)
            changed.append(now)

        seconds = self.cuts.stage_seconds(changed, seconds.encode)
        simulation = simulate(Program(schedule), seconds)
        return PipelineLayout(
            cut,
            stages_per_rank,
            first,
            tuple(changed),
            seconds,
            schedule,
            slices,
            chain,
            simulation,
        )


def _to_beat(layout: PipelineLayout | None, gain: float) -> float:
    """Return the seconds below which a step saves `gain` of that of `layout`."""
    if layout is None:
        return math.inf
    return layout.simulation.seconds * (1 - gain)


# ---- the shortest step that may be


def least_step_seconds(costs: StageCosts) -> float:
    """Seconds that a step takes at least, whatever the cut; infinite where no cut fits in memory.

    With p ranks of v stages and m micro-batches, which take w on all ranks together (without a
    frozen encoder) and t on the busiest one, a step takes m t, and (max(m, p) + (min(m, p) - 1) /
    v) w / p: the law of equal stages. With one stage a rank it also takes 2 w + (m - p - 1) t: the
    busiest waits while others work on the first micro-batch and on the last. Unequal stages may
    beat the law, seldom and by 4% at most.
    """
    least = _with_least_layers(costs)
    most = 1 if costs.setting.pipeline == 1 else _most_stages_per_rank(costs)
    return min(_step_seconds(costs, count, _works(least, count)) for count in range(1, 1 + most))


def _most_stages_per_rank(costs: StageCosts) -> int:
    return max(1, min(MOST_STAGES_PER_RANK, costs.most_stages // costs.setting.pipeline))


def _step_seconds(costs: StageCosts, stages_per_rank: int, works: Sequence[float]) -> float:
    pipeline = costs.setting.pipeline
    microbatches = costs.setting.microbatches_per_step
    layers = sum(layer.forward + layer.backward for layer in costs.timings.layers)
    work = layers + costs.timings.encode
    passed = layers if costs.encodes_anywhere else work
    busiest = max(*works, work / pipeline)
    fill = max(0, pipeline - microbatches) + (min(microbatches, pipeline) - 1) / stages_per_rank
    seconds = max(
        microbatches * busiest, (microbatches * max(passed, sum(works)) + fill * passed) / pipeline
    )
    if stages_per_rank == 1 and microbatches > pipeline:
        seconds = max(seconds, 2 * passed + (microbatches - pipeline - 1) * busiest)
    return seconds + costs.timings.end


def _with_least_layers(costs: StageCosts) -> StageCosts:
    """Costs where each decoder layer takes the least of any; without the last, which may run for
    few tokens.
    """
    front, *layers, _, head = costs.layers
    first, *seconds, _, last = costs.timings.layers
    layer = costs.costs.whole_last
    layer_seconds = costs.timings.whole_last
    if layers:
        streamed = [x for x in layers if x.streamed_bytes]
        amounts = {}
        for name in (field.name for field in fields(LayerCost) if field.name.endswith("_bytes")):
            if name in ("streamed_bytes", "quantised_bytes"):
                amounts[name] = min((getattr(x, name) for x in streamed), default=0)
            elif name == "streamed_weight_bytes":
                amounts[name] = max((getattr(x, name) for x in streamed), default=0)
            else:
                amounts[name] = min(getattr(x, name) for x in layers)
        layer = replace(layer, **amounts)
        layer_seconds = LayerSeconds(
            min(x.forward for x in seconds),
            min(x.backward for x in seconds),
            min(x.recomputing for x in seconds),
        )

    front = replace(front, trainable_names=("anything",))  # so that all layers may recompute
    run = replace(
        costs.costs,
        layers=(front, *[layer] * len(layers), head),
        whole_last=layer,
        keeps_input=False,
    )
    all_seconds = (first, *[layer_seconds] * len(layers), last)
    timings = replace(costs.timings, layers=all_seconds, whole_last=layer_seconds, call=0.0)
    return StageCosts(run, timings, costs.setting)


def _works(costs: StageCosts, stages_per_rank: int) -> list[float]:
    """Seconds of a micro-batch on each rank, decoder layers given one by one to the rank that is
    the least busy.
    """
    pipeline = costs.setting.pipeline
    decoder = costs.count - 2

    @functools.cache
    def seconds(rank: int, layers: int) -> float:
        behind = pipeline - 1 - rank
        # micro-batches that the rank keeps for backward, a mean over its stages
        in_flight = 1.0 + behind
        if stages_per_rank > 1:  # as interleaved 1F1B keeps them, see `schedule`
            in_flight = ((stages_per_rank - 1) * pipeline + 2 * behind + 1) / stages_per_rank
        kept = min(in_flight, costs.setting.microbatches_per_step) - 1

        begin = 1
        end = layers + 1
        if behind == 0:  # the last decoder layers, and the head
            begin = costs.count - 1 - layers
            end = costs.count
        if rank == 0:
            begin -= 1
        if begin == end:
            return 0.0
        moments = [Instant(op, 0, (kept,), 0) for op in (Op.FORWARD, Op.BACKWARD)]
        blocks = 0 if costs.encodes_anywhere else None
        cost = costs.fitted(rank, ((begin, end),), moments, blocks)
        return cost.seconds if costs.fits(cost) else math.inf

    if pipeline == 1:
        return [seconds(0, decoder)]
    held = [0] * pipeline
    with_one_more = [(seconds(rank, 1), rank) for rank in range(pipeline)]
    heapq.heapify(with_one_more)
    for _ in range(decoder):
        least, rank = with_one_more[0]
        if least == math.inf:
            return [math.inf]
        held[rank] += 1
        more = math.inf
        if held[rank] < decoder:
            more = seconds(rank, held[rank] + 1)
        heapq.heapreplace(with_one_more, (more, rank))
    return [seconds(rank, layers) for rank, layers in enumerate(held)]
