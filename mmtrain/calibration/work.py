"""What a calibration lets the device do: stages of the run's own layers, on micro-batches of the expected contents.

config --expected_batch--> PackedBatch --SingleStage.forward, .backward--> what the engine's FORWARD and BACKWARD run
a rank's trainable weights --StepEnd--> what the engine's reductions and optimizer run

Chunks are built as a run builds them (`build_chunk`: the run's own weights, dtypes and kernels) and called as the
engine calls them. Random numbers take the place of pictures, words and hidden states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from mmtrain.config.schema import RunConfig
from mmtrain.engine.optimizer import MasterWeights, make_optimizer
from mmtrain.engine.process_groups import replica_group
from mmtrain.engine.single_stage import SingleStage
from mmtrain.plan.layout import Plan

STATISTICS = 24  # numbers that all ranks reduce at a step's end


def matrix_products(piece: SingleStage) -> tuple[Callable[[], None], float]:
    """Products of all tokens with each matrix of the piece's decoder layers, and their FLOPs (2 a multiply-add)."""
    weights = [p for _, p in piece.chunk.language.global_parameters() if p.ndim == 2]
    tokens = piece.batch.position_ids.numel()
    rows = {w.shape[1]: torch.randn(tokens, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def run() -> None:
        with torch.no_grad():
            for weight in weights:
                torch.nn.functional.linear(rows[weight.shape[1]], weight)

    return run, 2.0 * tokens * sum(w.numel() for w in weights)


class StepEnd:
    """Gradients and statistics reduced, norm, AdamW update: the end of a step on a rank that trains these weights.

    Every rank of the job constructs it at the same time. The update leaves the weights as they are: its rate is 0.
    """

    def __init__(self, config: RunConfig, plan: Plan, parameters: dict[str, torch.nn.Parameter]) -> None:
        self.masters = MasterWeights(parameters)
        self._optimizer = make_optimizer(torch.nn.Module(), self.masters.by_name, config.optimizer)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._device = next(iter(parameters.values())).device
        self._replicas = replica_group(plan, dist.get_rank(), config.parallel.timeout_seconds)

    def reduce(self) -> None:
        """REDUCE_GRADIENTS and REDUCE_STATISTICS."""
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for master in self.masters.by_name.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if self._replicas is not None:
                dist.all_reduce(master.grad, group=self._replicas)
            square += torch.linalg.vector_norm(master.grad, dtype=torch.float64).square()
        sums = square.expand(STATISTICS).contiguous()
        dist.all_reduce(sums)
        sums.tolist()

    def update(self) -> None:
        """OPTIMIZER_STEP; a step's first backward then makes new gradients."""
        for master in self.masters.by_name.values():
            master.grad.mul_(1.0)
        self._optimizer.step()
        self.masters.write_back()
        self.masters.zero_grad()
