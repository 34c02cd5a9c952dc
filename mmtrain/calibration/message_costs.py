"""What a message between neighbouring ranks costs its sender, its receiver and the time in between, while both compute.

per size: a stretch of compute alone, then the same with messages in it --differences--> sender's, receiver's seconds
          a message there and one back, nobody computing --the rest of half of it--> the transfer's seconds

Messages are sent as a run sends them (`Channels`: the run's own process groups). What a library's threads take from the
computing ones is in the differences: a CPU has no cores to spare for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from mmtrain.engine.channels import Channels
from mmtrain.plan.layout import Plan

MESSAGES = 3  # in a stretch
ECHOES = 4  # there and back, in a row
SMALLER = 8  # the second size is the full one over this


def median_of(values: Sequence[float], factors: Sequence[float | None]) -> float:
    """The median of those values whose factor is not None, each times it; there must be one."""
    return statistics.median(
        value * factor for value, factor in zip(values, factors, strict=True) if factor is not None
    )


class MessageSeconds(NamedTuple):
    """Of one message of `size` bytes."""

    size: int
    send: float
    receive: float
    transfer: float | None  # None: where nothing before a pair's receiver trains, no message comes back to tell


@dataclass
class _Samples:
    """Seconds of every round, by what was measured."""

    sending: list[float] = field(default_factory=list)
    receiving: list[float] = field(default_factory=list)
    echo: list[float] = field(default_factory=list)  # of one message one way


class MessageCosts:
    """One rank's part: pipeline ranks 0 and 1 exchange messages, 2 and 3, and so on; every rank calls every method.

    `compute` is one piece of work, about as long as a stage's.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        device: torch.device,
        channels: Channels,
        hidden: torch.Tensor,
        compute: Callable[[], None],
    ) -> None:
        """`hidden` (B, L, D) is like the hidden states between stages."""
        self._channels, self._compute = channels, compute
        self._synchronize = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
        place, ranks = plan.ranks[rank].pipeline, plan.pipeline
        self._sends = place % 2 == 0 and place + 1 < ranks
        self._receives = place % 2 == 1
        self._stage = place if self._sends else place - 1  # the pair's sender
        self._echoes = plan.first_trainable_stage <= self._stage  # else there is no way back
        batch, length, width = hidden.shape
        self._messages = []
        for tokens in sorted({max(1, length // SMALLER), length}):
            integers = torch.zeros((2, batch, tokens), dtype=torch.int64)
            self._messages.append([integers, hidden.new_zeros((batch, tokens, width))])
        self._samples = [_Samples() for _ in self._messages]

    def round(self) -> None:
        """Measure everything once more."""
        alone = self._stretch(None)
        for tensors, samples in zip(self._messages, self._samples, strict=True):
            more = (self._stretch(tensors) - alone) / MESSAGES
            if self._sends:
                samples.sending.append(more)
            elif self._receives:
                samples.receiving.append(more)
            dist.barrier()
            if self._echoes and (self._sends or self._receives):
                samples.echo.append(self._echo(tensors))

    def forget(self) -> None:
        """Drop what was measured: it was the warm-up."""
        self._samples = [_Samples() for _ in self._messages]

    def found(self, factors: Sequence[float | None]) -> dict[int, dict[str, float]]:
        """Medians of this rank by size in bytes: of `send`, `receive` and `echo` (one way), as far as it took part.

        `factors`: of each round, see median_of.
        """
        result: dict[int, dict[str, float]] = {}
        for tensors, samples in zip(self._messages, self._samples, strict=True):
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            parts = {"send": samples.sending, "receive": samples.receiving, "echo": samples.echo}
            result[size] = {name: median_of(values, factors) for name, values in parts.items() if values}
        return result

    def _stretch(self, tensors: list[torch.Tensor] | None) -> float:
        """Seconds of several computes; with messages, all are posted first and taken last, when they have long come."""
        channels, stage = self._channels, self._stage
        keys = [("activation", stage + 1, k) for k in range(MESSAGES)]
        buffers = []
        if tensors is not None and self._receives:
            buffers = [[torch.empty_like(tensor) for tensor in tensors] for _ in keys]
        dist.barrier()
        self._synchronize()
        began = time.perf_counter()
        for key, buffer in zip(keys, buffers, strict=False):
            channels.post_receive("activation", stage, stage + 1, key, buffer)
        for _ in keys:
            if tensors is not None and self._sends:
                channels.send("activation", stage, stage + 1, tensors)
            self._compute()
        self._compute()
        for key, _ in zip(keys, buffers, strict=False):
            channels.take(key)
        self._synchronize()
        seconds = time.perf_counter() - began
        channels.wait_for_sends()
        return seconds

    def _echo(self, tensors: list[torch.Tensor]) -> float:
        """Seconds of one message one way, posting and taking included."""
        channels, stage = self._channels, self._stage
        there, back = ("activation", stage + 1, 0), ("gradient", stage, 0)
        began = time.perf_counter()
        for _ in range(ECHOES):
            buffers = [torch.empty_like(tensor) for tensor in tensors]
            if self._sends:
                channels.post_receive("gradient", stage + 1, stage, back, buffers)
                channels.send("activation", stage, stage + 1, tensors)
                channels.take(back)
            else:
                channels.post_receive("activation", stage, stage + 1, there, buffers)
                channels.take(there)
                channels.send("gradient", stage + 1, stage, tensors)
            self._synchronize()
        seconds = time.perf_counter() - began
        channels.wait_for_sends()
        return seconds / (2 * ECHOES)


def message_seconds(of_ranks: Sequence[dict[int, dict[str, float]]]) -> list[MessageSeconds]:
    """What the ranks' `found()` say together, by rising size: means over ranks, none below 0."""
    result = []
    for size in sorted(of_ranks[0]):
        mean = {}
        for part in ("send", "receive", "echo"):
            values = [rank[size][part] for rank in of_ranks if part in rank[size]]
            mean[part] = max(0.0, statistics.fmean(values)) if values else None
        send, receive, echo = mean["send"] or 0.0, mean["receive"] or 0.0, mean["echo"]
        result.append(MessageSeconds(size, send, receive, None if echo is None else max(0.0, echo - send - receive)))
    return result
