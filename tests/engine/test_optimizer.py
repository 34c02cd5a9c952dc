import math

import pytest
import torch
from stock_encoders import ENCODERS
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer
from transformers.optimization import get_scheduler, get_wsd_schedule

from mmtrain.config.schema import OptimizerSection
from mmtrain.engine.optimizer import (
    MasterWeights,
    NoOpOptimizer,
    clip_coefficient,
    learning_rate,
    make_optimizer,
)
from mmtrain.plan.optimizer_kinds import parameter_groups


def test_a_no_op_optimizer_is_a_real_optimizer_that_does_nothing():
    optimizer = NoOpOptimizer()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.step() is None and optimizer.step(lambda: 3.0) == 3.0
    fresh = NoOpOptimizer()
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state_dict() == optimizer.state_dict()


def test_master_weights_add_up_gradients_and_updates_that_bfloat16_would_lose():
    stored = {
        "a": nn.Parameter(torch.ones(1, dtype=torch.bfloat16)),
        "b": nn.Parameter(torch.ones(1)),
    }
    masters = MasterWeights(stored, OptimizerSection())
    assert masters.by_name["b"] is stored["b"], "fp32 needs no twin"
    for factor in (256.0, 1.0):  # their sum, 257, is no bf16 number
        (stored["a"] * factor).sum().backward()
    assert stored["a"].grad is None and masters.by_name["a"].grad.tolist() == [257.0]
    optimizer = torch.optim.SGD(masters.by_name.values(), lr=2**-10 / 257)
    for _ in range(4):
        optimizer.step()
        masters.write_back()
    assert stored["a"].item() == 1 - 2**-8, "four updates of 2^-10, each below bf16's rounding at 1"
    masters.zero_grad()
    assert masters.by_name["a"].grad is None and stored["b"].grad is None


def trained(updates):
    """One weight in bf16 and one in fp32 after some updates, and their masters."""
    stored = {
        "a": nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)),
        "b": nn.Parameter(torch.ones(4)),
    }
    masters = MasterWeights(stored, OptimizerSection(lr=0.1, weight_decay=0.1))
    update(masters, range(updates))
    return stored, masters


def update(masters, numbers):
    for number in numbers:
        for master in masters.by_name.values():
            master.grad = torch.arange(1.0, master.numel() + 1).view_as(master) / (number + 3)
        masters.optimizer.step()
        masters.write_back()


def copies(masters):
    """Copies of master weights and of their optimizer state, by name."""
    kinds = masters.by_name, masters.optimizer_state()
    return [{name: tensor.detach().clone() for name, tensor in kind.items()} for kind in kinds]


def equal(found, expected):
    return all(
        torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in a
    )


def test_the_state_by_name_is_adamws_own():
    _, masters = trained(0)
    assert masters.optimizer_state() == {}, "torch makes it at the first update"
    update(masters, range(2))
    state = masters.optimizer_state()
    assert sorted(state) == [
        f"{name}/{part}" for name in "ab" for part in ("exp_avg", "exp_avg_sq", "step")
    ]
    for number, name in enumerate("ab"):
        for part, value in masters.optimizer.state_dict()["state"][number].items():
            assert state[f"{name}/{part}"] is value
    assert state["a/step"].item() == 2 and state["a/exp_avg"].shape == (2, 3)
    assert MasterWeights({}, OptimizerSection()).optimizer_state() == {}


@pytest.mark.parametrize("before", [0, 3])
def test_what_was_loaded_trains_on_to_the_same_bits_and_shares_no_memory(before):
    stored, masters = trained(before)
    loaded, kept = copies(masters), copies(masters)
    other_stored, other = trained(7)  # whatever was there goes
    other.load(*loaded)
    assert equal([other_stored], [stored]), "also what is computed with"
    for each in (masters, other):
        update(each, range(before, before + 2))
    assert equal([other.by_name, other_stored], [masters.by_name, stored])
    assert equal(loaded, kept), "updates left the copies alone"


@pytest.mark.parametrize(
    ("weights", "state", "odd"),
    [
        ({"a": None}, {}, "a"),
        ({"c": torch.ones(1)}, {}, "c"),
        ({"a": torch.ones(3, 2)}, {}, "a"),
        ({}, {"a/step": None}, "a/step"),
        ({}, {"b/step": torch.ones(1)}, "b/step"),
        ({}, {f"x{i}/step": torch.ones(()) for i in range(7)}, "x0/step, .*, x4/step and 2 more"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(weights, state, odd):
    changed = [
        kind | changes
        for kind, changes in zip(copies(trained(2)[1]), (weights, state), strict=True)
    ]
    loaded = [
        {name: tensor for name, tensor in kind.items() if tensor is not None} for kind in changed
    ]
    _, other = trained(1)
    before = copies(other)
    with pytest.raises(ValueError, match=f"do not fit what trains on this rank: {odd}$"):
        other.load(*loaded)
    assert equal(before, copies(other))


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("cosine", {}),
        ("linear", {}),
        ("constant", {"name": "constant_with_warmup"}),
        ("wsd", {"name": "warmup_stable_decay", "decay_type": "linear", "num_decay_steps": 24}),
        (
            "wsd",
            {
                "name": "warmup_stable_decay",
                "decay_type": "linear",
                "num_decay_steps": 24,
                "min_lr_ratio": 0.25,
            },
        ),
    ],
)
def test_schedules_are_those_of_transformers_but_for_the_warm_up_which_begins_one_step_ahead(
    schedule, theirs
):
    kinds = {key: value for key, value in theirs.items() if key not in ("name", "num_decay_steps")}
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    sgd = torch.optim.SGD([weight], lr=0.5)
    name = theirs.get("name", schedule)
    steps = {"num_warmup_steps": 12, "num_training_steps": 120}
    if name == "warmup_stable_decay":
        scheduler = get_wsd_schedule(
            sgd, **steps, num_decay_steps=theirs["num_decay_steps"], **kinds
        )
    else:
        scheduler = get_scheduler(name, sgd, **steps)
    expected = []
    for _ in range(120):
        expected.append(scheduler.get_last_lr()[0])
        sgd.step()
        scheduler.step()
    low = theirs.get("min_lr_ratio", 0.0)
    config = OptimizerSection(
        schedule=schedule, warmup_fraction=0.1, decay_fraction=0.2, min_lr_fraction=low
    )
    rates = [learning_rate(step, 120, config, 0.5) for step in range(120)]
    assert rates[12:] == pytest.approx(expected[12:], rel=1e-12)
    assert rates[:12] == pytest.approx([0.5 * step / 12 for step in range(1, 13)])


def test_warm_up_may_take_no_step_or_all_and_wsd_that_never_stays_falls_right_after_it():
    assert learning_rate(0, 1, OptimizerSection(warmup_fraction=0.0), 1e-3) == 1e-3
    assert learning_rate(0, 5, OptimizerSection(warmup_fraction=1.0), 1e-3) == pytest.approx(2e-4)
    config = OptimizerSection(
        schedule="wsd", warmup_fraction=0.5, decay_fraction=0.5, min_lr_fraction=0.1
    )
    # 2.5 of each: 3, and 2 are left
    rates = [learning_rate(step, 5, config, 1.0) for step in range(5)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 0.55])


def test_each_group_of_weights_has_its_rate_and_decay_and_groups_without_any_here_are_left_out():
    masters = {
        name: nn.Parameter(torch.ones(1))
        for name in ("projector.a", "llm.layers.1.b", "llm.head.weight")
    }
    groups = (
        {"match": ("vision",), "lr": 0.25},
        {"match": ("projector",), "lr": 0.5},
        {"match": ("llm.layers.*",), "weight_decay": 0.0},
    )
    config = OptimizerSection(lr=1e-3, weight_decay=0.1, groups=groups)
    assert isinstance(make_optimizer({}, config), NoOpOptimizer)
    made = make_optimizer(masters, config)
    assert type(made) is torch.optim.AdamW
    assert [(g["name"], g["lr"], g["weight_decay"], g["params"]) for g in made.param_groups] == [
        ("projector", 0.5, 0.1, [masters["projector.a"]]),
        ("llm.layers.*", 1e-3, 0.0, [masters["llm.layers.1.b"]]),
        ("the rest", 1e-3, 0.1, [masters["llm.head.weight"]]),
    ]


STOCK = {
    **{
        name: lambda make=make: make()
        for name, (make, *_) in ENCODERS.items()
        if name in ("clip_vision", "dinov2")
    },
    **dict.fromkeys(("gpt2", "olmo2", "cohere2", "gpt_oss", "qwen3_next")),
}


@pytest.mark.parametrize("family", STOCK)
def test_what_decays_is_what_transformers_trainer_decays(family):
    with torch.device("meta"):
        make = STOCK[family] or (
            lambda: AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](num_hidden_layers=4))
        )
        model = make()
    names = [name for name, _ in model.named_parameters()]
    decayed, spared = parameter_groups(OptimizerSection(weight_decay=0.1), names)
    assert (decayed.weight_decay, spared.weight_decay, decayed.name) == (0.1, 0.0, spared.name)
    assert set(decayed.parameters) == set(Trainer.get_decay_parameter_names(None, model)) & set(
        names
    )
    assert sorted(decayed.parameters + spared.parameters) == sorted(names) and spared.parameters


def test_biases_and_norms_decay_where_a_group_says_so_alone():
    names = (
        "projector.linear_1.weight",
        "projector.linear_1.bias",
        "llm.norm.weight",
        "llm.layers.3.mlp.up.weight",
    )
    stored = {name: nn.Parameter(torch.ones(2)) for name in names}
    groups = (
        {"match": ("projector",), "weight_decay": 0.5},
        {"match": ("llm.layers.*",), "lr": 1.0},
    )
    masters = MasterWeights(stored, OptimizerSection(lr=1.0, weight_decay=0.25, groups=groups))
    for parameter in stored.values():
        parameter.grad = torch.zeros(2)
    masters.optimizer.step()
    assert [parameter.tolist() for parameter in stored.values()] == [
        [0.5] * 2,
        [0.5] * 2,
        [1.0] * 2,
        [0.75] * 2,
    ]


@pytest.mark.parametrize("limit", [0.5, 100.0, None])
def test_clipping_equals_torchs(limit):
    gradient = torch.randn(7, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(torch.zeros(7))
    parameter.grad = gradient.clone()
    norm = float(torch.nn.utils.clip_grad_norm_([parameter], math.inf if limit is None else limit))
    torch.testing.assert_close(gradient * clip_coefficient(norm, limit), parameter.grad)
