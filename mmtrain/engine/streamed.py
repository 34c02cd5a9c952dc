"""The streamed layers of a rank: its plan says from where they come."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mmtrain.engine.process_groups import shard_group
from mmtrain.model.quantised_source import QuantisedSource
from mmtrain.model.streaming import StreamedLayers
from mmtrain.model.weight_sources import HostSource, PeerSource
from mmtrain.plan.plan import Plan


def streamed_layers(
    plan: Plan, rank: int, device: torch.device, replicas: dist.ProcessGroup | None, timeout_seconds: int
) -> StreamedLayers | None:
    """Those of a rank, to be taken when its stages are built; None where no rank of the plan has any.

    `replicas`: ranks with the same stages, for objects on the host; None with one replica. Every rank of the job calls
    it at the same time.
    """
    if plan.streaming is None:
        return None
    source = plan.streaming.source
    if source == "host":
        return StreamedLayers(HostSource(device, replicas))
    if source == "peers":
        return StreamedLayers(PeerSource(shard_group(plan, rank, device, timeout_seconds), device))
    return StreamedLayers(QuantisedSource(source, device))
