"""Console output that never keeps the program waiting, and standard streams that exist.

write --queue, newest lines kept--> daemon thread --os.write, which may block--> terminal, pipe or file

A terminal stopped by Ctrl-S, a pager or a pipe that nobody empties blocks its writer: a rank that waited would stall
its peers until these time out. A thread is needed, since O_NONBLOCK would apply to the user's shell, too: it belongs to
the open file, which programs share.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator

QUEUE_BYTES = 1 << 18
DRAIN_SECONDS = 3.0


class ConsoleStream(io.TextIOBase):
    """A text stream to a descriptor whose `write` never blocks and never raises.

    Text that nobody reads is queued, up to 256 KiB; then the oldest lines are dropped, and a line says how many. All is
    dropped once the reader has gone or the disk is full. Call `drain` at the end: what is still queued then is lost.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        """Write to a copy of `descriptor`, in the `encoding` that its reader expects."""
        self._descriptor = os.dup(descriptor)  # never closed: the thread may wait in it
        self._encoding = encoding
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may write
        self._queue = bytearray()
        self._dropped_lines = 0
        self._writer: threading.Thread | None = None
        self._is_writing = False
        self._is_gone = False

    @property
    def encoding(self) -> str:
        return self._encoding

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
            if text and not self._is_gone:
                self._queue += text.encode(self._encoding, errors="backslashreplace")
                self._drop_oldest_lines()
                if self._writer is None:  # most processes that could print never do
                    self._writer = threading.Thread(target=self._write_queue, name="console", daemon=True)
                    self._writer.start()
                self._changed.notify_all()
        return len(text)

    def drain(self) -> None:
        """Wait until all is written, at most 3 seconds."""
        if self._process == os.getpid():
            with self._changed:
                self._changed.wait_for(lambda: not self._queue and not self._is_writing, DRAIN_SECONDS)

    def _drop_oldest_lines(self) -> None:
        excess = len(self._queue) - QUEUE_BYTES
        if excess > 0:
            end = re.compile(rb"[\n\r]|\Z").search(self._queue, excess).end()  # a progress bar ends none of its lines
            self._dropped_lines += max(1, self._queue.count(b"\n", 0, end))
            del self._queue[:end]

    def _take(self) -> bytes:
        """Take whole lines from the queue where these are short, behind a note about dropped ones."""
        end = self._queue.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
        lines, dropped = bytes(self._queue[:end]), self._dropped_lines
        del self._queue[:end]
        self._dropped_lines = 0
        return f"\n[{dropped:,} lines are missing here: nothing read them]\n".encode() + lines if dropped else lines

    def _write_queue(self) -> None:
        while not self._is_gone:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                data, self._is_writing = self._take(), True
            while data and not self._is_gone:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:  # another program has set O_NONBLOCK
                    time.sleep(0.01)
                except OSError:  # the reader has gone, or the disk is full
                    self._is_gone = True
            with self._changed:
                self._is_writing = False
                if self._is_gone:
                    self._queue.clear()
                self._changed.notify_all()


@contextlib.contextmanager
def output_without_waiting() -> Iterator[None]:
    """In the block stdout and stderr of this process are `ConsoleStream`s, drained at its end.

    Streams without a descriptor, which other code has put in their place, stay.
    """
    streams = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):  # no descriptor; None
            stream.flush()
            streams[name] = stream, ConsoleStream(stream.fileno(), stream.encoding)
    for name, (_, replacement) in streams.items():
        setattr(sys, name, replacement)
    try:
        yield
    finally:
        for name, (stream, replacement) in streams.items():
            setattr(sys, name, stream)
            replacement.drain()


def prepare_standard_streams() -> None:
    """Make stdin, stdout and stderr safe to use; to be called before files are opened.

    What the caller has closed (`>&-`) becomes /dev/null: else the first files opened get these descriptors, what C++
    says on stderr goes into one of them, and Python has None for the stream. Characters that the locale does not have
    are escaped instead of being an error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
