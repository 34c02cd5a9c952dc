"""Calibration: what is measured, how it is solved for what the planner asks, and the file that
plans find.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks
from scenes import calibrate, join

from mmtrain.calibration.calibrate import (
    ENCODE,
    WINDOW,
    find_window,
    mean_of_ranks,
    recomputing,
    solve_layers,
    solve_messages,
    table,
)
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.engine.single_stage import expected_batch
from mmtrain.facts.models import models_of
from mmtrain.launch import main as launch
from mmtrain.plan import calibration as planned
from mmtrain.plan.calibration import (
    Calibration,
    LayerMeasures,
    MessageSeconds,
    cpu_device,
    find_calibration,
)
from mmtrain.plan.costs import LayerKind, run_costs
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan

OF_TWO = ("parallel.pipeline=2", "parallel.threads_per_rank=1")


def be_rank(folder: Path, config: RunConfig) -> None:
    join()
    calibrate(folder, config)


@pytest.fixture(scope="module")
def calibrated(tiny, tmp_path_factory) -> RunConfig:
    """The tiny run on two ranks, calibrated by them."""
    config, folder = (
        load_config(tiny / "config.yaml", OF_TWO),
        tmp_path_factory.mktemp("calibrated"),
    )
    run_ranks(2, be_rank, folder, config)
    return config.changed({"parallel.calibration": str(folder / "calibration.json")})


def test_a_calibration_is_found_again_and_holds_every_kind_of_layer(calibrated):
    config, models = calibrated, models_of(calibrated)
    found = find_calibration(config, models, cpu_device(config.parallel))
    costs = run_costs(config, models)
    assert found.layers.keys() == {kind.name for kind in costs.kinds}
    layer = found.layers[costs.layers[1].kind]
    assert (
        0 < layer.forward_seconds < 10 and 0 < layer.backward_seconds <= layer.recomputing_seconds
    )
    with_measures, _ = planned.calibrated(costs, found, 1, planned.CPU)
    assert with_measures == costs, "memory is measured on GPUs alone"
    assert (
        found.layers["encoder"].forward_seconds > 0 and found.layers["front"].backward_seconds > 0
    )
    assert found.end_seconds > 0 and found.matmul_flops_per_second > 0
    for message in (found.messages, found.features):
        assert message.send + message.receive + message.transfer > 0
    blocks = costs.encoder.blocks * found.encode_block_seconds
    assert blocks == pytest.approx(found.layers["encoder"].forward_seconds)


def test_a_plan_made_with_a_calibration_prints_seconds(calibrated):
    plan = make_plan(calibrated)
    assert plan.step_seconds > 0
    table = "\n".join(render(plan))
    assert f"calibrated on {cpu_device(calibrated.parallel).name}" in " ".join(table.split())
    assert f"step: {plan.step_seconds:,.3g} s" in table


@pytest.mark.nightly
def test_the_command_puts_it_where_plans_find_it_and_prints_the_plan(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "mmtrain.launch", tiny / "config.yaml", "--calibrate", *OF_TWO]
    ran = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=200, cwd=tiny
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    config = load_config(tiny / "config.yaml", OF_TWO)
    assert find_calibration(config, models_of(config), cpu_device(config.parallel)).layers
    assert "\n".join(render(make_plan(config))) in ran.stdout
    assert max(map(len, ran.stdout.split("matrix products")[0].splitlines())) <= 80


def test_what_was_measured_is_a_table_of_80_columns():
    layer = LayerMeasures(1.5, 2.5, 31.25, 2**31, 2**30, 2**29, 2**28, 2**27)
    names = ("front", "encoder", "decoder of full attention, input gradient", "head")
    message = MessageSeconds(1e-3, 2e-3, None)
    found = Calibration(
        None, dict.fromkeys(names, layer), 0.1, 0.1, 0.1, message, None, 0.1, 1, 1e12
    )
    lines = table(found)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "head 1,500.000 2,500.000 31,250.000 2.0 GiB 1.0 GiB 512.0 MiB" in text
    assert "message: send 1.000 ms, receive 2.000 ms, transfer assumed" in text
    assert "features was not measured" in text


@pytest.mark.parametrize("place", ["a folder", "below a file"])
def test_a_calibration_that_cannot_be_written_is_not_measured(tiny, tmp_path, capsys, place):
    (tmp_path / "file").touch()
    target = {"a folder": tmp_path, "below a file": tmp_path / "file" / "mine.json"}[place]
    assert launch([str(tiny / "config.yaml"), "--calibrate", f"parallel.calibration={target}"]) == 2
    assert f"the calibration cannot be written to {target}" in capsys.readouterr().err


def test_a_calibration_of_several_machines_is_refused(tiny, capsys):
    several = ["--nnodes", "2", "--rdzv-endpoint", "first:29500"]
    assert launch([str(tiny / "config.yaml"), "--calibrate", *several]) == 2
    assert "mmtrain calibrate measures on one machine" in capsys.readouterr().err


# ---- what is measured


def test_the_measured_micro_batch_is_the_expected_one(tiny):
    config = load_config(tiny / "config.yaml")
    models = models_of(config)
    work = run_costs(config, models).work
    batch = expected_batch(config, models)
    documents = int((batch.position_ids == 0).sum())
    whole = config.data.pack_length // work.document * config.train.packs_per_microbatch
    assert len(batch.tiles) == whole and batch.samples == whole
    assert documents in (whole, whole + config.train.packs_per_microbatch), (
        "whole documents, and padding in each pack"
    )
    assert (
        int((batch.input_ids == IMAGE_POSITION).sum()) == whole * models.layout.positions_per_tile
    )
    assert int((batch.labels != IGNORE).sum()) == pytest.approx(work.supervised, abs=whole)
    assert (batch.labels[:, work.document - 1] == IGNORE).all(), (
        "a document's last token predicts nothing"
    )


# ---- what follows from it


def kind(name: str, layer: int | None, on_rows: bool = False) -> LayerKind:
    return LayerKind(
        name, layer, name != "front", ("projector.w",) if name == "front" else (), on_rows
    )


def test_layers_calls_and_recomputation_are_told_apart():
    """Stages put together from a call of 2, layers of 10 and 20, a head of 3; a second forward
    takes 1.1 times one.
    """
    kinds = {"encoder": LayerKind("encoder", None, False, ())}
    kinds |= {
        k.name: k
        for k in (
            kind("front", None),
            kind("a", 0),
            kind("b", 1),
            kind("last", 3, True),
            kind("head", None),
        )
    }
    seconds = {ENCODE: 50.0}
    for way, factor in (("forward", 1), ("backward", 2)):
        seconds |= {
            f"front {way}": 7 * factor,
            f"head {way}": (2 + 3) * factor,
            f"last {way}": (2 + 3 + 6) * factor,
        }
        seconds |= {f"a {way}": (2 + 10) * factor, f"b {way}": (2 + 20) * factor}
        seconds[f"{WINDOW} {way}"] = (2 + 10 + 20 + 10) * factor
    seconds[f"{recomputing(WINDOW)} forward"] = 42.0
    seconds[f"{recomputing(WINDOW)} backward"] = 2 * 42.0 + 1.1 * 40

    def usage(kept: int, forward: int = 1, backward: int = 2) -> dict[str, int]:
        return {"kept": kept, "forward": forward, "backward": backward}

    of_inner_layers = {"a": usage(100), "b": usage(200), WINDOW: usage(100 + 200 + 100 + 2 * 8)}
    bytes_of = {
        ENCODE: usage(0, 9),
        "front": usage(30),
        "head": usage(5),
        "last": usage(45),
        **of_inner_layers,
    }
    of_recomputing = {"a": usage(1, 50, 300), "b": usage(2), WINDOW: usage(1 + 2 + 1 + 2 * 50)}
    bytes_of |= {recomputing(name): found for name, found in of_recomputing.items()}
    # twice the first one's
    both = mean_of_ranks([seconds, {name: 3 * value for name, value in seconds.items()}])
    layers, call = solve_layers(both, bytes_of, kinds, ("a", "b", "a"))
    assert call == pytest.approx(2 * (2 + 4) / 2)
    assert (layers["a"].forward_seconds, layers["b"].backward_seconds) == pytest.approx((20, 80))
    assert layers["a"].recomputing_seconds == pytest.approx(40 + 1.1 * 20)
    assert (layers["last"].forward_seconds, layers["head"].forward_seconds) == pytest.approx(
        (12, 6)
    )
    assert (layers["front"].forward_seconds, layers["encoder"].forward_seconds) == pytest.approx(
        (14, 100)
    )
    assert (layers["a"].kept_bytes, layers["b"].kept_bytes, layers["last"].kept_bytes) == (
        108,
        208,
        48,
    )
    assert (layers["a"].kept_bytes_recomputing, layers["a"].recomputing_working_bytes) == (51, 300)
    assert layers["a"].forward_working_bytes == 1, (
        "a forward that keeps nothing works in what another keeps"
    )


def test_messages_cost_what_they_take_from_both_sides_and_the_rest_of_the_way():
    ranks = [
        {"send message": 1.0, "echo message": 6.0},
        {"receive message": 2.0, "echo message": 8.0},
    ]
    ranks = [
        of | {name.replace("message", "features"): 3 * value for name, value in of.items()}
        for of in ranks
    ]
    assert solve_messages(mean_of_ranks(ranks), "message") == MessageSeconds(1.0, 2.0, 4.0)
    assert solve_messages(mean_of_ranks(ranks), "features") == MessageSeconds(3.0, 6.0, 12.0)
    one_way = solve_messages(
        mean_of_ranks([{"send message": 1.0}, {"receive message": 2.0}]), "message"
    )
    assert one_way.transfer is None, "no message came back to tell"
    assert solve_messages({}, "message") is None


def test_the_layers_in_a_row_are_alike_in_what_they_need():
    needs = LayerKind("b", 2, True, ())
    without = LayerKind("a", 0, False, ())
    trains = LayerKind("t", 1, False, ("llm.layers.1.w",))
    assert find_window([needs] * 9) == (0, 4)
    assert find_window([without, trains, needs, needs]) == (2, 4)
    assert find_window([without] * 4 + [trains] + [needs] * 4) == (5, 9), (
        "a row that runs backward tells more"
    )
    assert find_window([without, without, needs, needs, needs]) == (2, 5)
    assert find_window([needs]) == (0, 1)
