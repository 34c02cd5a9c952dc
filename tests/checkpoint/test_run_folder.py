from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from json_files import read_lines

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import NEVER, find_start
from mmtrain.checkpoint.run_folder import locked, prepare_folder, run_folder
from mmtrain.config.load import load_config
from mmtrain.plan.planner import make_plan


def prepare(tiny: Path, runs: Path, *overrides: str, resume: str = "auto") -> Path:
    """What the launcher does before ranks start, for a run without checkpoints; the run's
    folder.
    """
    config = load_config(tiny / "config.yaml", [f"run.dir={runs}", *overrides])
    assert find_start(config, resume) is None
    prepare_folder(config, make_plan(config), goes_on=False)
    return run_folder(config)


def test_a_new_folder_holds_the_whole_config_and_the_plan(tiny, tmp_path):
    folder = prepare(tiny, tmp_path, "optimizer.lr=0.25")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "plan.json"]
    assert load_config(folder / "config.yaml") == load_config(
        tiny / "config.yaml", [f"run.dir={tmp_path}", "optimizer.lr=0.25"]
    )
    # a default
    assert yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("overrides", "resume", "allowed", "error"),
    [
        ([], NEVER, [], r"metrics\.jsonl.*run\.overwrite=true"),
        ([], "alwys", [], "alwys: no such folder"),
        (
            ["run.overwrite=true"],
            "somewhere",
            [],
            r"would delete .*Leave it out to use --resume somewhere",
        ),
        (
            [],
            "auto",
            ["optimizer", "optimiser.lr"],
            r"optimiser\.lr: not a key .*the nearest is optimizer\.lr",
        ),
    ],
)
def test_options_that_cannot_be_followed_are_refused_and_the_run_is_kept(
    tiny, tmp_path, overrides, resume, allowed, error
):
    folder = prepare(tiny, tmp_path, resume=NEVER)
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=error):
        find_start(
            load_config(tiny / "config.yaml", [f"run.dir={tmp_path}", *overrides]), resume, allowed
        )
    assert (folder / "metrics.jsonl").read_text() == "{}\n"


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_and_its_records_are_kept_aside(
    tiny, tmp_path
):
    folder = prepare(tiny, tmp_path)
    for name in ("metrics.jsonl", "samples.jsonl", "quarantine.jsonl"):
        (folder / name).write_text('{"step": 0}\n{"step": 1}\n{"step"')
    (folder / "checkpoints" / ".step-00000003.0123abcd.tmp").mkdir(parents=True)
    prepare(tiny, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checkpoints", "config.yaml", "discarded.jsonl", "plan.json")
    ]
    assert list((folder / "checkpoints").iterdir()) == []
    lines = read_lines(folder / "discarded.jsonl")
    assert [line["record"] for line in lines[:3]] == [{"step": 0}, {"step": 1}, '{"step"']
    assert [(line["file"], line["back_to_step"]) for line in lines[::3]] == [
        *(("metrics.jsonl", 0), ("samples.jsonl", 0), ("quarantine.jsonl", 0))
    ]


def test_overwrite_deletes_an_earlier_run(tiny, tmp_path):
    folder = prepare(tiny, tmp_path)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "file").write_text("old")
    prepare(tiny, tmp_path, "run.overwrite=true")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "plan.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("overrides", [(), ("run.overwrite=true",)])
@pytest.mark.parametrize("name", ["thesis.tmp", "config.yaml"])
def test_a_folder_that_holds_a_file_of_somebody_else_stays(tiny, tmp_path, name, overrides):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / name).write_text("years of work")
    with pytest.raises(
        UserError, match=rf"holds {name}, but no .*plan\.json: it is not a run's folder"
    ):
        prepare(tiny, tmp_path, *overrides)
    assert (tmp_path / "tiny" / name).read_text() == "years of work"


def test_what_a_start_that_failed_at_once_left_is_replaced(tiny, tmp_path):
    folder = prepare(tiny, tmp_path)
    for file in folder.iterdir():
        file.unlink()
    for name in (
        "log.txt",
        "log-node1.txt",
        ".config.yaml.0123abcd.tmp",
        ".plan.json.0123abcd.tmp",
    ):
        (folder / name).write_text("from the failed start")
    prepare(tiny, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "plan.json"]


def test_a_folder_is_claimed_by_one_run_at_a_time_and_a_refused_start_leaves_nothing(tmp_path):
    folder = tmp_path / "runs" / "name"
    with locked(folder):
        with pytest.raises(UserError, match="in use by a run that is still going"), locked(folder):
            pass
        with locked(tmp_path / "runs" / "other"):
            pass
    with locked(folder):
        pass
    with pytest.raises(UserError, match="refused"), locked(folder):
        raise UserError("refused")
    assert not list(tmp_path.iterdir())


def test_a_home_folder_is_meant_by_a_tilde(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        run_folder(load_config(tiny / "config.yaml", ["run.dir=~/runs"]))
        == tmp_path / "runs" / "tiny"
    )
