"""Several runs on one page: their curves together, scores side by side, and the keys in which they
differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmtrain.base.printing import counted
from mmtrain.base.progress import clock
from mmtrain.report.elements import (
    LONG,
    SHOWN_MEANS,
    Chart,
    Section,
    Series,
    Unit,
    listed,
    number,
    percent,
    table,
)
from mmtrain.report.headline import headline, status
from mmtrain.report.records import MAX_POINTS, RunRecord, read_run

# name, title, y axis, its unit, offers a logarithmic axis
CURVES: tuple[tuple[str, str, str, Unit, bool], ...] = (
    ("loss", "Training loss", "nats per supervised token", "number", True),
    ("eval_loss", "Loss on held-out samples", "nats per supervised token", "number", True),
    ("eval_exact_match", "Exact match on held-out samples", "share", "share", False),
    ("lr", "Learning rate", "of parameters in no group", "number", False),
    ("grad_norm", "Gradient norm", "L2, before clipping", "number", True),
    ("tokens_per_second", "Tokens a second", "tokens a second, without padding", "number", False),
)


def compared(folders: Sequence[Path]) -> tuple[str, str, tuple[Section, ...]]:
    """Return title, a sentence and sections of a page of these runs; raises UserError for a folder
    that is no run.
    """
    records = [read_run(folder) for folder in folders]
    names = [run.name for run in records]
    runs = {}
    for place, (name, run) in enumerate(zip(names, records, strict=True), start=1):
        runs[name if names.count(name) == 1 else f"{name} ({place})"] = run
    return (
        listed(runs),
        f"{len(runs)} runs side by side.",
        (_results(runs), _curves(runs), _keys(runs)),
    )


def _results(runs: Mapping[str, RunRecord]) -> Section:
    columns = (
        *("run", ">steps", ">final loss", ">held-out loss", ">exact match", ">token accuracy"),
        *(">control: exact match", ">tokens a second", ">time"),
    )
    rows = []
    for name, run in runs.items():
        ends, speed = run.curves["loss"].means(10), run.curves["tokens_per_second"].means(1)
        scores = run.evaluations[-1] if run.evaluations else None
        row = [
            name,
            run.steps_done,
            number(ends[-1].y if ends else None),
            number(scores.loss if scores else None),
            percent(scores.exact_match if scores else None),
            percent(scores.token_accuracy if scores else None),
            percent(run.control.exact_match if run.control else None),
            number(speed[0].y if speed else None),
            clock(run.seconds),
        ]
        rows.append(row)
    findings = {name: headline(run) for name, run in runs.items()}
    answers = [
        (name, status(runs[name]), *(finding.answer for finding in of_run.values()))
        for name, of_run in findings.items()
    ]
    questions = next(iter(findings.values()))
    tables = (
        table("Scores", columns, rows),
        table("Summary of each run", ("run", "status", *questions), answers),
    )
    says = (
        "The final loss is the mean over the last tenth of the steps; "
        "scores are from the last evaluation."
    )
    return Section("results", "Side by side", (says,), tables=tables)


def _curves(runs: Mapping[str, RunRecord]) -> Section:
    charts = []
    for key, title, y_name, unit, log in CURVES:
        series = []
        for place, (name, run) in enumerate(runs.items()):
            curve = run.curves[key]
            if len(curve):
                points = (
                    curve.means(SHOWN_MEANS)
                    if len(curve) >= LONG
                    else curve.points(MAX_POINTS // len(runs))
                )
                series.append(Series(name, points, colour=place, dash=place % 3))
        if series:
            charts.append(Chart(key, title, series, y_name, y_unit=unit, log=log))
    says = f"A curve with {LONG} points or more is shown as about {SHOWN_MEANS} means."
    return Section(
        "curves", "Curves", (says if charts else "No step of these runs is recorded yet.",), charts
    )


def _keys(runs: Mapping[str, RunRecord]) -> Section:
    title = "Configuration differences"
    keys = sorted({key for run in runs.values() for key in run.config} - {"run.name"})
    values = {key: [run.config.get(key, "-") for run in runs.values()] for key in keys}
    rows = [(key, *of_runs) for key, of_runs in values.items() if len(set(of_runs)) > 1]
    if not rows:
        return Section("keys", title, ("All keys except run.name are equal.",))
    says = f"{counted(len(rows), 'key')} of {len(keys)} differ (without run.name)."
    return Section("keys", title, (says,), tables=(table(title, ("key", *runs), rows),))
