"""One start of a training run that is watched from outside, and killed at the moment that was asked
for.

The launcher gets a TMPDIR of its own, where its ranks keep the step and the work that they are at:
the moments that a kill can wait for. Processes are found by their process group.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mmtrain.base.durable import UNFINISHED
from mmtrain.checkpoint.step_folder import CHECKPOINTS
from mmtrain.runtime.child import python_child
from mmtrain.runtime.failures import RankProgress

AT_START = ("opening the data", "loading weights", "building the engine", "loading the checkpoint")
SECONDS_TO_END = 10.0  # that a job may take to end when one of its ranks is killed
SECONDS_AFTER_TIMEOUT = 45.0  # the same after parallel.timeout_seconds where one is stopped
# Fields of metrics.jsonl that measure the machine: two runs that do the same differ in them.
MEASURED = (
    "seconds",
    "tokens_per_second",
    "idle_fraction",
    "compute_seconds",
    "communication_seconds",
    "data_seconds",
    "fetching_seconds",
    "peak_memory_bytes",
    "model_flops_utilization",
    "time",
)
POLL = 0.0002  # seconds; a save of the demo is on its way for about 5 ms


@dataclass(frozen=True)
class Kill:
    """When to kill what. `when`: "start" (a random moment before the first step), "load", "step" or
    "save".
    """

    when: str
    who: str  # "rank", "all", "launcher" or "stop": SIGSTOP of a rank
    step: int = 0  # not before this one, where `when` is "step" or "save"
    delay: float = 0.0  # seconds after the moment has come
    work: str = ""  # what a rank must be at, where `when` is "load"

    @classmethod
    def draw(
        cls, when: str, who: str, steps: range, start_seconds: float, draw: random.Random
    ) -> Kill:
        """A random one: of the start, whose length is known, or within these steps."""
        longest = {"start": start_seconds, "load": 0.02, "step": 0.5, "save": 0.006}[when]
        step = draw.choice(steps) if when in ("step", "save") else 0
        return cls(
            when,
            who,
            step,
            draw.uniform(0, longest),
            draw.choice(AT_START) if when == "load" else "",
        )

    def __str__(self) -> str:
        what = {"start": "starting", "load": f"at {self.work!r}", "step": f"from step {self.step}"}
        return (
            f"{self.who}: {what.get(self.when, f'saving, from step {self.step}')} "
            f"+{self.delay * 1000:.0f} ms"
        )


@dataclass(frozen=True)
class Killed:
    """What a kill met, and what came of it."""

    kill: Kill
    step: int  # the furthest that a rank was at
    doing: str  # what the killed rank, or rank 0, was at
    tore_a_save: bool  # .step-*.tmp is left
    seconds: float  # until no process of the job was left
    exit_code: int
    message: str  # on stderr
    expected_message: str | None  # regular expression; None where nobody is left to say anything

    def problems(self, limit: float) -> list[str]:
        """What must not be after a kill, of which no process may be left `limit` seconds later."""
        found = []
        if self.seconds > limit:
            found.append(
                f"its processes were there for {self.seconds:.1f} s after the kill; "
                f"{limit:.0f} are allowed"
            )
        if self.expected_message is not None and not re.search(self.expected_message, self.message):
            found.append(f"its message does not name what was killed: {self.message!r}")
        return found


class Launched:
    """`mmtrain train ...`, started in a process group of its own."""

    def __init__(self, arguments: Sequence[str], run: Path, scratch: Path) -> None:
        self.run = run
        self.scratch = scratch
        scratch.mkdir(parents=True)
        self.stdout, self.stderr = scratch / "stdout", scratch / "stderr"
        with self.stdout.open("w") as stdout, self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                **python_child(
                    "-m", "mmtrain.launch", *arguments, TMPDIR=str(scratch), PYTHONUNBUFFERED="1"
                ),
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """Living processes of the job."""
        found = []
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if (
                    os.getpgid(process.pid) == self.process.pid
                    and process.info["status"] != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.pid)
        return found

    def ranks(self) -> dict[int, int]:
        """Process ids of the living ranks, as their log names them."""
        log, alive = self.run / "log.txt", set(self.processes())
        text = log.read_text(errors="replace") if log.exists() else ""
        said = {
            int(rank): int(pid)
            for rank, pid in re.findall(r"^\[rank (\d+)\] process (\d+) on ", text, re.M)
        }
        return {rank: pid for rank, pid in sorted(said.items()) if pid in alive}

    def progress(self) -> dict[int, tuple[int, str]]:
        """What each rank is at: step and work."""
        files = self.scratch.glob("mmtrain-*/progress-*")
        read = {int(file.name.rpartition("-")[2]): RankProgress.read(file) for file in files}
        return {rank: at for rank, at in sorted(read.items()) if at[1]}

    def strike(self, kill: Kill, draw: random.Random, timeout: float) -> Killed | None:
        """Wait for the moment, kill, and wait until the job is gone; None if it ended before the
        moment came.

        A job that is not gone after `timeout` seconds is killed as a whole; its seconds say so.
        """
        ranks: dict[int, int] = {}
        for has_come in self._moments(kill):
            while not has_come():
                if self.process.poll() is not None:
                    return None
                if not ranks and any(
                    doing == "loading weights" for _, doing in self.progress().values()
                ):
                    # now: at the moment itself reading the log would take too long
                    ranks = self.ranks()
                time.sleep(POLL)
        time.sleep(kill.delay)
        if self.process.poll() is not None:
            return None
        rank = None
        if kill.who in ("rank", "stop"):
            if ranks := ranks or self.ranks():
                rank = draw.choice(sorted(ranks))
            else:
                kill = replace(kill, who="all")
        try:
            if rank is not None:
                os.kill(ranks[rank], signal.SIGKILL if kill.who == "rank" else signal.SIGSTOP)
            elif kill.who == "launcher":
                self.process.kill()
            else:
                os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # that rank has just ended
            self.process.wait()
            return None
        struck, at = time.monotonic(), self.progress()
        while self.processes() and time.monotonic() - struck < timeout:
            time.sleep(0.01)
        seconds = time.monotonic() - struck
        self.end()
        return Killed(
            kill,
            step=max((step for step, _ in at.values()), default=0),
            doing=at.get(rank or 0, (0, "planning"))[1],
            tore_a_save=any((self.run / CHECKPOINTS).glob(f"*{UNFINISHED}")),
            seconds=seconds,
            exit_code=self.process.returncode,
            message=self.stderr.read_text(),
            expected_message=None if rank is None else expected_message(rank, kill.who),
        )

    def end(self) -> None:
        """Kill what is left of the job."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()

    def _moments(self, kill: Kill) -> list[Callable[[], bool]]:
        """What must have come before the kill, one after the other."""
        saves = self.run / CHECKPOINTS

        def in_step() -> bool:
            return any(
                step >= kill.step and doing[0].isupper() for step, doing in self.progress().values()
            )

        return {
            "start": [],
            "load": [lambda: any(doing == kill.work for _, doing in self.progress().values())],
            "step": [in_step],
            "save": [in_step, lambda: any(saves.glob(f"*{UNFINISHED}"))],
        }[kill.when]


def expected_message(rank: int, who: str) -> str:
    """The launcher's message, as a regular expression: that a rank was killed, or, if stopped, what
    it was at.
    """
    at = r"in step \d+ \(counted from 0\), at \S.*"
    named = rf"rank {rank} \(stage [^)]*\) "
    if who == "rank":
        return rf"\Aerror: {named}was killed by SIGKILL \(.*\) {at}\n  log: .*\n\Z"
    return (
        r"\Aerror: rank \d+ \(stage [^)]*\) lost its connection to another rank "
        rf"{at}(\n.*)*\n  "
        rf"{named}was {at}\n"
    )
