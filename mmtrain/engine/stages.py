"""Build the stages of a rank with the source of its streamed layers, and check that its GPU has
room.
"""

import torch
import torch.distributed as dist

from mmtrain.config.schema import RunConfig
from mmtrain.engine.process_groups import replica_group
from mmtrain.facts.models import Models, models_of
from mmtrain.facts.projector import connector, connector_parameters
from mmtrain.facts.shapes import matches_any
from mmtrain.model.stage import Stage, build_stage
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import HostSource, PeerSource, quantised_source
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
        sharing = replica_group(
            plan,
            rank,
            device,
            timeout_seconds,
            plan.streaming.weight_shards,
        )
        return StreamedLayers(PeerSource(sharing, device))
    return StreamedLayers(quantised_source(source, device, plan.llm))


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
    streamed = streamed_layers(
        plan,
        rank,
        device,
        replicas,
        config.parallel.timeout_seconds,
    )
    if resumes and trains_whole_projector(models_of(config)):
        config = config.changed({"model.projector.init_from": None})
    built = {}
    for stage in plan.ranks[rank].stages:
        built[stage.stage] = build_stage(
            config,
            stage,
            device=device,
            streamed=streamed,
        )
    return built


def trains_whole_projector(models: Models) -> bool:
    """Whether all of the projector trains: a resumed run then needs no file to begin with."""
    section = models.section
    operations = connector(section.projector, 1, 2, models.layout_class.has_newlines)
    parameters = connector_parameters(operations)
    return all(matches_any(parameter.name, section.trainable) for parameter in parameters)


def refuse_short_device_memory(
    rank: RankPlan,
    device: torch.device,
) -> None:
    """Raise UserError where a GPU has less memory left than the plan still needs on it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = GpuMemory(
            total,
            free,
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        name = f"{device} ({torch.cuda.get_device_name(device)})"
        refuse_short_memory(rank, name, memory)
