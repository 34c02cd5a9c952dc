"""Bytes that live at once on a GPU while stages run, by the figures of torch's allocator.

Not counted is what libraries allocate past torch, such as cuBLAS. On a CPU nothing is measured,
since its allocator keeps no figures: plans estimate what tensors take there.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from mmtrain.engine.single_stage import SingleStage

ENCODE = "encoder"
# by stage: "kept" until its backward, working in "forward" and "backward"
Bytes = dict[str, dict[str, int]]


class Usage(NamedTuple):
    """Bytes alive during some work and at its end, beyond those at its begin.

    They are below 0 if work releases bytes from before.
    """

    peak: int
    end: int


def bytes_used(work: Callable[[], object], device: torch.device) -> Usage:
    """Do this work on a GPU and count; its result is alive at its end, and is let go then."""
    torch.cuda.synchronize(device)
    begin = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _result = work()  # alive until this function ends
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return Usage(peak - begin, torch.cuda.memory_allocated(device) - begin)


def recomputing(name: str) -> str:
    """Return the name of a stage whose layers recompute their activations."""
    return f"{name}, recomputing"


def bytes_of_stages(stages: Mapping[str, SingleStage], device: torch.device) -> Bytes:
    sizes = _bytes_of_front(stages["front"], device)
    for name, stage in stages.items():
        if name == "front":
            continue
        _make_gradients(stage)
        sizes[name] = _by_act(stage.forward, stage.release_output, stage.backward, device)
        if name != "head" and stage.runs_backward:
            _make_gradients(stage, recomputes=True)
            again = _by_act(stage.forward, stage.release_output, stage.backward, device)
            sizes[recomputing(name)] = again
    return sizes


def bytes_of_slices(
    front: SingleStage,
    blocks: int,
    device: torch.device,
) -> dict[str, int]:
    """Return bytes that slices of the encoder work in: the first without a block, and one behind
    it.
    """
    tiles = front.batch.tiles
    grids = front.batch.grids
    vision = front.module.vision
    stem = vision.slice_of(0, 0)
    later = vision.slice_of(max(0, blocks - 2), blocks)
    hidden = torch.zeros(len(tiles), *later.hidden_shape, dtype=later.dtype, device=device)
    of_stem = functools.partial(stem.in_groups, tiles, front.module.normalised, grids)
    of_later = functools.partial(later.in_groups, hidden, grids=grids)
    return {
        "encode_stem_bytes": bytes_used(of_stem, device).peak,
        "encode_later_bytes": bytes_used(of_later, device).peak,
    }


def _bytes_of_front(stage: SingleStage, device: torch.device) -> Bytes:
    """Return bytes of the encoder, which works in what it makes, and of the front, which may keep
    features.
    """

    def release() -> None:
        stage.release_output()
        stage.features = None

    _make_gradients(stage)
    features = 0
    if stage.features is not None:
        features = stage.features.untyped_storage().nbytes()
    stage.features = None
    encoded = bytes_used(stage.encode, device)
    encoder = {"kept": encoded.end - features, "forward": encoded.peak, "backward": 0}

    stage.features = stage.encode()
    front = _by_act(stage.forward, release, stage.backward, device)
    front["kept"] += features
    stage.features = stage.encode()
    return {"front": front, ENCODE: encoder}


def _make_gradients(stage: SingleStage, *, recomputes: bool = False) -> None:
    """Run a stage once, so that its gradients are there, and prepare the next time."""
    stage.prepare(recomputes=recomputes)
    stage.forward()
    stage.backward()
    stage.prepare(recomputes=recomputes)


def _by_act(
    forward: Callable[[], object],
    send: Callable[[], object],
    backward: Callable[[], object],
    device: torch.device,
) -> dict[str, int]:
    made = bytes_used(forward, device)
    sent = bytes_used(send, device)
    return {
        "kept": made.end + sent.end,
        "forward": made.peak - made.end,
        "backward": bytes_used(backward, device).peak,
    }
