"""Elements of a page: sections of sentences, charts, tables and questions. The template draws
them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmtrain.base.printing import escape
from mmtrain.report.records import Curve, Point

LONG = 60  # a curve of more points is drawn with its means
SHOWN_MEANS = 80
SHOWN_RANKS, SHOWN_NAMES = 64, 12  # in a table, in a cell
MAX_ROWS, MAX_CELL = 500, 1000  # of a table, characters of a cell
DIGITS = 6  # of the numbers in charts
NOT_YET = "No step is recorded yet."
NOT_EVALUATED = (
    "No evaluation is recorded. Set eval.shards or eval.fraction to evaluate on held-out samples."
)

Look = Literal["line", "faint", "dots", "bar"]
Unit = Literal["number", "share"]
Tone = Literal["good", "bad", "mixed", "plain"]


@dataclass(frozen=True)
class Series:
    """Points of a line chart, or one value a row of a bar chart; `derived` ones are left out of the
    table.
    """

    name: str
    points: Sequence[Point] | Sequence[float]
    look: Look = "line"
    colour: int = 0  # index of the palette
    dash: int = 0
    stack: str = ""  # bars of one stack
    derived: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text; the name of a right-aligned column begins with >."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves over steps; with named `rows` horizontal bars, and the table `behind` them."""

    id: str
    title: str
    series: Sequence[Series]
    y_name: str  # of the values, which bars show along x
    y_unit: Unit = "number"
    log: bool = False  # offers a logarithmic axis
    rows: Sequence[str] = ()
    behind: Table | None = None


@dataclass(frozen=True)
class Picture:
    """A JPEG as a data URI; without a source `why` says what is wrong with it."""

    source: str = ""
    width: int = 0
    height: int = 0
    why: str = ""


@dataclass(frozen=True)
class Question:
    """A held-out question and its answers: (when, text, whether it is right)."""

    key: str
    question: str
    truth: str
    answers: Sequence[tuple[str, str, bool]]
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Section:
    """A part of the page under its own heading."""

    id: str
    title: str
    says: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    questions: Sequence[Question] = ()


@dataclass(frozen=True)
class Finding:
    """One answer of the headline; `tone` colours it."""

    answer: str
    text: str
    tone: Tone = "plain"


def chart_data(chart: Chart) -> dict[str, Any]:
    """Return the chart as JSON values for page.js, without the table behind it."""
    return {name: _rounded(value) for name, value in asdict(chart).items() if name != "behind"}


def _rounded(value: Any) -> Any:
    """Round floats to DIGITS; what is not finite becomes None, a gap."""
    if isinstance(value, float):
        rounded = float(f"{value:.{DIGITS}g}")
        return rounded if math.isfinite(rounded) else None
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_rounded, value))
    return value


def lines_of(name: str, curve: Curve) -> list[Series]:
    """Return a curve as it is, a long one faint below its means."""
    points = curve.points()
    if not points:
        return []
    if len(points) < LONG:
        return [Series(name, points)]
    means = Series(f"{name}, mean", curve.means(SHOWN_MEANS), derived=True)
    return [Series(name, points, "faint"), means]


def table(
    caption: str,
    columns: str | Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    folded: bool = False,
) -> Table:
    """Make a table of at most MAX_ROWS rows; its caption says how many there are.

    `columns` are the names, also as one text, `a, b`.
    """
    if isinstance(columns, str):
        columns = columns.split(", ")
    cells = [list(map(_cell, row)) for row in rows]
    if len(cells) > MAX_ROWS:
        caption += f", the first {MAX_ROWS} of {len(cells):,} rows"
    return Table(caption, columns, cells[:MAX_ROWS], folded)


def _cell(value: str | float | None) -> str:
    return escape(value, MAX_CELL) if isinstance(value, str) else number(value)


def number(value: float | None) -> str:
    """Return `2,001` or `0.1235`: four significant digits, whole numbers whole."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def listed(names: Iterable[str]) -> str:
    """Return `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
