"""Config -> plan: which rank holds, trains and runs what; refuses what cannot run or does not fit.

config + model shapes --costs, timings--> seconds and bytes of each layer --search--> layers of each
    stage, what
recomputes, where the encoder runs --schedule--> instructions per rank
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from mmtrain.base.errors import MemoryLimitError
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import Models, models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.layouts.layout import ImageLayout
from mmtrain.plan.block_costs import Flops
from mmtrain.plan.calibration import Device
from mmtrain.plan.costs import expected_image, minimal_flops
from mmtrain.plan.cuts import given_cut, uniform_cut
from mmtrain.plan.instructions import fetches_of, uses_of
from mmtrain.plan.optimizers import parameter_groups
from mmtrain.plan.plan import (
    ExpectedImage,
    GroupPlan,
    Plan,
    RankPlan,
    StagePlan,
    StreamingPlan,
    UniformCut,
    stage_of,
)
from mmtrain.plan.refusals import check_run, does_not_fit
from mmtrain.plan.schedule import ranks_of
from mmtrain.plan.search import PipelineLayout, Search, least_step_seconds
from mmtrain.plan.stage_costs import StageCosts, Streaming, limit_on_gpu, stage_costs

STREAMING_GAIN = 0.005
"""Share of a step that streaming must save where it is left to the planner and all fits without."""


def make_plan(
    config: RunConfig,
    device_memory_bytes: int | None = None,
    device: Device | None = None,
) -> Plan:
    """Plan a run from its config and its models' shapes; starts nothing, imports no torch.

    The memory limit of a rank is `parallel.device_memory_gib`, else what its GPU's
    `device_memory_bytes` leave to it, else none. `device` is what ranks compute on (None: this
    machine's CPU); a calibration on it gives the costs. Raises UserError for a config that no plan
    can satisfy, MemoryLimitError, with what each rank needs, if none fits.
    """
    models = models_of(config).read()
    limit = memory_limit(config, device_memory_bytes)
    check_run(config, models)
    costs = stage_costs(config, models, limit, device)
    search, layout = _searched(config, costs)
    if config.parallel.streamed_layers == "auto":  # only where it is worth it
        resident, without = _searched(config, costs.changed(streaming=Streaming()))
        if without and (
            not layout
            or without.simulation.seconds * (1 - STREAMING_GAIN) <= layout.simulation.seconds
        ):
            search, layout = resident, without
    if layout is None:
        raise MemoryLimitError(does_not_fit(config, search, limit))
    return _plan(config, models, search, layout, limit)


def _searched(config: RunConfig, costs: StageCosts) -> tuple[Search, PipelineLayout | None]:
    search = Search(costs, config.parallel.encoder_ranks)
    if least_step_seconds(costs) == math.inf:  # a search for what fits nowhere takes long
        return search, None
    if config.parallel.boundaries is None:
        return search, search.find(config.parallel.stages_per_rank)
    return search, search.at_cut(given_cut(config, costs))


def memory_limit(config: RunConfig, device_memory_bytes: int | None) -> int | None:
    """Bytes that a rank may use, as `make_plan` takes them; None: no limit."""
    if config.parallel.device_memory_gib is not None:
        return int(config.parallel.device_memory_gib * 2**30)
    return None if device_memory_bytes is None else limit_on_gpu(device_memory_bytes)


def _plan(
    config: RunConfig, models: Models, search: Search, layout: PipelineLayout, limit: int | None
) -> Plan:
    costs = search.costs
    cut, seconds = layout.cut, layout.simulation.seconds
    pipeline, microbatches = config.parallel.pipeline, costs.setting.microbatches_per_step
    ranks = tuple(
        rank
        for place in range(pipeline)
        for rank in _ranks(config, costs, layout, place, microbatches)
    )
    replica = [rank for rank in ranks if rank.data == 0]
    computed = sum(rank.flops.total + rank.recompute_flops for rank in replica)
    needed = minimal_flops(models, config.model.trainable, costs.costs.work).total * microbatches
    timings, described = costs.timings, "assumed"
    if timings.device is not None:
        described = f"calibrated on {timings.device}"
        if pipeline > 1 and not timings.measured_messages:
            described += "; messages assumed"
        streams = any(rank.streamed for rank in layout.ranks)
        if streams and costs.setting.streaming.source not in timings.measured_fetches:
            described += "; fetches assumed"
    return Plan(
        run=config.run.name,
        llm=config.model.llm.path,
        vision=config.model.vision and config.model.vision.name,
        trainable=config.model.trainable,
        groups=_groups(config, models),
        pipeline=pipeline,
        stages_per_rank=layout.stages_per_rank,
        data=config.parallel.data,
        decoder_layers=costs.count - 2,
        boundaries=tuple(border - 1 for border in cut[1:-1]),
        first_trainable_stage=layout.first_trainable_stage,
        first_trainable_layer=costs.first_trainable_decoder_layer,
        streaming=_streaming(config, costs, layout),
        microbatches_per_step=microbatches,
        chain=layout.chain,
        packs_per_microbatch=config.train.packs_per_microbatch,
        pack_length=config.data.pack_length,
        image=_expected_image(config, models.layout),
        memory_limit_bytes=limit,
        costs=described,
        step_seconds=None if timings.device is None else seconds,
        idle_share=statistics.fmean(layout.simulation.idle),
        minimal_flops_share=needed / computed,
        uniform=_uniform(search, seconds),
        seconds=layout.seconds,
        ranks=ranks,
        schedule=layout.schedule,
    )


def _expected_image(config: RunConfig, layout: ImageLayout) -> ExpectedImage | None:
    if not layout.is_sized:
        return None
    most_tiles, most_positions = layout.most_tiles, layout.most_positions
    fits = most_positions < config.data.pack_length and most_tiles <= (
        config.data.max_tiles_per_pack or most_tiles
    )
    return ExpectedImage(
        layout.name, *expected_image(config.data, layout), most_tiles, most_positions, fits
    )


def _groups(config: RunConfig, models: Models) -> tuple[GroupPlan, ...]:
    optimizer = config.optimizer
    is_uniform = optimizer.lr > 0 and not (optimizer.groups or optimizer.weight_decay)
    sizes = {
        p.name: p.numel for p in models.parameters if matches_any(p.name, config.model.trainable)
    }
    return tuple(
        GroupPlan(
            group.name, group.lr, group.weight_decay, sum(sizes[name] for name in group.parameters)
        )
        for group in parameter_groups(optimizer, sizes)
        if group.parameters and not is_uniform
    )


def _ranks(
    config: RunConfig,
    costs: StageCosts,
    layout: PipelineLayout,
    pipeline_rank: int,
    microbatches: int,
) -> list[RankPlan]:
    """Return the plans of a pipeline rank in all replicas."""
    cut, cost, data = layout.cut, layout.ranks[pipeline_rank], config.parallel.data
    numbers = range(pipeline_rank, len(cut) - 1, config.parallel.pipeline)
    placed = tuple(
        # A decoder layer's number is its place among all layers less the front.
        replace(
            stage_of(cut, s, layout.recompute_layers[s]),
            streamed=tuple(cut[s] + place - 1 for place in places),
        )
        for s, places in zip(numbers, cost.streamed or [()] * len(numbers), strict=True)
    )
    encoder, blocks = costs.costs.encoder, layout.slices[pipeline_rank]
    first = sum(layout.slices[:pipeline_rank])
    if len(ranks_of(layout.chain)) > 1 and layout.chain[pipeline_rank] is not None:
        placed = (replace(placed[0], encoder=(first, first + blocks)), *placed[1:])
    held = [costs.layers_of(cut[s], cut[s + 1]) for s in numbers]
    layers = [layer for stage in held for layer in stage]
    names = tuple(name for layer in layers for name in layer.trainable_names)
    of_slice = encoder.stem_forward * placed[0].front + encoder.block_forward * blocks
    flops = sum((layer.flops for layer in layers), Flops(of_slice))
    again = [
        layer.flops.forward * bool(layer.kept_bytes)
        for stage, there in zip(placed, held, strict=True)
        for layer in there[stage.front :][: stage.recompute_layers]
    ]
    rank = RankPlan(
        rank=pipeline_rank * data,
        pipeline=pipeline_rank,
        data=0,
        stages=placed,
        trainable_names=names,
        trainable=sum(layer.trainable for layer in layers),
        optimizer=costs.costs.optimizer.name if names else "NoOp",
        reason=_reason(config, placed, names, placed[-1].stage < layout.first_trainable_stage),
        weight_bytes=cost.weight_bytes,
        optimizer_bytes=cost.state_bytes,
        activation_bytes=cost.activation_bytes,
        workspace_bytes=cost.working_bytes,
        host_bytes=cost.host_bytes,
        fetched_bytes=_fetched_bytes(costs, layout, placed),
        flops=flops * microbatches,
        recompute_flops=sum(again) * microbatches,
        work_share=cost.seconds / sum(rank.seconds for rank in layout.ranks),
        idle_share=layout.simulation.idle[pipeline_rank],
    )
    return [replace(rank, rank=rank.rank + replica, data=replica) for replica in range(data)]


def _fetched_bytes(costs: StageCosts, layout: PipelineLayout, stages: Sequence[StagePlan]) -> int:
    streamed = {stage.stage: stage.streamed for stage in stages}
    instructions = layout.schedule[stages[0].stage]
    layers = fetches_of(uses_of(instructions, streamed, costs.first_trainable_decoder_layer))
    return sum(costs.setting.streaming.fetched_bytes(costs.layers[layer + 1]) for layer in layers)


def _streaming(
    config: RunConfig, costs: StageCosts, layout: PipelineLayout
) -> StreamingPlan | None:
    if not any(rank.streamed for rank in layout.ranks):
        return None
    stages = [stage for rank in layout.ranks for stage in rank.stages]
    share = max(max(stage.forward_waits.share, stage.backward_waits.share) for stage in stages)
    tokens, streaming = (
        config.train.packs_per_microbatch * config.data.pack_length,
        costs.setting.streaming,
    )
    return StreamingPlan(
        streaming.source, streaming.weight_shards, math.ceil(tokens * share), tokens
    )


def _reason(
    config: RunConfig, stages: Sequence[StagePlan], names: Sequence[str], upstream: bool
) -> str:
    if names:
        here = [
            pattern
            for pattern in config.model.trainable
            if any(matches_any(name, (pattern,)) for name in names)
        ]
        return f"trains {', '.join(here)} ({len(names)} tensor{'s' if len(names) > 1 else ''})"
    text = (
        f"all of {stages[0].summary} is frozen"
        if len(stages) == 1
        else "all of its layers are frozen"
    )
    return f"{text}, and everything before it: forward only" if upstream else text


def _uniform(search: Search, seconds: float) -> UniformCut | None:
    ranks, decoder = search.pipeline, search.costs.count - 2
    if ranks == 1 or decoder < ranks:
        return None
    cut = uniform_cut(decoder, ranks)
    if cut[1] < search.costs.costs.first_layers:
        return None
    layout = search.plain(cut)
    ratio = layout.simulation.seconds / seconds
    return UniformCut(tuple(border - 1 for border in cut[1:-1]), search.fits(layout), ratio)
