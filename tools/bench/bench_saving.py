"""One rank's part of bench_checkpoint.py: blocks of steps with and without a save, in turns, in one run.

batches --FrozenPipelineEngine, TimedCheckpointer--> seconds of each block, CPU seconds of all ranks --> result.json
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_timing import Times, alternate

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.progress import ProgressBar
from mmtrain.checkpoint.write import Checkpointer, Saved, Tensors, run_state
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.engine.engine import FrozenPipelineEngine
from mmtrain.engine.process_groups import join_process_group
from mmtrain.model.stage import build_stage
from mmtrain.plan.plan import Plan
from mmtrain.processes.rank import Rank

MODES = ("none", "asynchronous", "synchronous")
RESULT = "result.json"


class TimedCheckpointer(Checkpointer):
    """A Checkpointer that notes how long its saves hold up the loop, and what its thread computes."""

    def __init__(self, folder: Path, config: RunConfig, mode: str, contributes: bool, engine: FrozenPipelineEngine):
        folder.mkdir(exist_ok=True)
        self._is_synchronous = mode == "synchronous"
        super().__init__(folder, config.checkpoint, contributes, self._note, None)
        self.forget()

    def forget(self) -> None:
        """What was noted so far."""
        self.blocked: list[float] = []
        self.cpu: list[float] = []
        self.written: list[float] = []
        self.size = 0

    def save(self, *arguments: Any) -> None:
        began = time.perf_counter()
        super().save(*arguments)
        if self._is_synchronous:
            self._wait()
        self.blocked.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Until the save that is being written is on the disk."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])

    def record(self) -> dict[str, Any]:
        """What saves took, on rank 0."""
        return {
            "blocked_seconds": self.blocked,
            "thread_cpu_seconds": self.cpu,
            "write_seconds": self.written,
            "bytes": self.size,
        }

    def _note(self, saved: Saved) -> None:
        if saved.error is not None:
            raise UserError(f"a save failed: {saved.error}")
        self.written.append(saved.seconds)
        self.size = saved.size

    def _write(self, *arguments: Any) -> Saved:
        began = time.thread_time()
        saved = super()._write(*arguments)
        self.cpu.append(time.thread_time() - began)
        return saved


def measure(config: RunConfig, plan: Plan, options: argparse.Namespace, rank: Rank) -> None:
    """What every rank runs; rank 0 writes result.json: seconds of each block by mode, and what saves took."""
    device, mine = torch.device(rank.device), plan.ranks[rank.rank]
    join_process_group(device, config.parallel.timeout_seconds)
    packed = PackedBatches(config, mine.data, plan.data) if mine.pipeline == 0 else None
    stages = {stage.stage: build_stage(config, stage, device=device) for stage in mine.stages}
    engine = FrozenPipelineEngine(config, plan, stages)
    batches = None if packed is None else iter(packed)
    extra = _random_projector(options.width) if rank.rank == 0 and options.width else {}
    state = {**run_state(config, plan, torch.get_num_threads(), device), "loss": None, "data": {"counts": None}}
    times, cpu, saves = _race(engine, batches, extra, state, options, rank, mine.data == 0)
    of_ranks: list[Times] = [{}] * len(plan.ranks)
    dist.all_gather_object(of_ranks, cpu)
    if rank.rank == 0:
        cpu = {mode: [sum(block) for block in zip(*(one[mode] for one in of_ranks), strict=True)] for mode in MODES}
        (rank.folder / RESULT).write_text(json.dumps({"seconds": times, "cpu_seconds": cpu, "saves": saves}))
    if batches is not None:
        batches.close()
    dist.barrier()
    dist.destroy_process_group()


def _race(
    engine: FrozenPipelineEngine,
    batches: Any,
    extra: Tensors,
    state: dict[str, Any],
    options: argparse.Namespace,
    rank: Rank,
    contributes: bool,
) -> tuple[Times, Times, dict[str, Any]]:
    """Seconds and this rank's CPU seconds of each block, by mode, and what the saves of each mode took."""
    cpu: Times = {mode: [] for mode in MODES}
    done = 0
    with contextlib.ExitStack() as stack:
        savers = {
            mode: stack.enter_context(
                TimedCheckpointer(rank.folder / mode, engine.run_config, mode, contributes, engine)
            )
            for mode in MODES
        }
        lines = {
            mode: stack.enter_context(JsonLines(rank.folder / mode / "metrics.jsonl" if rank.rank == 0 else None))
            for mode in MODES
        }
        progress = ProgressBar("blocks", options.repetitions * len(MODES), rank.console, "steps")
        stack.enter_context(progress)

        def block(mode: str) -> float:
            saver = savers[mode]
            began, cpu_began = time.perf_counter(), time.process_time()
            for number in range(options.every):
                result = engine.train_step(batches)
                lines[mode].write(kind="train", step=result.step, loss=result.loss)
                if number == 0 and mode != "none":
                    weights, optimizer = {**engine.trainable, **extra}, {**engine.optimizer_state(), **_moments(extra)}
                    saver.save(engine.step_index, weights, optimizer, {}, state)
                saver.poll()
            saver.wait()
            cpu[mode].append(time.process_time() - cpu_began)
            return time.perf_counter() - began

        def contestant(mode: str) -> float:
            nonlocal done
            seconds = block(mode)
            done += 1
            if rank.console is not None:
                progress.show(done, done * options.every, mode)
            return seconds

        for mode in MODES:  # warm: the first save starts the thread
            block(mode)
            savers[mode].poll()
            savers[mode].forget()
            cpu[mode].clear()
        times = alternate({mode: functools.partial(contestant, mode) for mode in MODES}, options.repetitions)
        for saver in savers.values():
            saver.finish()
    return times, cpu, {mode: saver.record() for mode, saver in savers.items() if mode != "none"}


def _random_projector(width: Sequence[int]) -> dict[str, torch.Tensor]:
    """An mlp2x_gelu projector's weights between encoder and LLM of these widths."""
    vision, llm = width
    shapes = {"1.weight": (llm, vision), "1.bias": (llm,), "2.weight": (llm, llm), "2.bias": (llm,)}
    return {f"projector.extra_{name}": torch.rand(shape) for name, shape in shapes.items()}


def _moments(extra: Tensors) -> dict[str, torch.Tensor]:
    """As many numbers as AdamW keeps of these weights."""
    return {f"{name}/{part}": tensor for name, tensor in extra.items() for part in ("exp_avg", "exp_avg_sq")}
