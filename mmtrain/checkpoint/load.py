"""Brings back what a checkpoint holds, and says whether it comes back into the same world.

step folder --rank 0 reads--> each rank gets the tensors that it trains, whatever the layout was that saved them
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
from mmtrain.checkpoint.begin import find_beginning
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return versions and topology that are not those of the checkpoint: results then agree to rounding alone."""
    return [
        f"{name} {was[name]} -> {value}"
        for was, is_now in ((saved["versions"], now["versions"]), (saved["topology"], now["topology"]))
        for name, value in is_now.items()
        if was.get(name, value) != value
    ]


def load(start: StepFolder, names: Collection[str]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of this rank's trained `names`, and their optimizer state, on the CPU; a collective of every rank.

    Rank 0 alone reads: the folder need not be visible to other machines. Raises UserError on rank 0
    where the checkpoint holds other tensors than all ranks together train, or none that can be read.
    """
    wanted = all_gather_object(sorted(names))
    stored = {}
    if dist.get_rank() == 0:
        stored = {**_opened(start.tensors_file), **_opened(start.optimizer_file)}
        trained = {name for one in wanted for name in one}
        unnoted = trained - start.state["trained"].keys()  # of which the state does not say how they began
        if odd := sorted((trained ^ {name for name in stored if "/" not in name}) | unnoted):
            raise UserError(
                f"{start.path}: {odd[0]} is {'not in it' if odd[0] in trained else 'not trained by this run'} "
                f"({len(odd)} such tensor(s)): it was saved by a run that trains something else"
            )
    mine = _shared(stored, wanted)
    weights = {name: tensor for name, tensor in mine.items() if "/" not in name}
    return weights, {name: tensor for name, tensor in mine.items() if "/" in name}


def load_init_from(config: RunConfig, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return those of this rank's trained `names` that the checkpoint `model.init_from` has, on the CPU. Collective.

    Rank 0 alone reads.
    """
    beginning = find_beginning(config) if dist.get_rank() == 0 else None
    wanted = all_gather_object(sorted(names))
    return _shared({} if beginning is None else _opened(beginning.tensors_file), wanted)


def _shared(stored: Mapping[str, Callable[[], torch.Tensor]], wanted: list[list[str]]) -> dict[str, torch.Tensor]:
    """What rank 0 has of the names that this rank wants, with their optimizer state."""
    rank = dist.get_rank()
    if rank > 0 and not wanted[rank]:
        return {}
    if rank > 0:
        received: list[Any] = [None]
        dist.recv_object_list(received, 0)
        mine = {name: torch.empty(shape, dtype=torch.float32) for name, shape in received[0].items()}
        for tensor in mine.values():
            dist.recv(tensor, 0)
        return mine
    for other, theirs in enumerate(wanted[1:], start=1):
        shapes = {name: read().shape for name, read in _of(theirs, stored).items()}
        if theirs:
            dist.send_object_list([shapes], other)
            for name in shapes:
                dist.send(stored[name](), other)
    return {name: read() for name, read in _of(wanted[0], stored).items()}


def _of(
    names: Collection[str], stored: Mapping[str, Callable[[], torch.Tensor]]
) -> dict[str, Callable[[], torch.Tensor]]:
    """What is stored of these weights, their optimizer state included."""
    wanted = set(names)
    return {name: read for name, read in stored.items() if name.rpartition("/")[0] in wanted or name in wanted}


def _opened(file: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that read a file's tensors, by name."""
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from error
    return {name: functools.partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118, no mapping
