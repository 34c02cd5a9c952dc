"""The records of a run's folder, whoever wrote it, read without a browser: bounded, typed,
printable; and curves.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from json_files import read_json, write_json
from PIL import Image

from mmtrain.__main__ import main
from mmtrain.checkpoint.run_folder import describe_run
from mmtrain.config.load import load_config
from mmtrain.plan.planner import make_plan
from mmtrain.report.headline import headline
from mmtrain.report.page import make_page
from mmtrain.report.records import Curve, read_run
from mmtrain.report.sections import benchmark_rows, faults

TIMES = (
    "compute_seconds",
    "communication_seconds",
    "data_seconds",
    "fetching_seconds",
    "idle_seconds",
)
FAULT = {
    "step": 1,
    "epoch": 0,
    "key": "k",
    "shard": "s",
    "offset": 0,
    "reason": "broken",
    "detail": "d",
}
ANSWER = {
    "step": 0,
    "time": 1e9,
    "key": "k",
    "question": "q",
    "given": "g",
    "truth": "t",
    "right": False,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[str, str]:
    """The text of config.yaml and plan.json of a demo run."""
    folder = tmp_path_factory.mktemp("made")
    config = load_config("example:llava_pp4")
    describe_run(folder, config, make_plan(config))
    return (folder / "config.yaml").read_text(), (folder / "plan.json").read_text()


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A run on four ranks that begins and makes four steps, a second each."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in zip(("config.yaml", "plan.json"), made, strict=True):
        (folder / name).write_text(text)
    begin = {"kind": "begin", "step": 0, "time": 1e9, "device": "CPU"}
    begin |= {"ranks": 4, "versions": {"torch": "2"}}
    append(folder / "metrics.jsonl", begin, *map(step, range(4)), ranks(4))
    return folder


def step(number: int, **more: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("samples", "images", "tiles", "tokens", "supervised_tokens"), 2) | {
        "quarantined": 0
    }
    rates = {
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_second": 9.0,
        "model_flops_utilization": None,
    }
    about = {
        "kind": "train",
        "step": number,
        "time": 1e9 + 1 + number,
        "seconds": 1.0,
        "no_update": None,
    }
    return about | counts | rates | more


def ranks(number: int, **more: Any) -> dict[str, Any]:
    times = {name: [0.25] * 4 for name in (*TIMES, "peak_memory_bytes")}
    return {"kind": "ranks", "step": number, "time": 1e9 + 9, "steps": 3, **times, **more}


def evaluation(kind: str, number: int, **more: Any) -> dict[str, Any]:
    scores = {
        "loss": 1.0,
        "token_accuracy": 0.5,
        "exact_match": 0.5,
        "answers": 100,
        "samples": 100,
        "seconds": 1.0,
    }
    return {"kind": kind, "step": number, "time": 1e9 + 9, **scores, **more}


def append(file: Path, *lines: object) -> None:
    with file.open("a") as stream:
        stream.writelines(
            (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
        )


def only(run: Path, *lines: object) -> None:
    """Replace the metrics."""
    (run / "metrics.jsonl").write_text("")
    append(run / "metrics.jsonl", *lines)


@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000, 99_999])
def test_a_chart_of_a_curve_is_bounded_and_keeps_every_extreme(count):
    curve, values = (
        Curve(),
        [((i * 7919) % 10_007) / 7 - (i == count // 3) * 9e4 for i in range(count)],
    )
    for i, value in enumerate(values):
        curve.add(i, value)
    points = curve.points(64)
    assert len(points) <= 64 and len(curve) == count
    assert points == sorted(points) and all(values[int(x)] == y for x, y in points)
    assert {min(values), max(values)} <= {y for _, y in points}
    assert count > 64 or points == list(enumerate(values))
    assert curve.means(1)[0] == pytest.approx(((count - 1) / 2, sum(values) / count))
    assert len(curve.means(10)) == min(count, 10)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[" * 100_000,
        step(-1),
        ranks(4, compute_seconds=[1.0] * 60_000),
        ranks(4, idle_seconds=[-1.0] * 4),
        ranks(4, peak_memory_bytes=["nan"] * 4),
        step(3, loss={"of": 3}),
        {key: value for key, value in step(3).items() if key != "tokens"},
        evaluation("eval", 3, exact_match=17),
        "7",
        json.dumps(step(3))[:-1] + " " * 25_000_000 + "}",
        '{"step": 3}',
        "\x00\xff",
    ],
)
def test_a_line_that_is_no_record_is_left_out_and_counted(run, line):
    sound = read_run(run)
    append(run / "metrics.jsonl", line)
    read = read_run(run)
    assert read.steps == sound.steps and len(read.problems) == 1
    assert read.times == sound.times and read.peaks == sound.peaks
    assert "metrics.jsonl: 1 line(s) left out" in make_page([run])


def test_a_line_that_is_still_being_written_is_none_yet(run):
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "train", "st')
    assert read_run(run).problems == []


def test_numbers_that_are_none_leave_gaps(run):
    append(run / "metrics.jsonl", step(50, loss="nan", grad_norm="inf", no_update="NaN"))
    read = read_run(run)
    assert read.steps_done == 51 and read.curves["loss"].points()[-1].x < 51
    assert [(event.kind, event.step) for event in read.events if event.kind == "no update"] == [
        ("no update", 51)
    ]
    make_page([run])


def test_waiting_for_weights_is_a_part_of_the_time_where_there_was_any(run):
    for fetching, waited in ([0.0, 0.0], 0.0), ([1.5, 0.5], 3.0):
        sums = [ranks(number, steps=1, fetching_seconds=fetching) for number in (2, 3)]
        only(run, step(0), step(1), sums[0], step(2), sums[1])
        read = read_run(run)
        assert read.timed_steps == 2 and read.times["fetching"][0] == waited
        page = make_page([run])
        assert ("Fetching: waiting for the weights" in page) == bool(waited)


def test_a_run_without_times_of_ranks_yet_says_when_they_come(run):
    for lines in ([step(0)], [step(0), ranks(1, steps=0)]):
        only(run, *lines)
        assert "times come every 100 steps, at saves and at the end" in make_page([run])


def test_numbers_that_no_run_has_break_no_page(run):
    huge = {
        "loss": 1e308,
        "grad_norm": -1e308,
        "lr": 1e-320,
        "tokens_per_second": 1e30,
        "seconds": 1e30,
    }
    huge |= {"time": 1e11}
    sums = dict.fromkeys((*TIMES, "peak_memory_bytes"), [1e30] * 3)
    kinds = (("eval", 0), ("eval", 2**53), ("eval_permuted", 2**53))
    evaluations = (
        evaluation(kind, number, loss=1.7e308, exact_match=0.0, seconds=1e30)
        for kind, number in kinds
    )
    steps = (step(2**53 - i, lr_groups={"a": 1.7e308}, **huge) for i in range(99))
    most = ranks(2**53, steps=2**53, **sums)
    only(run, *steps, most, most, *evaluations, evaluation("eval", 2**53, loss="inf"))
    lost = {"file": "metrics.jsonl", "back_to_step": 0}
    append(
        run / "discarded.jsonl",
        {**lost, "record": step(3, **huge)},
        {**lost, "record": {"kind": "eval"}},
    )
    append(run / "bad_steps.jsonl", {"step": 2**53, "ranks": [], "parameters": []})
    assert read_run(run).problems == []
    make_page([run])
    make_page([run, run])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", "{}"),
        ("plan.json", "[" * 9999),
        ("audit.json", '{"passed": 3}'),
        ("config.yaml", "a: [&a *a]"),
    ],
)
def test_a_file_that_is_none_is_said_on_the_page(run, name, content):
    (run / name).write_text(content)
    (problem,) = read_run(run).problems
    assert name in problem and "\n" not in problem
    assert name in make_page([run])


@pytest.mark.parametrize(
    "name", ["../../secret.jpg", "/etc/passwd", "answers/..", "answers/a.jpg", "answers/l.jpg"]
)
def test_only_small_jpegs_of_the_runs_folder_are_shown(run, name):
    (run / "answers").mkdir()
    Image.new("RGB", (8, 8)).save(run.parent / "secret.jpg")
    (run / "answers" / "a.jpg").write_text("<svg onload=alert(1)>")
    (run / "answers" / "l.jpg").symlink_to(run.parent / "secret.jpg")
    append(run / "answers.jsonl", {**ANSWER, "pictures": [name]})
    page = make_page([run])
    assert "data:image/jpeg" not in page and "Picture 1 is not" in page


def test_the_page_says_of_an_audit_what_moved_and_of_an_older_one_no_more_than_it_knows(run):
    moved = "0 of 4 trainable tensors moved"
    audit = {"passed": True, "failures": [], "ranks": [{}], "result": moved}
    write_json(run / "audit.json", audit)
    page = make_page([run])
    assert f"The audit passed on 1 rank: {moved}." in page and "have changed" not in page
    del audit["result"]
    write_json(run / "audit.json", audit)
    assert "The audit passed on 1 rank: frozen weights unchanged on all ranks." in make_page([run])


def test_a_run_without_anything_says_what_each_section_needs(run):
    for file in run.iterdir():
        if file.name != "config.yaml":
            file.unlink()
    page = make_page([run])
    for needed in (
        "No step is recorded yet",
        "plan.json is missing",
        "eval.shards",
        "eval.permuted_control",
        "No audit",
    ):
        assert needed in page, needed


def test_the_command_says_in_a_line_what_is_no_run(tmp_path, capsys, run):
    assert main(["report", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err.strip().partition("\n")[0]
    assert main(["report", *[str(run)] * 9]) == 2
    assert "at most 8" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path / "nowhere" / "a.html")]) == 2
    assert "--out FILE" in capsys.readouterr().err
    assert sorted(file.name for file in run.iterdir()) == [
        "config.yaml",
        "metrics.jsonl",
        "plan.json",
    ]
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"


@pytest.mark.parametrize(
    "name", ["config.yaml", "plan.json", "metrics.jsonl", "answers.jsonl", "quarantine.jsonl"]
)
def test_no_link_out_of_the_folder_is_followed(run, name):
    secret = run.parent / "secret"
    line = {
        **FAULT,
        **ANSWER,
        "key": "SECRET",
        "reason": "SECRET",
        "question": "SECRET",
        "pictures": [],
    }
    secret.write_text(json.dumps(line) + "\n" if name.endswith("jsonl") else '{"aws": "SECRET"}')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    assert f"{name} is a link out of" in read_run(run).problems[0].replace(
        f"{name} cannot be read: ", ""
    )
    assert "SECRET" not in make_page([run]).replace("AWS_SECRET", "")


def test_a_page_shows_no_logins_and_no_arguments_of_programs(run):
    url = "pipe:curl -H 'Authorization: SECRET' https://u:SECRET@host/a.tar"
    write_json(run / "config.yaml", {"data": {"shards": [url], "sets": "https://u:SECRET@host/"}})
    append(run / "metrics.jsonl", step(5, no_update=url))
    append(run / "quarantine.jsonl", {**FAULT, "shard": url})
    page = make_page([run])
    assert "SECRET" not in page and "pipe:curl ..." in page and "https://host/" in page


def test_a_page_says_which_rank_holds_which_blocks_of_an_encoder_in_slices(run):
    plan = read_json(run / "plan.json")
    rank = plan["ranks"][0]
    slices = ([0, 0], [0, 2], [2, 3], None)
    plan["ranks"] = [
        {
            **rank,
            "rank": n,
            "stages": [{"stage": n, "encoder": held, "layers": [f"llm.layers.{n}"]}],
        }
        for n, held in enumerate(slices)
    ]
    write_json(run / "plan.json", plan)
    page = make_page([run])
    layers = [f"llm.layers.{n}" for n in range(4)]
    layers[1:3] = [f"encoder blocks 0-1; {layers[1]}", f"encoder blocks 2-2; {layers[2]}"]
    assert re.findall(r"<td>((?:encoder [^;<]*; )?llm.layers.\d)</td>", page) == layers


def test_pictures_and_rows_of_a_page_are_bounded(run):
    (run / "answers").mkdir()
    Image.effect_noise((384, 384), 90).convert("RGB").save(run / "answers" / "a.jpg", quality=60)
    for number in range(40):
        append(
            run / "answers.jsonl",
            {**ANSWER, "question": f"{number}", "pictures": ["answers/a.jpg"]},
        )
    write_json(run / "config.yaml", {f"k{n}": "<" * 200 for n in range(1500)})
    page = make_page([run])
    assert 1 < page.count("data:image/jpeg") < 40 and "so that the page stays small" in page
    assert ", the first 500 of 1,500 rows" in page


@pytest.mark.parametrize(
    ("before", "after", "control", "worked", "looked"),
    [
        (
            (3.0, 0.0),
            (2.0, 0.0),
            (2.0, 0.0),
            ("lower loss", "mixed"),
            ("too few exact answers to tell", "mixed"),
        ),
        ((3.0, 0.0), (2.0, 0.0), (3.0, 0.0), ("lower loss", "mixed"), ("yes, by the loss", "good")),
        (
            (3.0, 0.0),
            (2.0, 0.9),
            (3.0, 0.2),
            ("better", "good"),
            ("yes, with wrong images", "good"),
        ),
        ((3.0, 0.9), (3.0, 0.2), (3.0, 0.2), ("worse", "bad"), ("no sign of it", "bad")),
    ],
)
def test_the_headline_is_as_sure_as_the_scores_are(run, before, after, control, worked, looked):
    kinds = (("eval", 0, before), ("eval", 9, after), ("eval_permuted", 9, control))
    for kind, number, (loss, exact) in kinds:
        append(run / "metrics.jsonl", evaluation(kind, number, loss=loss, exact_match=exact))
    findings = headline(read_run(run))
    for question, (answer, tone) in {
        "Did it work?": worked,
        "Did it look at the images?": looked,
    }.items():
        assert findings[question].answer.startswith(answer) and findings[question].tone == tone


@pytest.mark.parametrize(
    ("tiles", "text"), [((5, 7), "4 images in 12 tiles, "), ((2, 2), "4 images, ")]
)
def test_tiles_are_counted_where_they_are_not_the_images(run, tiles, text):
    only(run, *(step(number, tiles=count) for number, count in enumerate(tiles)))
    assert text in headline(read_run(run))["On which data?"].text


def test_time_runs_from_begin_to_end_with_its_pauses(run):
    begin = json.loads((run / "metrics.jsonl").read_text().partition("\n")[0])
    steps = [step(n, time=1e9 + 1 + n + 500 * (n > 4), quarantined=2 * (n == 8)) for n in range(10)]
    only(run, begin, *steps[:5], {**begin, "step": 5, "time": 1e9 + 500}, *steps[5:])
    read = read_run(run)
    took = headline(read)["How long did it take?"]
    assert took.answer == "0:08:30 from start to end" and took.text.startswith(
        "0:00:10 for steps and evaluations."
    )
    assert ["0:08:29", "9", "quarantine", "samples: 2"] in faults(read).tables[0].rows


def test_a_bad_step_says_where_it_was_not_finite_and_counts_once(run):
    append(run / "metrics.jsonl", step(4, loss="nan", no_update="loss or gradient is not finite"))
    bad = {"ranks": [1, 2], "parameters": ["projector.a"]}
    append(run / "bad_steps.jsonl", {"step": 4, **bad}, {"step": 5, **bad})
    read = read_run(run)
    assert [(event.kind, event.step) for event in read.events[1:]] == [
        ("no update", 5),
        ("bad step", 6),
    ]
    assert all("rank 1, 2, projector.a" in event.text for event in read.events[1:])
    assert "2 steps without an update" in headline(read)["What went wrong?"].answer


def test_what_the_right_images_add_has_an_interval_as_in_newcombes_paper(run):
    right = evaluation("eval", 4, exact_match=56 / 70, answers=70)
    only(
        run,
        right,
        evaluation("eval_permuted", 4, exact_match=48 / 80, answers=80, permuted_samples=80),
    )
    finding = headline(read_run(run))["Did it look at the images?"]
    assert "add 20.0 points (95% interval 5.2 to 33.4)" in finding.text


def test_the_last_score_of_each_benchmark_and_step_is_shown(run):
    of_all = {"limit": None, "versions": {"lmms_eval": "0.7.3"}, "time": 1e9}
    scored = [
        {"task": "gqa", "step": step, "answers": 500, "scores": {"exact": [step / 8, 0.01]}}
        for step in (1, 3, 3)
    ]
    first = {"task": "mme", "step": 3, "answers": None, "scores": {"<b>": ["nan", None]}}
    append(
        run / "benchmarks.jsonl",
        *(record | of_all for record in (*scored, first)),
        {"task": 3},
        "nonsense",
    )
    record = read_run(run)
    assert list(benchmark_rows(record.benchmarks.values())) == [
        ("gqa", "exact", "0.125 ± 0.01", "500", "1", "lmms_eval 0.7.3"),
        ("gqa", "exact", "0.375 ± 0.01", "500", "3", "lmms_eval 0.7.3"),
        ("mme", "<b>", "nan", "-", "3", "lmms_eval 0.7.3"),
    ]
    assert any("benchmarks.jsonl: 2 line(s) left out" in problem for problem in record.problems)
    assert "&lt;b&gt;" in make_page([run])
