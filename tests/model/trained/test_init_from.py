"""A run begins with the projector that another has trained: every format that holds one, and what
is refused.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scenes import make_config, save_parts, stock_llava
from step_states import state_of
from torch import nn

from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import new_step_folder, step_path
from mmtrain.config.model import ProjectorSection
from mmtrain.connectors import Operation
from mmtrain.engine.stages import trains_whole_projector
from mmtrain.facts.models import models_of
from mmtrain.facts.projector import connector
from mmtrain.model.stage import build_stage
from mmtrain.model.trained.projector import make_projector, read_projector
from mmtrain.model.weights.projector_files import find_projector, refuse_unfit_init_from
from mmtrain.plan.planner import make_plan

VISION, LLM = 12, 20
MLP = connector(ProjectorSection(type="mlp2x_gelu"), 32, 64)
Tensors = dict[str, torch.Tensor]


def small(kind: str) -> tuple[Operation, ...]:
    return connector(ProjectorSection(type=kind), VISION, LLM)


def trained(kind: str = "mlp2x_gelu", seed: int = 5) -> nn.Module:
    return make_projector(small(kind), seed)


def named(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def llava_module(projector: nn.Module) -> nn.Module:
    """The same projector as LLaVA builds it."""
    if not hasattr(projector, "linear_2"):
        return projector.linear_1
    return nn.Sequential(projector.linear_1, nn.GELU(), projector.linear_2)


def save_step(run: Path, tensors: Tensors, step: int = 20) -> Path:
    target = step_path(run, step)
    run.mkdir(parents=True, exist_ok=True)
    with new_step_folder(target) as folder:
        save_file(tensors, folder / "projector.safetensors")
        save_file({}, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(state_of(step)))
    return target


def equal(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], tensor) for name, tensor in theirs.items()
    )


def read(path: Path | str, kind: str = "mlp2x_gelu") -> Tensors:
    return read_projector(str(path), small(kind))


def refusal(path: Path | str) -> str:
    with pytest.raises(UserError) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ---- every format gives the tensors that were trained


@pytest.mark.parametrize("kind", ["mlp2x_gelu", "linear"])
@pytest.mark.parametrize("prefix", ["model.", "", "base_model.model.model."])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_llavas_mm_projector_bin_gives_the_function_that_llava_has_trained(
    tmp_path, kind, prefix, legacy
):
    stock = llava_module(trained(kind))
    # LLaVA adds them with mm_use_im_start_end
    others = {"model.embed_tokens.weight": torch.zeros(3, LLM)}
    # half, as LLaVA saves it
    tensors = named(f"{prefix}mm_projector.", stock.half().state_dict()) | others
    torch.save(tensors, tmp_path / "mm_projector.bin", _use_new_zipfile_serialization=not legacy)
    features = torch.randn(2, 3, VISION, generator=torch.Generator().manual_seed(1))
    for path in (tmp_path / "mm_projector.bin", tmp_path):
        ours = trained(kind, seed=0)
        ours.load_state_dict(read(path, kind))
        assert torch.equal(ours(features), stock.float()(features))


def test_a_run_gives_its_newest_whole_checkpoint_and_a_step_folder_itself(tmp_path, logged):
    by_step = {step: trained(seed=step).state_dict() for step in (10, 20, 30)}
    folders = {}
    for step, tensors in by_step.items():
        folders[step] = save_step(
            tmp_path, named("projector.", tensors) | {"llm.norm.weight": torch.ones(LLM)}, step
        )
    assert equal(read(tmp_path), by_step[30])
    assert equal(read(folders[10]), by_step[10])
    assert equal(read(folders[10] / "projector.safetensors"), by_step[10])
    flip_last_byte(folders[30] / "projector.safetensors")
    assert equal(read(tmp_path), by_step[20])
    assert "step-00000030: projector.safetensors is damaged" in logged[0]


@pytest.mark.parametrize(
    "prefix", ["projector.", "multi_modal_projector.", "model.multi_modal_projector."]
)
def test_safetensors_are_read_by_every_name_that_a_projector_has(tmp_path, prefix):
    expected = trained().state_dict()
    save_file(
        named(prefix, expected) | {"model.norm.weight": torch.ones(LLM)},
        tmp_path / "aligned.safetensors",
    )
    assert equal(read(tmp_path / "aligned.safetensors"), expected)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_hugging_face_llava_folder_gives_its_projector_sharded_or_not(tmp_path, shard):
    save_parts(tmp_path)
    stock = stock_llava(tmp_path, seed=3)
    stock.save_pretrained(tmp_path / "llava", max_shard_size=shard)
    assert (tmp_path / "llava" / "model.safetensors.index.json").exists() == (shard == "20KB")
    assert equal(
        read_projector(str(tmp_path / "llava"), MLP), stock.model.multi_modal_projector.state_dict()
    )


def test_a_path_below_the_home_folder_and_a_cached_hub_id_are_found(tmp_path, monkeypatch):
    expected = trained().state_dict()
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(named("projector.", expected), tmp_path / "a.safetensors")
    assert equal(read("~/a.safetensors"), expected)
    snapshot = tmp_path / "hub" / "models--llava-hf--tiny" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    save_file(named("multi_modal_projector.", expected), snapshot / "model.safetensors")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert equal(read("llava-hf/tiny"), expected)


# ---- a run that begins with one


def test_stage_0_begins_with_the_given_projector_in_float32_and_all_else_is_unchanged(tmp_path):
    save_parts(tmp_path)
    expected = make_projector(MLP, seed=9).state_dict()
    save_file(named("projector.", expected), tmp_path / "start.safetensors")
    values = {"parallel__pipeline": 2, "model__llm__dtype": "bfloat16"}
    random_start = make_config(tmp_path, **values)
    given_start = make_config(
        tmp_path, **values, model__projector__init_from=str(tmp_path / "start.safetensors")
    )
    front, back = (rank.stages[0] for rank in make_plan(given_start).ranks)
    given = dict(build_stage(given_start, front).global_parameters())
    drawn = dict(build_stage(random_start, front).global_parameters())
    assert equal({name: given[f"projector.{name}"] for name in expected}, expected)
    assert all(given[f"projector.{name}"].requires_grad for name in expected)
    assert {given[f"projector.{name}"].dtype for name in expected} == {torch.float32}
    assert not equal({name: drawn[f"projector.{name}"] for name in expected}, expected)
    assert all(
        torch.equal(given[name], drawn[name]) for name in drawn if not name.startswith("projector.")
    )
    (tmp_path / "start.safetensors").unlink()
    build_stage(given_start, back)  # the other stages do not ask for it


def test_before_a_rank_starts_a_projector_that_does_not_fit_is_refused(tmp_path):
    save_parts(tmp_path)
    start = tmp_path / "start.safetensors"

    def check(**values) -> None:
        config = make_config(tmp_path, model__projector__init_from=str(start), **values)
        refuse_unfit_init_from(config, tmp_path / "runs" / "parity")

    with pytest.raises(UserError, match=r"init_from: .*start\.safetensors: no such file"):
        check()
    wider = connector(ProjectorSection(), 48, 64)
    for operations, refused in (
        (MLP, None),
        (wider, r"\(64, 48\), but needs \(64, 32\) for this run's encoder"),
    ):
        save_file(named("projector.", make_projector(operations, seed=9).state_dict()), start)
        with pytest.raises(UserError, match=refused) if refused else contextlib.nullcontext():
            check()
    with pytest.raises(UserError, match=r"Set model\.projector\.type=mlp2x_gelu"):
        check(model__projector__type="linear")


def test_a_projector_of_squares_begins_with_a_drawn_newline_and_one_of_anyres_with_its_own(
    tmp_path, logged
):
    save_parts(tmp_path)
    squares = make_projector(MLP, seed=9).state_dict()
    lines = make_projector(connector(ProjectorSection(), 32, 64, newline=True), seed=8).state_dict()
    save_file(named("projector.", squares), tmp_path / "squares.safetensors")
    save_file(named("projector.", lines), tmp_path / "lines.safetensors")
    for name, projector in (("squares", squares), ("lines", lines)):
        as_llava = {
            "linear_1": "mm_projector.0",
            "linear_2": "mm_projector.2",
            "image_newline": "image_newline",
        }
        parts = {local: local.partition(".") for local in projector}
        in_llava = {
            "".join(("model.", as_llava[a], b, c)): projector[local]
            for local, (a, b, c) in parts.items()
        }
        torch.save(in_llava, tmp_path / f"{name}.bin")

    def begun(file: str, layout: str) -> Tensors:
        vision = {"name": str(tmp_path / "vision"), "layout": layout}
        config = make_config(
            tmp_path, model__projector__init_from=str(tmp_path / file), model__vision=vision
        )
        logged.clear()
        refuse_unfit_init_from(config, tmp_path / "runs" / "parity")
        stage = build_stage(config, make_plan(config).ranks[0].stages[0])
        return stage.projector.state_dict(keep_vars=True)

    for kind in ("safetensors", "bin"):
        projector = begun(f"lines.{kind}", "anyres")
        assert equal(projector, lines) and projector["image_newline"].requires_grad and not logged
        drawn = begun(f"squares.{kind}", "anyres_max_9").pop("image_newline")
        source = tmp_path / f"squares.{kind}"
        assert logged == [
            f"model.projector.init_from: {source} holds no image_newline; "
            "it is initialised at random, by run.seed"
        ]
        assert (
            drawn.requires_grad
            and not torch.equal(drawn, lines["image_newline"])
            and 0.05 < drawn.std() < 0.25
        )
        assert equal(begun(f"squares.{kind}", "square"), squares) and not logged
        with pytest.raises(
            UserError, match=r"holds image_newline, .* Set that layout, or choose another file"
        ):
            begun(f"lines.{kind}", "square")


def test_a_run_that_would_delete_its_start_is_refused(tmp_path):
    save_parts(tmp_path)
    run = tmp_path / "runs" / "parity"
    save_step(run, named("projector.", make_projector(MLP, seed=9).state_dict()))
    config = make_config(tmp_path, run__overwrite=True, model__projector__init_from=str(run))
    with pytest.raises(UserError, match=r"run\.overwrite=true deletes before it is read"):
        refuse_unfit_init_from(config, run)
    refuse_unfit_init_from(config, tmp_path / "runs" / "another")


# ---- what is refused, and what is said of it


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_though_its_tensors_can_be_read(tmp_path):
    folder = save_step(tmp_path, named("projector.", trained().state_dict()))
    flip_last_byte(folder / "projector.safetensors")
    load_file(folder / "projector.safetensors")
    for path in (folder, folder / "projector.safetensors"):
        assert "projector.safetensors is damaged" in refusal(path)
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole"):
        find_projector(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("linear_2.bias"), "linear_2.bias missing"),
        (lambda t: t.update({"linear_3.weight": torch.ones(1)}), "linear_3.weight unknown"),
        (
            lambda t: t.update({"linear_1.weight": torch.ones(LLM, VISION + 1)}),
            "but needs (20, 12)",
        ),
        (
            lambda t: t.update({"linear_1.bias": torch.ones(LLM, 1)}),
            "linear_1.bias has shape (20, 1)",
        ),
        (
            lambda t: t.update({"linear_1.bias": torch.full((LLM,), torch.nan)}),
            "linear_1.bias holds NaN",
        ),
        (
            lambda t: t.update({"linear_1.bias": torch.full((LLM,), 1e300, dtype=torch.float64)}),
            "linear_1.bias holds NaN or inf",
        ),
        (
            lambda t: t.update({"linear_1.bias": torch.ones(LLM, dtype=torch.int8)}),
            "linear_1.bias is stored as int8",
        ),
        (
            lambda t: (t.pop("linear_2.weight"), t.pop("linear_2.bias")),
            "holds a linear projector. Set model.projector.type=linear",
        ),
    ],
)
def test_other_tensors_than_those_of_the_projector_are_refused_by_name(tmp_path, change, message):
    tensors = trained().state_dict()
    change(tensors)
    save_file(named("projector.", tensors), tmp_path / "start.safetensors")
    assert message in refusal(tmp_path / "start.safetensors")


def test_so_are_those_of_an_mm_projector_bin_and_two_projectors_in_one_file(tmp_path):
    tensors = llava_module(trained()).state_dict()
    tensors["4.weight"] = tensors.pop("2.weight")
    torch.save(named("model.mm_projector.", tensors), tmp_path / "mm_projector.bin")
    assert "linear_2.weight missing; 4.weight unknown" in refusal(tmp_path)
    tensors = trained().state_dict()
    other = trained(seed=6).state_dict()
    save_file(
        named("projector.", tensors) | named("multi_modal_projector.", other),
        tmp_path / "two.safetensors",
    )
    assert "two tensors for one parameter" in refusal(tmp_path / "two.safetensors")


def test_a_projector_with_another_function_between_the_same_tensors_is_refused(tmp_path):
    save_file(
        named("multi_modal_projector.", trained().state_dict()), tmp_path / "model.safetensors"
    )
    for setting, value, ours in (
        ("projector_hidden_act", "relu", "gelu"),
        ("adapter_layer_norm_eps", 0.1, 1e-06),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", setting: value}))
        assert f"has {setting} {value}, but this run has {ours}" in refusal(tmp_path)


def test_what_holds_no_projector_is_refused_with_what_is_needed(tmp_path, tiny):
    needed = "Name a run or checkpoint of mmtrain"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").write_text("nothing")
    assert "holds no projector (read.me)" in refusal(tmp_path / "notes")
    assert "no such file or folder" in refusal(tmp_path / "missing")
    assert "holds no tensor of a projector. " + needed in refusal(tiny / "llm")
    shutil.copy(tiny / "config.yaml", tmp_path / "config.yaml")
    assert "neither .safetensors nor .bin" in refusal(tmp_path / "config.yaml")
    torch.save({"model.embed_tokens.weight": torch.ones(2)}, tmp_path / "other.bin")
    assert "no tensor of a projector" in refusal(tmp_path / "other.bin")
    save_file({"llm.norm.weight": torch.ones(2)}, tmp_path / "projector.safetensors")
    assert "no tensor of a projector" in refusal(tmp_path)
    torch.save({"model.x.weight": torch.ones(2)}, tmp_path / "notes" / "pytorch_model.bin")
    assert "Convert them once: mmtrain convert" in refusal(tmp_path / "notes")


@pytest.mark.parametrize(
    ("trainable", "needed"),
    [(["projector"], False), (["projector.linear_2"], True), (["llm.layers.3"], True)],
)
def test_a_run_that_goes_on_needs_its_start_for_what_its_checkpoints_do_not_hold(
    tmp_path, trainable, needed
):
    config = make_config(
        tmp_path, model__trainable=tuple(trainable), model__projector__init_from="start.safetensors"
    )
    assert trains_whole_projector(models_of(config)) is not needed
