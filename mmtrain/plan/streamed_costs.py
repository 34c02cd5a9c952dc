"""What it takes to stream decoder layers (plan/fetching.py): bytes that leave the device, and seconds of waiting.

A rank's streamed layers are spread evenly over those that may be, so that each fetch has the same work to hide behind.
The next layer's fetch begins when a layer begins to compute. If it takes longer than this layer and the resident ones
up to the next, the difference (`each`) is waited for, once a fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mmtrain.plan.costs import LayerCost
from mmtrain.plan.fetching import ALIGNMENT, WHOLE_AT_ONCE
from mmtrain.pretrained.quantised import BITS, Quantisation

BOTH_ENDS = 2
"""Fetches saved by a FORWARD or BACKWARD whose neighbours on its rank run its stage the other way: one at each end."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """What of a run's frozen weights may be streamed, and from where."""

    layers: Literal["auto"] | tuple[int, ...] = ()  # per pipeline rank; empty: none
    source: Literal["host", "peers"] | Quantisation = "host"  # the latter: in fewer bits, on the device
    weight_shards: int = 1  # ranks that keep a part each
    host_bytes: int | None = None  # that a rank may keep in its machine's memory; None: no limit

    @property
    def is_possible(self) -> bool:
        """Whether any layer may be streamed at all."""
        return self.layers == "auto" or any(self.layers)

    def buffer_bytes(self, layer: LayerCost) -> int:
        """Bytes of a streamed layer while it is whole."""
        step = ALIGNMENT * self.weight_shards
        return -(-layer.streamed_bytes // step) * step

    def kept_on_device(self, layer: LayerCost) -> int:
        """Bytes that stay on the device of a streamed layer."""
        if self.source in BITS:
            return layer.quantised_bytes
        return self.buffer_bytes(layer) // self.weight_shards if self.source == "peers" else 0

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


def waits_of(fetches: int, fetch_seconds: float, compute_seconds: float) -> Waits:
    """Of so many streamed layers of a stage, each fetched in `fetch_seconds`, whose decoder layers compute so long."""
    if not fetches:
        return NO_WAITS
    share = fetches * fetch_seconds / compute_seconds if compute_seconds else 0.0
    return Waits(fetches, max(0.0, fetch_seconds - compute_seconds / fetches), share)


def spread(count: int, of: int) -> list[int]:
    """Which `count` of so many places lie evenly among them, with as much before the first as behind the last."""
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]


class Streamable:
    """Which layers of a rank may be streamed, which of them so many are, and what they take."""

    def __init__(self, streaming: Streaming, stages: Sequence[Sequence[LayerCost]]) -> None:
        """`stages`: the layers of each stage of the rank."""
        self._streaming, self._stages = streaming, stages
        self._may = [
            (stage, place)
            for stage, layers in enumerate(stages)
            for place, layer in enumerate(layers)
            if layer.streamed_bytes and streaming.is_possible
        ]
        self.most = len(self._may)
        """How many at most, with the memory that the rank may have of its machine."""
        limit = streaming.host_bytes
        while limit is not None and self.most and self.held(self.most).host_bytes > limit:
            self.most -= 1

    def _chosen(self, count: int) -> list[tuple[int, int]]:
        may = self._may
        return [may[i] for i in spread(min(count, len(may)), len(may))] if may and count else []

    def places(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Of each stage, the layers that are streamed if `count` are, as places behind its begin."""
        chosen = self._chosen(count)
        return tuple(tuple(place for stage, place in chosen if stage == number) for number in range(len(self._stages)))

    def held(self, count: int) -> Held:
        """What `count` streamed layers save and take."""
        streaming, layers = self._streaming, [self._stages[stage][place] for stage, place in self._chosen(count)]
        buffers = [streaming.buffer_bytes(layer) for layer in layers]
        # Twice the largest, where all are alike, and where memory that was a smaller one's does not fit a larger one.
        whole = max(buffers, default=0) * min(len(buffers), WHOLE_AT_ONCE)
        saved = sum(layer.streamed_weight_bytes for layer in layers) - whole
        kept = sum(map(streaming.kept_on_device, layers))
        return Held(saved - kept, sum(buffers) if streaming.source == "host" else 0)
