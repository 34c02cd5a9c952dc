"""Config -> plan: which rank holds, trains and runs what; refuses what cannot run or does not fit.

config + model shapes --costs, timings--> seconds and bytes of each layer
    --search--> layers of each stage, what recomputes, where the encoder runs
    --schedule--> instructions per rank
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from mmtrain.base.errors import MemoryLimitError
from mmtrain.base.printing import counted
from mmtrain.config.parallel import ParallelSection
from mmtrain.config.schema import DataSection, OptimizerSection, RunConfig
from mmtrain.facts.models import Models, models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.layouts.layout import ImageLayout
from mmtrain.plan.block_costs import Flops
from mmtrain.plan.calibration import Device
from mmtrain.plan.costs import expected_image, minimal_flops
from mmtrain.plan.cuts import boundaries_of, given_cut, uniform_cut
from mmtrain.plan.instructions import fetches_of, uses_of
from mmtrain.plan.optimizer_kinds import parameter_groups
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
    parallel = config.parallel
    limit = memory_limit(parallel, device_memory_bytes)
    check_run(config, models)
    costs = stage_costs(config, models, limit, device)
    search, layout = _searched(parallel, costs)
    if parallel.streamed_layers == "auto":  # only where it is worth it
        resident, without = _searched(parallel, costs.changed(streaming=Streaming()))
        if without is not None:
            limit_seconds = without.simulation.seconds * (1 - STREAMING_GAIN)
            if layout is None or limit_seconds <= layout.simulation.seconds:
                search = resident
                layout = without
    if layout is None:
        raise MemoryLimitError(does_not_fit(parallel, search, limit))
    return _plan(config, models, search, layout, limit)


def _searched(parallel: ParallelSection, costs: StageCosts) -> tuple[Search, PipelineLayout | None]:
    search = Search(costs, parallel.encoder_ranks)
    if least_step_seconds(costs) == math.inf:  # a search for what fits nowhere takes long
        return search, None
    if parallel.boundaries is None:
        return search, search.find(parallel.stages_per_rank)
    return search, search.at_cut(given_cut(parallel.boundaries, costs))


def memory_limit(parallel: ParallelSection, device_memory_bytes: int | None) -> int | None:
    """Bytes that a rank may use, as `make_plan` takes them; None: no limit."""
    if parallel.device_memory_gib is not None:
        return int(parallel.device_memory_gib * 2**30)
    return None if device_memory_bytes is None else limit_on_gpu(device_memory_bytes)


def _plan(
    config: RunConfig,
    models: Models,
    search: Search,
    layout: PipelineLayout,
    limit: int | None,
) -> Plan:
    costs = search.costs
    seconds = layout.simulation.seconds
    model = config.model
    data = config.data
    pipeline = config.parallel.pipeline
    replicas = config.parallel.data
    microbatches = costs.setting.microbatches_per_step
    replica = [_rank(model.trainable, costs, layout, rank) for rank in range(pipeline)]
    ranks = []
    for rank, number in itertools.product(replica, range(replicas)):
        ranks.append(replace(rank, rank=rank.pipeline * replicas + number, data=number))
    computed = sum(rank.flops.total + rank.recompute_flops for rank in replica)
    needed = minimal_flops(models, model.trainable, costs.costs.work).total * microbatches

    return Plan(
        run=config.run.name,
        llm=model.llm.path,
        vision=model.vision and model.vision.name,
        trainable=model.trainable,
        groups=_groups(config.optimizer, models),
        pipeline=pipeline,
        stages_per_rank=layout.stages_per_rank,
        data=replicas,
        decoder_layers=costs.count - 2,
        boundaries=boundaries_of(layout.cut),
        first_trainable_stage=layout.first_trainable_stage,
        first_trainable_layer=costs.first_trainable_decoder_layer,
        streaming=_streaming(config.train.packs_per_microbatch * data.pack_length, costs, layout),
        microbatches_per_step=microbatches,
        chain=layout.chain,
        packs_per_microbatch=config.train.packs_per_microbatch,
        pack_length=data.pack_length,
        image=_expected_image(data, models.layout),
        memory_limit_bytes=limit,
        costs=_described(costs, layout),
        step_seconds=None if costs.timings.device is None else seconds,
        idle_share=statistics.fmean(layout.simulation.idle),
        minimal_flops_share=needed / computed,
        uniform=_uniform(search, seconds),
        seconds=layout.seconds,
        ranks=tuple(ranks),
        schedule=layout.schedule,
    )


def _described(costs: StageCosts, layout: PipelineLayout) -> str:
    """Tell which costs are measured, and which assumed."""
    timings = costs.timings
    if timings.device is None:
        return "assumed"
    described = f"calibrated on {timings.device}"
    if costs.setting.pipeline > 1 and not timings.measured_messages:
        described += "; messages assumed"
    streams = any(rank.streamed for rank in layout.ranks)
    if streams and costs.setting.streaming.source not in timings.measured_fetches:
        described += "; fetches assumed"
    return described


def _expected_image(data: DataSection, layout: ImageLayout) -> ExpectedImage | None:
    if not layout.is_sized:
        return None
    tiles = layout.most_tiles
    positions = layout.most_positions
    fits = positions < data.pack_length and tiles <= (data.max_tiles_per_pack or tiles)
    return ExpectedImage(layout.name, *expected_image(data, layout), tiles, positions, fits)


def _groups(optimizer: OptimizerSection, models: Models) -> tuple[GroupPlan, ...]:
    if optimizer.lr > 0 and not (optimizer.groups or optimizer.weight_decay):
        return ()
    sizes = {p.name: p.numel for p in models.parameters}
    trained = [name for name in sizes if matches_any(name, models.section.trainable)]
    groups = []
    for group in parameter_groups(optimizer, trained):
        if group.parameters:
            elements = sum(sizes[name] for name in group.parameters)
            groups.append(GroupPlan(group.name, group.lr, group.weight_decay, elements))
    return tuple(groups)


def _rank(
    trainable: Sequence[str],
    costs: StageCosts,
    layout: PipelineLayout,
    pipeline_rank: int,
) -> RankPlan:
    """Return the plan of a pipeline rank in the first replica, as if there were no other."""
    cut = layout.cut
    cost = layout.ranks[pipeline_rank]
    microbatches = costs.setting.microbatches_per_step
    encoder = costs.costs.encoder
    blocks = layout.slices[pipeline_rank]
    stages = []
    names: list[str] = []
    elements = recomputed = 0
    flops = Flops(encoder.block_forward * blocks)
    if pipeline_rank == 0:
        flops += Flops(encoder.stem_forward)
    for slot, number in enumerate(range(pipeline_rank, len(cut) - 1, costs.setting.pipeline)):
        stage = stage_of(cut, number, layout.recompute_layers[number])
        if cost.streamed:
            # A decoder layer's number is its entry among all layers less the front.
            streamed = tuple(cut[number] + entry - 1 for entry in cost.streamed[slot])
            stage = replace(stage, streamed=streamed)
        stages.append(stage)
        layers = costs.layers_of(cut[number], cut[number + 1])
        for layer in layers:
            names += layer.trainable_names
            elements += layer.trainable
            flops += layer.flops
        for layer in layers[stage.front :][: stage.recompute_layers]:
            if layer.kept_bytes:
                recomputed += layer.flops.forward
    if len(ranks_of(layout.chain)) > 1 and layout.chain[pipeline_rank] is not None:
        first = sum(layout.slices[:pipeline_rank])
        stages[0] = replace(stages[0], encoder=(first, first + blocks))

    return RankPlan(
        rank=pipeline_rank,
        pipeline=pipeline_rank,
        data=0,
        stages=tuple(stages),
        trainable_names=tuple(names),
        trainable=elements,
        optimizer=costs.costs.optimizer.name if names else "NoOp",
        reason=_reason(trainable, stages, names, layout.first_trainable_stage),
        weight_bytes=cost.weight_bytes,
        optimizer_bytes=cost.state_bytes,
        activation_bytes=cost.activation_bytes,
        workspace_bytes=cost.working_bytes,
        host_bytes=cost.host_bytes,
        fetched_bytes=_fetched_bytes(costs, layout, stages),
        flops=flops * microbatches,
        recompute_flops=recomputed * microbatches,
        work_share=cost.seconds / sum(rank.seconds for rank in layout.ranks),
        idle_share=layout.simulation.idle[pipeline_rank],
    )


def _fetched_bytes(
    costs: StageCosts,
    layout: PipelineLayout,
    stages: Sequence[StagePlan],
) -> int:
    streamed = {stage.stage: stage.streamed for stage in stages}
    instructions = layout.schedule[stages[0].stage]
    layers = fetches_of(uses_of(instructions, streamed, costs.first_trainable_decoder_layer))
    return sum(costs.setting.streaming.fetched_bytes(costs.layers[layer + 1]) for layer in layers)


def _streaming(
    tokens: int,
    costs: StageCosts,
    layout: PipelineLayout,
) -> StreamingPlan | None:
    """Return the plan of the fetches, with micro-batches of `tokens` tokens; None without any."""
    if not any(rank.streamed for rank in layout.ranks):
        return None
    share = 0.0
    for rank in layout.ranks:
        for stage in rank.stages:
            share = max(share, stage.forward_waits.share, stage.backward_waits.share)
    streaming = costs.setting.streaming
    hidden_from = math.ceil(tokens * share)
    return StreamingPlan(streaming.source, streaming.weight_shards, hidden_from, tokens)


def _reason(
    trainable: Sequence[str],
    stages: Sequence[StagePlan],
    names: Sequence[str],
    first: int,
) -> str:
    if names:
        here = []
        for pattern in trainable:
            if any(matches_any(name, (pattern,)) for name in names):
                here.append(pattern)
        return f"trains {', '.join(here)} ({counted(len(names), 'tensor')})"
    text = "all of its layers are frozen"
    if len(stages) == 1:
        text = f"all of {stages[0].summary} is frozen"
    if stages[-1].stage < first:
        text += ", and everything before it: forward only"
    return text


def _uniform(search: Search, seconds: float) -> UniformCut | None:
    ranks = search.pipeline
    decoder = search.costs.count - 2
    if ranks == 1 or decoder < ranks:
        return None
    cut = uniform_cut(decoder, ranks)
    if cut[1] < search.costs.costs.first_layers:
        return None
    layout = search.plain(cut)
    ratio = layout.simulation.seconds / seconds
    return UniformCut(boundaries_of(cut), search.fits(layout), ratio)
