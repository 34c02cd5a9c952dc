"""Sections on what became of samples, and on what happened when."""

from __future__ import annotations

import math

from mmtrain.base.printing import first_few
from mmtrain.report.curves import Point
from mmtrain.report.elements import (
    NOT_YET,
    SHOWN_NAMES,
    LineChart,
    Look,
    Section,
    Series,
    counted,
    duration,
    listed,
    number,
    table,
)
from mmtrain.report.parts import Event
from mmtrain.report.records import LISTED, RunRecord

LOOKS: dict[str, tuple[int, Look]] = {  # of an event on the time axis: colour and mark
    "begin": (2, "dots"),
    "resume": (2, "triangles"),
    "no update": (1, "diamonds"),
    "bad step": (1, "diamonds"),
    "quarantine": (3, "squares"),
    "checkpoint not saved": (4, "squares"),
    "end": (2, "dots"),
}


def samples(run: RunRecord) -> Section:
    """Read, trained on, quarantined, too long."""
    totals = run.totals
    if not run.steps and not run.counts["quarantined"]:
        return Section("samples", "Samples", (NOT_YET,))
    says = [
        f"{counted(totals['samples'], 'sample')} in {counted(run.steps, 'step')} were trained on; "
        f"{totals['quarantined']:,} that were read left a gap."
    ]
    columns = ("epoch", "complete", ">packs", ">read", ">trained on", ">quarantined", ">too long")
    rows = [
        (str(e.epoch), "yes" if e.complete else "no", e.packs, e.read, e.trained, e.quarantined, e.overlong)
        for e in run.epochs
    ]
    tables = []
    if rows:
        tables.append(table("Epochs: read = trained on + quarantined + too long", columns, rows))
        says.append("Of an epoch that is not complete, samples that are too long are not counted.")
    else:
        says.append("The equation of an epoch is recorded at its end, and at the run's.")
    if run.quarantined:
        why = [(reason, count) for reason, count in run.reasons.most_common()]
        tables.append(table("Quarantined, by reason", ("reason", ">samples"), why))
        rows = [
            ("from the start" if q.step is None else str(q.step + 1), q.key, q.reason, q.detail, q.shard)
            for q in run.quarantined
        ]
        caption = f"Quarantined samples, the first {len(rows)} of {run.counts['quarantined']:,}"
        tables.append(table(caption, (">step", "sample", "reason", "what was found", "shard"), rows, folded=True))
    else:
        says.append("Nothing was quarantined.")
    return Section("samples", "Samples", tuple(says), tables=tuple(tables))


def faults(run: RunRecord) -> Section:
    """What happened when."""
    says, tables = [], []
    if run.begun is None and run.steps:
        says.append(
            "The records have no times, as those of earlier versions: the time axis adds up what steps and evaluations "
            "took, and knows no pauses."
        )
    if run.discarded:
        redone = (
            f"{counted(count, 'step')} when it went back to step {step:,}" for step, count in run.discarded.items()
        )
        says.append(f"Made and discarded: {listed(redone)}.")
    says += [f"{problem}." for problem in run.problems]
    failed = [event for event in run.events if event.kind not in ("begin", "end")]
    if not failed:
        says.append("No resume, no bad step, no quarantined sample and no failed checkpoint is recorded.")
    rows = [(duration(event.at), _steps(event), event.kind, _more(event)) for event in run.events]
    if rows:
        more = ", the first of each kind" if any(run.counts[event.kind] > LISTED for event in run.events) else ""
        tables.append(table(f"What happened{more}", (">time", ">step", "what", "more"), rows))
    if run.bad_steps:
        rows = [
            (
                bad.step + 1,
                number(bad.loss_sum),
                ", ".join(map(str, bad.ranks[:SHOWN_NAMES])),
                first_few(bad.parameters, 3) or "-",
                first_few([key for m in bad.microbatches for key in m.keys], 6),
            )
            for bad in run.bad_steps
        ]
        columns = (">step", ">loss sum", "ranks", "parameters", "samples of the step")
        tables.append(table(f"Bad steps, the first {len(rows)} of {run.counts['bad_steps']:,}", columns, rows))
    charts = (_timeline(run),) if run.progress.count else ()
    return Section("faults", "Faults and resumes", tuple(says), charts, tuple(tables))


def _steps(event: Event) -> str:
    return f"{event.step:,}" if event.last in (None, event.step) else f"{event.step:,}-{event.last:,}"


def _more(event: Event) -> str:
    return f"samples: {event.samples:,}" if event.samples else event.text


def _timeline(run: RunRecord) -> LineChart:
    gaps = [Point(at, math.nan) for at in run.starts]  # no line over a pause
    made = sorted([*run.progress.points(), *gaps], key=lambda point: point.x)
    series = [Series("steps made", tuple(made))]
    if run.lost_work.count:
        series.append(Series("made, discarded after a fault", tuple(run.lost_work.points()), "dots", 6))
    for kind, (colour, look) in LOOKS.items():
        points = tuple(
            Point(event.at, event.step) for event in run.events if event.kind == kind and event.at is not None
        )
        if points:
            series.append(Series(kind, points, look, colour))
    last = run.progress.points()[-1].x
    about = f"{counted(run.steps_done, 'step')} after {duration(last)}; " + (
        first_few([f"{event.kind} at step {event.step:,}" for event in run.events], 8) or "nothing else happened"
    )
    name = "time since the run began" if run.begun is not None else "time that steps and evaluations took"
    return LineChart("timeline", "Steps over time", f"{about}.", tuple(series), "steps made", name, "seconds", "steps")
