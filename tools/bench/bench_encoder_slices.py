"""What do slices of the frozen encoder over all ranks gain over the whole encoder on rank 0, and is it as planned?

    sleep    pipeline 4 and 8 on any machine: the engine, its messages and its lists, with stages that sleep the seconds
             that they are planned to take; InternViT-6B + 20B (the encoder is 36% of the exact work) and one with 15%
    real     pipeline 2 with real compute on two cores: slices on both ranks against the planner's choice, its best with
             the encoder on rank 0, a uniform cut and the front alone on rank 0; evaluation; time and memory as planned

Ways take turns within one run. A gain is the median of the turns' ratios. `real` measures as `bench.py plan` does: the
same calibration in the same minutes, corrected by probes; see there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_plan import NOISE, report
from bench_tables import finish, one_of, positive, print_table
from bench_timing import spread

from mmtrain.base.printing import say, show_error
from mmtrain.doctor.machine import describe_machine
from mmtrain.launching.machine import RANK_MODULES
from mmtrain.processes.job import Job
from mmtrain.processes.rank import Rank
from mmtrain.processes.supervise import prepared, run_ranks, set_rank_environment

if TYPE_CHECKING:
    from bench_plan_ranks import Settings
    from bench_sleeping_ranks import Case

EXAMPLES = """\
examples:
  everything, half an hour; all measurements as JSON too:
    python tools/bench/bench.py encoder_slices --json slices.json
  pipelines of 4 and 8 alone, ten minutes:
    python tools/bench/bench.py encoder_slices sleep
  does it run at all? a minute, numbers without meaning:
    python tools/bench/bench.py encoder_slices --quick
"""
ROWS = ("sleep", "real")
TIMEOUT_SECONDS = 600
STEP_ERROR = 0.05  # of a prediction, at most
TARGETS = {"p4-36%": 1.35, "p8-36%": 2.6, "p8-15%": 1.2}  # rank 0's step over that of slices
SLICES, AUTO, RANK_0, UNIFORM, FRONT_ALONE = "slices", "auto", "rank 0", "uniform cut", "front alone"
REAL_TARGETS = {  # what takes so many times as long as with slices
    "15%": {
        ("step", RANK_0): 0.98,
        ("step", UNIFORM): 1.14,
        ("step", FRONT_ALONE): 1.45,
        ("evaluation", RANK_0): 1.05,
    },
    "36%": {
        ("step", RANK_0): 0.98,
        ("step", UNIFORM): 1.3,
        ("step", FRONT_ALONE): 1.15,
        ("evaluation", RANK_0): 1.15,
    },
    "60%": {("step", RANK_0): 1.15},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `bench.py encoder_slices`."""
    path = lambda text: Path(text).expanduser()  # noqa: E731 - the shell leaves --folder=~/data as it is
    add = parser.add_argument
    add("rows", nargs="*", type=one_of(ROWS), metavar="ROW", help=f"what to measure: {', '.join(ROWS)} (all)")
    add("--json", type=path, metavar="FILE", help="write every single measurement there")
    add("--steps", type=positive, default=3, metavar="N", help="of each way of sleep (%(default)s)")
    add("--seconds", type=float, default=8.0, metavar="S", help="that a rank works in a step of sleep (%(default)s)")
    add(
        "--shares",
        nargs="+",
        choices=tuple(REAL_TARGETS),
        default=["36%", "15%"],
        help="of the encoder, for real (36%% 15%%)",
    )
    add("--repetitions", type=positive, default=8, metavar="N", help="of each layout of real (%(default)s)")
    add("--rounds", type=positive, default=3, metavar="N", help="of the calibration before (%(default)s)")
    add("--noise", type=float, default=NOISE, metavar="SHARE", help="how far two probes may differ (%(default)s)")
    add("--folder", type=path, metavar="DIR", help="where the models lie meanwhile (the system's temporary folder)")
    add("--quick", action="store_true", help="tiny models, few steps: only that it runs is shown")


def run(options: argparse.Namespace) -> int:
    """Make the models, run everything that is asked for, print tables; the exit code."""
    set_rank_environment(1, on_gpus=False)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    result: dict[str, Any] = {"machine": describe_machine(), "targets": TARGETS}
    with tempfile.TemporaryDirectory(prefix="bench_encoder_slices-", dir=options.folder) as name:
        folder = Path(name)
        from bench_models import DTYPES, save_parts  # torch reads the environment when it is imported
        from bench_plan_ranks import SIZES, measure
        from bench_sleeping_ranks import run_case

        asked = options.rows or ROWS
        slept = []
        for case in cases_of(options) if "sleep" in asked else ():
            models = folder / "sleeping"
            if not models.exists():
                save_parts(SIZES[case.shape], models, DTYPES["float32"])
            say(f"{case.name}: {case.pipeline} ranks sleep")
            found = _run_ranks(case.name, case.pipeline, functools.partial(run_case, case, models), folder)
            if found is None:
                return 1
            slept.append(found)
        if slept:
            result["sleep"] = report_sleep(slept)
        for settings in settings_of(options) if "real" in asked else ():
            models = folder / settings.name
            save_parts(SIZES[settings.shape], models, DTYPES[settings.dtype])
            say(f"{settings.name}: 2 ranks compute")
            found = _run_ranks(settings.name, settings.world, functools.partial(measure, settings, models), folder)
            if found is None:
                return 1
            result[f"real {settings.name}"] = found | report_real(settings.name, found)
    finish(result, options.json)
    return 0


def _run_ranks(name: str, ranks: int, work: Callable[[Rank], None], folder: Path) -> dict[str, Any] | None:
    """What rank 0 has written; None if a rank failed, which is then said."""
    places = tuple(f"rank {rank}" for rank in range(ranks))
    job = Job(places, folder, threads=1, timeout_seconds=TIMEOUT_SECONDS, preload=RANK_MODULES)
    with prepared(job):
        failure = run_ranks(work, job)
    if failure is not None:
        show_error(failure.message)
        return None
    return json.loads((folder / f"{name}.json").read_text())


def cases_of(options: argparse.Namespace) -> tuple[Case, ...]:
    """What sleeps, from the command line."""
    from bench_sleeping_ranks import Case

    if options.quick:
        return (Case("p2-36%", 2, 4, 0.36, 0.4, 1, "tiny"),)
    return tuple(
        Case(f"p{pipeline}-{share:.0%}", pipeline, 16, share, options.seconds, options.steps)
        for pipeline in (4, 8)
        for share in (0.36, 0.15)
    )


def report_sleep(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Print what the cases found; returns them with the numbers that were printed."""
    judged, rows, gains = [], [], []
    for case in cases:
        ways = {way: case[way] for way in (SLICES, RANK_0)}
        for way, of_way in ways.items():
            of_way["median_seconds"] = statistics.median(of_way["measured_seconds"])
            of_way["step_error"] = of_way["predicted_seconds"] / of_way["median_seconds"] - 1
            first = f"{of_way['first_seconds']:.2f}", f"{of_way['predicted_first_seconds']:.2f}"
            least = min(of_way["measured_seconds"])
            steps = (f"{seconds:.3f}" for seconds in (of_way["median_seconds"], least, of_way["predicted_seconds"]))
            blocks = " ".join(map(str, of_way["blocks"])) if any(of_way["blocks"]) else "all on rank 0"
            ahead = " ".join("-" if count is None else str(count) for count in of_way["ahead"])
            rows.append((case["name"], way, *steps, f"{of_way['step_error']:+.1%}", *first, blocks, ahead))
        measured = zip(*(of_way["measured_seconds"] for of_way in (ways[RANK_0], ways[SLICES])), strict=True)
        gain = statistics.median(rank_0 / slices for rank_0, slices in measured)
        planned = ways[RANK_0]["predicted_seconds"] / ways[SLICES]["predicted_seconds"]
        target = TARGETS.get(case["name"])
        gains.append((case["name"], f"{gain:.2f}", f"{planned:.2f}", "" if target is None else f">= {target:.2f}"))
        judged.append({**case, **ways, "gain": gain, "planned_gain": planned})
    say("", f"stages that sleep, steps in seconds (target: predictions within {STEP_ERROR:.0%})")
    columns = ("", "encoder", ">step", ">least", ">plan", ">error", ">first", ">plan", "blocks a rank", "ahead")
    print_table(columns, rows)
    say("", "the step with the encoder on rank 0, over that with slices")
    print_table(("", ">measured", ">planned", ">target"), gains)
    return judged


# ---- real compute at pipeline 2


def settings_of(options: argparse.Namespace) -> tuple[Settings, ...]:
    """What computes, from the command line; a set of processes for each share of the encoder."""
    from bench_plan_ranks import Layout, Settings

    def layouts(layers: int, *, against_hand: bool) -> tuple[Layout, ...]:
        slices = Layout(SLICES, 2, 8, None, "auto", prefetch="auto", encoder_ranks=(0, 1), evaluates=True)
        auto = Layout(AUTO, 2, 8, None, "auto", prefetch="auto", encoder_ranks="auto")
        rank_0 = Layout(RANK_0, 2, 8, None, "auto", prefetch="auto", evaluates=True)
        uniform = Layout(UNIFORM, 2, 8, (layers // 2,))
        alone = Layout(FRONT_ALONE, 2, 8, (0,), prefetch="auto")
        return (slices, auto, rank_0, uniform, alone) if against_hand else (slices, auto, rank_0)

    repeats = options.repetitions, options.rounds, options.noise
    if options.quick:
        return (Settings("tiny", "tiny", "float32", 2, 2, layouts(4, against_hand=True), (), 2, 2, options.noise),)
    return tuple(
        Settings(share, share, "float32", 1, 2, layouts(16, against_hand=share != "60%"), (), *repeats)
        for share in options.shares
    )


def report_real(share: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Print what one set of processes found, predictions first; returns the numbers that were printed."""
    from bench_plan_ranks import evaluation_of

    result = report(share, found)
    by_name = {layout["name"]: layout for layout in found["layouts"]}
    ours, factors = by_name[SLICES], found["factors"]
    say("", f"encoder {ours['encoder_share']:.0%} of the seconds; blocks {ours['slices']}, cut {ours['boundaries']}")
    gains, rows = [], []
    for what, rival, kind in (
        ("step", AUTO, "seconds"),
        ("step", RANK_0, "seconds"),
        ("step", UNIFORM, "seconds"),
        ("step", FRONT_ALONE, "seconds"),
        ("evaluation", RANK_0, "evaluations"),
    ):
        if rival not in by_name:
            continue
        turns = [evaluation_of(name) if what == "evaluation" else name for name in (SLICES, rival)]
        mine, theirs = (by_name[name][f"measured_{kind}"] for name in (SLICES, rival))
        each = zip(mine, theirs, *(factors[turn] for turn in turns), strict=True)
        kept = [b * of_b / (a * of_a) for a, b, of_a, of_b in each if of_a and of_b]
        planned_of = "predicted_evaluation" if what == "evaluation" else "predicted_seconds"
        planned = by_name[rival][planned_of] / ours[planned_of]
        gain = spread(kept) if kept else None
        gains.append({"what": what, "rival": rival, "planned": planned, "measured": kept})
        target = REAL_TARGETS.get(share, {}).get((what, rival))
        measured = "all noisy" if gain is None else gain.text(".2f")
        count = f"{len(kept)}/{len(mine)}"
        rows.append((what, rival, measured, count, f"{planned:.2f}", "" if target is None else f">= {target:.2f}"))
    print_table(("", "over slices", ">measured", ">turns", ">planned", ">target"), rows)
    return result | {"gains": gains}
