"""Suggest layouts of a run for a number of devices: pipeline x replicas, packs a micro-batch,
streaming or none.

config, N --candidates: all layouts of N devices, as overrides of the config
          --least_step_seconds--> the most promising ones first
          --the search that make_plan runs--> layouts that fit, with their steps
          --the fastest first, but quantised ones last--> the best
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
from mmtrain.base.printing import bytes_text, counted, table_lines, terminal_width
from mmtrain.config.load import validated
from mmtrain.config.parallel import MAX_MICROBATCHES
from mmtrain.config.schema import MAX_RANKS, RunConfig, TrainSection
from mmtrain.facts.models import Models, models_of
from mmtrain.facts.quantised import BITS, QUANTISATIONS
from mmtrain.facts.shapes import LlmShape
from mmtrain.plan.calibration import Device
from mmtrain.plan.plan import unit_of, wrapped
from mmtrain.plan.planner import make_plan, memory_limit
from mmtrain.plan.refusals import check_run
from mmtrain.plan.search import Search, least_step_seconds
from mmtrain.plan.stage_costs import StageCosts, stage_costs

MOST_LAYOUTS = 5
MOST_PLANS = 30
"""Of 7 runs on 4 and 8 devices, 6 to 25 plans give the five layouts that planning all 21 to 57
gives; 10 plans miss the fastest by 67% at worst, 15 never do. A plan of a 7B takes half a second,
one of a 32B two."""
WORTH = 0.01
"""Share of a step that more packs, streaming or quantising must save. Times are estimates."""
MOST_TOKENS = 2**16
"""Of a micro-batch that has several packs: from 10,000 on every fetch of weights hides behind
computing.
"""
MOST_SHARDS = 8
"""Replicas that keep a part each of streamed layers: the GPUs of a machine with NVLink."""
MOST_REPLICAS = 10_000  # that parallel.data may be
CALIBRATION = "parallel.calibration"
Changes = dict[str, Any]
"""Values by key; some may be the config's own."""
BY_HAND: Changes = {
    "parallel.boundaries": None,
    "parallel.stages_per_rank": "auto",
    "parallel.recompute_layers": "auto",
    "parallel.encoder_ranks": "auto",
}
"""Keys that belong to one layout, and the value that leaves each to the planner."""
SAVINGS = (
    {"train.packs_per_microbatch": 1},
    {"model.llm.dtype": "bfloat16"},
    {"parallel.streamed_layers": "auto", "model.llm.quantize": None},
)
"""Changes that take less memory with the same ranks and packs, each tried with those before it."""


class Size(NamedTuple):
    """The facts that tell layouts apart, besides the planner's choices."""

    pipeline: int
    data: int
    packs_per_microbatch: int
    source: str | None  # of streamed or quantised layers; None: nothing is
    shards: int  # replicas that share the streamed layers

    @property
    def is_quantised(self) -> bool:
        return self.source in BITS

    def is_more_than(self, other: Size) -> bool:
        """Whether the ranks are the same, and this layout takes more packs, streams, or has more
        shards.
        """
        streams_more = self.source == other.source and self.shards >= other.shards
        more = self.packs_per_microbatch >= other.packs_per_microbatch and (
            streams_more or other.source is None
        )
        return self != other and self[:2] == other[:2] and more


@dataclass(frozen=True)
class SuggestedLayout:
    overrides: Changes  # what differs from the config: with these `make_plan` gives this layout
    size: Size
    recompute_layers: int  # decoder layers, over all ranks of a replica
    memory_bytes: int  # of the fullest rank
    host_bytes: int  # of streamed layers in its machine's memory, of the rank with the most
    step_seconds: float  # where costs are assumed, only ratios of these mean anything


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class _Candidate:
    overrides: Changes  # what differs from the run's own config
    config: RunConfig  # with these
    costs: StageCosts
    bound: float  # seconds that a step takes at least; infinite: it cannot fit

    @property
    def size(self) -> Size:
        parallel = self.config.parallel
        streaming = self.costs.setting.streaming
        source = streaming.source if streaming.is_possible else None
        packs = self.config.train.packs_per_microbatch
        return Size(parallel.pipeline, parallel.data, packs, source, parallel.weight_shards or 1)


def suggest(
    config: RunConfig,
    devices: int,
    device_memory_bytes: int | None = None,
    device: Device | None = None,
) -> Suggestion:
    """Suggest at most five layouts that use `devices` devices, the fastest first; starts nothing.

    Candidates are planned in the order of a lower bound of their steps, until none of the others
    can be among the best, MOST_PLANS at most. A layout that takes more packs or streams more than
    another of the same ranks must save WORTH. Candidates without calibrated costs are left out
    where others have them. Layouts that quantise come last, and only if WORTH faster.

    Raises UserError for a number of devices that no layout can use, and where nothing fits.
    """
    models = models_of(config).read()
    limit = memory_limit(config.parallel, device_memory_bytes)
    changes = candidates(config, models.llm, devices)
    check_run(config.changed(changes[0]), models)
    every = [_with_bound(config, x, models, limit, device) for x in changes]
    used = [x for x in every if x.costs.timings.device is not None and x.bound < math.inf] or every

    layouts: list[SuggestedLayout] = []
    tried = not_tried = 0
    for candidate in sorted(used, key=lambda x: (x.size.is_quantised, x.bound)):
        if not _may_be_best(candidate, layouts):
            continue
        if tried == MOST_PLANS:
            not_tried += 1
            continue
        tried += 1
        layout = _layout(candidate)
        if layout is not None:
            layouts.append(layout)

    best = _best(layouts) or [_smallest(used, device_memory_bytes, device)]
    by_hand = [*overrides(config, BY_HAND)]
    if any(CALIBRATION in x.overrides for x in best):
        by_hand.append(CALIBRATION)
    return Suggestion(
        config=config,
        devices=devices,
        decoder_layers=len(models.llm.decoder),
        memory_limit_bytes=limit,
        layouts=tuple(best),
        by_hand=tuple(by_hand),
        measured_on=used[0].costs.timings.device,
        not_measured=len(every) - len(used),
        tried=tried,
        not_tried=not_tried,
    )


def _with_bound(
    config: RunConfig,
    changes: Changes,
    models: Models,
    limit: int | None,
    device: Device | None,
) -> _Candidate:
    """Return a candidate with its costs: calibrated where the named calibration fits it, else
    assumed.
    """
    changed = config.changed(changes)
    try:
        costs = stage_costs(changed, models, limit, device)
    except UserError:
        changes = changes | {CALIBRATION: None}
        changed = config.changed(changes)
        costs = stage_costs(changed, models, limit, device)
    return _Candidate(overrides(config, changes), changed, costs, least_step_seconds(costs))


def _may_be_best(candidate: _Candidate, layouts: Sequence[SuggestedLayout]) -> bool:
    """Whether a candidate that takes no longer than its bound would be among the best."""
    hoped = SuggestedLayout(candidate.overrides, candidate.size, 0, 0, 0, candidate.bound)
    return candidate.bound < math.inf and hoped in _best([*layouts, hoped])


def _layout(candidate: _Candidate) -> SuggestedLayout | None:
    """Return the layout that `make_plan` finds; None if none fits, or if a streaming one streams
    nothing.
    """
    layout = Search(candidate.costs, "auto").find("auto")
    if layout is None:
        return None
    if candidate.size.source is not None and not any(rank.streamed for rank in layout.ranks):
        return None
    return SuggestedLayout(
        overrides=candidate.overrides,
        size=candidate.size,
        recompute_layers=sum(layout.recompute_layers),
        memory_bytes=max(rank.total_bytes for rank in layout.ranks),
        host_bytes=max(rank.host_bytes for rank in layout.ranks),
        step_seconds=layout.simulation.seconds,
    )


def _best(layouts: Sequence[SuggestedLayout]) -> list[SuggestedLayout]:
    """The fastest layouts that are worth it, MOST_LAYOUTS at most; the last ones quantise, if any
    of those saves WORTH.
    """
    worth = [x for x in layouts if _saves(x.size, x.step_seconds, layouts)]
    worth.sort(key=lambda x: x.step_seconds)
    exact = [x for x in worth if not x.size.is_quantised][:MOST_LAYOUTS]
    limit = math.inf
    if exact:
        limit = exact[0].step_seconds * (1 - WORTH)
    faster = [x for x in worth if x.size.is_quantised and x.step_seconds < limit]
    quantised = faster[: max(1, MOST_LAYOUTS - len(exact))]
    return [*exact[: MOST_LAYOUTS - len(quantised)], *quantised]


def _saves(size: Size, seconds: float, layouts: Sequence[SuggestedLayout]) -> bool:
    """Whether `size` saves WORTH over every layout with the same ranks that takes fewer packs or
    streams less.
    """
    return not any(
        size.is_more_than(x.size) and x.step_seconds <= seconds * (1 + WORTH) for x in layouts
    )


def _smallest(
    used: Sequence[_Candidate],
    device_memory_bytes: int | None,
    device: Device | None,
) -> SuggestedLayout:
    """Return the layout that needs the least memory; raise UserError with what it needs if it does
    not fit.
    """
    sources = ("host", "peers", None, *QUANTISATIONS)

    def memory(candidate: _Candidate) -> tuple[int, ...]:
        pipeline, _, packs, source, shards = candidate.size
        return candidate.size.is_quantised, -pipeline, packs, sources.index(source), -shards

    smallest = min(used, key=memory)
    try:
        make_plan(smallest.config, device_memory_bytes, device)
    except UserError as error:
        changes = " ".join(as_options(smallest.overrides)) or "that of the configuration"
        count = counted(smallest.size.pipeline * smallest.size.data, "device")
        raise UserError(f"no layout of {count} fits. The smallest, {changes}:\n{error}") from None
    return _layout(smallest)


# ---- what fits


def what_fits(
    config: RunConfig,
    device_memory_bytes: int | None,
    device: Device | None,
) -> str:
    """Return a sentence with overrides by which a run fits that does not: each was planned.

    The first leaves the LLM whole: it changes as little as fits, rather the ranks than the packs.
    The second quantises.
    """
    models = models_of(config).read()
    limit = memory_limit(config.parallel, device_memory_bytes)

    def planned(changes: Changes) -> str:
        changes = BY_HAND | changes
        try:
            check_run(validated(config.changed(changes).model_dump(), "a hint"), models)
        except UserError:  # e.g. more stages than layers
            return ""
        candidate = _with_bound(config, changes, models, limit, device)
        if candidate.bound == math.inf or not Search(candidate.costs, "auto").surely_fits():
            return ""
        return " ".join(as_options(candidate.overrides))

    savings = [saving for saving in SAVINGS if overrides(config, saving)]
    added = [*itertools.accumulate(({}, *savings), operator.or_)]
    whole = itertools.starmap(operator.or_, itertools.product(_sizes(config, models), added))
    quantised = [kept(0) | {"model.llm.quantize": codes} for codes in QUANTISATIONS]
    hints = [next(filter(None, map(planned, options)), "") for options in (whole, quantised)]
    if any(hints):
        return f"To use less memory (planned: it fits): {'; or '.join(filter(None, hints))}"
    return (
        "Neither more ranks nor shorter packs nor streamed layers fit. "
        "Train less, or use devices with more memory"
    )


def _sizes(config: RunConfig, models: Models) -> Iterator[Changes]:
    """Yield the run's own ranks and packs, other layouts of as many ranks, more ranks, then these
    with shorter packs.

    Shorter packs have room for the largest image and much text, and a step has as many tokens.
    """
    pipeline = config.parallel.pipeline
    data = config.parallel.data
    ranks = pipeline * data
    layouts = [(pipeline, data)]
    layouts += [(ranks // n, n) for n in _divisors(ranks)]
    layouts += [(pipeline * times, data) for times in (2, 4, 8, 16)]
    needed = models.layout.most_positions + 2 * config.data.expected_text_tokens
    for parts in (1, 2, 4, 8):
        length = config.data.pack_length // parts
        if parts > 1 and length < needed:
            continue
        for pipeline, data in layouts:
            yield {
                "parallel.pipeline": pipeline,
                "parallel.data": data,
                "data.pack_length": length,
                "train.packs_per_step": config.train.packs_per_step * parts,
            }


# ---- candidates


def candidates(config: RunConfig, llm: LlmShape, devices: int) -> list[Changes]:
    """List all layouts that use `devices` devices, whether or not they fit in memory.

    Raises UserError if there is none, saying what would have to change.
    """
    if not 1 <= devices <= MAX_RANKS:
        raise UserError(f"{devices} devices: choose 1 to {MAX_RANKS:,} devices")
    decoder_layers = len(llm.decoder)
    sizes = []
    for data in _divisors(devices):
        if devices // data <= decoder_layers + 2 and data <= MOST_REPLICAS:
            sizes.append((devices // data, data))

    layouts = []
    for pipeline, data in sizes:
        its_packs = _packs(config.train, config.data.pack_length, pipeline, data)
        for packs, where in itertools.product(its_packs, _where_layers_are_kept(config, llm, data)):
            size = {
                "parallel.pipeline": pipeline,
                "parallel.data": data,
                "train.packs_per_microbatch": packs,
            }
            layouts.append(size | where | BY_HAND)
    if layouts:
        return layouts

    packs = config.train.packs_per_step
    model = config.model.llm.path
    remedy = "Choose another number of devices"
    if sizes:
        below = max((packs - 1) // data * data for _, data in sizes)
        above = min((packs // data + 1) * data for _, data in sizes)
        fitting = " or ".join(f"{count:,}" for count in (below, above) if count)
        remedy = f"Set train.packs_per_step={fitting}, or choose another number of devices"
    raise UserError(
        f"{devices:,} devices: no layout uses all of them. There are at most {decoder_layers + 2} "
        f"pipeline ranks, one per layer of {model} (front, {decoder_layers} decoder layers, head), "
        f"at most {MOST_REPLICAS:,} replicas, a divisor of train.packs_per_step ({packs:,}), and "
        f"at most {MAX_MICROBATCHES:,} micro-batches on all ranks. {remedy}"
    )


def _packs(
    train: TrainSection,
    pack_length: int,
    pipeline: int,
    data: int,
) -> Iterator[int]:
    """Packs a micro-batch: more of them hide fetches, and take more memory."""
    if train.packs_per_step % data:
        return
    packs = train.packs_per_step // data
    for count in _divisors(packs):
        is_own = count in (1, train.packs_per_microbatch)
        may_be = is_own or count * pack_length <= MOST_TOKENS
        if may_be and packs // count * pipeline <= MAX_MICROBATCHES:
            yield count


def _where_layers_are_kept(
    config: RunConfig,
    llm: LlmShape,
    data: int,
) -> Iterator[Changes]:
    """Yield the homes of frozen decoder layers: on the devices, in fewer bits, or fetched before
    they compute.
    """
    yield kept(0)
    if config.model.llm.quantize is not None:
        return
    if llm.has_published_codes:
        yield kept(0) | {"model.llm.quantize": "published"}
    for bits in BITS:
        yield kept(0) | {"model.llm.quantize": bits}
    yield kept("auto")
    if config.parallel.host_memory_gib is None:  # a key of streaming from the host
        for shards in _divisors(data)[1:]:
            if shards <= MOST_SHARDS:
                yield kept("auto", "peers", shards)


def kept(layers: Any, source: str = "host", shards: int | None = None) -> Changes:
    return {
        "parallel.streamed_layers": layers,
        "parallel.stream_from": source,
        "parallel.weight_shards": shards,
    }


def overrides(config: RunConfig, changes: Changes) -> Changes:
    """Return the changes that are not the config's own values."""
    changed = {}
    for key, value in changes.items():
        if config.value_at(tuple(key.split("."))) != value:
            changed[key] = value
    return changed


def as_options(changes: Changes) -> list[str]:
    values = ("null" if value is None else value for value in changes.values())
    return [f"{key}={value}" for key, value in zip(changes, values, strict=True)]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


# ---- as text


def render_suggestion(suggestion: Suggestion) -> list[str]:
    """Return the layouts as lines that fit the terminal; long overrides are continued behind a
    backslash.
    """
    config = suggestion.config
    limit = suggestion.memory_limit_bytes
    devices = counted(suggestion.devices, "device")
    room = "no memory limit" if limit is None else f"{bytes_text(limit)} per rank"
    lines = wrapped(
        f"{config.run.name} ({config.model.llm.path}) on {devices}, {room}: "
        f"the best layouts for a step of {counted(config.train.packs_per_step, 'pack')}"
    )
    if limit is None:
        lines += wrapped(
            "without parallel.device_memory_gib all layouts fit; "
            "set it for devices that are not here"
        )
    lines += _table(suggestion)
    lines += wrapped(*_notes(suggestion))
    best, *others = suggestion.layouts
    lines += ["append to CONFIG for layout 1:", *_pasted("  ", best)]
    if others:
        lines.append("for the other layouts:")
    for number, layout in enumerate(others, 2):
        lines += _pasted(f"  {number}: ", layout)
    return lines


def _table(suggestion: Suggestion) -> list[str]:
    layouts = suggestion.layouts
    is_measured = suggestion.measured_on is not None
    streams_from_host = any(layout.host_bytes for layout in layouts)
    unit, name = unit_of(max(layout.memory_bytes for layout in layouts))
    columns = [
        "",
        ">pipeline",
        ">data",
        ">packs per\nmicro-batch",
        "streamed",
        ">recompute\nlayers",
        f">memory\n{name}",
    ]
    if streams_from_host:
        columns.append(f">host\n{name}")
    columns.append(">step\ns" if is_measured else ">step\nratio")

    rows = []
    for number, layout in enumerate(layouts, 1):
        size = layout.size
        streamed = size.source or "-"
        if size.source == "peers":
            streamed = f"peers/{size.shards}"
        row = [
            number,
            size.pipeline,
            f"{size.data:,}",
            size.packs_per_microbatch,
            streamed,
            f"{layout.recompute_layers} of {suggestion.decoder_layers}",
            f"{layout.memory_bytes / unit:,.1f}",
        ]
        if streams_from_host:
            row.append(f"{layout.host_bytes / unit:,.1f}" if layout.host_bytes else "-")
        if is_measured:
            row.append(f"{layout.step_seconds:,.3g}")
        else:
            row.append(f"{layout.step_seconds / layouts[0].step_seconds:.2f}")
        rows.append(row)
    return table_lines(columns, rows)


def _notes(suggestion: Suggestion) -> Iterator[str]:
    """Say on what the numbers rest, and what was left to the planner."""
    if suggestion.measured_on is None:
        yield "costs: assumed, as ratios; mmtrain calibrate CONFIG measures seconds"
    else:
        yield f"costs: calibrated on {suggestion.measured_on}"
    if suggestion.not_measured:
        yield (
            f"{suggestion.not_measured} layouts are left out: this calibration does not cover them"
        )
    sources = [layout.size.source for layout in suggestion.layouts]
    if "peers" in sources:
        yield "from peers: pays only inside a machine with NVLink"
    if not set(BITS).isdisjoint(sources):
        yield (
            f"{', '.join(BITS)}: a quantised LLM, near {suggestion.config.model.llm.path}; "
            "nf4 and int8 need pip install 'mmtrain[quantize]'; these layouts come last"
        )
    if suggestion.by_hand:
        yield f"chosen by the planner, although CONFIG sets them: {', '.join(suggestion.by_hand)}"
    tried = f"{suggestion.tried} layouts were planned, the most promising first"
    if suggestion.not_tried:
        tried += f"; {suggestion.not_tried} more may be as good"
    yield tried


def _pasted(mark: str, layout: SuggestedLayout) -> list[str]:
    """Return one line for a shell, wrapped behind backslashes to the terminal's width."""
    *others, last = textwrap.wrap(
        " ".join(as_options(layout.overrides)) or "(nothing: CONFIG has this layout)",
        terminal_width() - 2,
        initial_indent=mark,
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [*(f"{line} \\" for line in others), last]
