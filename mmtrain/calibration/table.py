"""A calibration as text for a terminal: what was measured, and how far its rounds spread."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mmtrain.base.printing import bytes_text, table_lines
from mmtrain.calibration.message_costs import FEATURES, MESSAGE
from mmtrain.calibration.solution import ENCODE_HALF, MATMUL
from mmtrain.plan.calibration import Calibration, MessageSeconds


def table(found: Calibration, seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """What one more layer adds to a stage, and what else was measured; then each measurement's spread on a rank."""
    layers = []
    for name, layer in found.layers.items():
        times = layer.forward_seconds, layer.backward_seconds, layer.recomputing_seconds
        working = max(layer.forward_working_bytes, layer.backward_working_bytes)
        sizes = map(bytes_text, (layer.kept_bytes, layer.kept_bytes_recomputing, working))
        layers.append((name, *(f"{time * 1e3:,.3f}" for time in times), *sizes))
    times = (">forward\nms", ">backward\nms", ">recomputing\nms")
    columns = ("one more", *times, ">kept", ">kept\nrecomputing", ">working")
    messages = [_said_of_messages(name, cost) for name, cost in ((MESSAGE, found.messages), (FEATURES, found.features))]
    numbers = (statistics.median, min, max)
    spreads = [(name, *(f"{1e3 * of(values):,.3f}" for of in numbers)) for name, values in seconds.items()]
    return [
        *table_lines(columns, layers),
        f"call {found.compute_seconds * 1e3:,.3f} ms; step's end {found.end_seconds * 1e3:,.3f} ms; matrix products "
        f"{found.matmul_flops_per_second / 1e12:,.3f} TFLOP/s a rank",
        *([f"encoder: each block {found.encode_block_seconds * 1e3:,.3f} ms"] if ENCODE_HALF in seconds else []),
        *messages,
        *(
            f"weights from {source}: {rates.alone / 1e9:,.2f} GB/s alone, {rates.beside / 1e9:,.2f} beside computing"
            for source, rates in found.fetches.items()
        ),
        f"rank 0, {len(seconds[MATMUL])} rounds, in ms:",
        *table_lines(("", ">median", ">least", ">largest"), spreads),
    ]


def _said_of_messages(kind: str, cost: MessageSeconds | None) -> str:
    if cost is None:
        return f"{kind} was not measured: plans assume it"
    way = "assumed" if cost.transfer is None else f"{cost.transfer * 1e3:,.3f} ms"
    return f"{kind}: send {cost.send * 1e3:,.3f} ms, receive {cost.receive * 1e3:,.3f} ms, transfer {way}"
