"""What a calibration lets the device do: stages of the run's own layers, on micro-batches of the expected contents.

config --expected_batch--> PackedBatch --Piece.forward, .backward--> what the engine's FORWARD and BACKWARD run
a rank's trainable weights --StepEnd--> what the engine's reductions and optimizer run

Chunks are built as a run builds them (`build_chunk`: the run's own weights, dtypes and kernels) and called as the
engine calls them. Random numbers take the place of pictures, words and hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from mmtrain.config import RunConfig
from mmtrain.data.packs import PackedBatch
from mmtrain.data.samples import IGNORE, IMAGE_POSITION
from mmtrain.model.stage import Chunk
from mmtrain.optimizer import MasterWeights, make_optimizer
from mmtrain.plan.costs import Models, workload
from mmtrain.plan.layout import Plan

STATISTICS = 24  # numbers that all ranks reduce at a step's end


def expected_batch(config: RunConfig, models: Models, seed: int = 0) -> PackedBatch:
    """A micro-batch on the CPU as the planner expects it: whole documents of one image and text, the rest padding.

    Labels stand at the end of each document, as many as `data.expected_supervised_fraction` says of the whole pack, at
    least one. It holds a whole number of images, one of them at least, where the planner may expect part of one.
    """
    packs, length = config.train.packs_per_microbatch, config.data.pack_length
    work = workload(config, models.vision)
    image_tokens = models.vision.tokens_per_image
    per_pack = max(1, length // work.document)
    supervised = max(1, round(work.supervised / (packs * per_pack)))
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, models.llm.vocab_size, (packs, length), generator=generator)
    labels = torch.full((packs, length), IGNORE)
    position_ids = torch.empty((packs, length), dtype=torch.int64)
    for document in range(per_pack):
        begin, end = document * work.document, (document + 1) * work.document
        input_ids[:, begin : begin + min(image_tokens, work.document)] = IMAGE_POSITION
        position_ids[:, begin:end] = torch.arange(work.document)
        last = end - 1  # predicts nothing
        labels[:, max(begin, last - supervised) : last] = 1
    position_ids[:, per_pack * work.document :] = torch.arange(length - per_pack * work.document)
    size = models.vision.image_size
    images = torch.randint(0, 256, (packs * per_pack, 3, size, size), dtype=torch.uint8, generator=generator)
    return PackedBatch(
        input_ids,
        position_ids,
        labels,
        images,
        keys=tuple(map(str, range(packs * per_pack))),
        tokens=packs * per_pack * work.document,
        epochs=(0,) * packs,
        samples_of_packs=(per_pack,) * packs,
    )


class Piece:
    """A stage to run once forward and once backward: one with the front (its input is `batch`), the head, or neither.

    `input_gradient` says that something before it trains, `backward` that something before it or in it does.
    """

    def __init__(
        self, chunk: Chunk, batch: PackedBatch, *, input_gradient: bool, backward: bool, recompute: int = 0
    ) -> None:
        self.chunk = chunk
        self.batch = batch
        self.runs_backward = backward
        self.recompute = recompute
        self.input_gradient = input_gradient
        device = next(chunk.parameters()).device
        shape = (*batch.position_ids.shape, chunk.language.hidden_size)
        self.input = torch.randn(shape, dtype=chunk.dtype, device=device)
        self.upstream = None if chunk.language.has_head else torch.randn(shape, dtype=chunk.dtype, device=device)
        self.features = chunk.encode(batch) if chunk.front is not None else None
        self._kept: Any = None

    def recomputing(self) -> Piece:
        """The same chunk, all its decoder layers recomputing their activations in backward."""
        layers = self.chunk.language.last - self.chunk.language.first
        return Piece(self.chunk, self.batch, input_gradient=self.input_gradient, backward=True, recompute=layers)

    def prepare(self) -> None:
        """What is neither forward nor backward: recomputation is set, since pieces may share a chunk."""
        self.chunk.language.recompute(self.recompute)
        if self.chunk.front is not None and not self.chunk.encoder_is_frozen:
            self.features = self.encode()  # its graph is used up by each backward

    def encode(self) -> torch.Tensor | None:
        """What ENCODE runs, where there is a front."""
        return self.chunk.encode(self.batch)

    def forward(self) -> None:
        """What FORWARD runs; the graph is kept as the engine keeps it: without the values that were sent."""
        with torch.set_grad_enabled(self.runs_backward):
            if self.chunk.front is not None:
                hidden = self.chunk.start(self.batch, self.features)
            else:
                hidden = self.input.detach().requires_grad_(self.input_gradient)
            if self.chunk.language.has_head:
                self._kept, _ = self.chunk.loss(hidden, self.batch.position_ids, self.batch.labels)
            else:
                self._kept = self.chunk(hidden, self.batch.position_ids)

    def release_output(self) -> None:
        """Right after the output was sent: backward needs the graph behind it, not the values."""
        if self.runs_backward and not self.chunk.language.has_head:
            self._kept = get_gradient_edge(self._kept)
        elif not self.runs_backward:
            self._kept = None

    def backward(self) -> None:
        """What BACKWARD runs, if this piece has one."""
        kept, self._kept = self._kept, None
        if self.runs_backward:
            torch.autograd.backward(kept, self.upstream)


def matrix_products(piece: Piece) -> tuple[Callable[[], None], float]:
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
        self._replicas = None
        if plan.data > 1:
            timeout = timedelta(seconds=config.parallel.timeout_seconds)
            for place in range(plan.pipeline):  # every rank makes all groups, in one order
                ranks = [rank.rank for rank in plan.ranks if rank.pipeline == place]
                group = dist.new_group(ranks, timeout=timeout)
                if dist.get_rank() in ranks:
                    self._replicas = group

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
