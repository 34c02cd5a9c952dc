"""A run as a notebook's cell shows it while it goes on: the latest numbers and the loss so far, as
HTML.

metrics.jsonl --Run.metrics--> steps and evaluations --progress_html--> a table and a curve, drawn
    as SVG
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT, POINTS = 640, 160, 320  # of the curve: pixels, and the most points drawn


def progress_html(
    name: str, steps: Sequence[dict[str, Any]], scores: Sequence[dict[str, Any]], max_steps: int
) -> str:
    """Return a run's progress from its `train` and `eval` records; `max_steps` 0: not known."""
    cells = {"run": name}
    if steps:
        latest = steps[-1]
        cells["step"] = f"{latest['step'] + 1:,}" + (f" of {max_steps:,}" if max_steps else "")
        cells["loss"] = "-" if latest["loss"] is None else f"{latest['loss']:.4f}"
        cells["tokens/s"] = f"{latest['tokens_per_second']:,.0f}"
    if scores:
        shown = [("held-out loss", "loss", ".4f"), ("exact match", "exact_match", ".1%")]
        cells |= {
            title: format(scores[-1][key], form)
            for title, key, form in shown
            if scores[-1][key] is not None
        }
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in cells)
    values = "".join(f"<td>{html.escape(value)}</td>" for value in cells.values())
    curves = [_curve(steps, "#3b82f6", steps), _curve(scores, "#d97706", steps)] if steps else []
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"><title>loss '
        "by step</title>"
    )
    says = "waiting for the first step"
    if steps:
        says = "loss: <b style='color:#3b82f6'>training</b>, <b style='color:#d97706'>held-out</b>"
    return (
        f"<table><tr>{titles}</tr><tr>{values}</tr></table>{says}<br>{svg}{''.join(curves)}</svg>"
    )


def _curve(records: Sequence[dict[str, Any]], colour: str, scale: Sequence[dict[str, Any]]) -> str:
    """Return the losses of records as a line, on the axes that the records `scale` span from 0
    on.
    """
    known = [record for record in records if record["loss"] is not None]
    most = (
        max((record["loss"] for record in scale if record["loss"] is not None), default=0.0) or 1.0
    )
    last = max(scale[-1]["step"], 1)
    thinned = [*known[:: len(known) // POINTS + 1], *known[-1:]]
    points = [
        f"{WIDTH * record['step'] / last:.1f},{HEIGHT * (1 - min(record['loss'] / most, 1)):.1f}"
        for record in thinned
    ]
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
