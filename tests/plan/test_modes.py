"""What each mode of training costs, planned, against torch's own counts of one rank's whole micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scenes import make_config, save_parts
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.model.stage import build_stage
from mmtrain.plan import costs
from mmtrain.plan.costs import RunCosts, run_costs
from mmtrain.plan.plan import StagePlan
from mmtrain.plan.planner import models_of

ADAPTERS = {"r": 8, "alpha": 16}
MODES = {
    "connector": {"model__trainable": ("projector",)},
    "last layers": {"model__trainable": ("llm.layers.2", "llm.layers.3", "llm.norm", "llm.head")},
    "LoRA": {"model__trainable": ("projector", "llm.layers.*.lora_*"), "model__lora": ADAPTERS},
    "LoRA of the encoder": {
        "model__trainable": ("vision.*.lora_*",),
        "model__lora": {**ADAPTERS, "targets": ("vision.*",)},
    },
    "encoder and connector": {"model__trainable": ("vision", "projector")},
    "all": {"model__trainable": ("vision", "projector", "llm")},
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("modes")
    save_parts(folder)
    return folder


def micro_batch(folder: Path, mode: str, **settings: object) -> tuple[RunCosts, SingleStage]:
    """Two packs of one document each, which fill them: an image and its text."""
    settings |= {"data__expected_text_tokens": 60, "data__expected_supervised_fraction": 0.25}
    config = make_config(folder, train__packs_per_microbatch=2, **settings, **MODES[mode])
    models = models_of(config)
    stage = build_stage(config, StagePlan(0, 0, 4, True, True, 0))
    single = SingleStage(stage, expected_batch(config, models), input_gradient=False, backward=True)
    return run_costs(config, models), single


@pytest.mark.parametrize("mode", MODES)
def test_flops_of_a_step_are_those_that_torch_counts(parts: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Attention is counted as torch counts it: all keys for each query, those up to the last supervised token on rows.
    monkeypatch.setattr(costs, "keys_seen", lambda document, last, window: document - (last < document))
    planned, single = micro_batch(parts, mode)
    expected = sum((layer.flops.total for layer in planned.layers), planned.encoder.forward)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        single.features = single.encode()
        single.forward()
        single.backward()
    rotary = 2 * 8 * 2 * 64  # of 8 frequencies and 2 x 64 positions, which older transformers multiply as matrices
    assert counted.get_total_flops() - expected in (0, rotary)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_bytes_that_are_kept_for_backward_are_those_that_torch_saves(parts: Path, mode: str, dtype: str) -> None:
    planned, single = micro_batch(parts, mode, model__llm__dtype=dtype)
    known = [
        *single.module.parameters(),
        *single.module.buffers(),
        *filter(torch.is_tensor, vars(single.batch).values()),
    ]
    pointers = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (pointer := tensor.untyped_storage().data_ptr()) not in pointers:
            kept[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        single.features = single.encode()
        single.forward()
        single.backward()
    expected = sum(layer.kept_bytes for layer in planned.layers)
    actual = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    print(f"{mode} in {dtype}: {expected:,} bytes planned, {actual:,} saved, {expected / actual - 1:+.1%}")
    assert expected == pytest.approx(actual, rel=0.05)
