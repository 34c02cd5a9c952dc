"""The tables of what more training costs in configs/README.md say what the planner says, and what torch counts."""

from __future__ import annotations

import re
from pathlib import Path

import bench_modes
import pytest

TEXT = (Path(__file__).parents[2] / "configs" / "README.md").read_text()
ROWS = {
    mode: [
        [float(number.replace(",", "")) for number in re.findall(r"[\d,.]+", line)]
        for line in re.findall(rf"^\| {re.escape(mode)} \|(.*)\|$", TEXT, re.M)
    ]
    for mode in bench_modes.TRAINED
}


def test_both_tables_have_every_mode():
    assert [list(map(len, rows)) for rows in ROWS.values()] == [[10, 6]] * len(bench_modes.TRAINED)


def check_planned(mode: str, *pipelines: int) -> None:
    parameters, tflop, *gib = ROWS[mode][0]
    found = bench_modes.planned(mode, pipelines)
    assert parameters == pytest.approx(found.trained / 1e6, abs=0.5)
    assert tflop == pytest.approx(found.step_flops / 1e12, abs=0.5)
    for pipeline, bytes_of in zip(pipelines, found.fullest, strict=True):
        at = 2 * bench_modes.PIPELINES.index(pipeline)
        assert gib[at : at + 2] == pytest.approx([count / 2**30 for count in bytes_of], abs=0.05)


@pytest.mark.parametrize("mode", ROWS)
def test_work_and_memory_of_a_mode_are_the_planners(mode):
    check_planned(mode, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ROWS)
def test_memory_of_a_mode_is_the_planners_for_every_pipeline(mode):
    check_planned(mode, *bench_modes.PIPELINES)


@pytest.mark.parametrize("mode", ROWS)
def test_the_demos_micro_batch_is_what_torch_counts_and_what_is_planned(mode):
    found = bench_modes.measured(mode)
    # transformers 5.17 makes the angles of positions by a product of matrices: 2,048 FLOPs.
    assert found.flops == pytest.approx(found.planned_flops, rel=1e-5)
    assert found.saved_bytes == pytest.approx(found.planned_saved_bytes, rel=0.05)
    assert found.state_bytes == found.planned_state_bytes
    flops, planned_flops, *kilobytes = ROWS[mode][1]
    assert [flops, planned_flops] == pytest.approx([found.flops / 1e6, found.planned_flops / 1e6], abs=0.005)
    measured = [found.saved_bytes, found.state_bytes]  # another release of torch may keep a little more or less
    assert [kilobytes[0], kilobytes[2]] == pytest.approx([count / 1e3 for count in measured], rel=0.02, abs=0.5)
    planned = [found.planned_saved_bytes, found.planned_state_bytes]
    assert [kilobytes[1], kilobytes[3]] == pytest.approx([count / 1e3 for count in planned], abs=0.5)
