"""Starts a command whose whole family of processes can be found again, orphans too, by a mark in
the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

MARK = "MMTRAIN_TEST_MARK"


def listen_to_ctrl_c() -> None:
    """In a child: a background job of a shell script starts with Ctrl-C ignored, and hands that
    on.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def last_given(*words: str | Path) -> list[str | Path]:
    """Words of a command line without the settings that a later one replaces: no command takes a
    key twice.
    """
    keys = [str(word).partition("=")[0] if "=" in str(word) else object() for word in words]
    return [word for place, word in enumerate(words) if keys[place] not in keys[place + 1 :]]


def ran_python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end; return it with what it wrote."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, **options)


class Command:
    """A running `python ARGUMENTS` in its own session; everything that it started is killed at the
    end of the test.
    """

    def __init__(self, arguments: Sequence[str | Path], folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self._stdout, self._stderr = folder / f"stdout-{self.mark}", folder / f"stderr-{self.mark}"
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                start_new_session=True,
                env=os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                preexec_fn=listen_to_ctrl_c,
            )

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def family(self) -> list[int]:
        """Living processes that descend from the command, wherever they hang in the process tree
        now.
        """
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def wait(self, timeout: float = 120) -> int:
        return self.process.wait(timeout)

    def seconds_until_gone(self, timeout: float) -> float:
        """How long it takes until no process of the family is left."""
        start = time.monotonic()
        wait_for(lambda: not self.family(), timeout, "processes to end")
        return time.monotonic() - start

    def kill(self) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def listeners(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that these processes listen on."""
    found: set[tuple[str, int]] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            sockets = psutil.Process(pid).net_connections("tcp")
            found |= {tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


@contextlib.contextmanager
def running(arguments: Sequence[str | Path], folder: Path) -> Iterator[Command]:
    """The command, started; killed with all that it started when the block ends."""
    command = Command(arguments, folder)
    try:
        yield command
    finally:
        command.kill()


def wait_for(condition: Callable[[], object], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.05)


def ranks_of(run: Path) -> dict[int, int]:
    """Process ids by rank, as the log names them."""
    log = run / "log.txt"
    found = re.findall(
        r"(?m)^\[rank (\d+)\] process (\d+) on ", log.read_text() if log.exists() else ""
    )
    return {int(rank): int(pid) for rank, pid in found}


def steps_of(run: Path) -> int:
    """Count the training steps that are recorded."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0
