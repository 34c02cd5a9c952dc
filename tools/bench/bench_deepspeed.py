"""DeepSpeed's own PipelineEngine as a contestant, with the least that lets it train with a frozen backbone.

What it needs to run at all (none of it changes what it computes):

1. a rank that trains nothing gets an optimizer with one empty group: an empty list is a ValueError;
2. `gradient_clipping` is 0: its default, 1.0, is an IndexError on such a rank;
3. the CPU's shared-memory op is marked as there, or it is compiled when the process group is made.

The partition is DeepSpeed's: `uniform` cuts the list of layers evenly, `parameters`, its default, by trainable
parameters, which leaves the ranks behind the first one layer each. Schedule, messages and backward are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import deepspeed
import torch
from bench_contestant import FirstGradients, Gradients
from bench_layers import Front, token_loss
from bench_models import LEARNING_RATE
from bench_samples import PaddedBatch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

Partition = Literal["parameters", "uniform"]


class Layer(nn.Module):
    """A layer that exists already, in the form in which DeepSpeed builds its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.layer(inputs)


class NoOptimizer(torch.optim.Optimizer):
    """For a rank without trainable parameters."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure: object = None) -> None:
        pass


class DeepSpeedPipeline:
    """One rank of `stages`. `batches` is an endless iterator over micro-batches, read on the first and last rank."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        partition: Partition,
        stages: int,
        microbatches: int,
        batches: Iterator[PaddedBatch],
    ) -> None:
        deepspeed.init_distributed(verbose=False)  # takes the default group as it is
        module = PipelineModule(
            [LayerSpec(Layer, layer) for layer in layers],
            num_stages=stages,
            partition_method=partition,
            loss_fn=token_loss,
        )
        self.parts = [int(bound) for bound in module.parts]
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0) if trainable else NoOptimizer()
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            model_parameters=trainable,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": microbatches,
                "gradient_clipping": 0.0,
                "steps_per_print": None,
            },
        )
        self._batches = ((((b.input_ids, b.pixel_values)), b.shifted_labels) for b in batches)
        front = next((layer for layer in layers if isinstance(layer, Front)), None)
        held = front is not None and bool(trainable)
        self._first = FirstGradients(optimizer, dict(front.projector.named_parameters())) if held else None

    @property
    def gradients(self) -> Gradients | None:
        return None if self._first is None else self._first.found

    def step(self) -> float:
        return float(self._engine.train_batch(self._batches))
