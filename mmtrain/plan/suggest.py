"""Suggest layouts of a run for a number of devices: pipeline x replicas, packs a micro-batch, streaming or none.

config, N --candidates--> changes to the config --step_bound--> the most promising ones first
          --the search that make_plan runs--> layouts that fit, with their steps --simpler ones first--> the best

Every layout makes the same step, of the packs that the config asks for: steps compare as samples per second do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.plan.calibration import Device
from mmtrain.plan.candidates import Changes, as_options, by_hand, candidates, is_exact, overrides
from mmtrain.plan.costs import Models
from mmtrain.plan.planner import check_run, make_plan, memory_limit, models_of
from mmtrain.plan.search import search_of
from mmtrain.plan.stage_costs import StageCosts, stage_costs
from mmtrain.plan.step_bound import least_step_seconds

MOST_LAYOUTS = 5
MOST_PLANS = 30
"""Of 7 runs on 4 and 8 devices, 6 to 25 plans give the five layouts that planning all 21 to 57 gives; 10 plans miss the
fastest by 67% at worst, 15 never do. A plan of a 7B takes half a second, one of a 32B two."""
SIMPLER = 0.01
"""Share of a step that a layout must save to come before a simpler one. Times are estimates."""
CALIBRATION = "parallel.calibration"


class Size(NamedTuple):
    """What tells layouts apart, besides what the planner chooses."""

    pipeline: int
    data: int
    packs_per_microbatch: int
    source: str | None  # of streamed layers; None: nothing is streamed
    shards: int  # replicas that share the streamed layers

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key, the simplest first: nothing streamed, host, peers, quantised; then fewer ranks, packs, shards."""
        source = {None: 0, "host": 1, "peers": 2}.get(self.source, 3)
        return source, self.pipeline, self.packs_per_microbatch, self.shards

    def is_more_than(self, other: Size) -> bool:
        """Whether the ranks are the same, and this layout takes more packs, streams, or has more shards."""
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
    """The best layouts of a run for a number of devices."""

    run: str
    llm: str
    devices: int
    decoder_layers: int
    packs_per_step: int
    memory_limit_bytes: int | None  # of a rank
    layouts: tuple[SuggestedLayout, ...]  # at least one; the best first
    by_hand: tuple[str, ...]  # keys that the config states and that the layouts leave to the planner
    measured_on: str | None  # the device whose calibration gives the seconds; None: they are assumed
    not_measured: int  # candidates left out, since no calibration says what they take
    tried: int  # candidates that were planned
    not_tried: int  # candidates that might be among the best, beyond `most_plans`
    peer_bytes_per_second: float  # of streamed layers that come from peers
    measured_fetches: tuple[str, ...]  # sources whose rate was measured; other rates are assumed


@dataclass(frozen=True, slots=True)
class _Candidate:
    changes: Changes
    config: RunConfig  # with these
    costs: StageCosts
    bound: float  # seconds that a step takes at least; infinite: it cannot fit

    @property
    def size(self) -> Size:
        """Size of the layout, if it streams wherever it may."""
        parallel, streaming = self.config.parallel, self.costs.setting.streaming
        source = streaming.source if streaming.is_possible else None
        packs = self.config.train.packs_per_microbatch
        return Size(parallel.pipeline, parallel.data, packs, source, parallel.weight_shards or 1)


def suggest(
    config: RunConfig,
    devices: int,
    device_memory_bytes: int | None = None,
    device: Device | None = None,
    most_plans: int = MOST_PLANS,
) -> Suggestion:
    """Suggest at most five layouts that use `devices` devices; starts nothing.

    `device_memory_bytes` and `device` as for `make_plan`. Candidates are planned in the order of a lower bound of their
    steps, until none of those left can be among the best, `most_plans` at most. First comes the fastest, or the
    simplest of all that take at most SIMPLER longer (`Size.simplicity`), and so on. Of layouts with the same ranks, one
    that takes more packs a micro-batch, streams, or has more shards is left out if another one with less takes at most
    SIMPLER longer. Candidates without calibrated costs are left out, unless none of the others fits. A quantised LLM is
    another LLM: such layouts come last, at least one of them, and only if they are faster.

    Raises UserError for a number of devices that no layout can use, saying what would have to change, and where nothing
    fits, with what the smallest layout needs.
    """
    models, limit = models_of(config), memory_limit(config, device_memory_bytes)
    changes = candidates(config, len(models.llm.decoder), devices)
    check_run(config.changed(changes[0]), models)
    every = [_with_bound(config, one, models, limit, device) for one in changes]
    measured = [x for x in every if x.costs.timings.device is not None and x.bound < math.inf]
    for used in filter(None, (measured, every)):
        exact = _plan([x for x in used if is_exact(config, x.changes)], config, most_plans)
        if exact.layouts:
            break
    best = _best(exact.layouts)
    fastest = min((x.step_seconds for x in exact.layouts), default=math.inf) * (1 - SIMPLER)
    quantised = [x for x in used if x.bound < fastest and not is_exact(config, x.changes)]
    others = _plan(quantised, config, most_plans - exact.tried)
    faster = _best([x for x in others.layouts if x.step_seconds < fastest])[: max(1, MOST_LAYOUTS - len(best))]
    best = [*best[: MOST_LAYOUTS - len(faster)], *faster]
    if not best:
        best = [_smallest(config, used, device_memory_bytes, device)]
    keys = by_hand(config) + [CALIBRATION] * any(CALIBRATION in layout.overrides for layout in best)
    timings = used[0].costs.timings
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
        not_measured=len(every) - len(used),
        tried=exact.tried + others.tried,
        not_tried=exact.not_tried + others.not_tried,
        peer_bytes_per_second=1 / timings.fetch_seconds_per_byte["peers"],
        measured_fetches=timings.measured_fetches,
    )


def _with_bound(
    config: RunConfig, changes: Changes, models: Models, limit: int | None, device: Device | None
) -> _Candidate:
    """Return a candidate with its costs: calibrated where the named calibration fits it, else assumed."""
    try:
        costs = stage_costs(config.changed(changes), models, limit, device)
    except UserError:
        changes = changes | {CALIBRATION: None}
        costs = stage_costs(config.changed(changes), models, limit, device)
    return _Candidate(changes, config.changed(changes), costs, least_step_seconds(costs))


class _Planned(NamedTuple):
    layouts: list[SuggestedLayout]  # those that fit
    tried: int
    not_tried: int  # candidates that may be among the best


def _plan(candidates_: Sequence[_Candidate], config: RunConfig, most_plans: int) -> _Planned:
    """Plan candidates, the most promising first, until none of the others can be among the best."""
    layouts: list[SuggestedLayout] = []
    tried = not_tried = 0
    for candidate in sorted(candidates_, key=lambda x: (x.bound, x.size.simplicity)):
        best = _best(layouts)
        slowest = max(x.step_seconds for x in best) * (1 + SIMPLER) if len(best) == MOST_LAYOUTS else math.inf
        if candidate.bound >= slowest:  # also where both are infinite: it fits nowhere
            break
        if not _saves(candidate.size, candidate.bound, {x.size: x.step_seconds for x in layouts}):
            continue
        if tried == most_plans:
            not_tried += 1
            continue
        tried += 1
        layout = _layout(candidate, config)
        if layout is not None:
            layouts.append(layout)
    return _Planned(layouts, tried, not_tried)


def _saves(size: Size, seconds: float, steps: Mapping[Size, float]) -> bool:
    """Whether `size` saves SIMPLER over every layout with the same ranks that takes fewer packs or streams less."""
    return not any(size.is_more_than(other) and step <= seconds * (1 + SIMPLER) for other, step in steps.items())


def _layout(candidate: _Candidate, config: RunConfig) -> SuggestedLayout | None:
    """Return the layout that `make_plan` finds; None if none fits, or if a streaming one streams nothing."""
    layout = search_of(candidate.config, candidate.costs).find(candidate.config.parallel.stages_per_rank)
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


def _best(layouts: Sequence[SuggestedLayout]) -> list[SuggestedLayout]:
    """Return the best layouts by the rule of `suggest`."""
    steps = {x.size: x.step_seconds for x in layouts}
    rest = [x for x in layouts if _saves(x.size, x.step_seconds, steps)]
    best: list[SuggestedLayout] = []
    while rest and len(best) < MOST_LAYOUTS:
        longest = (1 + SIMPLER) * min(x.step_seconds for x in rest)
        best.append(min((x for x in rest if x.step_seconds <= longest), key=lambda x: x.size.simplicity))
        rest.remove(best[-1])
    return best


def _smallest(
    config: RunConfig, used: Sequence[_Candidate], device_memory_bytes: int | None, device: Device | None
) -> SuggestedLayout:
    """Return the layout that needs the least memory; raise UserError with what it needs if it does not fit."""
    sources = ("host", "peers", None)

    def memory(candidate: _Candidate) -> tuple[int, ...]:
        pipeline, _, packs, source, shards = candidate.size
        return -pipeline, packs, sources.index(source), -shards

    smallest = min((x for x in used if is_exact(config, x.changes)), key=memory)
    layout = _layout(smallest, config) if smallest.bound < math.inf else None
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
