"""Build the stages of a rank with the source of its streamed layers, and check that its GPU has
room.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mmtrain.config.schema import RunConfig
from mmtrain.engine.process_groups import replica_group
from mmtrain.facts.connectors import connector, connector_parameters
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.model.stage import Stage, build_stage
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import HostSource, PeerSource, QuantisedSource
from mmtrain.plan.plan import Plan, RankPlan
from mmtrain.plan.refusals import GpuMemory, refuse_short_memory


def streamed_layers(
    plan: Plan,
    rank: int,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
    timeout_seconds: int,
) -> StreamedLayers | None:
    """Return a rank's streamed layers, as yet empty, with their source; None if the plan streams
    nothing. Collective.

    `replicas`: ranks with the same stages, for objects on the host; None with one replica.
    """
    if plan.streaming is None:
        return None
    source = plan.streaming.source
    if source == "host":
        return StreamedLayers(HostSource(device, replicas))
    if source == "peers":
        sharing = replica_group(plan, rank, device, timeout_seconds, plan.streaming.weight_shards)
        return StreamedLayers(PeerSource(sharing, device))
    return StreamedLayers(QuantisedSource(source, device))


def build_stages(
    config: RunConfig,
    plan: Plan,
    rank: int,
    device: torch.device,
    replicas: dist.ProcessGroup | None,
    *,
    resumes: bool,
) -> dict[int, Stage]:
    """Return a rank's stages by number, their weights loaded. Collective; `replicas` as
    `streamed_layers` has it.

    A run that `resumes` reads its checkpoint later.
    """
    streamed = streamed_layers(plan, rank, device, replicas, config.parallel.timeout_seconds)
    if resumes:
        config = without_init_from(config)
    stages = plan.ranks[rank].stages
    return {
        stage.stage: build_stage(config, stage, device=device, streamed=streamed)
        for stage in stages
    }


def without_init_from(config: RunConfig) -> RunConfig:
    """Return the configuration of a resumed run, which needs no file for a projector that trains as
    a whole.
    """
    parameters = connector_parameters(
        connector(config.model.projector, 1, 2, models_of(config).layout_class.has_newlines)
    )
    if not all(matches_any(parameter.name, config.model.trainable) for parameter in parameters):
        return config
    return config.changed({"model.projector.init_from": None})


def refuse_short_device_memory(rank: RankPlan, device: torch.device) -> None:
    """Raise UserError where a GPU has less memory left than the plan still needs on it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        name = f"{device} ({torch.cuda.get_device_name(device)})"
        refuse_short_memory(rank, name, GpuMemory(total, free, *used))
