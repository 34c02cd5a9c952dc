from __future__ import annotations

import json
import math
import shutil

import pytest
from processes import ran_python

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines, recorded


def test_each_write_appends_one_json_object(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as first:
        first.write(step=0, loss=1.5, nested={"images": [1, 2]})
    with JsonLines(path) as second:
        second.write(step=1, loss=None)
        # readable before it is closed
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": 0, "loss": 1.5, "nested": {"images": [1, 2]}},
            {"step": 1, "loss": None},
        ]


def test_nan_and_infinities_are_strings_that_float_reads_back(tmp_path):
    with JsonLines(tmp_path / "m") as file:
        file.write(values=[math.nan, math.inf, -math.inf, 1.0])
    values = json.loads((tmp_path / "m").read_text(), parse_constant=lambda name: 1 / 0)["values"]
    assert values == ["nan", "inf", "-inf", 1.0]
    assert math.isnan(float(values[0])) and float(values[2]) == -math.inf


def test_a_disk_that_fills_up_leaves_whole_lines_and_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    script = (
        "import resource, sys, pathlib; from mmtrain.base.json_lines import JsonLines, recorded\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "metrics = JsonLines(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1000): metrics.write(step=step, text='x' * 30)\n"
    )
    ran = ran_python("-c", script, path)
    assert ran.returncode != 0 and str(path) in ran.stderr.splitlines()[-1]
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(len(steps))) and len(steps) > 10
    assert path.read_text().endswith("\n")


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_is_not_there_any_more_is_named_at_the_next_line(tmp_path, how):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    metrics = JsonLines(folder / "metrics.jsonl")
    metrics.write(step=0)
    folder.rename(elsewhere)
    if how == "removed":
        shutil.rmtree(elsewhere)
    if how == "replaced":
        shutil.copytree(elsewhere, folder)
    with pytest.raises(
        UserError, match=f"{folder} was removed, moved or replaced .* Put it back"
    ) as refused:
        metrics.write(step=1)
    assert "\n" not in str(refused.value)


def test_records_are_read_by_their_kind_and_torn_lines_are_passed_over(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert list(recorded(file, "train")) == []
    with JsonLines(file) as lines:
        lines.write(kind="train", step=0, note="eval")
        lines.write(kind="eval", step=1)
    with file.open("a") as stream:
        stream.write('["eval"]\n{"kind": "eval", "ste')
    assert [record["step"] for record in recorded(file, "eval")] == [1]
    assert [record["step"] for record in recorded(file)] == [0, 1]
