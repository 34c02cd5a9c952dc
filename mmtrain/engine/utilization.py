"""Shares of a run's time that each rank waited, and of the machine's arithmetic that it used."""

from typing import Any

import torch
from torch import Tensor

from mmtrain.config.schema import RunConfig
from mmtrain.engine.statistics import StepResult
from mmtrain.facts.models import models_of
from mmtrain.plan.calibration import Device, find_calibration
from mmtrain.plan.costs import Workload, minimal_flops

LISTED_RANKS = 4  # more would not fit into a line of the console
MEASURED = (
    "compute_seconds",
    "communication_seconds",
    "data_seconds",
    "fetching_seconds",
    "peak_memory_bytes",
)
# rows of a table with a column for each rank; the last six are the fields of RankSeconds
ROWS = ("idle_fraction", "idle_seconds", "window_seconds", *MEASURED)


class Utilization:
    """The utilisation of a run's steps. The first, which pays for warm-up, counts in the summary
    only if it is alone.
    """

    def __init__(self, config: RunConfig, device: Device) -> None:
        """Utilisation is known where `device`, which each rank has, is calibrated."""
        self._trainable = config.model.trainable
        self._models = models_of(config)
        calibration = find_calibration(config, self._models, device)
        self._peak_flops = calibration and calibration.matmul_flops_per_second
        self._steps = 0
        self._flops = 0.0
        self._total = torch.zeros(len(ROWS), 0)
        self._recent: list[Tensor] = []  # tables of the steps since the last `take_sums`

    def add(self, step: StepResult) -> dict[str, Any]:
        """Count a step and return its fields for metrics.jsonl: means and maxima over ranks."""
        columns = [(rank.idle_fraction, rank.idle, *rank) for rank in step.ranks]
        table = torch.tensor(columns, dtype=torch.float64).T
        flops = self._needed_flops(step)
        if self._steps <= 1:
            self._total = torch.zeros_like(table)
            self._flops = 0.0
        self._steps += 1
        self._flops += flops
        self._total += table
        self._recent.append(table)

        values = dict(zip(ROWS, table, strict=True))
        return {
            **{name: _over_ranks(values[name]) for name in ("idle_fraction", *MEASURED)},
            "model_flops_utilization": self._share(flops, values["window_seconds"]),
        }

    def take_sums(self) -> dict[str, Any] | None:
        """Return sums by global rank since the last call, for metrics.jsonl; None without a step.

        Of the first step, which pays for warm-up, only the peak of memory counts.
        """
        if not self._recent:
            return None
        tables = torch.stack(self._recent)
        timed = tables
        if len(self._recent) == self._steps:
            timed = tables[1:]
        self._recent = []
        sums = dict(zip(ROWS, timed.sum(0).tolist(), strict=True))
        sums["peak_memory_bytes"] = tables[:, -1].amax(0).tolist()
        del sums["idle_fraction"], sums["window_seconds"]
        return {"steps": len(timed), **sums}

    def summary(self) -> str | None:
        """Return one line for people: mean idle shares, and utilisation if known; None if there was
        no step.
        """
        _, idle, window, *_ = self._total
        if not window.sum():
            return None
        shares = (idle / window).tolist()
        texts = [f"rank {rank}: {share:.0%}" for rank, share in enumerate(shares)]
        if len(shares) > LISTED_RANKS:
            least = texts[shares.index(min(shares))]
            most = texts[shares.index(max(shares))]
            texts = [f"least {least}", f"most {most}"]
        text = f"idle {idle.sum() / window.sum():.0%}"
        if len(shares) > 1:
            text += f" ({', '.join(texts)})"
        used = self._share(self._flops, window)
        if used is not None:
            text += f", utilisation {used:.0%}"
        return text

    def _needed_flops(self, step: StepResult) -> float:
        """Return the FLOPs that the step needs at least (see `minimal_flops`).

        All documents count as equally long, so where lengths differ attention counts for less than
        it takes.
        """
        if self._peak_flops is None or step.tokens == 0:  # every sample of the step was damaged
            return 0.0
        across = self._models.layout.attends_across
        attended = step.tiles / max(step.images, 1) if across else 1.0
        work = Workload(
            tokens=step.tokens,
            document=step.tokens / step.samples,
            tiles=step.tiles,
            image_positions=0,  # fusion has no FLOPs
            supervised=step.supervised_tokens,
            attended=attended,
        )
        return float(minimal_flops(self._models, self._trainable, work).total)

    def _share(
        self,
        flops: float,
        windows: Tensor,
    ) -> float | None:
        """Return the share of the FLOPs that all ranks could compute in the longest window."""
        longest = windows.max().item()
        if self._peak_flops is None or longest <= 0:
            return None
        return flops / (longest * len(windows) * self._peak_flops)


def _over_ranks(values: Tensor) -> dict[str, float]:
    """Return the mean and the maximum of values by global rank, and the first rank that has it."""
    return {
        "mean": values.mean().item(),
        "max": values.max().item(),
        "max_rank": int(values.argmax()),
    }
