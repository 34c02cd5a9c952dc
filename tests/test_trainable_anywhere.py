"""Whatever trains, and wherever it lies, trains as in one process; nothing upstream of it runs
backward.
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from ranks import run_ranks
from scenes import Case, execute, make_config, make_steps, relative, stock_llava, train_stock
from sweeps import sweep
from tiers import nightly
from transformers import LlamaForCausalLM

from mmtrain.facts.shapes import matches_any

STEPS = 3
# trainable patterns -> first stage that runs backward, at boundaries [1, 2, 3]: front + layer 0 | 1
# | 2 | 3 + head
PATTERNS = {
    ("llm.layers.0",): 0,
    ("llm.layers.2",): 2,
    ("llm.layers.3",): 3,
    ("llm.layers.*.mlp.*",): 0,
    ("llm.head", "llm.norm"): 3,
    ("llm.embedding",): 0,
    ("projector", "llm.layers.1.self_attn.q_proj"): 0,
    ("projector", "llm.embedding", "llm.layers.*", "llm.norm"): 0,
    ("projector", "llm.layers.*", "llm.norm", "llm.head"): 0,
    ("vision", "projector"): 0,
}
# trainable patterns -> optimizer.groups
GROUPS = {
    ("vision", "projector"): (  # stage 1.5: encoder and connector under a frozen LLM
        {"match": ("vision",), "lr": 1e-3},
        {"match": ("projector",), "weight_decay": 0.5},
    ),
    # ranks hold one group each, or what is in none
    ("projector", "llm.layers.1", "llm.layers.2", "llm.head"): (
        {"match": ("projector",), "lr": 3e-2, "weight_decay": 0.5},
        {"match": ("llm.layers.1",), "lr": 0.0},
        {"match": ("llm.layers.2",), "lr": 1e-3},
    ),
}
CONSTANT = {"optimizer__schedule": "constant", "optimizer__warmup_fraction": 0.0}
RUNS = [
    *((patterns,) for patterns in PATTERNS),
    *((patterns, None, STEPS, True) for patterns in GROUPS),
]
# a stage in the middle, the last one, all of them, groups
FEW = [RUNS[1], RUNS[4], RUNS[7], RUNS[-1]]


def canonical_name(stock_name: str) -> str:
    """Stock parameter names, written out by hand, peft's marks left out."""
    stock_name = (
        stock_name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .replace(".default", "")
    )
    for stock, ours in (
        ("model.multi_modal_projector.", "projector."),
        ("model.vision_tower.", "vision."),
        ("model.language_model.embed_tokens.", "llm.embedding."),
        ("model.language_model.", "llm."),
        ("lm_head.", "llm.head."),
        ("model.embed_tokens.", "llm.embedding."),  # of an LLM alone
        ("model.", "llm."),
    ):
        if stock_name.startswith(stock):
            return ours + stock_name.removeprefix(stock)
    raise AssertionError(stock_name)


def adapter_weight(name, shape):
    """A start in which B, too, is no zeros: with zeros A would have no gradient."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).uniform_(-0.3, 0.3, generator=generator)


def plain_groups(trainable, groups, lr):
    """`optimizer.groups` as torch.optim.AdamW takes them; their patterns are names of modules."""
    modules = tuple(name + "." for group in groups for name in group["match"])
    rest = {"params": [p for n, p in trainable.items() if not n.startswith(modules)]}
    return [rest] + [
        {
            "params": [p for n, p in trainable.items() if n.startswith(group["match"][0] + ".")],
            "lr": group.get("lr", lr),
            "weight_decay": group.get("weight_decay", 0.0),
        }
        for group in groups
    ]


@cache
def reference(folder, patterns, targets=None, count=STEPS, by_part=False, text=False):
    """(loss, norm) of each step, gradients of the first, weights before and after all, by one
    process of stock code.

    `targets` is peft's pattern of the modules that get an adapter. `by_part`: at the constant rates
    of GROUPS, else all at the rate of mmtrain's schedule. `text`: the LLM alone, on documents
    without images.
    """
    config = make_config(folder)
    peak = config.optimizer.lr
    model = (
        LlamaForCausalLM.from_pretrained(folder / "llm") if text else stock_llava(folder, seed=0)
    )
    if targets is not None:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()
    trainable = {}
    for name, p in model.named_parameters():
        if ".lora_" in name:
            with torch.no_grad():
                p.copy_(adapter_weight(canonical_name(name), p.shape))
        p.requires_grad_(matches_any(canonical_name(name), patterns))
        if p.requires_grad:
            trainable[canonical_name(name)] = p
    begin = {n: p.detach().numpy().copy() for n, p in trainable.items()}
    optimizer = (
        torch.optim.AdamW(plain_groups(trainable, GROUPS[patterns], peak), peak, weight_decay=0)
        if by_part
        else None
    )
    history, first = train_stock(
        model, make_steps(count, 1 if text else 3), config, trainable, optimizer
    )
    return history, first, begin, {n: p.detach().numpy() for n, p in trainable.items()}


def cases(folder, runs, **parallel):
    settings = {f"parallel__{key}": value for key, value in parallel.items()}
    made = []
    for patterns, *by_part in runs:
        more = CONSTANT | {"optimizer__groups": GROUPS[patterns]} if by_part else {}
        made.append(
            Case(
                make_config(folder, model__trainable=patterns, **settings, **more),
                make_steps(STEPS),
            )
        )
    return made


def check(folder, by_rank, references, rtol=1e-4):
    for i, (patterns, *options) in enumerate(references):
        ranks = [rank[i] for rank in by_rank]
        history, first, begin, end = reference(folder, patterns, *options)
        found = [(r.loss, r.grad_norm) for r in ranks[0]["results"]]
        np.testing.assert_allclose(found, history, rtol=rtol, err_msg=str(patterns))
        gradients = {n: g for rank in ranks for n, g in rank["gradients"][0].items()}
        # Towers end at the selected layer: what lies behind it is not there, and has no gradient in
        # the stock model.
        expected = {n: g for n, g in first.items() if n in gradients or g.any()}
        assert set(gradients) == set(expected), patterns
        largest = max(np.abs(g).max() for g in expected.values())
        for name, gradient in gradients.items():
            # A key's bias has no gradient but rounding (softmax does not see it): hence the second
            # term.
            tolerance = 1e-5 * np.abs(expected[name]).max() + 1e-7 * largest
            np.testing.assert_allclose(
                gradient, expected[name], rtol=0, atol=tolerance, err_msg=name
            )
        assert all(rank["audit"]["failures"] == [] for rank in ranks)
        for name, weights in ((n, w) for rank in ranks for n, w in rank["parameters"].items()):
            # AdamW makes whole steps of rounding, too
            if np.abs(expected[name]).max() > 1e-5 * largest:
                assert relative(weights - begin[name], end[name] - begin[name]) < 1e-3, name


@pytest.mark.nightly
def test_one_rank_trains_as_the_stock_model_does(parts):
    check(parts, run_ranks(1, execute, cases(parts, RUNS)), RUNS)


ALL = nightly(RUNS)


@pytest.mark.parametrize("runs", [FEW, ALL], ids=len)
def test_four_ranks_train_the_same_and_ranks_with_an_empty_parameter_list_stay_idle_upstream(
    parts, runs
):
    by_rank = run_ranks(
        4, execute, cases(parts, runs, pipeline=4, boundaries=(1, 2, 3), recompute_layers=1)
    )
    check(parts, by_rank, runs)
    for i, (patterns, *by_part) in enumerate(runs):
        if by_part:
            continue
        first = PATTERNS[patterns]
        for stage, rank in enumerate(r[i] for r in by_rank):
            ops = [op for op, _, _ in rank["executed"]]
            backward = ops.count("backward")
            assert backward == (4 * STEPS if stage >= first else 0), (patterns, stage)
            assert ops.count("send_gradient") == (4 * STEPS if stage > first else 0), (
                patterns,
                stage,
            )
            assert ops.count("receive_gradient") == (4 * STEPS if first <= stage < 3 else 0), (
                patterns,
                stage,
            )
            assert ops.count("forward") == 4 * STEPS
            trains = any(t["had_gradient"] for t in rank["audit"]["trainable"])
            assert rank["optimizer"] == ("AdamW" if trains else "NoOpOptimizer")


@pytest.mark.parametrize("runs", [FEW[2:], ALL], ids=len)
def test_two_replicas_of_two_ranks_train_the_same(parts, runs):
    check(parts, run_ranks(4, execute, cases(parts, runs, pipeline=2, data=2)), runs)


IN_BFLOAT16 = [
    ("projector",),
    ("projector", "llm.layers.2"),
    ("projector", "llm.layers.*.self_attn.q_proj", "llm.norm"),
    ("llm.embedding", "llm.head"),
    ("vision", "projector", "llm.layers.*.mlp"),
]


@pytest.mark.parametrize("sets", [IN_BFLOAT16[:2], nightly(IN_BFLOAT16)], ids=len)
def test_what_trains_in_bfloat16_has_the_gradients_of_float32_and_float32_weights(parts, sets):
    bfloat16 = {"model__llm__dtype": "bfloat16", "parallel__pipeline": 2}
    configs = [make_config(parts, model__trainable=patterns, **bfloat16) for patterns in sets]
    recomputed = make_config(
        parts, model__trainable=sets[1], **bfloat16, parallel__recompute_layers=2
    )
    by_rank = run_ranks(
        2, execute, [Case(config, make_steps(STEPS)) for config in [*configs, recomputed]]
    )
    for i, patterns in enumerate(sets):
        ranks = [rank[i] for rank in by_rank]
        history, first, *_ = reference(parts, patterns)
        assert ranks[0]["results"][0].loss == pytest.approx(history[0][0], rel=0.01)
        found = {name: g for rank in ranks for name, g in rank["gradients"][0].items()}
        assert found.keys() >= {name for name, g in first.items() if g.any()}
        largest = max(np.linalg.norm(g) for g in first.values())
        for name, gradient in found.items():
            norm = np.linalg.norm(first[name])
            if norm < 1e-3 * largest:
                continue  # rounding only, such as a key's bias
            cosine = gradient.ravel() @ first[name].ravel() / np.linalg.norm(gradient) / norm
            assert cosine >= 0.995, (name, cosine)
            assert np.linalg.norm(gradient) == pytest.approx(norm, rel=0.05), name
        for rank in ranks:
            assert all(p.dtype == np.float32 for p in rank["parameters"].values())
            assert rank["audit"]["failures"] == []
    for rank in by_rank:
        for name, gradient in rank[1]["gradients"][0].items():
            np.testing.assert_array_equal(
                rank[len(sets)]["gradients"][0][name], gradient, "recompute changes nothing"
            )


# what trains, what has adapters by our patterns, and the same by peft's
ADAPTED = {
    "all": (
        ("projector", "llm.layers.*.lora_*"),
        ("llm.layers.*",),
        r".*language_model\.layers\..*_proj",
    ),
    "last layer": (
        ("llm.layers.3.*.lora_*",),
        ("llm.layers.3",),
        r".*language_model\.layers\.3\..*_proj",
    ),
    "queries beside a whole layer": (
        ("llm.layers.*.lora_*", "llm.layers.1.mlp"),
        ("llm.layers.*.q_proj",),
        r".*language_model\.layers\..*q_proj",
    ),
    "encoder": (
        ("vision.*.lora_*", "projector"),
        ("vision.*",),
        r".*vision_tower\..*layers\.[01]\..*(_proj|fc1|fc2)",
    ),
}
LORA_STEPS = 5


def adapted(folder, names, **settings):
    """Cases of LoRA; every adapter begins as the reference's does."""
    weights = {}
    for patterns, _, targets in map(ADAPTED.get, names):
        first = reference(folder, patterns, targets, LORA_STEPS)[1]
        weights |= {n: adapter_weight(n, g.shape) for n, g in first.items() if ".lora_" in n}
    return [
        Case(
            make_config(
                folder,
                model__trainable=patterns,
                model__lora={"r": 4, "alpha": 8, "targets": ours},
                **settings,
            ),
            make_steps(LORA_STEPS),
            weights=weights,
        )
        for patterns, ours, _ in map(ADAPTED.get, names)
    ]


LAYOUTS = {
    "one": (1, {}),
    "four, recomputing": (4, {"pipeline": 4, "boundaries": (1, 2, 3), "recompute_layers": 1}),
    "two": (2, {"pipeline": 2}),
    "two, recomputing": (2, {"pipeline": 2, "recompute_layers": 1}),
    "front and head alone": (4, {"pipeline": 4, "boundaries": (0, 2, 4)}),
    "several stages a rank": (2, {"pipeline": 2, "boundaries": (1, 2, 3)}),
    "replicas": (4, {"pipeline": 2, "data": 2}),
}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("two, recomputing", ("all", "encoder")),
        *(nightly(layout, tuple(ADAPTED)) for layout in LAYOUTS),
    ],
)
def test_lora_trains_as_peft_does_on_the_stock_model(parts, layout, names):
    ranks, parallel = LAYOUTS[layout]
    settings = {f"parallel__{key}": value for key, value in parallel.items()}
    references = [
        (patterns, targets, LORA_STEPS) for patterns, _, targets in map(ADAPTED.get, names)
    ]
    check(parts, run_ranks(ranks, execute, adapted(parts, names, **settings)), references)


TEXT_PATTERNS = ("llm.layers.*", "llm.head"), ("llm.layers.3", "llm.head"), ("llm.embedding",)


ON_TEXT = ("one", "two", "front and head alone", "several stages a rank")


@pytest.mark.parametrize("layout", sweep(ON_TEXT, ("two",)))
def test_text_alone_trains_as_the_stock_causal_lm_does(parts, layout):
    ranks, parallel = LAYOUTS[layout]
    settings = {f"parallel__{key}": value for key, value in parallel.items()}
    settings |= {"model__vision": None, "data__template": "chat"}
    configs = [
        make_config(parts, model__trainable=patterns, **settings) for patterns in TEXT_PATTERNS
    ]
    by_rank = run_ranks(
        ranks, execute, [Case(config, make_steps(STEPS, images=1)) for config in configs]
    )
    check(
        parts,
        by_rank,
        [(patterns, None, STEPS, False, True) for patterns in TEXT_PATTERNS],
        rtol=1e-5,
    )
    # one may hold the embedding alone
    for rank in (rank for results in by_rank for rank in results):
        assert rank["optimizer"] == ("AdamW" if rank["parameters"] else "NoOpOptimizer")
