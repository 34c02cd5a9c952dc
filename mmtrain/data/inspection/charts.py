"""Tables and histograms of tools: as text for terminals and logs, as PNG.

whole numbers --survey.histogram--> one line and one bar a bin, or a chart in a file
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_table, tell
from mmtrain.data.inspection.survey import histogram, quantile

TERMINAL_BINS = 12
PNG_BINS = 60
BAR_WIDTH = 40  # characters


def print_distribution(title: str, values: np.ndarray) -> None:
    """Mean, quantiles and a histogram of whole numbers."""
    tell("", title)
    if not len(values):
        tell("  none")
        return
    tell(
        f"  mean {values.mean():,.1f}, half at most {quantile(values, 0.5):,}, 95% at most "
        f"{quantile(values, 0.95):,}, 99% at most {quantile(values, 0.99):,}",
        f"  from {values.min():,} to {values.max():,}",
    )
    edges, counts = histogram(values, TERMINAL_BINS)
    mark = "\N{FULL BLOCK}" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    rows = []
    for (first, after), count in zip(itertools.pairwise(edges), counts, strict=True):
        name = f"{first:,}" if after == first + 1 else f"{first:,} - {after - 1:,}"
        rows.append((name, f"{count:,}", mark * -(-count * BAR_WIDTH // max(counts))))
    print_table((">", ">", ""), rows)


def write_png(charts: Mapping[str, np.ndarray], file: Path) -> None:
    """Histograms of whole numbers, by their titles, side by side; raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError("--plot: matplotlib is not installed; install it: pip install 'mmtrain[plot]'") from None
    figure = Figure(figsize=(6 * len(charts), 4.5), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        axes.set_title(title)
        if not len(values):
            continue
        edges, counts = histogram(values, PNG_BINS)
        width = edges[1] - edges[0]
        axes.bar(edges[:-1], counts, width=width, align="edge")
        if edges[-1] - edges[-2] > width:  # drawn as narrow as the others
            axes.set_xlabel(f"the last bar: {edges[-2]:,} to {edges[-1] - 1:,}")
    figure.savefig(file, format="png", dpi=120)
