"""Text alone (`model.vision: null`): the stages are the stock causal LM, and no image enters a run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from ranks import run_ranks
from scenes import Case, documents_of, execute, make_config, make_document
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from mmtrain import launch
from mmtrain.api.generate import generate
from mmtrain.api.run import load_run
from mmtrain.base.errors import UserError
from mmtrain.data.samples.sample import IGNORE
from mmtrain.engine.optimizer import clip_coefficient, learning_rate
from mmtrain.models.facts.families import canonical_name
from mmtrain.models.facts.shapes import matches_any
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan

CONFIG = Path(__file__).parents[1] / "configs" / "demo_text.yaml"
STEPS = 3
PATTERNS = ("llm.layers.*", "llm.head"), ("llm.layers.3", "llm.head"), ("llm.embedding",)
LAYOUTS = {"pp1": {}, "pp2": {"pipeline": 2}, "pp4": {"pipeline": 4, "boundaries": (0, 2, 4), "recompute_layers": 1}}
LAYOUTS["pp2v2"] = {"pipeline": 2, "boundaries": (1, 2, 3)}


def text_config(folder, **overrides):
    return make_config(folder, model__vision=None, data__template="chat", **overrides)


def steps():
    rows = [
        [[make_document(100 * s + 10 * i + j, images=0, text=8 + i + j) for j in range(2)]]
        for s in range(STEPS)
        for i in range(4)
    ]
    return tuple(tuple(rows[4 * s : 4 * s + 4]) for s in range(STEPS))


@cache
def reference(folder, patterns):
    """Loss of each step and the first step's gradients, by one process with the stock model, a document at a time."""
    config = text_config(folder, model__trainable=patterns)
    model = LlamaForCausalLM.from_pretrained(folder / "llm")
    trainable = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(matches_any(canonical_name(name), patterns))
        if parameter.requires_grad:
            trainable[canonical_name(name)] = parameter
    optimizer = torch.optim.AdamW(trainable.values(), lr=1.0, weight_decay=0.0)
    losses, first = [], {}
    for s, step in enumerate(steps()):
        documents = documents_of(step)
        tokens = sum(label != IGNORE for document in documents for label in document.labels)
        model.zero_grad()
        for document in documents:
            logits = model(torch.tensor([document.ids])).logits[0]
            loss = F.cross_entropy(logits, torch.tensor(document.labels), ignore_index=IGNORE, reduction="sum")
            (loss / tokens).backward()
            losses.append(float(loss.detach()) / tokens)
        losses[s:] = [sum(losses[s:])]
        first = first or {name: p.grad.double().numpy().copy() for name, p in trainable.items()}
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in trainable.values()]))
        for parameter in trainable.values():
            parameter.grad.mul_(clip_coefficient(norm, config.optimizer.clip_norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(s, config.train.max_steps, config.optimizer, config.optimizer.lr)
        optimizer.step()
    return losses, first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_train_as_the_stock_causal_lm_does(parts, layout):
    settings = {f"parallel__{key}": value for key, value in LAYOUTS[layout].items()}
    cases = [Case(text_config(parts, model__trainable=patterns, **settings), steps()) for patterns in PATTERNS]
    by_rank = run_ranks(LAYOUTS[layout].get("pipeline", 1), execute, cases)
    for i, patterns in enumerate(PATTERNS):
        ranks = [rank[i] for rank in by_rank]
        losses, expected = reference(parts, patterns)
        np.testing.assert_allclose([result.loss for result in ranks[0]["results"]], losses, rtol=1e-5)
        found = {name: gradient for rank in ranks for name, gradient in rank["gradients"][0].items()}
        assert set(found) == set(expected)
        for name, gradient in found.items():
            error = np.abs(gradient - expected[name]).max() / np.abs(expected[name]).max()
            assert error <= 1e-5, (patterns, name, error)
        assert all(rank["audit"]["failures"] == [] for rank in ranks)
        for rank in ranks:  # of pp4's the first holds the embedding alone
            assert rank["optimizer"] == ("AdamW" if rank["parameters"] else "NoOpOptimizer")


def test_a_plan_of_text_has_no_encoder(parts):
    plan = make_plan(text_config(parts, model__trainable=("llm.layers.3",), parallel__pipeline=4))
    assert plan.vision is None and plan.encode_ahead == 0
    said = " ".join(" ".join(render(plan)).split())  # a long path breaks the line
    assert said.startswith("parity: text -> ") and "; trains llm.layers.3 " in said
    assert plan.ranks[0].optimizer == "NoOp"


@pytest.mark.nightly
def test_a_run_on_text_trains_evaluates_and_answers(demo_cache, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(demo_cache))
    short = ("parallel.pipeline=1", "train.max_steps=1", "train.packs_per_step=1", "eval.max_samples=4")
    asked = ("eval.show_answers=1", "eval.permuted_control=true")
    folder = tmp_path / "demo_text"
    assert launch.main([str(CONFIG), f"run.dir={tmp_path}", "data.workers=0", *short, *asked]) == 0
    run = load_run(folder)
    assert run.plan["vision"] is None and [score["samples"] for score in run.scores] == [4, 4]
    assert "the control is left out: no held-out sample has another image" in capfd.readouterr().out
    assert run.metrics("train")[-1]["images"] == 0
    answer = generate(run, prompt="Say it backwards: a red three, a blue five, a pink nine.", max_new_tokens=4)
    written = next((demo_cache / "mmtrain" / "chat").glob("*/config.json")).parent
    model, tokenizer = AutoModelForCausalLM.from_pretrained(written), AutoTokenizer.from_pretrained(written)
    text = "<s>USER: Say it backwards: a red three, a blue five, a pink nine. ASSISTANT:"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    said = model.generate(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=4)
    assert answer == tokenizer.decode(said[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    with pytest.raises(UserError, match="sees no pictures"):
        generate(run, Image.new("RGB", (8, 8)), "What?")
