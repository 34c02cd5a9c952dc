"""Adapters of stages: what they begin with, and that none is left out of what is computed."""

from __future__ import annotations

import pytest
import torch
from scenes import make_config
from torch.nn.functional import cosine_similarity

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.facts.models import models_of
from mmtrain.model.stage import Stage, build_stage
from mmtrain.plan.plan import StagePlan

pytestmark = pytest.mark.slow

LORA = {
    "model__trainable": ("llm.layers.*.lora_*", "vision.*.lora_*"),
    "model__lora": {"r": 4, "alpha": 8, "targets": ("llm.layers.*", "vision.*")},
}


def weights(*stages: Stage) -> dict[str, torch.Tensor]:
    return {name: p.detach() for stage in stages for name, p in stage.global_parameters()}


def whole(parts, recompute: int = 0, **settings) -> Stage:
    return build_stage(
        make_config(parts, **LORA, **settings), StagePlan(0, 0, 4, True, True, recompute)
    )


def test_adapters_begin_with_the_same_draws_in_every_layout_and_change_nothing(parts) -> None:
    config = make_config(parts, **LORA)
    torch.manual_seed(1)
    one = whole(parts)
    torch.manual_seed(2)
    cut = [
        StagePlan(0, 0, 1, True, False, 0),
        StagePlan(1, 1, 3, False, False, 1),
        StagePlan(2, 3, 4, False, True, 0),
    ]
    several = [build_stage(config, stage) for stage in cut]
    whole_weights, weights_of_stages = weights(one), weights(*several)
    assert whole_weights.keys() == weights_of_stages.keys()
    assert all(torch.equal(p, weights_of_stages[name]) for name, p in whole_weights.items())
    bare = build_stage(make_config(parts), StagePlan(0, 0, 4, True, True, 0))
    assert all(torch.equal(p, whole_weights[name]) for name, p in weights(bare).items()), (
        "the models' own names stay"
    )
    hidden, positions = torch.randn(1, 8, 64), torch.arange(8)[None]
    assert torch.equal(one(hidden, positions), bare(hidden, positions))
    other = weights(whole(parts, run__seed=1))
    drawn = {name for name, p in whole_weights.items() if not torch.equal(p, other[name])}
    assert {name.rsplit(".", 2)[1] for name in drawn if not name.startswith("projector.")} == {
        "lora_A"
    }
    adapters = [p for name, p in whole_weights.items() if name.endswith("lora_A.weight")]
    assert (
        len({tuple(p.detach().flatten()[:3].tolist()) for p in adapters})
        == len(adapters)
        == 4 * 7 + 2 * 6
    )
    for name, p in whole_weights.items():
        if "lora_A" in name:  # as nn.Linear draws: uniform up to 1 / sqrt(in)
            assert p.abs().max() <= p.shape[1] ** -0.5 and p.std() == pytest.approx(
                (3 * p.shape[1]) ** -0.5, rel=0.15
            )


def test_adapters_are_stored_in_the_type_of_what_they_stand_in(parts) -> None:
    stage = whole(parts, model__llm__dtype="bfloat16", model__vision__dtype="float32")
    for name, p in stage.global_parameters():
        if ".lora_" in name:
            assert p.dtype == (torch.float32 if name.startswith("vision.") else torch.bfloat16), (
                name
            )
            assert p.requires_grad


def test_frozen_layers_under_recomputation_give_adapters_the_same_gradients_to_the_bit(
    parts,
) -> None:
    gradients = []
    for recompute in (0, 4):
        stage = whole(parts, recompute)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, p in stage.global_parameters():
                if ".lora_B" in name:
                    p.normal_(generator=generator)
        hidden = torch.randn(2, 16, 64, generator=generator)
        labels = torch.where(torch.arange(16) % 3 == 0, 5, -100).expand(2, -1)
        loss, _ = stage.loss(hidden, torch.arange(16).expand(2, -1), labels)
        loss.backward()
        gradients.append(
            {
                n: p.grad
                for n, p in stage.global_parameters()
                if n.startswith("llm.") and p.requires_grad
            }
        )
    assert len(gradients[0]) == 2 * 4 * 7
    assert all(g.any() and torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())


def test_adapters_in_bfloat16_have_the_gradients_of_float32() -> None:
    """In the demo's trained models, whose weights are the same in both types; the bound is that of
    every tensor.
    """
    gradients = []
    for dtype in ("float32", "bfloat16"):
        trainable = 'model.trainable=[projector, "llm.layers.*.lora_*"]'
        settings = [
            trainable,
            "model.lora.r=8",
            f"model.llm.dtype={dtype}",
            "train.packs_per_microbatch=4",
        ]
        config = load_config("configs/llava_pp4.yaml", settings)
        models = models_of(config)
        stage = build_stage(config, StagePlan(0, 0, len(models.llm.decoder), True, True, 0))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, p in stage.global_parameters():
                if ".lora_" in name:
                    p.copy_(
                        torch.empty(p.shape).uniform_(-0.05, 0.05, generator=generator).bfloat16()
                    )
                elif not name.startswith("projector."):
                    p.copy_(p.bfloat16())
        single = SingleStage(
            stage, expected_batch(config, models), input_gradient=False, backward=True
        )
        single.forward()
        single.backward()
        gradients.append(
            {
                n: p.grad.double().flatten()
                for n, p in stage.global_parameters()
                if p.grad is not None
            }
        )
    exact, found = gradients
    assert exact.keys() == found.keys() and len(exact) == 4 + 2 * 4 * 7
    cosines = {name: float(cosine_similarity(g, found[name], dim=0)) for name, g in exact.items()}
    assert min(cosines.values()) >= 0.999, min(cosines, key=cosines.get)


@pytest.mark.parametrize("part", ["llm", "vision"])
def test_an_adapter_that_its_model_does_not_call_is_refused(parts, part) -> None:
    stage = whole(parts)  # which refuses none
    model = stage.language.model if part == "llm" else stage.vision.model
    mlp = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    mlp.forward = lambda hidden: hidden
    with pytest.raises(
        UserError, match=rf"computes {part}.*layers\.1\.mlp\.\w+, .* without a call of the layer"
    ):
        stage.try_out("cpu")
