"""What it takes to stream decoder layers (plan/fetching.py): bytes that leave the device, and seconds of waiting.

A rank's streamed layers are spread evenly over those that may be, so that each fetch has the same work to hide behind.
A fetch begins when the layer before it does, and takes longer than that and the resident layers behind by `each`
seconds, or not at all: what a FORWARD or BACKWARD waits is so much for each of its fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mmtrain.plan.costs import LayerCost
from mmtrain.plan.fetching import ALIGNMENT, WHOLE_AT_ONCE

BOTH_ENDS = 2
"""Fetches that are spared where a rank goes forward and backward in turn: each begins with what is still whole."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """What of a run's frozen weights may be streamed, and from where."""

    layers: Literal["auto"] | tuple[int, ...] = ()  # per pipeline rank; empty: none
    source: Literal["host", "peers", "nf4", "int8"] = "host"  # the latter two: in fewer bits, on the device
    shards: int = 1  # ranks that keep a part each
    host_bytes: int | None = None  # that a rank may keep in its machine's memory; None: no limit

    @property
    def is_possible(self) -> bool:
        """Whether any layer may be streamed at all."""
        return self.layers == "auto" or any(self.layers)

    def buffer_bytes(self, layer: LayerCost) -> int:
        """Bytes of a streamed layer while it is whole."""
        step = ALIGNMENT * self.shards
        return -(-layer.streamed_bytes // step) * step

    def kept_on_device(self, layer: LayerCost) -> int:
        """Bytes that stay on the device of a streamed layer."""
        if self.source in ("nf4", "int8"):
            return layer.quantised_bytes
        return self.buffer_bytes(layer) // self.shards if self.source == "peers" else 0

    def fetched_bytes(self, layer: LayerCost) -> int:
        """Bytes that come to the device with each fetch, or are made there of fewer."""
        return self.buffer_bytes(layer) - (self.kept_on_device(layer) if self.source == "peers" else 0)


class Waits(NamedTuple):
    """What a FORWARD or BACKWARD waits for fetches, for one micro-batch."""

    fetches: int  # of an instruction that begins and ends with nothing that its neighbours use
    each: float  # seconds by which a fetch takes longer than what it hides behind
    share: float = 0.0  # seconds of all fetches over those of the decoder layers that they hide behind

    def seconds(self, spared: int = BOTH_ENDS) -> float:
        """Of all fetches but those that are spared."""
        return max(0, self.fetches - spared) * self.each


NO_WAITS = Waits(0, 0.0)


class Held(NamedTuple):
    """What the streamed layers of a rank take."""

    saved_bytes: int  # of the device's memory, less what is kept there and the buffers
    host_bytes: int


def held(streaming: Streaming, streamed: Sequence[LayerCost]) -> Held:
    """Of these streamed layers of one rank."""
    buffers = sorted((streaming.buffer_bytes(layer) for layer in streamed), reverse=True)
    kept = sum(streaming.kept_on_device(layer) for layer in streamed) + sum(buffers[:1]) * min(
        len(buffers), WHOLE_AT_ONCE
    )
    saved = sum(layer.streamed_weight_bytes for layer in streamed) - kept
    return Held(saved, sum(buffers) if streaming.source == "host" else 0)


def waits(fetches: int, fetch_seconds: float, compute_seconds: float) -> Waits:
    """Of so many streamed layers of a stage, each fetched in `fetch_seconds`, whose decoder layers compute so long."""
    if not fetches:
        return NO_WAITS
    share = fetches * fetch_seconds / compute_seconds if compute_seconds else 0.0
    return Waits(fetches, max(0.0, fetch_seconds - compute_seconds / fetches), share)


def spread(count: int, of: int) -> list[int]:
    """Which `count` of so many places lie evenly among them, with as much before the first as behind the last."""
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]
