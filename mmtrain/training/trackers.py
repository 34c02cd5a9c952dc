"""Trackers of `run.report_to`, which get a run's metrics, too: TensorBoard, Weights & Biases.

records of steps, scores and answers --> RUN/tensorboard, RUN/wandb

A tracker that fails is left out from there: metrics.jsonl has everything. The libraries send on
threads and processes of their own.
"""

import contextlib
import functools
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmtrain.base.json_lines import recorded
from mmtrain.base.printing import disclosed, escape
from mmtrain.checkpoint.run_folder import METRICS
from mmtrain.config.load import dump_config
from mmtrain.config.schema import RunConfig

Record = Mapping[str, Any]

OF_A_STEP = (
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "pack_fill",
    "epoch",
    "samples",
    "quarantined",
)
SCORED = ("eval", "eval_permuted")
OF_AN_EVALUATION = ("loss", "token_accuracy", "exact_match")
ANSWERED = ("key", "question", "given", "truth", "right")

SECONDS_TO_BEGIN, SECONDS_TO_UPLOAD = 30.0, 30.0  # of wandb


def numbers(record: Record) -> dict[str, float | None]:
    """Return the numbers of a record of metrics.jsonl by the names that all trackers use."""
    kind = record.get("kind")
    if kind in SCORED:
        return {f"{kind}/{name}": record.get(name) for name in OF_AN_EVALUATION}
    if kind != "train":
        return {}
    values = {f"train/{name}": record.get(name) for name in OF_A_STEP}
    values["train/peak_memory_bytes"] = record["peak_memory_bytes"]["max"]
    values |= {f"train/lr/{group}": rate for group, rate in record.get("lr_groups", {}).items()}
    # JSON's "nan", "inf"
    for name, value in values.items():
        if isinstance(value, str):
            values[name] = float(value)
    return values


class Trackers:
    """Trackers, by name, of a run that begins or resumes at `first_step`; `print_info` tells the
    user.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        config: RunConfig,
        first_step: int,
        print_info: Callable[[str], None],
    ) -> None:
        """Open the trackers, and give each the records of earlier steps that it lacks."""
        self._print_info = print_info
        self._trackers: dict[str, Any] = {}
        text = dump_config(config, for_others=True)
        values = disclosed(config.model_dump(mode="json"))
        makers: dict[str, Callable[[], Any]] = {
            "tensorboard": functools.partial(_TensorBoard, folder, text, first_step),
            "wandb": functools.partial(_WandB, folder, values),
        }
        for name in dict.fromkeys(names):
            with self._leaving_out(name):
                tracker = self._trackers[name] = makers[name]()
                if tracker.url is not None:
                    print_info(f"{name}: {tracker.url}")
                for record in recorded(folder / METRICS, "train", *SCORED):
                    if tracker.first_lacking <= record["step"] < first_step:
                        tracker.write(record)

    def take(self, record: Record) -> None:
        """Write a record of metrics.jsonl, or one of the kind `answers` with those of a step."""
        for name, tracker in list(self._trackers.items()):
            with self._leaving_out(name):
                tracker.write(record)

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._leaving_out(name):
                tracker.close()

    @contextlib.contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        # The one place where anything is caught: others' libraries, disks and networks must not
        # decide how a run ends.
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # into the log
            self._trackers.pop(name, None)
            why = escape(f"{type(error).__name__}: {error}")
            self._print_info(f"{name} receives no more metrics: {why}; {METRICS} has everything")


class _TensorBoard:
    """RUN/tensorboard, by PyTorch's writer: numbers as float32; what was written of steps made
    again is purged.
    """

    url = None

    def __init__(
        self,
        folder: Path,
        configuration: str,
        first_step: int,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = folder / "tensorboard"
        self.first_lacking = first_step if folder.exists() else 0
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        self._writer.add_text("configuration", _preformatted(configuration), first_step)

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            if value is not None:
                self._writer.add_scalar(name, value, record["step"], walltime=record["time"])
        if record["kind"] == "answers":
            lines = []
            for answer in record["answers"]:
                lines += [f"{name:<9} {escape(str(answer[name]))}" for name in ANSWERED]
                lines.append("")
            text = _preformatted("\n".join(lines).rstrip())
            self._writer.add_text("answers", text, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _preformatted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


class _WandB:
    """A run of Weights & Biases, its files in RUN/wandb; with WANDB_MODE=offline they stay there
    for `wandb sync`.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any]) -> None:
        import wandb

        self._table = wandb.Table
        timeout = configuration["parallel"]["timeout_seconds"]
        earlier, resume = None, None
        for path in folder.glob("wandb/*"):
            if run := re.fullmatch(r"(?:offline-)?run-\d+_\d+-(.+)", path.name):
                earlier = run[1]
                resume = "allow"
                break
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mmtrain"),
            name=configuration["run"]["name"],
            id=earlier,
            resume=resume,
            dir=str(folder),
            config=configuration,
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                # the command line is part of it: arguments of `pipe:` URLs, logins
                x_disable_meta=True,
                # the other ranks wait
                init_timeout=min(SECONDS_TO_BEGIN, timeout / 2),
                finish_timeout=SECONDS_TO_UPLOAD,
                finish_timeout_raises=True,
            ),
        )
        self.url = self._run.url
        # offline always 0: each folder of a run then has all of its steps
        self.first_lacking = self._run.step
        self._is_complete = False

    def write(self, record: Record) -> None:
        values = {name: value for name, value in numbers(record).items() if value is not None}
        if record["kind"] == "answers":
            rows = []
            for answer in record["answers"]:
                rows.append([record["step"], *(answer[name] for name in ANSWERED)])
            values = {"answers": self._table(columns=["step", *ANSWERED], data=rows)}
        if values:
            self._run.log(values, step=record["step"])
        self._is_complete |= record["kind"] == "end"

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._is_complete else 1)
