"""Rates by part: which parameters each group of `optimizer.groups` trains, at which rate and decay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mmtrain.base.errors import UserError
from mmtrain.base.printing import first_few
from mmtrain.config.schema import OptimizerSection, RunConfig
from mmtrain.plan.costs import Models
from mmtrain.plan.refusals import nearest_names
from mmtrain.pretrained.shapes import matches

REST = "the rest"  # no pattern: it has a blank, which no parameter's name has
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that train at one rate."""

    name: str  # its patterns, or REST
    lr: float  # at its peak
    weight_decay: float
    parameters: tuple[str, ...]  # global names


def parameter_groups(config: OptimizerSection, names: Iterable[str]) -> list[ParameterGroup]:
    """Each group of `optimizer.groups`, in their order, then REST, with those of `names` that it trains, if any."""
    members = defaultdict(list)
    for name in names:
        number = next((i for i, group in enumerate(config.groups) if matches(name, group.match)), len(config.groups))
        members[number].append(name)
    settings = [
        (
            ", ".join(group.match),
            config.lr if group.lr is None else group.lr,
            config.weight_decay if group.weight_decay is None else group.weight_decay,
        )
        for group in config.groups
    ]
    settings.append((REST, config.lr, config.weight_decay))
    return [ParameterGroup(*setting, tuple(members[number])) for number, setting in enumerate(settings)]


def check_groups(config: RunConfig, models: Models) -> None:
    """Raises UserError for a pattern of `optimizer.groups` that matches nothing that trains, and for overlaps."""
    groups = config.optimizer.groups
    names = [p.name for p in models.parameters]
    trained = [name for name in names if matches(name, config.model.trainable)]
    for number, group in enumerate(groups):
        for pattern in group.match:
            if any(matches(name, (pattern,)) for name in trained):
                continue
            key = f"optimizer.groups.{number}.match: {pattern!r}"
            if frozen := [name for name in names if matches(name, (pattern,))]:
                raise UserError(
                    f"{key} matches {first_few(frozen, NAMES_SHOWN)}, frozen by model.trainable, which is "
                    f"[{', '.join(config.model.trainable)}]; add it there, or leave the group out"
                )
            near = nearest_names(pattern, trained)
            raise UserError(
                f"{key} matches no parameter that trains; "
                + (f"nearest: {', '.join(near)}" if near else f"these train: {first_few(trained, NAMES_SHOWN)}")
            )
    for name in trained:
        found = [f"{i} ({', '.join(group.match)})" for i, group in enumerate(groups) if matches(name, group.match)]
        if len(found) > 1:
            raise UserError(
                f"optimizer.groups: {name} is in the groups {' and '.join(found)}; which rate should it train at? "
                "Narrow the patterns until each parameter is in one group"
            )
