"""The front of a pipeline alone, with the micro-batch that its planner expects, and the bytes that
it takes.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmtrain.config.schema import RunConfig
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.facts.models import models_of
from mmtrain.model.stage import build_stage
from mmtrain.plan.plan import StagePlan


def front_of(config: RunConfig) -> SingleStage:
    stage = build_stage(config, StagePlan(0, 0, 0, True, False))
    return SingleStage(
        stage, expected_batch(config, models_of(config)), input_gradient=False, backward=True
    )


class Usage(NamedTuple):
    """Bytes of tensors alive during some work and at its end, beyond those at its begin."""

    peak: int
    end: int


class _Counted(TorchDispatchMode):
    """Counts the storages of all results of torch's operations while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is(x)}
        for tensor in filter(_is, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _release(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.alive -= size


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def bytes_of_front(front: SingleStage) -> list[Usage]:
    """Return the bytes of encoding, of the forward and of the backward, gradients already there."""
    front.forward()
    front.backward()
    front.features = None

    def encode() -> None:
        front.features = front.encode()

    def take() -> None:
        front.forward()
        front.release_output()
        front.features = None

    used = []
    with _Counted() as counted:
        for work in (encode, take, front.backward):
            begin = counted.peak = counted.alive
            work()
            used.append(Usage(counted.peak - begin, counted.alive - begin))
    return used
