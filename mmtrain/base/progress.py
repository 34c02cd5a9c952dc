"""Progress of a long job: a live bar on a terminal, otherwise a line every few seconds."""

import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Self, TextIO

_log = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 5.0


@dataclass
class ProgressBar:
    """Progress of `total` things, with samples (or what is `counted`) per second."""

    unit: str  # the things' plural
    total: int
    stream: TextIO | None = None  # carries the bar where it is a terminal
    counted: str = "samples"
    is_brief: bool = False  # no last line, where none was printed before

    def __post_init__(self) -> None:
        self.started = self.printed = time.monotonic()
        self.bar = open_bar(self.stream, self.unit, self.total)

    def show(self, done: int, samples: int, note: str = "") -> None:
        """Show that `done` things are done, `samples` since the start, and a note."""
        now = time.monotonic()
        a_second = samples / max(now - self.started, 1e-9)
        is_slow = samples and a_second < 1
        digits = ".2g" if is_slow else ",.0f"
        rate = f"{a_second:{digits}} {self.counted}/s"
        if self.bar is not None:
            said = rate
            if done:
                left = (now - self.started) / done * (self.total - done)
                said += f"  ETA {clock(left)}"
            self.bar.update(0, completed=done, said=said, note=note)
        elif now - self.printed >= SECONDS_BETWEEN_LINES or (
            done == self.total and not self.is_brief
        ):
            self.printed = now
            text = f"{done:,} of {self.total:,} {self.unit}  {rate}  {note}"
            _log.info(text.rstrip())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


class ByteBars:
    """Progress of several things that are read or written, one after the other, in MB."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._what = ""
        self._progress: ProgressBar | None = None

    def show(self, what: str, done: int, total: int) -> None:
        """Show that `done` of the `total` bytes of `what` are through."""
        if what != self._what:
            self.__exit__()
            self._what = what
            self._progress = ProgressBar(
                f"MB {what}", math.ceil(total / 1e6), self._stream, counted="MB"
            )
        megabytes = self._progress.total if done == total else done // 10**6
        self._progress.show(megabytes, megabytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.__exit__()


def open_bar(stream: TextIO | None, unit: str, total: int, done: int = 0) -> Any:
    """Return a live bar of rich's, None where `stream` is no terminal that can move its cursor.

    `bar.update(0, completed=..., said=..., note=...)` shows what is done, with two texts;
    `bar.stop()` ends it.
    """
    if stream is None or not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return None
    from rich.console import Console  # here, because only terminals need it
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
    from rich.text import Text

    class Note(ProgressColumn):
        """The note behind a bar: the only text that is cut where the terminal is narrow."""

        def render(self, task: Any) -> Text:
            return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")

    count = MofNCompleteColumn(table_column=Column(no_wrap=True))
    said = TextColumn("{task.fields[said]}", markup=False)
    ours = stream in (sys.stdout, sys.stderr)  # a rank's are its log
    bar = Bar(
        *(TextColumn(unit), count, BarColumn(), said, Note()),
        console=Console(file=stream),
        redirect_stdout=ours,
        redirect_stderr=ours,
    )
    bar.add_task(unit, total=total, completed=done, said="", note="")
    bar.start()
    return bar


def clock(seconds: float | None) -> str:
    """Return H:MM:SS, ? for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
