"""Saves on a disk that is slow, or refuses something: what other ranks, and the checkpoints that are there, notice."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from step_states import run_state

from mmtrain.base.errors import NonFiniteError
from mmtrain.checkpoint import write as write_module
from mmtrain.checkpoint.step_folder import find, newest, step_folders, step_of
from mmtrain.checkpoint.write import Checkpointer, SaveResult
from mmtrain.config.schema import CheckpointSection

TIMEOUT_SECONDS = 2
WEIGHTS = {"w": torch.ones(1)}


def save_slowly(folder: Path, then: str) -> list[dict]:
    """Each rank of a run whose disk takes longer than its collectives may; what was reported."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    write = write_module.new_step_folder

    def slow(path: Path) -> AbstractContextManager[Path]:
        time.sleep(2.5 * TIMEOUT_SECONDS)
        return write(path)

    write_module.new_step_folder = slow
    reported: list[SaveResult] = []
    saver = Checkpointer(folder, CheckpointSection(), dist.get_rank() == 0, reported.append)
    try:
        with saver:
            saver.save(1, WEIGHTS, {}, {}, run_state())
            if then == "NaN":
                raise NonFiniteError("on all ranks")
            if then == "the next save":
                saver.save(2, WEIGHTS, {}, {}, run_state())
            saver.finish()
    except NonFiniteError:
        pass
    dist.barrier()
    return [saved.record() for saved in reported]


@pytest.mark.parametrize(("then", "steps"), [("the next save", [1, 2]), ("NaN", [1])])
def test_a_disk_slower_than_the_timeout_loses_no_save_and_no_rank(tmp_path, then, steps):
    reported, nothing = run_ranks(2, save_slowly, tmp_path, then)
    assert [(record["kind"], record["step"]) for record in reported] == [("checkpoint", step) for step in steps]
    assert nothing == []
    assert [step_of(path) for path in reversed(step_folders(tmp_path))] == steps
    assert newest(tmp_path)[0].step == steps[-1]


def test_what_another_program_reads_is_kept_until_a_later_save(tmp_path, one_rank):
    with Checkpointer(tmp_path, CheckpointSection(keep_last=1), True, lambda saved: None) as saver:
        for step, left in ((1, [1]), (2, [1, 2]), (3, [3])):
            saver.save(step, WEIGHTS, {}, {}, run_state())
            saver.finish()
            assert [step_of(path) for path in reversed(step_folders(tmp_path))] == left
            read = find(tmp_path) if step == 1 else None  # as an export does
    assert read is None
