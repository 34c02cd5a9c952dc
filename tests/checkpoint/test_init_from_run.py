"""A run that begins with all that another has trained: the projector, adapters, layers of the
LLM.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from rank_runs import train
from safetensors.torch import load_file
from untrained_runs import config_of, make_checkpoint

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import refuse_unfit_init_from_run
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.model.stage import build_stage
from mmtrain.plan.planner import make_plan

LORA = ("model.lora.r=4", "model.lora.alpha=8", "model.lora.targets=[llm.layers.*.self_attn]")
TRAINED = "model.trainable=[projector, llm.layers.7.mlp, llm.layers.*.lora_*]"
MORE = "model.trainable=[projector, llm.layers.7.mlp, llm.norm, llm.layers.*.lora_*]"


@pytest.fixture(scope="module")
def before(tiny, tmp_path_factory) -> StepFolder:
    """A checkpoint of a run that trained its projector, the last layer's MLP and adapters: random,
    in float32.
    """
    config = config_of(tiny, *LORA, TRAINED)
    draw = torch.Generator().manual_seed(3)
    others = {
        p.name: torch.randn(p.shape, generator=draw) * 0.05
        for p in models_of(config).parameters
        if matches_any(p.name, config.model.trainable) and not p.name.startswith("projector.")
    }
    return make_checkpoint(tmp_path_factory.mktemp("before") / "before", config, others)


def going_on(tiny: Path, before: StepFolder, *overrides: str) -> RunConfig:
    return config_of(tiny, f"model.init_from={before.path}", *LORA, TRAINED, *overrides)


def test_every_trained_tensor_is_where_the_other_run_left_it_to_the_last_bit(
    tiny, before, tmp_path
):
    still = (
        "optimizer.lr=0",
        "train.max_steps=1",
        "model.llm.dtype=bfloat16",
        "parallel.pipeline=2",
    )
    run = train(
        tiny / "config.yaml",
        f"run.dir={tmp_path}",
        f"model.init_from={before.run}",
        *LORA,
        MORE,
        *still,
        "data.workers=0",
    )
    left, found = load_file(before.tensors_file), load_file(run.checkpoint(1).tensors_file)
    assert found.keys() - left.keys() == {"llm.norm.weight"} and left.keys() < found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in left.items())
    assert any(
        not torch.equal(tensor, tensor.bfloat16().float())
        for name, tensor in left.items()
        if "llm" in name
    )


def test_its_projector_may_stay_frozen_and_what_begins_anew_is_said(tiny, before, tmp_path, logged):
    config = going_on(tiny, before, MORE)
    refuse_unfit_init_from_run(config, tmp_path / "run")
    assert logged[-1].endswith(
        f"1 tensors that train here were not trained in {before.path} and begin as published: "
        "llm.norm.weight"
    )
    frozen = going_on(
        tiny,
        before,
        "model.trainable=[llm.layers.7.mlp, llm.layers.*.lora_*]",
        "parallel.pipeline=1",
    )
    refuse_unfit_init_from_run(frozen, tmp_path / "run")
    stage = build_stage(frozen, make_plan(frozen).ranks[0].stages[0])
    left = load_file(before.tensors_file)
    held = {name: p for name, p in stage.global_parameters() if name.startswith("projector.")}
    assert held and all(
        torch.equal(p, left[name]) and not p.requires_grad for name, p in held.items()
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("model.lora=null", "model.trainable=[projector, llm.layers.7.mlp]"),
            "lora_A.weight, which this run does not",
        ),
        (
            ("model.trainable=[projector, llm.layers.*.lora_*]",),
            "llm.layers.7.mlp.*, which stays frozen here",
        ),
        (("model.lora.r=8",), "here it has shape (8, 64): another model, or another model.lora.r"),
        (
            ("model.lora.alpha=4",),
            "with 4 they would compute something else. Set model.lora.alpha=8",
        ),
        (
            ("model.projector.init_from=null",),
            "has trained projector.*, but model.projector.init_from is null",
        ),
        (("model.init_from=nowhere",), "nowhere: neither a run nor a checkpoint of mmtrain"),
    ],
)
def test_nothing_that_was_trained_is_left_out_in_silence(tiny, before, tmp_path, overrides, said):
    with pytest.raises(UserError) as raised:
        refuse_unfit_init_from_run(going_on(tiny, before, *overrides), tmp_path / "run")
    first, _, last = said.partition("*")
    assert str(raised.value).startswith("model.init_from: ") and "\n" not in str(raised.value)
    assert first in str(raised.value) and last in str(raised.value)


def test_a_plan_refuses_what_training_could_not_begin_with(tiny, before, tmp_path, capsys):
    def planned(*overrides: str) -> tuple[int, str]:
        code = main(["plan", str(tiny / "config.yaml"), *overrides])
        return code, capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "text.safetensors").write_text("a text")
    cut = before.tensors_file.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(cut[: len(cut) // 2])
    shutil.copytree(before.path, tmp_path / before.path.name)
    (tmp_path / before.path.name / "projector.safetensors").write_bytes(
        cut[:-1] + bytes([cut[-1] ^ 1])
    )
    nonsense = {
        "projector.init_from": {
            tmp_path / "empty": "holds no projector",
            tmp_path / "notes.txt": "neither .safetensors nor",
            tmp_path / "text.safetensors": "text.safetensors",
            tmp_path / "cut.safetensors": "cut.safetensors",
            tmp_path / "run": "has no checkpoint yet",
            tmp_path / before.path.name: "projector.safetensors is damaged",
            tiny / "llm": "no tensor of a projector",
        },
        "init_from": {
            tmp_path / "empty": "neither a run nor a checkpoint of mmtrain",
            tmp_path / "notes.txt": "notes.txt",
            tmp_path / "run": "has no checkpoint yet",
            before.path: "which this run does not have",
        },
    }
    for key, paths in nonsense.items():
        for path, said in paths.items():
            code, error = planned(f"model.{key}={path}")
            assert code == 2 and said in error and str(path) in error, (key, path, error)
    code, error = planned(f"model.projector.init_from={before.path}", "model.projector.type=linear")
    assert code == 2 and "Set model.projector.type=mlp2x_gelu" in error
    assert planned(f"model.init_from={before.path}", *LORA, TRAINED) == (0, "")
    elsewhere = tmp_path / "not-here"
    later = "is not on this machine; whether it fits is checked when training starts"
    for key in nonsense:
        assert planned(f"model.{key}={elsewhere}") == (0, f"init_from: {elsewhere} {later}\n")
    both = (f"model.init_from={elsewhere}", f"model.projector.init_from={tmp_path / 'notes.txt'}")
    code, error = planned(*both)
    assert (
        code == 2
        and f"init_from: {elsewhere} {later}" in error
        and "neither .safetensors nor" in error
    )


def test_a_run_that_is_about_to_be_deleted_begins_no_other(tiny, before):
    config = going_on(tiny, before, "run.overwrite=true")
    with pytest.raises(UserError, match=r"which run\.overwrite=true deletes"):
        refuse_unfit_init_from_run(config, before.run)
