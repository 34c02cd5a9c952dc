"""The contiguous cut of layers into stages that makes the slowest stage as fast as possible within a memory limit.

Work of a stage is forward + dgrad + wgrad of its layers, plus one more forward of each layer that recomputes its
activations. Memory of a stage is weights + optimizer state + what in-flight micro-batches keep + workspace. Stage s of
p has at most p - s micro-batches in flight, so early stages have less room than late ones; recomputing the first r of
a stage's decoder layers buys room, and the search uses the smallest r that fits.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mmtrain.config import RunConfig
from mmtrain.plan.costs import BYTES, LayerCost, Models, layer_costs, workload

RESERVED_SHARE = 0.06
"""Share of a memory limit left to what is not counted: CUDA context, fragmentation, communication buffers."""

Cut = tuple[int, ...]  # p + 1 borders: stage s holds layers [cut[s], cut[s + 1])


@dataclass(frozen=True, slots=True)
class Setting:
    """What a cut depends on besides the layers' costs."""

    pipeline: int
    microbatches_per_step: int
    boundary_bytes: int  # what crosses a border between stages, per micro-batch
    memory_bytes: int | None  # a rank's limit
    recompute_layers: Literal["auto"] | tuple[int, ...]  # per pipeline rank
    shared_ends_bytes: int = 0  # weights that front and head share if they are on one stage (tied embeddings)


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Work (FLOPs per micro-batch) and memory (bytes) of one stage."""

    work: int
    recomputed_work: int  # part of `work`
    recompute_layers: int
    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.activation_bytes + self.workspace_bytes


class StageCosts:
    """What any stage of any cut needs; layer 0 is the front, the last one the head."""

    def __init__(self, layers: Sequence[LayerCost], setting: Setting) -> None:
        self.layers = layers
        self.setting = setting
        self.count = len(layers)
        self.first_trainable = next(i for i, layer in enumerate(layers) if layer.trainable_names)
        self.usable_bytes = (
            None if setting.memory_bytes is None else math.floor(setting.memory_bytes * (1 - RESERVED_SHARE))
        )
        self._work = _sums(layer.flops.total for layer in layers)
        # A layer without backward keeps nothing, so recomputing it changes nothing.
        self._forward_again = _sums(layer.flops.forward if layer.saved_bytes else 0 for layer in layers)
        self._weights = _sums(layer.weight_bytes for layer in layers)
        self._state = _sums(layer.state_bytes for layer in layers)
        self._saved = _sums(layer.saved_bytes for layer in layers)
        self._recomputed = _sums(layer.recomputed_bytes for layer in layers)
        self._workspace = [layer.workspace_bytes for layer in layers]

    def least_work(self, begin: int, end: int) -> float:
        """Work of layers [begin, end) if nothing is recomputed; infinite if their weights alone do not fit.

        Grows as `begin` falls or `end` rises.
        """
        if self.usable_bytes is not None and self.least_bytes(begin, end) > self.usable_bytes:
            return math.inf
        return self._work[end] - self._work[begin]

    def least_bytes(self, begin: int, end: int) -> int:
        """Weights and optimizer state of layers [begin, end)."""
        return self._weight_bytes(begin, end) + self._state[end] - self._state[begin]

    def need(self, stage: int, begin: int, end: int, *, smallest: bool = False) -> StageNeed:
        """Work and memory of layers [begin, end) as one stage.

        With "auto" recompute, the fewest layers that fit, or all decoder layers if nothing fits or `smallest`.
        """
        first, last = max(begin, 1), min(end, self.count - 1)  # its decoder layers
        decoder_layers = max(0, last - first)
        setting = self.setting
        if setting.recompute_layers == "auto":
            if smallest:
                count = decoder_layers
            elif self.usable_bytes is None:
                count = 0
            else:
                room = self.usable_bytes - self.least_bytes(begin, end) - max(self._workspace[begin:end])
                count = bisect_left(
                    range(decoder_layers), True, key=lambda r: self._activations(stage, begin, end, first, r) <= room
                )
        else:
            count = min(setting.recompute_layers[stage], decoder_layers)
        again = self._forward_again[first + count] - self._forward_again[first] if count else 0
        return StageNeed(
            work=self._work[end] - self._work[begin] + again,
            recomputed_work=again,
            recompute_layers=count,
            weight_bytes=self._weight_bytes(begin, end),
            state_bytes=self._state[end] - self._state[begin],
            activation_bytes=self._activations(stage, begin, end, first, count),
            workspace_bytes=max(self._workspace[begin:end]),
        )

    def fits(self, need: StageNeed) -> bool:
        return self.usable_bytes is None or need.total_bytes <= self.usable_bytes

    def _weight_bytes(self, begin: int, end: int) -> int:
        both_ends = begin == 0 and end == self.count
        return self._weights[end] - self._weights[begin] - (self.setting.shared_ends_bytes if both_ends else 0)

    def _activations(self, stage: int, begin: int, end: int, first: int, recompute: int) -> int:
        """Bytes kept by all in-flight micro-batches when `recompute` decoder layers from `first` on recompute."""
        setting = self.setting
        borders = (stage > 0) + (stage < setting.pipeline - 1)
        if end <= self.first_trainable:
            # Forward only: nothing holds such a rank back, so the outputs of a whole step may wait to be received.
            waiting = setting.microbatches_per_step if stage < setting.pipeline - 1 else 0
            return (waiting + (stage > 0)) * setting.boundary_bytes
        saved = self._saved[end] - self._saved[begin]
        if recompute:
            saved -= self._saved[first + recompute] - self._saved[first]
            saved += self._recomputed[first + recompute] - self._recomputed[first]
        in_flight = min(setting.pipeline - stage, setting.microbatches_per_step)
        return in_flight * (saved + borders * setting.boundary_bytes)


def stage_costs(config: RunConfig, models: Models, memory_bytes: int | None) -> StageCosts:
    """Costs of any stage of this run; `memory_bytes` is what a rank may use (None: no limit)."""
    layers = layer_costs(config, models)
    size = BYTES[config.model.llm.dtype]
    tokens = workload(config, models.vision).tokens
    head = sum(size * p.numel for p in models.llm.head if p.name == "llm.head.weight")
    recompute = config.parallel.recompute_layers
    return StageCosts(
        layers,
        Setting(
            pipeline=config.parallel.pipeline,
            microbatches_per_step=config.train.packs_per_step
            // (config.parallel.data * config.train.packs_per_microbatch),
            boundary_bytes=tokens * (size * models.llm.hidden_size + 2 * 8),  # hidden states, position ids, labels
            memory_bytes=memory_bytes,
            recompute_layers=(recompute,) * config.parallel.pipeline if isinstance(recompute, int) else recompute,
            shared_ends_bytes=head if models.llm.tied else 0,
        ),
    )


def find_cut(config: RunConfig, costs: StageCosts) -> Cut | None:
    """The cut the config asks for, or the best one; None if it does not fit."""
    if config.parallel.boundaries is None:
        return best_cut(costs)
    cut = given_cut(config, costs)
    fits = all(costs.fits(costs.need(s, cut[s], cut[s + 1])) for s in range(costs.setting.pipeline))
    return cut if fits else None


def given_cut(config: RunConfig, costs: StageCosts) -> Cut:
    """The cut that `parallel.boundaries` describes."""
    return (0, *(boundary + 1 for boundary in config.parallel.boundaries or ()), costs.count)


def best_cut(costs: StageCosts) -> Cut | None:
    """The cut whose slowest stage has the least work, all stages within the memory limit; None if none fits.

    Exact. Of several such cuts the one with the smallest sum of squared work, then the one whose late stages hold the
    most layers: the answer is a function of the costs alone.
    """

    def work(stage: int, begin: int, end: int) -> int | None:
        need = costs.need(stage, begin, end)
        return need.work if costs.fits(need) else None

    slowest = _search(costs, work, max, costs.least_work)
    if slowest is None:
        return None
    bound = slowest[0]

    def square(stage: int, begin: int, end: int) -> int | None:
        amount = work(stage, begin, end)
        return None if amount is None or amount > bound else amount * amount

    def least_square(begin: int, end: int) -> float:
        least = costs.least_work(begin, end)
        return math.inf if least > bound else least * least

    balanced = _search(costs, square, operator.add, least_square)
    assert balanced is not None
    return balanced[1]


def smallest_cut(costs: StageCosts) -> Cut:
    """The cut whose largest stage needs the least memory, all decoder layers recomputing where that is allowed."""

    def size(stage: int, begin: int, end: int) -> int:
        return costs.need(stage, begin, end, smallest=True).total_bytes

    found = _search(costs, size, max, costs.least_bytes)
    assert found is not None
    return found[1]


def can_fit(costs: StageCosts) -> bool:
    """Whether some cut fits, found quickly: each stage takes as many layers as it can hold."""
    stages, end = costs.setting.pipeline, 0
    for stage in range(stages):
        begin, last_end = end, costs.count - (stages - 1 - stage)
        while end < last_end and costs.fits(costs.need(stage, begin, end + 1, smallest=True)):
            end += 1
        if end == begin:
            return False
    return end == costs.count


def _search(
    costs: StageCosts,
    amount: Callable[[int, int, int], int | None],
    join: Callable[[int, int], int],
    least: Callable[[int, int], float],
) -> tuple[int, Cut] | None:
    """Dynamic programming over (stage, end): minimises the joined amounts of all stages.

    `amount(stage, begin, end)` is None where that stage may not be; `least(begin, end)` is a lower bound of it that
    grows as `begin` falls, so that the scan over `begin` can stop.
    """
    layers, stages = costs.count, costs.setting.pipeline
    best: list[dict[int, tuple[int, int]]] = []  # per stage: end -> (joined amount, begin)
    for stage in range(stages):
        row: dict[int, tuple[int, int]] = {}
        last_end = layers - (stages - 1 - stage)
        for end in range(layers if stage == stages - 1 else stage + 1, last_end + 1):
            found: tuple[int, int] | None = None
            if stage == 0:
                value = amount(0, 0, end)
                found = None if value is None else (value, 0)
            else:
                for begin in range(end - 1, stage - 1, -1):
                    bound = least(begin, end)
                    if bound == math.inf or (found is not None and bound > found[0]):
                        break
                    if begin not in best[-1]:
                        continue
                    value = amount(stage, begin, end)
                    if value is None:
                        continue
                    joined = join(best[-1][begin][0], value)
                    if found is None or joined <= found[0]:  # equal: the smaller begin
                        found = (joined, begin)
            if found is not None:
                row[end] = found
        best.append(row)
    if layers not in best[-1]:
        return None
    borders = [layers]
    for row in reversed(best):
        borders.append(row[borders[-1]][1])
    return best[-1][layers][0], tuple(reversed(borders))


def _sums(values: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(values, initial=0))
