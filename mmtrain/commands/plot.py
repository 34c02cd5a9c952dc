"""Draw what every rank does when in one step, as a PNG: as planned, as measured, or one above the other.

    --plan CONFIG [key=value ...]   what the planner predicts for this run; starts nothing, needs no weights
    --trace RUN                     what a run did that was started with --trace: its folder, or its trace.json

Both share one scale of time. A plan without a calibration knows shares of the step, no seconds: it is drawn as wide as
the measured step. Numbers in the bars are micro-batches; the darker shades are a rank's later stages.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mmtrain.base.arguments import command_parser
from mmtrain.base.errors import UserError
from mmtrain.base.printing import tell
from mmtrain.config.load import load_config
from mmtrain.engine.trace import TRACE, WORK_OF, Work
from mmtrain.launching.machine import plan_for_here
from mmtrain.plan.simulate import Program, simulate
from mmtrain.stock.pretrained import expand_pretrained

EXAMPLES = """\
  the schedule of a configuration, before anything runs:
    mmtrain plot --plan configs/qwen25_72b_pp8_dp2.yaml
  a run beside its prediction:
    mmtrain train demo:llava_pp4 --trace
    mmtrain plot --plan demo:llava_pp4 --trace runs/llava_pp4 --out schedule.png
  another step of the trace, another layout of the plan:
    mmtrain plot --plan demo:llava_pp4 parallel.stages_per_rank=2 --trace runs/v2 --step 2
"""
# Name, and Okabe and Ito's colours, which the colour-blind tell apart: of a rank's first stage and of its last.
STYLES = {
    Work.ENCODE: ("encoder", "#009E73", "#009E73"),
    Work.FORWARD: ("forward", "#56B4E9", "#0072B2"),
    Work.BACKWARD: ("backward", "#F0C75E", "#D55E00"),
    Work.COMMUNICATION: ("communication", "#CC79A7", "#CC79A7"),
    Work.LOAD: ("data", "#5D4A8A", "#5D4A8A"),
    Work.OPTIMIZER: ("optimizer", "#333333", "#333333"),
}
IDLE = "#ECECEC"
PIXELS, DPI = 1200, 100
ROW, AROUND = 0.42, 0.95  # inches of a rank, and of a panel's title and axis
WIDEST_LEGEND = 8
SMALL, LARGE = 7, 9  # points of numbers in bars
DIGIT_PIXELS = 5.4  # of small ones
ROOMY_PIXELS = 24
EDGE_PIXELS = 5  # narrower bars have no edge: it would hide them


class Bar(NamedTuple):
    """What a pipeline rank does from `begin` to `end`; stage and micro-batch are -1 where the whole rank is meant."""

    rank: int
    work: Work
    stage: int
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step, from 0 to `length`: in seconds, or (`in_seconds` false) in a unit that only shares matter of."""

    title: str
    ranks: int
    length: float
    in_seconds: bool
    bars: tuple[Bar, ...]  # none for idle time
    idle: tuple[float, ...]  # share of the step, by rank

    @property
    def stages_per_rank(self) -> int:
        """Stages that a rank holds."""
        return 1 + max((bar.stage // self.ranks for bar in self.bars), default=0)

    def stretched(self, length: float) -> Timeline:
        """The same over another length."""
        factor = length / self.length
        bars = tuple(bar._replace(begin=bar.begin * factor, end=bar.end * factor) for bar in self.bars)
        return replace(self, length=length, bars=bars)


def predicted(config_file: str, overrides: Sequence[str]) -> Timeline:
    """The step that the planner expects; raises UserError for a config that cannot be planned."""
    plan = plan_for_here(expand_pretrained(load_config(config_file, overrides)))
    step = simulate(Program(plan.schedule), plan.seconds, spans=True)
    bars = tuple(
        Bar(span.rank, WORK_OF[span.instruction.op], span.instruction.stage, span.instruction.microbatch, *span[2:])
        for span in step.spans
    )
    known = plan.step_seconds is not None
    text = f"predicted for {plan.run}: {_about(step.seconds if known else None, step.idle)}"
    return Timeline(text, plan.pipeline, step.seconds, known, bars, step.idle)


def measured(path: Path, step: int | None, replica: int) -> Timeline:
    """One step of a trace; None: the last. Raises UserError where it is not in there.

    Idle shares are of the whole step, as the simulation's; those in metrics.jsonl leave the optimizer out.
    """
    file = path / TRACE if path.is_dir() else path
    about, events = _read(file)
    steps = about["steps"]
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"--step {step}: {file} has steps {steps[0]} to {steps[-1]} (counted from 0)")
    if not 0 <= replica < about["data"]:
        raise UserError(f"--replica {replica}: {file} has {about['data']}, counted from 0")
    mine = [event for event in events if event["args"]["step"] == step]
    begin = min(event["ts"] for event in mine)
    length = (max(event["ts"] + event["dur"] for event in mine) - begin) / 1e6
    bars = tuple(
        Bar(
            event["tid"],
            Work(event["cat"]),
            event["args"].get("stage", -1),
            event["args"].get("microbatch", -1),
            (event["ts"] - begin) / 1e6,
            (event["ts"] - begin + event["dur"]) / 1e6,
        )
        for event in mine
        if event["pid"] == replica and event["cat"] != Work.WAIT
    )
    busy: dict[int, float] = defaultdict(float)
    for bar in bars:
        busy[bar.rank] += bar.end - bar.begin
    idle = tuple(1 - busy[rank] / length for rank in range(about["pipeline"]))
    of_replica = f", replica {replica}" if about["data"] > 1 else ""
    text = f"measured in {about['run']}, step {step}{of_replica}: {_about(length, idle)}"
    return Timeline(text, about["pipeline"], length, True, bars, idle)


def _read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a trace says of its run, and its events that have a duration."""
    try:
        content = json.loads(file.read_text())
        about, events = content["otherData"], [event for event in content["traceEvents"] if event["ph"] == "X"]
        assert about["steps"] and {"run", "pipeline", "data"} <= about.keys()
        assert {event["args"]["step"] for event in events} >= set(about["steps"])
        assert all({"tid", "pid", "cat", "ts", "dur"} <= event.keys() for event in events)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; a run that is started with --trace leaves it in its folder") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"{file}: not a trace that mmtrain train --trace has written ({error!r})") from error
    return about, events


def _about(seconds: float | None, idle: Sequence[float]) -> str:
    length = "" if seconds is None else f"{seconds * 1e3:,.1f} ms, " if seconds < 1 else f"{seconds:,.2f} s, "
    return f"{length}idle {sum(idle) / len(idle):.1%}"


# ---- drawing


def draw(timelines: Sequence[Timeline], file: Path) -> None:
    """Write the timelines as a PNG, one below the other on one scale; raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.patches import Patch
    except ModuleNotFoundError:
        raise UserError("matplotlib is not installed; install it: pip install 'mmtrain[plot]'") from None
    known = [timeline.length for timeline in timelines if timeline.in_seconds]
    timelines = [t if t.in_seconds or not known else t.stretched(max(known)) for t in timelines]
    longest = max(timeline.length for timeline in timelines)
    heights = [ROW * timeline.ranks + AROUND for timeline in timelines]
    figure = Figure(figsize=(PIXELS / DPI, sum(heights) + 0.45), dpi=DPI, layout=ConstrainedLayoutEngine(h_pad=0.08))
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw_panel(axes, timeline, longest)
    used = {bar.work for timeline in timelines for bar in timeline.bars}
    keys = [Patch(facecolor=last, label=name) for work, (name, _, last) in STYLES.items() if work in used]
    keys.append(Patch(facecolor=IDLE, label="idle"))
    if max(timeline.stages_per_rank for timeline in timelines) > 1:
        keys.append(Patch(facecolor="none", label="darker: a later stage of the rank"))
    figure.legend(handles=keys, loc="outside lower center", ncols=WIDEST_LEGEND, frameon=False, fontsize=10)
    try:
        figure.savefig(file, format="png")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from error


def _draw_panel(axes: Any, timeline: Timeline, longest: float) -> None:
    pixels = 0.88 * PIXELS / longest  # of a unit of time
    stages_per_rank = timeline.stages_per_rank
    widths = [bar.end - bar.begin for bar in timeline.bars if bar.work in (Work.FORWARD, Work.BACKWARD)]
    edge = 0.6 if widths and min(widths) * pixels > EDGE_PIXELS else 0.0
    for rank in range(timeline.ranks):
        axes.broken_barh([(0, timeline.length)], (rank - 0.4, 0.8), facecolor=IDLE)
        mine = [bar for bar in timeline.bars if bar.rank == rank]
        colours = [_colour(bar, timeline.ranks, stages_per_rank) for bar in mine]
        spans = [(bar.begin, bar.end - bar.begin) for bar in mine]
        axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor=colours, edgecolor="white", linewidth=edge)
        for bar, colour in zip(mine, colours, strict=True):
            _number(axes, bar, pixels, colour)
        axes.text(
            1.008, rank, f"{timeline.idle[rank]:.1%}", transform=axes.get_yaxis_transform(), va="center", fontsize=10
        )
    axes.set_title(timeline.title, loc="left", fontsize=11)
    axes.annotate("idle", (1.008, 1), (0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=10)
    axes.set_xlim(0, longest)
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)], fontsize=10)
    axes.tick_params(left=False, labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if timeline.in_seconds:
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:,.10g} ms" if seconds else "0")
    else:
        axes.set_xticks([timeline.length * tenth / 5 for tenth in range(6)])
        axes.xaxis.set_major_formatter(lambda time, _: f"{time / timeline.length:.0%}")


def _colour(bar: Bar, ranks: int, stages_per_rank: int) -> tuple[float, ...]:
    """Red, green and blue from 0 to 1: the later a rank's stage, the darker."""
    from matplotlib.colors import to_rgb

    share = 1.0 if stages_per_rank == 1 or bar.stage < 0 else (bar.stage // ranks) / (stages_per_rank - 1)
    return tuple(a + (b - a) * share for a, b in zip(*map(to_rgb, STYLES[bar.work][1:]), strict=True))


def _number(axes: Any, bar: Bar, pixels: float, colour: Sequence[float]) -> None:
    """The micro-batch, where a bar is wide enough to hold it."""
    if bar.microbatch < 0 or bar.work in (Work.COMMUNICATION, Work.LOAD):
        return
    text = str(bar.microbatch)
    width = (bar.end - bar.begin) * pixels
    if width < DIGIT_PIXELS * (len(text) + 0.4):
        return
    brightness = sum(weight * light for weight, light in zip((0.3, 0.59, 0.11), colour, strict=True))
    middle = (bar.begin + bar.end) / 2
    shade = "black" if brightness > 0.55 else "white"
    size = LARGE if width > ROOMY_PIXELS else SMALL
    axes.text(middle, bar.rank, text, ha="center", va="center_baseline", fontsize=size, color=shade)


# ---- command line


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; `--help` teaches by example."""
    parser = command_parser("plot", __doc__, EXAMPLES, {0: "the picture is written"})
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="set a key of --plan's CONFIG")
    parser.add_argument("--plan", metavar="CONFIG", help="YAML file of a run, or demo:llava_pp4")
    parser.add_argument("--trace", type=Path, metavar="RUN", help="a run's folder, or a trace.json")
    parser.add_argument("--step", type=int, metavar="N", help="which step of the trace, from 0 (its last)")
    parser.add_argument("--replica", type=int, default=0, metavar="R", help="which replica of the trace, from 0 (0)")
    parser.add_argument("--out", type=Path, default=Path("schedule.png"), metavar="FILE", help="(schedule.png)")
    options = parser.parse_intermixed_args(arguments)
    if options.plan is None and options.trace is None:
        parser.error("nothing to draw: give --plan CONFIG, --trace RUN, or both")
    if options.plan is None and options.overrides:
        parser.error(f"{options.overrides[0]}: keys are set for --plan CONFIG, which is not given")
    if options.trace is None and (options.step is not None or options.replica):
        parser.error("--step and --replica are of a trace: give --trace RUN")
    if options.out.suffix.lower() != ".png":
        parser.error(f"--out {options.out}: the picture is a PNG; name a file that ends in .png")
    return options


def run(options: argparse.Namespace) -> None:
    """Draw what the options name and say what it shows; raises UserError."""
    timelines = [] if options.plan is None else [predicted(options.plan, options.overrides)]
    timelines += [] if options.trace is None else [measured(options.trace, options.step, options.replica)]
    draw(timelines, options.out)
    for timeline in timelines:
        tell(f"{timeline.title} ({', '.join(f'rank {r}: {share:.1%}' for r, share in enumerate(timeline.idle))})")
    layouts = {(timeline.ranks, timeline.stages_per_rank) for timeline in timelines}
    if len(layouts) > 1:
        tell("note: the plan and the trace are of different layouts")
    tell(f"written to {options.out}")
