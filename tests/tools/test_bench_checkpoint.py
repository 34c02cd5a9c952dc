"""The tool that measures what saving costs: its statistics by hand, and a run of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from bench_checkpoint import main, median_interval
from conftest import TOOLS


@pytest.mark.parametrize(
    ("count", "below"),  # from tables of the sign test, two-sided, 5%
    [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (30, 9), (50, 17)],
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(count, below):
    values = list(range(count, 0, -1))
    assert median_interval(values) == (below + 1, count - below)


@pytest.mark.nightly
def test_blocks_with_and_without_saves_take_turns_and_all_is_reported(tiny, tmp_path):
    command = [
        sys.executable,
        TOOLS / "bench" / "bench_checkpoint.py",
        "--config",
        tiny / "config.yaml",
        "--width",
        "16",
        "32",
    ]
    command += ["--repetitions", "2", "--every", "2", "--folder", tmp_path, "--json", tmp_path / "found.json"]
    command += ["parallel.pipeline=2", "parallel.threads_per_rank=1"]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for kind in ("seconds", "cpu_seconds"):
        assert {mode: len(blocks) for mode, blocks in found[kind].items()} == dict.fromkeys(
            ("none", "asynchronous", "synchronous"), 2
        )
    for mode in ("asynchronous", "synchronous"):
        saves = found["saves"][mode]
        assert len(saves["blocked_seconds"]) == len(saves["thread_cpu_seconds"]) == len(saves["write_seconds"]) == 2
        assert saves["bytes"] > 3 * 4 * (32 * 16 + 32 + 32 * 32 + 32), "the big projector and its moments, in fp32"
        low, high = found["modes"][mode]["overhead_interval"]
        assert low <= found["modes"][mode]["overhead"] <= high
        assert f"\n{mode}: " in ran.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_config_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["--config", str(tmp_path / "no.yaml")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "no.yaml" in said and "Traceback" not in said
