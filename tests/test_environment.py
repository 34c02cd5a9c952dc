"""Odd places to run in: a run, or one line that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ran_python
from untrained_runs import run_export

from mmtrain.__main__ import main
from mmtrain.base.cache import cache_folder
from mmtrain.base.errors import UserError
from mmtrain.facts.model_files import hub_cache
from mmtrain.runtime.gpus import usable_cores

LAUNCH = ("-m", "mmtrain.launch")
ONLY_ON_LINUX = (
    *(
        "sched_getaffinity",
        "sched_setaffinity",
        "posix_fadvise",
        "posix_fallocate",
        "memfd_create",
        "pipe2",
    ),
    *(
        "pidfd_open",
        "splice",
        "sendfile",
        "copy_file_range",
        "O_PATH",
        "O_TMPFILE",
        "O_DIRECT",
        "fdatasync",
    ),
)


def full_pipe() -> tuple[int, int]:
    """A pipe that takes nothing more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.nightly
def test_a_run_ends_well_where_all_is_odd_and_nobody_reads_its_console(tiny, tmp_path):
    """A long TMPDIR, few files until more are asked for, locale C, no HOME, stdin closed, files for
    their owner.
    """
    temporary = tmp_path / ("x" * 120)
    temporary.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    environment.pop("HOME", None)
    settings = ("parallel.pipeline=2", "train.max_steps=2", f"run.dir={tmp_path}/é")
    command = [sys.executable, *LAUNCH, tiny / "config.yaml", *settings]
    reader, writer = full_pipe()
    ran = subprocess.run(
        ["sh", "-c", 'umask 077; ulimit -Sn 40; exec "$@" <&-', "sh", *command],
        stdout=writer,
        stderr=writer,
        env=environment,
        cwd=tmp_path,
        timeout=200,
    )
    os.close(writer)
    os.close(reader)
    folder = tmp_path / "é" / "tiny"
    assert ran.returncode == 0, (folder / "log.txt").read_text()
    assert (folder / "audit.json").exists() and (folder / "checkpoints" / "step-00000002").is_dir()
    assert list(temporary.iterdir()) == []


def refused(tiny: Path, folder: Path, *before: str) -> str:
    """What the launcher says where it is started behind this command."""
    command = [*before, sys.executable, *LAUNCH, tiny / "config.yaml", f"run.dir={folder}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    return ran.stderr


@pytest.mark.nightly
def test_too_few_open_files_are_refused(tiny, tmp_path):
    said = refused(tiny, tmp_path, "sh", "-c", 'ulimit -n 40; exec "$@"', "sh")
    assert said.startswith("error: ") and said.endswith("Too many open files\n")


def in_namespace(*words: str) -> tuple[str, ...]:
    """The beginning of a command that runs in namespaces of its own; skips the test where that is
    not allowed.
    """
    command = ("unshare", *words)
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("namespaces of one's own take root's rights")
    return command


def with_shared_memory(options: str, *after: str) -> tuple[str, ...]:
    """The beginning of a command for which /dev/shm is a tmpfs of these options; `after` it is
    mounted.
    """
    script = " && ".join((f"mount -t tmpfs -o {options} tmpfs /dev/shm", *after, 'exec "$@"'))
    return in_namespace("--mount", "sh", "-c", script, "sh")


FILLED = ("size=64k", "head -c 65536 /dev/zero > /dev/shm/left_over")


def test_shared_memory_that_cannot_be_written_is_refused(tiny, tmp_path):
    mount = with_shared_memory("ro")
    assert refused(tiny, tmp_path, *mount).startswith(
        "error: /dev/shm cannot be used (Read-only file system)"
    )


def test_full_shared_memory_is_named_by_the_workers_of_a_command_and_not_its_output(tiny, tmp_path):
    record = {
        "id": "a",
        "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}],
    }
    (tmp_path / "a.json").write_text(json.dumps([record]))
    shard = (
        "shard",
        "--json",
        tmp_path / "a.json",
        "--images",
        tiny,
        "--out",
        tmp_path / "shards",
        "--workers",
        "2",
    )
    command = [*with_shared_memory(*FILLED), sys.executable, "-m", "mmtrain", *shard]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert ran.stderr.startswith(
        "error: /dev/shm cannot be used (No space left on device): make room there"
    )


@pytest.mark.nightly
def test_full_shared_memory_is_named_by_a_rank_whose_data_workers_need_more_than_its_launcher(
    tiny, tmp_path
):
    command = [*with_shared_memory("size=64k"), sys.executable, *LAUNCH, tiny / "config.yaml"]
    ran = subprocess.run(
        [*command, f"run.dir={tmp_path}", "data.workers=8", "parallel.pipeline=1"],
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert ran.stderr.startswith("error: /dev/shm cannot be used (No space left on device)")


def test_a_loopback_interface_that_is_down_is_refused_in_seconds(tiny, tmp_path):
    apart = in_namespace("--net")
    began = time.monotonic()
    assert refused(tiny, tmp_path, *apart).startswith(
        "error: 127.0.0.1 cannot be reached (Network is unreachable)"
    )
    # a store that waits does so for parallel.timeout_seconds, 600
    assert time.monotonic() - began < 30


@pytest.mark.nightly
def test_a_run_has_the_threads_that_its_user_asks_for_and_resumes_with_as_many(tiny, tmp_path):
    if usable_cores() < 2:
        pytest.skip("a rank's share of the cores is one thread in any case")
    settings = (f"run.dir={tmp_path}", "parallel.pipeline=1")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for steps, more in (1, {"OMP_NUM_THREADS": "1"}), (2, {}):
        command = [*LAUNCH, tiny / "config.yaml", *settings, f"train.max_steps={steps}"]
        command += ["--allow-change", "train.max_steps"]
        ran = ran_python(*command, env=environment | more)
        assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "tiny" / "log.txt").read_text().count(", cpu, threads 1\n") == 2


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    # as a container's user, whom /etc/passwd does not know
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for ask in (lambda: cache_folder("demo"), hub_cache):
        with pytest.raises(UserError, match=r"user 54321 has no home folder.*set XDG_CACHE_HOME"):
            ask()


def test_planning_sharding_and_export_call_nothing_that_only_linux_has(
    tiny, checkpoint, tmp_path, monkeypatch, capsys
):
    for name in ONLY_ON_LINUX:
        monkeypatch.delattr(os, name, raising=False)
    assert main(["plan", str(tiny / "config.yaml")]) == 0
    record = {
        "id": "a",
        "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}],
    }
    (tmp_path / "a.json").write_text(json.dumps([record]))
    shard = [
        "shard",
        "--json",
        str(tmp_path / "a.json"),
        "--images",
        str(tiny),
        "--out",
        str(tmp_path / "shards"),
    ]
    assert main([*shard, "--workers", "1"]) == 0
    for form in ("safetensors", "llava", "hf"):
        assert run_export(checkpoint.path, form, tmp_path / form) == 0, capsys.readouterr().err
