"""How far a long job is: a live bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self, TextIO

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """`total` things to do, and how many samples (or whatever is `counted`) a second that makes."""

    def __init__(
        self,
        unit: str,
        total: int,
        say: Callable[[str], None],
        stream: TextIO | None = None,
        counted: str = "samples",
    ) -> None:
        """`unit` is the things' plural; `stream` carries the bar if it is a terminal, else `say` prints lines."""
        self.counted = counted
        self.unit = unit
        self.total = total
        self.say = say
        self.started = self.printed = time.monotonic()
        self.bar = _open_bar(stream, unit, total) if stream is not None and stream.isatty() else None

    def show(self, done: int, samples: int, note: str = "") -> None:
        """`done` things of all are done; so many `samples` went through since the start; `note` follows."""
        now = time.monotonic()
        a_second = samples / max(now - self.started, 1e-9)
        rate = f"{a_second:{',.0f' if a_second >= 1 or not samples else '.2g'}} {self.counted}/s"
        if self.bar is not None:
            self.bar.update(0, completed=done, rate=rate, note=note)
        elif now - self.printed >= SECONDS_BETWEEN_LINES or done == self.total:
            self.printed = now
            self.say("  ".join(filter(None, (f"{done:,} of {self.total:,} {self.unit}", rate, note))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _open_bar(stream: TextIO, unit: str, total: int) -> Any:
    """rich is imported here because only terminals need it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn(unit),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[note]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
    bar.add_task(unit, total=total, rate="", note="")
    bar.start()
    return bar
