"""Saves what was trained: `checkpoints/step-00000120/projector.safetensors`, fp32 tensors by global name."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file


def save_trained(
    folder: Path, step: int, trainable: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> Path:
    """Collect the trainable tensors of all ranks on rank 0, which writes them; a collective of every rank.

    `trainable` is empty on ranks that train nothing and on all replicas but the first. `group` must carry CPU tensors.
    Tensors travel one by one: a gather would need the largest rank's bytes for every rank. The step's folder appears
    under its name only when complete. Raises FileExistsError rather than writing into an existing one.
    """
    rank = dist.get_rank()
    shapes = {name: tensor.shape for name, tensor in trainable.items()}
    all_shapes: list[dict[str, torch.Size] | None] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(shapes, all_shapes, group=group)
    target = folder / "checkpoints" / f"step-{step:08d}"
    if all_shapes is None:
        for tensor in trainable.values():
            dist.send(tensor.detach().cpu().contiguous(), 0, group=group)
        return target
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainable.items()}
    for source, names in enumerate(all_shapes[1:], start=1):
        for name, shape in names.items():
            tensors[name] = torch.empty(shape, dtype=torch.float32)
            dist.recv(tensors[name], source, group=group)
    if target.exists():
        raise FileExistsError(f"{target} exists; a checkpoint is never written into an existing folder")
    unfinished = target.with_name(target.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(tensors, unfinished / "projector.safetensors")
    unfinished.rename(target)
    return target
