"""From what the ranks measured to what the planner asks for: seconds and bytes that one more layer adds to a stage.

A stage of one layer takes a call's overhead and its layer; one of several, one overhead and all its layers. So with
n layers in a row, whose kinds are measured alone, too, the overhead is (sum of them alone - the row) / (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mmtrain.calibration.message_costs import ECHO, RECEIVE, SEND
from mmtrain.plan.calibration import LayerMeasures, MessageSeconds
from mmtrain.plan.costs import LayerKind

WINDOW = "layers in a row"
ENCODE = "encode"
MATMUL = "matrix products"
ENCODE_HALF = "encode, half of the blocks"  # those before the others, rounded down, with the stem
ENCODE_STEM = "encode, no block"
ENCODE_LATER = "encode, a slice behind the first"

Seconds = Mapping[str, float]  # by stage and direction, as in "head forward"; of ENCODE; of messages
Bytes = Mapping[str, Mapping[str, int]]  # by stage: "kept" until its backward, working in "forward" and "backward"


def recomputing(name: str) -> str:
    """The stage that recomputes all its layers."""
    return f"{name}, recomputing"


def mean_of_ranks(of_ranks: Sequence[Seconds]) -> dict[str, float]:
    """Means over the ranks that have measured something, by its name."""
    names = dict.fromkeys(name for rank in of_ranks for name in rank)
    return {name: statistics.fmean(rank[name] for rank in of_ranks if name in rank) for name in names}


def solve_messages(seconds: Seconds, kind: str) -> MessageSeconds | None:
    """What a message of this kind takes from its sender and its receiver, and its way; None: nobody has measured it."""
    both = [max(0.0, seconds[f"{name} {kind}"]) for name in (SEND, RECEIVE) if f"{name} {kind}" in seconds]
    if len(both) < 2:
        return None
    echo = seconds.get(f"{ECHO} {kind}")
    return MessageSeconds(*both, transfer=None if echo is None else max(0.0, echo - sum(both)))


def solve_encoder(seconds: Seconds, blocks: int) -> float:
    """Seconds of one of the encoder's alike blocks: what the later half of them adds, at most its share of all."""
    if ENCODE_HALF not in seconds:
        return 0.0
    more = max(0.0, seconds[ENCODE] - seconds[ENCODE_HALF])
    return min(more / (blocks - blocks // 2), seconds[ENCODE] / blocks)


def solve_layers(
    seconds: Seconds, used: Bytes, kinds: Mapping[str, LayerKind], window: Sequence[str]
) -> tuple[dict[str, LayerMeasures], float]:
    """What each kind of layer adds, by name, and the seconds of a call beyond its layers. Nothing is below 0.

    `window` names the kinds of the layers in a row.
    """
    forward, forward_call = _seconds_of_layers(seconds, "forward", kinds, window)
    backward, backward_call = _seconds_of_layers(seconds, "backward", kinds, window)
    again = _second_forward(seconds, forward, window)
    input_bytes = _inner_input(used, WINDOW, window)
    recomputing_input_bytes = _inner_input(used, recomputing(WINDOW), [recomputing(name) for name in window])
    layers = {}
    for name, kind in kinds.items():
        own = used[ENCODE if name == "encoder" else name]
        recomputed = used.get(recomputing(name), own)
        runs_backward = kind.layer is not None and kind.runs_backward
        of_head = used["head"]["kept"] if kind.on_rows else 0
        layers[name] = LayerMeasures(
            forward_seconds=forward[name],
            backward_seconds=backward[name],
            recomputing_seconds=backward[name] + (again * forward[name] if runs_backward else 0.0),
            kept_bytes=max(0, own["kept"] + runs_backward * input_bytes - of_head),
            kept_bytes_recomputing=max(0, recomputed["kept"] + runs_backward * recomputing_input_bytes - of_head),
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
        else:
            found[name] = seconds[ENCODE] if direction == "forward" else 0.0
    return found, call


def _second_forward(seconds: Seconds, forward: Mapping[str, float], window: Sequence[str]) -> float:
    """What a layer that recomputes takes more than one that does not, over its forward; 1 where no layer can tell."""
    first = sum(forward[name] for name in window)
    if f"{recomputing(WINDOW)} backward" not in seconds or not first:
        return 1.0
    more = sum(seconds[f"{recomputing(WINDOW)} {way}"] - seconds[f"{WINDOW} {way}"] for way in ("forward", "backward"))
    return max(0.0, more) / first


def _inner_input(used: Bytes, row: str, alone: Sequence[str]) -> int:
    """Bytes that a layer behind another keeps more than one that begins a stage: its input, where that is kept.

    Less what every stage keeps besides its layers, such as the rotations of its tokens.
    """
    count = len(alone)
    if count == 1 or row not in used:
        return 0
    return (used[row]["kept"] - sum(used[name]["kept"] for name in alone)) // (count - 1)
