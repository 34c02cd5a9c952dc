"""The least exact work of a step, and how fast the machine multiplies matrices: what utilisation is measured against.

The least work is `mmtrain.plan.costs.minimal_flops`, which runs report as utilisation too. Nothing that somebody wastes
(recomputed layers, padding, logits of all positions) is part of it, so waste raises nobody's share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from bench_samples import Step

from mmtrain.data.samples.sample import IGNORE
from mmtrain.plan.costs import Models, Workload, minimal_flops


def least_flops(models: Models, trainable: Sequence[str], step: Step) -> int:
    """FLOPs that every exact way of making this step computes, matrix products only, 2 for a multiply-add."""
    documents = [entry for pack in step for entry in pack.entries]
    lengths = [len(document.input_ids) for document in documents]
    tiles = sum(tiling.tiles for document in documents for tiling in document.tilings)
    supervised = sum(label != IGNORE for document in documents for label in document.labels)
    document = sum(n * n for n in lengths) / max(1, sum(lengths))  # as the attention of all of them asks
    work = Workload(sum(lengths), document, tiles, 0, supervised)
    return minimal_flops(models, trainable, work).total


def matmul_rate(
    weights: Sequence[torch.Tensor], tokens: int, synchronise: Callable[[], None]
) -> tuple[Callable[[], float], float]:
    """A contestant that only multiplies (tokens, inputs) by each (outputs, inputs) weight, and its FLOPs a run."""
    device, dtype = weights[0].device, weights[0].dtype
    rows = {w.shape[1]: torch.randn(tokens, w.shape[1], device=device, dtype=dtype) for w in weights}
    flops = 2.0 * tokens * sum(w.numel() for w in weights)

    def run() -> float:
        synchronise()
        began = time.perf_counter()
        with torch.no_grad():
            for weight in weights:
                torch.nn.functional.linear(rows[weight.shape[1]], weight)
        synchronise()
        return time.perf_counter() - began

    return run, flops
