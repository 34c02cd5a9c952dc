import itertools
import math

import pytest
import torch
from torch import nn

from mmtrain.config import OptimizerSection
from mmtrain.optimizer import MasterWeights, NoOpOptimizer, clip_coefficient, learning_rate, make_optimizer


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def test_a_no_op_optimizer_is_a_real_optimizer_that_does_nothing():
    module = frozen()
    before = {name: p.clone() for name, p in module.named_parameters()}
    optimizer = NoOpOptimizer(module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.zero_grad()
    assert optimizer.step() is None and optimizer.step(lambda: 3.0) == 3.0
    fresh = NoOpOptimizer(module)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state_dict() == optimizer.state_dict()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.step()
    scheduler.step()
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())


def test_a_no_op_optimizer_refuses_a_rank_that_trains():
    with pytest.raises(ValueError, match="trains 2 parameters, first weight"):
        NoOpOptimizer(nn.Linear(2, 2))


def test_the_optimizer_follows_what_trains():
    module = frozen()
    assert isinstance(make_optimizer(module, {}, OptimizerSection()), NoOpOptimizer)
    module.weight.requires_grad_(True)
    adamw = make_optimizer(module, {"weight": module.weight}, OptimizerSection(lr=0.5, weight_decay=0.1))
    assert type(adamw) is torch.optim.AdamW
    assert adamw.param_groups[0]["lr"] == 0.5 and adamw.param_groups[0]["weight_decay"] == 0.1
    assert adamw.param_groups[0]["params"] == [module.weight]


def test_a_weight_in_bfloat16_is_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"llm\.head\.weight is optimized in torch\.bfloat16"):
        make_optimizer(nn.Module(), {"llm.head.weight": weight}, OptimizerSection())


def test_master_weights_add_up_gradients_and_updates_that_bfloat16_would_lose():
    stored = {"a": nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), "b": nn.Parameter(torch.ones(1))}
    masters = MasterWeights(stored)
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


def test_learning_rate_warms_up_linearly_then_follows_half_a_cosine():
    config = OptimizerSection(lr=2.0, warmup_fraction=0.1, min_lr_fraction=0.25)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    assert rates[99] == pytest.approx(2.0 * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * 89 / 90))))
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(0, 1, OptimizerSection(lr=1e-3, warmup_fraction=0.0)) == 1e-3
    assert learning_rate(0, 5, OptimizerSection(lr=1e-3, warmup_fraction=1.0)) == pytest.approx(2e-4)


@pytest.mark.parametrize("limit", [0.5, 100.0, None])
def test_clipping_equals_torchs(limit):
    gradient = torch.randn(7, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(torch.zeros(7))
    parameter.grad = gradient.clone()
    norm = float(torch.nn.utils.clip_grad_norm_([parameter], math.inf if limit is None else limit))
    torch.testing.assert_close(gradient * clip_coefficient(norm, limit), parameter.grad)
