"""tools/draw_overview.py: a trace of four ranks becomes a light and a dark picture that stay within
their frame.
"""

from __future__ import annotations

import json
from xml.etree import ElementTree

import draw_overview
import pytest

SVG = "{http://www.w3.org/2000/svg}"
MILLISECONDS = {1: 100, 2: 200, 3: 210}  # of each traced step; the mean is 170


def write_trace(folder, pipeline: int = 4) -> str:
    """Write trace.json, in which every rank computes, sends, waits and steps its optimizer; return
    its path.
    """
    events, begin = [], 0
    for step, length in MILLISECONDS.items():
        for rank in range(pipeline):
            works = ("encode", "forward", "communication", "wait", "backward", "optimizer")
            for n, work in enumerate(works):
                about = {"step": step, "stage": rank, "microbatch": 0}
                times = {
                    "ts": begin + n * length * 1e3 / len(works),
                    "dur": length * 1e3 / len(works),
                }
                events.append(
                    {"ph": "X", "pid": 0, "tid": rank, "cat": work, "args": about, **times}
                )
        begin += length * 1000
    about = {
        "run": 'a <b> & "ink"',
        "pipeline": pipeline,
        "stages_per_rank": 1,
        "steps": list(MILLISECONDS),
    }
    (folder / "trace.json").write_text(json.dumps({"otherData": about, "traceEvents": events}))
    return str(folder / "trace.json")


def test_both_pictures_name_the_four_ranks_and_keep_text_and_bars_inside(tmp_path):
    assert (
        draw_overview.main(["--trace", write_trace(tmp_path), "--out", str(tmp_path / "assets")])
        == 0
    )
    for name, page in (("light", "#ffffff"), ("dark", "#0d1117")):
        svg = ElementTree.parse(tmp_path / "assets" / f"overview-{name}.svg").getroot()
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        assert svg.find(f"{SVG}rect").attrib["fill"] == page
        assert 'measured in a <b> & "ink", step 2' in svg.find(f"{SVG}desc").text
        texts = svg.findall(f"{SVG}text")
        words = [text.text for text in texts]
        # in the model and in the timeline
        assert all(words.count(f"rank {rank}") == 2 for rank in range(4))
        assert words.count("trains") == 1 and words.count("frozen") == 5
        assert "One real training step, 200 ms" in words
        for text in texts:
            long = 0.7 * float(svg.attrib["font-size"]) * len(text.text)  # in a wide, bold font
            before = {"start": 0, "middle": long / 2, "end": long}[text.attrib["text-anchor"]]
            left = float(text.attrib["x"]) - before
            assert (
                left >= 0 and left + long <= width and 16 <= float(text.attrib["y"]) <= height - 5
            ), text.text
        for rect in svg.findall(f"{SVG}rect"):
            x, y, wide, high = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and x + wide <= width + 0.01 and y + high <= height
        used = {
            value
            for element in svg.iter()
            for key, value in element.attrib.items()
            if key in ("fill", "stroke")
        }
        assert all(colour == "none" or colour.startswith("#") for colour in used)


@pytest.mark.parametrize("variant", [0, 1])
def test_text_has_the_contrast_of_wcag_aa(variant):
    def luminance(name: str) -> float:
        """Return the relative luminance of WCAG 2.2."""
        colour = draw_overview.COLOURS[name][variant]
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        red, green, blue = (
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for front, back in (
        ("ink", "page"),
        ("muted", "page"),
        ("ink", "box"),
        ("muted", "box"),
        ("page", "accent"),
    ):
        dark, bright = sorted((luminance(front), luminance(back)))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (front, back)


def test_a_trace_of_another_pipeline_is_refused(tmp_path, capsys):
    assert (
        draw_overview.main(
            ["--trace", write_trace(tmp_path, pipeline=2), "--out", str(tmp_path / "assets")]
        )
        == 2
    )
    assert "has pipeline 2 and 1 stages a rank, expected 4 and 1" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "assets").exists()
