"""A request to save and end, from a signal to all ranks.

SIGTERM or SIGUSR1 --launcher or rank--> StopRequest --engine.request--> agreed at the end of a step
    --> save, exit 3

A launcher and its ranks share a small file. Signals may come to the launcher alone (kill), or to
every process (Slurm). torch's agent also sends SIGTERM to a rank whose peer has failed: it must end
at once, and waiting in C++ for that peer it could run no Python handler. So a thread decides, woken
by the signal itself.
"""

import contextlib
import enum
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_FILE = "stop"  # the StopFile, among the launcher's records
SECONDS_TOGETHER = 1.0  # between two signals of which one sender meant the same


class Asked(enum.IntEnum):
    """The launcher's wish."""

    NOTHING = 0
    SAVE_AND_END = 1
    END_NOW = 2


class StopFile:
    """The launcher's wish, in a file that its ranks map."""

    _FORMAT = struct.Struct("<qd")

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(self._FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), self._FORMAT.size)

    def ask(self, asked: Asked) -> None:
        self._FORMAT.pack_into(self._memory, 0, asked, time.monotonic())

    def read(self) -> tuple[Asked, float]:
        """Return the wish, and the seconds since it was made."""
        asked, since = self._FORMAT.unpack_from(self._memory)
        return Asked(asked), time.monotonic() - since


class StopRequest:
    """A request to this rank to save and end, from its launcher or from a signal of its own.

    `path` is the launcher's file. None: under torchrun the first SIGTERM asks, and a later one ends
    the rank.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else StopFile(path)
        self._signalled_at: float | None = None

    @property
    def asked(self) -> bool:
        return self._signalled_at is not None or (
            self._file is not None and self._file.read()[0] != Asked.NOTHING
        )

    def listen(self) -> None:
        """From now on answer SIGTERM and SIGUSR1; only the main thread may call it."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in STOP_SIGNALS:
            signal.signal(number, _nothing)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=[reading], name="signals", daemon=True).start()

    def _answer(self, signals: int) -> None:
        while True:
            for number in os.read(signals, 64):
                if number == signal.SIGTERM and self._ends_this_rank():
                    os._exit(128 + number)
                if number in STOP_SIGNALS and self._signalled_at is None:
                    self._signalled_at = time.monotonic()

    def _ends_this_rank(self) -> bool:
        """Tell whether a SIGTERM comes from a sender that does not wait."""
        # torchrun hands on the signal that its ranks may have had themselves
        if self._file is None:
            return (
                self._signalled_at is not None
                and time.monotonic() - self._signalled_at > SECONDS_TOGETHER
            )
        deadline = time.monotonic() + SECONDS_TOGETHER
        while True:
            asked, seconds = self._file.read()
            if asked is Asked.SAVE_AND_END:
                return seconds > SECONDS_TOGETHER
            if asked is Asked.END_NOW or time.monotonic() > deadline:
                return True
            time.sleep(0.02)


def ignore_in_worker() -> None:
    """Ignore stop signals in a process that a rank has forked: the rank answers them."""
    # not the main thread: the process has no handlers of its own
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _nothing(number: int, frame: object) -> None:
    """A handler, without which a signal would not wake the thread."""
