"""Shares of a run's time that each rank waited, and of the machine's arithmetic that it used."""

import operator
from typing import Any

from mmtrain.config.schema import RunConfig
from mmtrain.engine.statistics import StepResult
from mmtrain.facts.models import models_of
from mmtrain.plan.calibration import Device, find_calibration
from mmtrain.plan.costs import Workload, minimal_flops

LISTED_RANKS = 4  # more would not fit into a line of the console


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
        self._idle: list[float] = []  # seconds, by rank
        self._window: list[float] = []
        self._flops = 0.0

    def add(self, step: StepResult) -> dict[str, Any]:
        """Count a step and return its fields for metrics.jsonl; lists are by global rank."""
        flops = self._needed_flops(step)
        ranks = step.ranks
        windows = [rank.window for rank in ranks]
        if self._steps <= 1:
            self._idle = [0.0] * len(ranks)
            self._window = [0.0] * len(ranks)
            self._flops = 0.0
        self._steps += 1
        self._flops += flops
        for number, rank in enumerate(ranks):
            self._idle[number] += rank.idle
            self._window[number] += rank.window
        return {
            "idle_fraction": [rank.idle_fraction for rank in ranks],
            "compute_seconds": [rank.compute for rank in ranks],
            "communication_seconds": [rank.communication for rank in ranks],
            "data_seconds": [rank.data for rank in ranks],
            "fetching_seconds": [rank.fetching for rank in ranks],
            "peak_memory_bytes": [int(rank.peak_memory_bytes) for rank in ranks],
            "model_flops_utilization": self._share(flops, windows),
        }

    def summary(self) -> str | None:
        """Return one line for people: mean idle shares, and utilisation if known; None if there was
        no step.
        """
        if not sum(self._window):
            return None
        shares = list(map(operator.truediv, self._idle, self._window))
        texts = [f"rank {rank}: {share:.0%}" for rank, share in enumerate(shares)]
        if len(shares) > LISTED_RANKS:
            least = texts[shares.index(min(shares))]
            most = texts[shares.index(max(shares))]
            texts = [f"least {least}", f"most {most}"]
        text = f"idle {sum(self._idle) / sum(self._window):.0%}"
        if len(shares) > 1:
            text += f" ({', '.join(texts)})"
        used = self._share(self._flops, self._window)
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
        windows: list[float],
    ) -> float | None:
        """Return the share of the FLOPs that all ranks could compute in the longest window."""
        if self._peak_flops is None or max(windows) <= 0:
            return None
        return flops / (max(windows) * len(windows) * self._peak_flops)
