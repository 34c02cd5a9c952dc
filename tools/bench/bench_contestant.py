"""What takes part in a race: something that makes one training step after another, over the same samples.

Contestant.step() -> loss; its first step tells the projector's gradients too, by stock names (`linear_1.weight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

Gradients = dict[str, torch.Tensor]


class Contestant(Protocol):
    """One way of training the same projector."""

    def step(self) -> float:
        """Make one optimizer step; the loss per supervised token before it, in nats, the same on every rank."""
        ...

    @property
    def gradients(self) -> Gradients | None:
        """Of the first step's loss; None before it, and on ranks without the projector."""
        ...


class FirstGradients:
    """Keeps the gradients with which an optimizer makes its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self.found: Gradients | None = None
        self._parameters = dict(parameters)
        self._hook = optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        self.found = {name: p.grad.detach().clone() for name, p in self._parameters.items()}
        self._hook.remove()
