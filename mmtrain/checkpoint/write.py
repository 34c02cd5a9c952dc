"""Writes checkpoints of a run while it goes on; `load` brings them back.

ranks that train --copies, on rank 0--> a thread --step_folder--> RUN/checkpoints/step-00000120/ -->
    old ones deleted

There is no state of random generators: every draw is a function of seed, purpose and step.
"""

import functools
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mmtrain.base.collectives import all_gather_object, gather_to_rank_0
from mmtrain.base.durable import flush
from mmtrain.base.errors import NonFiniteError, UserError
from mmtrain.base.json_lines import recorded, without_nan
from mmtrain.checkpoint.load import Tensors
from mmtrain.checkpoint.run_folder import METRICS, RECORDS
from mmtrain.checkpoint.step_folder import (
    FORMAT,
    OPTIMIZER,
    STATE,
    TENSORS,
    new_step_folder,
    remove,
    split,
    step_folders,
    step_of,
    step_path,
    why_damaged,
)
from mmtrain.config.schema import CheckpointSection, RunConfig
from mmtrain.plan.plan import Plan

MAX_FAILURES = 3  # saves in a row that may fail, of a full disk for example, before the run ends
PACKAGES = ("torch", "transformers", "timm", "deepspeed", "mmtrain")


def run_state(
    config: RunConfig,
    plan: Plan,
    threads: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the part of a checkpoint's state that is the same at every step of a run."""
    recompute = []
    for rank in plan.ranks:
        if rank.data == 0:
            recompute += [stage.recompute_layers for stage in rank.stages]
    device_name = "cpu"
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return {
        "config": config.model_dump(mode="json"),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "topology": {
            "pipeline": plan.pipeline,
            "stages_per_rank": plan.stages_per_rank,
            "data": plan.data,
            "boundaries": list(plan.boundaries),
            "packs_per_microbatch": config.train.packs_per_microbatch,
            "recompute_layers": recompute,
            "threads": threads,
            "deterministic": config.train.deterministic,
            "compile": config.train.compile,
            "tf32": config.train.tf32,
            "device": device_name,
        },
    }


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save: `error` is None if it is on the disk."""

    step: int
    path: Path
    size: int  # bytes
    seconds: float  # of the write, in the background
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """A line for metrics.jsonl."""
        if self.error is not None:
            return {"kind": "checkpoint_failed", "step": self.step, "error": self.error}
        return {
            "kind": "checkpoint",
            "step": self.step,
            "bytes": self.size,
            "seconds": self.seconds,
        }


class Checkpointer:
    """Writes checkpoints in the background, on rank 0.

    Collective: construct it, and call `save`, on every rank.
    `contributes`: whether this rank's tensors belong into the checkpoint. `report` is called on
    rank 0 with the outcome of each save. `saved` is the step of the run's own checkpoint from which
    it resumes. Cost: the copy that is being written, 12 bytes a trained parameter.
    """

    def __init__(
        self,
        folder: Path,
        section: CheckpointSection,
        contributes: bool,
        report: Callable[[SaveResult], None],
        saved: int | None = None,
    ) -> None:
        self.folder = folder
        self.section = section
        self.contributes = contributes
        self.report = report
        self.saved = saved  # step of the latest `save`, whatever became of it
        self.writes = dist.get_rank() == 0
        contributing = all_gather_object(contributes)
        self._others = [rank for rank in range(1, len(contributing)) if contributing[rank]]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Callable[[], SaveResult] | None = None  # the latest, until it has succeeded
        self._pending: Future[SaveResult] | None = None
        self._failures = 0  # in a row
        self._whole = set()  # step folders that need not be hashed again
        self._scores: dict[int, float] = {}
        if self.writes and section.keep_best:
            self._scores = _recorded_scores(folder, section.keep_best)
        self._saved_at = time.monotonic()

    def is_due(self, step: int, evaluates: bool) -> bool:
        """Whether to save after `step` updates.

        It is their turn, or an evaluation follows that may be the best.
        """
        if evaluates and self.section.keep_best is not None:
            return True
        every = self.section.every_steps
        return every is not None and step % every == 0

    @property
    def time_is_up(self) -> bool:
        """Whether the last save is `every_minutes` ago, by rank 0's clock."""
        minutes = self.section.every_minutes
        return (
            self.writes and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        )

    def save(
        self,
        step: int,
        weights: Tensors,
        optimizer: Tensors,
        trained: Mapping[str, Any],
        state: Mapping[str, Any],
    ) -> None:
        """Copy this rank's trained tensors and optimizer state, then write in the background.

        It waits for the save before.
        `trained` holds notes by weight; rank 0 adds those of all ranks to its `state`. Raises
        ValueError on rank 0 rather than save a tensor that is not finite.
        """
        self._wait()
        self.saved = step
        self._saved_at = time.monotonic()
        own = {}
        if self.contributes:
            own = weights | optimizer
        tensors, notes = self._collect(own, trained)
        if not self.writes:
            return

        for name, tensor in tensors.items():
            # the sum is faster, but may overflow
            if not (tensor.sum().isfinite() or tensor.isfinite().all()):
                raise ValueError(
                    f"{name} is not finite after {step} updates and was not saved. {self.kept()}"
                )
        content = {
            "format": FORMAT,
            "step": step,
            **state,
            "trained": notes,
            "files": {file.name: file.stat().st_size for file in self._records()},
        }
        text = json.dumps(without_nan(content), indent=1) + "\n"
        self._job = functools.partial(self._write, step, tensors, text)
        self._pending = self._executor.submit(self._job)

    def _records(self) -> Iterator[Path]:
        """The run's records, whose lengths a checkpoint notes."""
        return filter(Path.exists, map(self.folder.joinpath, RECORDS))

    def finish(self) -> None:
        """Wait for the last save, and repeat it while it fails.

        Raises UserError on rank 0 after MAX_FAILURES.
        """
        self._wait()
        while self._rank_0_says(self._failures > 0):
            if self.writes:
                self._pending = self._executor.submit(self._job)
            self._wait()

    def poll(self) -> None:
        """Report the save that has ended, if one has.

        Raises UserError after MAX_FAILURES in a row.
        """
        if self._pending is None or not self._pending.done():
            return
        result = self._pending.result()
        self._pending = None
        self.report(result)
        if result.error is None:
            self._failures = 0
            self._job = None  # which holds the copies
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise UserError(
                f"{MAX_FAILURES} saves in a row have failed: {result.error}. {self.kept()}"
            )

    def _wait(self) -> None:
        """Wait until nothing is being written.

        All ranks wait: with a slow disk they would else time out on rank 0.
        """
        is_writing = True
        while is_writing:
            is_done = self._pending is None or wait([self._pending], timeout=1).done
            is_writing = self._rank_0_says(not is_done)
        self.poll()

    def _rank_0_says(self, value: bool) -> bool:
        answer = torch.tensor([value], dtype=torch.int32)
        dist.broadcast(answer, 0)
        return bool(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Finish the last good save first where the run ends with NaN or infinity.

        All ranks end so then.
        """
        if kind is NonFiniteError:
            self._wait()
        self._executor.shutdown(wait=False)

    def kept(self) -> str:
        """Name the checkpoint from which the run can resume, for a message."""
        for path in self._whole_folders():
            return f"The newest complete checkpoint is {path}"
        return "No checkpoint was saved before"

    def scored(self, step: int, scores: Mapping[str, Any]) -> None:
        """Note the scores, by name, of an evaluation after `step` updates, for `keep_best`."""
        if self.section.keep_best is not None:
            self._scores[step] = scores[self.section.keep_best]

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and score of the best evaluation that has a checkpoint; of equal ones the latest."""
        sign = -1 if self.section.keep_best == "loss" else 1
        ranked = []
        for step in map(step_of, step_folders(self.folder)):
            score = self._scores.get(step)
            if score is not None and math.isfinite(score):
                ranked.append((sign * score, step))
        if not ranked:
            return None
        score, step = max(ranked)
        return step, sign * score

    def _collect(self, own: Tensors, trained: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        """Return copies of all ranks' tensors and notes on rank 0, elsewhere nothing.

        Tensors travel one by one: a gather would need the largest rank's bytes for every rank.
        """
        tensors = {}
        notes = {}
        if self.writes:
            tensors = {name: _copied(tensor) for name, tensor in own.items()}
            notes |= trained
        if not self._others:
            return tensors, notes

        shapes = {name: tensor.shape for name, tensor in own.items()}
        gathered = gather_to_rank_0((shapes, trained))
        if gathered is None:
            for tensor in own.values():
                dist.send(_copied(tensor), 0)
            return tensors, notes
        for source in self._others:
            shapes, theirs = gathered[source]
            notes |= theirs
            for name, shape in shapes.items():
                tensors[name] = torch.empty(shape, dtype=torch.float32)
                dist.recv(tensors[name], source)
        return tensors, notes

    def _write(self, step: int, tensors: Tensors, state: str) -> SaveResult:
        start = time.monotonic()
        target = step_path(self.folder, step)
        file = target
        size = 0
        error = None
        try:
            for record in self._records():
                flush(record)
            with new_step_folder(target) as unfinished:
                for name, part in zip((TENSORS, OPTIMIZER), split(tensors), strict=True):
                    file = target / name
                    save_file(part, unfinished / name)
                file = target
                (unfinished / STATE).write_text(state)
                size = sum(written.stat().st_size for written in unfinished.iterdir())
        except (OSError, SafetensorError) as problem:
            error = f"{file}: {problem}"
        else:
            self._whole.add(target)
            self._delete_old()
        return SaveResult(step, target, size, time.monotonic() - start, error)

    def _delete_old(self) -> None:
        """Delete whole checkpoints but the newest ones and the best.

        Damaged ones neither count nor go.
        """
        if self.section.keep_last is None:
            return
        best = self.best
        for path in list(self._whole_folders())[self.section.keep_last :]:
            if best is not None and path == step_path(self.folder, best[0]):
                continue
            try:
                remove(path)
            except OSError as error:
                # the next save tries again: no reason to call this one a failure
                print(f"cannot delete {path}: {error}")

    def _whole_folders(self) -> Iterator[Path]:
        return filter(self._is_whole, step_folders(self.folder))

    def _is_whole(self, path: Path) -> bool:
        if path not in self._whole and why_damaged(path) is None:
            self._whole.add(path)
        return path in self._whole


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _recorded_scores(folder: Path, metric: str) -> dict[int, float]:
    scores = {}
    for record in recorded(folder / METRICS, "eval"):
        if record.get(metric) is not None:
            scores[record["step"]] = float(record[metric])
    return scores
