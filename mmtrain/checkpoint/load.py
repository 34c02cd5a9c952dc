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

from mmtrain.base.collectives import of_all_ranks
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.load import with_new_names


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Versions and topology that are not those of the checkpoint: results agree to rounding then, not bit for bit.

    What a checkpoint of an earlier version does not say counts as the same.
    """
    topology = with_new_names({"parallel": saved["topology"]})["parallel"]
    return [
        f"{name} {was[name]} -> {value}"
        for was, is_now in ((saved["versions"], now["versions"]), (topology, now["topology"]))
        for name, value in is_now.items()
        if was.get(name, value) != value
    ]


def load(start: StepFolder, names: Collection[str]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of this rank's trained `names`, and their optimizer state, on the CPU; a collective of every rank.

    Rank 0 alone reads: the folder need not be visible to other machines. Raises UserError on rank 0
    where the checkpoint holds other tensors than all ranks together train, or none that can be read.
    """
    rank = dist.get_rank()
    wanted = of_all_ranks(sorted(names))
    if rank == 0:
        stored = {**_opened(start.tensors_file), **_opened(start.optimizer_file)}
        trained = {name for one in wanted for name in one}
        unnoted = trained - start.state["trained"].keys()  # of which the state does not say how they began
        if odd := sorted((trained ^ {name for name in stored if "/" not in name}) | unnoted):
            raise UserError(
                f"{start.path}: {odd[0]} is {'not in it' if odd[0] in trained else 'not trained by this run'} "
                f"({len(odd)} such tensor(s)): it was saved by a run that trains something else"
            )
        for other, theirs in enumerate(wanted[1:], start=1):
            shapes = {name: read().shape for name, read in _of(theirs, stored).items()}
            if theirs:
                dist.send_object_list([shapes], other)
                for name in shapes:
                    dist.send(stored[name](), other)
        mine = {name: read() for name, read in _of(wanted[0], stored).items()}
    elif names:
        received: list[Any] = [None]
        dist.recv_object_list(received, 0)
        mine = {name: torch.empty(shape, dtype=torch.float32) for name, shape in received[0].items()}
        for tensor in mine.values():
            dist.recv(tensor, 0)
    else:
        mine = {}
    weights = {name: tensor for name, tensor in mine.items() if "/" not in name}
    return weights, {name: tensor for name, tensor in mine.items() if "/" in name}


def _of(names: list[str], stored: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, Callable[[], torch.Tensor]]:
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
