"""How much of a run's time each rank waited, and what share of the machine's arithmetic came of it.

StepClock on every rank --RankSeconds--> Utilization --> fields of metrics.jsonl's `train` lines, a line on the console
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmtrain.config.schema import RunConfig
from mmtrain.plan.calibration import Device, find_calibration
from mmtrain.plan.costs import Models, Workload, minimal_flops
from mmtrain.plan.planner import models_of

if TYPE_CHECKING:
    from mmtrain.engine.statistics import StepResult

# Fields of metrics.jsonl that measure the machine: two runs that do the same differ in them.
MEASURED = (
    *("seconds", "tokens_per_second", "idle_fraction", "compute_seconds", "communication_seconds", "data_seconds"),
    *("fetching_seconds", "peak_memory_bytes", "model_flops_utilization", "time"),
)
LISTED_RANKS = 4  # more would not fit into a line of the console


def peak_flops(config: RunConfig, device: Device) -> float | None:
    """FLOP/s that a rank's device could reach: the matmul rate of a calibration, None where there is none."""
    calibration = find_calibration(config, models_of(config), device)
    return None if calibration is None else calibration.matmul_flops_per_second


def needed_flops(step: StepResult, models: Models, trainable: tuple[str, ...]) -> float:
    """FLOPs that any exact way of making this step computes (see `minimal_flops`): nothing wasted counts as work.

    All documents count as equally long, so where lengths differ attention counts for less than it takes.
    """
    if step.tokens == 0:  # every sample of it was damaged
        return 0.0
    work = Workload(
        tokens=step.tokens,
        document=step.tokens / step.samples,
        tiles=step.tiles,
        image_positions=0,  # fusion has no FLOPs
        supervised=step.supervised_tokens,
    )
    return float(minimal_flops(models, trainable, work).total)


class Utilization:
    """Follows a run's steps; the first one, which pays for warm-up, counts in the summary only if it is the only one.

    `peak_flops` is of one rank's device; None: unknown, and so is utilisation.
    """

    def __init__(self, config: RunConfig, peak_flops: float | None) -> None:
        self._trainable = config.model.trainable
        self._models = None if peak_flops is None else models_of(config)
        self._peak_flops = peak_flops
        self._steps = 0
        self._idle: list[float] = []  # seconds, by rank
        self._window: list[float] = []
        self._flops = 0.0

    def add(self, step: StepResult) -> dict[str, Any]:
        """Count a step in; what metrics.jsonl says of it, lists being by global rank."""
        flops = 0.0 if self._models is None else needed_flops(step, self._models, self._trainable)
        ranks = step.ranks
        if self._steps <= 1:  # the first, or what only the first has left
            self._idle, self._window, self._flops = [0.0] * len(ranks), [0.0] * len(ranks), 0.0
        self._steps += 1
        self._idle = [idle + rank.idle for idle, rank in zip(self._idle, ranks, strict=True)]
        self._window = [window + rank.window for window, rank in zip(self._window, ranks, strict=True)]
        self._flops += flops
        return {
            "idle_fraction": [rank.idle_fraction for rank in ranks],
            "compute_seconds": [rank.compute for rank in ranks],
            "communication_seconds": [rank.communication for rank in ranks],
            "data_seconds": [rank.data for rank in ranks],
            "fetching_seconds": [rank.fetching for rank in ranks],
            "peak_memory_bytes": [rank.peak_memory_bytes for rank in ranks],
            "model_flops_utilization": self._share(flops, [rank.window for rank in ranks]),
        }

    def summary(self) -> str | None:
        """One line for people: mean idle shares, and utilisation where it is known; None: there was no step."""
        if not self._window or not sum(self._window):
            return None
        shares = [idle / window for idle, window in zip(self._idle, self._window, strict=True)]
        text = f"idle {sum(self._idle) / sum(self._window):.0%}"
        if 1 < len(shares) <= LISTED_RANKS:
            text += f" ({', '.join(f'rank {rank}: {share:.0%}' for rank, share in enumerate(shares))})"
        elif len(shares) > LISTED_RANKS:
            least, most = (shares.index(pick(shares)) for pick in (min, max))
            text += f" (least rank {least}: {shares[least]:.0%}, most rank {most}: {shares[most]:.0%})"
        used = self._share(self._flops, self._window)
        return text if used is None else f"{text}, utilisation {used:.0%}"

    def _share(self, flops: float, windows: list[float]) -> float | None:
        """Of what all ranks could have computed in the longest window."""
        if self._peak_flops is None or max(windows) <= 0:
            return None
        return flops / (max(windows) * len(windows) * self._peak_flops)
