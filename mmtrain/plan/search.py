"""The pipeline layout with the shortest simulated step: cut, stages a rank, recomputation, place of the encoder.

for 1, 2, ... stages a rank: the best cuts (`cuts`)
    --the encoder on rank 0, or in slices on several ranks, run where those would wait (`placement`)--> the fastest

Fewer stages a rank and the encoder on rank 0 are kept where they are as fast. Every step is simulated from the
instruction lists that the engine will run, and memory is walked on the same lists. The search is deterministic.

`least_step_seconds` is a lower bound of a step by a formula, without a cut or a schedule, in a millisecond:

StageCosts --decoder layers one by one to the rank that is the least busy with them, as memory allows--> busiest rank
           --all micro-batches there, and the way of the first one through the pipeline and back--> seconds of a step
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mmtrain.config.schema import RunConfig
from mmtrain.plan.cuts import SIMULATED_INSTRUCTIONS, Cut, Cuts, EncoderShare, Slices, ranges_of
from mmtrain.plan.instructions import BOTH_ENDS, WHOLE_AT_ONCE, Schedule
from mmtrain.plan.memory import instants
from mmtrain.plan.placement import GAIN, chain_of_slices, moved_blocks, placements
from mmtrain.plan.schedule import Chain, forward_schedule, leading_encodes, ranks_of, training_schedule
from mmtrain.plan.simulate import Program, Simulation, StageSeconds, simulate
from mmtrain.plan.stage_costs import RankCost, StageCosts

MOST_STAGES_PER_RANK = 4
STAGE_GAIN = 0.01
"""Share of a step that more stages a rank must save: they cost messages, which may be dearer than assumed."""
SLICES_GAIN = 0.005
"""Minimum relative speed-up that justifies slices of the encoder instead of the encoder on rank 0."""
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
        """Return equal numbers of blocks, rounded up, for every rank that may hold some."""
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


class _Layer(NamedTuple):
    """The least that any decoder layer takes, but for the last one, which may run for supervised tokens alone."""

    resident: int  # bytes of weights and optimizer state
    kept: int  # bytes from forward to backward
    working: int  # bytes while it runs
    spared: int  # of `kept` where it recomputes; the most of any layer, as `saved`
    saved: int  # of `resident` where it is streamed; 0: no layer may be
    buffer: int  # bytes of a streamed layer while it is whole
    on_host: int  # bytes of a streamed layer in its machine's memory
    forward: float  # seconds
    backward: float
    again: float  # added to `backward` where it recomputes
    fetch: float  # of one fetch


class _Rank(NamedTuple):
    """What a rank has besides decoder layers."""

    stages: int
    in_flight: float  # micro-batches that it keeps for backward, a mean over its stages
    resident: int
    seconds: float


def least_step_seconds(costs: StageCosts) -> float:
    """Seconds that a step takes at least, whatever the cut; infinite where no cut fits in memory.

    With p ranks of v stages and m micro-batches, which take w on all ranks together and t on the busiest one, a step
    takes m t, and (max(m, p) + (min(m, p) - 1) / v) w / p: the law of equal stages, v being what is best for it; w is
    without a frozen encoder, which may run where ranks would wait. With one stage a rank it also takes
    2 w + (m - p - 1) t: the busiest waits while others work on the first micro-batch and on the last. Ranks recompute
    and stream as few layers as fit, which counts in t. Where decoder layers are of several kinds, each amount is the
    least of any: a loose bound for a run that trains from a layer in the middle on.

    Unequal stages may beat the law: of 2,685 plans of layers with random costs two did, by 4% at most. That nothing
    fits does not rest on it.
    """
    return min(_step_seconds(costs, count, _works(costs, count)) for count in _stage_counts(costs))


def _step_seconds(costs: StageCosts, stages_per_rank: int, works: Sequence[float]) -> float:
    """Seconds of a step if the ranks take `works` seconds for a micro-batch."""
    pipeline, microbatches = costs.setting.pipeline, costs.setting.microbatches_per_step
    layers, encode = sum(layer.forward + layer.backward for layer in costs.timings.layers), costs.timings.encode
    passed = layers if _encodes_anywhere(costs) else layers + encode
    busiest = max(*works, (layers + encode) / pipeline)
    fill = max(0, pipeline - microbatches) + (min(microbatches, pipeline) - 1) / stages_per_rank
    seconds = max(microbatches * busiest, (microbatches * max(passed, sum(works)) + fill * passed) / pipeline)
    if stages_per_rank == 1 and microbatches > pipeline:
        seconds = max(seconds, 2 * passed + (microbatches - pipeline - 1) * busiest)
    return seconds + costs.timings.end


def _stage_counts(costs: StageCosts) -> range:
    """Stages a rank that the planner may choose."""
    pipeline = costs.setting.pipeline
    return range(1, 2 if pipeline == 1 else 1 + max(1, min(MOST_STAGES_PER_RANK, costs.count // pipeline)))


def _encodes_anywhere(costs: StageCosts) -> bool:
    """Whether the encoder may run on any rank, and ahead of need."""
    return costs.costs.encoder.frozen and costs.setting.pipeline > 1


def _works(costs: StageCosts, stages_per_rank: int) -> list[float]:
    """Seconds of a micro-batch on each rank, an encoder that may run anywhere left out."""
    layer, ranks = _least_layer(costs), _ranks(costs, stages_per_rank)
    seconds_of = {rank: _seconds_of(costs, layer, rank) for rank in set(ranks)}
    held = [0] * len(ranks)
    more = [(seconds_of[rank](1), number) for number, rank in enumerate(ranks)]  # with one layer more
    heapq.heapify(more)
    for _ in range(costs.count - 3):  # all decoder layers but the last
        seconds, number = more[0]
        held[number] += 1
        if seconds == math.inf:
            break
        heapq.heapreplace(more, (seconds_of[ranks[number]](held[number] + 1), number))
    return [seconds_of[rank](count) for rank, count in zip(ranks, held, strict=True)]


def _least_layer(costs: StageCosts) -> _Layer:
    layers, seconds, streaming = costs.layers[1:-2], costs.timings.layers[1:-2], costs.setting.streaming
    streamed = [layer for layer in layers if layer.streamed_bytes] if streaming.is_possible else []
    buffer = min(map(streaming.buffer_bytes, streamed), default=0)
    return _Layer(
        resident=min((x.weight_bytes + x.state_bytes for x in layers), default=0),
        kept=min((x.kept_bytes for x in layers), default=0),
        working=min((max(x.forward_working_bytes, x.backward_working_bytes) for x in layers), default=0),
        spared=max((x.kept_bytes - x.kept_bytes_recomputing for x in layers), default=0),
        saved=max((x.streamed_weight_bytes - streaming.kept_on_device(x) for x in streamed), default=0),
        buffer=buffer,
        on_host=buffer if streaming.source == "host" else 0,
        forward=min((x.forward for x in seconds), default=0.0),
        backward=min((x.backward for x in seconds), default=0.0),
        again=min((x.recomputing - x.backward for x in seconds), default=0.0),
        fetch=min(map(costs.fetch_seconds, streamed), default=0.0),
    )


def _ranks(costs: StageCosts, stages_per_rank: int) -> list[_Rank]:
    """The first has the front, and the encoder where that must be there, the last one the head."""
    pipeline, timings, ranks = costs.setting.pipeline, costs.timings, []
    for rank in range(pipeline):
        behind = pipeline - 1 - rank
        if stages_per_rank == 1:
            in_flight = 1.0 + behind
        else:  # as interleaved 1F1B keeps them, see `schedule`
            in_flight = ((stages_per_rank - 1) * pipeline + 2 * behind + 1) / stages_per_rank
        ends = [0] * (rank == 0) + [costs.count - 1] * (behind == 0)
        resident = sum(costs.layers[end].weight_bytes + costs.layers[end].state_bytes for end in ends)
        resident -= costs.costs.shared_ends_bytes * (len(ends) > 1)
        seconds = sum(timings.layers[end].forward + timings.layers[end].backward for end in ends)
        if rank == 0 and not _encodes_anywhere(costs):
            resident += costs.encoder_bytes(costs.costs.encoder.blocks)
            seconds += timings.encode
        ranks.append(_Rank(stages_per_rank, min(in_flight, costs.setting.microbatches_per_step), resident, seconds))
    return ranks


def _seconds_of(costs: StageCosts, layer: _Layer, rank: _Rank) -> Callable[[int], float]:
    """Return a function of the number of decoder layers: seconds of a micro-batch, infinite if they do not fit."""
    spared, most_on_host = rank.in_flight * layer.spared, costs.setting.streaming.host_bytes

    def seconds(count: int) -> float:
        needed = rank.resident + count * (layer.resident + rank.in_flight * layer.kept) + layer.working * (count > 0)
        excess = needed - costs.usable_bytes
        if excess <= 0:
            return rank.seconds + count * (layer.forward + layer.backward)
        if layer.saved:
            recompute = range(count + 1 if spared else 1)
        else:
            fewest = math.ceil(excess / spared) if spared else math.inf
            recompute = range(int(fewest), int(fewest) + 1) if fewest <= count else range(0)
        return min((with_recomputed(count, again, excess - again * spared) for again in recompute), default=math.inf)

    def with_recomputed(count: int, again: int, excess: float) -> float:
        streamed = _streamed(layer, excess)
        if streamed > count or (most_on_host is not None and streamed * layer.on_host > most_on_host):
            return math.inf
        waited_for = max(0, streamed - BOTH_ENDS * rank.stages)
        seconds = rank.seconds
        for computes in (count * layer.forward, count * layer.backward + again * layer.again):
            seconds += computes
            if waited_for:
                seconds += waited_for * max(0.0, layer.fetch - computes / streamed)
        return seconds

    return seconds


def _streamed(layer: _Layer, excess: float) -> int:
    """Return the fewest layers to stream so that `excess` bytes leave the device."""
    if excess <= 0:
        return 0
    if layer.saved - layer.buffer >= excess:
        return 1
    return max(WHOLE_AT_ONCE, math.ceil((excess + WHOLE_AT_ONCE * layer.buffer) / layer.saved))
