"""Why mmtrain has an engine of its own: DeepSpeed's pipeline fails where a stage is frozen.

When one of these tests fails, DeepSpeed has changed: look at what it does now and correct what
README and design say.
"""

from __future__ import annotations

import deepspeed
import pytest
import torch

# torch.optim imports it at the first optimizer: 2 s here, or 2 s in every rank
import torch._dynamo
from deepspeed.pipe import LayerSpec, PipelineModule
from ranks import run_ranks
from torch import nn

from mmtrain.engine.optimizer import NoOpOptimizer

WIDTH = 8


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Trained(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


FROZEN_END, FROZEN_BEGIN = [Trained, Frozen, Frozen, Frozen], [Frozen, Frozen, Frozen, Trained]
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
UNCLIPPED = {"gradient_clipping": 0.0}


def init() -> None:
    # else it is compiled
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def train_once(layers: list[type], config: dict[str, object]) -> None:
    """One training step over two stages of two layers each."""
    init()
    model = PipelineModule(
        [LayerSpec(layer) for layer in layers],
        num_stages=2,
        partition_method="uniform",
        loss_fn=nn.MSELoss(),
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = (
        None
        if "optimizer" in config
        else torch.optim.AdamW(trainable)
        if trainable
        else NoOpOptimizer()
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=own,
        model_parameters=trainable,
        dist_init_required=False,
        config={
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": None,
            **config,
        },
    )
    engine.train_batch(iter([(torch.randn(2, WIDTH), torch.randn(2, WIDTH))] * 2))


def test_deepspeed_trains_when_nothing_is_frozen():
    run_ranks(2, train_once, [Trained] * 4, UNCLIPPED)


@pytest.mark.parametrize(
    ("layers", "config", "error"),
    [
        (FROZEN_END, ADAMW | UNCLIPPED, "ValueError: optimizer got an empty parameter list"),
        (FROZEN_BEGIN, UNCLIPPED, "RuntimeError: element 0 of tensors does not require grad"),
        (FROZEN_END, {}, "IndexError: list index out of range"),
    ],
    ids=["empty optimizer", "backward upstream", "default clipping"],
)
def test_deepspeed_dies_on_the_frozen_rank(layers, config, error):
    with pytest.raises(AssertionError, match=error):
        run_ranks(2, train_once, layers, config)
