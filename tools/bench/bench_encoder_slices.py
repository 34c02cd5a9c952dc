"""What do slices of the frozen encoder over all ranks gain over the whole encoder on rank 0, and is it as planned?

    sleep    pipeline 4 and 8 on any machine: the engine, its messages and its lists, with stages that sleep the seconds
             that they are planned to take; InternViT-6B + 20B (the encoder is 36% of the exact work) and one with 15%
    real     pipeline 2 with real compute on two cores: the planner's choice against its best with the encoder on rank
             0, against a uniform cut and against the front alone on rank 0; evaluation; step time and memory as planned

Ways take turns within one run. A gain is the median of the turns' ratios. `real` measures as `bench.py plan` does: the
same calibration in the same minutes, corrected by probes; see there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_tables import finish, one_of, positive, print_table

from mmtrain.base.printing import say, show_error
from mmtrain.doctor.machine import describe_machine
from mmtrain.launching.machine import RANK_MODULES
from mmtrain.processes.job import Job
from mmtrain.processes.supervise import prepared, run_ranks, set_rank_environment

if TYPE_CHECKING:
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
STEP_ERROR = 0.05  # of a prediction, at most
TARGETS = {"p4-36%": 1.35, "p8-36%": 2.6, "p8-15%": 1.2}  # rank 0's step over that of slices


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `bench.py encoder_slices`."""
    path = lambda text: Path(text).expanduser()  # noqa: E731 - the shell leaves --folder=~/data as it is
    add = parser.add_argument
    add("rows", nargs="*", type=one_of(ROWS), metavar="ROW", help=f"what to measure: {', '.join(ROWS)} (all)")
    add("--json", type=path, metavar="FILE", help="write every single measurement there")
    add("--steps", type=positive, default=4, metavar="N", help="of each way of sleep (%(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S", help="that a rank works in a step of sleep (%(default)s)")
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
        from bench_sleeping_ranks import job_of

        found = []
        cases = cases_of(options) if "sleep" in (options.rows or ROWS) else ()
        if cases:
            save_parts(cases[0].shape, folder, DTYPES["float32"])
        for case in cases:
            say(f"{case.name}: {case.pipeline} ranks sleep")
            places = tuple(f"rank {rank}" for rank in range(case.pipeline))
            job = Job(places, folder, threads=1, timeout_seconds=case.timeout_seconds, preload=RANK_MODULES)
            with prepared(job):
                failure = run_ranks(job_of(case, folder), job)
            if failure is not None:
                show_error(failure.message)
                return failure.exit_code
            found.append(json.loads((folder / f"{case.name}.json").read_text()))
        if found:
            result["sleep"] = report_sleep(found)
    finish(result, options.json)
    return 0


def cases_of(options: argparse.Namespace) -> tuple[Case, ...]:
    """What sleeps, from the command line."""
    from bench_models import SHAPES
    from bench_sleeping_ranks import Case

    if options.quick:
        return (Case("p2-36%", 2, 4, 0.36, 0.4, 1, SHAPES["tiny"]),)
    return tuple(
        Case(f"p{pipeline}-{share:.0%}", pipeline, 16, share, options.seconds, options.steps)
        for pipeline in (4, 8)
        for share in (0.36, 0.15)
    )


def report_sleep(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Print what the cases found; returns them with the numbers that were printed."""
    judged, rows, gains = [], [], []
    for case in cases:
        ways = {way: case[way] for way in ("slices", "rank 0")}
        for way, of_way in ways.items():
            of_way["median_seconds"] = statistics.median(of_way["measured_seconds"])
            of_way["step_error"] = of_way["predicted_seconds"] / of_way["median_seconds"] - 1
            first = f"{of_way['first_seconds']:.2f}", f"{of_way['predicted_first_seconds']:.2f}"
            steps = f"{of_way['median_seconds']:.3f}", f"{of_way['predicted_seconds']:.3f}"
            blocks = " ".join(map(str, of_way["blocks"])) if any(of_way["blocks"]) else "all on rank 0"
            ahead = " ".join("-" if count is None else str(count) for count in of_way["ahead"])
            rows.append((case["name"], way, *steps, f"{of_way['step_error']:+.1%}", *first, blocks, ahead))
        measured = zip(*(of_way["measured_seconds"] for of_way in (ways["rank 0"], ways["slices"])), strict=True)
        gain = statistics.median(rank_0 / slices for rank_0, slices in measured)
        planned = ways["rank 0"]["predicted_seconds"] / ways["slices"]["predicted_seconds"]
        target = TARGETS.get(case["name"])
        gains.append((case["name"], f"{gain:.2f}", f"{planned:.2f}", "" if target is None else f">= {target:.2f}"))
        judged.append({**case, **ways, "gain": gain, "planned_gain": planned})
    say("", f"stages that sleep, steps in seconds (target: predictions within {STEP_ERROR:.0%})")
    columns = ("", "encoder", ">step", ">plan", ">error", ">first", ">plan", "blocks a rank", "ahead")
    print_table(columns, rows)
    say("", "the step with the encoder on rank 0, over that with slices")
    print_table(("", ">measured", ">planned", ">target"), gains)
    return judged
