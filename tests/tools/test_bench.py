"""tools/bench: every benchmark imports, contestants do equal work or there are no numbers, and sums are right."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import bench
import bench_loader
import bench_plan
import pytest
import torch
from bench_models import (
    PADDING,
    SHAPES,
    equal_steps,
    noise_image,
    packed,
    padded,
    ragged_steps,
    random_llava,
    run_config,
    with_shared_weights,
)
from bench_race import TOLERANCES, UnequalError, Work, least_flops, race
from bench_rivals import Stock
from bench_tables import alternate, per_second, rates, ratios, spread, utilisation
from conftest import TOOLS
from ranks import run_ranks

from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.stream.images import ImageTransform
from mmtrain.engine.process_groups import join_process_group
from mmtrain.plan.planner import models_of

TINY = SHAPES["tiny"]
TRANSFORM = ImageTransform(TINY.image_size, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic", "pad", 10**6)


def test_every_benchmark_imports_and_teaches_its_options(capsys):
    for file in (TOOLS / "bench").glob("*.py"):
        importlib.import_module(file.stem)
    for command in bench.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            bench.main([command, "--help"])
        assert "examples:" in capsys.readouterr().out


def samples_of_pack(batch):
    """(ids, labels) of each document of a batch of one pack, padding left out."""
    starts = [*(batch.position_ids[0] == 0).nonzero().flatten().tolist(), batch.position_ids.shape[1]]
    for begin, end in itertools.pairwise(starts):
        ids, labels = batch.input_ids[0, begin:end].tolist(), batch.labels[0, begin:end].tolist()
        if set(ids) != {PADDING}:
            yield tuple(TINY.image_token if i == IMAGE_POSITION else i for i in ids), tuple(labels)


def samples_of_padded(batch):
    for ids, mask, labels in zip(batch.input_ids, batch.attention_mask, batch.shifted_labels, strict=True):
        length = int(mask.sum())
        assert mask[:length].all() and (labels[length - 1 :] == IGNORE).all()
        yield tuple(ids[:length].tolist()), tuple(labels[:length].tolist())


@pytest.mark.parametrize("draw", [equal_steps, ragged_steps])
def test_packs_and_padded_batches_of_a_step_hold_the_same_samples_and_images(draw):
    work = draw(TINY, 3, 2, 4)
    decode = noise_image(TINY)
    for step in work.steps:
        packs, batches = packed(step, work.pack_length, decode), padded(TINY, step, decode, TRANSFORM)
        ours = [sample for batch in packs for sample in samples_of_pack(batch)]
        theirs = [sample for batch in batches for sample in samples_of_padded(batch)]
        assert sorted(ours) == sorted(theirs) and len(set(ours)) == len(ours) >= 6
        pixels = TRANSFORM.normalise(torch.cat([batch.tiles for batch in packs]))
        one_by_one = dict(zip(theirs, torch.cat([batch.pixel_values for batch in batches]), strict=True))
        assert all(torch.equal(one_by_one[sample], image) for sample, image in zip(ours, pixels, strict=True))
        assert sum(batch.supervised for batch in batches) == sum(
            label != IGNORE for _, labels in ours for label in labels
        )


@pytest.mark.parametrize("name", ["ratios", "7b"])
def test_the_models_keep_what_costs_what_in_a_7b_model(name):
    shape = SHAPES[name]
    decoder = shape.layers * (4 * shape.width**2 + 3 * shape.width * shape.inner) * shape.sample_tokens
    encoder = (shape.vision_blocks - 1) * 12 * shape.vision_width**2 * (shape.image_tokens + 1)
    head = shape.vocabulary * shape.width * shape.sample_tokens
    assert head / decoder == pytest.approx(0.02, abs=0.002)
    assert encoder / decoder == pytest.approx(0.04, abs=0.004)
    assert shape.layers == 32, "else what is saved in the last layer would weigh more"


def test_the_least_work_is_that_counted_by_hand_for_a_sample_of_llava_7b(tmp_path):
    shape = SHAPES["7b"]
    config = run_config(
        shape,
        tmp_path,
        dtype="bfloat16",
        pack_length=656,
        microbatches=1,
        pipeline=1,
        threads=1,
        llm=shape.recorded_llm,
    )
    config = config.changed({"model.vision.name": "openai/clip-vit-large-patch14-336"})
    width, tokens, images, supervised = 4096, 656, 576, 79
    square, mlp = width**2, 3 * width * 11008
    decoder = 30 * 2 * 2 * (4 * square + mlp) * tokens
    decoder += 2 * (4 * square + mlp) * tokens + 2 * (3 * square * images + (square + mlp) * tokens)  # the first
    decoder += 2 * 2 * (2 * square * tokens + (2 * square + mlp) * supervised)  # the last
    attention = 3 * 4 * width * (31 * 656 * 657 // 2 + sum(range(577, 656)))
    head = 2 * 2 * 32000 * width * supervised
    projector = 2 * images * (2 * 1024 * width + 3 * square)
    encoder = 2 * 3 * 14 * 14 * 1024 * 576 + 23 * (2 * 12 * 1024**2 * 577 + 4 * 1024 * 577**2)
    found = least_flops(models_of(config), config.model.trainable, equal_steps(shape, 1, 1, 1).steps[0])
    assert found == pytest.approx(decoder + attention + head + projector + encoder, rel=1e-3)
    assert found / 1e12 == pytest.approx(17.4, abs=0.05)


def test_utilisation_and_rates_take_each_turns_own_step():
    found = {
        "losses": {"ours": []},
        "seconds": {"ours": [2.0, 4.0, 1.0], "products": [1.0, 2.0, 1.0]},
        "matmul_flops": 100.0,
        "steps": [{"minimal_flops": 60.0, "tokens": 6}, {"minimal_flops": 100.0, "tokens": 10}],
        "step_of_turn": [1, 0, 1],
    }
    assert utilisation(found, "ours").values == (0.5, 0.3, 1.0)
    assert utilisation(found, "ours", peak_flops=50.0).values == (1.0, 0.3, 2.0)
    assert per_second(found, "ours", "tokens").values == (5.0, 1.5, 10.0)


class Planted:
    """Stock transformers with a fault."""

    def __init__(self, model, work, fault):
        self.stock = Stock(model, "tuned", work.padded_steps())
        projector = model.model.multi_modal_projector
        if fault == "loss":
            with torch.no_grad():
                projector.linear_2.bias += 0.01
        elif fault == "gradient":
            projector.linear_1.weight.register_hook(lambda gradient: 1.01 * gradient)
        elif fault == "update":
            self.stock._optimizer.param_groups[0]["lr"] *= 10

    def step(self):
        return self.stock.step()

    @property
    def gradients(self):
        return self.stock.gradients


class FromMemory(Work):
    """Tiny samples, without an encoder's folder."""

    def __init__(self):
        self.planned = equal_steps(TINY, 2, 1, 3)
        self.padded = [padded(TINY, step, noise_image(TINY), TRANSFORM) for step in self.planned.steps]


def race_with(fault):
    join_process_group(torch.device("cpu"), 60)
    model, work = random_llava(TINY, torch.float32, torch.device("cpu"), 0), FromMemory()
    contestants = {"script": Stock(with_shared_weights(model), "script", work.padded_steps())}
    contestants["planted"] = Planted(model, work, fault)
    tolerance = replace(TOLERANCES["float32"], later_loss=1e-4)
    try:
        found = race(contestants, 3, tolerance, torch.device("cpu"))
    except UnequalError as error:
        return str(error)
    return {name: len(values) for name, values in found["losses"].items()}, found["losses"]["planted"]


def test_contestants_that_compute_the_same_get_numbers():
    ((counts, losses),) = run_ranks(1, race_with, None)
    assert counts == {"script": 4, "planted": 4}
    assert losses[2] < losses[0], "the same samples came round again, and were learnt from"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loss", "planted has a loss of"),
        ("gradient", "planted's gradient of linear_1.weight differs from script's by 0.01 of its norm"),
        ("update", "step 1: planted has a loss of"),
    ],
)
def test_a_contestant_that_computes_something_else_ends_the_race(fault, message):
    (found,) = run_ranks(1, race_with, fault)
    assert message in found


def test_contestants_take_turns_and_ratios_are_of_the_same_repetition():
    order = []
    alternate({name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    times = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 3.0, 4.0]}
    assert ratios(times, "ours", "theirs") == spread([2.0, 1.5, 1.0])
    assert rates(times, 12)["ours"].text(".1f") == "6.0 (3.0 - 12.0)"


def test_errors_of_plans_are_those_of_the_median_step(capsys):
    layout = {
        "name": "x",
        "pipeline": 2,
        "predicted_seconds": 1.1,
        "measured_seconds": [1.0, 9.0, 0.4],
        "predicted_idle": [0.10, 0.20],
        "measured_idle": [[0.11, 0.15], [0.9, 0.9], [0.12, 0.16]],
        "predicted_bytes": [100, 90],
        "measured_bytes": [100, 100],
    }
    summary = bench_plan.report({"layouts": [layout, layout | {"name": "y"}]})["summary"]
    assert summary["mean_step_error"] == summary["worst_step_error"] == pytest.approx(0.1)
    assert summary["worst_memory_error"] == pytest.approx(0.1)
    assert summary["mean_idle_error"] == pytest.approx((0.02 + 0.04) / 2)


def test_the_planned_layouts_cover_cuts_recomputation_and_interleaving():
    layouts = bench_plan.settings_of(Namespace(repetitions=10, quick=False)).layouts
    assert len({layout.name for layout in layouts}) == len(layouts) >= 12
    assert {layout.pipeline for layout in layouts} == {layout.stages_per_rank for layout in layouts} == {1, 2}
    assert {2, 16} <= {layout.microbatches for layout in layouts} and any(layout.recompute for layout in layouts)


def test_loaders_race_over_equal_samples_and_a_rival_that_makes_other_pixels_is_found(tmp_path, monkeypatch):
    shards = bench_loader.make_shards(tmp_path, 8)
    bench_loader.check_equal_work(shards, 2048)
    times = bench_loader.race(shards, 2048, 1, 1)
    assert list(times) == ["mmtrain", "webdataset", "images alone"]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in times.values())
    fit = bench_loader.plain_fit
    monkeypatch.setattr(bench_loader, "plain_fit", lambda image, transform: fit(image.rotate(1), transform))
    with pytest.raises(AssertionError, match="8 of 8 samples differ"):
        bench_loader.check_equal_work(shards, 2048)


def test_encoder_plans_are_told_over_balanced_work(capsys):
    small = ["--model", "SigLIP 81 + Qwen3-8B", "--pipeline", "2", "--microbatches", "4"]
    assert bench.main(["encoder_plans", *small]) == 0
    *_, row = capsys.readouterr().out.strip().splitlines()
    slices, slowest, rank_0 = map(float, row.split()[-3:])
    assert 1 <= slowest <= slices <= rank_0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "command",
    ["peers --quick", "plan --quick", "gpu --quick --shape tiny --device cpu --samples-per-pack 3"],
)
def test_a_benchmark_runs(command, tmp_path):
    file = tmp_path / "found.json"
    program = [sys.executable, TOOLS / "bench" / "bench.py", *command.split(), "--json", file]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(file.read_text())["machine"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_the_gpu_benchmark_says_so(tmp_path, capsys):
    assert bench.main(["gpu", "--json", str(tmp_path / "found.json")]) == 2
    assert capsys.readouterr().err.startswith("error: no CUDA device here, so nothing was measured")
