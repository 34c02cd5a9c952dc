"""Check that training works on this machine, and that it computes the right numbers.

Checks run one after the other, each in its own process with a time limit, and print one line each:
ok, FAILED with what to do, or skipped with the reason. Without a GPU their ranks run on the CPU.
Runs are real: the launcher trains the demo in a temporary folder, which stays only if a check
fails.
"""

import shutil
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser
from mmtrain.base.printing import clear_line, escape, print_result, print_words, table_lines
from mmtrain.doctor.check import Check, run_check
from mmtrain.doctor.machine import describe_machine

CHECKS = (
    Check(
        "driver", "mmtrain.doctor.machine:driver", "torch is built for this driver and these GPUs"
    ),
    Check("memory", "mmtrain.doctor.machine:memory", "GPUs, host and /dev/shm have room"),
    Check("environment", "mmtrain.doctor.machine:environment", "no variable breaks a pipeline"),
    Check(
        "attention",
        "mmtrain.doctor.attention:attention",
        "packed documents are as separate ones; by which kernel",
    ),
    Check(
        "compiler",
        "mmtrain.doctor.compiling:compiled_layer",
        "decoder layers can be compiled, and compute what eager ones do",
    ),
    Check("demo", "mmtrain.doctor.runs:demo", "the demo's losses are those on record"),
    Check("pipeline", "mmtrain.doctor.runs:pipeline", "two stages train as one process does"),
    Check(
        "streaming",
        "mmtrain.doctor.runs:streaming",
        "layers fetched from the host train as kept ones do",
    ),
)
NAMES = [check.name for check in CHECKS]
NAME_WIDTH = max(map(len, NAMES))
EXAMPLES = """\
  everything, in two minutes or so:
    mmtrain doctor
  one check again, after its remedy:
    mmtrain doctor --only memory
  on the CPU of a machine with GPUs:
    CUDA_VISIBLE_DEVICES= mmtrain doctor
"""
EXITS = {
    0: "no check failed",
    1: "one did; its line says what was seen and what to do, its log is kept and named",
    130: "stopped by Ctrl-C or SIGTERM, and the check that ran with it",
}


def run(options: Namespace) -> int:
    """Run the checks and print a line of each; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # else the check that runs would go on
        signal.signal(number, signal.default_int_handler)
    machine = describe_machine()
    libraries = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    headline = f"{machine['cores']} cores; python {machine['python']}, {libraries}"
    print_result(*table_lines(("",), [(headline,)]))
    folder = Path(tempfile.mkdtemp(prefix="doctor-"))
    states = {}
    try:
        for check in CHECKS:
            if check.name in options.only:
                states[check.name] = _run(check, folder)
    finally:
        failed = [name for name, state in states.items() if state == "failed"]
        if failed:
            print_result(f"kept: {folder}, with the logs of {', '.join(failed)}")
        else:
            shutil.rmtree(folder)
    counts = Counter(states.values())
    print_result(", ".join(f"{counts[state]} {state}" for state in ("ok", "failed", "skipped")))
    return 1 if failed else 0


def _run(check: Check, folder: Path) -> str:
    """Run a check, print its line and return its state."""
    on_terminal = sys.stdout.isatty()
    began = time.monotonic()
    if on_terminal:
        print_words(f"{check.name}: {check.purpose}")
    try:
        outcome = run_check(check, folder)
    finally:
        if on_terminal:
            clear_line()
    state = "FAILED" if outcome.state == "failed" else outcome.state
    text = escape(outcome.text)
    if outcome.remedy:
        text += f"\nwhat to do: {outcome.remedy}"
    row = (f"{state:7}", f"{check.name:{NAME_WIDTH}}", f"{time.monotonic() - began:5.1f} s", text)
    print_result(*table_lines(("", "", ">", ""), [row]))
    return outcome.state


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    purposes = "\n".join(f"  {check.name:{NAME_WIDTH}}  {check.purpose}" for check in CHECKS)
    parser = command_parser(
        "doctor", f"{__doc__}\nchecks:\n{purposes}", EXAMPLES, EXITS, interrupted="stopped"
    )
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, metavar="CHECK", help="only these checks"
    )
    return parser.parse_args(arguments)
