"""The tool that measures what slices of the encoder gain: its rules by hand, and a run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace

import bench_encoder_slices
import pytest
from conftest import TOOLS


def found_way(seconds, **changes):
    way = {
        "boundaries": [1],
        "stages_per_rank": 1,
        "blocks": [1, 2],
        "ahead": [3, 1],
        "predicted_seconds": 1.05,
        "predicted_first_seconds": 1.5,
        "first_seconds": 1.6,
        "measured_seconds": seconds,
    }
    return way | changes


def test_a_gain_is_the_median_of_the_turns_ratios(capsys):
    rank_0 = found_way([2.0, 9.0, 3.0], predicted_seconds=2.1, ahead=[2, None], blocks=[0, 0])
    case = {"name": "p8-36%", "slices": found_way([1.0, 1.0, 2.0]), "rank 0": rank_0}
    (judged,) = bench_encoder_slices.report_sleep([case])
    assert judged["gain"] == 2.0 and judged["planned_gain"] == pytest.approx(2.0)
    assert judged["slices"]["step_error"] == pytest.approx(0.05)
    said = capsys.readouterr().out
    assert "all on rank 0" in said and "2 -" in said and ">= 2.60" in said


def test_the_cases_are_those_that_have_a_target():
    cases = bench_encoder_slices.cases_of(Namespace(quick=False, steps=2, seconds=1.0))
    assert set(bench_encoder_slices.TARGETS) <= {case.name for case in cases}
    assert {case.pipeline for case in cases} == {4, 8} and {case.microbatches for case in cases} == {16}


def test_a_gain_counts_turns_whose_both_steps_count(capsys):
    def layout(name, seconds, **changes):
        found = {"name": name, "pipeline": 2, "measured_seconds": seconds, "predicted_seconds": 1.0}
        found |= {"predicted_idle": [0.1], "measured_idle": [[0.1]] * 3, "predicted_bytes": [1], "measured_bytes": [1]}
        found |= {"measured_evaluations": [2.0, 2.0, 2.0], "predicted_evaluation": 2.0, "encoder_share": 0.36}
        return found | {"slices": [[0, 1], [1, 2]], "boundaries": [1], "encode_ahead": 1} | changes

    ours = layout("slices", [1.0, 2.0, 1.0])
    rank_0 = layout("rank 0", [1.2, 2.6, 9.0], predicted_seconds=1.3, measured_evaluations=[3.0, 3.0, 4.0])
    names = ("slices", "rank 0", "slices, evaluation", "rank 0, evaluation")
    factors = {name: [1.0, 1.0, 1.0] for name in names} | {"rank 0": [1.0, 0.5, None]}
    found = {"layouts": [ours, rank_0], "pairs": [], "factors": factors, "calibration_rounds": [1.0]}
    step, evaluation = bench_encoder_slices.report_real("36%", found)["gains"]
    assert step["measured"] == pytest.approx([1.2, 0.65]) and step["planned"] == pytest.approx(1.3)
    assert evaluation["measured"] == pytest.approx([1.5, 1.5, 2.0]) and evaluation["planned"] == 1.0
    said = capsys.readouterr().out
    assert "2/3" in said and ">= 0.98" in said and ">= 1.15" in said


@pytest.mark.nightly
def test_what_computes_is_predicted_and_measured(tmp_path):
    command = [sys.executable, TOOLS / "bench" / "bench.py", "encoder_slices", "real", "--quick", "--noise", "100"]
    command += ["--folder", tmp_path, "--json", tmp_path / "found.json"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())["real tiny"]
    assert [layout["name"] for layout in found["layouts"]] == ["slices", "auto", "rank 0", "uniform cut", "front alone"]
    for layout in found["layouts"]:
        assert layout["predicted_bytes"] == pytest.approx(layout["measured_bytes"], rel=0.2)
        assert layout["predicted_evaluation"] > 0 and layout["predicted_seconds"] > 0
    assert [len(gain["measured"]) for gain in found["gains"]] == [2] * 5


@pytest.mark.nightly
def test_sleeping_stages_take_what_was_planned(tmp_path):
    """Within a wide margin, since the machine may be busy; a stage that did not sleep would take a tenth."""
    command = [sys.executable, TOOLS / "bench" / "bench.py", "encoder_slices", "sleep", "--quick", "--folder", tmp_path]
    command += ["--json", tmp_path / "found.json"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (case,) = json.loads((tmp_path / "found.json").read_text())["sleep"]
    assert sum(case["slices"]["blocks"]) == 2 and sum(case["rank 0"]["blocks"]) == 0
    for way in ("slices", "rank 0"):
        planned = case[way]["predicted_seconds"]
        assert 0.98 * planned < case[way]["median_seconds"] < 3 * planned
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
