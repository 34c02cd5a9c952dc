"""A step whose loss or gradient is NaN or infinite: what all ranks know of it, as a record and in words.

Losses of micro-batches are known where the head is, keys of samples where data are read, gradients where something
trains. Each rank reports its part; the reports of all ranks make one record, a line of `bad_steps.jsonl`:

    {"step": 12, "loss_sum": nan, "squared_gradient_norm": nan (of the loss sum's gradient),
     "ranks": [0, 3] (that hold a value that is not finite), "parameters": [names with such a gradient],
     "microbatches": [{"replica": 0, "microbatch": 1, "loss": nan (nats per supervised token; null without any),
                       "supervised_tokens": 57, "keys": [...]}, ...]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.errors import UnrecordedError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.printing import escape, first_few
from mmtrain.engine.statistics import Statistics

SHOWN = 3  # micro-batches, samples of each, and parameters, in a message: the record has all


@dataclass(frozen=True)
class RankReport:
    """What one rank knows; `losses` is (loss sum in nats, supervised tokens) by micro-batch of its replica."""

    rank: int
    replica: int
    parameters: tuple[str, ...]  # whose reduced gradient is not finite
    losses: Mapping[int, tuple[float, int]]
    keys: Mapping[int, tuple[str, ...]]

    @property
    def is_bad(self) -> bool:
        """Whether the rank holds a value that is not finite."""
        return bool(self.parameters) or any(not math.isfinite(loss) for loss, _ in self.losses.values())


def report_bad_step(
    step: int,
    sums: Statistics,
    replica: int,
    trainable: Mapping[str, torch.nn.Parameter],
    losses: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    keys: Mapping[int, tuple[str, ...]],
    file: Path | None,
) -> str:
    """Join the reports of all ranks; rank 0 appends the record to `file`. Return it in words. Collective.

    `trainable` are this rank's, with reduced gradients; `losses` and `keys` as in RankReport. Raises UnrecordedError,
    with the words, where the file cannot be written.
    """
    parameters = tuple(name for name, p in trainable.items() if not bool(p.grad.isfinite().all()))
    on_host = {k: (float(loss), int(supervised)) for k, (loss, supervised) in losses.items()}
    reports = all_gather_object(RankReport(dist.get_rank(), replica, parameters, on_host, dict(keys)))
    record = make_record(step, sums.loss_sum, sums.squared_norm, reports)
    text = in_words(record)
    if file is None:
        return text
    try:
        with JsonLines(file if dist.get_rank() == 0 else None) as lines:
            lines.write(**record)
    except OSError as error:
        raise UnrecordedError(f"{text} ({file} cannot be written: {error.strerror})") from error
    return f"{text}; {file} lists its micro-batches with losses and samples"


def make_record(
    step: int, loss_sum: float, squared_gradient_norm: float, reports: Sequence[RankReport]
) -> dict[str, Any]:
    """Return the record of a bad step from the reports of all ranks, in rank order."""
    losses = {(report.replica, k): loss for report in reports for k, loss in report.losses.items()}
    keys = {(report.replica, k): names for report in reports for k, names in report.keys.items()}
    return {
        "step": step,
        "loss_sum": loss_sum,
        "squared_gradient_norm": squared_gradient_norm,
        "ranks": [report.rank for report in reports if report.is_bad],
        "parameters": list(dict.fromkeys(name for report in reports for name in report.parameters)),
        "microbatches": [
            {
                "replica": replica,
                "microbatch": k,
                "loss": loss / supervised if supervised else None,
                "supervised_tokens": supervised,
                "keys": list(keys[replica, k]),
            }
            for (replica, k), (loss, supervised) in sorted(losses.items())
        ],
    }


def in_words(record: Mapping[str, Any]) -> str:
    """Describe a record in a few sentences, with the first names of each kind; texts of the data are escaped."""
    ranks = ", ".join(map(str, record["ranks"]))
    bad = [
        f"{m['microbatch']} of replica {m['replica']} (samples {first_few([*map(escape, m['keys'])], SHOWN)})"
        for m in record["microbatches"]
        if not math.isfinite(m["loss"] or 0.0)
    ]
    where = f"The loss is not finite in micro-batch {first_few(bad, SHOWN)}."
    if not bad:
        parameters = first_few(record["parameters"], SHOWN)
        where = f"The loss of each micro-batch is finite, the gradient of {parameters} is not."
    look = "Lower optimizer.lr, or look" if record["step"] else "Look"
    return (
        f"step {record['step']}: the loss sum is {record['loss_sum']} and the squared gradient norm "
        f"{record['squared_gradient_norm']}, with values that are not finite on rank {ranks}; no update was made. "
        f"{where} {look} for damaged images or text in this step's data"
    )
