"""What the doctor's checks run on ranks."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.calibration.allocations import bytes_used, tensor_bytes
from mmtrain.config.schema import RunConfig
from mmtrain.engine.channels import Channels
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import backend_name, join_process_group
from mmtrain.engine.single_stage import expected_batch
from mmtrain.model.stage import build_stage
from mmtrain.plan.instructions import between
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan, models_of
from mmtrain.processes.rank import Rank

ROUNDS = 8
SMALL_BYTES = 4096
LARGE_BYTES = {"cpu": 2**20, "cuda": 2**25}  # hidden states of 256 tokens of 1,024 floats; of 4,096 of 4,096 in bf16
WORK_WIDTH = {"cpu": 256, "cuda": 4096}
TIMEOUT_SECONDS = 60


def exchange(plan: Plan, folder: Path, rank: Rank) -> None:
    """Send numbered messages both ways over every border between stages, computing in between; check each one.

    Receives are posted before the work and taken after it, as in a training step.
    """
    device = torch.device(rank.device)
    join_process_group(device, TIMEOUT_SECONDS)
    channels = Channels(plan, rank.rank, device, timedelta(seconds=TIMEOUT_SECONDS))
    mine = plan.ranks[rank.rank].pipeline
    flows = [("activation", s, s + 1) for s in range(plan.pipeline * plan.stages_per_rank - 1)]
    flows += [("gradient", target, source) for _, source, target in flows]
    matrix = torch.randn(WORK_WIDTH[device.type], WORK_WIDTH[device.type], device=device)
    seconds: dict[int, float] = {}
    for size in (SMALL_BYTES, LARGE_BYTES[device.type]):
        for number in range(ROUNDS + 1):
            if number == 1:  # the first round warms up
                _wait(device)
                began = time.perf_counter()
            rank.progress.at(number, f"messages of {size} bytes")
            _round(channels, plan, mine, flows, matrix, size // 4, number)
        _wait(device)
        seconds[size] = (time.perf_counter() - began) / ROUNDS
    ends = [(source % plan.pipeline, target % plan.pipeline) for _, source, target in flows]
    sent, received = sum(a == mine for a, _ in ends), sum(b == mine for _, b in ends)
    large = LARGE_BYTES[device.type]
    found = {
        "backend": backend_name(device),
        "channels": len({(kind, *pair) for (kind, _, _), pair in zip(flows, ends, strict=True)}),
        "seconds_a_round": seconds,
        "gigabytes_per_second": max(sent, received) * large / seconds[large] / 1e9,
        "small_microseconds": seconds[SMALL_BYTES] / max(sent, received) * 1e6,
    }
    (folder / f"rank-{rank.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _round(
    channels: Channels,
    plan: Plan,
    mine: int,
    flows: list[tuple[str, int, int]],
    matrix: torch.Tensor,
    elements: int,
    number: int,
) -> None:
    """One message over every flow; raises RuntimeError for one that is not what was sent."""
    for _, source, target in flows:
        if target % plan.pipeline == mine:
            buffer = torch.empty(elements, device=matrix.device)
            channels.post_receive(between(source, target, number, plan.pipeline), [buffer])
    work = matrix @ matrix
    for kind, source, target in flows:
        if source % plan.pipeline == mine:
            content = torch.full((elements,), _content(kind, source, number), device=matrix.device)
            channels.send(between(source, target, number, plan.pipeline), [content])
            work = work @ matrix
    for kind, source, target in flows:
        if target % plan.pipeline == mine:
            (found,) = channels.take(between(source, target, number, plan.pipeline))
            wanted = _content(kind, source, number)
            if not bool((found == wanted).all()):
                raise RuntimeError(
                    f"message {number} of {kind}s from stage {source} to {target} holds {float(found[0])}, not {wanted}"
                )
    channels.wait_for_sends()


def _content(kind: str, source: int, number: int) -> float:
    return 1000.0 * number + 10.0 * source + (kind == "gradient")


def _wait(device: torch.device) -> None:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_memory(config: RunConfig, folder: Path, rank: Rank) -> None:
    """Make steps of a config of one rank; what was planned and what was taken, in bytes, to FOLDER/memory.json."""
    device = torch.device(rank.device)
    join_process_group(device, TIMEOUT_SECONDS)
    limit = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    plan = make_plan(config, limit)
    stage = build_stage(config, plan.ranks[0].stages[0], device=device)
    engine = FrozenPipelineEngine(config, plan, {0: stage})
    batches = itertools.cycle([expected_batch(config, models_of(config))])
    engine.train_step(batches)  # makes the optimizer's state, and what libraries keep
    found = memory_of(lambda: engine.train_step(batches), device)
    if found is None:
        weights = itertools.chain(stage.parameters(), stage.buffers(), engine.trainable.values())
        state = (t for s in engine.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
        lasting = tensor_bytes(itertools.chain(weights, state))
        gc.collect()
        step = functools.partial(engine.train_step, batches)
        first, second = bytes_used(step, step, device=device)
        found = {"allocated_bytes": lasting + first.end + second.peak}
    (folder / "memory.json").write_text(json.dumps(found | {"planned_bytes": plan.ranks[0].total_bytes}))
    dist.barrier()
    dist.destroy_process_group()


def memory_of(step: Callable[[], object], device: torch.device) -> dict[str, int] | None:
    """Bytes of a step at its fullest: allocated by tensors, reserved by torch, held on the device by all processes."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "held_bytes": total - free,
    }
