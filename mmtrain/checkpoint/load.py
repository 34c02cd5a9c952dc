"""Load a checkpoint's tensors into the ranks that train them, in whatever layout it was saved.

step folder --rank 0 reads--> each rank gets the weights that it trains, and their optimizer state
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import find_init_from
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List versions and topology that differ from the checkpoint's: results then agree to rounding
    alone.
    """
    return [
        f"{name} {was[name]} -> {value}"
        for was, is_now in (
            (saved["versions"], now["versions"]),
            (saved["topology"], now["topology"]),
        )
        for name, value in is_now.items()
        if was.get(name, value) != value
    ]


def load(
    start: StepFolder, names: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return this rank's trained `names`, and their optimizer state, on the CPU. Collective.

    Rank 0 alone reads: the folder need not be visible to other machines. Raises UserError on rank 0
    where the checkpoint holds other tensors than all ranks together train, or none that can be
    read.
    """
    wanted = all_gather_object(sorted(names))
    stored = {}
    if dist.get_rank() == 0:
        stored = {**_opened(start.tensors_file), **_opened(start.optimizer_file)}
        trained = {name for of_rank in wanted for name in of_rank}
        # without a fingerprint of their beginning
        unnoted = trained - start.state["trained"].keys()
        if odd := sorted((trained ^ {name for name in stored if "/" not in name}) | unnoted):
            raise UserError(
                f"{start.path}: {odd[0]} is "
                f"{'not in it' if odd[0] in trained else 'not trained by this run'} "
                f"({len(odd)} tensor(s) in all). It was saved by a run that trains other tensors"
            )
    tensors = _distribute(stored, wanted)
    weights = {name: tensor for name, tensor in tensors.items() if "/" not in name}
    return weights, {name: tensor for name, tensor in tensors.items() if "/" in name}


def load_init_from(config: RunConfig, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return those of this rank's trained `names` that the checkpoint `model.init_from` has, on the
    CPU. Collective.

    Rank 0 alone reads.
    """
    checkpoint = find_init_from(config) if dist.get_rank() == 0 else None
    wanted = all_gather_object(sorted(names))
    return _distribute({} if checkpoint is None else _opened(checkpoint.tensors_file), wanted)


def _distribute(
    stored: Mapping[str, Callable[[], torch.Tensor]], wanted: list[list[str]]
) -> dict[str, torch.Tensor]:
    """Return the tensors in rank 0's `stored` of the weights that this rank wants, with their
    optimizer state.
    """
    rank = dist.get_rank()
    if rank > 0 and not wanted[rank]:
        return {}
    if rank > 0:
        received: list[Any] = [None]
        dist.recv_object_list(received, 0)
        tensors = {
            name: torch.empty(shape, dtype=torch.float32) for name, shape in received[0].items()
        }
        for tensor in tensors.values():
            dist.recv(tensor, 0)
        return tensors
    own: dict[str, torch.Tensor] = {}
    for other, names in enumerate(map(set, wanted)):
        found = [name for name in stored if name.partition("/")[0] in names]
        if other == 0:
            own = {name: stored[name]() for name in found}
        elif names:
            dist.send_object_list([{name: stored[name]().shape for name in found}], other)
            for name in found:
                dist.send(stored[name](), other)
    return own


def _opened(file: Path) -> dict[str, Callable[[], torch.Tensor]]:
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from error
    return {name: functools.partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118, no mapping
