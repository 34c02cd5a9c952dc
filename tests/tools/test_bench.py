"""tools/bench: every benchmark imports and runs; with work that is not equal there are no
numbers.
"""

from __future__ import annotations

import importlib
import tarfile
from dataclasses import replace

import bench
import bench_data_acts
import bench_data_shards
import pytest
import torch
from bench_data import growth
from bench_models import SHAPES, equal_steps, noise_image, padded, random_llava, with_shared_weights
from bench_race import TOLERANCES, UnequalError, Work, race
from bench_rivals import Stock
from conftest import TOOLS
from json_files import read_json
from processes import ran_python
from ranks import run_ranks

from mmtrain.data.stream.images import ImageTransform
from mmtrain.engine.process_groups import join_process_group

TINY = SHAPES["tiny"]
TRANSFORM = ImageTransform(
    TINY.image_size, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic", "pad", 10**6
)


def test_every_benchmark_imports_and_teaches_its_options(capsys):
    for file in (TOOLS / "bench").glob("*.py"):
        importlib.import_module(file.stem)
    for command in bench.COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            bench.main([command, "--help"])
        assert "examples:" in capsys.readouterr().out


class FromMemory(Work):
    """Tiny samples, without an encoder's folder."""

    def __init__(self):
        self.planned = equal_steps(TINY, 2, 1, 3)
        self.padded = [
            padded(TINY, step, noise_image(TINY), TRANSFORM) for step in self.planned.steps
        ]


def race_with(error: float):
    """Race stock transformers against a copy whose projector differs by `error`."""
    join_process_group(torch.device("cpu"), 60)
    model, work = random_llava(TINY, torch.float32, torch.device("cpu"), 0), FromMemory()
    contestants = {"script": Stock(with_shared_weights(model), "script", work.padded_steps())}
    with torch.no_grad():
        model.model.multi_modal_projector.linear_2.bias += error
    contestants["planted"] = Stock(model, "tuned", work.padded_steps())
    try:
        found = race(
            contestants, 3, replace(TOLERANCES["float32"], later_loss=1e-4), torch.device("cpu")
        )
    except UnequalError as unequal:
        return str(unequal)
    return {name: len(values) for name, values in found["losses"].items()}


@pytest.mark.parametrize(
    ("error", "expected"), [(0.0, "{'script': 4, 'planted': 4}"), (0.01, "planted has a loss of")]
)
def test_only_contestants_that_compute_the_same_get_numbers(error, expected):
    (found,) = run_ranks(1, race_with, error)
    assert expected in str(found)


def test_synthetic_shards_are_read_without_a_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bench_data_acts.write(tmp_path, "2000")
    bench_data_acts.count(tmp_path, "all")
    found = bench_data_acts.prepare(tmp_path)
    assert found["groups"] == 1
    assert bench_data_acts.batch(tmp_path, "border of epochs")["first_seconds"] > 0


def test_whole_tars_differ_in_their_keys(tmp_path):
    bench_data_shards.write_real_tars(tmp_path / "tars", 2)
    for shard, path in enumerate(sorted((tmp_path / "tars").iterdir())):
        with tarfile.open(path) as tar:
            names = tar.getnames()
        assert len(names) == 2000
        assert names[-1] == f"{shard:06d}999.jpg"


def test_growth_is_the_exponent_of_a_power():
    assert growth({10: 5.0, 100: 50.0, 1000: 500.0}) == pytest.approx(1)
    assert growth({10: 0.3, 1000: 0.3}) == pytest.approx(0)
    assert growth({10: 0.3}) is None


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        "peers --quick",
        "plan --quick",
        "data --samples 2000",
        "data --remote 5",
        "gpu --quick --shape tiny --device cpu --samples-per-pack 3",
        "gpu --quick --shape tiny --device cpu --samples-per-pack 3 --row equal --compile",
    ],
)
def test_a_benchmark_runs(command, tmp_path):
    file = tmp_path / "found.json"
    ran = ran_python(TOOLS / "bench" / "bench.py", *command.split(), "--json", file)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert read_json(file)["machine"]


@pytest.mark.nightly
def test_a_layer_is_measured(tmp_path):
    file = tmp_path / "layer.json"
    ran = ran_python(
        TOOLS / "bench" / "bench_layer.py", "--device", "cpu", "--quick", "--json", file
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {"eager", "compiled"} <= read_json(file)["layer"].keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_the_gpu_benchmark_says_so(tmp_path, capsys):
    assert bench.main(["gpu", "--json", str(tmp_path / "found.json")]) == 2
    assert capsys.readouterr().err.startswith("error: no CUDA device here, so nothing was measured")
