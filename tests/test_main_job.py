"""The jobs that the README shows: configs/llava_pp4.yaml, then demo_lora.yaml, on the models and
data of mmtrain.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import DEMO, SHORT, DemoRun, run_demo
from conftest import MAIN_JOB as CONFIG
from json_files import read_json
from rank_runs import train
from safetensors.torch import load_file
from tiers import nightly

import mmtrain
from mmtrain import launch
from mmtrain.config.load import load_config
from mmtrain.demo.data import make_demo_shards

AFTER = CONFIG.with_name("demo_lora.yaml")
SHEET = CONFIG.with_name("demo_sheet.yaml")
NATIVE = CONFIG.with_name("demo_native.yaml")
NOTEBOOK = Path(mmtrain.__file__).with_name("docs") / "quickstart.ipynb"


@pytest.fixture
def demo(demo_run, demo_cache, monkeypatch) -> DemoRun:
    """With the data that it has made in this process's cache, too."""
    assert demo_run.ran.returncode == 0, demo_run.ran.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(demo_cache))
    return demo_run


def records(folder: Path, kind: str, name: str = "llava_pp4") -> list[dict]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("settings", [SHORT, nightly(())], ids=["short", "README"])
def test_the_projector_learns_to_make_the_llm_read_handwriting_that_nothing_has_seen(
    demo_run, tmp_path, settings
):
    run, ran = demo_run if settings else run_demo(tmp_path, tmp_path / "cache")
    assert ran.returncode == 0, ran.stderr
    config = load_config(run / "config.yaml")
    steps, pipeline = config.train.max_steps, config.parallel.pipeline
    assert (
        "making demo:train: 6,400 pictures" in ran.stdout and "making demo:held-out" in ran.stdout
    )
    evaluations = records(run.parent, "eval")
    assert [record["step"] for record in evaluations] == list(
        range(0, steps + 1, config.eval.every_steps)
    )
    assert all(record["answers"] >= 200 for record in evaluations)
    assert evaluations[0]["exact_match"] < 0.05
    assert evaluations[-1]["exact_match"] >= 0.90
    assert f"{config.eval.show_answers} held-out questions" in ran.stdout
    (control,) = records(run.parent, "eval_permuted")
    assert control["answers"] == evaluations[-1]["answers"] and control["exact_match"] <= 0.15
    assert f"report: {run / 'report.html'}" in ran.stdout and "report.html" in [
        file.name for file in run.iterdir()
    ]
    losses = [record["loss"] for record in records(run.parent, "train")]
    assert len(losses) == steps and sum(losses[-10:]) < 0.1 * sum(losses[:10])

    ranks = read_json(run / "plan.json")["ranks"]
    assert [rank["optimizer"] for rank in ranks] == ["AdamW", *["NoOp"] * (pipeline - 1)]
    assert all("frozen" in rank["reason"] for rank in ranks[1:])
    audited = read_json(run / "audit.json")["ranks"]
    assert [rank["optimizer"] for rank in audited] == ["AdamW", *["NoOp"] * (pipeline - 1)]
    assert all(
        r["frozen"]["fingerprint_before"] == r["frozen"]["fingerprint_after"] for r in audited
    )
    saved = load_file(run / "checkpoints" / f"step-{steps:08d}" / "projector.safetensors")
    assert sorted(saved) == [
        f"projector.linear_{n}.{kind}" for n in (1, 2) for kind in ("bias", "weight")
    ]


def test_a_run_begins_with_eight_lines_and_the_log_has_the_plan(demo_run):
    run, ran = demo_run
    _, ready, printed = ran.stdout.partition("llava_pp4: ")  # before it, how the data were made
    before = (ready + printed).partition("step 1/")[0].splitlines()
    assert len(before) <= 8
    plan = read_json(run / "plan.json")
    parameters = sum(rank["trainable"] for rank in plan["ranks"])
    assert before[0].endswith(f"{parameters:,} parameters train (projector), all else is frozen")
    assert before[1].startswith("2 ranks (pipeline 2 x data 1), at most ")
    assert before[2].startswith("data: ") and "; held out: " in before[2]
    assert before[3].startswith(f"results: {run} ")
    log = (run / "log.txt").read_text()
    assert "[launcher] rank stage layers" in log and "[launcher] data.shards: format llava" in log
    assert "[rank 0] attention: " in log


def test_the_cells_of_the_notebook_show_score_ask_and_export_a_run(demo, tmp_path, monkeypatch):
    """Without Jupyter and its training, which tests/api/test_notebook.py has."""
    made = mmtrain.load_run(shutil.copytree(demo.folder, tmp_path / demo.folder.name))
    monkeypatch.setattr(mmtrain, "train", lambda config, show: made)
    monkeypatch.setattr(type(made), "watch", lambda run, stop_when_interrupted: run.wait())
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in read_json(NOTEBOOK)["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["after"] == made.scores[-1]
    assert (tmp_path / "exported" / "notebook" / "config.json").exists()


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_loss_and_gradient_norm_do_not_depend_on_the_layout(tmp_path, demo):
    runs = {}
    for pipeline, data in ((1, 1), (2, 1), (4, 1), (2, 2)):
        folder = tmp_path / f"{pipeline}x{data}"
        layout = (f"parallel.pipeline={pipeline}", f"parallel.data={data}")
        train(CONFIG, f"run.dir={folder}", *layout, "train.max_steps=6", "eval.shards=null")
        runs[pipeline, data] = records(folder, "train")
    reference = runs[1, 1]
    assert len(reference) == 6 and reference[-1]["loss"] < reference[0]["loss"]
    for steps in runs.values():
        for step, expected in zip(steps, reference, strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-4)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            for same in ("epoch", "samples", "images", "tokens", "supervised_tokens"):
                assert step[same] == expected[same]


@pytest.mark.nightly
def test_with_a_learning_rate_of_0_no_answer_changes(tmp_path, demo):
    groups = (
        "optimizer.groups=[{match: [projector.linear_1], lr: 0}, {match: "
        "[projector.linear_2], lr: 0}]"
    )
    settings = (groups, "train.max_steps=3", "eval.permuted_control=false")
    train(CONFIG, f"run.dir={tmp_path}", "parallel.pipeline=2", *settings)
    before, after = records(tmp_path, "eval")
    for step in records(tmp_path, "train"):  # `lr` is of what no group matches, here nothing
        assert step["lr"] > 0 and step["lr_groups"] == {
            "projector.linear_1": 0.0,
            "projector.linear_2": 0.0,
        }
    for score in (before, after):
        del score["seconds"], score["time"]
    assert before | {"step": 3} == after
    assert before["exact_match"] < 0.05


def begun_with(demo: DemoRun, folder: Path) -> tuple[str, str]:
    return f"run.dir={folder}", f"model.projector.init_from={demo.folder}"


@pytest.mark.nightly
def test_lora_begins_with_the_jobs_projector_and_a_question_that_the_job_cannot_answer(
    tmp_path, demo
):
    make_demo_shards("demo:next-held-out", "eval.shards")
    data = (
        "data.sets=null",
        "data.shards=demo:held-out",
        "train.max_steps=4",
        "eval.permuted_control=false",
    )
    run = train(
        AFTER, *begun_with(demo, tmp_path), "parallel.pipeline=1", "eval.max_samples=64", *data
    )
    before, after = run.lines("metrics.jsonl", "eval")
    assert before["exact_match"] <= 0.05 and before["token_accuracy"] > 0.7, (
        "it names the digit that is there"
    )
    assert after["loss"] != before["loss"]
    ranks = read_json(run.folder / "audit.json")["ranks"]
    names = [tensor["name"] for rank in ranks for tensor in rank["trainable"]]
    assert len(names) == 4 * 7 * 2 and all(".lora_" in name for name in names)


LAST = ("model.lora=null", "model.trainable=[llm.layers.2,llm.layers.3]", "optimizer.lr=1e-3")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("mode", "enough"), [((), 0.9), (LAST, 0.8)], ids=["lora", "last two layers"]
)
@pytest.mark.parametrize("asked", ["next-held-out", "held-out"])
def test_after_the_job_the_llm_learns_what_follows_and_forgets_nothing(
    tmp_path, demo, mode, enough, asked
):
    assert (
        launch.main([str(AFTER), *begun_with(demo, tmp_path), f"eval.shards=demo:{asked}", *mode])
        == 0
    )
    first, *_, last = records(tmp_path, "eval", "demo_lora")
    (control,) = records(tmp_path, "eval_permuted", "demo_lora")
    assert first["exact_match"] <= 0.05 if asked == "next-held-out" else first["exact_match"] >= 0.9
    assert last["exact_match"] >= enough and control["exact_match"] <= 0.05


SQUEEZED = ("model.vision.layout=square", "data.image_fit=resize")
SHEETS = {
    "tiles": (SHEET, (), 0.9, 1.0),
    "one square": (SHEET, SQUEEZED, 0.0, 0.5),
    "native": (NATIVE, (), 0.95, 1.0),
}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("config", "mode", "least", "most"), SHEETS.values(), ids=SHEETS)
def test_what_is_small_on_a_large_sheet_takes_tiles_or_its_own_shape_to_be_read(
    tmp_path, demo_cache, monkeypatch, config, mode, least, most
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(demo_cache))
    assert launch.main([str(config), f"run.dir={tmp_path}", "run.name=sheet", *mode]) == 0
    first, *_, last = records(tmp_path, "eval", "sheet")
    (control,) = records(tmp_path, "eval_permuted", "sheet")
    assert (
        first["exact_match"] <= 0.05
        and least <= last["exact_match"] <= most
        and control["exact_match"] <= 0.15
    )


def test_files_that_share_the_run_are_one_piece_of_work():
    folder = Path(__file__).parent
    using = {path for path in folder.rglob("test_*.py") if "demo_run" in path.read_text()}
    assert using == {folder.parent / name for name in DEMO}, (
        "else the run is made twice where tests run in processes"
    )
