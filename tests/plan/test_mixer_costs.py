"""Recurrent layers are planned with the FLOPs that torch counts and the bytes that their stock code
keeps.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from families import HYBRIDS, family_config
from packaging.version import Version
from sweeps import sweep
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.base.errors import UserError
from mmtrain.facts.encoders import TESTED_TRANSFORMERS
from mmtrain.facts.families import canonical_name
from mmtrain.facts.shapes import LlmShape, ParameterShape, llm_shape
from mmtrain.model.llm.language import slice_of
from mmtrain.model.llm.tiny import tiny_model
from mmtrain.plan.block_costs import Block, block_parts, find_mixer, total

# By family: greatest relative error of bytes; of FLOPs forward and backward, where not those that
# torch counts.
KEPT = {
    "qwen3_5_text": 0.05,
    "olmo_hybrid": 0.14,
    "granitemoehybrid": 0.04,
    "bamba": 0.04,
    "nemotron_h": 0.04,
    "lfm2": 0.12,
    "lfm3": 0.12,
    "jamba": 0.08,
    "kimi_linear": 0.04,
}
BACKWARD = {"jamba": 0.05, "kimi_linear": 0.2}
# Stock mixers of older transformers compute the same by fewer products, and keep less.
OLDER = 0.0
if Version(transformers.__version__) < Version(TESTED_TRANSFORMERS):
    OLDER = 0.5


def costs(shape: LlmShape, layer: int, document: int, size: int) -> tuple[int, int, int]:
    """FLOPs of forward and input gradient, and bytes kept, of 4 documents."""
    sizes = (
        shape.hidden_size,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.experts,
        shape.experts_per_token,
    )
    block = Block(
        shape.decoder[layer], f"llm.layers.{layer}.", *sizes, shape.mixer_state, shape.mixer_chunk
    )
    assert block.mixer is not None and not block.attends
    tokens = 4 * document
    flops, kept = total(block_parts(block, (), size, tokens, tokens, document, document), True)
    return flops.forward, flops.dgrad, kept


@pytest.mark.parametrize("lacking", ["out_proj.weight", "dt_bias"])
def test_a_recurrent_layer_without_its_tensors_is_refused_by_name(lacking: str) -> None:
    prefix, shapes = (
        "llm.layers.3.",
        {"conv1d.weight": (64, 1, 4), "A_log": (4,), "dt_bias": (4,), "out_proj.weight": (8, 32)},
    )
    parameters = [
        ParameterShape(f"{prefix}linear_attn.{name}", s)
        for name, s in shapes.items()
        if name != lacking
    ]
    with pytest.raises(UserError, match=r"^llm\.layers\.3\.linear_attn has a convolution, but not"):
        find_mixer(parameters, prefix)


@pytest.mark.parametrize("document", [40, 64, 128])
@pytest.mark.parametrize("family", sweep(KEPT, ("qwen3_5_text", "nemotron_h", "lfm2")))
def test_a_recurrent_layer_costs_what_torch_counts(
    family: str, document: int, tmp_path: Path
) -> None:
    model = tiny_model(family_config(family, num_hidden_layers=6, **HYBRIDS[family]), 0)
    model.save_pretrained(tmp_path)
    shape = llm_shape(str(tmp_path))
    named = {canonical_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    assert {p.name: p.shape for layer in shape.decoder for p in layer} == {
        name: value for name, value in named.items() if name.startswith("llm.layers.")
    }
    part = slice_of(model, 0, 1, embedding=True, head=False)
    hidden = torch.randn(1, 4 * document, shape.hidden_size, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in (*part.parameters(), *part.buffers(), hidden)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        FlopCounterMode(display=False) as forward,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
    ):
        output = part(hidden, torch.arange(document).repeat(4)[None])
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    flops_forward, flops_backward, bytes_kept = costs(shape, 0, document, 4)
    assert math.isclose(flops_forward, forward.get_total_flops(), rel_tol=OLDER)
    tolerance = max(OLDER, BACKWARD.get(family, 0.0))
    assert math.isclose(flops_backward, backward.get_total_flops(), rel_tol=tolerance)
    found = sum(map(len, kept.values()))
    assert bytes_kept == pytest.approx(found, rel=max(OLDER, KEPT[family]))
