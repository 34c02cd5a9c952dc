"""A run on tiles from its first step to the model that is asked: scores, answers, control,
export.
"""

from __future__ import annotations

import pytest
import torch
from json_files import read_lines
from PIL import Image
from rank_runs import train
from safetensors.torch import load_file
from untrained_runs import run_export

from mmtrain.api.generate import generate


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["anyres", "anyres_max_9"])
def test_a_run_on_tiles_is_evaluated_controlled_exported_and_asked(
    tiny, tmp_path, own_cache, layout
):
    keys = (
        "data.image_fit=null",
        "data.pack_length=512",
        "parallel.pipeline=1",
        "train.max_steps=2",
    )
    scored = (
        "eval.fraction=0.2",
        "eval.max_samples=12",
        "eval.show_answers=2",
        "optimizer.lr=0.02",
    )
    run = train(
        tiny / "config.yaml",
        f"run.dir={tmp_path / 'runs'}",
        f"model.vision.layout={layout}",
        *keys,
        *scored,
    ).folder
    records = read_lines(run / "metrics.jsonl")
    scores = [record for record in records if record.get("kind") == "eval"]
    assert len(scores) >= 2 and all(
        0 <= record["exact_match"] <= 1 and record["loss"] > 0 for record in scores
    )
    (control,) = (record for record in records if record.get("kind") == "eval_permuted")
    assert control["permuted_samples"] > 2 and control["loss"] != scores[-1]["loss"]
    said = read_lines(run / "answers.jsonl")
    assert len(said) >= 2
    newest = max((run / "checkpoints").glob("step-*"))
    newline = load_file(newest / "projector.safetensors")["projector.image_newline"]
    assert torch.isfinite(newline).all() and newline.abs().sum() > 0
    out = tmp_path / "out"
    assert run_export(run, "hf", out, "--verify", "4") == 0
    picture = Image.effect_noise((90, 40), 60).convert("RGB")
    assert generate(run, picture, max_new_tokens=4) == generate(out, picture, max_new_tokens=4)
