"""From what the ranks measured to what the planner asks for: seconds and bytes that one more layer adds to a stage.

A stage of one layer takes a call's overhead and its layer; one of several, one overhead and all its layers. So with
n layers in a row, whose kinds are measured alone, too, the overhead is (sum of them alone - the row) / (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mmtrain.calibration.transfers import ECHO, RECEIVE, SEND
from mmtrain.plan.calibration import LayerMeasures, MessageSeconds
from mmtrain.plan.costs import LayerKind

WINDOW = "layers in a row"
ENCODE = "encode"

Seconds = Mapping[str, float]  # by stage and direction, as in "head forward"; of ENCODE; of messages
Bytes = Mapping[str, Mapping[str, int]]  # by stage: "kept" until its backward, working in "forward" and "backward"


def recomputing(name: str) -> str:
    """Return the name of the stage that recomputes all its layers."""
    return f"{name}, recomputing"


def mean_of_ranks(of_ranks: Sequence[Seconds]) -> dict[str, float]:
    """Return means over the ranks that have measured something, by its name."""
    names = dict.fromkeys(name for rank in of_ranks for name in rank)
    return {name: statistics.fmean(rank[name] for rank in of_ranks if name in rank) for name in names}


def solve_messages(seconds: Seconds, kind: str) -> MessageSeconds | None:
    """Return what a message of this kind takes from sender and receiver, and its transfer; None if not measured."""
    both = [max(0.0, seconds[f"{name} {kind}"]) for name in (SEND, RECEIVE) if f"{name} {kind}" in seconds]
    if len(both) < 2:
        return None
    echo = seconds.get(f"{ECHO} {kind}")
    return MessageSeconds(*both, transfer=None if echo is None else max(0.0, echo - sum(both)))


def solve_layers(
    seconds: Seconds, sizes: Bytes, kinds: Mapping[str, LayerKind], window: Sequence[str]
) -> tuple[dict[str, LayerMeasures], float]:
    """Return what each kind of layer adds, by name, and the seconds of a call beyond its layers. Nothing is below 0.

    `window` names the kinds of the layers in a row.
    """
    forward, forward_call = _seconds_of_layers(seconds, "forward", kinds, window)
    backward, backward_call = _seconds_of_layers(seconds, "backward", kinds, window)
    second_forward = _second_forward(seconds, forward, window)
    input_bytes = _inner_input(sizes, WINDOW, window)
    recomputing_input_bytes = _inner_input(sizes, recomputing(WINDOW), [recomputing(name) for name in window])
    layers = {}
    for name, kind in kinds.items():
        own = sizes[ENCODE if name == "encoder" else name]
        recomputed = sizes.get(recomputing(name), own)
        kept, kept_recomputing, recomputing_seconds = own["kept"], recomputed["kept"], backward[name]
        if kind.layer is not None and kind.runs_backward:
            kept += input_bytes
            kept_recomputing += recomputing_input_bytes
            recomputing_seconds += second_forward * forward[name]
        of_head = sizes["head"]["kept"] if kind.on_rows else 0
        layers[name] = LayerMeasures(
            forward_seconds=forward[name],
            backward_seconds=backward[name],
            recomputing_seconds=recomputing_seconds,
            kept_bytes=max(0, kept - of_head),
            kept_bytes_recomputing=max(0, kept_recomputing - of_head),
            forward_working_bytes=own["forward"],
            backward_working_bytes=own["backward"],
            recomputing_working_bytes=recomputed["backward"],
        )
    calls = [forward_call, backward_call] if any(kind.runs_backward for kind in kinds.values()) else [forward_call]
    return layers, statistics.fmean(calls)


def _seconds_of_layers(
    seconds: Seconds, direction: str, kinds: Mapping[str, LayerKind], window: Sequence[str]
) -> tuple[dict[str, float], float]:
    """Seconds that each kind of layer adds in one direction, and those of a call beyond its layers."""

    def of(stage: str) -> float:
        return seconds.get(f"{stage} {direction}", 0.0)

    row, alone, count = of(WINDOW), sum(map(of, window)), len(window)
    call = max(0.0, alone - row) / (count - 1) if count > 1 else 0.0
    more = max(0.0, row - alone) / count  # of each layer, where the row takes longer than its layers alone
    layers = {}
    for name, kind in kinds.items():
        if name == "encoder":
            layers[name] = seconds[ENCODE] if direction == "forward" else 0.0
        elif name == "front":
            layers[name] = of(name)  # without a decoder layer behind it, nothing of the LLM's own code is called
        elif kind.on_rows:
            layers[name] = max(0.0, of(name) - of("head"))
        elif name == "head":
            layers[name] = max(0.0, of(name) - call)
        else:
            layers[name] = max(0.0, of(name) - call + more) if of(name) else 0.0
    return layers, call


def _second_forward(seconds: Seconds, forward: Mapping[str, float], window: Sequence[str]) -> float:
    """Time that recomputing a layer adds, as a multiple of its forward; 1 where nothing recomputes."""
    first = sum(forward[name] for name in window)
    if f"{recomputing(WINDOW)} backward" not in seconds or not first:
        return 1.0
    more = sum(seconds[f"{recomputing(WINDOW)} {way}"] - seconds[f"{WINDOW} {way}"] for way in ("forward", "backward"))
    return max(0.0, more) / first


def _inner_input(sizes: Bytes, row: str, alone: Sequence[str]) -> int:
    """Bytes that a layer behind another keeps more than one that begins a stage: its input, where that is kept.

    Less what every stage keeps besides its layers, such as the rotations of its tokens.
    """
    count = len(alone)
    if count == 1 or row not in sizes:
        return 0
    return (sizes[row]["kept"] - sum(sizes[name]["kept"] for name in alone)) // (count - 1)
