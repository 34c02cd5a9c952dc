"""Show a run in a notebook's cell while it goes on: its latest numbers and its loss, as HTML.

metrics.jsonl --Run.metrics--> steps and evaluations
    --progress_html--> a table and a curve, drawn as SVG
"""

import html
from collections.abc import Sequence
from typing import Any

Records = Sequence[dict[str, Any]]  # of metrics.jsonl
WIDTH, HEIGHT, POINTS = 640, 160, 320  # of the curve: pixels, and the most points drawn


def progress_html(
    name: str,
    steps: Records,
    scores: Records,
    max_steps: int | None,
) -> str:
    """Return a run's progress from its `train` and `eval` records."""
    cells = {"run": name}
    curves, says = "", "waiting for the first step"
    if steps:
        latest = steps[-1]
        cells["step"] = f"{latest['step'] + 1:,}"
        if max_steps:
            cells["step"] += f" of {max_steps:,}"
        cells["loss"] = "-"
        if latest["loss"] is not None:
            cells["loss"] = f"{latest['loss']:.4f}"
        cells["tokens/s"] = f"{latest['tokens_per_second']:,.0f}"
        curves = _curve(steps, "#3b82f6", steps) + _curve(scores, "#d97706", steps)
        says = "loss: <b style='color:#3b82f6'>training</b>, <b style='color:#d97706'>held-out</b>"
    for score in scores[-1:]:
        if score["loss"] is not None:
            cells["held-out loss"] = f"{score['loss']:.4f}"
        if score["exact_match"] is not None:
            cells["exact match"] = f"{score['exact_match']:.1%}"
    titles = values = ""
    for title, value in cells.items():
        titles += f"<th>{title}</th>"
        values += f"<td>{html.escape(value)}</td>"
    return (
        f"<table><tr>{titles}</tr><tr>{values}</tr></table>{says}<br>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"><title>loss by step'
        f"</title>{curves}</svg>"
    )


def _curve(records: Records, colour: str, scale: Records) -> str:
    """Return the losses of records as a line, on axes from 0 to the largest values of `scale`."""
    known = [record for record in records if record["loss"] is not None]
    # what is not finite has no loss
    most = max(record["loss"] or 0.0 for record in scale) or 1.0
    last = max(scale[-1]["step"], 1)
    points = []
    for record in (*known[:: len(known) // POINTS + 1], *known[-1:]):
        height = HEIGHT * (1 - min(record["loss"] / most, 1))
        points.append(f"{WIDTH * record['step'] / last:.1f},{height:.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
