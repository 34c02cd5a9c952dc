"""Kinds of optimizers, as plans, engine and checkpoints know them, and the peak learning rate of
each part of a model; `engine/optimizer.py` updates, along the schedule of the rate.

A new optimizer needs an OptimizerKind here, its name in `optimizer_of`, and a key in
`config/schema.py` to choose it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmtrain.config.schema import OptimizerGroupSection, OptimizerSection
from mmtrain.facts.shapes import matches_any

if TYPE_CHECKING:
    import torch

# bytes of an element: pixels, the projector, master weights, gradients and optimizer state
FP32 = 4


@dataclass(frozen=True)
class OptimizerKind:
    """One kind of optimizer: how it is made, what it keeps of each trained weight, what it works
    in.
    """

    name: str
    moments: tuple[str, ...]  # torch's names of state tensors of the weight's shape, on its device
    # of those without dimensions, on the CPU: on a GPU each update would wait for them
    counters: tuple[str, ...]
    workspace_bytes: int  # of an element while it is updated
    make: Callable[[list[dict[str, Any]], OptimizerSection], torch.optim.Optimizer]

    def state_bytes(self, element_size: int) -> int:
        """Bytes of a trained element: gradient, moments and, if it is not stored in fp32, its
        master weight.
        """
        return FP32 * (1 + len(self.moments) + (element_size != FP32))


def _adamw(groups: list[dict[str, Any]], config: OptimizerSection) -> torch.optim.Optimizer:
    import torch  # plans do without

    return torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)


ADAMW = OptimizerKind(
    "AdamW",
    ("exp_avg", "exp_avg_sq"),
    ("step",),
    workspace_bytes=FP32,
    make=_adamw,
)
"""Decoupled weight decay (arXiv:1711.05101). It works in the root of the second moment."""


def optimizer_of(config: OptimizerSection) -> OptimizerKind:
    """The optimizer that a run asks for; AdamW is the only one."""
    return ADAMW


# ---- rates by part

REST = "the rest"  # no pattern: it has a blank, which no parameter's name has
# Biases and norms, by their names in all families: what transformers' Trainer does not decay
# either. Layer scales, class tokens and a recurrent layer's decay rates are neither.
_NOT_DECAYED = re.compile(r"(?i)bias|norm|[._]ln[._]")


@dataclass(frozen=True)
class ParameterGroup:
    name: str  # its patterns, or REST
    lr: float  # at its peak
    weight_decay: float
    parameters: tuple[str, ...]  # global names


def parameter_groups(config: OptimizerSection, names: Iterable[str]) -> list[ParameterGroup]:
    """Return the groups of `optimizer.groups` in order, then REST, each with those of `names` that
    it trains.

    Each is followed by a group of the same name: its biases and norms, where
    `optimizer.weight_decay` leaves them out.
    """
    groups = []
    remaining = list(names)
    rest = OptimizerGroupSection(match=("*",))
    for group in (*config.groups, rest):
        members = tuple(name for name in remaining if matches_any(name, group.match))
        remaining = [name for name in remaining if name not in members]
        name = REST if group is rest else ", ".join(group.match)
        lr = config.lr if group.lr is None else group.lr
        spared: tuple[str, ...] = ()
        weight_decay = group.weight_decay
        if weight_decay is None:
            weight_decay = config.weight_decay
            spared = tuple(filter(_NOT_DECAYED.search, members)) if weight_decay else ()
        decayed = tuple(member for member in members if member not in spared)
        groups += [
            ParameterGroup(name, lr, weight_decay, decayed),
            ParameterGroup(name, lr, 0.0, spared),
        ]
    return groups
