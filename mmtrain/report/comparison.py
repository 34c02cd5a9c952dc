"""Several runs on one page: the same curves together, the scores side by side, the keys in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmtrain.report.curves import MOST_POINTS
from mmtrain.report.elements import (
    LONG,
    SHOWN_MEANS,
    LineChart,
    Section,
    Series,
    Unit,
    counted,
    duration,
    listed,
    number,
    percent,
    table,
)
from mmtrain.report.headline import headline, status
from mmtrain.report.records import RunRecord, read_run

CURVES: tuple[tuple[str, str, str, Unit, bool], ...] = (  # of a run, title, what y is, its unit, may be logarithmic
    ("loss", "Training loss", "nats per supervised token", "number", True),
    ("eval_loss", "Loss on held-out samples", "nats per supervised token", "number", True),
    ("eval_exact_match", "Exact answers on held-out samples", "share", "share", False),
    ("lr", "Learning rate", "of what is in no group", "number", False),
    ("grad_norm", "Gradient norm", "L2, before clipping", "number", True),
    ("tokens_per_second", "Tokens a second", "tokens a second, without padding", "number", False),
)


def compared(folders: Sequence[Path]) -> tuple[str, str, tuple[Section, ...]]:
    """Title, a sentence and the sections of a page of these runs; raises UserError for what is no run."""
    runs = [read_run(folder, MOST_POINTS // len(folders)) for folder in folders]
    names = _names(runs)
    return (
        listed(names),
        f"{len(runs)} runs side by side.",
        (_results(runs, names), _curves(runs, names), _keys(runs, names)),
    )


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """Names of the folders; of equal ones with the folder above, or a number."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.folder.resolve().parent.name}/{run.name}" for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _results(runs: Sequence[RunRecord], names: Sequence[str]) -> Section:
    columns = (
        "run",
        ">steps",
        ">loss at the end",
        ">held-out loss",
        ">exact answers",
        ">right tokens",
        ">control: exact",
        ">tokens a second",
        ">time",
    )
    rows, findings = [], []
    for name, run in zip(names, runs, strict=True):
        scores, control = run.last_evaluation, run.control
        ends, speed = run.curve("loss").means(10), run.curve("tokens_per_second").means(1)
        rows.append(
            (
                name,
                run.steps_done,
                number(ends[-1].y if ends else None),
                number(scores.loss if scores else None),
                percent(scores.exact_match if scores else None),
                percent(scores.token_accuracy if scores else None),
                percent(control.exact_match if control else None),
                number(speed[0].y if speed else None),
                duration(run.seconds),
            )
        )
        findings.append((name, status(run), *(finding.answer for finding in headline(run))))
    questions = tuple(finding.question for finding in headline(runs[0]))
    says = ("The loss at the end is the mean of the last tenth of the steps; scores are of the last evaluation.",)
    tables = (table("Scores", columns, rows), table("What each run says", ("run", "status", *questions), findings))
    return Section("results", "Side by side", says, tables=tables)


def _curves(runs: Sequence[RunRecord], names: Sequence[str]) -> Section:
    charts = []
    for key, title, y_name, unit, log in CURVES:
        series = []
        for place, (name, run) in enumerate(zip(names, runs, strict=True)):
            curve = run.curve(key)
            points = tuple(curve.means(SHOWN_MEANS) if curve.count >= LONG else curve.points())
            if points:
                series.append(Series(name, points, colour=place, dash=place % 3))
        if series:
            ends = listed(f"{one.name} ends at {number(one.points[-1].y)}" for one in series)
            charts.append(LineChart(key, title, f"{title}: {ends}.", tuple(series), y_name, y_unit=unit, log=log))
    says = f"A curve of {LONG} points or more is shown by the means of about {SHOWN_MEANS} stretches."
    if not charts:
        says = "No step of these runs is recorded yet."
    return Section("curves", "Curves", (says,), tuple(charts))


def _keys(runs: Sequence[RunRecord], names: Sequence[str]) -> Section:
    keys = sorted({key for run in runs for key in run.config})
    differ = [key for key in keys if key != "run.name" and len({run.config.get(key) for run in runs}) > 1]
    title = "Differences of their configurations"
    if not differ:
        return Section("keys", title, ("They agree in every key but run.name.",))
    rows = [(key, *(run.config.get(key, "-") for run in runs)) for key in differ]
    says = f"They differ in {counted(len(differ), 'key')} of {len(keys)}, run.name left out."
    return Section("keys", title, (says,), tables=(table(title, ("key", *names), rows),))
