"""mmtrain benchmark: the held-out questions that lmms-eval asks are those that the run scored."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from json_files import read_json, read_lines
from processes import running, wait_for
from untrained_runs import config_of, make_checkpoint

from mmtrain.__main__ import main
from mmtrain.benchmarks.environment import VERSION
from mmtrain.benchmarks.held_out import QUESTIONS, write_questions
from mmtrain.checkpoint.run_folder import describe_run
from mmtrain.data.samples.sample import IGNORE
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.plan.planner import make_plan
from mmtrain.training.held_out import HeldOut

DEMO = [
    "train",
    "example:llava_pp4",
    "run.name=demo",
    "parallel.pipeline=1",
    "train.max_steps=20",
    "eval.show_answers=0",
]


@pytest.mark.parametrize("template", ["plain", "llava_v1"])
def test_each_held_out_answer_is_asked_for_given_the_true_turns_and_images_before_it(
    tiny, tmp_path, template
):
    config = config_of(
        tiny,
        "eval.fraction=0.3",
        "eval.shards=null",
        f"data.template={template}",
        "data.pack_length=512",
    )
    longest = write_questions(config, tmp_path)
    asked = read_lines(tmp_path / QUESTIONS)
    documents = HeldOut(PackedBatches(config, 0, 1)).documents
    answers = [
        text
        for document in documents
        for speaker, text in document.sample.turns
        if speaker == "gpt"
    ]
    assert [question["answer"] for question in asked] == answers and len(asked) > 5
    assert longest == max(
        sum(label != IGNORE for label in document.labels) for document in documents
    )
    for question in asked:
        text = "".join(message["content"] for message in question["messages"])
        assert question["messages"][-1]["role"] == "user"
        assert text.count("<image>") == len(question["images"])
        assert template != "plain" or not text.replace("<image>", "")
    images = {
        name: (tmp_path / name).read_bytes() for question in asked for name in question["images"]
    }
    assert sorted(images.values()) == sorted(
        image for document in documents for image in document.sample.images
    )


def test_a_run_without_held_out_samples_is_not_scored_on_its_training_data(tiny, tmp_path, capsys):
    make_checkpoint(tmp_path / "run", config_of(tiny, "eval.shards=null"))
    assert main(["benchmark", str(tmp_path / "run")]) == 2
    assert "holds out no samples" in capsys.readouterr().err


def test_a_run_on_text_alone_is_told_the_harness_for_llms(tiny, tmp_path, capsys):
    make_checkpoint(
        tmp_path / "run",
        config_of(tiny, "model.vision=null", "data.template=chat", "model.trainable=[llm.head]"),
    )
    assert main(["benchmark", str(tmp_path / "run")]) == 2
    assert "run lm_eval --model hf" in capsys.readouterr().err


# Where lmms-eval is imported, it says so and waits as long as it is asked to.
INSTALLED = """
import os, pathlib, time
pathlib.Path(os.environ["STARTED"]).touch()
time.sleep(float(os.environ["WAIT"]))
raise SystemExit("the installed one ran")
"""


def write_wheel(folder: Path) -> None:
    """Write a package that pip installs as lmms-eval."""
    about = f"lmms_eval-{VERSION}.dist-info"
    files = {
        "lmms_eval/__init__.py": INSTALLED,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: lmms_eval\nVersion: {VERSION}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"lmms_eval-{VERSION}-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(
            f"{about}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
        )


@pytest.fixture
def false_folder(tmp_path, monkeypatch) -> Path:
    """A folder full of false modules. pip gets the wheel of INSTALLED, and no network."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("pip", "ensurepip", "venv", "lmms_eval", "torch", "json", "runpy"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('false {name} ran')")
    write_wheel(tmp_path)
    own = {"XDG_CACHE_HOME": tmp_path / "cache", "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": tmp_path}
    for name, value in {**own, "STARTED": tmp_path / "started", "WAIT": 0}.items():
        monkeypatch.setenv(name, str(value))
    return folder


MAKE = "from mmtrain.benchmarks.environment import lmms_python; print(lmms_python())"


@pytest.mark.nightly
def test_the_environment_is_made_by_pip_and_not_by_a_file_of_that_name(false_folder):
    with running(["-P", "-c", MAKE], false_folder) as process:
        assert process.wait() == 0, process.stderr
        python = Path(process.stdout.strip())
    assert list(python.parents[1].glob(f"lib/*/site-packages/lmms_eval-{VERSION}.dist-info"))


@pytest.mark.nightly
def test_a_pip_that_installs_elsewhere_is_refused_and_asked_again(
    false_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    for _ in range(2):
        with running(["-P", "-c", MAKE], false_folder) as process:
            assert process.wait() == 1
            assert f"pip has not put lmms-eval=={VERSION} into" in process.stderr


@pytest.mark.nightly
def test_benchmark_runs_nothing_of_the_current_folder_and_its_driver_ends_with_it(
    false_folder, tmp_path, checkpoint, monkeypatch
):
    shutil.copytree(checkpoint.run, tmp_path / "run")
    describe_run(tmp_path / "run", checkpoint.config, make_plan(checkpoint.config))
    command = ["-P", "-m", "mmtrain", "benchmark", tmp_path / "run", "--tasks", "any"]
    with running(command, false_folder) as process:
        assert process.wait() == 2
        assert "lmms-eval: the installed one ran" in process.stderr
    (tmp_path / "started").unlink()
    monkeypatch.setenv("WAIT", "600")
    with running(command, false_folder) as process:
        wait_for((tmp_path / "started").exists, 120, "the driver")
        process.process.send_signal(signal.SIGKILL)
        assert process.seconds_until_gone(10) < 10


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # it installs lmms-eval
def test_the_held_out_task_gets_the_runs_own_score(tmp_path):
    """Installs lmms-eval, 0.5 GB."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for arguments in (DEMO, ["benchmark", "runs/demo", "--batch-size", "7"]):
        subprocess.run(
            [sys.executable, "-m", "mmtrain", *arguments], env=env, cwd=tmp_path, check=True
        )
    folder = tmp_path / "runs" / "demo"
    scores = read_lines(folder / "metrics.jsonl")
    own = [score for score in scores if score["kind"] == "eval"][-1]
    found = read_json(folder / "benchmarks.jsonl")
    assert found["scores"]["exact_match"][0] == own["exact_match"] > 0.1
    assert (found["step"], found["answers"]) == (own["step"], own["answers"])
    assert "held_out" in (folder / "report.html").read_text()
