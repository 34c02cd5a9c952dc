"""The whole run: the same training and the same projector, whatever the layout."""

from __future__ import annotations

import importlib.metadata
import os

import pytest
import torch
from crash_job import MEASURED
from json_files import read_json, read_lines
from rank_runs import train
from safetensors.torch import load_file

from mmtrain.base.printing import escape
from mmtrain.config.schema import TrainSection
from mmtrain.engine.algorithms import use_algorithms

STEPS = 4
TRAIN_KEYS = (
    "kind step epoch loss grad_norm lr samples images tiles tokens supervised_tokens quarantined "
    "no_update pack_fill "
    "seconds tokens_per_second idle_fraction compute_seconds communication_seconds data_seconds "
    "fetching_seconds "
    "peak_memory_bytes model_flops_utilization time"
)


@pytest.fixture(scope="module")
def runs(tiny, make_tiny, tmp_path_factory):
    """Folder and console of a run at pipeline 1 and 2."""
    folder = tmp_path_factory.mktemp("runs")
    held_out = make_tiny.make_tiny_shards(
        folder / "held", samples=14, shards=2, text_only_fraction=0.2, seed=1
    )
    options = (
        f"eval.shards=[{', '.join(map(str, held_out))}]",
        "eval.every_steps=2",
        "eval.show_answers=2",
    )
    options += (f"run.dir={folder}", f"train.max_steps={STEPS}", "parallel.threads_per_rank=1")
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        for pipeline in (1, 2):
            run = train(
                tiny / "config.yaml",
                *options,
                f"run.name=pp{pipeline}",
                f"parallel.pipeline={pipeline}",
            )
            runs[pipeline] = (run.folder, run.printed)
    return runs


def metrics(run, *kinds):
    lines = read_lines(run[0] / "metrics.jsonl")
    return [line for line in lines if line["kind"] in kinds]


def test_a_pipeline_trains_as_one_process_does(runs):
    whole, cut = metrics(runs[1], "train"), metrics(runs[2], "train")
    assert len(whole) == len(cut) == STEPS
    same = [key for key in TRAIN_KEYS.split() if key not in ("loss", "grad_norm", *MEASURED)]
    for a, b in zip(whole, cut, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert {key: a[key] for key in same} == {key: b[key] for key in same}
    saved = f"checkpoints/step-{STEPS:08d}/projector.safetensors"
    first, second = (load_file(folder / saved) for folder, _ in runs.values())
    assert (
        set(first)
        == set(second)
        == {f"projector.linear_{i}.{p}" for i in (1, 2) for p in ("weight", "bias")}
    )
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-4)


EVAL_KEYS = "kind step loss token_accuracy exact_match answers samples seconds time"


@pytest.mark.parametrize("pipeline", [1, 2])
def test_held_out_samples_are_evaluated_before_between_and_after_the_steps(runs, pipeline):
    lines = metrics(runs[pipeline], "train", "eval", "eval_permuted")
    assert [(line["kind"], line["step"]) for line in lines] == [
        *(("eval", 0), ("train", 0), ("train", 1)),
        *(("eval", 2), ("train", 2), ("train", 3)),
        *(("eval", 4), ("eval_permuted", 4)),
    ]
    keys = {
        "train": TRAIN_KEYS,
        "eval": EVAL_KEYS,
        "eval_permuted": EVAL_KEYS.replace("time", "permuted_samples time"),
    }
    for line in lines:
        assert list(line) == keys[line["kind"]].split()
    assert [line["epoch"] for line in lines if line["kind"] == "train"] == [0, 0, 0, 1], (
        "8 packs a step"
    )
    first, between, last, control = (line for line in lines if line["kind"] != "train")
    assert last["loss"] < between["loss"] < first["loss"] and control["loss"] != last["loss"]
    for line, other in zip(
        (first, between, last, control), metrics(runs[1], "eval", "eval_permuted"), strict=True
    ):
        assert line["samples"] == line["answers"] == 14
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert line["token_accuracy"] == pytest.approx(other["token_accuracy"], abs=0.01)
        assert line["exact_match"] == other["exact_match"]


def test_the_console_tells_scores_control_and_answers(runs):
    for _, printed in runs.values():
        lines = printed.splitlines()
        told = [line.split(":")[0] for line in lines if line.startswith("eval at step ")]
        assert told == ["eval at step 0", "eval at step 2", "eval at step 4"]
        assert "evaluating on 14 held-out samples in " in printed
        control = next(
            i for i, line in enumerate(lines) if line.startswith("control with shuffled images")
        )
        assert lines[control].endswith(" of 14 samples kept theirs)")
        assert lines[control + 2].startswith("2 held-out questions, answered one token at a time: ")
        for first in (control + 3, control + 6):
            assert lines[first].lstrip().startswith(("right  0000", "wrong  0000"))
            assert lines[first].endswith(": Describe what you see.")
            assert lines[first + 1].startswith("         given  ")
            assert lines[first + 2].startswith("         true   a ") and lines[first + 2].endswith(
                " background."
            )


def test_what_was_answered_before_and_after_is_kept_with_the_pictures(runs):
    for folder, printed in runs.values():
        lines = read_lines(folder / "answers.jsonl")
        before, after = lines[:2], lines[2:]
        assert [line["step"] for line in lines] == [0, 0, STEPS, STEPS]
        assert [line["key"] for line in before] == [line["key"] for line in after]
        assert printed.count("one token at a time") == 1, (
            "those of before the first step are kept, not shown"
        )
        for line in after:
            mark = "right" if line["right"] else "wrong"
            assert f"{mark}  {line['key']}: {line['question']}\n" in printed
            assert f"given  {escape(line['given'])}\n         true   {line['truth']}\n" in printed
        for line in lines:
            assert all((folder / picture).is_file() for picture in line["pictures"])
        assert any(line["pictures"] for line in lines)


@pytest.mark.cpu_ranks
def test_every_record_has_its_time_and_a_run_begins_with_what_it_runs_on(runs):
    for pipeline, (folder, _) in runs.items():
        lines = read_lines(folder / "metrics.jsonl")
        times = [line["time"] for line in lines]
        assert times == sorted(times) and times[0] > 1.7e9
        assert list(lines[0]) == ["kind", "step", "backend", "versions", "device", "ranks", "time"]
        assert lines[0]["backend"] == "ProcessGroupGloo"
        assert (lines[0]["kind"], lines[0]["step"], lines[0]["ranks"]) == ("begin", 0, pipeline)
        assert (
            lines[0]["versions"]["torch"] == importlib.metadata.version("torch")
            and "cores" in lines[0]["device"]
        )


@pytest.mark.cpu_ranks
def test_a_run_says_how_its_attention_is_computed_before_its_first_step(runs):
    for folder, printed in runs.values():
        way = {
            "layers": "attention",
            "kernel": "document",
            "reason": "flash attention needs a GPU",
            "slow": False,
            "factor": None,
            "seconds": None,
        }
        ranks = list(range(len(read_json(folder / "plan.json")["ranks"])))
        [record] = metrics((folder, printed), "kernels")
        del record["time"]
        assert record == {"kind": "kernels", "step": 0, "ways": [way | {"ranks": ranks}]}
        assert "attention: " not in printed


def test_updates_verified_on_each_device_name_the_trained_rank_and_the_explicit_no_op(runs):
    folder, printed = runs[2]
    audit = read_json(folder / "audit.json")
    plan = read_json(folder / "plan.json")
    assert audit["passed"]
    assert [rank["optimizer"] for rank in audit["ranks"]] == ["AdamW", "NoOp"]
    assert [rank["optimizer"] for rank in plan["ranks"]] == ["AdamW", "NoOp"]
    for audited, planned in zip(audit["ranks"], plan["ranks"], strict=True):
        frozen = audited["frozen"]
        assert frozen["fingerprint_before"] == frozen["fingerprint_after"] and frozen["tensors"] > 0
        assert audited["trainable_parameters"] == planned["trainable"]
        assert audited["reason"] and all(
            t["moved"] and t["had_gradient"] for t in audited["trainable"]
        )
    for said in ("audit passed: 4 of 4 trainable tensors moved", f"step {STEPS}/{STEPS}", "saved "):
        assert said in printed


def test_deterministic_algorithms_are_set_with_the_workspace_that_cublas_needs_for_them(
    monkeypatch,
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    try:
        use_algorithms(TrainSection(max_steps=1, deterministic=True, tf32=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        use_algorithms(TrainSection(max_steps=1))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
