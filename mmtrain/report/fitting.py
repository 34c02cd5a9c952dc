"""Sections cut so that a page stays small, whatever a run's records are; what is cut says so."""

from __future__ import annotations

from dataclasses import replace

from mmtrain.base.printing import shortened
from mmtrain.report.curves import MOST_POINTS, Curve
from mmtrain.report.elements import LONGEST_CELL, Asked, BarChart, Chart, Picture, Section, Series, Table, counted

MOST_ROWS, MOST_QUESTIONS, LONGEST_WORDS = 1000, 100, 2000
HALVINGS = 9
LEFT_OUT = Picture(None, 0, 0, "left out, so that the page stays small")
TAG_BYTES = 2500  # what a picture's element takes beside its source, at most


def cut(section: Section, halvings: int) -> Section:
    """The same with its tables, curves, questions and their texts at most as large as so many halvings allow."""
    says = section.says
    most = MOST_QUESTIONS >> halvings
    if len(section.questions) > most:
        says += (f"So that the page stays small, {counted(most, 'question')} of {len(section.questions)} are shown.",)
    longest = LONGEST_WORDS >> halvings
    if any(len(text) > longest for asked in section.questions[:most] for text in _texts(asked)):
        says += (f"Texts of more than {longest:,} characters are cut, so that the page stays small.",)
    return replace(
        section,
        says=says,
        charts=tuple(_cut_chart(chart, halvings) for chart in section.charts),
        tables=tuple(_cut_table(table, halvings) for table in section.tables),
        questions=tuple(_cut_texts(asked, longest) for asked in section.questions[:most]),
    )


def with_pictures(section: Section, left: int) -> Section:
    """The same with only so many of its first pictures as fit into `left` bytes."""
    questions = []
    for asked in section.questions:
        pictures = []
        for picture in asked.pictures:
            size = len(picture.source or "") + TAG_BYTES
            pictures.append(picture if picture.source is None or size <= left else LEFT_OUT)
            left -= size if pictures[-1].source else 0
        questions.append(replace(asked, pictures=tuple(pictures)))
    return replace(section, questions=tuple(questions))


def _texts(asked: Asked) -> tuple[str, ...]:
    return (asked.question, asked.truth, *(given for _, given, _ in asked.answers))


def _cut_texts(asked: Asked, longest: int) -> Asked:
    answers = tuple((when, shortened(given, longest), right) for when, given, right in asked.answers)
    return replace(
        asked, question=shortened(asked.question, longest), truth=shortened(asked.truth, longest), answers=answers
    )


def _cut_table(table: Table, halvings: int) -> Table:
    most, longest = MOST_ROWS >> halvings, LONGEST_CELL >> halvings
    rows = tuple(tuple(shortened(cell, longest) for cell in row) for row in table.rows[:most])
    caption = table.caption
    if len(table.rows) > most:
        caption += f"; the first {most:,} of {len(table.rows):,} rows"
    if any(len(cell) >= longest for row in rows for cell in row):
        caption += "; long texts are cut"
    return replace(table, caption=caption, rows=rows)


def _cut_chart(chart: Chart, halvings: int) -> Chart:
    if isinstance(chart, BarChart):
        return replace(chart, behind=_cut_table(chart.behind, halvings))
    most = max(4, MOST_POINTS >> halvings)
    return replace(chart, series=tuple(_cut_series(one, most) for one in chart.series))


def _cut_series(series: Series, most: int) -> Series:
    if len(series.points) <= most:
        return series
    curve = Curve(most)
    for x, y in series.points:
        curve.add(x, y)
    return replace(series, points=tuple(curve.points()))
