"""Text alone (`model.vision: null`): no image enters a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from scenes import make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmtrain import launch
from mmtrain.api.generate import generate
from mmtrain.api.run import load_run
from mmtrain.base.errors import UserError
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan

CONFIG = Path(__file__).parents[1] / "configs" / "demo_text.yaml"


def test_a_plan_of_text_has_no_encoder(parts):
    trained = {"model__trainable": ("llm.layers.3",), "parallel__pipeline": 4}
    config = make_config(parts, model__vision=None, data__template="chat", **trained)
    plan = make_plan(config)
    assert plan.vision is None and plan.encode_ahead == 0
    said = " ".join(" ".join(render(plan)).split())  # a long path breaks the line
    assert said.startswith("parity: text -> ") and "; trains llm.layers.3 " in said
    assert plan.ranks[0].optimizer == "NoOp"


@pytest.mark.nightly
def test_a_run_on_text_trains_evaluates_and_answers(demo_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(demo_cache))
    short = (
        "parallel.pipeline=1",
        "train.max_steps=1",
        "train.packs_per_step=1",
        "eval.max_samples=4",
    )
    asked = ("eval.show_answers=1", "eval.permuted_control=true")
    folder = tmp_path / "demo_text"
    assert launch.main([str(CONFIG), f"run.dir={tmp_path}", "data.workers=0", *short, *asked]) == 0
    run = load_run(folder)
    assert run.plan["vision"] is None and [score["samples"] for score in run.scores] == [4, 4]
    assert not run.metrics("eval_permuted"), "no held-out sample has another image"
    assert run.metrics("train")[-1]["images"] == 0
    answer = generate(
        run, prompt="Say it backwards: a red three, a blue five, a pink nine.", max_new_tokens=4
    )
    written = next((demo_cache / "mmtrain" / "chat").glob("*/config.json")).parent
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(written),
        AutoTokenizer.from_pretrained(written),
    )
    text = "<s>USER: Say it backwards: a red three, a blue five, a pink nine. ASSISTANT:"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    said = model.generate(
        input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=4
    )
    assert (
        answer
        == tokenizer.decode(said[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    )
    with pytest.raises(UserError, match="sees no pictures"):
        generate(run, Image.new("RGB", (8, 8)), "What?")
