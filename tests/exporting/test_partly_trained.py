"""Runs that trained a part of their projector, or none of it: exports hold all of it, as the run
computed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from json_files import read_json
from rank_runs import train
from safetensors.torch import load_file, save_file
from untrained_runs import config_of, export, make_checkpoint, run_export, weights

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import STATE, StepFolder, find, new_step_folder
from mmtrain.facts.models import models_of
from mmtrain.model.trained.projector import make_projector, read_projector
from mmtrain.model.weights.projector_files import refuse_unfit_init_from

FIRST, SECOND = ("linear_1.weight", "linear_1.bias"), ("linear_2.weight", "linear_2.bias")


def trained_by(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(find(folder).tensors_file)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory) -> dict[str, Path]:
    """Each begins with the projector of the one before: all of it trained, its second layer, none
    of it.
    """
    folder = tmp_path_factory.mktemp("runs")
    projector = make_projector(models_of(config_of(tiny)).connector, seed=7).state_dict()
    tensors = {f"projector.{name}": tensor for name, tensor in projector.items()}
    made = {"all": make_checkpoint(folder / "all", config_of(tiny), tensors).path.parent.parent}
    options = (f"run.dir={folder}", "train.max_steps=2", "optimizer.lr=0.01", "parallel.pipeline=1")
    for name, before, trainable in (
        ("second", "all", "projector.linear_2"),
        ("none", "second", "llm.norm"),
    ):
        start = f"model.projector.init_from={made[before]}"
        made[name] = train(
            tiny / "config.yaml",
            *options,
            f"run.name={name}",
            f"model.trainable=[{trainable}]",
            start,
        ).folder
    return made


def test_an_export_has_what_was_trained_and_what_the_run_began_with(runs, tmp_path):
    first, second = trained_by(runs["all"]), trained_by(runs["second"])
    assert second.keys() == {f"projector.{name}" for name in SECOND}
    assert not any(same(second[name], first[name]) for name in second)
    wanted = {name: second.get(name, tensor) for name, tensor in first.items()}
    for run in ("second", "none"):
        assert (
            run_export(
                runs[run], "hf", tmp_path / run, *(["--verify", "2"] if run == "none" else [])
            )
            == 0
        )
        found = weights(tmp_path / run)
        assert all(same(found[f"multi_modal_{name}"], tensor) for name, tensor in wanted.items())
    assert same(
        found["language_model.model.norm.weight"], trained_by(runs["none"])["llm.norm.weight"]
    )
    card = (tmp_path / "none" / "README.md").read_text()
    assert (
        "Trained: 1 tensor of LLM and vision encoder. "
        "The projector between the two was not trained." in card
    )
    assert run_export(runs["none"], "safetensors", tmp_path / "alone") == 0
    alone = load_file(tmp_path / "alone" / "projector.safetensors")
    assert alone.keys() == {*wanted, "llm.norm.weight"} and all(
        same(alone[name], wanted[name]) for name in wanted
    )
    assert read_json(tmp_path / "alone" / "projector.json")["trained"] == ["llm.norm.weight"]


def test_another_run_begins_with_all_of_it(runs, tiny):
    config = config_of(tiny, f"model.projector.init_from={runs['none']}")
    refuse_unfit_init_from(config, Path("elsewhere"))
    found = read_projector(str(runs["none"]), models_of(config).connector)
    first, second = trained_by(runs["all"]), trained_by(runs["second"])
    assert all(same(found[name], first[f"projector.{name}"]) for name in FIRST)
    assert all(same(found[name], second[f"projector.{name}"]) for name in SECOND)


def test_llavas_file_holds_all_of_it_where_nothing_else_was_trained(runs, tmp_path, capsys):
    assert run_export(runs["second"], "llava", tmp_path / "llava") == 0
    content = torch.load(tmp_path / "llava" / "mm_projector.bin", weights_only=True)
    assert same(
        content["model.mm_projector.0.weight"], trained_by(runs["all"])["projector.linear_1.weight"]
    )
    assert run_export(runs["none"], "llava", tmp_path / "other") == 2
    assert "llm.norm.weight trains too" in capsys.readouterr().err


def rewritten(checkpoint: StepFolder, target: Path, **state: object) -> StepFolder:
    """A copy of a checkpoint with another state, whole as its manifest says."""
    target.parent.mkdir(parents=True)
    with new_step_folder(target) as folder:
        for file in checkpoint.path.glob("*.safetensors"):
            shutil.copy(file, folder)
        (folder / STATE).write_text(json.dumps({**checkpoint.state, **state}))
    return StepFolder(target)


def beginning_with(start: Path, checkpoint: StepFolder, run: Path) -> StepFolder:
    """A copy of a checkpoint whose run began with the projector of `start`."""
    content = dict(checkpoint.state["config"])
    content["model"] = {**content["model"], "projector": {"init_from": str(start)}}
    return rewritten(checkpoint, run / "checkpoints" / checkpoint.path.name, config=content)


def test_a_projector_that_begins_with_itself_is_refused(runs, tiny, tmp_path):
    checkpoint = beginning_with(tmp_path / "b", find(runs["second"]), tmp_path / "a")
    beginning_with(tmp_path / "a", find(runs["second"]), tmp_path / "b")
    config = config_of(tiny, f"model.projector.init_from={tmp_path / 'b'}")
    for look in (
        lambda: refuse_unfit_init_from(config, Path("elsewhere")),
        lambda: export(checkpoint, tmp_path / "c"),
    ):
        with pytest.raises(
            UserError, match=r"its projector begins with itself. Choose another one"
        ):
            look()


def test_a_start_that_is_another_now_is_refused(runs, tiny, tmp_path):
    other = {
        f"projector.{name}": tensor
        for name, tensor in make_projector(models_of(config_of(tiny)).connector, seed=8)
        .state_dict()
        .items()
    }
    save_file(other, tmp_path / "other.safetensors")
    moved = beginning_with(tmp_path / "other.safetensors", find(runs["second"]), tmp_path / "run")
    with pytest.raises(
        UserError,
        match=r"did not train projector\.linear_1.*other\.safetensors. gives other values now",
    ):
        export(moved, tmp_path / "out")
