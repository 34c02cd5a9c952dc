"""The first hour on a machine: does what training needs work here, and does it compute what it computes elsewhere?

Checks run in order, each in a process of its own with a time limit: one that crashes or hangs ends no other. Each gives
one line, and what to do if it fails. Without a GPU those run that need none, with ranks on the CPU, and the others are
named. Runs are real: the launcher, on the demo, in a temporary folder, which stays only if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import without_nan
from mmtrain.base.printing import clear_line, harmless, print_table, show_words, table_lines, tell
from mmtrain.doctor.check import Check, Here, Outcome, run_check
from mmtrain.doctor.machine import describe_machine
from mmtrain.processes.gpus import Gpu, visible_gpus

EXAMPLES = """\
  everything that this machine can show; minutes:
    mmtrain doctor
  the most telling checks, within a minute:
    mmtrain doctor --quick
  some of them, and all that they saw, for a report:
    mmtrain doctor --only driver environment channels --json doctor.json
  as on a machine without a GPU:
    mmtrain doctor --cpu
"""
EXITS = {
    0: "all checks that ran passed",
    1: "one did not; its line says what was seen and what to do, its log is kept and named",
    130: "stopped by Ctrl-C or SIGTERM, the check that ran ended with it",
}
RECORD = Path(__file__).parents[1] / "doctor" / "record.json"
NUMBERS = "numbers are wrong here: do not train; send the output of --json with what torch, driver and GPU these are"
QUIET = "run it again while nothing else runs"
LOGS = "the check's log has the words of launcher and ranks; with --cpu the same check tells whether GPUs are at fault"
CHECKS = (
    # The machine.
    Check("driver", "machine:driver", "torch can use the GPUs", "", 150, quick=True),
    Check("architectures", "machine:architectures", "what the GPUs are, and whether all are equal",
          "train in float32 models that fit, or use newer GPUs", 30, gpus=1, quick=True),
    Check("memory", "machine:memory", "GPUs and host have memory free",
          "nvidia-smi names the processes: end them, or choose other GPUs by CUDA_VISIBLE_DEVICES", 30, quick=True),
    Check("topology", "machine:topology", "how neighbouring GPUs are joined", "", 90, gpus=2, quick=True),
    Check("shared-memory", "machine:shared_memory", "room for what data workers hand on",
          "docker run --shm-size=8g, or --ipc=host; mount -o remount,size=8G /dev/shm", 30, quick=True),
    Check("environment", "machine:environment", "no variable, folder or limit is in the way",
          "mend each of them in the shell or the job script", 30, quick=True),
    # What one process computes.
    Check("plan", "numbers:plan_and_probe", "a plan, and the probe of a model family",
          "mmtrain plan demo:llava_pp4 shows the error alone", 120, quick=True),
    Check("attention", "attention:attention", "packed attention, both directions, over changing lengths",
          NUMBERS, 180, quick=True),
    Check("stage", "numbers:stages_on_gpu", "stages on the GPU compute what they compute on the CPU",
          NUMBERS, 180, gpus=1),
    Check("demo", "numbers:recorded:float32", "the demo's losses in float32 are those on record",
          NUMBERS, 180, quick=True),
    Check("demo-bfloat16", "numbers:recorded:bfloat16", "the demo's losses in bfloat16 are those on record",
          NUMBERS, 180),
    Check("twice", "numbers:same_step_twice", "the same command gives the same bits",
          "do not count on exact resumption here; send the output of --json", 300),
    # Several ranks.
    Check("channels", "layouts:channels", "messages between ranks, both ways, work in between",
          "NCCL_DEBUG=INFO says how GPUs reach each other; NCCL_P2P_DISABLE=1 tells whether direct access is at fault",
          180, ranks=2),
    Check("pipeline-2", "layouts:layout:2:1:1", "two stages train as one process does", LOGS, 180, ranks=2,
          quick=True),
    Check("pipeline-2x2", "layouts:layout:2:2:1", "two ranks with two stages each do", LOGS, 180, ranks=2),
    Check("data-2", "layouts:layout:1:1:2", "two replicas do", LOGS, 180, ranks=2),
    Check("data-4", "layouts:layout:1:1:4", "four replicas do", LOGS, 240, ranks=4),
    Check("data-8", "layouts:layout:1:1:8", "eight replicas do", LOGS, 300, ranks=8),
    # Layers that are not kept on the device.
    Check("streamed", "fetching:streamed:host", "layers fetched from host memory train as others do", LOGS, 180),
    Check("streamed-peers", "fetching:streamed:peers", "layers that two replicas share do", LOGS, 180, ranks=2),
    Check("fetching", "fetching:overlap", "fetching layers hides behind computing, and no host waits for it",
          "plan for less with parallel.streamed_layers; see whether the GPU has all lanes of its slot (nvidia-smi -q)",
          180),
    Check("kill", "drills:kill", "a killed rank ends the run, by name", LOGS, 120, ranks=2),
    Check("stop", "drills:stop", "a rank that hangs ends the run after the timeout", LOGS, 180, ranks=2),
    # What was foreseen.
    Check("memory-plan", "measures:memory", "the plan's bytes are those that a step takes",
          "state parallel.device_memory_gib with the difference taken off", 240),
    Check("calibration", "measures:calibration", "a calibrated step takes as long as planned", QUIET, 300),
)  # fmt: skip
REMAKE = Check("record", "numbers:remake_record", "the demo's losses on this CPU, to be the record", LOGS, 600)
NAMES = {check.name: check for check in CHECKS}
NAME_WIDTH = max(map(len, NAMES))


def run(options: argparse.Namespace) -> int:
    """Run the checks, print a line of each and a summary; the exit code. Raises UserError."""
    if options.list:
        _print_list()
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):  # whoever ends the doctor ends the checks
        signal.signal(number, signal.default_int_handler)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.json is not None:
        options.json.open("a").close()  # or say now that it cannot be written
    # In the table's order, however they were named: a check trusts what those before it have seen.
    chosen = [check for check in CHECKS if not options.only or check.name in options.only]
    chosen = [check for check in chosen if check.quick or not options.quick]
    if options.remake_record:
        chosen = [REMAKE]
    machine = describe_machine()
    gpus: tuple[Gpu, ...] = ()
    with contextlib.suppress(UserError):  # which the check of the driver then says
        gpus = visible_gpus()
    began, on_terminal = time.monotonic(), sys.stdout.isatty()
    devices = ", ".join(gpu.name for gpu in gpus) or "no GPU: ranks run on the CPU"
    libraries = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    headline = f"{devices}; {machine['cores']} cores; python {machine['python']}, {libraries}"
    tell(*table_lines(("",), [(headline,)]))
    folder = Path(tempfile.mkdtemp(prefix="doctor-"))
    here = Here(folder, folder / "runs", options.record.resolve(), gpus)
    outcomes: list[Outcome] = []
    try:
        for check in chosen:
            if on_terminal:  # what is being waited for
                show_words(f"{check.name}: {check.purpose}")
            limit = check.seconds if options.timeout is None else options.timeout
            outcomes.append(run_check(check, replace(here, folder=folder / check.name), limit))
            if on_terminal:
                clear_line()
            _print(outcomes[-1])
    finally:
        if on_terminal:
            clear_line()
        failed = [outcome.name for outcome in outcomes if outcome.outcome == "failed"]
        if failed:
            tell(f"kept: {folder}, with the log.txt of {', '.join(failed)}")
        else:
            shutil.rmtree(folder)
        seconds = time.monotonic() - began
        if options.json is not None:
            checks = [asdict(outcome) for outcome in outcomes]
            result = {"machine": machine, "gpus": [asdict(gpu) for gpu in gpus], "checks": checks, "seconds": seconds}
            options.json.write_text(json.dumps(without_nan(result), indent=1) + "\n", encoding="utf-8")
    counts = Counter(outcome.outcome for outcome in outcomes)
    tell(", ".join(f"{counts[one]} {one}" for one in ("ok", "failed", "left out")) + f"; {seconds:.0f} s")
    if options.remake_record and not failed:
        options.record.write_text(json.dumps(outcomes[-1].facts, indent=1) + "\n", encoding="utf-8")
        tell(f"written to {options.record}")
    return 1 if failed else 0


def _print(outcome: Outcome) -> None:
    """A row of the table that the checks make one after the other."""
    word = {"failed": "FAILED"}.get(outcome.outcome, outcome.outcome)
    seconds = "" if outcome.outcome == "left out" else f"{outcome.seconds:.1f} s"
    text = harmless(outcome.text) + (f"\nwhat to do: {outcome.remedy}" if outcome.remedy else "")
    tell(*table_lines(("", "", ">", ""), [(f"{word:8}", f"{outcome.name:{NAME_WIDTH}}", f"{seconds:>7}", text)]))


def _print_list() -> None:
    rows = []
    for check in CHECKS:
        needs = f"{check.ranks} ranks" * (check.ranks > 1)
        if check.gpus:
            needs = f"{check.gpus} GPU{'s' * (check.gpus > 1)}"
        rows.append((check.name, "quick" if check.quick else "", needs, check.purpose))
    print_table(("check", "", "needs", "proves"), rows)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; `--help` teaches by example."""
    parser = command_parser("doctor", __doc__, EXAMPLES, EXITS, interrupted="stopped")
    add = parser.add_argument
    path = lambda text: Path(text).expanduser()  # noqa: E731 - the shell leaves --json=~/file as it is
    add("--list", action="store_true", help="name the checks, what they prove and what they need; run none")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="NAME", help="only these checks")
    which.add_argument("--quick", action="store_true", help="only the most telling checks, within a minute")
    add("--cpu", action="store_true", help="as on a machine without a GPU")
    add("--timeout", type=positive(float), metavar="SECONDS", help="of each check (each has its own, from 30 to 300)")
    add("--json", type=path, metavar="FILE", help="write everything that was seen")
    add("--record", type=path, metavar="FILE", default=RECORD, help="losses to compare the demo's with (the shipped)")
    which.add_argument(
        "--remake-record",
        action="store_true",
        help="run no check but make that file, on this CPU: for who has changed what the demo computes",
    )
    options = parser.parse_args(arguments)
    for name in options.only or ():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            parser.error(f"--only {harmless(name)}: no such check{meant}; there are {', '.join(NAMES)}")
    if options.remake_record:
        options.cpu = True
    elif not options.record.is_file():
        parser.error(f"--record {options.record}: there is no such file; --remake-record makes it")
    return options
