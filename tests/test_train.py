"""The whole run through the command line: the same training and the same projector, whatever the layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

STEPS = 4


def launch(tiny, folder, name, *overrides):
    """Run `python -m mmtrain.launch` to its end; the run's folder and what it printed."""
    command = [sys.executable, "-m", "mmtrain.launch", str(tiny / "config.yaml")]
    command += [f"run.dir={folder}", f"run.name={name}", f"train.max_steps={STEPS}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name, done.stdout


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        (pipeline, data): launch(
            tiny, folder, f"pp{pipeline}dp{data}", f"parallel.pipeline={pipeline}", f"parallel.data={data}"
        )
        for pipeline, data in ((1, 1), (4, 1), (2, 2))
    }


def metrics(run):
    return [json.loads(line) for line in (run[0] / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", [(4, 1), (2, 2)])
def test_every_layout_trains_the_same(runs, layout):
    whole, cut = metrics(runs[1, 1]), metrics(runs[layout])
    assert len(whole) == len(cut) == STEPS
    for a, b in zip(whole, cut, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        same = (
            "kind",
            "step",
            "lr",
            "samples",
            "images",
            "tokens",
            "supervised_tokens",
            "pack_fill",
            "overlong",
            "no_update",
        )
        assert {key: a[key] for key in same} == {key: b[key] for key in same}
    files = [
        run[0] / "checkpoints" / f"step-{STEPS:08d}" / "projector.safetensors" for run in (runs[1, 1], runs[layout])
    ]
    first, second = (load_file(file) for file in files)
    assert set(first) == set(second) == {f"projector.linear_{i}.{p}" for i in (1, 2) for p in ("weight", "bias")}
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-4)


def test_the_record_names_one_trained_rank_and_three_explicit_no_ops(runs):
    folder, printed = runs[4, 1]
    audit = json.loads((folder / "audit.json").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    assert audit["passed"]
    assert [rank["optimizer"] for rank in audit["ranks"]] == ["AdamW", "NoOp", "NoOp", "NoOp"]
    assert [rank["optimizer"] for rank in plan["ranks"]] == ["AdamW", "NoOp", "NoOp", "NoOp"]
    for audited, planned in zip(audit["ranks"], plan["ranks"], strict=True):
        frozen = audited["frozen"]
        assert frozen["fingerprint_before"] == frozen["fingerprint_after"] and frozen["tensors"] > 0
        assert audited["trainable_parameters"] == planned["trainable"]
        assert audited["reason"] and all(t["moved"] and t["had_gradient"] for t in audited["trainable"])
    assert (
        "audit passed: 4 of 4 trainable tensors moved" in printed
        and f"step {STEPS}/{STEPS}" in printed
        and "saved " in printed
    )
    assert len(printed.splitlines()) < 30, "library chatter belongs into log.txt"
