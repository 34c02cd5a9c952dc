"""torch.distributed.pipelining as a contestant: Schedule1F1B over a uniform cut of the same layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from bench_contestant import FirstGradients, Gradients
from bench_layers import Front, token_loss
from bench_models import LEARNING_RATE
from bench_samples import PaddedBatch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Layers(nn.Module):
    """Contiguous layers as one module; the front takes two tensors."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs if isinstance(self.layers[0], Front) else inputs[0]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class TorchPipeline:
    """One rank of `stages`, each rank one stage. `batches` is an endless iterator over micro-batches."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        stages: int,
        microbatches: int,
        batches: Iterator[PaddedBatch],
        device: torch.device,
    ) -> None:
        self._rank, self._last, self._device = dist.get_rank(), stages - 1, device
        bounds = [round(len(layers) * stage / stages) for stage in range(stages + 1)]
        self.parts = bounds
        mine = Layers(layers[bounds[self._rank] : bounds[self._rank + 1]])
        stage = PipelineStage(mine, self._rank, stages, device)
        self._schedule = Schedule1F1B(stage, microbatches, loss_fn=token_loss)
        self._steps = iter(lambda: list(itertools.islice(batches, microbatches)), [])
        trained = [p for p in mine.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0) if trained else None
        self._first = None
        if self._optimizer is not None:
            self._first = FirstGradients(self._optimizer, dict(layers[0].projector.named_parameters()))

    @property
    def gradients(self) -> Gradients | None:
        return None if self._first is None else self._first.found

    def step(self) -> float:
        batches = next(self._steps)
        losses: list[torch.Tensor] = []
        if self._rank == 0:
            ids, pixels = (torch.cat([getattr(b, name) for b in batches]) for name in ("input_ids", "pixel_values"))
            self._schedule.step(ids, pixels)
        elif self._rank == self._last:
            labels = torch.cat([batch.shifted_labels for batch in batches])
            self._schedule.step(target=labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self._device)
        dist.broadcast(loss, self._last)  # whoever prints it is on rank 0
        return float(loss)
