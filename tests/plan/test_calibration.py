"""Calibrations: kept, found, refused where they do not fit, and what a plan makes of them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from json_files import read_json
from made_up_costs import made_up_calibration, made_up_measures
from sweeps import sweep

from mmtrain.base.errors import UserError
from mmtrain.config.keys import ELEMENT, EntersCalibration, all_fields, marked, section_of
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.plan.calibration import (
    CPU,
    Calibration,
    Device,
    Key,
    MessageSeconds,
    cached_file,
    calibrated,
    calibration_key,
    find_calibration,
    load_calibration,
)
from mmtrain.plan.costs import run_costs
from mmtrain.plan.plan import Plan, render
from mmtrain.plan.planner import make_plan
from mmtrain.plan.simulate import MessageCost

pytestmark = pytest.mark.slow

DEVICE = Device("Abacus 9000", 4, 2)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return make_config(tmp_path)


def make_config(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "config.yaml"
    file.write_text(
        """
run: {name: test}
model:
  llm: {path: lmsys/vicuna-7b-v1.5}
  vision: {name: vit_large_patch14_clip_quickgelu_336.openai}
parallel: {pipeline: 4, stages_per_rank: 1, encoder_ranks: 0}
data: {shards: none.tar}
train: {packs_per_step: 16, max_steps: 1}
"""
    )
    return load_config(file, overrides)


def plan_of(config: RunConfig, device: Device) -> Plan:
    return make_plan(config, device=device)


def made_up(config: RunConfig) -> Calibration:
    return made_up_calibration(config, DEVICE)


def test_a_calibration_that_was_saved_is_found_and_read_back(config, cache) -> None:
    calibration = made_up(config)
    file = calibration.save()
    assert file == cached_file(calibration.key) and cache in file.parents
    assert load_calibration(file) == calibration
    assert find_calibration(config, models_of(config), DEVICE) == calibration
    assert [x.name for x in file.parent.iterdir()] == [file.name], "nothing partial is left"


@pytest.mark.parametrize(
    "override",
    sweep(
        (
            "data.pack_length=1024",
            "train.packs_per_microbatch=2",
            "data.expected_text_tokens=81",
            "data.expected_supervised_fraction=0.2",
            "model.trainable=[projector, llm.layers.31]",
            "model.llm.path=lmsys/vicuna-13b-v1.5",
            "model.llm.dtype=float32",
            "model.vision.select_layer=-1",
        ),
        (
            "data.pack_length=1024",
            "model.trainable=[projector, llm.layers.31]",
            "model.llm.dtype=float32",
        ),
    ),
)
def test_a_calibration_is_for_one_run_and_one_device(tmp_path, cache, override) -> None:
    config, changed = make_config(tmp_path), make_config(tmp_path, override)
    made_up(config).save()
    assert find_calibration(changed, models_of(changed), DEVICE) is None
    for device in (replace(DEVICE, name="x"), replace(DEVICE, ranks=2), replace(DEVICE, threads=1)):
        assert find_calibration(config, models_of(config), device) is None


def test_a_calibration_does_not_depend_on_the_layout(tmp_path, cache) -> None:
    calibration = made_up(make_config(tmp_path))
    calibration.save()
    for override in (
        "parallel.boundaries=[8, 16, 24]",
        "train.packs_per_step=32",
        "parallel.stages_per_rank=2",
    ):
        changed = make_config(tmp_path, override)
        assert find_calibration(changed, models_of(changed), DEVICE) == calibration


def test_a_file_for_another_run_is_refused_with_all_that_differs(tmp_path, cache) -> None:
    config = make_config(tmp_path)
    file = made_up(config).save(tmp_path / "measured.json")
    changed = make_config(tmp_path, f"parallel.calibration={file}", "data.pack_length=1024")
    with pytest.raises(UserError) as error:
        plan_of(changed, device=replace(DEVICE, threads=1))
    message = str(error.value)
    assert f"{file} is not for this run" in message and "parallel.calibration=null" in message
    assert "pack_length: measured for 2048, but this run has 1024" in message
    assert "threads: measured for 2, but this run has 1" in message and "trainable" not in message
    named = make_config(tmp_path, f"parallel.calibration={file}")
    assert plan_of(named, device=DEVICE).step_seconds is not None


@pytest.mark.parametrize("text", ["", "[1, 2]", "[" * 200_000, "{"])
def test_a_file_of_something_else_is_no_calibration(tmp_path, text) -> None:
    (tmp_path / "measured.json").write_text(text)
    with pytest.raises(
        UserError, match=r"measured\.json: not a calibration that this version of mmtrain reads"
    ):
        load_calibration(tmp_path / "measured.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("end_seconds", value) for value in (-1, float("nan"), None, "1", 10**400)),
        *(("matmul_flops_per_second", 0), ("format", 99), ("more", 1)),
        ("features", {"send": 0.1, "receive": 0.1, "transfer": 1e308}),
    ],
)
def test_a_calibration_with_a_value_that_none_has_is_refused(config, tmp_path, key, value) -> None:
    file = made_up(config).save(tmp_path / "measured.json")
    file.write_text(json.dumps(read_json(file) | {key: value}))
    with pytest.raises(
        UserError, match=r"measured\.json: not a calibration that this version of mmtrain reads"
    ):
        load_calibration(file)


def test_a_calibration_in_which_nothing_takes_time_is_refused(config, tmp_path) -> None:
    found = made_up(config)
    amounts = {"forward_seconds": 0.0, "backward_seconds": 0.0, "recomputing_seconds": 0.0}
    layers = {name: replace(layer, **amounts) for name, layer in found.layers.items()}
    file = replace(found, layers=layers, compute_seconds=0.0).save(tmp_path / "measured.json")
    with pytest.raises(UserError, match="no layer takes any time"):
        plan_of(config.changed({"parallel.calibration": str(file)}), device=DEVICE)


def test_what_cannot_be_read_in_the_cache_does_not_keep_a_run_from_being_planned(
    config, cache
) -> None:
    file = made_up(config).save()
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    assert plan_of(config, device=DEVICE).costs == "assumed"


def test_a_calibration_depends_on_the_keys_that_say_so_and_on_no_others(config) -> None:
    models, key = models_of(config), calibration_key(config, models_of(config), DEVICE)
    measured = marked(RunConfig, EntersCalibration)
    assert {path[-1] for path in measured} == {f.name for f in fields(Key)} - {
        *("device", "ranks", "threads", "models", "versions")
    }
    for path, field in all_fields(RunConfig):
        if ELEMENT not in path and section_of(field.annotation) is None:
            changed = config.changed({".".join(path): "another value"})
            through_models = path[-1] == "dtype"  # the other keys of models change `models`
            assert (calibration_key(changed, models, DEVICE) != key) == (
                path in measured or through_models
            ), path


# ---- plans


def test_a_calibrated_plan_adds_up_what_was_measured(config, cache) -> None:
    config = config.changed({"parallel.boundaries": (7, 15, 23)})
    made_up(config).save()
    assert plan_of(config, device=replace(DEVICE, name="x")).step_seconds is None
    plan = plan_of(config, device=DEVICE)
    assert plan.costs == "calibrated on Abacus 9000"
    seconds = plan.seconds
    assert seconds.encode == (4.5, 0.0, 0.0, 0.0) and seconds.end == 2.0
    assert seconds.messages == MessageCost(0.01, 0.02, 0.03)
    assert seconds.forward == (0.125 + 0.25 + 7, 8.125, 8.125, 0.125 + 8 + 0.5 + 0.5)
    assert seconds.backward == (0.125 + 0.75 + 14, 16.125, 16.125, 0.125 + 16 + 1 + 0.5)
    table = " ".join(" ".join(render(plan)).split())
    assert (
        f"step: {plan.step_seconds:,.3g} s, " in table
        and "costs: calibrated on Abacus 9000" in table
    )
    assert plan.step_seconds > 16 * (8.625 + 17.625)
    for rank, count in zip(plan.ranks, (9, 8, 8, 10), strict=True):
        inputs = 0 if rank.rank == 0 else 2048 * 4096 * 2
        assert (
            rank.activation_bytes
            > (4 - rank.rank) * (1000 * (count - 1 + (rank.rank != 0)) + inputs) - 1
        )


def test_slices_of_the_encoder_take_what_was_measured_of_stem_blocks_and_features(
    config, tmp_path
) -> None:
    """An encoder of 4 seconds, its load 0.5 and each of 23 blocks 0.125; a call takes 0.125."""
    costs = run_costs(config, models_of(config))
    _, timings = calibrated(costs, made_up(config), 1, CPU)
    assert timings.encode_of(23, first=True) == timings.encode == 4.5
    assert timings.encode_of(0, first=True) == 4.5 - 23 * 0.125
    assert timings.encode_of(4, first=False) == 5 * 0.125
    assert timings.features == MessageCost(0.04, 0.05, 0.06)
    one_way = replace(made_up(config), features=MessageSeconds(0.04, 0.05, None))
    _, timings = calibrated(costs, one_way, 1, CPU)
    assert timings.features == MessageCost(0.04, 0.05, 200e-6 + costs.encoder.hidden_bytes / 3e9)


def test_what_a_calibrations_layout_could_not_tell_is_assumed(config, tmp_path, cache) -> None:
    replace(made_up(config), messages=None, features=None).save()
    plan, assumed = (
        plan_of(config, device=DEVICE),
        plan_of(config, device=replace(DEVICE, name="x")),
    )
    assert plan.costs == "calibrated on Abacus 9000; messages assumed"
    assert plan.seconds.messages == assumed.seconds.messages != MessageCost()
    two = make_config(tmp_path, "parallel.data=2")
    assumed_two = plan_of(two, device=replace(DEVICE, name="x"))
    made_up(two).save()
    assert plan_of(two, device=DEVICE).seconds.end == 2.0 + assumed_two.seconds.end > 2.0
    replace(made_up(two), replicas=2).save()
    assert plan_of(two, device=DEVICE).seconds.end == 2.0


def test_the_last_layer_is_that_for_all_tokens_where_the_head_is_on_another_rank(
    config, tmp_path, cache
) -> None:
    made_up(config).save()
    plan = plan_of(make_config(tmp_path, "parallel.boundaries=[8, 16, 32]"), device=DEVICE)
    assert plan.seconds.forward[2:] == (0.125 + 16, 0.125 + 0.5)


def test_an_encoder_that_trains_has_its_backward_in_the_front(tmp_path, cache) -> None:
    config = make_config(tmp_path, "model.trainable=[projector, vision.blocks.22]")
    calibration = made_up(config)
    calibration = replace(
        calibration, layers={**calibration.layers, "encoder": made_up_measures(4.0, 3.0)}
    )
    costs, timings = calibrated(run_costs(config, models_of(config)), calibration, 1, CPU)
    assert timings.layers[0].backward == 3.75 and timings.encode == 4.5
    assert costs.layers[0].kept_bytes == 2000


def test_a_calibration_without_a_kind_of_layer_is_refused(config) -> None:
    calibration = made_up(config)
    layers = {name: found for name, found in calibration.layers.items() if name != "head"}
    with pytest.raises(UserError, match=r"does not have head: it was made by another version"):
        calibrated(
            run_costs(config, models_of(config)), replace(calibration, layers=layers), 1, CPU
        )


STREAMS = {
    "host": ("parallel.streamed_layers=32",),
    "peers": ("parallel.streamed_layers=32", "parallel.stream_from=peers", "parallel.data=2"),
    "nf4": ("model.llm.quantize=nf4",),
}


@pytest.mark.parametrize("source", STREAMS)
def test_a_plan_fetches_at_the_rate_that_was_measured_of_its_source(
    tmp_path, cache, source
) -> None:
    config = make_config(tmp_path, "parallel.pipeline=1", *STREAMS[source])
    layer = 202_383_360 * 2
    fetched_bytes = layer // 2 if source == "peers" else layer
    slow = fetched_bytes / 20  # 20 seconds a layer, which computes 1 and 2
    others = {name: 1.0 for name in (*STREAMS, "int8") if name != source}
    for measured in ({source: slow, **others}, others):
        calibration = replace(made_up(config), fetches=measured)
        file = calibration.save(tmp_path / "measured.json")
        plan = plan_of(config.changed({"parallel.calibration": str(file)}), device=DEVICE)
        assert ("fetches assumed" in plan.costs) == (source not in measured)
        (forward,), (backward,) = plan.seconds.forward_waits, plan.seconds.backward_waits
        if source in measured:
            assert (forward.fetches, backward.fetches) == (32, 32)
            assert (forward.each, backward.each) == pytest.approx((19, 18), rel=0.02)
        else:
            assert forward.each == backward.each == 0, "what is assumed is milliseconds"
