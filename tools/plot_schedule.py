"""Draw what every rank does in one step: as planned, as measured, or both on one scale of time.

    python tools/plot_schedule.py --plan CONFIG [key=value ...] [--trace RUN] [--step N] --out
        FILE.png

RUN is the folder of a run that was started with --trace; FILE may also be an SVG. A plan without a
calibration knows shares of a step but no seconds: it is drawn as wide as the measured step. Numbers
in bars are micro-batches; darker bars are a rank's later stages. Needs pip install 'mmtrain[plot]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mmtrain.base.printing import print_result, run_command
from mmtrain.config.load import load_config
from mmtrain.engine.trace import TRACE, WORK_OF, Work
from mmtrain.launching.machine import plan_for_here
from mmtrain.plan.simulate import Program, simulate
from mmtrain.stock.pretrained import expand_pretrained

# Okabe and Ito's colours, which the colour-blind tell apart: of a rank's first stage and of its
# last.
COLOURS = {
    Work.ENCODE: ("#009E73", "#009E73"),
    Work.FORWARD: ("#56B4E9", "#0072B2"),
    Work.BACKWARD: ("#F0C75E", "#D55E00"),
    Work.COMMUNICATION: ("#CC79A7", "#CC79A7"),
    Work.FETCH: ("#8A6D3B", "#8A6D3B"),
    Work.LOAD: ("#5D4A8A", "#5D4A8A"),
    Work.OPTIMIZER: ("#333333", "#333333"),
}
IDLE = "#ECECEC"
INCHES, DPI = 12.0, 100
# share of the longest step that a bar takes to hold the number of its micro-batch
NARROWEST_NUMBER = 0.01


class Bar(NamedTuple):
    """What a pipeline rank does from `begin` to `end`; stage and micro-batch are -1 for work of the
    whole rank.
    """

    rank: int
    work: Work
    stage: int
    microbatch: int
    begin: float
    end: float


class Timeline(NamedTuple):
    """One step of one replica, from 0 to `length`: seconds, or a unit of its own if `in_seconds` is
    false.
    """

    title: str
    length: float
    in_seconds: bool
    bars: list[Bar]
    idle: list[float]  # share of the step, by rank


def predicted(config_file: str, overrides: list[str]) -> Timeline:
    """Return the step that the planner expects."""
    plan = plan_for_here(expand_pretrained(load_config(config_file, overrides)))
    step = simulate(Program(plan.schedule), plan.seconds, spans=True)
    bars = [
        Bar(x.rank, WORK_OF[x[1].op], x[1].stage, x[1].microbatch, x.begin, x.end)
        for x in step.spans
    ]
    return Timeline(
        f"predicted for {plan.run}",
        step.seconds,
        plan.step_seconds is not None,
        bars,
        list(step.idle),
    )


def measured(folder: Path, step: int | None) -> Timeline:
    """Return one traced step of replica 0, by default the last one."""
    trace = json.loads((folder / TRACE).read_text())
    about = trace["otherData"]
    step = about["steps"][-1] if step is None else step
    events = [x for x in trace["traceEvents"] if x["ph"] == "X" and x["args"]["step"] == step]
    begin = min(event["ts"] for event in events)
    length = max(event["ts"] + event["dur"] for event in events) - begin
    bars = []
    for event in events:
        if event["pid"] == 0 and event["cat"] != Work.WAIT:
            stage, microbatch = (event["args"].get(key, -1) for key in ("stage", "microbatch"))
            start = (event["ts"] - begin) / 1e6
            bars.append(
                Bar(
                    event["tid"],
                    Work(event["cat"]),
                    stage,
                    microbatch,
                    start,
                    start + event["dur"] / 1e6,
                )
            )
    busy = [
        sum(bar.end - bar.begin for bar in bars if bar.rank == rank)
        for rank in range(about["pipeline"])
    ]
    idle = [1 - seconds / (length / 1e6) for seconds in busy]
    return Timeline(f"measured in {about['run']}, step {step}", length / 1e6, True, bars, idle)


def draw(timelines: list[Timeline], file: Path) -> None:
    """Write the timelines as one picture, one below the other."""
    longest = max((x.length for x in timelines if x.in_seconds), default=timelines[0].length)
    heights = [0.42 * len(timeline.idle) + 0.95 for timeline in timelines]
    figure = Figure(figsize=(INCHES, sum(heights) + 0.45), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw_panel(axes, timeline, longest)
    used = {bar.work for timeline in timelines for bar in timeline.bars}
    keys = [
        Patch(facecolor=last, label=str(work))
        for work, (_, last) in COLOURS.items()
        if work in used
    ]
    keys.append(Patch(facecolor=IDLE, label="idle"))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    figure.savefig(file)


def _draw_panel(axes: Any, timeline: Timeline, longest: float) -> None:
    ranks = len(timeline.idle)
    scale = 1 if timeline.in_seconds else longest / timeline.length
    last_stage = max(bar.stage // ranks for bar in timeline.bars)
    for rank, idle in enumerate(timeline.idle):
        axes.broken_barh([(0, timeline.length * scale)], (rank - 0.4, 0.8), facecolor=IDLE)
        axes.text(
            1.008, rank, f"{idle:.1%} idle", transform=axes.get_yaxis_transform(), va="center"
        )
    for bar in timeline.bars:
        first, last = map(to_rgb, COLOURS[bar.work])
        share = max(bar.stage // ranks, 0) / last_stage if last_stage else 1.0
        colour = [a + (b - a) * share for a, b in zip(first, last, strict=True)]
        begin, width = bar.begin * scale, (bar.end - bar.begin) * scale
        axes.broken_barh(
            [(begin, width)],
            (bar.rank - 0.4, 0.8),
            facecolor=colour,
            edgecolor="white",
            linewidth=0.4,
        )
        if bar.microbatch >= 0 and width > NARROWEST_NUMBER * longest:
            axes.text(
                begin + width / 2,
                bar.rank,
                bar.microbatch,
                ha="center",
                va="center_baseline",
                fontsize=8,
            )
    axes.set_title(timeline.title, loc="left", fontsize=11)
    axes.set_xlim(0, longest)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    if timeline.in_seconds:
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * 1e3:,.10g} ms")
    else:
        shares = [tenth / 10 for tenth in range(11)]
        axes.set_xticks([longest * share for share in shares], [f"{share:.0%}" for share in shares])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="set a key of --plan's CONFIG"
    )
    parser.add_argument("--plan", metavar="CONFIG", help="YAML file of a run, or example:llava_pp4")
    parser.add_argument("--trace", type=Path, metavar="RUN", help="folder of a run with a trace")
    parser.add_argument("--step", type=int, metavar="N", help="step of the trace (its last)")
    parser.add_argument(
        "--out", type=Path, default=Path("schedule.png"), metavar="FILE", help="(schedule.png)"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.plan is None and options.trace is None:
        parser.error("nothing to draw: give --plan CONFIG, --trace RUN, or both")

    def run() -> None:
        timelines = [] if options.plan is None else [predicted(options.plan, options.overrides)]
        timelines += [] if options.trace is None else [measured(options.trace, options.step)]
        draw(timelines, options.out)
        for timeline in timelines:
            idle = ", ".join(
                f"rank {rank}: {share:.1%}" for rank, share in enumerate(timeline.idle)
            )
            print_result(f"{timeline.title}: idle {idle}")
        print_result(f"wrote {options.out}")

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
