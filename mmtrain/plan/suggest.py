"""Suggest layouts of a run for a number of devices: pipeline x replicas, packs a micro-batch, streaming or none.

config, N --candidates: pipeline x replicas = N, each of AXES in turn--> changes to the config, as overrides set them
          --least_step_seconds--> the most promising ones first
          --the search that make_plan runs--> layouts that fit, with their steps --simpler ones first--> the best
          --render_suggestion--> a table with a row a layout, and what to put behind CONFIG for each

Every layout makes the same step, of the packs that the config asks for: steps compare as samples per second do.
Candidates do not change what a step computes, except those that quantise frozen layers (see `is_exact`). Keys that
belong to one layout, such as boundaries, are left to the planner.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.base.printing import COLUMNS, bytes_text, table_lines
from mmtrain.config.parallel import MAX_MICROBATCHES
from mmtrain.config.schema import MAX_RANKS, RunConfig
from mmtrain.models.facts.quantised import BITS
from mmtrain.plan.calibration import Device
from mmtrain.plan.costs import Models
from mmtrain.plan.planner import check_run, make_plan, memory_limit, models_of
from mmtrain.plan.search import least_step_seconds, search_of
from mmtrain.plan.stage_costs import StageCosts, stage_costs
from mmtrain.plan.table import wrapped

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


MOST_TOKENS = 2**16
"""Of a micro-batch that has several packs: from 10,000 on every fetch of weights hides behind computing."""
MOST_SHARDS = 8
"""Replicas that keep a part each of streamed layers: the GPUs of a machine with NVLink."""
MOST_REPLICAS = 10_000  # that parallel.data may be
BY_HAND: dict[str, Any] = {
    "parallel.boundaries": None,
    "parallel.stages_per_rank": "auto",
    "parallel.recompute_layers": "auto",
    "parallel.encoder_ranks": "auto",
}
"""Keys that belong to one layout, and the value that leaves each to the planner."""

QUANTIZE = "model.llm.quantize"
Changes = dict[str, Any]
"""Values by key; some may be the config's own."""


def candidates(config: RunConfig, decoder_layers: int, devices: int) -> list[Changes]:
    """List all layouts that use `devices` devices, whether or not they fit in memory.

    Raises UserError if there is none, saying what would have to change.
    """
    if not 1 <= devices <= MAX_RANKS:
        raise UserError(f"{devices} devices: layouts are suggested for 1 to {MAX_RANKS:,}")
    sizes = [(devices // data, data) for data in _divisors(devices)]
    sizes = [(pipeline, data) for pipeline, data in sizes if pipeline <= decoder_layers + 2 and data <= MOST_REPLICAS]
    layouts: list[Changes] = [{"parallel.pipeline": pipeline, "parallel.data": data} for pipeline, data in sizes]
    for axis in AXES:
        layouts = [changes | more for changes in layouts for more in axis(config.changed(changes))]
    if not layouts:
        raise UserError(_no_layout(config, decoder_layers, devices, [data for _, data in sizes]))
    return [changes | BY_HAND for changes in layouts]


def _packs(config: RunConfig) -> Iterator[Changes]:
    """Vary packs a micro-batch: more of them hide fetches, and take more memory."""
    packs, data = config.train.packs_per_step, config.parallel.data
    for count in _divisors(packs // data) if packs % data == 0 else ():
        tokens, microbatches = count * config.data.pack_length, packs // data // count
        may_be = count in (1, config.train.packs_per_microbatch) or tokens <= MOST_TOKENS
        if may_be and microbatches * config.parallel.pipeline <= MAX_MICROBATCHES:
            yield {"train.packs_per_microbatch": count}


def _streaming(config: RunConfig) -> Iterator[Changes]:
    """Vary where frozen decoder layers are kept: on the devices, or fetched before they compute."""

    def kept(layers: Any, source: str = "host", shards: int | None = None) -> Changes:
        keys = "streamed_layers", "stream_from", "weight_shards"
        return {f"parallel.{key}": value for key, value in zip(keys, (layers, source, shards), strict=True)}

    yield kept(0)
    if config.model.llm.quantize is None:
        yield from (kept(0) | {QUANTIZE: bits} for bits in BITS)
        yield kept("auto")
        is_for_host = config.parallel.host_memory_gib is not None
        for shards in _divisors(config.parallel.data)[1:]:
            if shards <= MOST_SHARDS and not is_for_host:
                yield kept("auto", "peers", shards)


AXES: tuple[Callable[[RunConfig], Iterator[Changes]], ...] = (_packs, _streaming)
"""Each takes the config as earlier axes have changed it, and yields further changes."""


def is_exact(config: RunConfig, changes: Changes) -> bool:
    """Whether the LLM keeps its bits."""
    return QUANTIZE not in overrides(config, changes)


def by_hand(config: RunConfig) -> list[str]:
    """Return the keys that the config sets and a suggestion leaves to the planner."""
    return [key for key, value in BY_HAND.items() if config.value_at(tuple(key.split("."))) != value]


def overrides(config: RunConfig, changes: Changes) -> Changes:
    """Return the changes that differ from the config."""
    return {key: value for key, value in changes.items() if config.value_at(tuple(key.split("."))) != value}


def as_options(changes: Changes) -> list[str]:
    """Write changes as a command line takes them behind CONFIG."""
    return [f"{key}={'null' if value is None else value}" for key, value in changes.items()]


def _no_layout(config: RunConfig, decoder_layers: int, devices: int, replicas: list[int]) -> str:
    packs, most = config.train.packs_per_step, decoder_layers + 2
    model = config.model.llm.path
    placed = f"{model} has {most} layers for pipeline ranks (front, {decoder_layers} decoder layers, head)"
    if not replicas:
        return (
            f"{devices:,} devices: no layout uses all of them. {placed}, and parallel.data is at most "
            f"{MOST_REPLICAS:,}. Take a number of devices that is such a product"
        )
    dividing = [data for data in replicas if packs % data == 0]
    if dividing:
        return (
            f"train.packs_per_step: {packs:,} packs are more than {MAX_MICROBATCHES:,} micro-batches on the ranks of "
            f"any layout of {devices:,} devices. Take fewer packs, or more devices"
        )
    nearest = {packs // data * data for data in replicas} | {-(-packs // data) * data for data in replicas}
    below, above = max((n for n in nearest if 0 < n < packs), default=None), min(n for n in nearest if n > packs)
    would = f"{above:,}" if below is None else f"{below:,} or {above:,}"
    several = "replicas" if len(replicas) == 1 else "replicas at least"
    return (
        f"train.packs_per_step: {packs:,} packs cannot be shared out over {devices:,} devices. {placed}, so there "
        f"are {min(replicas):,} {several}, each with the same number of packs. Set train.packs_per_step={would}; no "
        "suggestion changes it, since it defines the optimisation"
    )


def _divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def render_suggestion(suggestion: Suggestion) -> list[str]:
    """Return the layouts as lines of at most 80 columns; long overrides are continued behind a backslash."""
    best, *others = suggestion.layouts
    return [
        *wrapped(*_headline(suggestion)),
        *_table(suggestion),
        *wrapped(*_notes(suggestion)),
        "behind CONFIG for the first:",
        *_pasted("  ", best),
        *(["for the others:"] if others else []),
        *(line for number, layout in enumerate(others, 2) for line in _pasted(f"  {number}: ", layout)),
    ]


def _headline(suggestion: Suggestion) -> Iterator[str]:
    limit = suggestion.memory_limit_bytes
    devices = f"{suggestion.devices:,} device{'s' * (suggestion.devices > 1)}"
    room = "no memory limit" if limit is None else f"{bytes_text(limit)} per rank"
    packs = f"{suggestion.packs_per_step:,} pack{'s' * (suggestion.packs_per_step > 1)}"
    yield f"{suggestion.run} ({suggestion.llm}) on {devices}, {room}: the best layouts for a step of {packs}"
    if limit is None:
        yield "without parallel.device_memory_gib all layouts fit: set it for devices that are not here"


def _table(suggestion: Suggestion) -> list[str]:
    best = suggestion.layouts[0].step_seconds
    is_measured, layers = suggestion.measured_on is not None, suggestion.decoder_layers
    on_host = any(layout.host_bytes for layout in suggestion.layouts)
    unit, name = (2**30, "GiB") if max(x.memory_bytes for x in suggestion.layouts) >= 2**30 else (2**20, "MiB")
    rows = []
    for number, layout in enumerate(suggestion.layouts, 1):
        size = layout.size
        streamed = f"{size.source}/{size.shards}" if size.source == "peers" else size.source
        amounts = [layout.memory_bytes, layout.host_bytes][: 1 + on_host]
        rows.append(
            [
                number,
                size.pipeline,
                f"{size.data:,}",
                size.packs_per_microbatch,
                streamed or "-",
                f"{layout.recompute_layers} of {layers}",
                *(f"{amount / unit:,.1f}" if amount else "-" for amount in amounts),
                f"{layout.step_seconds:,.3g}" if is_measured else f"{layout.step_seconds / best:.2f}",
            ]
        )
    sizes = [f">memory\n{name}", f">host\n{name}"][: 1 + on_host]
    step = ">step\ns" if is_measured else ">step\nratio"
    columns = "", ">pipeline", ">data", ">packs a\nmicro-batch", "streamed", ">recompute\nlayers", *sizes, step
    return table_lines(columns, rows)


def _notes(suggestion: Suggestion) -> Iterator[str]:
    """Say what the numbers rest on, and what was left to the planner."""
    simpler = f"of layouts within {SIMPLER:.0%} the simpler comes first"
    if suggestion.measured_on is None:
        yield f"costs: assumed: ratios, no seconds; mmtrain calibrate CONFIG measures those; {simpler}"
    else:
        yield f"costs: calibrated on {suggestion.measured_on}; {simpler}"
    if suggestion.not_measured:
        yield f"{suggestion.not_measured} layouts are left out: this calibration does not cover them"
    if any(layout.size.source == "peers" for layout in suggestion.layouts):
        links = f"{suggestion.peer_bytes_per_second / 1e9:,.3g} GB/s"
        known = "measured" if "peers" in suggestion.measured_fetches else "assumed"
        yield f"from peers: links of {links} are {known}; it pays inside a machine with NVLink, and there alone"
    if any(layout.size.source in BITS for layout in suggestion.layouts):
        yield (
            f"{' and '.join(BITS)}: another LLM, near {suggestion.llm}; needs pip install 'mmtrain[quantize]'; such "
            "layouts come last"
        )
    if suggestion.by_hand:
        yield f"left to the planner, though CONFIG states them: {', '.join(suggestion.by_hand)}"
    tried = f"{suggestion.tried} layouts were planned, the most promising first"
    yield tried + (f"; {suggestion.not_tried} more may be as good" if suggestion.not_tried else "")


def _pasted(mark: str, layout: SuggestedLayout) -> list[str]:
    """Return one line for a shell, wrapped behind backslashes to the terminal's width."""
    options = " ".join(as_options(layout.overrides)) or "nothing: it is that of CONFIG"
    wrap = textwrap.TextWrapper(
        COLUMNS - 2,
        initial_indent=mark,
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = wrap.wrap(options)
    return [*(f"{line} \\" for line in lines[:-1]), *lines[-1:]]
