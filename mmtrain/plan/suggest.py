"""The best layouts of a run for so many devices: pipeline x replicas, packs a micro-batch, streaming or none.

config, N --candidates--> changes to the config --step_bound--> the most promising ones first
          --the search that make_plan runs--> layouts that fit, with their steps --the simpler of near ones--> the best

Every layout makes the same step, of the packs that the config asks for: steps compare as samples per second do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.plan.calibration import Device
from mmtrain.plan.candidates import Changes, as_options, by_hand, candidates, is_exact, overrides
from mmtrain.plan.costs import Models
from mmtrain.plan.cuts import best_cut
from mmtrain.plan.planner import check_run, make_plan, memory_limit, models_of
from mmtrain.plan.search import search_of
from mmtrain.plan.stage_costs import StageCosts, stage_costs
from mmtrain.plan.step_bound import least_step_seconds

MOST_LAYOUTS = 5
MOST_SECONDS = 20.0
"""Of planning; a search that has begun is ended."""
SIMPLER = 0.01
"""Share of a step that a layout must save to come before a simpler one. Times are estimates."""
CALIBRATION = "parallel.calibration"


class Size(NamedTuple):
    """What a layout is, beside what the planner chooses for it."""

    pipeline: int
    data: int
    packs_per_microbatch: int
    source: str | None  # that streamed layers come from; None: nothing is streamed
    shards: int  # replicas that keep a part each of streamed layers

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Less is simpler: nothing streamed, host, peers, quantised; then fewer pipeline ranks, packs, shards."""
        source = {None: 0, "host": 1, "peers": 2}.get(self.source, 3)
        return source, self.pipeline, self.packs_per_microbatch, self.shards

    @property
    def without_streaming(self) -> Size:
        """The same with all weights on the devices."""
        return self._replace(source=None, shards=1)

    def is_more_than(self, other: Size) -> bool:
        """Whether the ranks are the same, and this one takes more packs, streams where that does not, more shards."""
        streams_more = self.source == other.source and self.shards >= other.shards
        more = self.packs_per_microbatch >= other.packs_per_microbatch and (streams_more or other.source is None)
        return self != other and self[:2] == other[:2] and more


@dataclass(frozen=True, slots=True)
class SuggestedLayout:
    """One layout that fits."""

    overrides: Changes  # what differs from the config: with these `make_plan` gives this layout
    size: Size
    stages_per_rank: int
    recompute_layers: int  # decoder layers, over all ranks of a replica
    memory_bytes: int  # of the fullest rank
    host_bytes: int  # of streamed layers in its machine's memory, of the rank with the most
    step_seconds: float  # where costs are assumed, only ratios of these mean anything


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The best layouts of a run for so many devices."""

    run: str
    llm: str
    devices: int
    decoder_layers: int
    packs_per_step: int
    memory_limit_bytes: int | None  # of a rank
    layouts: tuple[SuggestedLayout, ...]  # at least one; the best first
    by_hand: tuple[str, ...]  # keys that the config states and that the layouts leave to the planner
    measured_on: str | None  # the device whose calibration gives the seconds; None: they are assumed
    not_measured: int  # candidates left out since no calibration tells what they take
    not_planned: int  # candidates that might be among the best, and for which there was no time
    peer_bytes_per_second: float  # at which a rank's streamed layers come from peers, as far as that is known
    measured_fetches: tuple[str, ...]  # sources whose rate was measured; others' are assumed


@dataclass(frozen=True, slots=True)
class _Candidate:
    changes: Changes
    config: RunConfig  # with these
    costs: StageCosts
    bound: float  # seconds that a step takes at least; infinite: it cannot fit

    @property
    def size(self) -> Size:
        """That of its layout, if that streams wherever it may."""
        parallel, streaming = self.config.parallel, self.costs.setting.streaming
        source = streaming.source if streaming.is_possible else None
        packs = self.config.train.packs_per_microbatch
        return Size(parallel.pipeline, parallel.data, packs, source, parallel.weight_shards or 1)


def suggest(
    config: RunConfig,
    devices: int,
    device_memory_bytes: int | None = None,
    device: Device | None = None,
    most_seconds: float = MOST_SECONDS,
) -> Suggestion:
    """The five best layouts of a run that use so many devices; starts nothing.

    `device_memory_bytes` and `device` as for `make_plan`. Candidates are planned in the order of a lower bound of
    their steps, until none of those left can be among the best, or for `most_seconds`. The rule of the list: first
    comes the fastest, or what is simplest of all that take at most SIMPLER longer (`Size.simplicity`); so on with the
    rest. Of layouts with the same ranks, one that takes more packs a micro-batch, or streams, or to more shards, is
    left out if another, with less of these, takes at most SIMPLER longer: there may be fewer than five. Where
    calibrations tell what some candidates take, others are left out, unless none of those fits. Layouts with a
    quantised LLM, which is another one, come behind all others, one of them at least, and only if they are faster.

    Raises UserError for a number of devices that no layout can use, saying what would have to change, and where nothing
    fits, with what the smallest layout needs.
    """
    models, limit = models_of(config), memory_limit(config, device_memory_bytes)
    changes = candidates(config, len(models.llm.decoder), devices)
    check_run(config.changed(changes[0]), models)
    known = [_with_bound(config, one, models, limit, device) for one in changes]
    measured = [x for x in known if x.costs.timings.device is not None and x.bound < math.inf]
    end = time.monotonic() + most_seconds
    exact = [x for x in measured or known if is_exact(config, x.changes)]
    found, not_planned = _planned(config, exact, end)
    if measured and not found:
        measured = []
        exact = [x for x in known if is_exact(config, x.changes)]
        found, not_planned = _planned(config, exact, end)
    best = _best(found)
    least = min((x.step_seconds for x in found), default=math.inf) * (1 - SIMPLER)
    others = [x for x in measured or known if x.bound < least and not is_exact(config, x.changes)]
    quantised, _ = _planned(config, others, end)
    faster = _best([x for x in quantised if x.step_seconds < least])[: max(1, MOST_LAYOUTS - len(best))]
    best = [*best[: MOST_LAYOUTS - len(faster)], *faster]
    if not best:
        best = [_smallest(config, exact, device_memory_bytes, device)]
    keys = by_hand(config) + [CALIBRATION] * any(CALIBRATION in layout.overrides for layout in best)
    timings = (measured or known)[0].costs.timings
    return Suggestion(
        run=config.run.name,
        llm=config.model.llm.path,
        devices=devices,
        decoder_layers=len(models.llm.decoder),
        packs_per_step=config.train.packs_per_step,
        memory_limit_bytes=limit,
        layouts=tuple(best),
        by_hand=tuple(keys),
        measured_on=timings.device,
        not_measured=len(known) - len(measured) if measured else 0,
        not_planned=not_planned,
        peer_bytes_per_second=1 / timings.fetch_seconds_per_byte["peers"],
        measured_fetches=timings.measured_fetches,
    )


def _with_bound(
    config: RunConfig, changes: Changes, models: Models, limit: int | None, device: Device | None
) -> _Candidate:
    """A candidate with its costs, by the calibration that was named as long as that is for it."""
    try:
        costs = stage_costs(config.changed(changes), models, limit, device)
    except UserError:
        changes = changes | {CALIBRATION: None}
        costs = stage_costs(config.changed(changes), models, limit, device)
    return _Candidate(changes, config.changed(changes), costs, least_step_seconds(costs))


def _planned(config: RunConfig, known: Sequence[_Candidate], end: float) -> tuple[list[SuggestedLayout], int]:
    """Layouts that fit, the best among them; and how many candidates were left at `end` that might be, too."""
    found: list[SuggestedLayout] = []
    left = 0
    for bound, candidate in _most_promising_first(known):
        best = _best(found)
        enough = max(x.step_seconds for x in best) * (1 + SIMPLER) if len(best) == MOST_LAYOUTS else math.inf
        if bound >= enough:  # also where both are infinite: it fits nowhere
            break
        seconds, size = {x.size: x.step_seconds for x in found}, candidate.size
        is_idle = bound > candidate.bound and size.without_streaming in seconds
        if is_idle or not _saves(size, candidate.bound, seconds):
            continue
        if time.monotonic() > end and size.pipeline > 1:  # one rank is planned at once
            left += 1
        elif _may_fit(candidate.costs):
            layout = _layout(candidate, config)
            found += [] if layout is None else [layout]
    return found, left


def _most_promising_first(known: Sequence[_Candidate]) -> list[tuple[float, _Candidate]]:
    """With the bound by which they are ordered: where streaming hardly lowers it, that of the layout without.

    Such a layout comes behind that one, and is of no use but where that one proves not to fit.
    """
    without = {x.size: x.bound for x in known}
    found = []
    for x in known:
        other = without.get(x.size.without_streaming, math.inf)
        gains = x.size.source is None or x.bound < other * (1 - SIMPLER)
        found.append((x.bound if gains else math.nextafter(other, math.inf), x))
    return sorted(found, key=lambda x: (x[0], x[1].size.simplicity))


def _saves(size: Size, seconds: float, known: Mapping[Size, float]) -> bool:
    """Whether it takes less, by SIMPLER, than every one with the same ranks that takes fewer packs or streams less."""
    return not any(size.is_more_than(other) and taken <= seconds * (1 + SIMPLER) for other, taken in known.items())


def _may_fit(costs: StageCosts) -> bool:
    """Whether a search is likely to find something: without the encoder there is a cut that fits.

    A search that finds nothing takes many times as long as one that does.
    """
    pipeline = costs.setting.pipeline
    return costs.setting.memory_bytes is None or pipeline == 1 or best_cut(costs, [0] * pipeline) is not None


def _layout(candidate: _Candidate, config: RunConfig) -> SuggestedLayout | None:
    """The layout that `make_plan` finds; None: it finds none, or, for a candidate that streams, one that does not."""
    costs, parallel = candidate.costs, candidate.config.parallel
    layout = search_of(candidate.config, costs).find(parallel.stages_per_rank)
    if layout is None:
        return None
    if candidate.size.source is not None and not any(rank.streamed for rank in layout.ranks):
        return None
    return SuggestedLayout(
        overrides=overrides(config, candidate.changes),
        size=candidate.size,
        stages_per_rank=layout.stages_per_rank,
        recompute_layers=sum(layout.recompute_layers),
        memory_bytes=max(rank.total_bytes for rank in layout.ranks),
        host_bytes=max(rank.host_bytes for rank in layout.ranks),
        step_seconds=layout.simulation.seconds,
    )


def _best(found: Sequence[SuggestedLayout]) -> list[SuggestedLayout]:
    """The best of these by the rule that `suggest` states."""
    known = {x.size: x.step_seconds for x in found}
    left = [x for x in found if _saves(x.size, x.step_seconds, known)]
    best: list[SuggestedLayout] = []
    while left and len(best) < MOST_LAYOUTS:
        most = (1 + SIMPLER) * min(x.step_seconds for x in left)
        best.append(min((x for x in left if x.step_seconds <= most), key=lambda x: x.size.simplicity))
        left.remove(best[-1])
    return best


def _smallest(
    config: RunConfig, known: Sequence[_Candidate], device_memory_bytes: int | None, device: Device | None
) -> SuggestedLayout:
    """The layout that needs the least memory; raises UserError with what that is, where it does not fit."""
    sources = ("host", "peers", None)

    def memory(candidate: _Candidate) -> tuple[int, ...]:
        pipeline, _, packs, source, shards = candidate.size
        return -pipeline, packs, sources.index(source) if source in sources else 0, -shards

    smallest = min(known, key=memory)
    layout = _layout(smallest, config) if smallest.bound < math.inf and _may_fit(smallest.costs) else None
    if layout is not None:
        return layout
    parallel = smallest.config.parallel
    try:
        make_plan(smallest.config, device_memory_bytes, device)
    except UserError as error:
        changes = " ".join(as_options(overrides(config, smallest.changes))) or "that of the configuration"
        devices = parallel.pipeline * parallel.data
        count = f"{devices:,} device{'s' * (devices > 1)}"
        raise UserError(f"no layout of {count} fits. The smallest, {changes}:\n{error}") from None
    raise AssertionError("make_plan finds what its search did not")
