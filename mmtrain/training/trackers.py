"""Where a run's metrics go besides its own records: TensorBoard, Weights & Biases, a CSV table (`run.report_to`).

records of steps, scores and answers --a queue each--> a thread each --> RUN/tensorboard, RUN/wandb, RUN/metrics.csv

Training never waits for a tracker, and one that fails or hangs is left out from there: metrics.jsonl is the truth.
"""

from __future__ import annotations

import contextlib
import csv
import os
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from mmtrain.base.disclosed import disclosed
from mmtrain.base.json_lines import recorded
from mmtrain.base.printing import escape
from mmtrain.checkpoint.run_folder import METRICS
from mmtrain.config.load import dump_config
from mmtrain.config.schema import RunConfig

Record = Mapping[str, Any]

OF_A_STEP = ("loss", "grad_norm", "lr", "tokens_per_second", "pack_fill", "epoch", "samples", "quarantined")
PEAK_MEMORY = "peak_memory_bytes"  # of the rank that has the highest
SCORED = ("eval", "eval_permuted")
OF_AN_EVALUATION = ("loss", "token_accuracy", "exact_match")
ANSWERED = ("key", "question", "given", "truth", "right")

MAX_WAITING_RECORDS = 10_000  # for a tracker that takes none: they must not fill the memory
SECONDS_TO_BEGIN, SECONDS_TO_UPLOAD = 30.0, 30.0  # of wandb
SECONDS_TO_END = 40.0  # of all trackers: more than wandb is given


def numbers(record: Record) -> dict[str, float | None]:
    """Return the numbers of a record of metrics.jsonl by the names that all trackers use."""
    kind = record.get("kind")
    if kind in SCORED:
        return {f"{kind}/{name}": record.get(name) for name in OF_AN_EVALUATION}
    if kind != "train":
        return {}
    values = {f"train/{name}": record.get(name) for name in OF_A_STEP}
    values[f"train/{PEAK_MEMORY}"] = max(record.get(PEAK_MEMORY) or [None])
    values |= {f"train/lr/{group}": rate for group, rate in record.get("lr_groups", {}).items()}
    return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}  # JSON's "nan"


class Trackers:
    """Trackers, by name, of a run that begins or resumes at `first_step`; `print_info` tells the user."""

    def __init__(
        self, names: Sequence[str], folder: Path, config: RunConfig, first_step: int, print_info: Callable[[str], None]
    ) -> None:
        """Import the libraries and start the threads."""
        self._print_info = print_info
        self._threads = [_Thread(name, folder, config, first_step, print_info) for name in dict.fromkeys(names)]
        for thread in self._threads:
            thread.start()

    def take(self, record: Record) -> None:
        """Hand on a record of metrics.jsonl, or one of the kind `answers` with those of a step; return at once."""
        for thread in self._threads:
            thread.put(record)

    def close(self) -> None:
        """Wait until all records are written, at most 40 s; hand on nothing after this."""
        for thread in self._threads:
            thread.put(None)
        deadline = time.monotonic() + SECONDS_TO_END
        for thread in self._threads:
            if not thread.is_left_out:
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.leave_out(f"it has not taken everything within {SECONDS_TO_END:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Tell the trackers of a run that fails to end, without waiting for them."""
        if kind is not None:
            for thread in self._threads:
                thread.put(None)


class _Thread(threading.Thread):
    """A tracker at work, on a thread of its own: whatever its library does, the run goes on.

    `open` of a tracker returns the first step whose records it lacks.
    """

    def __init__(
        self, name: str, folder: Path, config: RunConfig, first_step: int, print_info: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._metrics, self._first_step, self._print_info = folder / METRICS, first_step, print_info
        self._records: queue.Queue[Record | None] = queue.Queue(MAX_WAITING_RECORDS)
        self.is_left_out = False
        with self._leaving_out():
            # Here, not on the thread: a loader's worker that is forked during an import could never make that import.
            self._tracker = TRACKERS[name](folder, config, first_step)

    def put(self, record: Record | None) -> None:
        """Hand on a record, None after the last one."""
        if not self.is_left_out:
            try:
                self._records.put_nowait(record)
            except queue.Full:
                self.leave_out(f"{MAX_WAITING_RECORDS:,} records wait for it")

    def leave_out(self, why: str) -> None:
        """Hand on nothing from now on, and say so once."""
        if not self.is_left_out:
            self.is_left_out = True
            self._print_info(f"{self.name} is left out from here: {why}; {METRICS} has everything")

    @contextlib.contextmanager
    def _leaving_out(self) -> Iterator[None]:
        # The one place where anything is caught: others' libraries, disks and networks must not decide how a run ends.
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # into the log
            self.leave_out(escape(f"{type(error).__name__}: {error}"))

    def run(self) -> None:
        if self.is_left_out:
            return
        with self._leaving_out():
            first_lacking = self._tracker.open()
            if self._tracker.url is not None:
                self._print_info(f"{self.name}: {self._tracker.url}")
            for record in recorded(self._metrics, "train", *SCORED):
                if first_lacking <= record["step"] < self._first_step:  # those of later steps come by the queue
                    self._tracker.write(record)
            while (record := self._records.get()) is not None:
                self._tracker.write(record)
            self._tracker.close()


class _TensorBoard:
    """RUN/tensorboard, by PyTorch's writer: numbers as float32; what was written of steps made again is purged."""

    url = None

    def __init__(self, folder: Path, config: RunConfig, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder, self._config, self._first_step = folder / "tensorboard", config, first_step

    def open(self) -> int:
        first_lacking = self._first_step if self._folder.exists() else 0
        self._writer = self._make(str(self._folder), purge_step=self._first_step)
        configuration = dump_config(self._config, for_others=True)
        self._writer.add_text("configuration", _preformatted(configuration), self._first_step)
        return first_lacking

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            if value is not None:
                self._writer.add_scalar(name, value, record["step"], walltime=record["time"])
        if record["kind"] == "answers":
            answers = "\n\n".join(
                "\n".join(f"{name:<9} {escape(str(answer[name]))}" for name in ANSWERED) for answer in record["answers"]
            )
            self._writer.add_text("answers", _preformatted(answers), record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _preformatted(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class _WandB:
    """A run of Weights & Biases, its files in RUN/wandb; with WANDB_MODE=offline they stay there for `wandb sync`."""

    def __init__(self, folder: Path, config: RunConfig, first_step: int) -> None:
        import wandb

        self._wandb, self._folder, self._config = wandb, folder, config
        self._is_at_the_end = False

    def open(self) -> int:
        runs = (re.fullmatch(r"(?:offline-)?run-\d+_\d+-(.+)", path.name) for path in self._folder.glob("wandb/*"))
        earlier = next((run[1] for run in runs if run), None)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mmtrain"),
            name=self._config.run.name,
            id=earlier,
            resume=None if earlier is None else "allow",
            dir=str(self._folder),
            config=disclosed(self._config.model_dump(mode="json")),
            allow_val_change=True,
            settings=self._wandb.Settings(
                console="off",
                x_disable_meta=True,  # the command line is part of it: arguments of `pipe:` URLs, logins
                init_timeout=SECONDS_TO_BEGIN,
                finish_timeout=SECONDS_TO_UPLOAD,
                finish_timeout_raises=True,
            ),
        )
        self.url = self._run.url
        return self._run.step  # offline always 0: each folder of a run then has all of its steps

    def write(self, record: Record) -> None:
        values = {name: value for name, value in numbers(record).items() if value is not None}
        if record["kind"] == "answers":
            rows = [[record["step"], *(answer[name] for name in ANSWERED)] for answer in record["answers"]]
            values = {"answers": self._wandb.Table(columns=["step", *ANSWERED], data=rows)}
        if values:
            self._run.log(values, step=record["step"])
        self._is_at_the_end |= record["kind"] == "end"

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._is_at_the_end else 1)  # what it shows of a run that may go on


class _Csv:
    """RUN/metrics.csv: a row a step, with the scores of before it; at each start made again from metrics.jsonl."""

    url = None

    def __init__(self, folder: Path, config: RunConfig, first_step: int) -> None:
        self._path = folder / "metrics.csv"
        groups = {", ".join(group.match): 0.0 for group in config.optimizer.groups}
        kinds = ({"kind": "train", "lr_groups": groups}, *({"kind": kind} for kind in SCORED))
        self._columns = ["step", "time", *(name for record in kinds for name in numbers(record))]

    def open(self) -> int:
        self._row: dict[str, Any] = {}
        self._file = self._path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self._columns, extrasaction="ignore", lineterminator="\n")
        self._writer.writeheader()
        return 0

    def write(self, record: Record) -> None:
        if values := numbers(record):
            if self._row.get("step") != record["step"]:
                self._end_row()
            self._row |= values | {"step": record["step"], "time": record["time"]}
        if record["kind"] == "train":
            self._end_row()

    def _end_row(self) -> None:
        if self._row:
            self._writer.writerow(self._row)
            self._file.flush()
            self._row = {}

    def close(self) -> None:
        self._end_row()
        self._file.close()


TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WandB, "csv": _Csv}
