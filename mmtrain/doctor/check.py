"""A check of doctor.py, in a process of its own: a crash, a hang or a CUDA error of one check ends no other.

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.processes.gpus import Gpu
from mmtrain.processes.parent import die_with_parent

MARK = "MMTRAIN_DOCTOR_CHECK"
CHILD = "import sys; from mmtrain.doctor.check import main; main(sys.argv[1], sys.argv[2])"
FOUND = "found.json"
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

    def save(self, file: Path) -> None:
        """For the process of the check."""
        paths = {name: str(getattr(self, name)) for name in ("folder", "runs", "record")}
        file.write_text(json.dumps(paths | {"gpus": [asdict(gpu) for gpu in self.gpus]}))

    @classmethod
    def load(cls, file: Path) -> Here:
        """What `save` wrote."""
        content = json.loads(file.read_text())
        gpus = TypeAdapter(tuple[Gpu, ...]).validate_python(content.pop("gpus"))
        return cls(**{name: Path(path) for name, path in content.items()}, gpus=gpus)


@dataclass(frozen=True)
class Seen:
    """What a check that passed has seen: one line for people, and everything as JSON values."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class FailedError(Exception):
    """Something is wrong here. `remedy`: what to do, where the check's own general remedy is not it."""

    def __init__(self, text: str, remedy: str = "", facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.text, self.remedy, self.facts = text, remedy, facts or {}


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
        return Outcome(check.name, "left out", f"needs {_count(needed, 'GPU')}; here: {len(here.gpus)}")
    here.folder.mkdir(parents=True)
    here.save(here.folder / "here.json")
    mark, began = uuid.uuid4().hex, time.monotonic()
    with (here.folder / LOG).open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, check.function, here.folder],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {MARK: mark},
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
        stays = " and not to be ended: it hangs in a driver" if child.poll() is None else ""
        text = f"not done after {limit:g} s{stays}{_last_words(here.folder / LOG)}"
        return Outcome(check.name, "failed", text, seconds, f"{check.remedy}; --timeout gives more time")
    file = here.folder / FOUND
    if not file.exists():
        end = f"was killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else "ended"
        text = f"the check's process {end} without a result{_last_words(here.folder / LOG)}"
        return Outcome(check.name, "failed", text, seconds, check.remedy)
    found = json.loads(file.read_text())
    if found["outcome"] == "failed":
        found["remedy"] = found["remedy"] or check.remedy
    return Outcome(check.name, seconds=seconds, **found)


def _end_family(mark: str) -> None:
    """Kill every process whose environment has the mark, until none is left that can be."""
    wanted, deadline = f"{MARK}={mark}".encode(), time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        left = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                is_alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
                if is_alive and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    left.append(int(entry.name))
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"; it said last: {lines[-1].strip()}" if lines else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def main(function: str, path: str) -> None:
    """Be the process of a check: call its function and leave what it found in the folder's found.json."""
    die_with_parent()
    module, name, *arguments = function.split(":")
    folder = Path(path)
    here = Here.load(folder / "here.json")
    try:
        seen = getattr(importlib.import_module(f"mmtrain.doctor.{module}"), name)(here, *arguments)
        found = {"outcome": "ok", "text": seen.text, "remedy": "", "facts": dict(seen.facts)}
    except LeftOutError as reason:
        found = {"outcome": "left out", "text": str(reason), "remedy": "", "facts": {}}
    except FailedError as error:
        found = {"outcome": "failed", "text": error.text, "remedy": error.remedy, "facts": dict(error.facts)}
    except UserError as error:  # which names its remedy itself
        found = {"outcome": "failed", "text": str(error), "remedy": "", "facts": {}}
    except Exception as error:  # a CUDA error, an assertion: whatever it is, it is this check's result
        traceback.print_exc()
        found = {"outcome": "failed", "text": f"{type(error).__name__}: {error}", "remedy": "", "facts": {}}
    write_whole(folder / FOUND, json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a broken driver does at exit is no result
