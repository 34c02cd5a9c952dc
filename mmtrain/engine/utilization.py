"""How much of a run's time each rank waited, and how much of the machine's arithmetic the run
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.plan.calibration import Device, find_calibration
from mmtrain.plan.costs import Workload, minimal_flops

if TYPE_CHECKING:
    from mmtrain.engine.statistics import StepResult

# Fields of metrics.jsonl that measure the machine: two runs that do the same differ in them.
MEASURED = (
    *(
        "seconds",
        "tokens_per_second",
        "idle_fraction",
        "compute_seconds",
        "communication_seconds",
        "data_seconds",
    ),
    *("fetching_seconds", "peak_memory_bytes", "model_flops_utilization", "time"),
)
LISTED_RANKS = 4  # more would not fit into a line of the console


class Utilization:
    """Follows a run's steps. The first one, which pays for warm-up, counts in the summary only if
    it is alone.
    """

    def __init__(self, config: RunConfig, device: Device) -> None:
        """Utilisation is known where `device`, which each rank has, is calibrated."""
        self._trainable, self._models = config.model.trainable, models_of(config)
        calibration = find_calibration(config, self._models, device)
        self._peak_flops = None if calibration is None else calibration.matmul_flops_per_second
        self._steps = 0
        self._idle: list[float] = []  # seconds, by rank
        self._window: list[float] = []
        self._flops = 0.0

    def add(self, step: StepResult) -> dict[str, Any]:
        """Count a step and return its fields for metrics.jsonl; lists are by global rank."""
        flops, ranks = self._needed_flops(step), step.ranks
        if self._steps <= 1:
            self._idle, self._window, self._flops = [0.0] * len(ranks), [0.0] * len(ranks), 0.0
        self._steps += 1
        self._idle = [idle + rank.idle for idle, rank in zip(self._idle, ranks, strict=True)]
        self._window = [
            window + rank.window for window, rank in zip(self._window, ranks, strict=True)
        ]
        self._flops += flops
        return {
            "idle_fraction": [rank.idle_fraction for rank in ranks],
            "compute_seconds": [rank.compute for rank in ranks],
            "communication_seconds": [rank.communication for rank in ranks],
            "data_seconds": [rank.data for rank in ranks],
            "fetching_seconds": [rank.fetching for rank in ranks],
            "peak_memory_bytes": [int(rank.peak_memory_bytes) for rank in ranks],
            "model_flops_utilization": self._share(flops, [rank.window for rank in ranks]),
        }

    def summary(self) -> str | None:
        """Return one line for people: mean idle shares, and utilisation if known; None if there was
        no step.
        """
        if not sum(self._window):
            return None
        shares = [idle / window for idle, window in zip(self._idle, self._window, strict=True)]
        text = f"idle {sum(self._idle) / sum(self._window):.0%}"
        if 1 < len(shares) <= LISTED_RANKS:
            text += (
                f" ({', '.join(f'rank {rank}: {share:.0%}' for rank, share in enumerate(shares))})"
            )
        elif len(shares) > LISTED_RANKS:
            least, most = (shares.index(pick(shares)) for pick in (min, max))
            text += (
                f" (least rank {least}: {shares[least]:.0%}, most rank {most}: {shares[most]:.0%})"
            )
        used = self._share(self._flops, self._window)
        return text if used is None else f"{text}, utilisation {used:.0%}"

    def _needed_flops(self, step: StepResult) -> float:
        """FLOPs that any exact way of making this step computes (see `minimal_flops`): nothing
        wasted counts as work.

        All documents count as equally long, so where lengths differ attention counts for less than
        it takes.
        """
        if self._peak_flops is None or step.tokens == 0:  # every sample of the step was damaged
            return 0.0
        work = Workload(
            tokens=step.tokens,
            document=step.tokens / step.samples,
            tiles=step.tiles,
            image_positions=0,  # fusion has no FLOPs
            supervised=step.supervised_tokens,
            attended=step.tiles / max(step.images, 1)
            if self._models.layout.attends_across
            else 1.0,
        )
        return float(minimal_flops(self._models, self._trainable, work).total)

    def _share(self, flops: float, windows: list[float]) -> float | None:
        """Share of what all ranks could have computed in the longest window."""
        if self._peak_flops is None or max(windows) <= 0:
            return None
        return flops / (max(windows) * len(windows) * self._peak_flops)
