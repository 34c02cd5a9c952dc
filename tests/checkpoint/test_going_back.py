"""From which checkpoint a run goes on, and what becomes of everything after it; decided before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from untrained_runs import make_checkpoint

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.checkpoint import step_folder
from mmtrain.checkpoint.choose import ResumePoint, find_start
from mmtrain.checkpoint.run_folder import describe_run, go_back, locked, prepare_folder, run_folder
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
        make_checkpoint(folder, config, step=step, files={"metrics.jsonl": step * len(line(0))}, **state)
    return folder


def go_on(config: RunConfig, path: Path | None = None) -> ResumePoint:
    """What the launcher and then rank 0 do."""
    start = find_start(config, "auto" if path is None else str(path))
    prepare_folder(config, make_plan(config), goes_on=start is not None)
    begin_from(config, start)
    return start


def begin_from(config: RunConfig, start: ResumePoint) -> None:
    if start.is_own:
        go_back(run_folder(config), start.checkpoint)
    describe_run(run_folder(config), config, make_plan(config))


def steps_of(folder: Path) -> list[int]:
    return [json.loads(text)["step"] for text in (folder / "metrics.jsonl").read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ---- which one is meant


@pytest.mark.parametrize("how", ["plain", "relative", "from within", "link to it", "link to the run", "link to all"])
def test_a_checkpoint_of_the_run_is_known_as_its_own_whatever_the_path(config, monkeypatch, tmp_path, how):
    folder = make_run(config)
    path = folder / "checkpoints" / "step-00000004"
    if how == "relative":
        monkeypatch.chdir(tmp_path)
        path = path.relative_to(tmp_path)
    elif how == "from within":
        monkeypatch.chdir(path.parent)
        path = Path("step-00000004")
    elif how == "link to it":
        path.with_name("latest").symlink_to("step-00000004")
        path = path.with_name("latest")
    elif how == "link to the run":
        (tmp_path / "elsewhere").symlink_to(folder)
        path = tmp_path / "elsewhere" / "checkpoints" / "step-00000004"
    elif how == "link to all":
        (folder / "checkpoints").rename(tmp_path / "kept")
        (folder / "checkpoints").symlink_to(tmp_path / "kept")
    start = go_on(config, path)
    assert start.is_own and start.checkpoint.step == 4
    assert steps_of(folder) == [0, 1, 2, 3]
    assert [name for name in names(folder) if name != "latest"] == [
        *("step-00000002", "step-00000004", "step-00000006.discarded")
    ]
    assert newest(folder)[0].step == 4


@pytest.mark.parametrize("name", ["step-00000006.discarded", "step-00000006.tmp"])
def test_a_checkpoint_that_was_set_aside_or_never_finished_must_be_named_again_first(config, name):
    folder = make_run(config)
    aside = folder / "checkpoints" / name
    (folder / "checkpoints" / "step-00000006").rename(aside)
    with pytest.raises(UserError, match="name it step-00000006 again"):
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
    with pytest.raises(UserError, match="has had checkpoints"):
        find_start(config)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == LINES + 2


def test_a_run_whose_checkpoints_are_all_set_aside_is_not_begun_anew_in_silence(config):
    folder = make_run(config, steps=(2,))
    (folder / "checkpoints" / "step-00000002").rename(folder / "checkpoints" / "step-00000002.discarded-2")
    with pytest.raises(UserError, match="has had checkpoints"):
        find_start(config)


def test_a_checkpoint_of_a_later_format_is_named_as_that(config, monkeypatch):
    monkeypatch.setattr(step_folder, "FORMAT", step_folder.FORMAT + 1)
    folder = make_run(config, steps=(2,))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"manifest\.json has version 2, this mmtrain reads 1"):
        find_start(config)
    assert names(folder) == ["step-00000002"]


# ---- branches


@pytest.fixture
def other(tiny, tmp_path) -> StepFolder:
    """A checkpoint of another run."""
    config = load_config(tiny / "config.yaml", [f"run.dir={tmp_path}/runs", "run.name=other"])
    return StepFolder(make_run(config, steps=(4,), branched_from=None) / "checkpoints" / "step-00000004")


def test_a_branch_goes_on_by_itself_when_the_same_command_is_given_again(config, other):
    first = find_start(config, str(other.path))
    assert (first.is_own, first.branched_from) == (False, other.fingerprint)
    make_run(config, steps=(4, 6), branched_from=other.fingerprint)
    again = find_start(config, str(other.path))
    assert (again.is_own, again.checkpoint.step, again.branched_from) == (True, 6, other.fingerprint)
    assert find_start(config).checkpoint.step == 6


def test_a_branch_that_died_before_its_first_save_branches_again(config, other):
    folder = make_run(config, steps=())
    (folder / "metrics.jsonl").write_text("")
    (folder / "checkpoints").mkdir()
    assert find_start(config, str(other.path)).checkpoint.path == other.path


def test_a_run_does_not_become_a_branch_of_another(config, other):
    make_run(config, branched_from=None)
    with pytest.raises(UserError, match="is of another; choose a new"):
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


def test_frozen_models_with_other_settings_are_refused_though_their_weights_are_the_same(tiny, config, tmp_path):
    copy = tmp_path / "llm"
    copy.mkdir()
    for file in (tiny / "llm").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    moved = load_config(tiny / "config.yaml", [f"run.dir={tmp_path}/runs", f"model.llm.path={copy}"])
    assert settings_fingerprint(moved) == settings_fingerprint(config)
    said = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**said, "transformers_version": "99"}))
    assert settings_fingerprint(moved) == settings_fingerprint(config)
    (copy / "config.json").write_text(json.dumps({**said, "rms_norm_eps": 0.05}))
    other = settings_fingerprint(moved)
    assert other != settings_fingerprint(config)
    fingerprints = {"frozen_fingerprint": "f", "settings_fingerprint": settings_fingerprint(config)}
    saved = make_checkpoint(tmp_path / "saved", config, data={"fingerprint": "d", "counts": None}, **fingerprints)
    start = ResumePoint(saved, True, (), None)
    start.refuse_other_contents("d", "f", settings_fingerprint(config), 20)
    with pytest.raises(UserError, match=r"config\.json.*--allow-change model\.llm\.path"):
        start.refuse_other_contents("d", "f", other, 20)


# ---- records that were torn


def test_a_record_that_lost_its_end_keeps_its_whole_lines(config, logged):
    folder = make_run(config)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[: 3 * len(line(0)) + 5])
    go_back(folder, StepFolder(folder / "checkpoints" / "step-00000006"))
    assert steps_of(folder) == [0, 1, 2]
    assert "shorter than when the checkpoint was saved" in " ".join(logged)


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


def test_overwriting_a_run_behind_a_link_leaves_the_link(config, tiny, tmp_path):
    folder = make_run(config)
    folder.rename(tmp_path / "big-disk")
    folder.symlink_to(tmp_path / "big-disk")
    anew = load_config(tiny / "config.yaml", [f"run.dir={tmp_path}/runs", "run.name=mine", "run.overwrite=true"])
    assert find_start(anew) is None
    prepare_folder(anew, make_plan(anew), goes_on=False)
    assert not (tmp_path / "big-disk" / "checkpoints").exists()
    assert (folder / "config.yaml").is_file()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_folder_with_two_names_is_claimed_by_one_run_at_a_time(config, tmp_path):
    folder = make_run(config)
    (tmp_path / "elsewhere").symlink_to(folder)
    with locked(folder), pytest.raises(UserError, match="in use"), locked(tmp_path / "elsewhere"):
        pass


def test_what_an_earlier_deletion_has_left_is_not_in_the_way(tmp_path):
    target = tmp_path / "checkpoints" / "step-00000001"
    (target.with_name(".step-00000001.0123abcd.tmp") / "left").mkdir(parents=True)
    target.mkdir()
    (target / step_folder.MANIFEST).touch()
    step_folder.remove(target)
    assert list(target.parent.iterdir()) == []
