"""A check of the machine in its own process: a crash, a hang or a CUDA error in one check ends no
other.

run_check --> child process, which calls the check's function --> Outcome in NAME.json, all output
    in NAME.log

A function takes the folder that all checks share and returns one line of text, or raises
FailedError or SkippedError. The child leads a process group with its runs and their ranks, so that
killing the group ends them all.
"""

import contextlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError, naming_shared_memory
from mmtrain.runtime.child import die_with_parent, python_child

CHILD = "from mmtrain.doctor.check import main; main()"
LIMIT_SECONDS = 300  # of a check; on two cores the longest takes 20, and 100 beside much other work
SECONDS_TO_END = 10  # for processes that were killed
COMPARE = (
    "read the log; run CUDA_VISIBLE_DEVICES= mmtrain doctor on the CPU to see whether a "
    "GPU is at fault"
)


class FailedError(Exception):
    """A check failed. The text says what was seen and what is needed, `remedy` what to do."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


class SkippedError(Exception):
    """A check cannot be made here. The text says why."""


@dataclass(frozen=True)
class Check:
    """A check of the machine: `function` is "module:name", `purpose` what passing it proves."""

    name: str
    function: str
    purpose: str


@dataclass(frozen=True)
class Outcome:
    """The end of a check. `remedy` is empty where there is none, or the text has it."""

    state: Literal["ok", "failed", "skipped"]
    text: str
    remedy: str = ""


def run_check(check: Check, folder: Path, seconds: float = LIMIT_SECONDS) -> Outcome:
    """Run a check in a child process, for at most `seconds`. None of its processes is left
    afterwards.
    """
    log = folder / f"{check.name}.log"
    result = folder / f"{check.name}.json"
    with log.open("w") as output:
        child = subprocess.Popen(
            **python_child("-c", CHILD, check.function, folder, result),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = child.wait(seconds)
        end = f"ended with exit code {code}"
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
    except subprocess.TimeoutExpired:
        end = f"did not end within {seconds:g} s"
    finally:
        _end_group(child)
    if result.exists():
        return Outcome(**json.loads(result.read_text()))
    last = (log.read_text(errors="replace").strip() or "none").split("\n")[-1].strip()
    return Outcome(
        "failed", f"the check's process {end}, without a result; its last output: {last}", COMPARE
    )


def _end_group(leader: subprocess.Popen) -> None:
    """Kill a process group and wait until it is gone; a process that hangs in a driver may stay."""
    deadline = time.monotonic() + SECONDS_TO_END
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader.pid, signal.SIGKILL)
            leader.poll()
            time.sleep(0.02)


def main() -> None:
    """Run a check's process; the command line names the function, the checks' folder and the
    result's file.
    """
    die_with_parent()
    function, folder, result = sys.argv[1:]
    try:
        with naming_shared_memory():
            outcome = Outcome("ok", pkgutil.resolve_name(function)(Path(folder)))
    except SkippedError as reason:
        outcome = Outcome("skipped", str(reason))
    except FailedError as error:
        outcome = Outcome("failed", str(error), error.remedy)
    except UserError as error:
        outcome = Outcome("failed", str(error))
    except Exception as error:  # a CUDA error, say, is this check's result
        traceback.print_exc()
        outcome = Outcome("failed", f"{type(error).__name__}: {error}", COMPARE)
    write_whole(Path(result), json.dumps(asdict(outcome)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a broken driver may crash or hang a process that ends in the usual way
