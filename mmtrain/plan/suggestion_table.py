"""Suggested layouts as text for a terminal: a table with a row a layout, and what to put behind CONFIG for each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from mmtrain.base.printing import COLUMNS, bytes_text, table_lines
from mmtrain.plan.candidates import as_options
from mmtrain.plan.suggest import SIMPLER, SuggestedLayout, Suggestion
from mmtrain.plan.table import wrapped
from mmtrain.pretrained.quantised import BITS


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
