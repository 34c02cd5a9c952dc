"""From which checkpoint a run goes on, and what becomes of everything after it; decided before any
rank starts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from json_files import read_json
from untrained_runs import make_checkpoint

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.checkpoint.resume import ResumePoint, find_start
from mmtrain.checkpoint.run_folder import describe_run, go_back, prepare_folder, run_folder
from mmtrain.checkpoint.step_folder import StepFolder, newest
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.engine.audit import settings_fingerprint
from mmtrain.plan.planner import make_plan

LINES = 8  # steps that the records tell of


@pytest.fixture
def config(tiny, tmp_path) -> RunConfig:
    return load_config(tiny / "config.yaml", [f"run.dir={tmp_path}/runs", "run.name=mine"])


def line(step: int) -> str:
    return json.dumps({"kind": "train", "step": step}) + "\n"


def make_run(config: RunConfig, steps: tuple[int, ...] = (2, 4, 6), **state: object) -> Path:
    """A run that recorded 8 steps and has these checkpoints."""
    folder = run_folder(config)
    prepare_folder(config, make_plan(config), goes_on=False)
    (folder / "metrics.jsonl").write_text("".join(map(line, range(LINES))))
    for step in steps:
        make_checkpoint(
            folder, config, step=step, files={"metrics.jsonl": step * len(line(0))}, **state
        )
    return folder


def go_on(config: RunConfig, path: Path | str = "auto") -> ResumePoint:
    """What the launcher and then rank 0 do."""
    start = find_start(config, str(path))
    prepare_folder(config, make_plan(config), goes_on=True)
    begin_from(config, start)
    return start


def begin_from(config: RunConfig, start: ResumePoint) -> None:
    go_back(run_folder(config), start.checkpoint)
    describe_run(run_folder(config), config, make_plan(config))


def steps_of(folder: Path) -> list[int]:
    return [
        json.loads(text)["step"] for text in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ---- which one is meant


@pytest.mark.parametrize("how", ["from within", "link to it", "link to all"])
def test_a_checkpoint_of_the_run_is_known_as_its_own_whatever_the_path(
    config, monkeypatch, tmp_path, how
):
    folder = make_run(config)
    path = folder / "checkpoints" / "step-00000004"
    if how == "from within":
        monkeypatch.chdir(path.parent)
        path = Path("step-00000004")
    elif how == "link to it":
        path.with_name("latest").symlink_to("step-00000004")
        path = path.with_name("latest")
    elif how == "link to all":
        (folder / "checkpoints").rename(tmp_path / "kept")
        (folder / "checkpoints").symlink_to(tmp_path / "kept")
    start = go_on(config, path)
    assert start.is_own and start.checkpoint.step == 4
    assert steps_of(folder) == [0, 1, 2, 3]
    assert {"step-00000002", "step-00000004", "step-00000006.discarded"} == {*names(folder)} - {
        "latest"
    }
    assert newest(folder)[0].step == 4


@pytest.mark.parametrize("name", ["step-00000006.discarded", "step-00000006.tmp"])
def test_a_checkpoint_that_was_set_aside_or_never_finished_must_be_named_again_first(config, name):
    folder = make_run(config)
    aside = folder / "checkpoints" / name
    (folder / "checkpoints" / "step-00000006").rename(aside)
    with pytest.raises(UserError, match="rename it step-00000006"):
        go_on(config, aside)
    assert names(folder) == sorted(["step-00000002", "step-00000004", name])
    assert steps_of(folder) == list(range(LINES))


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_in_silence(config):
    folder = make_run(config, steps=())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "checkpoint"' + "[" * 200_000 + "\n")
    assert find_start(config) is None
    with JsonLines(folder / "metrics.jsonl") as metrics:
        metrics.write(kind="checkpoint", step=4)
    with pytest.raises(UserError, match="had checkpoints, but none"):
        find_start(config)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == LINES + 2
    (folder / "metrics.jsonl").write_text("")
    (folder / "checkpoints" / "step-00000002.discarded-2").mkdir(parents=True)
    with pytest.raises(UserError, match="had checkpoints, but none"):
        find_start(config)


# ---- branches


@pytest.fixture
def other(config) -> StepFolder:
    """A checkpoint of another run."""
    folder = make_run(config.changed({"run.name": "other"}), steps=(4,), branched_from=None)
    return StepFolder(folder / "checkpoints" / "step-00000004")


def test_a_branch_goes_on_by_itself_when_the_same_command_is_given_again(config, other):
    first = find_start(config, str(other.path))
    assert (first.is_own, first.branched_from) == (False, other.fingerprint)
    make_run(config, steps=(4, 6), branched_from=other.fingerprint)
    again = find_start(config, str(other.path))
    assert (again.is_own, again.checkpoint.step, again.branched_from) == (
        True,
        6,
        other.fingerprint,
    )
    assert find_start(config).checkpoint.step == 6


def test_a_branch_that_died_before_its_first_save_branches_again(config, other):
    folder = make_run(config, steps=())
    (folder / "metrics.jsonl").write_text('{"kind": "begin", "step": 4}\n')
    (folder / "checkpoints").mkdir()
    assert find_start(config, str(other.path)).checkpoint.path == other.path


def test_a_run_does_not_become_a_branch_of_another(config, other):
    make_run(config, branched_from=None)
    with pytest.raises(UserError, match=r"is from another\. Choose a new"):
        find_start(config, str(other.path))


# ---- nothing is cut before all is known to be right


def test_until_rank_0_takes_over_a_run_that_goes_on_is_as_it_was(config):
    folder = make_run(config)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changed = config.changed({"parallel.timeout_seconds": 77})
    start = find_start(changed, str(folder / "checkpoints" / "step-00000002"))
    prepare_folder(changed, make_plan(changed), goes_on=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    begin_from(changed, start)
    assert steps_of(folder) == [0, 1]
    assert load_config(folder / "config.yaml").parallel.timeout_seconds == 77


def test_other_contents_are_refused_unless_allowed(config, tmp_path):
    fingerprints = {"frozen_fingerprint": "f", "settings_fingerprint": "s"}
    saved = make_checkpoint(
        tmp_path / "saved", config, data={"fingerprint": "d", "counts": None}, **fingerprints
    )
    ResumePoint(saved, True, (), None).refuse_other_contents("d", "f", "s", 20)
    for contents, error in (
        (("other", "f", "s", 20), r"the data are not those .*--allow-change data\.shards"),
        (
            ("d", "other", "s", 20),
            r"the frozen weights are not those .*--allow-change model\.llm\.path",
        ),
        (("d", "f", "other", 20), r"config\.json.*--allow-change model\.llm\.path"),
        (("d", "f", "s", 19), r"has 20 steps, but train\.max_steps .* asks for 19"),
    ):
        with pytest.raises(UserError, match=error):
            ResumePoint(saved, True, ("train",), None).refuse_other_contents(*contents)
    ResumePoint(saved, True, ("data", "model.vision.name"), None).refuse_other_contents(
        "other", "other", "other", 20
    )


def test_settings_of_models_have_a_fingerprint_of_what_is_computed(tiny, config, tmp_path):
    shutil.copytree(tiny / "llm", tmp_path / "llm")
    moved = load_config(
        tiny / "config.yaml", [f"run.dir={tmp_path}/runs", f"model.llm.path={tmp_path / 'llm'}"]
    )
    content = read_json(tmp_path / "llm" / "config.json")
    for changed, is_same in (
        ({}, True),
        ({"transformers_version": "99"}, True),
        ({"rms_norm_eps": 0.05}, False),
    ):
        (tmp_path / "llm" / "config.json").write_text(json.dumps(content | changed))
        assert (settings_fingerprint(moved.model) == settings_fingerprint(config.model)) == is_same


# ---- records that were torn


def test_a_record_that_lost_its_end_keeps_its_whole_lines(config, logged):
    folder = make_run(config)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[: 3 * len(line(0)) + 5])
    go_on(config)
    assert steps_of(folder) == [0, 1, 2]
    assert "shorter than when the checkpoint was saved" in " ".join(logged)


def test_a_record_that_was_edited_is_not_cut_in_the_middle_of_a_line(config):
    folder = make_run(config)
    edited = (folder / "metrics.jsonl").read_text().replace(": ", ":", 1)
    (folder / "metrics.jsonl").write_text(edited)
    with pytest.raises(
        UserError, match=r"metrics\.jsonl was changed after the checkpoint was saved"
    ):
        go_on(config)
    assert (folder / "metrics.jsonl").read_text() == edited


def test_the_tail_that_is_cut_off_is_kept_line_by_line(config):
    folder = make_run(config)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[" * 200_000 + '\n{"kind": "tra')
    go_on(config)
    kept = [json.loads(text) for text in (folder / "discarded.jsonl").read_text().splitlines()]
    records = [json.loads(line(6)), json.loads(line(7)), "[" * 200_000, '{"kind": "tra']
    assert [entry["record"] for entry in kept] == records
    assert {entry["back_to_step"] for entry in kept} == {6}


# ---- file systems and names


def test_overwriting_a_run_behind_a_link_leaves_the_link(config, tmp_path):
    folder = make_run(config)
    folder.rename(tmp_path / "big-disk")
    folder.symlink_to(tmp_path / "big-disk")
    anew = config.changed({"run.overwrite": True})
    assert find_start(anew) is None
    prepare_folder(anew, make_plan(anew), goes_on=False)
    assert not (tmp_path / "big-disk" / "checkpoints").exists()
    assert (folder / "config.yaml").is_file()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
