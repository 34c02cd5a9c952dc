"""The oracle: loss and gradients are those of a stock LlavaForConditionalGeneration, whatever the
layout.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from families import HYBRIDS, family_config
from ranks import run_ranks
from scenes import (
    Case,
    execute,
    make_config,
    make_document,
    merged,
    projector_of,
    relative,
    save_parts,
    stock_gradients,
    stock_llava,
    train_stock,
)
from sweeps import sweep
from tiers import nightly

from mmtrain.engine.optimizer import learning_rate
from mmtrain.model.llm.tiny import tiny_model

# pipeline, data, first decoder layers of all stages but the first where a rank has several.
LAYOUTS = {
    "pp1": (1, 1),
    "pp2": (2, 1),
    "pp4": (4, 1),
    "pp4, front and head alone": (4, 1, (0, 2, 4)),
    "pp2dp2": (2, 2),
    "pp2v3": (2, 1, (0, 1, 2, 3, 4)),
    "pp3v2": (3, 1, (0, 1, 2, 3, 4)),
    "pp2v2dp2": (2, 2, (1, 2, 3)),
}


def packed_step():
    """Four packs of several documents each: one, two or no images, different lengths."""
    d = [make_document(s, images=(1, 2, 0, 1)[s % 4], text=6 + 2 * (s % 5)) for s in range(12)]
    return tuple([[d[3 * i], d[3 * i + 1], d[3 * i + 2]]] for i in range(4))


def with_others(changed: dict[int, list]):
    """The packed step with other documents in some of its micro-batches."""
    return tuple(
        [changed[i]] if i in changed else microbatch for i, microbatch in enumerate(packed_step())
    )


def free_of_images(*seeds: int) -> list:
    return [make_document(seed, images=0) for seed in seeds]


STEPS = {
    "packed": packed_step(),
    "unpacked": tuple([[make_document(seed)]] for seed in range(4)),
    "image-free micro-batch": with_others({1: free_of_images(50, 51)}),
    # the second one's share
    "image-free replica": with_others({2: free_of_images(62), 3: free_of_images(63)}),
    "image-free step": with_others({i: free_of_images(70 + i) for i in range(4)}),
    "label-free micro-batch": with_others({2: [make_document(80, labelled=False)]}),
}


@pytest.fixture(scope="module")
def stock(parts):
    """Loss and projector gradients of each step by the stock model."""
    model = stock_llava(parts, seed=0)
    return {name: stock_gradients(model, step) for name, step in STEPS.items()}


DAILY = ("pp1", "pp2", "pp2v2dp2")


@pytest.mark.parametrize("layout", sweep(LAYOUTS, DAILY))
def test_loss_and_projector_gradients_equal_stock_llava(parts, stock, layout):
    pipeline, data, *cut = LAYOUTS[layout]
    config = partial(make_config, parts, parallel__pipeline=pipeline, parallel__data=data)
    if cut:
        config = partial(config, parallel__boundaries=cut[0])
    packed = (STEPS["packed"],)
    rows = [row for microbatch in STEPS["packed"] for row in microbatch]
    pairs = tuple(rows[i : i + 2] for i in (0, 2))
    # every step begins with the stock model's weights
    still = ({"match": ("projector",), "lr": 0.0},)
    cases = {
        "all steps": Case(config(optimizer__groups=still), tuple(STEPS.values())),
        "4 layers recompute": Case(config(parallel__recompute_layers=4), packed),
        "1 layer recomputes": Case(config(parallel__recompute_layers=1), packed),
        "prefetch": Case(config(), packed, prefetched=2),
        "2 packs a micro-batch": Case(config(train__packs_per_microbatch=2), (pairs,)),
    }
    by_rank = run_ranks(pipeline * data, execute, list(cases.values()))
    worst = 0.0
    for i, variant in enumerate(cases):
        ranks = [rank[i] for rank in by_rank]
        for step, result in enumerate(ranks[0]["results"]):
            name = [*STEPS][step]
            loss, gradients = stock[name]
            assert all(rank["results"][step] == result for rank in ranks), (
                "every rank reports the same step"
            )
            assert result.loss == pytest.approx(loss, rel=1e-5)
            found = merged(ranks, "gradients", step)
            assert set(found) == {
                f"projector.linear_{i}.{part}" for i in (1, 2) for part in ("weight", "bias")
            }
            for parameter, gradient in gradients.items():
                if name == "image-free step":
                    assert not found[parameter].any(), (
                        "no image: the projector's gradient is zero, and there"
                    )
                else:
                    error = relative(found[parameter], gradient.double().numpy())
                    worst = max(worst, error)
                    assert error <= 1e-5, (name, variant, parameter, error)
        kinds = [rank["optimizer"] for rank in ranks]
        assert kinds == ["AdamW"] * data + ["NoOpOptimizer"] * (len(ranks) - data)
        assert all(rank["audit"]["failures"] == [] for rank in ranks)
    print(f"{layout}: worst relative gradient error {worst:.1e}")


def test_a_step_without_labels_updates_nothing_and_says_so(parts):
    unlabelled = tuple([[make_document(90 + i, labelled=False)]] for i in range(4))
    config = make_config(parts, parallel__pipeline=2, parallel__data=2, optimizer__weight_decay=0.1)
    # After an update AdamW's moments and its weight decay would move the weights without any
    # gradient.
    cases = [
        Case(config, steps)
        for steps in ((STEPS["packed"], unlabelled), (STEPS["packed"],), (unlabelled,))
    ]
    by_rank = run_ranks(4, execute, cases)
    for both, labelled, nothing in by_rank:
        second = both["results"][1]
        assert second.no_update == "no supervised token in the step" and second.loss is None
        assert second.lr == learning_rate(1, 20, config.optimizer, config.optimizer.lr), (
            "the LR schedule advances"
        )
        assert both["results"] == by_rank[0][0]["results"], "the same on every rank"
        for name, value in labelled["parameters"].items():
            np.testing.assert_array_equal(both["parameters"][name], value)
        assert all(t["moved"] for t in labelled["audit"]["trainable"])
        assert not any(t["moved"] or t["had_gradient"] for t in nothing["audit"]["trainable"])


# pipeline, data, layers that recompute
OF_HYBRIDS = ((1, 1, 0), (1, 1, 6), (2, 1, 0), (2, 1, 6), (4, 1, 0), (2, 2, 0))


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("qwen3_5_text", [(2, 1, 6)]),
        *(nightly(family, OF_HYBRIDS) for family in HYBRIDS),
    ],
)
def test_a_hybrid_llm_trains_on_packs_as_its_stock_class_on_each_document(
    tmp_path, family, layouts
):
    save_parts(tmp_path, layers=6)
    tiny_model(family_config(family, num_hidden_layers=6, **HYBRIDS[family]), 0).save_pretrained(
        tmp_path / "llm"
    )
    loss, gradients = stock_gradients(stock_llava(tmp_path, seed=0), STEPS["packed"])
    worst = 0.0
    for pipeline, data, recomputed in layouts:
        config = make_config(
            tmp_path,
            parallel__pipeline=pipeline,
            parallel__data=data,
            parallel__recompute_layers=recomputed // pipeline,
        )
        ranks = [
            rank[0]
            for rank in run_ranks(pipeline * data, execute, [Case(config, (STEPS["packed"],))])
        ]
        assert ranks[0]["results"][0].loss == pytest.approx(loss, rel=1e-5)
        found = merged(ranks, "gradients")
        worst = max(
            worst,
            *(relative(found[name], value.double().numpy()) for name, value in gradients.items()),
        )
        assert all(rank["audit"]["failures"] == [] for rank in ranks)
    print(f"{family}: worst relative gradient error {worst:.1e}")
    assert worst <= 1e-5


@pytest.fixture(scope="module")
def twenty_steps():
    """20 steps of 4 packs, five of them in turn, with image-free and label-free micro-batches
    strewn in.
    """
    steps = []
    for s in range(20):
        rows = []
        for i in range(4):
            seed = 1000 + 16 * (s % 5) + 4 * i
            row = [
                make_document(seed + j, images=(seed + j) % 3, text=6 + (seed + j) % 9)
                for j in range(2)
            ]
            if (s % 5 + i) % 7 == 0:
                row = [make_document(seed, images=0, labelled=False)]
            rows.append([row])
        steps.append(tuple(rows))
    return tuple(steps)


@pytest.fixture(scope="module")
def stock_run(parts, twenty_steps):
    """The same 20 steps by a plain torch loop over the stock model."""
    model = stock_llava(parts, seed=0)
    history, _ = train_stock(model, twenty_steps, make_config(parts), projector_of(model))
    return history


@pytest.mark.parametrize("layout", sweep(("pp1", "pp2", "pp4", "pp2dp2"), ("pp2",)))
def test_twenty_steps_follow_the_stock_training_loop(parts, twenty_steps, stock_run, layout):
    pipeline, data = LAYOUTS[layout]
    config = make_config(parts, parallel__pipeline=pipeline, parallel__data=data)
    ranks = [rank[0] for rank in run_ranks(pipeline * data, execute, [Case(config, twenty_steps)])]
    found = [(r.loss, r.grad_norm) for r in ranks[0]["results"]]
    np.testing.assert_allclose(found, stock_run, rtol=1e-4)
    assert all(last[0] < first[0] for first, last in zip(found[:5], found[15:], strict=True)), (
        "the projector learns"
    )
    print(f"{layout}: worst {np.max(np.abs(np.array(found) / np.array(stock_run) - 1)):.1e}")
