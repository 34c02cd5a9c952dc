"""What a stage keeps for backward: frozen layers less than trained ones, recomputed ones little beyond an input."""

from __future__ import annotations

import pytest
import torch
from scenes import LAYERS, WIDTH, make_config

from mmtrain.model.stage import build_stage
from mmtrain.plan.plan import StagePlan

BATCH, LENGTH = 2, 64


def saved_bytes(parts, dtype: str, trainable: tuple[str, ...], recompute: int) -> int:
    """Bytes of distinct storages saved by the decoder layers of a middle stage, parameters left out."""
    config = make_config(parts, model__trainable=trainable, model__llm__dtype=dtype)
    stage = build_stage(config, StagePlan(1, 0, LAYERS, False, False, recompute))
    hidden = torch.randn(BATCH, LENGTH, WIDTH).to(stage.dtype).requires_grad_()
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    own = {p.untyped_storage().data_ptr() for p in [*stage.parameters(), *stage.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(hidden, positions)
    output.sum().backward()
    assert hidden.grad is not None and hidden.grad.any(), "frozen layers still pass the gradient on, recomputed or not"
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_layers_save_less_than_trained_ones_and_recompute_lowers_both(parts, dtype):
    trained_all = saved_bytes(parts, dtype, ("llm",), 0)
    frozen = saved_bytes(parts, dtype, ("projector",), 0)
    half = saved_bytes(parts, dtype, ("projector",), LAYERS // 2)
    recomputed = saved_bytes(parts, dtype, ("projector",), LAYERS)
    boundary = BATCH * LENGTH * WIDTH * (4 if dtype == "float32" else 2)
    assert recomputed < half < frozen < 0.85 * trained_all
    assert LAYERS * boundary <= recomputed < 2 * LAYERS * boundary, "each recomputed layer keeps its input, no more"
    assert saved_bytes(parts, dtype, ("llm",), LAYERS) < 0.2 * trained_all
