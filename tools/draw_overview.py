"""Draw the README's picture: what is frozen, what trains, and one measured step on four ranks.

    python tools/draw_overview.py --trace runs/llava_pp4/trace.json --out mmtrain/docs/pages/assets

Writes overview-light.svg and overview-dark.svg. `mmtrain train example:llava_pp4 --trace 8` records
a trace; the step nearest to the mean duration is drawn. Needs pip install 'mmtrain[plot]', as
plot_schedule.py does.
"""

from __future__ import annotations

import argparse
import json
import statistics
from html import escape
from pathlib import Path

from plot_schedule import Timeline, measured

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_result, run_command
from mmtrain.engine.trace import TRACE, Work

RANKS, WIDTH, HEIGHT, LEFT, RIGHT = 4, 960, 448, 20, 940
TITLE = (
    "mmtrain trains the projector between a frozen vision encoder and a frozen LLM in "
    "pipeline stages"
)
NOTE = "backward: frozen stages only pass the gradient to the projector"
# Light and dark of each colour; the picture is drawn with their names. The accent marks what
# trains, and nothing else.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9da7b3"),
}
COLOURS |= {
    "box": ("#f3f5f7", "#1b2129"),
    "line": ("#8c959f", "#6e7781"),
    "encode": ("#2b3138", "#eef2f6"),
}
COLOURS |= {
    "accent": ("#bc4c00", "#f0883e"),
    "forward": ("#0a5bbf", "#6cb6ff"),
    "backward": ("#4493f0", "#2d72c8"),
}
COLOURS |= {"other": ("#afb8c1", "#656e78"), "wait": ("#eaeef2", "#21262d")}
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "encode": "encoder",
    "accent": "AdamW",
    "other": "load, send",
}
LEGEND |= {"wait": "waiting"}
# from x, to x, at y, length of its ends, words, their gap
BRACKETS = [(452, 928, 24, 10, "LLM in four stages", 200)]
BRACKETS += [(292, 556, 204, -10, "AdamW", 100), (568, RIGHT, 204, -10, "no-op optimizer", 176)]


def typical(folder: Path) -> Timeline:
    """Return the traced step whose duration is nearest to the mean; UserError unless four ranks
    hold a stage each.
    """
    about = json.loads((folder / TRACE).read_text())["otherData"]
    if (about["pipeline"], about["stages_per_rank"]) != (RANKS, 1):
        seen = f"pipeline {about['pipeline']} and {about['stages_per_rank']} stages a rank"
        raise UserError(
            f"{folder / TRACE} has {seen}, expected {RANKS} and 1. Trace example:llava_pp4."
        )
    steps = [measured(folder, step) for step in about["steps"]]
    mean = statistics.fmean(step.length for step in steps)
    return min(steps, key=lambda step: abs(step.length - mean))


def rect(
    x: float, y: float, width: float, height: float, fill: str, line: str = "none", radius: int = 0
) -> str:
    """Return a rectangle, with round corners if it has a radius."""
    place = f'x="{x:.6g}" y="{y}" width="{width:.4g}" height="{height}" rx="{radius}"'
    return f'<rect {place} fill="{fill}" stroke="{line}"/>'


def text(
    x: float, y: float, words: str, fill: str = "ink", anchor: str = "middle", bold: bool = False
) -> str:
    """Return a line of text whose start, middle or end, as `anchor` says, is at x."""
    look = f'text-anchor="{anchor}" font-weight="{600 if bold else 400}" fill="{fill}"'
    return f'<text x="{x:.6g}" y="{y:g}" {look}>{escape(words)}</text>'


def path(points: str, line: str = "line", width: float = 1.5) -> str:
    """Return a line without a filling."""
    return (
        f'<path d="{points}" fill="none" stroke="{line}" stroke-width="{width}" '
        'stroke-linecap="round"/>'
    )


def arrow(begin: float, end: float, y: float, line: str = "forward") -> str:
    """Return a horizontal arrow from x `begin` to x `end`."""
    back = 5 if end < begin else -5
    return path(f"M{begin} {y}H{end}m{back} -5l{-back} 5l{back} 5", line, 2.5)


def box(x: float, width: float, height: float, name: str, trains: bool = False) -> str:
    """Return a part of the model, which says whether it trains."""
    middle, state = x + width / 2, "trains" if trains else "frozen"
    fill, line, strong, weak = (
        ("accent", "accent", "page", "page") if trains else ("box", "line", "ink", "muted")
    )
    words = text(middle, 48 + height / 2, name, strong, bold=True) + text(
        middle, 70 + height / 2, state, weak
    )
    return rect(x, 54, width, height, fill, line, 6) + words


def model() -> list[str]:
    """Draw the way from image and text through encoder and projector to the LLM's stages on their
    ranks.
    """
    parts = [
        text(50, 42, "image", bold=True),
        text(LEFT, 143, "text tokens", anchor="start", bold=True),
    ]
    parts += [
        rect(LEFT, 54, 60, 62, "box", "line", 6),
        arrow(83, 105, 85),
        arrow(267, 301, 85),
        arrow(134, 449, 137),
    ]
    parts.append(
        '<path d="M26 108L44 86L54 97L62 88L74 108ZM32 72a6 6 0 1 0 12 0a6 6 0 1 0 -12 '
        '0" fill="muted"/>'
    )
    for rank in range(RANKS):
        stage, left, right = 452 + 128 * rank, 440 + 128 * rank if rank else 292, 556 + 128 * rank
        parts.append(rect(left, 42, right - left, 144, "none", "line", 10))
        parts += [
            text((left + right) / 2, 175, f"rank {rank}", bold=True),
            box(stage, 92, 98, f"stage {rank}"),
        ]
        parts += [arrow(stage - 33, stage - 3, 74), arrow(stage - 3, stage - 33, 96, "backward")]
    parts += [box(108, 156, 62, "vision encoder"), box(304, 112, 62, "projector", trains=True)]
    for begin, end, y, tip, words, gap in BRACKETS:
        middle = (begin + end) / 2
        points = f"M{begin} {y + tip}V{y}H{middle - gap / 2}M{middle + gap / 2} {y}H{end}V{y + tip}"
        parts += [path(points), text(middle, y + 6, words, bold=True)]
    return parts


def timeline(step: Timeline) -> list[str]:
    """Draw what each rank does during the step, on a scale in ms, with the keys of the colours."""
    left, top, high, pitch = 84, 268, 24, 30
    scale, below = (RIGHT - left) / step.length, top + pitch * RANKS
    title = f"One real training step, {step.length * 1e3:.0f} ms"
    parts = [
        text(LEFT, 250, title, anchor="start", bold=True),
        text(RIGHT, 250, NOTE, "muted", "end"),
    ]
    for rank, y in enumerate(range(top, below, pitch)):
        parts += [
            text(LEFT, y + 18, f"rank {rank}", anchor="start"),
            rect(left, y, RIGHT - left, high, "wait"),
        ]
    for bar in step.bars:
        x, width, y = (
            left + bar.begin * scale,
            (bar.end - bar.begin) * scale,
            top + pitch * bar.rank,
        )
        name = "accent" if (bar.rank, bar.work) == (0, Work.OPTIMIZER) else str(bar.work)
        parts.append(rect(x, y, width, high, name if name in LEGEND else "other"))
    seconds = (scale * 10.0**power for power in range(-5, 5) for scale in (1, 2, 5))
    tick = next(tick for tick in seconds if step.length / tick < 7)
    for n in range(int(step.length / tick) + 1):
        x = left + n * tick * scale
        parts += [
            path(f"M{x:.2f} {below - 4}v5"),
            text(x, below + 18, f"{n * tick * 1e3:g} ms", "muted"),
        ]
    for n, (name, words) in enumerate(LEGEND.items()):
        parts.append(rect(left + 152 * n, 420, 14, 14, name, "line" if name == "wait" else name, 3))
        parts.append(text(left + 152 * n + 23, 433, words, anchor="start"))
    return parts


def picture(step: Timeline, variant: int) -> str:
    """Return the whole picture as SVG."""
    size = (
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="16" '
        'stroke-width="1.5"'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d">'
    about = f"Below the model, {step.title}: what each of the {RANKS} ranks does when; {NOTE}."
    names = f'<title id="t">{escape(TITLE)}</title><desc id="d">{escape(about)}</desc>'
    svg = "\n".join(
        [head, names, rect(0, 0, WIDTH, HEIGHT, "page"), *model(), *timeline(step), "</svg>\n"]
    )
    for name, colours in COLOURS.items():
        svg = svg.replace(f'="{name}"', f'="{colours[variant]}"')
    return svg


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="trace.json of a run on 4 ranks"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="where both pictures go"
    )
    options = parser.parse_args(arguments)

    def run() -> None:
        step = typical(options.trace.parent)
        options.out.mkdir(parents=True, exist_ok=True)
        for variant, name in enumerate(("light", "dark")):
            write_whole(options.out / f"overview-{name}.svg", picture(step, variant))
        print_result(
            f"wrote overview-light.svg and overview-dark.svg in {options.out}: {step.title}"
        )

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
