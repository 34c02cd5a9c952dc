"""Saves what was trained: `checkpoints/step-00000120/projector.safetensors`, every trainable tensor by global name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file


def save_trained(folder: Path, step: int, trainable: Mapping[str, torch.Tensor]) -> Path:
    """Gather the trainable tensors of all ranks on rank 0, which writes them; a collective of every rank.

    Replicas hold equal tensors, of which one is kept. The step's folder appears under its name only when complete.
    Raises FileExistsError rather than writing into an existing one.
    """
    mine = {name: tensor.detach().cpu() for name, tensor in trainable.items()}
    gathered: list[dict[str, torch.Tensor] | None] | None = None
    if dist.get_rank() == 0:
        gathered = [None] * dist.get_world_size()
    dist.gather_object(mine, gathered)
    target = folder / "checkpoints" / f"step-{step:08d}"
    if gathered is not None:
        if target.exists():
            raise FileExistsError(f"{target} exists; a checkpoint is never written into an existing folder")
        unfinished = target.with_name(target.name + ".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tensors = {name: tensor.contiguous() for part in gathered if part for name, tensor in part.items()}
        save_file(tensors, unfinished / "projector.safetensors")
        unfinished.rename(target)
    return target
