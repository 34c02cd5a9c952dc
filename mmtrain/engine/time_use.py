"""Where the time of a step went, rank by rank, and what share of the machine's arithmetic came of it.

StepClock on every rank --RankSeconds--> TimeUse --> fields of metrics.jsonl's `train` lines, a line on the console
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from mmtrain.config.schema import RunConfig
from mmtrain.plan.calibration import Device, find_calibration
from mmtrain.plan.costs import Models, Workload, minimal_flops
from mmtrain.plan.planner import models_of
from mmtrain.plan.schedule import Instruction, Op

# Fields of metrics.jsonl that measure the machine: two runs that do the same differ in them.
MEASURED = (
    *("seconds", "tokens_per_second", "idle_fraction", "compute_seconds", "communication_seconds", "data_seconds"),
    *("peak_memory_bytes", "model_flops_utilization"),
)
LISTED_RANKS = 4  # more would not fit into a line of the console


class Work(StrEnum):
    """What time goes into."""

    LOAD = "load"
    ENCODE = "encode"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    WAIT = "wait"
    OPTIMIZER = "optimizer"


COMPUTING = (Work.ENCODE, Work.FORWARD, Work.BACKWARD)
WORK_OF = {
    Op.LOAD: Work.LOAD,
    Op.ENCODE: Work.ENCODE,
    Op.FORWARD: Work.FORWARD,
    Op.BACKWARD: Work.BACKWARD,
    Op.SEND_ACTIVATION: Work.COMMUNICATION,
    Op.RECEIVE_ACTIVATION: Work.COMMUNICATION,
    Op.SEND_GRADIENT: Work.COMMUNICATION,
    Op.RECEIVE_GRADIENT: Work.COMMUNICATION,
    Op.REDUCE_GRADIENTS: Work.COMMUNICATION,
    Op.REDUCE_STATISTICS: Work.COMMUNICATION,
    Op.OPTIMIZER_STEP: Work.OPTIMIZER,
}


class Part(NamedTuple):
    """What a rank did from `begin` to `end`, seconds of its own clock; instruction None: it waited for its sends."""

    work: Work
    instruction: Instruction | None
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """One rank's part of a step, from its `train_step`'s begin to the end of the reduction that ends the step's work.

    All ranks leave that reduction together; the optimizer comes after it and is not in here. `compute` is the encoder,
    forward and backward without the waits in them; `communication` is posting sends and receives and reducing
    gradients, where waiting for other replicas cannot be told from it; `data` is waiting for the loader, and copying
    what it gives to the device. The rest of `window` is idle. `peak_memory_bytes` is of the same time: allocated by
    torch on a GPU, resident in the process on a CPU (where the kernel cannot reset that: since the process began).
    """

    window: float
    compute: float
    communication: float
    data: float
    peak_memory_bytes: int

    @property
    def idle(self) -> float:
        """Seconds of waiting for a message or for the other ranks."""
        return max(0.0, self.window - self.compute - self.communication - self.data)

    @property
    def idle_fraction(self) -> float:
        """`idle` as a share of the window."""
        return self.idle / self.window if self.window > 0 else 0.0


class StepCounts(Protocol):
    """What a step was made of, over all replicas; `tokens` leaves padding out."""

    tokens: int
    samples: int
    images: int
    supervised_tokens: int


class Yardstick:
    """What a step had to compute, and what a rank's device could have: nothing that was wasted counts as work."""

    def __init__(self, config: RunConfig, models: Models, peak_flops: float) -> None:
        """`peak_flops` is of one rank's device, in FLOP/s."""
        self._trainable = config.model.trainable
        self._models = models
        self.peak_flops = peak_flops

    @classmethod
    def find(cls, config: RunConfig, device: Device) -> Yardstick | None:
        """By `parallel.device_tflops`, else by a calibration's matmul rate on this device; None if there is neither."""
        models = models_of(config)
        if config.parallel.device_tflops is not None:
            return cls(config, models, config.parallel.device_tflops * 1e12)
        calibration = find_calibration(config, models, device)
        return None if calibration is None else cls(config, models, calibration.matmul_flops_per_second)

    def needed_flops(self, step: StepCounts) -> float:
        """FLOPs that any exact way of making this step computes (see `minimal_flops`).

        All documents count as equally long, so where lengths differ attention counts for less than it takes.
        """
        if step.tokens == 0:  # every sample of it was damaged
            return 0.0
        document = step.tokens / step.samples
        work = Workload(step.tokens, document, step.images, step.supervised_tokens)
        return float(minimal_flops(self._models, self._trainable, work).total)


class TimeUse:
    """Follows a run's steps; the first one, which pays for warm-up, counts in the summary only if it is the only one.

    Utilisation is None where nothing says what a device can do.
    """

    def __init__(self, yardstick: Yardstick | None) -> None:
        self._yardstick = yardstick
        self._steps = 0
        self._idle: list[float] = []  # seconds, by rank
        self._window: list[float] = []
        self._flops: float | None = 0.0

    def add(self, ranks: Sequence[RankSeconds], counts: StepCounts) -> dict[str, Any]:
        """Count a step in; what metrics.jsonl says of it, lists being by global rank."""
        flops = None if self._yardstick is None else self._yardstick.needed_flops(counts)
        if self._steps <= 1:  # the first, or what only the first has left
            self._idle, self._window, self._flops = [0.0] * len(ranks), [0.0] * len(ranks), 0.0
        self._steps += 1
        self._idle = [sum(pair) for pair in zip(self._idle, (rank.idle for rank in ranks), strict=True)]
        self._window = [sum(pair) for pair in zip(self._window, (rank.window for rank in ranks), strict=True)]
        self._flops = None if flops is None or self._flops is None else self._flops + flops
        return {
            "idle_fraction": [rank.idle_fraction for rank in ranks],
            "compute_seconds": [rank.compute for rank in ranks],
            "communication_seconds": [rank.communication for rank in ranks],
            "data_seconds": [rank.data for rank in ranks],
            "peak_memory_bytes": [rank.peak_memory_bytes for rank in ranks],
            "model_flops_utilization": self._utilization(flops, [rank.window for rank in ranks]),
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
        used = self._utilization(self._flops, self._window)
        return text if used is None else f"{text}, utilisation {used:.0%}"

    def _utilization(self, flops: float | None, windows: Sequence[float]) -> float | None:
        """Share of what all ranks could have computed in the longest window."""
        if flops is None or self._yardstick is None or max(windows) <= 0:
            return None
        return flops / (max(windows) * len(windows) * self._yardstick.peak_flops)
