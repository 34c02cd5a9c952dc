"""What saving costs a training run: blocks of steps with and without a save take turns in one run.

    none            a block of --every steps that saves nothing
    asynchronous    the same, one save begun after its first step: copied, and written while the other steps run
    synchronous     the same, the step waiting until the save is on the disk

The run is a real one: the configuration's ranks, data, engine and checkpoints, in a folder that is deleted at the end.
A block that is over before its save waits for it, with the clock running. Overhead is the median of the ratios of
neighbouring blocks, in brackets an interval that holds the true median with 95% (from the order of the ratios, which
needs no assumption on noise; noise makes it wide, so more --repetitions, and nothing else on the machine, narrow it).
Beside it stands what other programs on the machine distort less: the same ratio of the CPU seconds of all ranks (what
saving costs where no core is idle), how long the training loop stands still in a save, and what the thread that writes
computes.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_timing import Times, ratios, spread

from mmtrain.api.run import load_config
from mmtrain.base.printing import run_command, show_error, tell
from mmtrain.config.schema import RunConfig
from mmtrain.demo.data import make_demo_data
from mmtrain.launching.machine import RANK_MODULES
from mmtrain.plan.planner import make_plan
from mmtrain.processes.gpus import visible_gpus
from mmtrain.processes.job import Job
from mmtrain.processes.supervise import prepared, run_ranks, set_rank_environment

RESULT = "result.json"
DEMO = Path(__file__).parents[2] / "configs" / "llava_pp4.yaml"
EXAMPLES = """\
examples:
  the demo, a save every 10 steps; three minutes:
    python tools/bench/bench_checkpoint.py
  on a busy machine: every 2 steps, and a fifth of what that costs is what it costs every 10:
    python tools/bench/bench_checkpoint.py --every 2 --repetitions 120
  as if its projector were that of LLaVA-1.5-7B (1024 -> 4096), 252 MB a checkpoint:
    python tools/bench/bench_checkpoint.py --width 1024 4096
  your own run, its numbers as JSON too:
    python tools/bench/bench_checkpoint.py --config CONFIG --folder /the/disk/of/runs --json bench.json
  does it run at all? seconds, numbers without meaning:
    python tools/bench/bench_checkpoint.py --repetitions 1 --every 2

exit codes:
  0    done
  1    a rank failed; the message names it
  2    wrong input; the message says what to do
"""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that holds the median of what the values are drawn from with 95% at least, by their order alone.

    The number of values below the median is binomial; of fewer than 6 values least and largest hold it less surely.
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0, 2 * 0.5**count
    while below + 1 <= (count - 1) // 2 and outside + 2 * math.comb(count, below + 1) * 0.5**count <= 0.05:
        below += 1
        outside += 2 * math.comb(count, below) * 0.5**count
    return ordered[below], ordered[-1 - below]


def report(found: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Print what was measured; returns the numbers that were printed."""
    times: Times = found["seconds"]
    step = {mode: spread([seconds / every for seconds in times[mode]]) for mode in times}
    result: dict[str, Any] = {"step_seconds": {mode: step[mode].median for mode in times}, "modes": {}}
    tell(
        "", f"step without saves: {step['none'].text('.4f')} s, median (least - largest) of {len(times['none'])} blocks"
    )
    for mode, saves in found["saves"].items():
        overhead, low, high = _overhead(times, mode)
        cpu_overhead, cpu_low, cpu_high = _overhead(found["cpu_seconds"], mode)
        blocked, cpu, written = (
            spread(saves[key]).median for key in ("blocked_seconds", "thread_cpu_seconds", "write_seconds")
        )
        whole = every * step["none"].median
        result["modes"][mode] = {
            "overhead": overhead,
            "overhead_interval": [low, high],
            "cpu_overhead": cpu_overhead,
            "cpu_overhead_interval": [cpu_low, cpu_high],
            "blocked_seconds": blocked,
            "thread_cpu_seconds": cpu,
            "write_seconds": written,
            "blocked_share": blocked / whole,
            "bytes": saves["bytes"],
        }
        tell(
            f"{mode}: {saves['bytes'] / 1e6:,.2f} MB every {every} steps cost {overhead:+.2%} of step time "
            f"({low:+.2%} to {high:+.2%}), and {cpu_overhead:+.2%} of CPU time ({cpu_low:+.2%} to {cpu_high:+.2%})"
        )
        tell(
            f"    a save holds up the loop for {blocked * 1e3:,.2f} ms ({blocked / whole:.2%} of {every} steps), "
            f"its thread computes for {cpu * 1e3:,.2f} ms ({cpu / whole:.2%}), it is on the disk after "
            f"{written * 1e3:,.1f} ms"
        )
    return result


def _overhead(times: Times, mode: str) -> tuple[float, float, float]:
    """What saving adds to blocks without, as a share: the median of all repetitions, and its 95% interval."""
    added = [ratio - 1 for ratio in ratios(times, "none", mode).values]
    return spread(added).median, *median_interval(added)


def run(options: argparse.Namespace, folder: Path, override: Callable[..., RunConfig]) -> tuple[int, str | None]:
    """Start the ranks and wait for them; the exit code and a message."""
    steps = options.every * 3 * (options.repetitions + 1)  # of three kinds of blocks
    config = override(f"run.dir={folder}", "run.name=bench", f"train.max_steps={steps}", "run.overwrite=false")
    make_demo_data(config)  # before ranks would wait for it
    gpus = visible_gpus()
    plan = make_plan(config, min((gpu.total_bytes for gpu in gpus), default=None))
    threads = config.parallel.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // len(plan.ranks))
    set_rank_environment(threads, on_gpus=bool(gpus))
    job = Job(
        places=tuple(f"stage {rank.pipeline}, replica {rank.data}" for rank in plan.ranks),
        folder=folder,
        threads=threads,
        timeout_seconds=config.parallel.timeout_seconds,
        on_gpus=bool(gpus),
        preload=RANK_MODULES,
    )
    from bench_saving import measure  # torch reads the environment when it is imported

    with prepared(job):
        failure = run_ranks(functools.partial(measure, config, plan, options), job)
    return (0, None) if failure is None else (failure.exit_code, failure.message)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; `--help` teaches by example."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = lambda text: Path(text).expanduser()  # noqa: E731 - the shell leaves --folder=~/data as it is
    add = parser.add_argument
    add("--config", type=path, default=DEMO, metavar="FILE", help="the run (the demo)")
    add("--every", type=int, default=10, metavar="N", help="steps between two saves (%(default)s)")
    add("--repetitions", type=int, default=30, metavar="N", help="blocks of each kind (%(default)s)")
    add("--width", type=int, nargs=2, metavar=("VISION", "LLM"), help="save a random projector of these widths, too")
    add("--folder", type=path, metavar="DIR", help="where checkpoints go meanwhile (the system's temporary folder)")
    add("--json", type=path, metavar="FILE", help="write every single measurement there")
    add("overrides", metavar="key=value", nargs="*", help="keys of the configuration, e.g. parallel.pipeline=2")
    options = parser.parse_intermixed_args(arguments)
    for name in ("every", "repetitions"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1 is needed")
    return options


def bench_checkpoint(options: argparse.Namespace) -> int:
    """Measure, print and write what the options ask for; the exit code. Raises UserError."""
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint-", dir=options.folder) as name:
        folder = Path(name)
        code, message = run(options, folder, lambda *more: load_config(options.config, [*options.overrides, *more]))
        if message is not None:
            show_error(message)
            return code
        found = json.loads((folder / RESULT).read_text())
    numbers = report(found, options.every)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    tell("", f"{cores} cores; load average of the last minute {load:.1f}")
    if options.json is not None:
        content = {"every": options.every, "cores": cores, "load_average": load, **numbers, **found}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 2 and one message for what the user can mend."""
    options = parse_arguments(arguments)
    return run_command(lambda: bench_checkpoint(options), options.folder)


if __name__ == "__main__":
    sys.exit(main())
