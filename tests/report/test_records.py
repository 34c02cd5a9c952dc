"""What is read of a run's folder, whoever wrote it, without a browser: bounded, typed, printable; and its curves."""

from __future__ import annotations

import json
import re
import shutil
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest
from PIL import Image

from mmtrain.__main__ import main
from mmtrain.report.curves import Curve
from mmtrain.report.faults import faults
from mmtrain.report.headline import headline
from mmtrain.report.page import MOST_BYTES, make_page
from mmtrain.report.records import read_run
from mmtrain.report.watch import server

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


def test_waiting_for_weights_is_a_part_of_the_time_where_there_was_any(run):
    times = {"compute_seconds": [6.0, 2.0], "communication_seconds": [1.0, 1.0], "data_seconds": [0.0, 0.0]}
    times |= {"idle_fraction": [0.0, 0.5], "peak_memory_bytes": [1, 1]}
    step = {"kind": "train", "time": 1e9, **times}
    for fetching, waited in ({}, 0.0), ({"fetching_seconds": [3.0, 0.5]}, 3.0):
        (run / "metrics.jsonl").write_text("")
        append(run / "metrics.jsonl", *({**step, **fetching, "step": number} for number in range(2)))
        ranks = read_run(run).ranks
        assert [rank.compute for rank in ranks] == [6.0, 2.0], "of the second step: the first pays for warm-up"
        assert ranks[0].fetching == waited and ranks[1].idle == pytest.approx(3.0 + bool(waited) * 0.5)
        page = make_page([run])
        assert ("Fetching is waiting for weights" in page) == bool(waited)


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


def test_no_number_is_too_large_for_a_page(run):
    steps = [{"kind": "train", "step": 100 + i, "loss": 1.7e308, "lr_groups": {"a": 1.7e308}} for i in range(200)]
    evaluations = [{"kind": "eval", "step": step, "loss": 1.7e308, "exact_match": 0.0} for step in (0, 300)]
    append(run / "metrics.jsonl", *steps, *evaluations, {**evaluations[1], "kind": "eval_permuted"})
    make_page([run])
    make_page([run, run])


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "metrics.jsonl", "answers.jsonl", "quarantine.jsonl"])
def test_no_link_out_of_the_folder_is_followed(run, name):
    secret = run.parent / "secret"
    fault = {
        "key": "SECRET",
        "reason": "SECRET",
        "question": "SECRET",
        "given": "",
        "truth": "",
        "right": False,
        "step": 1,
    }
    secret.write_text(json.dumps({"step": 1, **fault}) + "\n" if name.endswith("jsonl") else '{"aws": "SECRET"}')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    assert f"{name}: a link out of" in read_run(run).problems[0].replace(" cannot be read", "")
    assert "SECRET" not in make_page([run]).replace("AWS_SECRET", "")


def test_a_page_shows_no_logins_and_no_arguments_of_programs(run):
    url = "pipe:curl -H 'Authorization: SECRET' https://u:SECRET@host/a.tar"
    (run / "config.yaml").write_text(json.dumps({"data": {"shards": [url], "sets": "https://u:SECRET@host/"}}))
    append(run / "metrics.jsonl", {"kind": "resume", "step": 1, "changed": [f"data.shards: {url}"]})
    append(run / "quarantine.jsonl", {"reason": "broken", "shard": url})
    page = make_page([run])
    assert "SECRET" not in page and "pipe:curl ..." in page and "https://host/" in page


def long_questions(run: Path) -> None:
    (run / "answers").mkdir()
    pixels = Image.effect_noise((384, 384), 90)
    pixels.convert("RGB").save(run / "answers" / "a.jpg", quality=60)
    text = "<&'\u202e" * 400
    for step in (0, 9):
        answers = [
            {"key": f"{text[:50]}{n}", "question": f"{n} {text}", "given": text, "truth": text} for n in range(100)
        ]
        more = {"step": step, "right": False, "pictures": ["answers/a.jpg"]}
        append(run / "answers.jsonl", *({**answer, **more} for answer in answers))


def many_stages(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    rank = plan["ranks"][0]
    stage = {"stage": 0, "encoder": [0, 2**53], "layers": [f"<{n}{'y' * 290}" for n in range(12)]}
    plan["ranks"] = [{**rank, "rank": n, "stages": [stage] * 60, "reason": "<" * 300} for n in range(64)]
    (run / "plan.json").write_text(json.dumps(plan))


def many_groups(run: Path) -> None:
    groups = {f"{'<' * 200}{g}": g * 1.23456e-20 for g in range(50)}
    steps = [
        {"kind": "train", "step": 100 + n, "lr_groups": {k: v * (n + 1) for k, v in groups.items()}}
        for n in range(2500)
    ]
    append(run / "metrics.jsonl", *steps)


def many_keys(run: Path) -> None:
    (run / "config.yaml").write_text(json.dumps({f"k{n}": "<" * 400 for n in range(1500)}))


def test_a_page_says_which_rank_holds_which_blocks_of_an_encoder_in_slices(run):
    plan = json.loads((run / "plan.json").read_text())
    rank = plan["ranks"][0]
    slices = ([0, 0], [0, 2], [2, 3], None)
    plan["ranks"] = [
        {**rank, "rank": n, "stages": [{"stage": n, "encoder": held, "layers": [f"llm.layers.{n}"]}]}
        for n, held in enumerate(slices)
    ]
    (run / "plan.json").write_text(json.dumps(plan))
    page = make_page([run])
    assert re.findall(r"<td[^>]*>((?:encoder [^;<]*; )?layer \d)</td>", page) == [
        *("layer 0", "encoder blocks 0-1; layer 1", "encoder block 2; layer 2", "layer 3")
    ]


@pytest.mark.parametrize(
    "grow", [long_questions, many_stages, many_keys, pytest.param(many_groups, marks=pytest.mark.nightly)]
)
def test_a_page_is_small_whatever_the_records_are_and_says_what_it_leaves_out(run, grow):
    grow(run)
    page = make_page([run])
    assert len(page.encode()) <= MOST_BYTES
    said = {long_questions: "so that the page stays small", many_stages: "long texts are cut", many_keys: "the first "}
    assert said.get(grow, "") in page
    assert grow in (many_groups, many_stages) or len(make_page([run] * 8).encode()) <= MOST_BYTES


@pytest.mark.parametrize(
    ("before", "after", "control", "worked", "looked"),
    [
        ((3.0, 0.0), (2.0, 0.0), (2.0, 0.0), ("lower loss", "mixed"), ("it answers too little to tell", "mixed")),
        ((3.0, 0.0), (2.0, 0.0), (3.0, 0.0), ("lower loss", "mixed"), ("yes, by the loss", "good")),
        ((3.0, 0.0), (2.0, 0.9), (3.0, 0.2), ("better", "good"), ("yes: with wrong images", "good")),
        ((3.0, 0.9), (3.0, 0.2), (3.0, 0.2), ("worse", "bad"), ("no sign of it", "bad")),
    ],
)
def test_the_headline_is_as_sure_as_the_scores_are(run, before, after, control, worked, looked):
    kinds = (("eval", 0, before), ("eval", 9, after), ("eval_permuted", 9, control))
    for kind, step, (loss, exact) in kinds:
        record = {"kind": kind, "step": step, "loss": loss, "exact_match": exact, "answers": 100, "samples": 100}
        append(run / "metrics.jsonl", record)
    findings = {finding.question: finding for finding in headline(read_run(run))}
    for question, (answer, tone) in {"Did it work?": worked, "Did it look at the images?": looked}.items():
        assert findings[question].answer.startswith(answer) and findings[question].tone == tone


@pytest.mark.parametrize(
    ("tiles", "said"),
    [
        ((5, 7), "4 images in 12 tiles, "),
        ((2, 2), "4 images, "),
        ((None, 2), "4 images, "),
        ((None, 7), "in 9 tiles, "),
    ],
)
def test_tiles_are_told_where_they_are_not_the_images(run, tiles, said):
    """A record of a version without tiles counts each image as one."""
    step = {"kind": "train", "samples": 2, "images": 2, "tokens": 9}
    (run / "metrics.jsonl").write_text("")
    append(run / "metrics.jsonl", *({**step, "step": n, "tiles": count} for n, count in enumerate(tiles)))
    data = next(finding for finding in headline(read_run(run)) if finding.question.startswith("On which data"))
    assert said in data.text


def test_time_is_from_begin_to_end_and_a_pause_is_no_line_and_a_stretch_of_quarantine_one_row(run):
    step = {"kind": "train", "seconds": 1, "loss": 1, "tokens_per_second": 1}
    steps = [{**step, "step": n, "time": 1e9 + n + 500 * (n > 4)} for n in range(10)]
    faulty = [{**step, "quarantined": 2 * (step["step"] in (2, 3, 4, 8))} for step in steps]
    (run / "metrics.jsonl").write_text("")
    begin = {"kind": "begin", "step": 0, "time": 1e9}
    append(run / "metrics.jsonl", begin, *faulty[:5], {**begin, "step": 5, "time": 1e9 + 500}, *faulty[5:])
    read = read_run(run)
    took = next(finding for finding in headline(read) if finding.question.startswith("How long"))
    assert took.answer == "8 min 29 s from begin to end" and took.text.startswith("10 s of it are steps")
    section = faults(read)
    made = section.charts[0].data()["series"][0]["points"]
    assert [y for _, y in made] == [1, 2, 3, 4, 5, None, 6, 7, 8, 9, 10]
    rows = [row[1:] for row in section.tables[0].rows if row[2] == "quarantine"]
    assert rows == [("3-5", "quarantine", "samples: 6"), ("9", "quarantine", "samples: 2")]


def test_a_server_whose_run_is_gone_answers_with_a_line_and_the_same_page_when_it_is_back(run, monkeypatch):
    monkeypatch.setattr("mmtrain.report.watch.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("mmtrain.report.watch.SHARE_OF_TIME", 1e9)
    with server([run], 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()

        def get(tag: str = "") -> tuple[int, str, bytes]:
            connection = HTTPConnection("127.0.0.1", serving.server_port, timeout=10)
            connection.request("GET", "/", headers={"If-None-Match": tag})
            answer = connection.getresponse()
            return answer.status, answer.getheader("ETag"), answer.read()

        status, tag, page = get()
        assert status == 200 and json.dumps(tag).encode() in page and get(tag)[0] == 304
        run.rename(run.parent / "moved")
        for _ in range(3):
            status, _, said = get(tag)
            assert status == 503 and b"config.yaml" in said and said.count(b"\n") == 1
        (run.parent / "moved").rename(run)
        assert get(tag)[0] == 304
        append(run / "metrics.jsonl", {"kind": "end", "step": 9})
        assert get(tag)[0] == 200
        serving.shutdown()
