"""Which parameters train: name patterns anywhere in the model set requires_grad, everything else is frozen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from mmtrain.plan.shapes import matches


def set_trainable(parameters: Iterable[tuple[str, nn.Parameter]], patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Freeze every parameter but those whose global name matches a pattern; return the trainable ones by name.

    Trainable parameters become fp32 in place: an optimizer step is smaller than bf16's rounding of most weights.
    """
    trainable = {}
    for name, parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None
        if matches(name, patterns):
            parameter.data = parameter.data.to(torch.float32)
            parameter.requires_grad_(True)
            trainable[name] = parameter
    return trainable
