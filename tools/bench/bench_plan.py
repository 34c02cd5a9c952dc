"""Does the planner predict what then happens? Step time and idle share of layouts it was not
calibrated on.

Layouts are pipeline 1 and 2, one and two stages a rank, 2 to 16 micro-batches, good and bad cuts,
recomputation. Each repetition runs one step of every layout and two rounds of the calibration, in
the same processes; nothing is fitted to the layouts. At pipeline 1 there are two replicas, so that
as many ranks compute at once. Micro-batches are what the planner expects: a document of one image
and the expected text. All ranks have one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_tables import finish, positive, print_table, run_target, spread

from mmtrain.base.printing import print_info
from mmtrain.doctor.machine import describe_machine
from mmtrain.runtime.supervise import set_rank_environment

if TYPE_CHECKING:
    from bench_plan_ranks import Settings

EXAMPLES = """\
examples:
  everything, an hour; all measurements as JSON too:
    python tools/bench/bench.py plan --json plan.json
  what the machine gives in ten minutes:
    python tools/bench/bench.py plan --repetitions 5
  does it run at all? a minute, numbers without meaning:
    python tools/bench/bench.py plan --quick
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write every single measurement there")
    add(
        "--repetitions",
        type=positive,
        default=30,
        metavar="N",
        help="steps of each layout (%(default)s)",
    )
    add(
        "--quick",
        action="store_true",
        help="a tiny model, few layouts, two repetitions: only that it runs is shown",
    )


def run(options: argparse.Namespace) -> int:
    """Make the models, run the layouts, print tables; the exit code."""
    set_rank_environment(1, on_gpus=False)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    result: dict[str, Any] = {"machine": describe_machine()}
    with tempfile.TemporaryDirectory(prefix="bench_plan-") as name:
        folder = Path(name)
        print_info("making the models")
        # torch reads the environment when it is imported
        from bench_models import DTYPES, save_parts
        from bench_plan_ranks import SIZES, WORLD

        settings = settings_of(options)
        save_parts(SIZES[settings.shape], folder, DTYPES["float32"])
        arguments = {"settings": settings, "parts": folder}
        code = run_target(
            "bench_plan_ranks:measure", WORLD, folder, 1, settings.timeout_seconds, **arguments
        )
        if code != 0:
            return code
        found = json.loads((folder / "found.json").read_text())
        result |= found | report(found)
    finish(result, options.json)
    return 0


def settings_of(options: argparse.Namespace) -> Settings:
    from bench_plan_ranks import Layout, Settings

    layouts = [
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
    ]
    if not options.quick:
        named = tuple(
            replace(x, name=f"p {x.pipeline}, m {x.microbatches}: {x.name}") for x in layouts
        )
        return Settings("quarter", named, options.repetitions, 5)
    # for a model of half as many layers
    whole, even, interleaved = layouts[0], layouts[2], layouts[10]
    return Settings(
        "tiny",
        (whole, replace(even, boundaries=(2,)), replace(interleaved, boundaries=(1, 2, 3))),
        repetitions=2,
        calibration_rounds=2,
    )


# ---- what was found


def report(found: Mapping[str, Any]) -> dict[str, Any]:
    """Print what was found and return the numbers that were printed."""
    rows = [_judge(layout) for layout in found["layouts"]]
    errors = {
        "step": [abs(row["step_error"]) for row in rows],
        "idle": [abs(error) for row in rows if row["pipeline"] > 1 for error in row["idle_error"]],
    }
    summary = {
        f"mean_{name}_error": statistics.fmean(values) for name, values in errors.items() if values
    }
    summary |= {f"worst_{name}_error": max(values) for name, values in errors.items() if values}
    _print_layouts(rows)
    print_table(("", ">"), [(name, f"{value:.1%}") for name, value in summary.items()])
    return {"judged": rows, "summary": summary}


def _judge(layout: Mapping[str, Any]) -> dict[str, Any]:
    measured = spread(layout["measured_seconds"])
    idle = [statistics.median(ranks) for ranks in zip(*layout["measured_idle"], strict=True)]
    return {
        **layout,
        "measured_seconds": [measured.median, measured.min, measured.max],
        "measured_idle": idle,
        "step_error": layout["predicted_seconds"] / measured.median - 1,
        "idle_error": [p - m for p, m in zip(layout["predicted_idle"], idle, strict=True)],
    }


def _print_layouts(rows: Sequence[Mapping[str, Any]]) -> None:
    table = []
    for row in rows:
        measured = "{:.3f} ({:.3f}-{:.3f})".format(*row["measured_seconds"])
        idle = [_percents(row[of]) for of in ("predicted_idle", "measured_idle")]
        plan, error = f"{row['predicted_seconds']:.3f}", f"{row['step_error']:+.1%}"
        table.append((row["name"], plan, measured, error, *idle))
    columns = (
        "",
        ">plan, s",
        ">measured, s",
        ">error",
        ">idle %: plan",
        ">seen",
    )
    print_table(columns, table)


def _percents(shares: Sequence[float]) -> str:
    return " ".join(f"{share / 0.01:.0f}" for share in shares)
