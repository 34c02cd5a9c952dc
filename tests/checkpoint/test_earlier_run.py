"""A run of version 0.1.0, before keys of `parallel` were renamed, goes on, is exported and answers.

earlier_run/ holds what it left: its folder as if it had been killed after the checkpoint of step 2 of 4, with the
records of all four steps, and its shard of 12 of the demo's samples.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from rank_runs import train

import mmtrain
from mmtrain import launch
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.choose import find_start, is_complete
from mmtrain.config.load import load_config

EARLIER = Path(__file__).parent / "earlier_run"


RENAMED = {
    "chunks_per_rank": "stages_per_rank",
    "encoder_run_ahead": "encoder_prefetch",
    "max_images_per_pack": "max_tiles_per_pack",
}


@pytest.fixture
def earlier(tmp_path, monkeypatch) -> Path:
    """A copy of the folder, in which commands run, as the run's did."""
    monkeypatch.chdir(shutil.copytree(EARLIER, tmp_path / "earlier"))
    return Path.cwd()


@pytest.fixture
def renamed(earlier) -> Path:
    """The run's configuration with the keys' new names."""
    text = (earlier / "run" / "config.yaml").read_text()
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    (earlier / "renamed.yaml").write_text(text)
    return Path("renamed.yaml")


def losses(folder: Path) -> dict[int, float]:
    """Loss by step, in nats per supervised token."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def test_an_old_key_is_refused_with_its_new_name_and_with_that_the_run_goes_on_as_it_would_have(
    earlier, renamed, capsys
):
    config = earlier / "run" / "config.yaml"
    assert launch.main([str(config)]) == 2
    said = capsys.readouterr().err
    assert "parallel.chunks_per_rank: the key is called parallel.stages_per_rank now; rename it" in said
    assert "parallel.encoder_run_ahead: the key is called parallel.encoder_prefetch now; rename it" in said
    assert "data.max_images_per_pack: the key is called data.max_tiles_per_pack now; rename it" in said

    undisturbed = losses(EARLIER / "run")
    printed = train(renamed, "run.name=run").printed
    assert "step 3/4" in printed and "step 2/4" not in printed
    assert losses(earlier / "run") == pytest.approx(undisturbed, rel=1e-5)
    assert len(undisturbed) == 4
    assert "data.ignore_exif: stays true, as" in printed and "--allow-change data.ignore_exif" in printed
    assert "ignore_exif: true" in config.read_text() and "\n  format: llava\n" in config.read_text()
    as_at_first = load_config(renamed, ["run.name=run"])
    assert is_complete(earlier / "run", find_start(as_at_first).checkpoint, as_at_first)
    again = train(renamed, "run.name=run", "train.max_steps=5", allow=["train.max_steps"])
    assert "data.ignore_exif: stays true" in again.printed
    assert again.checkpoint(5).state["config"]["data"]["ignore_exif"] is True


def test_its_pictures_are_turned_from_here_on_where_that_is_allowed(renamed):
    config = load_config(renamed, ["run.name=run", "data.format=llava"])
    kept, allowed = find_start(config), find_start(config, allowed=["data.ignore_exif"])
    assert kept.continued(config) == config.changed({"data.ignore_exif": True})
    assert allowed.continued(config) == config and not config.data.ignore_exif


def test_it_is_read_exported_and_asked(earlier):
    run = mmtrain.load_run("run")
    assert (run.config.parallel.stages_per_rank, run.config.parallel.encoder_prefetch) == (2, 1)
    (checkpoint,) = run.checkpoints
    assert checkpoint.config.parallel == run.config.parallel
    assert checkpoint.config.data.ignore_exif and run.config.data.ignore_exif
    exported = mmtrain.export(run, "hf", "exported")
    picture = earlier / "picture.png"
    with tarfile.open(EARLIER / "samples.tar") as tar:
        picture.write_bytes(tar.extractfile(next(m for m in tar if m.name.endswith(".png"))).read())
    assert mmtrain.generate(exported, picture, "Which digit is at the top left?").strip()


def test_a_run_whose_configuration_nothing_knows_is_refused_by_name(earlier):
    config = earlier / "run" / "config.yaml"
    config.write_text(config.read_text().replace("chunks_per_rank", "stages_for_each"))
    with pytest.raises(UserError, match=r"parallel\.stages_for_each: unknown key"):
        _ = mmtrain.load_run("run").config
