"""Output for people that never keeps the program waiting, and standard streams that are there.

write --waiting, the newest kept--> a daemon thread --os.write, which may block--> terminal, pipe or file

A terminal stopped by Ctrl-S, a pager, a pipe that nobody empties: a rank that waited for them would stall its peers
until these time out. A thread, since no descriptor here can be made non-blocking: O_NONBLOCK belongs to the open file,
which the user's shell and other programs share; and poll() does not say how much a terminal takes without blocking.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterator

WAITING_BYTES = 1 << 18
SECONDS_OF_PATIENCE = 2.0  # at the end, for a reader that takes nothing
MOST_SECONDS = 10.0  # at the end, for one that takes little


class ConsoleStream(io.TextIOBase):
    """A text stream to the terminal, pipe or file behind a descriptor; no `write` blocks, or raises.

    What the reader does not take waits, up to 256 KiB; then the oldest lines are dropped, and their number said before
    the next one. Of a line that is drawn again and again (a progress bar) only its latest state waits. Everything is
    dropped once the reader has gone, or the disk behind it is full. Call `drain` at the end: what waits then is lost.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        """`descriptor` is copied, so that it may be redirected later; `encoding` is what its reader expects."""
        self._descriptor = os.dup(descriptor)  # never closed: the thread may wait in it
        self._encoding = encoding
        self._waiting: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._dropped = 0  # lines, since the last one that was written
        self._changed = threading.Condition()  # whose lock a signal handler may take again
        self._writer: threading.Thread | None = None
        self._is_writing = False
        self._is_gone = False
        self._taken_at = 0.0  # when the reader last took something
        _STREAMS.add(self)

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
        """Hand over text; returns at once."""
        data = text.encode(self._encoding, errors="backslashreplace")
        with self._changed:
            if data and not self._is_gone:
                self._add(data)
                if self._writer is None:  # not before: most processes that could print never do
                    self._writer = threading.Thread(target=self._write_on, name="console", daemon=True)
                    self._writer.start()
                self._changed.notify_all()
        return len(text)

    def drain(self) -> None:
        """Wait until all is written: 2 seconds for a reader that takes nothing, 10 for one that takes little."""
        begun = time.monotonic()
        with self._changed:
            while (self._waiting or self._is_writing) and not self._is_gone:
                patient_until = max(begun, self._taken_at) + SECONDS_OF_PATIENCE
                left = min(patient_until, begun + MOST_SECONDS) - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _begin_in_child(self) -> None:
        """After a fork: the thread is the parent's, and so is what waits; its lock may have been held."""
        self._changed, self._writer, self._is_writing = threading.Condition(), None, False
        self._waiting.clear()
        self._waiting_bytes = self._dropped = 0

    def _add(self, data: bytes) -> None:
        """Queue one line, the end of one, or a line redrawn, which begins with a carriage return."""
        latest = self._waiting[-1] if self._waiting else b"\n"
        if data.startswith(b"\r"):
            if latest.startswith(b"\r") and b"\n" not in latest:
                self._waiting_bytes -= len(self._waiting.pop())
            self._waiting.append(data)
        elif latest.endswith(b"\n") or len(latest) > WAITING_BYTES // 4:
            self._waiting.append(data)
        else:
            self._waiting[-1] += data
        self._waiting_bytes += len(data)
        while len(self._waiting) > 1 and self._waiting_bytes > WAITING_BYTES:
            self._dropped += max(1, self._next().count(b"\n"))

    def _next(self) -> bytes:
        """Take what has waited longest."""
        data = self._waiting.popleft()
        self._waiting_bytes -= len(data)
        return data

    def _write_on(self) -> None:
        line_is_open = False
        while not self._is_gone:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                self._is_writing = True
                data, dropped, self._dropped = self._next(), self._dropped, 0
            if dropped:
                said = f"[{dropped:,} lines are missing here: nothing read them]\n".encode()
                data = (b"\n" if line_is_open else b"") + said + data
            line_is_open = not data.endswith(b"\n")
            try:
                self._write_whole(data)
            except OSError:
                with self._changed:
                    self._is_gone = True
                    self._waiting.clear()
                    self._changed.notify_all()

    def _write_whole(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]  # little, to see what is taken
                self._taken_at = time.monotonic()
            except BlockingIOError:  # another program has set O_NONBLOCK
                writable = select.poll()  # select() refuses descriptors from 1,024
                writable.register(self._descriptor, select.POLLOUT)
                writable.poll()


_STREAMS: weakref.WeakSet[ConsoleStream] = weakref.WeakSet()


def _begin_in_child() -> None:
    for stream in list(_STREAMS):
        stream._begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


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
