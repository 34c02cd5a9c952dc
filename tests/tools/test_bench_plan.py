"""The tool that judges the planner's predictions: its rules by hand, and a run of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import bench_plan
import pytest
from bench_ballast import ballast
from bench_timing import at_usual_speed, usual_speed
from conftest import TOOLS


def test_a_step_is_corrected_by_its_probes_and_dropped_if_they_differ():
    probes = {"a": [[1.0, 1.0], [1.0, 1.2], [2.0, 2.0]], "b": [[1.02, 0.98], [0.8, 1.0], [0.5, 0.5]]}
    assert usual_speed(probes, 0.05) == {"a": [1.0, None, 0.5], "b": [1.0, None, 2.0]}
    assert all(map(all, usual_speed(probes, 1.0).values()))


def test_a_calibration_takes_the_rounds_that_count_each_times_its_factor():
    assert at_usual_speed([1.0, 50.0, 4.0, 3.0], [2.0, None, 0.5, 1.0]) == [2.0, 2.0, 3.0]


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


needs_idle_priority = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no idle priority")


@needs_idle_priority
def test_ballast_runs_only_where_nothing_else_does_and_ends_with_its_block():
    with ballast() as pid:
        assert wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE)
    assert not Path(f"/proc/{pid}").exists()


@needs_idle_priority
def test_ballast_ends_when_its_rank_is_killed():
    code = "import time, bench_ballast\nwith bench_ballast.ballast() as pid: print(pid, flush=True); time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=TOOLS / "bench", stdout=subprocess.PIPE, text=True)
    pid = int(rank.stdout.readline())
    assert wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    status = Path(f"/proc/{pid}/status")  # where nobody reaps orphans, it stays as a zombie
    assert wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text())


def found_layout(**changes):
    layout = {
        "name": "x",
        "pipeline": 2,
        "predicted_seconds": 1.1,
        "measured_seconds": [1.0, 9.0, 2.4, 1.0],
        "predicted_idle": [0.10, 0.20],
        "measured_idle": [[0.11, 0.15], [0.9, 0.9], [0.12, 0.16], [0.13, 0.17]],
        "predicted_bytes": [100, 90],
        "measured_bytes": [100, 100],
    }
    return layout | changes


def test_errors_are_those_of_the_steps_that_count(capsys):
    noisy = found_layout(name="y")
    found = {"layouts": [found_layout(), noisy], "pairs": [], "calibration_rounds": [1.0, None]}
    found["factors"] = {"x": [1.0, None, 0.5, 1.0], "y": [None] * 4}
    summary = bench_plan.report("layouts", found)["summary"]
    assert (summary["layouts"], summary["of"], summary["dropped_steps"]) == (1, 2, 1)
    assert summary["mean_step_error"] == summary["worst_step_error"] == pytest.approx(0.1)
    assert summary["worst_memory_error"] == pytest.approx(0.1)
    assert summary["mean_idle_difference"] == pytest.approx((0.02 + 0.04) / 2)
    assert summary["mean_signed_idle_difference"] == pytest.approx((0.02 - 0.04) / 2)
    said = capsys.readouterr().out
    assert "all noisy" in said and "the calibration is that of 1 of 2 rounds" in said

    bench_plan.report("layouts", found | {"calibration_rounds": [None, None]})
    assert "the calibration is that of all rounds; each one was noisy" in capsys.readouterr().out


def test_a_gain_is_that_of_each_pair_whose_steps_both_count(capsys):
    pair = {
        "prefetch": {"name": "x", "encode_ahead": 2, "measured_seconds": [0.9, 1.8, 0.95, 9, 1]},
        "none": {"name": "y", "measured_seconds": [1.0, 2.0, 1.0, 1, 9]},
    }
    pair["prefetch"]["predicted_seconds"], pair["none"]["predicted_seconds"] = 9.2, 10.0
    found = {"layouts": [], "pairs": [pair], "calibration_rounds": [1.0, None, 1.0]}
    found["factors"] = {"x": [1.0, 0.5, 1.0, None, 1.0], "y": [1.0, 0.5, 1.0, 1.0, None]}
    result = bench_plan.report("layouts", found)
    (gain,) = result["prefetch"]
    assert gain["predicted_gain"] == pytest.approx(0.08) and gain["measured_gain"] == pytest.approx([0.1, 0.05, 0.1])
    assert gain["difference"] == pytest.approx(0.02) and result["never_slower"]
    assert "3/5" in capsys.readouterr().out

    found["factors"] = {"x": [1.0] * 5, "y": [None] * 5}
    assert bench_plan.report("layouts", found)["prefetch"][0]["kept_pairs"] == 0
    assert "all noisy" in capsys.readouterr().out


def test_the_layouts_cover_what_the_issue_asks_for():
    options = Namespace(rows=[], dtype="float32", repetitions=10, rounds=3, noise=0.05, quick=False)
    judged, four = bench_plan.jobs_of(options)
    layouts = judged.layouts
    assert len({layout.name for layout in layouts}) == len(layouts) >= 12
    assert {layout.pipeline for layout in layouts} == {layout.stages_per_rank for layout in layouts} == {1, 2}
    assert min(x.microbatches for x in layouts) == 2 and max(x.microbatches for x in layouts) == 16
    assert any(x.recompute for x in layouts) and any(x.prefetch for x in layouts)
    assert {layout.pipeline for layout in four.layouts} == {4} and not four.pairs
    assert all(pair.microbatches == 4 and pair.pipeline == 2 and pair.prefetch for pair in judged.pairs)


@pytest.mark.nightly
def test_every_layout_is_predicted_and_measured_in_one_run(tmp_path):
    command = [sys.executable, TOOLS / "bench" / "bench.py", "plan", "--quick", "--noise", "100", "--folder", tmp_path]
    command += ["--json", tmp_path / "found.json"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())["layouts"]
    assert found["summary"]["layouts"] == found["summary"]["of"] == len(found["judged"]) >= 5
    for row, layout in zip(found["judged"], found["layouts"], strict=True):
        assert row["kept_steps"] == 2 and row["predicted_seconds"] > 0 and row["measured_seconds"][0] > 0
        assert len(layout["measured_idle"][0]) == len(layout["predicted_bytes"]) == 2
        assert all(0 <= share <= 1 for share in row["predicted_idle"] + row["measured_idle"])
        assert row["memory_error"] == pytest.approx([0, 0], abs=0.2), row["name"]
    assert {layout["stages_per_rank"] for layout in found["layouts"]} == {1, 2}
    (pair,) = found["prefetch"]
    assert pair["kept_pairs"] == pair["pairs"] == 2 and "encoder prefetch: share" in ran.stdout
    assert "p 1, m 2: whole model" in [row["name"] for row in found["judged"]]  # the table wraps names
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
