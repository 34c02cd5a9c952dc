"""Everything that a rank computes, run once on throwaway inputs before its first message.

A GPU loads a kernel at its first call, makes handles of its libraries, and asks the driver for memory: each may wait
for all that the device was given, also for messages posted ahead, whose sender may wait for this very rank. So all of
it is done while no message is under way; what first happens in a step all the same cannot hang, since the first step
runs with its receives `in_common_order`.

What remains: a later micro-batch that is larger than any before, for which either kind of memory grows in a step.

What the run computes stays the same to the last bit: no weight, gradient, optimizer state or random generator changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import to_device
from mmtrain.engine.one_stage import Piece, expected_batch
from mmtrain.engine.optimizer import MasterWeights, make_optimizer
from mmtrain.model.loss import count_answers
from mmtrain.model.stage import Chunk
from mmtrain.plan.costs import Models


def warm_up(
    config: RunConfig,
    models: Models,
    chunks: Mapping[int, Chunk],
    masters: MasterWeights,
    first_trainable_stage: int,
    device: torch.device,
) -> None:
    """Encode, forward, backward, predict with each of this rank's stages, and one update of throwaway weights.

    Inputs have the shapes of the run's micro-batches, and the contents that the planner expects of one. Takes about
    as long as a micro-batch, and its memory.
    """
    host = expected_batch(config, models)
    batch = to_device(host, device)
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        for stage, chunk in chunks.items():
            trains = stage >= first_trainable_stage
            piece = Piece(chunk, batch, input_gradient=stage > first_trainable_stage, backward=trains)
            piece.forward()
            piece.backward()
            if chunk.language.has_head:
                with torch.no_grad():
                    _, predicted = chunk.predict(piece.input, batch.position_ids, batch.labels)
                    count_answers(batch.labels, predicted)
    masters.zero_grad()
    if masters.by_name:
        weight = torch.nn.Parameter(torch.zeros(8, 8, device=device))
        weight.grad = torch.ones_like(weight)
        make_optimizer(torch.nn.Module(), {"throwaway": weight}, config.optimizer).step()
    if device.type == "cuda":
        for value in vars(host).values():  # page-locked memory, too, grows only where all wait: have twice as much
            if isinstance(value, torch.Tensor):
                torch.empty(2 * value.nbytes, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize(device)
