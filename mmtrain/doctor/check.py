"""A check of the doctor, in a process of its own: a crash, a hang or a CUDA error of one check ends no other.

Check, Here --run_check--> child: this file, which calls the check's function --found.json--> Outcome

A function takes a Here and returns Seen; it raises FailedError for what is wrong here and LeftOutError for what cannot
be tried here. Whatever processes a check has started end with it: a mark in their environment tells them (Linux).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import TypeAdapter

from mmtrain.api.run import RunError
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.processes.child import python_child
from mmtrain.processes.gpus import Gpu
from mmtrain.processes.parent import die_with_parent

MARK = "MMTRAIN_DOCTOR_CHECK"
CHILD = "import sys; from mmtrain.doctor.check import main; main(sys.argv[1], sys.argv[2])"
HERE, FOUND = "here.json", "found.json"
LOG = "log.txt"
SECONDS_TO_END = 10  # for processes that were killed


@dataclass(frozen=True)
class Here:
    """Where a check runs. `folder` is its own; `runs` belongs to all checks, so that no run is made twice."""

    folder: Path
    runs: Path
    record: Path
    gpus: tuple[Gpu, ...] = ()

    @property
    def device(self) -> str:
        """What ranks compute on, for people."""
        return self.gpus[0].name if self.gpus else "the CPU"


@dataclass(frozen=True)
class Seen:
    """What a check that passed has seen: one line for people, and everything as JSON values."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class FailedError(Exception):
    """Something is wrong here. `remedy`: what to do, where the check's own general remedy is not it."""

    def __init__(self, text: str, remedy: str = "", facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.remedy, self.facts = remedy, facts or {}


class LeftOutError(Exception):
    """The check cannot be made here; the text says what it needs."""


@dataclass(frozen=True)
class Check:
    """`function` is "module:name" or "module:name:argument..."; `remedy` is for a failure, `seconds` its limit."""

    name: str
    function: str
    purpose: str
    remedy: str
    seconds: float
    gpus: int = 0  # that it needs at least
    ranks: int = 1  # processes that train: as many GPUs, where there are GPUs at all
    quick: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a check ended."""

    name: str
    outcome: Literal["ok", "failed", "left out"]
    text: str
    seconds: float = 0.0
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def run_check(check: Check, here: Here, limit: float) -> Outcome:
    """Run it in a child, for at most `limit` seconds; everything that it started has ended when this returns."""
    needed = max(check.gpus, check.ranks if here.gpus else 0)
    if needed > len(here.gpus):
        return Outcome(check.name, "left out", f"needs {needed} GPU{'s' * (needed > 1)}; here: {len(here.gpus)}")
    here.folder.mkdir(parents=True)
    (here.folder / HERE).write_bytes(TypeAdapter(Here).dump_json(here))
    mark, began = uuid.uuid4().hex, time.monotonic()
    with (here.folder / LOG).open("w") as log:
        child = subprocess.Popen(
            **python_child("-c", CHILD, check.function, here.folder, **{MARK: mark}),
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is ours to hand on
        )
        try:
            child.wait(limit)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            _end_family(mark)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_END)
    seconds = time.monotonic() - began
    if not in_time:
        stays = ", and cannot be killed: it hangs in a driver" if child.poll() is None else ""
        text = f"did not end within {limit:g} s{stays}{_last_words(here.folder / LOG)}"
        return Outcome(check.name, "failed", text, seconds, f"{check.remedy}; --timeout gives more time")
    file = here.folder / FOUND
    if not file.exists():
        end = f"was killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else "ended"
        text = f"the check's process {end} without a result{_last_words(here.folder / LOG)}"
        return Outcome(check.name, "failed", text, seconds, check.remedy)
    found = Outcome(**json.loads(file.read_text()))
    remedy = (found.remedy or check.remedy) if found.outcome == "failed" else ""
    return replace(found, seconds=seconds, remedy=remedy)


def _end_family(mark: str) -> None:
    """Kill every process whose environment has the mark, until none is left that can be."""
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        processes = psutil.process_iter(["environ"])  # a zombie's is empty, a stranger's None
        left = [process for process in processes if (process.info["environ"] or {}).get(MARK) == mark]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"; it said last: {lines[-1].strip()}" if lines else ""


def main(function: str, path: str) -> None:
    """Be the process of a check: call its function and leave what it found in the folder's found.json."""
    die_with_parent()
    module, name, *arguments = function.split(":")
    folder = Path(path)
    here = TypeAdapter(Here).validate_json((folder / HERE).read_bytes())
    try:
        seen = getattr(importlib.import_module(f"mmtrain.doctor.{module}"), name)(here, *arguments)
        found = Outcome(folder.name, "ok", seen.text, facts=seen.facts)
    except LeftOutError as reason:
        found = Outcome(folder.name, "left out", str(reason))
    except FailedError as error:
        found = Outcome(folder.name, "failed", str(error), remedy=error.remedy, facts=error.facts)
    except UserError as error:
        found = Outcome(folder.name, "failed", str(error))
    except RunError as error:  # all that a launcher printed last; its log has the rest
        found = Outcome(folder.name, "failed", str(error).splitlines()[0])
    except Exception as error:  # a CUDA error, an assertion: whatever it is, it is this check's result
        traceback.print_exc()
        found = Outcome(folder.name, "failed", f"{type(error).__name__}: {error}")
    write_whole(folder / FOUND, json.dumps(asdict(found)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a broken driver does at exit is no result
