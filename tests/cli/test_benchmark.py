"""mmtrain benchmark: the held-out questions that lmms-eval asks are those that the run scored."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from untrained_runs import config_of, make_checkpoint

from mmtrain.__main__ import main
from mmtrain.benchmarks.held_out import QUESTIONS, write_questions
from mmtrain.data.samples.sample import IGNORE
from mmtrain.data.stream.loader import PackedBatches
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
def test_each_held_out_answer_is_asked_for_given_the_true_turns_and_images_before_it(tiny, tmp_path, template):
    config = config_of(
        tiny, "eval.fraction=0.3", "eval.shards=null", f"data.template={template}", "data.pack_length=512"
    )
    longest = write_questions(config, tmp_path)
    asked = [json.loads(line) for line in (tmp_path / QUESTIONS).read_text().splitlines()]
    documents = HeldOut(PackedBatches(config, 0, 1)).documents
    answers = [text for document in documents for speaker, text in document.sample.turns if speaker == "gpt"]
    assert [question["answer"] for question in asked] == answers and len(asked) > 5
    assert longest == max(sum(label != IGNORE for label in document.labels) for document in documents)
    for question in asked:
        text = "".join(message["content"] for message in question["messages"])
        assert question["messages"][-1]["role"] == "user"
        assert text.count("<image>") == len(question["images"])
        assert template != "plain" or not text.replace("<image>", "")
    images = {name: (tmp_path / name).read_bytes() for question in asked for name in question["images"]}
    assert sorted(images.values()) == sorted(image for document in documents for image in document.sample.images)


def test_a_run_without_held_out_samples_is_not_scored_on_its_training_data(tiny, tmp_path, capsys):
    make_checkpoint(tmp_path / "run", config_of(tiny, "eval.shards=null"))
    assert main(["benchmark", str(tmp_path / "run")]) == 2
    assert "holds out no samples" in capsys.readouterr().err


def test_a_run_on_text_alone_is_told_the_harness_for_llms(tiny, tmp_path, capsys):
    make_checkpoint(
        tmp_path / "run", config_of(tiny, "model.vision=null", "data.template=chat", "model.trainable=[llm.head]")
    )
    assert main(["benchmark", str(tmp_path / "run")]) == 2
    assert "run lm_eval --model hf" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_held_out_task_gets_the_runs_own_score(tmp_path):
    """Installs lmms-eval, 0.5 GB."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for arguments in (DEMO, ["benchmark", "runs/demo", "--batch-size", "7"]):
        subprocess.run([sys.executable, "-m", "mmtrain", *arguments], env=env, cwd=tmp_path, check=True)
    folder = tmp_path / "runs" / "demo"
    scores = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = [score for score in scores if score["kind"] == "eval"][-1]
    found = json.loads((folder / "benchmarks.jsonl").read_text())
    assert found["scores"]["exact_match"][0] == own["exact_match"] > 0.1
    assert (found["step"], found["answers"]) == (own["step"], own["answers"])
    assert "held_out" in (folder / "report.html").read_text()
