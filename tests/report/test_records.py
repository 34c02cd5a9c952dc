"""What is read of a run's folder, whoever wrote it, without a browser: bounded, typed, printable; and its curves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from mmtrain.__main__ import main
from mmtrain.report.curves import Curve
from mmtrain.report.page import make_page
from mmtrain.report.records import read_run

EARLIER = Path(__file__).parents[1] / "checkpoint" / "earlier_run" / "run"  # of a version without times and answers


@pytest.fixture
def run(tmp_path) -> Path:
    for name in ("config.yaml", "metrics.jsonl", "plan.json"):
        (tmp_path / "run").mkdir(exist_ok=True)
        shutil.copy(EARLIER / name, tmp_path / "run")
    return tmp_path / "run"


def append(file: Path, *lines: object) -> None:
    with file.open("a") as stream:
        stream.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000, 99_999])
def test_a_curve_is_bounded_and_keeps_every_extreme(count):
    curve, values = Curve(64), [((i * 7919) % 10_007) / 7 - (i == count // 3) * 9e4 for i in range(count)]
    for i, value in enumerate(values):
        curve.add(i, value)
    points = curve.points()
    assert len(points) <= 64 and curve.count == count
    assert points == sorted(points) and all(values[int(x)] == y for x, y in points)
    assert {min(values), max(values)} <= {y for _, y in points}
    assert not curve.is_whole or points == list(enumerate(values))
    assert curve.is_whole == (count <= 64)
    assert sum(y for _, y in curve.means(1)) == pytest.approx(sum(values) / count)


def test_a_run_of_before_has_a_page_whose_time_is_summed(run):
    read = read_run(run)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert read.begun is None and read.progress.count == sum(record["kind"] == "train" for record in steps)
    assert read.seconds == pytest.approx(sum(r["seconds"] for r in steps if r["kind"] in ("train", "eval")))
    assert "The records have no times" in make_page([run])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[" * 100_000,
        '{"kind": "train", "step": -1}',
        '{"kind": "train", "step": ' + "9" * 5000 + "}",
        '{"kind": "train", "step": 3, "compute_seconds": [' + "1," * 5000 + "1]}",
        '{"kind": "eval", "step": 3, "exact_match": 17}',
        '{"kind": "resume", "step": 3, "changed": "\\ud800"}',
        '{"kind": ["train"], "step": 3}',
        '{"step": 3}',
        "\x00\xff",
    ],
)
def test_a_line_that_is_none_is_passed_over_and_counted(run, line):
    sound = read_run(run)
    append(run / "metrics.jsonl", line)
    read = read_run(run)
    assert read.steps == sound.steps and len(read.problems) == 1
    assert "metrics.jsonl: 1 line is not understood" in make_page([run])


def test_a_line_that_is_still_being_written_is_none_yet(run):
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "st')
    assert read_run(run).problems == []


def test_numbers_that_are_none_leave_gaps(run):
    append(run / "metrics.jsonl", {"kind": "train", "step": 50, "loss": "nan", "grad_norm": "inf", "no_update": "NaN"})
    read = read_run(run)
    assert read.steps_done == 51 and read.curve("loss").points()[-1].x < 51
    assert [(event.kind, event.step) for event in read.events if event.kind == "no update"] == [("no update", 51)]
    make_page([run])


def test_numbers_that_no_run_has_break_no_page(run):
    huge = {
        "kind": "train",
        "loss": 1e308,
        "grad_norm": -1e308,
        "lr": 1e-320,
        "tokens_per_second": 1e30,
        "seconds": 1e30,
    }
    ranks = dict.fromkeys(("compute_seconds", "communication_seconds", "data_seconds", "peak_memory_bytes"), [1e30] * 3)
    steps = [{**huge, **ranks, "idle_fraction": [1 - 2**-53] * 3, "step": 2**53 - i, "time": 1e11} for i in range(99)]
    (run / "metrics.jsonl").write_text("")
    append(run / "metrics.jsonl", *steps, {"kind": "eval", "step": 2**53, "loss": "inf", "seconds": 1e30})
    append(
        run / "discarded.jsonl",
        {"file": "metrics.jsonl", "back_to_step": 0, "record": {"kind": "train", "time": -1e308}},
    )
    append(run / "bad_steps.jsonl", {"step": 2**53, "loss_sum": "nan"})
    assert read_run(run).problems == []
    make_page([run])
    make_page([run, run])


@pytest.mark.parametrize(
    ("name", "content"),
    [("plan.json", "{}"), ("plan.json", "[" * 9999), ("audit.json", '{"passed": 3}'), ("config.yaml", "a: [&a *a]")],
)
def test_a_file_that_is_none_is_said_on_the_page(run, name, content):
    (run / name).write_text(content)
    (problem,) = read_run(run).problems
    assert name in problem and "\n" not in problem
    assert name in make_page([run])


@pytest.mark.parametrize("name", ["../../secret.jpg", "/etc/passwd", "answers/..", "answers/a.jpg", "answers/l.jpg"])
def test_only_small_jpegs_of_the_runs_folder_are_shown(run, name):
    (run / "answers").mkdir()
    Image.new("RGB", (8, 8)).save(run.parent / "secret.jpg")
    (run / "answers" / "a.jpg").write_text("<svg onload=alert(1)>")
    (run / "answers" / "l.jpg").symlink_to(run.parent / "secret.jpg")
    answer = {"key": "k", "question": "q", "given": "g", "truth": "t", "right": False, "pictures": [name]}
    append(run / "answers.jsonl", {"step": 0, **answer})
    page = make_page([run])
    assert "data:image/jpeg" not in page and "Picture 1 is not" in page


def test_a_run_without_anything_says_what_each_section_needs(run):
    for file in run.iterdir():
        if file.name != "config.yaml":
            file.unlink()
    page = make_page([run])
    for needed in ("No step is recorded yet", "no plan.json", "eval.shards", "eval.permuted_control", "No audit"):
        assert needed in page, needed


def test_the_command_says_in_a_line_what_is_no_run(tmp_path, capsys, run):
    assert main(["report", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err.strip().partition("\n")[0]
    assert main(["report", *[str(run)] * 9]) == 2
    assert "at most 8" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path / "nowhere" / "a.html")]) == 2
    assert "--out FILE" in capsys.readouterr().err
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "metrics.jsonl", "plan.json"]
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
