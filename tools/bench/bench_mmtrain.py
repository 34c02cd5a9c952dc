"""mmtrain as a contestant: planned from its configuration, executed by its engine, fed from memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from bench_contestant import Gradients

from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.model.stage import Stage, build_stage
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.plan import Plan


class Mmtrain:
    """One rank of a run. `batches` is one endless iterator over micro-batches: the engine may read ahead in it.

    `stages` are this rank's stages, loaded from the configuration's files by default.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        batches: Iterator[PackedBatch],
        device: torch.device,
        stages: Mapping[int, Stage] | None = None,
    ) -> None:
        mine = plan.ranks[dist.get_rank()]
        if stages is None:
            stages = {stage.stage: build_stage(config, stage, device=device) for stage in mine.stages}
        self.gradients: Gradients | None = None
        self.idle: list[float] = []
        """Share of the latest step that each rank waited."""
        self._sums: Gradients = {}
        self._batches = batches if mine.pipeline == 0 else None
        self._engine = FrozenPipelineEngine(config, plan, stages, self._keep_gradients)

    def step(self) -> float:
        result = self._engine.train_step(self._batches)
        if self._sums:
            self.gradients = {name: g / result.supervised_tokens for name, g in self._sums.items()}
            self._sums = {}
        self.idle = [rank.idle_fraction for rank in result.ranks]
        return result.loss

    def _keep_gradients(self, step: int, instruction: Instruction) -> None:
        """Right before the first update: gradients are still those of the sum over the step's tokens."""
        if instruction.op is Op.OPTIMIZER_STEP:
            self._sums = {n.removeprefix("projector."): p.grad.clone() for n, p in self._engine.trainable.items()}
            self._engine.on_instruction = None
