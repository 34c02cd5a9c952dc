"""Several runs on one page: their curves together, scores side by side, and the keys in which they
differ.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mmtrain.base.printing import counted, percent
from mmtrain.base.progress import clock
from mmtrain.report.elements import (
    LONG,
    SHOWN_MEANS,
    Chart,
    Section,
    Series,
    Unit,
    listed,
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

NOTHING = SimpleNamespace(
    y=None,
    loss=None,
    exact_match=None,
    token_accuracy=None,
)


def compared(folders: Sequence[Path]) -> tuple[str, str, tuple[Section, ...]]:
    """Return title, a sentence and sections of a page of these runs; raises UserError for a folder
    that is no run.
    """
    records = [read_run(folder) for folder in folders]
    names = [run.name for run in records]
    runs = {}
    for place, run in enumerate(records, start=1):
        name = run.name
        if names.count(name) > 1:
            name = f"{name} ({place})"
        runs[name] = run
    parts = (_results(runs), _curves(runs), _keys(runs))
    return listed(runs), f"{len(runs)} runs side by side.", parts


def _results(runs: Mapping[str, RunRecord]) -> Section:
    columns = (
        "run, >steps, >final loss, >held-out loss, >exact match, >token accuracy, "
        ">control: exact match, >tokens a second, >time"
    )
    rows, answers = [], []
    for name, run in runs.items():
        scores = _last(run.evaluations)
        rows.append(
            (
                name,
                run.steps_done,
                _last(run.curves["loss"].means(10)).y,
                scores.loss,
                percent(scores.exact_match),
                percent(scores.token_accuracy),
                percent((run.control or NOTHING).exact_match),
                _last(run.curves["tokens_per_second"].means(1)).y,
                clock(run.seconds),
            )
        )

        findings = headline(run)
        answers.append((name, status(run), *(finding.answer for finding in findings.values())))

    tables = (
        table("Scores", columns, rows),
        table("Summary of each run", ("run", "status", *findings), answers),
    )
    says = (
        "The final loss is the mean over the last tenth of the steps; "
        "scores are from the last evaluation."
    )
    return Section("results", "Side by side", (says,), tables=tables)


def _last(found: Sequence[Any]) -> Any:
    return found[-1] if found else NOTHING


def _curves(runs: Mapping[str, RunRecord]) -> Section:
    charts = []
    for key, title, y_name, unit, log in CURVES:
        series = []
        for place, (name, run) in enumerate(runs.items()):
            curve = run.curves[key]
            points = curve.points(MAX_POINTS // len(runs))
            if len(curve) >= LONG:
                points = curve.means(SHOWN_MEANS)
            if points:
                series.append(Series(name, points, colour=place, dash=place % 3))
        if series:
            charts.append(Chart(key, title, series, y_name, y_unit=unit, log=log))
    says = "No step of these runs is recorded yet."
    if charts:
        says = f"A curve with {LONG} points or more is shown as about {SHOWN_MEANS} means."
    return Section("curves", "Curves", (says,), charts)


def _keys(runs: Mapping[str, RunRecord]) -> Section:
    title = "Configuration differences"
    configs = [run.config for run in runs.values()]
    keys = sorted(set().union(*configs) - {"run.name"})
    rows = []
    for key in keys:
        values = [config.get(key, "-") for config in configs]
        if len(set(values)) > 1:
            rows.append((key, *values))
    if not rows:
        return Section("keys", title, ("All keys except run.name are equal.",))
    says = f"{counted(len(rows), 'key')} of {len(keys)} differ (without run.name)."
    return Section("keys", title, (says,), tables=(table(title, ("key", *runs), rows),))
