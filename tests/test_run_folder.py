from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mmtrain.config import load_config
from mmtrain.errors import UserError
from mmtrain.plan.planner import make_plan
from mmtrain.run_folder import claimed, prepare_folder, run_folder


def prepare(tiny: Path, runs: Path, *overrides: str) -> Path:
    config = load_config(tiny / "config.yaml", [f"run.dir={runs}", *overrides])
    prepare_folder(config, make_plan(config))
    return run_folder(config)


def test_a_new_folder_holds_the_whole_config_and_the_plan(tiny, tmp_path):
    folder = prepare(tiny, tmp_path, "optimizer.lr=0.25")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "plan.json"]
    assert load_config(folder / "config.yaml") == load_config(
        tiny / "config.yaml", [f"run.dir={tmp_path}", "optimizer.lr=0.25"]
    )
    assert yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]["weight_decay"] == 0.0  # a default


def test_an_earlier_run_is_refused_and_kept(tiny, tmp_path):
    folder = prepare(tiny, tmp_path)
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl.*run\.overwrite=true"):
        prepare(tiny, tmp_path)
    assert (folder / "metrics.jsonl").exists()


def test_overwrite_deletes_an_earlier_run(tiny, tmp_path):
    folder = prepare(tiny, tmp_path)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "file").write_text("old")
    prepare(tiny, tmp_path, "run.overwrite=true")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "plan.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_overwrite_deletes_nothing_but_runs(tiny, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not the folder of a run"):
        prepare(tiny, tmp_path, "run.overwrite=true")
    assert (tmp_path / "tiny" / "thesis.tex").exists()


def test_what_a_start_that_failed_at_once_left_is_replaced(tiny, tmp_path):
    folder = prepare(tiny, tmp_path)
    for name in ("log.txt", "log-node1.txt"):
        (folder / name).write_text("from the failed start")
    prepare(tiny, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "plan.json"]


def test_a_folder_is_claimed_by_one_run_at_a_time(tmp_path):
    folder = tmp_path / "runs" / "name"
    with claimed(folder):
        with pytest.raises(UserError, match="in use by a run that is still going"), claimed(folder):
            pass
        with claimed(tmp_path / "runs" / "other"):
            pass
    with claimed(folder):
        pass


def test_a_home_folder_is_meant_by_a_tilde(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder(load_config(tiny / "config.yaml", ["run.dir=~/runs"])) == tmp_path / "runs" / "tiny"
