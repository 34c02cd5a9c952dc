"""Which parameters train: name patterns anywhere in the model set requires_grad, everything else is frozen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from mmtrain.pretrained.shapes import matches


def set_trainable(parameters: Iterable[tuple[str, nn.Parameter]], patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Freeze every parameter but those whose global name matches a pattern; return the trainable ones by name."""
    trainable = {}
    for name, parameter in parameters:
        parameter.requires_grad_(matches(name, patterns))
        if parameter.requires_grad:
            trainable[name] = parameter
    return trainable
