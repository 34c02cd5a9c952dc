"""What a page is made of: sections of sentences, charts, tables and questions. How they look is the template's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmtrain.base.printing import shortened
from mmtrain.report.curves import Curve, Point

LONG = 60  # points from which on a line is shown with its means
SHOWN_MEANS = 80
NOT_YET = "No step is recorded yet."
SHOWN_RANKS, SHOWN_NAMES = 64, 12  # in a table, in a cell
LONGEST_CELL = 1000  # characters
DIGITS = 6  # of the numbers of charts and of the tables behind them

Cell = str | int | float | None
Look = Literal["line", "faint", "dots", "triangles", "squares", "diamonds"]
Tone = Literal["good", "bad", "mixed", "plain"]
Unit = Literal["number", "share", "seconds", "steps"]


@dataclass(frozen=True)
class Series:
    """Points of one name; `derived` ones are not in the table. `colour` is a place in the palette."""

    name: str
    points: tuple[Point, ...]
    look: Look = "line"
    colour: int = 0
    dash: int = 0
    derived: bool = False


@dataclass(frozen=True)
class LineChart:
    """Curves over steps or time; `about` says in a sentence what one sees, for who does not see it."""

    id: str
    title: str
    about: str
    series: tuple[Series, ...]
    y_name: str
    x_name: str = "step"
    x_unit: Unit = "steps"
    y_unit: Unit = "number"
    log: bool = False  # may be switched to a logarithmic axis
    kind: Literal["lines"] = "lines"

    def data(self) -> dict[str, Any]:
        """For page.js, numbers with six digits."""
        series = [asdict(one) | {"points": [(short(x), short(y)) for x, y in one.points]} for one in self.series]
        return asdict(self) | {"series": series}


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers; a column whose name begins with > is set to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


@dataclass(frozen=True)
class Bar:
    """A value for each row of a bar chart; bars of one `stack` stand on each other."""

    name: str
    values: tuple[float, ...]
    stack: str = ""
    colour: int = 0


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars, a row a category; the table `behind` them may say more."""

    id: str
    title: str
    about: str
    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    x_name: str
    behind: Table
    x_unit: Unit = "number"
    kind: Literal["bars"] = "bars"

    def data(self) -> dict[str, Any]:
        """For page.js, numbers with six digits."""
        bars = [asdict(bar) | {"values": list(map(short, bar.values))} for bar in self.bars]
        content = asdict(self) | {"bars": bars}
        del content["behind"]
        return content


Chart = LineChart | BarChart


@dataclass(frozen=True)
class Picture:
    """A JPEG as a data URI; None: there is none, for which `why` says the reason."""

    source: str | None
    width: int
    height: int
    why: str = ""


@dataclass(frozen=True)
class Asked:
    """A held-out question and its answers: (when, text, whether it is right)."""

    key: str
    question: str
    truth: str
    answers: tuple[tuple[str, str, bool], ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Section:
    """A part of the page under its own heading."""

    id: str
    title: str
    says: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    questions: tuple[Asked, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One answer of the headline; `tone` colours it, and stands beside it in words."""

    question: str
    answer: str
    text: str
    tone: Tone = "plain"


def short(value: float) -> float | None:
    """The same with six significant digits; None, a gap, for what is not finite."""
    rounded = float(f"{value:.{DIGITS}g}")
    return rounded if math.isfinite(rounded) else None


def lines_of(name: str, curve: Curve, colour: int = 0) -> tuple[Series, ...]:
    """A curve as it is; a long one faint, with its means above it."""
    points = tuple(curve.points())
    if len(points) < LONG:
        return (Series(name, points, colour=colour),) if points else ()
    means = Series(f"{name}, mean", tuple(curve.means(SHOWN_MEANS)), colour=colour, derived=True)
    return Series(name, points, "faint", colour), means


def percent(share: float | None) -> str:
    """`97.4%`."""
    return "-" if share is None else f"{share:.1%}"


def number(value: float | None) -> str:
    """With four significant digits, whole numbers whole."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """`2 h 05 min`, `1 min 11 s`, `3.4 s`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 sample`, `5,880 samples`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, folded: bool = False) -> Table:
    """Cells as text; numbers as `number` shows them."""
    shown = (
        tuple(shortened(cell, LONGEST_CELL) if isinstance(cell, str) else number(cell) for cell in row) for row in rows
    )
    return Table(caption, tuple(columns), tuple(shown), folded)
