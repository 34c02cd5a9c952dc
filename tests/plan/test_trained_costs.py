"""What each part of a model costs when it trains: the planner's FLOPs and bytes are those that
torch counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from sweeps import sweep
from tiny_models import make_tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from whole_models import save_whole, whole_config

from mmtrain.config.load import DEMO, load_config
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.optimizer import MasterWeights
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.facts.models import models_of
from mmtrain.model.stage import Stage, build_stage
from mmtrain.plan.block_costs import keys_seen
from mmtrain.plan.costs import FP32, Models, Workload, run_costs
from mmtrain.plan.plan import StagePlan

pytestmark = pytest.mark.slow

MICROBATCH = (  # the demo's: an image of 16 positions and 48 tokens, 16 of them supervised
    *(
        "data.pack_length=64",
        "data.expected_text_tokens=48",
        "data.expected_supervised_fraction=0.25",
    ),
    "train.packs_per_microbatch=1",
)
TRAINED = [  # model.trainable, and model.lora.targets if there are adapters
    ("projector", None),
    ("projector, llm.layers.2, llm.layers.3", None),
    ("projector, llm.layers.*.lora_*", "llm.layers.*"),
    ("projector, vision.*.lora_*", "vision.*"),
    ("projector, vision", None),
    ("projector, vision, llm", None),
]


@pytest.mark.parametrize(
    ("trainable", "targets"), sweep(TRAINED, (TRAINED[0], TRAINED[2], TRAINED[5]))
)
def test_the_demos_micro_batch_costs_what_torch_counts(trainable, targets):
    """One micro-batch and one update on one rank that holds everything."""
    lora = (
        []
        if targets is None
        else ["model.lora.r=8", "model.lora.alpha=16", f"model.lora.targets=[{targets}]"]
    )
    config = load_config(DEMO, [f"model.trainable=[{trainable}]", *lora, *MICROBATCH])
    models = models_of(config)
    costs = run_costs(config, models)
    stage = build_stage(config, StagePlan(0, 0, len(models.llm.decoder), True, True))
    masters = MasterWeights(
        {name: p for name, p in stage.global_parameters() if p.requires_grad}, config.optimizer
    )
    stored = {p.data_ptr() for p in stage.parameters()}
    with _saved_bytes(stage) as saved:
        _forward_and_backward(stage, expected_batch(config, models))
    masters.reduce_gradients(None)
    masters.optimizer.step()
    state = [moment for moment in masters.optimizer_state().values() if moment.dim()]
    for master in masters.by_name.values():
        state += [master.grad] if master.data_ptr() in stored else [master.grad, master]
    # torch's counter sees the matrix products of attention that is not fused.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        _forward_and_backward(stage, expected_batch(config, models))
    flops = counted.get_total_flops() - _left_out_by_masks(models, costs.work)
    planned_flops = costs.encoder.forward + sum(layer.flops.total for layer in costs.layers)
    # transformers 5.17 makes the angles of positions by a product of matrices: 2,048 FLOPs.
    assert flops == pytest.approx(planned_flops, rel=1e-5)
    assert sum(saved.values()) == pytest.approx(
        sum(layer.kept_bytes for layer in costs.layers), rel=0.05
    )
    assert sum(tensor.numel() * FP32 for tensor in state) == sum(
        layer.state_bytes for layer in costs.layers
    )


@pytest.mark.parametrize("trainable", [("projector",), ("projector", "vision")])
@pytest.mark.parametrize(
    "kind", sweep(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "paddleocr_vl"], ["qwen3_vl"])
)
def test_a_whole_model_with_m_rope_costs_what_torch_counts(tmp_path, kind, trainable):
    """Mergers, DeepStack and the encoder that trains; two documents of an image and text."""
    save_whole(kind, tmp_path, make_tokenizer())
    expected = {
        "expected_image_tiles": 15,
        "expected_image_positions": 15,
        "expected_text_tokens": 33,
    }
    config = whole_config(
        tmp_path, model__trainable=trainable, **{f"data__{key}": n for key, n in expected.items()}
    )
    models = models_of(config)
    costs, batch = run_costs(config, models), expected_batch(config, models)
    stage = build_stage(config, StagePlan(0, 0, len(models.llm.decoder), True, True))
    assert [tiling.positions for tiling in batch.tilings] == [15, 15]
    with _saved_bytes(stage) as saved:
        _forward_and_backward(stage, batch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        _forward_and_backward(stage, batch)
    flops = counted.get_total_flops() - _left_out_by_masks(models, costs.work)
    planned = costs.encoder.forward + sum(layer.flops.total for layer in costs.layers)
    kept = sum(layer.kept_bytes for layer in costs.layers)
    print(
        f"{kind}: FLOPs {flops / planned:.4f}, saved bytes {sum(saved.values()) / kept:.3f} of "
        "what is planned"
    )
    assert flops == pytest.approx(planned, rel=0.02)
    assert sum(saved.values()) == pytest.approx(kept, rel=0.1)


def _forward_and_backward(stage: Stage, batch: PackedBatch) -> None:
    alone = SingleStage(stage, batch, input_gradient=False, backward=True)
    alone.forward()
    alone.backward()


@contextlib.contextmanager
def _saved_bytes(stage: Stage) -> Iterator[dict[int, int]]:
    """Bytes of the distinct storages that autograd saves meanwhile, parameters and buffers left
    out, by address.
    """
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())
    }
    alive, found = [], {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)  # so that no other gets its address
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _left_out_by_masks(models: Models, work: Workload) -> int:
    """What torch counts of attention and nobody needs, products with later tokens, in a forward and
    a backward.
    """
    llm, keys = models.llm, work.document
    whole = work.tokens * (keys - keys_seen(keys, keys, None))
    # the last token predicts nothing
    rows = work.supervised * (keys - 1 - keys_seen(keys, work.supervised, None))
    return round(3 * 4 * llm.heads * llm.head_dim * (whole * (len(llm.decoder) - 1) + rows))
