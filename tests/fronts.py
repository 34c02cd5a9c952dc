"""The front of a pipeline alone, with the micro-batch that its planner expects, and the bytes that
it takes.
"""

from __future__ import annotations

import torch

from mmtrain.calibration.allocations import Usage, bytes_used
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

    return bytes_used(encode, take, front.backward, device=torch.device("cpu"))
