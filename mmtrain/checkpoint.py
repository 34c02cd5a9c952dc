"""Saves the state of a run while it goes on, and brings it back.

ranks that train --copies, on rank 0--> a thread --step_folder--> RUN/checkpoints/step-00000120/ --> old ones deleted
step folder --rank 0 reads--> each rank gets the tensors that it trains, whatever the layout was that saved them

There is no state of random generators: every draw is a function of seed, purpose and step.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mmtrain.bad_steps import NonFiniteError
from mmtrain.config import CheckpointSection, RunConfig
from mmtrain.errors import UserError
from mmtrain.metrics import Scores, without_nan
from mmtrain.plan.planner import Plan
from mmtrain.resume import METRICS, RECORDS
from mmtrain.step_folder import (
    FORMAT,
    OPTIMIZER,
    STATE,
    TENSORS,
    StepFolder,
    flush,
    remove,
    step_folders,
    step_path,
    why_damaged,
    write_step_folder,
    write_text,
)

PACKAGES = ("torch", "transformers", "timm", "deepspeed", "mmtrain")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """What became of a save: `error` is None if it is on the disk."""

    step: int
    path: Path
    size: int  # bytes
    seconds: float  # of the write, in the background
    error: str | None = None

    def record(self) -> dict[str, Any]:
        """A line for metrics.jsonl."""
        if self.error is not None:
            return {"kind": "checkpoint_failed", "step": self.step, "error": self.error}
        return {"kind": "checkpoint", "step": self.step, "bytes": self.size, "seconds": self.seconds}


class Checkpointer:
    """Saves; constructed by every rank, and `save` is a collective of all of them. Rank 0 writes.

    `contributes` says that this rank's tensors belong into the checkpoint: those of the first replica. `report` is
    called on rank 0 with what became of each save, some time after it. `latest` is the step whose checkpoint the run
    goes on from, if it is its own. `group` carries CPU tensors. Price: while one save is being written its copy stays
    in memory, 12 bytes a trained parameter.
    """

    def __init__(
        self,
        folder: Path,
        section: CheckpointSection,
        contributes: bool,
        report: Callable[[Saved], None],
        latest: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = folder
        self.section = section
        self.contributes = contributes
        self.report = report
        self.latest = latest
        """Step of the latest `save`."""
        self.group = group
        self.writes = dist.get_rank() == 0
        every: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(every, contributes, group=group)
        self._others = [rank for rank, sends in enumerate(every) if sends and rank]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._outcomes: list[Saved] = []
        self._failures = 0  # in a row
        self._error: str | None = None  # of the latest
        self._whole: set[Path] = set()  # step folders that need not be hashed again
        self._scores = _recorded_scores(folder, section.keep_best) if self.writes and section.keep_best else {}
        self._saved_at = time.monotonic()

    def is_due(self, step: int, evaluates: bool) -> bool:
        """Whether to save after `step` updates by their number, `evaluates` saying that an evaluation follows."""
        every = self.section.every_steps
        return (every is not None and step % every == 0) or (evaluates and self.section.keep_best is not None)

    @property
    def time_is_up(self) -> bool:
        """Whether the last save is `every_minutes` ago, by rank 0's clock."""
        minutes = self.section.every_minutes
        return self.writes and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def save(
        self, step: int, weights: Tensors, optimizer: Tensors, trained: Mapping[str, Any], state: Mapping[str, Any]
    ) -> None:
        """Copy this rank's trained tensors and their optimizer state and begin to write; waits for the save before.

        `trained` notes something of each weight, by name; all ranks' notes go into `state`, which rank 0 gives. Raises
        NonFiniteError rather than save a tensor that is not finite.
        """
        if self._pending is not None:
            self._pending.result()
        self.latest = step
        self._saved_at = time.monotonic()
        tensors, notes = self._collect({**weights, **optimizer} if self.contributes else {}, trained)
        if not self.writes:
            return
        if bad := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
            raise NonFiniteError(f"{bad[0]} is not finite after {step} updates: not saved. {self.kept()}")
        records = {name: (self.folder / name).stat().st_size for name in RECORDS if (self.folder / name).exists()}
        content = {"format": FORMAT, "step": step, **state, "trained": notes, "files": records}
        self._pending = self._executor.submit(
            self._write, step, tensors, json.dumps(without_nan(content), indent=1) + "\n"
        )
        if not self.section.asynchronous:
            self._pending.result()

    def finish(self) -> None:
        """Wait for the save that is being written; raises UserError if it fails: there will be no later one."""
        if self._pending is not None:
            self._pending.result()
        self.poll()
        if self._failures:
            raise UserError(f"the state after the last step could not be saved: {self._error}. {self.kept()}")

    def poll(self) -> None:
        """Report the saves that have ended since the last call; raises UserError once too many in a row have failed."""
        ended, self._outcomes = self._outcomes, []
        for saved in ended:
            self._failures = 0 if saved.error is None else self._failures + 1
            self._error = saved.error
            self.report(saved)
            if self._failures >= self.section.max_failures:
                raise UserError(
                    f"{self._failures} checkpoint(s) in a row could not be saved (checkpoint.max_failures): "
                    f"{saved.error}. {self.kept()}"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """A save that is being written when the run fails is worth waiting for."""
        self._executor.shutdown()

    def kept(self) -> str:
        """Which checkpoint is there to go on from, for a message."""
        whole = next((path for path in step_folders(self.folder) if self._is_whole(path)), None)
        return "No checkpoint was saved before" if whole is None else f"The newest whole one is {whole}"

    def scored(self, step: int, scores: Scores | None) -> None:
        """Note an evaluation after `step` updates, if it came to its end, for `keep_best`."""
        if self.section.keep_best is not None and scores is not None:
            self._scores[step] = getattr(scores, self.section.keep_best)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and score of the best evaluation of which there is a checkpoint; of equal ones the latest."""
        steps = [int(path.name.removeprefix("step-")) for path in step_folders(self.folder)]
        sign = -1 if self.section.keep_best == "loss" else 1
        found = [(sign * score, step) for step in steps if (score := self._scores.get(step)) is not None]
        return None if not found else (max(found)[1], sign * max(found)[0])

    def _collect(self, mine: Tensors, trained: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """On rank 0 copies of all ranks' tensors and notes; elsewhere nothing.

        Tensors travel one by one: a gather would need the largest rank's bytes for every rank.
        """
        tensors = {name: _copied(tensor) for name, tensor in mine.items()} if self.writes else {}
        notes = dict(trained) if self.writes else {}
        if not self._others:
            return tensors, notes
        shapes = {name: tensor.shape for name, tensor in mine.items()}
        gathered: list[Any] | None = [None] * dist.get_world_size(self.group) if self.writes else None
        dist.gather_object((shapes, trained), gathered, group=self.group)
        if gathered is None:
            for tensor in mine.values():
                dist.send(_copied(tensor), 0, group=self.group)
            return {}, {}
        for source in self._others:
            shapes, theirs = gathered[source]
            notes |= theirs
            for name, shape in shapes.items():
                tensors[name] = torch.empty(shape, dtype=torch.float32)
                dist.recv(tensors[name], source, group=self.group)
        return tensors, notes

    def _write(self, step: int, tensors: Tensors, state: str) -> None:
        """Write a step folder and delete what is not to be kept; notes how it went."""
        start = time.monotonic()
        target = step_path(self.folder, step)
        weights = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        optimizer = {name: tensor for name, tensor in tensors.items() if "/" in name}
        files = {TENSORS: _tensor_file(weights), OPTIMIZER: _tensor_file(optimizer), STATE: write_text(state)}
        try:
            for name in RECORDS:  # whose lengths the checkpoint notes
                if (self.folder / name).exists():
                    flush(self.folder / name)
            size = write_step_folder(target, files)
            self._whole.add(target)
            self._delete_old()
        except OSError as error:
            self._outcomes.append(Saved(step, target, 0, time.monotonic() - start, f"{target}: {error}"))
        else:
            self._outcomes.append(Saved(step, target, size, time.monotonic() - start))

    def _delete_old(self) -> None:
        """Delete whole checkpoints but the newest ones and the best; damaged ones neither count nor go."""
        if self.section.keep_last is None:
            return
        best = self.best
        for path in [path for path in step_folders(self.folder) if self._is_whole(path)][self.section.keep_last :]:
            if best is None or path != step_path(self.folder, best[0]):
                remove(path)

    def _is_whole(self, path: Path) -> bool:
        if path not in self._whole and why_damaged(path) is None:
            self._whole.add(path)
        return path in self._whole


def run_state(config: RunConfig, plan: Plan, threads: int, device: torch.device) -> dict[str, Any]:
    """What a checkpoint says of the run that saves it, the same at every step."""
    return {
        "config": config.model_dump(mode="json"),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "topology": {
            "pipeline": plan.pipeline,
            "data": plan.data,
            "boundaries": list(plan.boundaries),
            "threads": threads,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
    }


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Versions and topology that are not those of the checkpoint: results agree to rounding then, not bit for bit."""
    return [
        f"{name} {saved[part].get(name)} -> {value}"
        for part in ("versions", "topology")
        for name, value in now[part].items()
        if saved[part].get(name) != value
    ]


def load(
    start: StepFolder | None, names: Collection[str], group: dist.ProcessGroup | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of this rank's trained `names`, and their optimizer state, on the CPU; a collective of every rank.

    Rank 0 alone gives `start` and reads: the folder need not be visible to other machines. Raises UserError on rank 0
    where the checkpoint holds other tensors than all ranks together train.
    """
    rank = dist.get_rank()
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, sorted(names), group=group)
    if rank == 0:
        stored = {**_opened(start.tensors_file), **_opened(start.optimizer_file)}
        trained = {name for one in wanted for name in one}
        if odd := sorted(trained ^ {name for name in stored if "/" not in name}):
            raise UserError(
                f"{start.path}: {odd[0]} is {'not in it' if odd[0] in trained else 'not trained by this run'} "
                f"({len(odd)} such tensor(s)): it was saved by a run that trains something else"
            )
        for other, theirs in enumerate(wanted[1:], start=1):
            shapes = {name: read().shape for name, read in _of(theirs, stored).items()}
            if theirs:
                dist.send_object_list([shapes], other, group=group)
                for name in shapes:
                    dist.send(stored[name](), other, group=group)
        mine = {name: read() for name, read in _of(wanted[0], stored).items()}
    elif names:
        received: list[Any] = [None]
        dist.recv_object_list(received, 0, group=group)
        mine = {name: torch.empty(shape, dtype=torch.float32) for name, shape in received[0].items()}
        for tensor in mine.values():
            dist.recv(tensor, 0, group=group)
    else:
        mine = {}
    weights = {name: tensor for name, tensor in mine.items() if "/" not in name}
    return weights, {name: tensor for name, tensor in mine.items() if "/" in name}


def _of(names: list[str], stored: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, Callable[[], torch.Tensor]]:
    """What is stored of these weights, their optimizer state included."""
    wanted = set(names)
    return {name: read for name, read in stored.items() if name.rpartition("/")[0] in wanted or name in wanted}


def _opened(file: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that read a file's tensors, by name."""
    opened = safe_open(file, framework="pt")
    return {name: functools.partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118, no mapping


def _tensor_file(tensors: Tensors) -> Callable[[Path], None]:
    """A function that writes tensors to a path; raises OSError."""

    def write(path: Path) -> None:
        try:
            save_file(dict(tensors), path)
        except SafetensorError as error:
            raise OSError(f"{path.name}: {error}") from error

    return write


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _recorded_scores(folder: Path, metric: str) -> dict[int, float | None]:
    """The scores of the run's evaluations so far, by step."""
    scores: dict[int, float | None] = {}
    if (folder / METRICS).exists():
        for line in (folder / METRICS).read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "eval":
                scores[record["step"]] = None if isinstance(record[metric], str) else record[metric]
    return scores
