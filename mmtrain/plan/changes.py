"""Changes to a config with which a run would fit that does not: each is planned before it is proposed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.plan.calibration import Device
from mmtrain.plan.costs import Models
from mmtrain.plan.cut import best_cut, given_cut
from mmtrain.plan.search import Search
from mmtrain.plan.stage_costs import StageCosts, stage_costs
from mmtrain.plan.step_bound import least_step_seconds
from mmtrain.plan.workload import expected_image, typical_tiling
from mmtrain.pretrained.layouts import ImageLayout


def search_of(config: RunConfig, costs: StageCosts, prefetch: Literal["auto"] | int = "auto") -> Search:
    """The search for a layout as the config asks for it."""
    ranks = config.parallel.encoder_ranks
    return Search(costs, prefetch, (0,) if ranks == 0 else ranks)


def image_positions(config: RunConfig, layout: ImageLayout) -> int:
    """Positions of a typical image, for which a pack must have room: as expected, and as one can be."""
    tiling = typical_tiling(config, layout)
    return 0 if tiling is None else math.ceil(max(tiling.positions, expected_image(config, layout)[1]))


@dataclass(frozen=True)
class Trial:
    """Looks for changes to a config with which it would fit."""

    config: RunConfig
    models: Models
    limit: int
    device: Device | None

    def single_changes(self) -> Iterator[dict[str, Any]]:
        """For each kind of change the smallest one that fits."""
        yield from (changes for changes in _left_to_the_planner(self.config) if self.fits(changes))
        for kind in (_more_stages, _fewer_packs, _shorter_packs, _half_precision):
            found = next((changes for changes in kind(self.config, self.models) if self.fits(changes)), None)
            if found is not None:
                yield found

    def all_changes(self) -> dict[str, Any] | None:
        """Everything that saves memory at once, at the smallest pipeline degree that then fits."""
        changes: dict[str, Any] = {}
        for freed in _left_to_the_planner(self.config):
            changes |= freed
        for kind in (_half_precision, _fewer_packs, _shorter_packs):
            for last in kind(self.config, self.models):
                changes |= last
        smaller = self.config.changed(changes)
        for more in ({}, *_more_stages(smaller, self.models)):
            if self.fits(changes | more):
                return changes | more
        return None

    def fits(self, changes: Mapping[str, Any]) -> bool:
        """Whether the changed config can be planned, with the calibration that was named as long as that is for it."""
        changed = self.config.changed(changes)
        try:
            costs = stage_costs(changed, self.models, self.limit, self.device)
        except UserError:
            changed = changed.changed({"parallel.calibration": None})
            costs = stage_costs(changed, self.models, self.limit, self.device)
        if least_step_seconds(costs) == math.inf:
            return False
        parallel = changed.parallel
        search = search_of(changed, costs)
        if parallel.boundaries is not None:
            return search.with_encodes(given_cut(changed, costs)) is not None
        if parallel.stages_per_rank not in ("auto", 1):
            return bool(search.find(parallel.stages_per_rank))
        if search.encoder_ranks in ("auto", (0,)) and best_cut(costs) is not None:
            return True
        # A search takes seconds, so it must be likely to find something: without the encoder there is a cut that fits.
        in_slices = search.encoder_ranks != (0,) and best_cut(costs, [0] * parallel.pipeline) is not None
        return in_slices and bool(search.find(1))


def _left_to_the_planner(config: RunConfig) -> list[dict[str, Any]]:
    """For each choice that the config makes by hand the change that takes it back, and streaming, else off."""
    parallel = config.parallel
    resident = {} if config.model.llm.quantize is None else {"model.llm.quantize": None}
    cut = {} if parallel.boundaries is None else {"parallel.boundaries": None}
    return [cut] * bool(cut) + [
        change
        for by_hand, change in (
            (parallel.recompute_layers != "auto", {"parallel.recompute_layers": "auto"}),
            (parallel.streamed_layers != "auto", {**resident, "parallel.streamed_layers": "auto"}),
            (parallel.stages_per_rank not in ("auto", 1), {"parallel.stages_per_rank": 1, **cut}),
            (parallel.encoder_ranks != "auto", {"parallel.encoder_ranks": "auto"}),
        )
        if by_hand
    ]


def _more_stages(config: RunConfig, models: Models) -> Iterator[dict[str, Any]]:
    freed: dict[str, Any] = {} if config.parallel.boundaries is None else {"parallel.boundaries": None}
    if isinstance(config.parallel.recompute_layers, tuple):
        freed["parallel.recompute_layers"] = "auto"
    stages_per_rank = config.parallel.stages_per_rank if isinstance(config.parallel.stages_per_rank, int) else 1
    for pipeline in range(config.parallel.pipeline + 1, (len(models.llm.decoder) + 2) // stages_per_rank + 1):
        yield {"parallel.pipeline": pipeline, **freed}


def _fewer_packs(config: RunConfig, models: Models) -> Iterator[dict[str, Any]]:
    now = config.train.packs_per_microbatch
    yield from ({"train.packs_per_microbatch": n} for n in range(now - 1, 0, -1) if now % n == 0)


def _shorter_packs(config: RunConfig, models: Models) -> Iterator[dict[str, Any]]:
    length = config.data.pack_length // 2
    while length >= image_positions(config, models.layout) + config.data.expected_text_tokens:
        yield {"data.pack_length": length}
        length //= 2


def _half_precision(config: RunConfig, models: Models) -> Iterator[dict[str, Any]]:
    if config.model.llm.dtype == "float32":
        yield {"model.llm.dtype": "bfloat16"}


def option_text(config: RunConfig, changes: Mapping[str, Any]) -> str:
    """The changes as overrides for the command line."""
    text = " ".join(f"{key}={'null' if value is None else value}" for key, value in changes.items())
    if "parallel.pipeline" in changes:
        text += f"  ({changes['parallel.pipeline'] * config.parallel.data} ranks)"
    return text
