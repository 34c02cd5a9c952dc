"""From what the ranks measured to what the planner asks for: seconds and bytes that one more layer adds to a stage.

Found of every rank --solve--> Calibration

A stage of one layer takes a call's overhead and its layer; one of several, one overhead and all its layers. So with
n layers in a row, whose kinds are measured alone, too, the overhead is (sum of them alone - the row) / (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmtrain.calibration.message_costs import MessageSeconds, message_seconds
from mmtrain.plan.calibration import Calibration, Key, LayerMeasures, Linear
from mmtrain.plan.costs import LayerKind

WINDOW = "layers in a row"
ENCODE, LOAD, MATMUL, REDUCE, UPDATE = "encode", "load", "matrix products", "reduce", "update"

Usage = Mapping[str, Mapping[str, int]]  # bytes by piece: "kept", working in "forward" and in "backward"


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank measured: medians of seconds by piece and direction, bytes by piece, messages by bytes."""

    seconds: Mapping[str, float]
    usage: Usage
    messages: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Scales:
    """What the ranks measured on less, or more, than the run has."""

    images: float  # expected images of a micro-batch, over those in the measured one
    trained: float  # most elements that train on one rank of the run, over those of the measured update
    matmul_flops: float  # of one measured run of matrix products
    replicas: int  # over which gradients were reduced


def recomputing(name: str) -> str:
    """The piece that recomputes all its layers."""
    return f"{name}, recomputing"


def solve(
    of_ranks: Sequence[Found], kinds: Mapping[str, LayerKind], window: Sequence[str], scales: Scales, key: Key
) -> Calibration:
    """`kinds` by name; `window` names the kinds of the layers in a row. Nothing is below 0."""
    seconds = {
        name: statistics.fmean(rank.seconds[name] for rank in of_ranks if name in rank.seconds)
        for name in of_ranks[0].seconds
    }
    forward, forward_call = _of_layers(seconds, "forward", kinds, window)
    backward, backward_call = _of_layers(seconds, "backward", kinds, window)
    again = _second_forward(seconds, forward, window)
    usage = of_ranks[0].usage
    inner = (
        _inner_input(usage, WINDOW, window),
        _inner_input(usage, recomputing(WINDOW), [recomputing(name) for name in window]),
    )
    encoder = usage[ENCODE]
    layers = {"encoder": _measures([seconds[ENCODE] * scales.images, 0.0, 0.0], encoder, encoder, (0, 0))}
    for name, kind in kinds.items():
        if name == "encoder":
            continue
        row = kind.layer is not None
        extra = again * forward[name] if row and kind.runs_backward else 0.0
        correction = inner if row and kind.runs_backward else (0, 0)
        if kind.on_rows:
            correction = tuple(more - usage["head"]["kept"] for more in correction)
        layers[name] = _measures(
            [forward[name], backward[name], backward[name] + extra],
            usage[name],
            usage.get(recomputing(name), usage[name]),
            correction,
        )
    send, receive, transfer = _lines(message_seconds([rank.messages for rank in of_ranks]))
    calls = [forward_call, backward_call] if any(kind.runs_backward for kind in kinds.values()) else [forward_call]
    return Calibration(
        key=key,
        layers=layers,
        compute_seconds=statistics.fmean(calls),
        encode_seconds=seconds[LOAD],
        send=send,
        receive=receive,
        transfer=transfer,
        end_seconds=seconds[REDUCE] + seconds[UPDATE] * scales.trained,
        replicas=scales.replicas,
        matmul_flops_per_second=scales.matmul_flops / seconds[MATMUL],
    )


def _of_layers(
    seconds: Mapping[str, float], direction: str, kinds: Mapping[str, LayerKind], window: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Seconds that each kind of layer adds in one direction, and those of a call beyond its layers."""

    def of(piece: str) -> float:
        return seconds.get(f"{piece} {direction}", 0.0)

    alone, count = [of(name) for name in window], len(window)
    call = max(0.0, (sum(alone) - of(WINDOW)) / (count - 1)) if count > 1 else 0.0
    # In a row that takes longer than its layers alone, each takes its share of what is more.
    more = (of(WINDOW) - call - sum(one - call for one in alone)) / count
    found = {}
    for name, kind in kinds.items():
        if kind.on_rows:
            found[name] = max(0.0, of(name) - of("head"))
        elif kind.layer is not None:
            found[name] = max(0.0, of(name) - call + more) if of(name) else 0.0
        elif name == "head":
            found[name] = max(0.0, of(name) - call)
        elif name == "front":
            found[name] = of(name)  # without a decoder layer behind it, nothing of the LLM's own code is called
    return found, call


def _second_forward(seconds: Mapping[str, float], forward: Mapping[str, float], window: Sequence[str]) -> float:
    """What a layer that recomputes takes more than one that does not, over its forward; 1 where no layer can tell."""
    first = sum(forward[name] for name in window)
    if f"{recomputing(WINDOW)} backward" not in seconds or not first:
        return 1.0
    more = sum(seconds[f"{recomputing(WINDOW)} {way}"] - seconds[f"{WINDOW} {way}"] for way in ("forward", "backward"))
    return max(0.0, more) / first


def _inner_input(usage: Usage, row: str, alone: Sequence[str]) -> int:
    """Bytes that a layer behind another keeps more than one that begins a stage: its input, where that is kept.

    Less what every stage keeps besides its layers, such as the rotations of its tokens.
    """
    count = len(alone)
    if count == 1 or row not in usage:
        return 0
    return (usage[row]["kept"] - sum(usage[name]["kept"] for name in alone)) // (count - 1)


def _measures(
    seconds: Sequence[float], own: Mapping[str, int], recomputed: Mapping[str, int], correction: tuple[int, int]
) -> LayerMeasures:
    """`correction` is added to the bytes kept, without recomputation and with it."""
    return LayerMeasures(
        *seconds,
        kept_bytes=max(0, own["kept"] + correction[0]),
        kept_bytes_recomputing=max(0, recomputed["kept"] + correction[1]),
        forward_working_bytes=max(own["forward"], recomputed["forward"]),
        backward_working_bytes=own["backward"],
        recomputing_working_bytes=recomputed["backward"],
    )


def _lines(messages: Sequence[MessageSeconds]) -> tuple[Linear | None, Linear | None, Linear | None]:
    """Seconds of sender, receiver and transfer as lines through the smallest and the largest message; None: unknown."""
    if not messages:
        return None, None, None
    small, large = messages[0], messages[-1]

    def line(part: str) -> Linear | None:
        low, high = getattr(small, part), getattr(large, part)
        if low is None or high is None:
            return None
        if large.size == small.size:
            return Linear(high, 0.0)
        slope = max(0.0, (high - low) / (large.size - small.size))
        return Linear(max(0.0, high - slope * large.size), slope)  # exact at the run's own size

    return line("send"), line("receive"), line("transfer")
