"""The trained tensors of all ranks end in one file, by global name, whole or not at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file

from mmtrain.checkpoint import save_trained


def save(folder, steps):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = {f"llm.layers.{rank}.{i}.weight": torch.full((2, 3), float(rank + i)).T for i in range(2)}
    if rank == 1:  # trains nothing, or is a replica of another
        mine = {}
    outcomes = []
    for step in steps:
        try:
            outcomes.append(str(save_trained(folder, step, mine)))
        except FileExistsError as error:
            outcomes.append(f"refused: {error}")
    dist.barrier()
    return outcomes


def test_one_file_holds_every_ranks_trainable_tensors(tmp_path):
    outcomes = run_ranks(3, save, tmp_path, [7])
    target = tmp_path / "checkpoints" / "step-00000007"
    assert outcomes == [[str(target)]] * 3
    tensors = load_file(target / "projector.safetensors")
    assert sorted(tensors) == [f"llm.layers.{rank}.{i}.weight" for rank in (0, 2) for i in range(2)]
    assert torch.equal(tensors["llm.layers.2.1.weight"], torch.full((3, 2), 3.0))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_an_existing_checkpoint_is_never_written_into(tmp_path):
    ((first, second),) = run_ranks(1, save, tmp_path, [1, 1])
    assert not first.startswith("refused") and second.startswith("refused:")


@pytest.mark.parametrize("leftover", ["projector.safetensors", "junk"])
def test_what_a_killed_save_left_behind_does_not_stay(tmp_path, leftover):
    unfinished = tmp_path / "checkpoints" / "step-00000003.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / leftover).write_bytes(b"half")
    run_ranks(1, save, tmp_path, [3])
    assert [p.name for p in (tmp_path / "checkpoints").rglob("*")] == ["step-00000003", "projector.safetensors"]
