"""Does the planner predict what then happens? Step time, idle share and memory of layouts it was not calibrated on.

    layouts     pipeline 1 and 2, one and two stages a rank, 2 to 16 micro-batches, good and bad cuts, recomputation,
                encoder prefetch; every prediction is the planner's own (make_plan with the calibration)
    prefetch    the same cut with encoder prefetch and without, in pairs: the gain against the simulated one
    four        pipeline 4: reported; no target applies where a machine has fewer cores

Calibration and layouts share the same processes and minutes: each repetition runs one step of every layout and two
rounds of the calibration; every other repetition goes backwards. Nothing is fitted to the layouts. At pipeline 1 there
are as many replicas as ranks at pipeline 2, so that as many compute at once. Micro-batches are what the planner
expects: a document of one image and the expected text. All ranks have one thread.

A machine that others use too changes its speed within seconds. So before and after each step and each round of the
calibration all ranks multiply the same matrices, by which its seconds become those at the run's usual speed (the median
of all); it is dropped if both times differ by more than --noise, and a pair of steps if one of them is. While a rank
waits, its core multiplies matrices at the lowest priority: ranks of a cluster do not get faster when another one waits.

Memory is bytes of tensors that live at once (weights, optimizer state, every allocation in a step), beside the plan's
sum.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_tables import finish, one_of, positive, print_table
from bench_timing import spread

from mmtrain.base.printing import say, show_error
from mmtrain.doctor.machine import describe_machine
from mmtrain.launching.machine import RANK_MODULES
from mmtrain.processes.job import Job
from mmtrain.processes.supervise import prepared, run_ranks, set_rank_environment

if TYPE_CHECKING:
    from bench_plan_ranks import Layout, Settings

EXAMPLES = """\
examples:
  everything, an hour; all measurements as JSON too:
    python tools/bench/bench.py plan --json plan.json
  what the machine gives in ten minutes:
    python tools/bench/bench.py plan layouts --repetitions 5
  does it run at all? a minute, numbers without meaning:
    python tools/bench/bench.py plan --quick
"""
ROWS = ("layouts", "prefetch", "four")
TARGETS = {
    "mean_step_error": 0.05,
    "worst_step_error": 0.10,
    "worst_memory_error": 0.10,
    "mean_idle_difference": 0.02,
    "prefetch_difference": 0.04,
}
NOISE = 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `bench.py plan`."""
    path = lambda text: Path(text).expanduser()  # noqa: E731 - the shell leaves --folder=~/data as it is
    add = parser.add_argument
    add("rows", nargs="*", type=one_of(ROWS), metavar="ROW", help=f"what to measure: {', '.join(ROWS)} (all)")
    add("--json", type=path, metavar="FILE", help="write every single measurement there")
    add("--repetitions", type=positive, default=30, metavar="N", help="steps of each layout (%(default)s)")
    add("--rounds", type=positive, default=5, metavar="N", help="of the calibration before (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of everything frozen (%(default)s)")
    add("--noise", type=float, default=NOISE, metavar="SHARE", help="how far two probes may differ (%(default)s)")
    add("--folder", type=path, metavar="DIR", help="where the models lie meanwhile (the system's temporary folder)")
    add("--quick", action="store_true", help="a tiny model, few layouts, two repetitions: only that it runs is shown")


def run(options: argparse.Namespace) -> int:
    """Make the models, run the layouts, print tables; the exit code."""
    set_rank_environment(1, on_gpus=False)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "noise": options.noise,
        "dtype": options.dtype,
        "targets": TARGETS,
    }
    with tempfile.TemporaryDirectory(prefix="bench_plan-", dir=options.folder) as name:
        folder = Path(name)
        say("making the models")
        from bench_models import DTYPES, save_parts  # torch reads the environment when it is imported
        from bench_plan_ranks import SIZES

        jobs = jobs_of(options)
        save_parts(SIZES[jobs[0].shape], folder, DTYPES[options.dtype])
        for settings in jobs:
            failure = _run_job(settings, folder)
            if failure is not None:
                show_error(failure.message)
                return failure.exit_code
            found = json.loads((folder / f"{settings.name}.json").read_text())
            result[settings.name] = found | report(settings.name, found)
    finish(result, options.json)
    return 0


def jobs_of(options: argparse.Namespace) -> list[Settings]:
    """What to measure, a job for each set of processes, from the command line."""
    from bench_plan_ranks import Layout, Settings

    layouts = (
        Layout("whole model", 1, 2),
        Layout("half recomputed", 1, 4, recompute=4),
        Layout("even cut", 2, 2, (4,)),
        Layout("even cut", 2, 4, (4,)),
        Layout("even cut", 2, 16, (4,)),
        Layout("good cut", 2, 8, (3,)),
        Layout("bad cut", 2, 4, (6,)),
        Layout("bad cut", 2, 8, (1,)),
        Layout("recomputed", 2, 4, (3,), recompute=8),
        Layout("partly recomputed", 2, 8, (3,), recompute=(2, 0)),
        Layout("interleaved", 2, 4, (1, 4, 6), 2),
        Layout("interleaved", 2, 8, (2, 4, 6), 2),
        Layout("interleaved, bad cut", 2, 4, (3, 4, 5), 2),
        Layout("prefetch", 2, 4, (3,), prefetch="auto"),
        Layout("prefetch, interleaved", 2, 8, (1, 4, 6), 2, prefetch="auto"),
    )
    pairs = (
        Layout("prefetch", 2, 4, (3,), prefetch="auto"),
        Layout("prefetch, even cut", 2, 4, (4,), prefetch="auto"),
        Layout("prefetch, interleaved", 2, 4, (1, 4, 6), 2, prefetch="auto"),
    )
    four = (
        Layout("even cut", 4, 4, (2, 4, 6)),
        Layout("even cut", 4, 8, (2, 4, 6)),
        Layout("good cut", 4, 8, (1, 3, 6)),
        Layout("interleaved", 4, 8, (1, 2, 3, 4, 5, 6, 7), 2),
    )
    named = [tuple(_named(layout) for layout in group) for group in (layouts, pairs, four)]
    size: tuple[Any, ...] = ("quarter", options.dtype, 1)
    repeats = options.repetitions, options.rounds, options.noise
    asked = options.rows or ROWS
    if options.quick:
        few = [x for x in named[0] if "bad" not in x.name and x.microbatches <= 4], named[1][:1], named[2][:1]
        named = [tuple(_halved(layout) for layout in group) for group in few]
        size, repeats = ("tiny", options.dtype, 2), (2, 2, options.noise)
        asked = options.rows or ROWS[:2]
    layouts, pairs, four = named
    jobs = [
        Settings(
            "layouts", *size, 2, layouts if "layouts" in asked else (), pairs if "prefetch" in asked else (), *repeats
        ),
        Settings("four", *size, 4, four if "four" in asked else (), (), *repeats),
    ]
    return [settings for settings in jobs if settings.layouts or settings.pairs]


def _named(layout: Layout) -> Layout:
    from dataclasses import replace

    return replace(layout, name=f"p {layout.pipeline}, m {layout.microbatches}: {layout.name}")


def _halved(layout: Layout) -> Layout:
    """For a model of half as many layers."""
    from dataclasses import replace

    stages = layout.pipeline * layout.stages_per_rank
    return replace(layout, boundaries=(1, 2, 3) if stages == 4 else layout.boundaries and (layout.boundaries[0] // 2,))


def _run_job(settings: Settings, folder: Path) -> Any:
    from bench_plan_ranks import measure

    places = tuple(f"rank {rank}" for rank in range(settings.world))
    seconds = settings.timeout_seconds
    job = Job(places=places, folder=folder, threads=1, timeout_seconds=seconds, preload=RANK_MODULES)
    with prepared(job):
        return run_ranks(functools.partial(measure, settings, folder), job)


# ---- what was found


def report(job: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Print what one job found; returns the numbers that were printed."""
    result: dict[str, Any] = {}
    factors, rounds = found["factors"], found["calibration_rounds"]
    counted = sum(factor is not None for factor in rounds)
    which = f"{counted} of {len(rounds)} rounds; the others were noisy" if counted else "all rounds; each one was noisy"
    say("", f"the calibration is that of {which}")
    if found["layouts"]:
        rows = [_judge(layout, factors[layout["name"]]) for layout in found["layouts"]]
        judged = [row for row in rows if row["kept_steps"]]
        _print_layouts(job, rows)
        result = {"judged": rows, "summary": _summary(judged, len(found["layouts"]))}
        _print_summary(job, result["summary"])
    if found["pairs"]:
        gains = [_gain(pair, [factors[of["name"]] for of in pair.values()]) for pair in found["pairs"]]
        result["prefetch"] = gains
        result["never_slower"] = all(gain["measured_gain"][0] >= 0 for gain in gains if gain["kept_pairs"])
        _print_pairs(gains)
    return result


def _judge(layout: Mapping[str, Any], factors: Sequence[float | None]) -> dict[str, Any]:
    seconds = [s * factor for s, factor in zip(layout["measured_seconds"], factors, strict=True) if factor]
    idle = [ranks for ranks, factor in zip(layout["measured_idle"], factors, strict=True) if factor]
    row: dict[str, Any] = {
        "name": layout["name"],
        "pipeline": layout["pipeline"],
        "kept_steps": len(seconds),
        "steps": len(factors),
        "predicted_seconds": layout["predicted_seconds"],
        "predicted_idle": layout["predicted_idle"],
        "predicted_bytes": layout["predicted_bytes"],
        "measured_bytes": layout["measured_bytes"],
        "memory_error": [p / m - 1 for p, m in zip(layout["predicted_bytes"], layout["measured_bytes"], strict=True)],
    }
    if seconds:
        measured = spread(seconds)
        of_ranks = [statistics.median(ranks) for ranks in zip(*idle, strict=True)]
        row |= {
            "measured_seconds": [measured.median, measured.min, measured.max],
            "step_error": layout["predicted_seconds"] / measured.median - 1,
            "measured_idle": of_ranks,
            "idle_difference": [m - p for p, m in zip(layout["predicted_idle"], of_ranks, strict=True)],
        }
    return row


def _summary(judged: Sequence[Mapping[str, Any]], layouts: int) -> dict[str, Any]:
    if not judged:
        return {"layouts": 0, "of": layouts}
    errors = [abs(row["step_error"]) for row in judged]
    memory = [abs(error) for row in judged for error in row["memory_error"]]
    idle = [d for row in judged if row["pipeline"] > 1 for d in row["idle_difference"]]
    return {
        "layouts": len(judged),
        "of": layouts,
        "mean_step_error": statistics.fmean(errors),
        "worst_step_error": max(errors),
        "mean_memory_error": statistics.fmean(memory),
        "worst_memory_error": max(memory),
        "mean_idle_difference": statistics.fmean(map(abs, idle)) if idle else 0.0,
        "mean_signed_idle_difference": statistics.fmean(idle) if idle else 0.0,
        "worst_idle_difference": max(map(abs, idle), default=0.0),
        "dropped_steps": sum(row["steps"] - row["kept_steps"] for row in judged),
    }


def _gain(pair: Mapping[str, Any], factors: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """What prefetch saves of a step, by simulation and in every pair of which both steps count."""
    prefetch, none = pair["prefetch"], pair["none"]
    times = zip(prefetch["measured_seconds"], none["measured_seconds"], *factors, strict=True)
    gains = [1 - (a * of_a) / (n * of_n) for a, n, of_a, of_n in times if of_a and of_n]
    row: dict[str, Any] = {
        "name": prefetch["name"],
        "encode_ahead": prefetch["encode_ahead"],
        "predicted_gain": 1 - prefetch["predicted_seconds"] / none["predicted_seconds"],
        "kept_pairs": len(gains),
        "pairs": len(factors[0]),
    }
    if gains:
        measured = spread(gains)
        row["measured_gain"] = [measured.median, measured.min, measured.max]
        row["difference"] = measured.median - row["predicted_gain"]
    return row


def _print_layouts(job: str, rows: Sequence[Mapping[str, Any]]) -> None:
    say("", "pipeline 4 (no target applies)" if job == "four" else "layouts that the calibration has not seen")
    table = []
    for row in rows:
        plan, steps = f"{row['predicted_seconds']:.3f}", f"{row['kept_steps']}/{row['steps']}"
        memory = [_of_ranks(row[of], 2**20) for of in ("predicted_bytes", "measured_bytes")]
        if not row["kept_steps"]:
            table.append((row["name"], plan, "all noisy", steps, "", "", "", *memory))
            continue
        measured = "{:.3f} ({:.3f}-{:.3f})".format(*row["measured_seconds"])
        idle = [_of_ranks(row[of], 0.01) for of in ("predicted_idle", "measured_idle")]
        table.append((row["name"], plan, measured, steps, f"{row['step_error']:+.1%}", *idle, *memory))
    columns = ("", ">plan, s", ">measured, s", ">steps", ">error", ">idle %: plan", ">seen", ">MiB: plan", ">seen")
    print_table(columns, table)


def _of_ranks(values: Sequence[float], unit: float) -> str:
    return " ".join(f"{value / unit:.0f}" for value in values)


def _print_summary(job: str, summary: Mapping[str, Any]) -> None:
    if not summary["layouts"]:
        say("every step was noisy: nothing can be said; measure on a quiet machine, or give --noise")
        return
    layouts = f"{summary['layouts']} of {summary['of']} layouts"
    say(f"{layouts}; {summary['dropped_steps']} of their steps dropped as noisy")
    names = {
        "step time, mean error": "mean_step_error",
        "step time, worst error": "worst_step_error",
        "memory, mean error": "mean_memory_error",
        "memory, worst error": "worst_memory_error",
        "idle share at pipelines, mean difference": "mean_idle_difference",
        "idle share at pipelines, worst difference": "worst_idle_difference",
        "idle share at pipelines, seen minus planned": "mean_signed_idle_difference",
    }
    for text, name in names.items():
        target = "" if job == "four" or name not in TARGETS else f"   target: at most {TARGETS[name]:.0%}"
        say(f"  {text:44} {summary[name]:6.1%}{target}")


def _print_pairs(gains: Sequence[Mapping[str, Any]]) -> None:
    say("", f"encoder prefetch: share of a step saved (target: within {TARGETS['prefetch_difference']:.0%})")
    rows = []
    for gain in gains:
        seen = ("all noisy", "")
        if gain["kept_pairs"]:
            seen = ("{:.1%} ({:.1%} - {:.1%})".format(*gain["measured_gain"]), f"{gain['difference']:+.1%}")
        pairs = f"{gain['kept_pairs']}/{gain['pairs']}"
        rows.append((gain["name"], str(gain["encode_ahead"]), f"{gain['predicted_gain']:.1%}", pairs, *seen))
    print_table(("", ">prefetched", ">simulated", ">pairs", ">measured", ">difference"), rows)
    slower = [gain["name"] for gain in gains if gain["kept_pairs"] and gain["measured_gain"][0] < 0]
    say(f"slower, by the median: {', '.join(slower) or 'none'} (target: none)")
