"""Suggest layouts of a run for a number of devices: pipeline x replicas, packs a micro-batch,
streaming or none.

config, N --candidates: all layouts of N devices, as overrides of the config
          --least_step_seconds--> the most promising ones first
          --the search that make_plan runs--> layouts that fit, with their steps --simpler ones
              first--> the best
          --render_suggestion--> a table with a row a layout, and what to put behind CONFIG for each

Every layout makes the same step. Candidates do not change what it computes, except those that
quantise frozen layers.
"""

from __future__ import annotations

import itertools
import math
import operator
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text, table_lines, terminal_width
from mmtrain.config.load import validated
from mmtrain.config.parallel import MAX_MICROBATCHES
from mmtrain.config.schema import MAX_RANKS, RunConfig
from mmtrain.facts.models import Models, models_of
from mmtrain.facts.quantised import BITS
from mmtrain.plan.calibration import Device
from mmtrain.plan.plan import wrapped
from mmtrain.plan.planner import make_plan, memory_limit
from mmtrain.plan.refusals import check_run
from mmtrain.plan.search import Search, least_step_seconds
from mmtrain.plan.stage_costs import StageCosts, stage_costs

MOST_LAYOUTS = 5
MOST_PLANS = 30
"""Of 7 runs on 4 and 8 devices, 6 to 25 plans give the five layouts that planning all 21 to 57
gives; 10 plans miss the fastest by 67% at worst, 15 never do. A plan of a 7B takes half a second,
one of a 32B two."""
SIMPLER = 0.01
"""Share of a step that a layout must save to come before a simpler one. Times are estimates."""
MOST_TOKENS = 2**16
"""Of a micro-batch that has several packs: from 10,000 on every fetch of weights hides behind
computing.
"""
MOST_SHARDS = 8
"""Replicas that keep a part each of streamed layers: the GPUs of a machine with NVLink."""
MOST_REPLICAS = 10_000  # that parallel.data may be
CALIBRATION = "parallel.calibration"
BY_HAND: dict[str, Any] = {
    "parallel.boundaries": None,
    "parallel.stages_per_rank": "auto",
    "parallel.recompute_layers": "auto",
    "parallel.encoder_ranks": "auto",
}
"""Keys that belong to one layout, and the value that leaves each to the planner."""
Changes = dict[str, Any]
"""Values by key; some may be the config's own."""
SAVINGS: tuple[Changes, ...] = (
    {"train.packs_per_microbatch": 1},
    {"model.llm.dtype": "bfloat16"},
    {"parallel.streamed_layers": "auto", "model.llm.quantize": None},
)
"""Changes that take less memory with the same ranks and packs, each tried with those before it."""


class Size(NamedTuple):
    """What tells layouts apart, besides what the planner chooses."""

    pipeline: int
    data: int
    packs_per_microbatch: int
    source: str | None  # of streamed or quantised layers; None: nothing is
    shards: int  # replicas that share the streamed layers

    @property
    def is_quantised(self) -> bool:
        return self.source in BITS

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Sort key, the simplest first: nothing streamed, host, peers, quantised; then fewer ranks,
        packs, shards.
        """
        source = {None: 0, "host": 1, "peers": 2}.get(self.source, 3)
        return source, self.pipeline, self.packs_per_microbatch, self.shards

    def is_more_than(self, other: Size) -> bool:
        """Whether the ranks are the same, and this layout takes more packs, streams, or has more
        shards.
        """
        streams_more = self.source == other.source and self.shards >= other.shards
        more = self.packs_per_microbatch >= other.packs_per_microbatch and (
            streams_more or other.source is None
        )
        return self != other and self[:2] == other[:2] and more


@dataclass(frozen=True, slots=True)
class SuggestedLayout:
    overrides: Changes  # what differs from the config: with these `make_plan` gives this layout
    size: Size
    recompute_layers: int  # decoder layers, over all ranks of a replica
    memory_bytes: int  # of the fullest rank
    host_bytes: int  # of streamed layers in its machine's memory, of the rank with the most
    step_seconds: float  # where costs are assumed, only ratios of these mean anything


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The best layouts of a run for a number of devices."""

    config: RunConfig
    devices: int
    decoder_layers: int
    memory_limit_bytes: int | None  # of a rank
    layouts: tuple[SuggestedLayout, ...]  # at least one; the best first
    # keys that the config states and that the layouts leave to the planner
    by_hand: tuple[str, ...]
    # the device whose calibration gives the seconds; None: they are assumed
    measured_on: str | None
    not_measured: int  # candidates left out, since no calibration says what they take
    tried: int  # candidates that were planned
    not_tried: int  # candidates that might be among the best, beyond MOST_PLANS


@dataclass(frozen=True, slots=True)
class _Candidate:
    changes: Changes
    config: RunConfig  # with these
    costs: StageCosts
    bound: float  # seconds that a step takes at least; infinite: it cannot fit

    @property
    def size(self) -> Size:
        parallel, streaming = self.config.parallel, self.costs.setting.streaming
        source = streaming.source if streaming.is_possible else None
        packs = self.config.train.packs_per_microbatch
        return Size(parallel.pipeline, parallel.data, packs, source, parallel.weight_shards or 1)


def suggest(
    config: RunConfig,
    devices: int,
    device_memory_bytes: int | None = None,
    device: Device | None = None,
) -> Suggestion:
    """Suggest at most five layouts that use `devices` devices; starts nothing.

    Candidates are planned in the order of a lower bound of their steps, until none of the others
    can be among the best, MOST_PLANS at most. First comes the fastest, or the simplest of all that
    take at most SIMPLER longer. Candidates without calibrated costs are left out where others have
    them. Layouts that quantise come last, and only if faster.

    Raises UserError for a number of devices that no layout can use, and where nothing fits.
    """
    models = models_of(config).read()
    limit = memory_limit(config, device_memory_bytes)
    changes = candidates(config, len(models.llm.decoder), devices)
    check_run(config.changed(changes[0]), models)
    every = [_with_bound(config, x, models, limit, device) for x in changes]
    used = [x for x in every if x.costs.timings.device is not None and x.bound < math.inf] or every
    layouts: list[SuggestedLayout] = []
    tried = not_tried = 0
    for candidate in sorted(used, key=lambda x: (x.size.is_quantised, x.bound, x.size.simplicity)):
        if not _may_be_best(candidate, layouts):
            continue
        if tried == MOST_PLANS:
            not_tried += 1
            continue
        tried += 1
        layout = _layout(candidate, config)
        if layout is not None:
            layouts.append(layout)
    best = _best(layouts) or [_smallest(config, used, device_memory_bytes, device)]
    keys = [*overrides(config, BY_HAND)] + [CALIBRATION] * any(
        CALIBRATION in x.overrides for x in best
    )
    return Suggestion(
        config=config,
        devices=devices,
        decoder_layers=len(models.llm.decoder),
        memory_limit_bytes=limit,
        layouts=tuple(best),
        by_hand=tuple(keys),
        measured_on=used[0].costs.timings.device,
        not_measured=len(every) - len(used),
        tried=tried,
        not_tried=not_tried,
    )


def _with_bound(
    config: RunConfig, changes: Changes, models: Models, limit: int | None, device: Device | None
) -> _Candidate:
    """Return a candidate with its costs: calibrated where the named calibration fits it, else
    assumed.
    """
    try:
        costs = stage_costs(config.changed(changes), models, limit, device)
    except UserError:
        changes = changes | {CALIBRATION: None}
        costs = stage_costs(config.changed(changes), models, limit, device)
    return _Candidate(changes, config.changed(changes), costs, least_step_seconds(costs))


def _may_be_best(candidate: _Candidate, layouts: Sequence[SuggestedLayout]) -> bool:
    """Whether a candidate that takes no longer than its bound would be among the best."""
    alike = _first([x for x in layouts if x.size.is_quantised == candidate.size.is_quantised])
    slowest = (
        max(x.step_seconds for x in alike) * (1 + SIMPLER)
        if len(alike) == MOST_LAYOUTS
        else math.inf
    )
    if candidate.size.is_quantised:
        slowest = min(slowest, _fastest_exact(layouts) * (1 - SIMPLER))
    return candidate.bound < slowest and _saves(candidate.size, candidate.bound, layouts)


def _layout(candidate: _Candidate, config: RunConfig) -> SuggestedLayout | None:
    """Return the layout that `make_plan` finds; None if none fits, or if a streaming one streams
    nothing.
    """
    layout = Search(candidate.costs, "auto").find("auto")
    if layout is None:
        return None
    if candidate.size.source is not None and not any(rank.streamed for rank in layout.ranks):
        return None
    return SuggestedLayout(
        overrides=overrides(config, candidate.changes),
        size=candidate.size,
        recompute_layers=sum(layout.recompute_layers),
        memory_bytes=max(rank.total_bytes for rank in layout.ranks),
        host_bytes=max(rank.host_bytes for rank in layout.ranks),
        step_seconds=layout.simulation.seconds,
    )


def _best(layouts: Sequence[SuggestedLayout]) -> list[SuggestedLayout]:
    exact = _first([x for x in layouts if not x.size.is_quantised])
    limit = _fastest_exact(layouts) * (1 - SIMPLER)
    faster = _first([x for x in layouts if x.size.is_quantised and x.step_seconds < limit])
    faster = faster[: max(1, MOST_LAYOUTS - len(exact))]
    return [*exact[: MOST_LAYOUTS - len(faster)], *faster]


def _first(layouts: Sequence[SuggestedLayout]) -> list[SuggestedLayout]:
    """Return the first MOST_LAYOUTS, each the simplest of those that take at most SIMPLER longer
    than the fastest.
    """
    rest = [x for x in layouts if _saves(x.size, x.step_seconds, layouts)]
    first: list[SuggestedLayout] = []
    while rest and len(first) < MOST_LAYOUTS:
        longest = (1 + SIMPLER) * min(x.step_seconds for x in rest)
        first.append(
            min((x for x in rest if x.step_seconds <= longest), key=lambda x: x.size.simplicity)
        )
        rest.remove(first[-1])
    return first


def _fastest_exact(layouts: Sequence[SuggestedLayout]) -> float:
    return min((x.step_seconds for x in layouts if not x.size.is_quantised), default=math.inf)


def _saves(size: Size, seconds: float, layouts: Sequence[SuggestedLayout]) -> bool:
    """Whether `size` saves SIMPLER over every layout with the same ranks that takes fewer packs or
    streams less.
    """
    return not any(
        size.is_more_than(x.size) and x.step_seconds <= seconds * (1 + SIMPLER) for x in layouts
    )


def _smallest(
    config: RunConfig,
    used: Sequence[_Candidate],
    device_memory_bytes: int | None,
    device: Device | None,
) -> SuggestedLayout:
    """Return the layout that needs the least memory; raise UserError with what it needs if it does
    not fit.
    """
    sources = ("host", "peers", None, *BITS)

    def memory(candidate: _Candidate) -> tuple[int, ...]:
        pipeline, _, packs, source, shards = candidate.size
        return candidate.size.is_quantised, -pipeline, packs, sources.index(source), -shards

    smallest = min(used, key=memory)
    try:
        make_plan(smallest.config, device_memory_bytes, device)
    except UserError as error:
        changes = (
            " ".join(as_options(overrides(config, smallest.changes))) or "that of the configuration"
        )
        devices = smallest.size.pipeline * smallest.size.data
        count = f"{devices:,} device{'s' * (devices > 1)}"
        raise UserError(f"no layout of {count} fits. The smallest, {changes}:\n{error}") from None
    return _layout(smallest, config)


# ---- what fits


def what_fits(
    config: RunConfig, device_memory_bytes: int | None = None, device: Device | None = None
) -> str:
    """Return a sentence with overrides by which a run fits that does not: each was planned.

    The first leaves the LLM whole: it changes as little as fits, rather the ranks than the packs.
    The second quantises.
    """
    models = models_of(config).read()
    limit = memory_limit(config, device_memory_bytes)

    def planned(changes: Changes) -> str:
        changes = BY_HAND | changes
        try:
            check_run(validated(config.changed(changes).model_dump(), "a hint"), models)
        except UserError:  # e.g. more stages than layers
            return ""
        candidate = _with_bound(config, changes, models, limit, device)
        fits = candidate.bound < math.inf and Search(candidate.costs, "auto").surely_fits()
        return " ".join(as_options(overrides(config, candidate.changes))) if fits else ""

    savings = [saving for saving in SAVINGS if overrides(config, saving)]
    added = [*itertools.accumulate(({}, *savings), operator.or_)]
    whole = [sizes | changes for sizes, changes in itertools.product(_sizes(config, models), added)]
    quantised = [kept(0) | {"model.llm.quantize": bits} for bits in BITS]
    hints: list[str] = []
    for changes in (whole, quantised):
        hints += itertools.islice(filter(None, map(planned, changes)), 1)
    if hints:
        return f"To use less memory (planned: it fits): {'; or '.join(hints)}"
    return (
        "Neither more ranks nor shorter packs nor streamed layers fit. "
        "Train less, or use devices with more memory"
    )


def _sizes(config: RunConfig, models: Models) -> Iterator[Changes]:
    """Yield the run's own ranks and packs, other layouts of as many ranks, more ranks, then these
    with shorter packs.

    Shorter packs have room for the largest image and much text, and a step has as many tokens.
    """
    pipeline, data = config.parallel.pipeline, config.parallel.data
    layouts = [(pipeline, data), *((pipeline * data // n, n) for n in _divisors(pipeline * data))]
    layouts += [(pipeline * times, data) for times in (2, 4, 8, 16)]
    needed = models.layout.most_positions + 2 * config.data.expected_text_tokens
    keys = "parallel.pipeline", "parallel.data", "data.pack_length", "train.packs_per_step"
    for parts in (1, 2, 4, 8):
        length = config.data.pack_length // parts
        if parts == 1 or length >= needed:
            packs = length, config.train.packs_per_step * parts
            yield from (dict(zip(keys, layout + packs, strict=True)) for layout in layouts)


# ---- candidates


def candidates(config: RunConfig, decoder_layers: int, devices: int) -> list[Changes]:
    """List all layouts that use `devices` devices, whether or not they fit in memory.

    Raises UserError if there is none, saying what would have to change.
    """
    if not 1 <= devices <= MAX_RANKS:
        raise UserError(f"{devices} devices: choose 1 to {MAX_RANKS:,} devices")
    sizes = [(devices // data, data) for data in _divisors(devices)]
    sizes = [
        (pipeline, data)
        for pipeline, data in sizes
        if pipeline <= decoder_layers + 2 and data <= MOST_REPLICAS
    ]
    layouts = [
        {
            "parallel.pipeline": pipeline,
            "parallel.data": data,
            "train.packs_per_microbatch": packs,
            **kept,
            **BY_HAND,
        }
        for pipeline, data in sizes
        for packs in _packs(config, pipeline, data)
        for kept in _where_layers_are_kept(config, data)
    ]
    if layouts:
        return layouts
    packs, model = config.train.packs_per_step, config.model.llm.path
    remedy = "Choose another number of devices"
    if sizes:
        below = max((packs - 1) // data * data for _, data in sizes)
        above = min((packs // data + 1) * data for _, data in sizes)
        remedy = (
            f"Set train.packs_per_step={f'{below:,} or ' if below else ''}{above:,}, "
            f"or c{remedy[1:]}"
        )
    raise UserError(
        f"{devices:,} devices: no layout uses all of them. "
        f"There are at most {decoder_layers + 2} pipeline ranks, one "
        f"per layer of {model} (front, {decoder_layers} decoder layers, head), at most "
        f"{MOST_REPLICAS:,} replicas, "
        f"a divisor of train.packs_per_step ({packs:,}), and at most {MAX_MICROBATCHES:,} "
        "micro-batches on "
        f"all ranks. {remedy}"
    )


def _packs(config: RunConfig, pipeline: int, data: int) -> Iterator[int]:
    """Packs a micro-batch: more of them hide fetches, and take more memory."""
    if config.train.packs_per_step % data:
        return
    packs = config.train.packs_per_step // data
    for count in _divisors(packs):
        may_be = (
            count in (1, config.train.packs_per_microbatch)
            or count * config.data.pack_length <= MOST_TOKENS
        )
        if may_be and packs // count * pipeline <= MAX_MICROBATCHES:
            yield count


def _where_layers_are_kept(config: RunConfig, data: int) -> Iterator[Changes]:
    """Where frozen decoder layers are kept: on the devices, or fetched before they compute."""

    yield kept(0)
    if config.model.llm.quantize is None:
        yield from (kept(0) | {"model.llm.quantize": bits} for bits in BITS)
        yield kept("auto")
        if config.parallel.host_memory_gib is None:  # a key of streaming from the host
            yield from (
                kept("auto", "peers", shards)
                for shards in _divisors(data)[1:]
                if shards <= MOST_SHARDS
            )


def kept(layers: Any, source: str = "host", shards: int | None = None) -> Changes:
    keys = "streamed_layers", "stream_from", "weight_shards"
    return {
        f"parallel.{key}": value for key, value in zip(keys, (layers, source, shards), strict=True)
    }


def overrides(config: RunConfig, changes: Changes) -> Changes:
    return {
        key: value
        for key, value in changes.items()
        if config.value_at(tuple(key.split("."))) != value
    }


def as_options(changes: Changes) -> list[str]:
    return [f"{key}={'null' if value is None else value}" for key, value in changes.items()]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


# ---- as text


def render_suggestion(suggestion: Suggestion) -> list[str]:
    """Return the layouts as lines that fit the terminal; long overrides are continued behind a
    backslash.
    """
    config, limit = suggestion.config, suggestion.memory_limit_bytes
    devices = f"{suggestion.devices:,} device{'s' * (suggestion.devices > 1)}"
    room = "no memory limit" if limit is None else f"{bytes_text(limit)} per rank"
    packs = f"{config.train.packs_per_step:,} pack{'s' * (config.train.packs_per_step > 1)}"
    headline = [
        f"{config.run.name} ({config.model.llm.path}) on {devices}, {room}: "
        f"the best layouts for a step of {packs}"
    ]
    if limit is None:
        headline.append(
            "without parallel.device_memory_gib all layouts fit; "
            "set it for devices that are not here"
        )
    best, *others = suggestion.layouts
    return [
        *wrapped(*headline),
        *_table(suggestion),
        *wrapped(*_notes(suggestion)),
        "append to CONFIG for layout 1:",
        *_pasted("  ", best),
        *(["for the other layouts:"] if others else []),
        *(
            line
            for number, layout in enumerate(others, 2)
            for line in _pasted(f"  {number}: ", layout)
        ),
    ]


def _table(suggestion: Suggestion) -> list[str]:
    best = suggestion.layouts[0].step_seconds
    is_measured, layers = suggestion.measured_on is not None, suggestion.decoder_layers
    on_host = any(layout.host_bytes for layout in suggestion.layouts)
    unit, name = (
        (2**30, "GiB")
        if max(x.memory_bytes for x in suggestion.layouts) >= 2**30
        else (2**20, "MiB")
    )
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
                f"{layout.step_seconds:,.3g}"
                if is_measured
                else f"{layout.step_seconds / best:.2f}",
            ]
        )
    sizes = [f">memory\n{name}", f">host\n{name}"][: 1 + on_host]
    step = ">step\ns" if is_measured else ">step\nratio"
    columns = (
        "",
        ">pipeline",
        ">data",
        ">packs per\nmicro-batch",
        "streamed",
        ">recompute\nlayers",
        *sizes,
        step,
    )
    return table_lines(columns, rows)


def _notes(suggestion: Suggestion) -> Iterator[str]:
    """Say what the numbers rest on, and what was left to the planner."""
    simpler = f"among layouts within {SIMPLER:.0%}, the simpler comes first"
    if suggestion.measured_on is None:
        yield f"costs: assumed, as ratios; mmtrain calibrate CONFIG measures seconds; {simpler}"
    else:
        yield f"costs: calibrated on {suggestion.measured_on}; {simpler}"
    if suggestion.not_measured:
        yield (
            f"{suggestion.not_measured} layouts are left out: this calibration does not cover them"
        )
    if any(layout.size.source == "peers" for layout in suggestion.layouts):
        yield "from peers: pays only inside a machine with NVLink"
    if any(layout.size.source in BITS for layout in suggestion.layouts):
        yield (
            f"{' and '.join(BITS)}: a quantised LLM, near {suggestion.config.model.llm.path}; "
            "needs pip install "
            "'mmtrain[quantize]'; these layouts come last"
        )
    if suggestion.by_hand:
        yield f"chosen by the planner, although CONFIG sets them: {', '.join(suggestion.by_hand)}"
    tried = f"{suggestion.tried} layouts were planned, the most promising first"
    yield tried + (f"; {suggestion.not_tried} more may be as good" if suggestion.not_tried else "")


def _pasted(mark: str, layout: SuggestedLayout) -> list[str]:
    """Return one line for a shell, wrapped behind backslashes to the terminal's width."""
    options = " ".join(as_options(layout.overrides)) or "(nothing: CONFIG has this layout)"
    style = {
        "initial_indent": mark,
        "subsequent_indent": "    ",
        "break_on_hyphens": False,
        "break_long_words": False,
    }
    lines = textwrap.wrap(options, terminal_width() - 2, **style)
    return [*(f"{line} \\" for line in lines[:-1]), *lines[-1:]]
