"""A run's log: everything that its processes and their libraries print, C++ included, with the
writer's name.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmtrain.base.printing import escape_lines


def log_name(node: int) -> str:
    """Return the name of a node's log: nodes that share the folder must not append to one file."""
    return "log.txt" if node == 0 else f"log-node{node}.txt"


class PrefixedLog(io.TextIOWrapper):
    """A log that several processes append to: whole lines, each with the writer's name in front.

    A line that cannot be written (a full disk, an I/O error) is lost: a log does not decide how a
    run ends.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path.open("ab"), encoding="utf-8", errors="replace")
        self._prefix = f"[{name}] "
        self._partial = ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        with contextlib.suppress(OSError):
            for line in lines:
                # of a progress bar, which redraws with carriage returns, only the last state of the
                # line is kept
                super().write(
                    self._prefix + escape_lines(line.rstrip("\r").rsplit("\r", 1)[-1]) + "\n"
                )
            if lines:
                super().flush()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def finish(self) -> None:
        """Write a last line that has no end."""
        if self._partial:
            self.write("\n")


def send_output_to(path: Path, name: str, descriptors: Sequence[int]) -> PrefixedLog:
    """Append to the file `path` what C++ writes to `descriptors`, and what Python prints, warns and
    logs as `name`.

    Of logging's handlers that keep a standard stream, `stream` is replaced in __dict__: some have a
    property instead.
    """
    log = PrefixedLog(path, name)
    for number in descriptors:
        os.dup2(log.fileno(), number)
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):  # a placeholder has none
            kept = vars(handler).get("stream")
            if isinstance(kept, PrefixedLog) or (kept is not None and kept in streams):
                vars(handler)["stream"] = log
    sys.stdout = sys.stderr = log
    return log


@contextlib.contextmanager
def output_to_log(path: Path) -> Iterator[None]:
    """In the block send the launcher's output to a log, C++ on stderr included; ranks inherit the
    real stdout.
    """
    stdout = sys.stdout
    stderr = sys.stderr
    stderr_copy = os.dup(2)
    sys.stdout.flush()
    log = send_output_to(path, "launcher", [2])
    try:
        yield
    finally:
        log.finish()
        sys.stdout = stdout
        sys.stderr = stderr
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
