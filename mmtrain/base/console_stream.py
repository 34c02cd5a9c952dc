"""Console output that never keeps the program waiting, and standard streams that exist.

write --queue, newest lines kept--> daemon thread --os.write, which may block--> terminal, pipe or
    file

A terminal stopped by Ctrl-S, a pager or a pipe that nobody empties blocks its writer: a rank that
waited would stall its peers until these time out. O_NONBLOCK instead of a thread would apply to the
user's shell, too.
"""

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

QUEUE_BYTES = 1 << 18
DRAIN_SECONDS = 3.0


class ConsoleStream(io.TextIOBase):
    """A text stream to a copy of a descriptor whose `write` never blocks and never raises.

    Up to 256 KiB are queued; then the oldest lines are dropped, and a line says how many. Once the
    reader has gone or the disk is full, all is dropped. Call `drain` at the end.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)  # never closed: the thread may wait in it
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may write
        self._queue = bytearray()
        self._dropped_lines = 0
        self._writer: threading.Thread | None = None
        self._is_writing = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Queue text and return at once."""
        if self._process != os.getpid():  # forked: the thread and the queued text are the parent's
            self._reset()
        with self._changed:
            self._queue += text.encode(errors="backslashreplace")
            if (excess := len(self._queue) - QUEUE_BYTES) > 0:
                end = self._queue.find(b"\n", excess) + 1 or excess
                # a progress bar ends no line
                self._dropped_lines += max(1, self._queue.count(b"\n", 0, end))
                del self._queue[:end]
            if self._writer is None:  # most processes that could print never do
                self._writer = threading.Thread(
                    target=self._write_queue, name="console", daemon=True
                )
                self._writer.start()
            self._changed.notify_all()
        return len(text)

    def drain(self) -> None:
        """Wait until all is written, at most 3 seconds."""
        if self._process == os.getpid():
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._queue and not self._is_writing, DRAIN_SECONDS
                )

    def _write_queue(self) -> None:
        is_gone = False
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue)
                data = self._take()
                self._is_writing = True
            while data and not is_gone:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another program has set O_NONBLOCK
                    time.sleep(0.01)
                except OSError:  # the reader has gone, or the disk is full
                    is_gone = True

    def _take(self) -> bytes:
        """Take whole lines from the queue where these are short, behind a note about lost ones."""
        end = self._queue.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
        lines = bytes(self._queue[:end])
        dropped = self._dropped_lines
        del self._queue[:end]
        self._dropped_lines = 0
        if dropped:
            return f"\n[{dropped:,} lines are missing here: nothing read them]\n".encode() + lines
        return lines


@contextlib.contextmanager
def output_without_waiting() -> Iterator[None]:
    """In the block stdout and stderr of this process are `ConsoleStream`s, drained at its end."""
    replaced: list[tuple[str, TextIO, ConsoleStream]] = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError):  # a stream without a descriptor stays
            stream.flush()
            replaced.append((name, stream, ConsoleStream(stream.fileno())))
            setattr(sys, name, replaced[-1][2])
    try:
        yield
    finally:
        for name, stream, replacement in replaced:
            setattr(sys, name, stream)
            replacement.drain()


def prepare_standard_streams() -> None:
    """Replace closed standard streams (`>&-`) by /dev/null, and escape characters that the locale
    lacks.

    Call it before files are opened: one would get descriptor 2, and what C++ writes to stderr would
    go into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - until the end
        if number and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
