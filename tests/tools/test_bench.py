"""tools/bench/bench.py: contestants do equal work or there are no numbers, and every measurement is in the JSON."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import bench
import pytest
import torch
from bench_flops import least_flops
from bench_gpu import describe_state
from bench_gpu_facts import kernels, read_state
from bench_models import SHAPES, noise_image, random_llava, run_config, with_shared_weights
from bench_race import TOLERANCES, UnequalError, race
from bench_row import Work
from bench_samples import PADDING, equal_steps, packed, padded, ragged_steps
from bench_stock import Stock
from bench_tables import merged, per_second, utilisation
from conftest import TOOLS
from ranks import run_ranks
from torch.autograd import DeviceType

from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.stream.images import ImageTransform
from mmtrain.engine.process_groups import join_process_group
from mmtrain.plan.planner import models_of

TINY = SHAPES["tiny"]
TRANSFORM = ImageTransform(TINY.image_size, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic", "pad", 10**6)


def run_bench(*arguments):
    command = [sys.executable, str(TOOLS / "bench" / "bench.py"), *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "120"}  # else readline, which pytest loads, says 80 to programs
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


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


def test_samples_of_one_length_need_no_padding_and_ragged_ones_need_more_than_packs_do():
    equal, ragged = equal_steps(TINY, 6, 2, 6), ragged_steps(TINY, 6, 2, 6)
    assert equal.fill == 1 and equal.pack_length == ragged.pack_length

    def padded_fill(work):
        batches = [batch for step in work.steps for batch in padded(TINY, step, noise_image(TINY), TRANSFORM)]
        return sum(int(b.attention_mask.sum()) for b in batches) / sum(b.attention_mask.numel() for b in batches)

    assert padded_fill(equal) == 1
    assert padded_fill(ragged) < ragged.fill < 1


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


def test_measurements_of_several_processes_are_one():
    runs = [
        {
            "pack_length": 8,
            "seconds": {"ours": seconds, "products": [1.0]},
            "losses": {"ours": [5.0, 4.0]},
            "first_step_seconds": {"ours": 10 * difference},
            "first_step_differences": {"loss": difference, "gradient": 0.3},
            "peak_memory_bytes": {},
            "step_of_turn": [1, 0][: len(seconds)],
        }
        for seconds, difference in (([2.0, 3.0], 0.1), ([4.0], 0.2))
    ]
    assert merged(runs) == {
        "pack_length": 8,
        "seconds": {"ours": [2.0, 3.0, 4.0], "products": [1.0, 1.0]},
        "losses": {"ours": [5.0, 4.0, 5.0, 4.0]},
        "first_step_seconds": {"ours": 2.0},
        "first_step_differences": {"loss": 0.2, "gradient": 0.3},
        "peak_memory_bytes": {},
        "step_of_turn": [1, 0, 1],
        "processes": 2,
    }


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


@pytest.mark.nightly
def test_all_peers_are_raced_and_every_measurement_is_in_the_json(tmp_path):
    ran = run_bench("peers", "--quick", "--json", tmp_path / "found.json", "--folder", tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    stock = ["mmtrain", "stock, as LLaVA's script", "stock, tuned"]
    pipelines = ["mmtrain", "DeepSpeed, its default cut", "DeepSpeed, uniform cut", "torch 1F1B, uniform cut"]
    assert list(found["rows"]) == ["equal", "ragged", "pipeline"]
    for row, names in zip(found["rows"].values(), (stock, stock, pipelines), strict=True):
        assert list(row["losses"]) == list(row["step_seconds"]) == names
        assert all(len(seconds) == 2 for seconds in row["seconds"].values())
        assert row["first_step_differences"]["loss"] < 1e-5 and row["first_step_differences"]["gradient"] < 1e-3
        assert list(row["mmtrain_is_faster_by"]) == names[1:]
        assert all(name in ran.stdout for name in names)
    shares = found["rows"]["equal"]["share_of_matmul_rate"]
    assert list(shares) == stock and all(share["median"] > 0 for share in shares.values())
    assert not found["rows"]["pipeline"]["calibrated"], "a calibration takes most of a minute"
    cuts = found["rows"]["pipeline"]["first_decoder_layer_of_later_stages"]
    # DeepSpeed's default weighs what trains: all but the head is on the first rank.
    assert cuts["DeepSpeed, its default cut"] == [TINY.layers] and cuts["torch 1F1B, uniform cut"] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.nightly
def test_the_gpu_benchmark_runs_on_a_processor_too(tmp_path):
    options = ("--quick", "--shape", "tiny", "--device", "cpu", "--peak-tflops", "1", "--samples-per-pack", "3")
    ran = run_bench("gpu", "ragged", "pipeline", *options, "--json", tmp_path / "found.json", "--folder", tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    row = found["rows"]["ragged"]
    assert list(row["losses"]) == ["mmtrain", "stock, as LLaVA's script", "stock, tuned"]
    for name, seconds in row["seconds"].items():
        if name in row["losses"]:
            steps = [row["steps"][turn] for turn in (1, 0)]
            expected = [step["minimal_flops"] / 1e12 / s for step, s in zip(steps, seconds, strict=True)]
            assert row["utilisation"][name]["values"] == pytest.approx(expected)
    assert row["recomputed_layers_of_mmtrain"] == 0 and found["dtype"] == "bfloat16"
    assert list(row["first_step_seconds"]) == list(row["losses"])
    assert row["counts"]["mmtrain"] == {"host_waits": None, "launches": None}, "which no CPU can tell"
    alone = found["rows"]["pipeline"]
    assert row["attention"] == alone["attention"] == ["attention: documents one by one (flash attention needs a GPU)"]
    assert list(alone["losses"]) == ["mmtrain"] and len(alone["idle"]) == 2
    layers = [name for rank in alone["ranks"] for name in rank["layers"]]
    assert layers == ["front", *(f"llm.layers.{i}" for i in range(TINY.layers)), "head"], "each on one rank"
    assert all(rank["planned_bytes"] > 0 for rank in alone["ranks"])
    (expected,) = {step["minimal_flops"] for step in alone["steps"]}
    assert alone["utilisation"]["mmtrain"]["values"] == pytest.approx(
        [expected / 2e12 / seconds for seconds in alone["seconds"]["mmtrain"]]
    ), "of what both devices could do"
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_kernels_are_counted_without_copies_and_marks_and_a_devices_state_is_read():
    def event(name, device=DeviceType.CUDA, mark=False):
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=mark)

    names = ("ampere_sgemm_64x64_tn", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "flash_fwd_kernel")
    seen = [*map(event, names), event("aten::mm", DeviceType.CPU), event("nccl:recv 0->1", mark=True)]
    assert kernels(seen) == 2
    state = read_state("570.86.15, 1980, 1980, 2619, 34, 115.42, 700.00\n")
    assert describe_state(state) == (
        "driver 570.86.15; right after the steps 1980 of 1980 MHz, memory 2619 MHz, 34 degrees, 115.42 of 700.00 W"
    )
    assert read_state("No devices were found\n") == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_the_gpu_benchmark_says_so(tmp_path, capsys):
    assert bench.main(["gpu", "--json", str(tmp_path / "found.json")]) == 2
    assert capsys.readouterr().err.startswith("error: no CUDA device here, so nothing was measured")
    assert not (tmp_path / "found.json").exists()


def test_a_row_that_is_not_known_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["peers", "nope"])
    assert "'nope' is none of equal, ragged, pipeline" in capsys.readouterr().err
