"""Config -> plan: which rank holds, trains and runs what; refuses what cannot be, saying what could.

config + model shapes --costs--> cost of each layer --cut--> layers of each stage --schedule--> instructions per rank
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mmtrain.config import RunConfig
from mmtrain.errors import UserError
from mmtrain.plan.block_costs import Flops
from mmtrain.plan.costs import Models
from mmtrain.plan.cut import Cut, StageCosts, StageNeed, find_cut, stage_costs
from mmtrain.plan.layout import Plan, RankPlan, StagePlan, UniformCut, render, stage_of
from mmtrain.plan.refusals import check_layout, check_trainable, does_not_fit
from mmtrain.plan.schedule import Op, Schedule, training_schedule
from mmtrain.plan.shapes import llm_shape, matches, projector_parameters, vision_shape

__all__ = ["Flops", "Plan", "RankPlan", "StagePlan", "make_plan", "render", "simulate"]


def make_plan(config: RunConfig, device_memory_bytes: int | None = None) -> Plan:
    """Plan a run from its config and its models' shapes; starts nothing, imports no torch.

    The memory limit of a rank is `parallel.device_memory_gib`, else `device_memory_bytes`, else none. Raises UserError
    for a config that no plan can satisfy; what then would fit is in the message.
    """
    llm = llm_shape(config.model.llm.path)
    vision = vision_shape(config.model.vision.name, config.model.vision.select_layer)
    projector = projector_parameters(config.model.projector.type, vision.width, llm.hidden_size)
    models = Models(llm, vision, projector)
    limit = device_memory_bytes
    if config.parallel.device_memory_gib is not None:
        limit = int(config.parallel.device_memory_gib * 2**30)

    check_layout(config, models)
    check_trainable(config, models)
    costs = stage_costs(config, models, limit)
    cut = find_cut(config, costs)
    if cut is None:
        raise UserError(does_not_fit(config, models, costs, limit))
    return _plan(config, models, costs, cut, limit)


# ---- the plan, from its cut


def _plan(config: RunConfig, models: Models, costs: StageCosts, cut: Cut, limit: int | None) -> Plan:
    pipeline, data = config.parallel.pipeline, config.parallel.data
    microbatches = costs.setting.microbatches_per_step
    first = _first_trainable_stage(costs, cut)
    schedule = training_schedule(pipeline, microbatches, first)
    estimate = _estimate(costs, cut, schedule)
    ranks = []
    for stage in range(pipeline):
        layers = costs.layers[cut[stage] : cut[stage + 1]]
        placed = stage_of(cut, stage)
        names = tuple(name for layer in layers for name in layer.trainable_names)
        need = estimate.needs[stage]
        for replica in range(data):
            ranks.append(
                RankPlan(
                    rank=stage * data + replica,
                    pipeline=stage,
                    data=replica,
                    stages=(placed,),
                    trainable_names=names,
                    trainable=sum(layer.trainable for layer in layers),
                    optimizer="AdamW" if names else "NoOp",
                    reason=_reason(config, placed, names, stage < first),
                    recompute_layers=need.recompute_layers,
                    weight_bytes=need.weight_bytes,
                    optimizer_bytes=need.state_bytes,
                    activation_bytes=need.activation_bytes,
                    workspace_bytes=need.workspace_bytes,
                    flops=sum((layer.flops for layer in layers), Flops()) * microbatches,
                    recompute_flops=need.recomputed_work * microbatches,
                    work_share=estimate.work_shares[stage],
                    idle_share=estimate.idle[stage],
                )
            )
    return Plan(
        run=config.run.name,
        llm=config.model.llm.path,
        vision=config.model.vision.name,
        trainable=config.model.trainable,
        pipeline=pipeline,
        data=data,
        decoder_layers=costs.count - 2,
        boundaries=tuple(border - 1 for border in cut[1:-1]),
        first_trainable_stage=first,
        microbatches_per_step=microbatches,
        packs_per_microbatch=config.train.packs_per_microbatch,
        pack_length=config.data.pack_length,
        memory_limit_bytes=limit,
        idle_share=sum(estimate.idle) / pipeline,
        uniform=_uniform(costs, estimate.time),
        ranks=tuple(ranks),
        schedule=schedule,
    )


def _first_trainable_stage(costs: StageCosts, cut: Cut) -> int:
    return next(stage for stage, end in enumerate(cut[1:]) if costs.first_trainable < end)


def _reason(config: RunConfig, stage: StagePlan, names: Sequence[str], upstream: bool) -> str:
    if names:
        here = [pattern for pattern in config.model.trainable if any(matches(name, (pattern,)) for name in names)]
        return f"trains {', '.join(here)} ({len(names)} tensor{'s' if len(names) > 1 else ''})"
    layers = stage.layers
    decoder = [name for name in layers if name.startswith("llm.layers.")]
    parts = ["front"] * stage.front
    parts += [f"{decoder[0]} to {decoder[-1]}"] if len(decoder) > 1 else decoder
    parts += ["head"] * stage.head
    text = f"all of {' and '.join(parts)} is frozen"
    return f"{text}, and so is all before it: forward only" if upstream else text


@dataclass(frozen=True)
class _Estimate:
    needs: list[StageNeed]
    work_shares: list[float]
    time: float  # of a step, in the unit of FLOPs
    idle: list[float]


def _estimate(costs: StageCosts, cut: Cut, schedule: Schedule) -> _Estimate:
    """Needs, shares of the work and idle shares of a cut, taking every FLOP for equally fast."""
    needs = [costs.need(stage, cut[stage], cut[stage + 1]) for stage in range(len(schedule))]
    forward = [sum(x.flops.forward for x in costs.layers[a:b]) for a, b in itertools.pairwise(cut)]
    backward = [need.work - f for need, f in zip(needs, forward, strict=True)]
    time, idle = simulate(schedule, forward, backward)
    work = sum(need.work for need in needs)
    return _Estimate(needs, [need.work / work for need in needs], time, list(idle))


def _uniform(costs: StageCosts, time: float) -> UniformCut | None:
    """The cut that only counts decoder layers, against a plan whose step takes `time`."""
    stages, decoder = costs.setting.pipeline, costs.count - 2
    if stages == 1 or decoder < stages:
        return None
    boundaries = tuple(round(decoder * stage / stages) for stage in range(1, stages))
    cut = (0, *(boundary + 1 for boundary in boundaries), costs.count)
    schedule = training_schedule(stages, costs.setting.microbatches_per_step, _first_trainable_stage(costs, cut))
    estimate = _estimate(costs, cut, schedule)
    return UniformCut(
        boundaries,
        all(costs.fits(need) for need in estimate.needs),
        max(estimate.work_shares),
        sum(estimate.idle) / stages,
        estimate.time / time,
    )


def simulate(
    schedule: Schedule, forward_seconds: Sequence[float], backward_seconds: Sequence[float]
) -> tuple[float, tuple[float, ...]]:
    """Seconds of a step, and the share of it in which each pipeline rank waits, given each stage's seconds.

    Runs the schedule's own lists; messages, loading and the step's end take no time.
    """
    lists = [[x for x in rank if x.op in (Op.FORWARD, Op.BACKWARD)] for rank in schedule]
    last = len(forward_seconds) - 1
    done: dict[tuple[Op, int, int], float] = {}
    clock, busy = [0.0] * len(lists), [0.0] * len(lists)
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, computes in enumerate(lists):
            while at[rank] < len(computes):
                x = computes[at[rank]]
                neighbour = x.stage - 1 if x.op is Op.FORWARD else x.stage + 1
                start = done.get((x.op, neighbour, x.microbatch)) if 0 <= neighbour <= last else 0.0
                if start is None:
                    break
                seconds = (forward_seconds if x.op is Op.FORWARD else backward_seconds)[x.stage]
                clock[rank] = max(clock[rank], start) + seconds
                busy[rank] += seconds
                done[x.op, x.stage, x.microbatch] = clock[rank]
                at[rank] += 1
                moved = True
    assert all(a == len(computes) for a, computes in zip(at, lists, strict=True)), "the schedule cannot finish"
    time = max(clock)
    return time, tuple(1 - b / time for b in busy)
