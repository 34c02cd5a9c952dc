"""Runs whose replicas keep a part each of frozen layers, as users meet them: killed, stopped, without room, planned."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Command, running, wait_for

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.launching import machine
from mmtrain.launching.machine import free_host_memory, refuse_missing_quantisation, refuse_short_host_memory
from mmtrain.plan.planner import make_plan

PEERS = ("parallel.data=2", "parallel.streamed_layers=99", "parallel.stream_from=peers", "parallel.weight_shards=2")
ENDLESS = (
    *("parallel.pipeline=1", "parallel.threads_per_rank=1", "data.workers=0", "eval.show_answers=0"),
    *("train.max_steps=100000", "train.packs_per_step=4", "run.name=tiny"),
)


@contextlib.contextmanager
def training(tiny: Path, folder: Path, *overrides: str) -> Iterator[Command]:
    """A run of two replicas that stream from each other, some steps into it; killed when the block ends."""
    options = (f"run.dir={folder}", *ENDLESS, *PEERS, *overrides)
    metrics = folder / "tiny" / "metrics.jsonl"

    def has_begun() -> bool:
        return metrics.exists() and metrics.read_text().count('"kind": "train"') > 1

    with running(["-m", "mmtrain.launch", tiny / "config.yaml", *options], folder) as command:
        wait_for(lambda: has_begun() or command.process.poll() is not None, 120, "two steps")
        assert command.process.poll() is None, command.stderr
        yield command


def pid_of(folder: Path, rank: int) -> int:
    return int(re.search(rf"\[rank {rank}\] process (\d+) on ", (folder / "tiny" / "log.txt").read_text())[1])


def test_kill_9_of_a_peer_while_others_fetch_from_it_names_it(tiny, tmp_path):
    with training(tiny, tmp_path) as command:
        os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
        assert command.seconds_until_gone(timeout=20) < 10
        assert command.wait() == 1
    named = r"error: rank 1 \(stage 0, replica 1\) was killed by SIGKILL \(.*\) in step \d+ "
    assert re.match(named, command.stderr), command.stderr


@pytest.mark.nightly
def test_a_peer_that_stands_still_ends_the_run_within_the_timeout(tiny, tmp_path):
    with training(tiny, tmp_path, "parallel.timeout_seconds=5") as command:
        os.kill(pid_of(tmp_path, 1), signal.SIGSTOP)
        assert command.wait(60) == 1
        assert command.seconds_until_gone(timeout=20) < 10
    assert re.match(r"error: rank 0 \(stage 0, replica 0\) lost its connection to another rank", command.stderr)
    assert re.search(r"\n  rank 1 \(stage 0, replica 1\) was in step \d+ \(counted from 0\), at [A-Z]", command.stderr)


def streamed_plan(tiny, *overrides):
    return make_plan(load_config(tiny / "config.yaml", ("parallel.streamed_layers=99", *overrides)))


def test_a_machine_without_room_for_what_its_ranks_stream_is_refused_before_anything_is_read(tiny):
    plan = streamed_plan(tiny, "parallel.pipeline=2", "parallel.data=2")
    assert all(rank.host_bytes > 0 for rank in plan.ranks)
    refuse_short_host_memory(plan.ranks)
    free = free_host_memory()
    # The two replicas of a stage share one copy: together they take three quarters of what is free, not twice that.
    sizes = {0: free // 2, 1: free // 4}
    refuse_short_host_memory([replace(rank, host_bytes=sizes[rank.pipeline]) for rank in plan.ranks])
    with pytest.raises(UserError, match=r"need .* of its memory for decoder layers, and .* are free"):
        refuse_short_host_memory([replace(rank, host_bytes=free) for rank in plan.ranks])


def test_a_containers_limit_counts_for_what_is_free(tmp_path, monkeypatch):
    for name, said in (("max", "1000000"), ("current", "600000"), ("stat", "anon 7\ninactive_file 100000\n")):
        (tmp_path / f"memory.{name}").write_text(said)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert free_host_memory() == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory() > 500_000


def test_quantising_without_its_library_is_refused_with_what_to_install(tiny, monkeypatch):
    config = load_config(tiny / "config.yaml", ["model.llm.quantize=nf4"])
    refuse_missing_quantisation(config)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"nf4 needs bitsandbytes, .*: pip install 'mmtrain\[quantize\]'"):
        refuse_missing_quantisation(config)
