"""Runs whose replicas keep a part each of frozen layers, as users meet them: without room,
planned.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.launching import machine
from mmtrain.launching.machine import free_host_memory, refuse_short_host_memory
from mmtrain.plan.planner import make_plan


def streamed_plan(tiny, *overrides):
    return make_plan(load_config(tiny / "config.yaml", ("parallel.streamed_layers=99", *overrides)))


def test_a_machine_without_room_for_what_its_ranks_stream_is_refused_before_anything_is_read(tiny):
    plan = streamed_plan(tiny, "parallel.pipeline=2", "parallel.data=2")
    assert all(rank.host_bytes > 0 for rank in plan.ranks)
    refuse_short_host_memory(plan.ranks)
    free = free_host_memory()
    # The two replicas of a stage share one copy: together they take three quarters of what is free,
    # not twice that.
    sizes = {0: free // 2, 1: free // 4}
    refuse_short_host_memory(
        [replace(rank, host_bytes=sizes[rank.pipeline]) for rank in plan.ranks]
    )
    with pytest.raises(
        UserError, match=r"need .* of its memory for decoder layers, and .* are free"
    ):
        refuse_short_host_memory([replace(rank, host_bytes=free) for rank in plan.ranks])


def test_a_containers_limit_counts_for_what_is_free(tmp_path, monkeypatch):
    for name, said in (
        ("max", "1000000"),
        ("current", "600000"),
        ("stat", "anon 7\ninactive_file 100000\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(said)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert free_host_memory() == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory() > 500_000
