"""What planning, sharding and export may call: not what only Linux has."""

from __future__ import annotations

import json
import os

import pytest
from untrained_runs import config_of, make_checkpoint

from mmtrain.__main__ import main

ONLY_ON_LINUX = (
    *("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "pipe2"),
    *("pidfd_open", "splice", "sendfile", "copy_file_range", "O_PATH", "O_TMPFILE", "O_DIRECT", "fdatasync"),
)


@pytest.fixture(autouse=True)
def without_linux(monkeypatch):
    for name in ONLY_ON_LINUX:
        monkeypatch.delattr(os, name, raising=False)


def test_planning_sharding_and_export_call_nothing_that_only_linux_has(tiny, tmp_path, capsys):
    assert main(["plan", str(tiny / "config.yaml")]) == 0
    record = {"id": "a", "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]}
    (tmp_path / "a.json").write_text(json.dumps([record]))
    shard = ["shard", "--json", str(tmp_path / "a.json"), "--images", str(tiny), "--out", str(tmp_path / "shards")]
    assert main([*shard, "--workers", "1"]) == 0
    make_checkpoint(tmp_path / "run", config_of(tiny))
    for form in ("safetensors", "llava", "hf"):
        export = ["export", "--checkpoint", str(tmp_path / "run"), "--format", form, "--out", str(tmp_path / form)]
        assert main(export) == 0, capsys.readouterr().err
