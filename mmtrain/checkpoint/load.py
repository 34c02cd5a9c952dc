"""Load a checkpoint's tensors into the ranks that train them, in whatever layout it was saved.

step folder --rank 0 reads--> each rank gets the weights that it trains, and their optimizer state
"""

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import find_init_from
from mmtrain.checkpoint.step_folder import StepFolder, split
from mmtrain.config.schema import RunConfig

Tensors = dict[str, Tensor]
Readers = dict[str, Callable[[], Tensor]]  # by name, functions that read a tensor


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List versions and topology that differ from the checkpoint's.

    With such differences results agree to rounding alone.
    """
    changed = []
    for part in ("versions", "topology"):
        for name, value in now[part].items():
            was = saved[part].get(name, value)
            if was != value:
                changed.append(f"{name} {was} -> {value}")
    return changed


def load(start: StepFolder, names: Collection[str]) -> tuple[Tensors, Tensors]:
    """Return this rank's trained `names`, and their optimizer state, on the CPU. Collective.

    Rank 0 alone reads: the folder need not be visible to other machines. Raises UserError on rank 0
    where the checkpoint holds other tensors than all ranks together train, or none that can be
    read.
    """
    wanted = all_gather_object(sorted(names))
    stored = {}
    if dist.get_rank() == 0:
        stored = _opened(start.tensors_file) | _opened(start.optimizer_file)
        trained = set().union(*wanted)
        # without a fingerprint of their beginning
        unnoted = trained - start.state["trained"].keys()
        weights, _ = split(stored)
        if odd := sorted((trained ^ weights.keys()) | unnoted):
            problem = "not in it" if odd[0] in trained else "not trained by this run"
            raise UserError(
                f"{start.path}: {odd[0]} is {problem} ({len(odd)} tensor(s) in all). "
                "It was saved by a run that trains other tensors"
            )
    return split(_distribute(stored, wanted))


def load_init_from(config: RunConfig, names: Collection[str]) -> Tensors:
    """Return this rank's trained `names` that `model.init_from` has, on the CPU. Collective.

    Rank 0 alone reads.
    """
    stored = {}
    if dist.get_rank() == 0 and (checkpoint := find_init_from(config)) is not None:
        stored = _opened(checkpoint.tensors_file)
    return _distribute(stored, all_gather_object(sorted(names)))


def _distribute(stored: Readers, wanted: list[list[str]]) -> Tensors:
    """Return this rank's wanted weights and their optimizer state, from rank 0's `stored`."""
    tensors = {}
    rank = dist.get_rank()
    if rank > 0:
        if wanted[rank]:
            shapes = [None]
            dist.recv_object_list(shapes, 0)
            for name, shape in shapes[0].items():
                tensors[name] = torch.empty(shape, dtype=torch.float32)
                dist.recv(tensors[name], 0)
        return tensors

    for other, names in enumerate(map(set, wanted)):
        found = [name for name in stored if name.partition("/")[0] in names]
        if other == 0:
            tensors = {name: stored[name]() for name in found}
        elif names:
            dist.send_object_list([{name: stored[name]().shape for name in found}], other)
            for name in found:
                dist.send(stored[name](), other)
    return tensors


def _opened(file: Path) -> Readers:
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: cannot be read as safetensors ({error})") from error
    return {name: functools.partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118, no mapping
