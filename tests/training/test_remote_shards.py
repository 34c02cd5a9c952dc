"""Runs whose shards lie in a store: the losses of the disk, whoever is killed, within a bound."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import MAIN_JOB
from processes import ranks_of, running, steps_of, wait_for
from rank_runs import Run, train
from stores import (
    SECRET,
    TOKEN,
    DataHub,
    Faults,
    WebServer,
    bytes_on_disk,
    s3_server,
    serving,
    with_tls,
)
from tiers import nightly

from mmtrain.base.cache import cache_folder
from mmtrain.data.shards.shard_list import demo_shards
from mmtrain.demo.data import make_demo_shards

# Groups of 4 MB: an eighth of the data.
SETTINGS = (
    *("parallel.pipeline=1", "train.max_steps=24", "checkpoint.every_steps=8"),
    *("data.shuffle_shards=1", "data.pack_window=400"),
    *("eval.every_steps=null", "eval.show_answers=0", "eval.permuted_control=false"),
)
BOUND = 13_000_000  # bytes: three groups


@pytest.fixture(scope="module")
def folder(demo_cache) -> Path:
    """The folder of the demo's shards, which stores hold here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(demo_cache))
        make_demo_shards(["demo:train", "demo:held-out"], "data.shards")
        return demo_shards("demo:train").parent


@pytest.fixture(autouse=True)
def cache(demo_cache, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(demo_cache))
    return cache_folder("copies")


def remote(address: str) -> list[str]:
    """Settings that read the demo's shards from a store."""
    folders = {name: demo_shards(f"demo:{name}").name for name in ("train", "held-out")}
    return [
        f"data.shards={address}/{folders['train']}/shard-{{000000..000007}}.tar",
        f"eval.shards={address}/{folders['held-out']}/shard-000000.tar",
        f"data.cache_gib={BOUND / 2**30}",
    ]


@pytest.fixture(scope="module")
def local(demo_cache, tmp_path_factory) -> Run:
    """The run that reads the disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(demo_cache))
        return train(MAIN_JOB, *SETTINGS, f"run.dir={tmp_path_factory.mktemp('local')}")


@contextlib.contextmanager
def store(kind: str, folder: Path, scratch: Path, patched: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of a store that holds a folder, for this process and those it starts."""
    with contextlib.ExitStack() as servers:
        if kind == "S3":
            s3 = servers.enter_context(s3_server(scratch / "weed"))
            s3.upload(folder, "demo")
            environment = s3.environment
            address = "s3://demo"
        elif kind == "hub":
            scratch.joinpath("org").mkdir()
            scratch.joinpath("org/demo").symlink_to(folder)
            files = servers.enter_context(serving(WebServer(scratch)))
            hub = servers.enter_context(serving(DataHub(files)))
            hub.private.add("org/demo")
            environment = hub.environment(scratch)
            address = "hf://datasets/org/demo"
        else:
            server = WebServer(folder, faults=Faults(fail=0.05, cut=0.05))
            environment = {}
            if kind == "https":
                environment = {"SSL_CERT_FILE": str(scratch / "ca.pem")}
                server = with_tls(server, scratch / "ca.pem")
            address = servers.enter_context(serving(server)).address
        for name, value in environment.items():
            patched.setenv(name, value)
        yield address


@pytest.mark.parametrize("kind", ["http", nightly("https"), nightly("S3"), nightly("hub")])
def test_a_run_from_any_store_makes_the_losses_and_scores_of_the_disk_and_writes_no_secret(
    local, folder, tmp_path, monkeypatch, kind
):
    with store(kind, folder, tmp_path, monkeypatch) as address:
        run = train(MAIN_JOB, *SETTINGS, *remote(address), f"run.dir={tmp_path}")
    written = [*run.folder.rglob("*"), *cache_folder("").rglob("*")]
    for file in filter(Path.is_file, written):
        content = file.read_bytes()
        assert SECRET.encode() not in content and TOKEN.encode() not in content, file
    assert run.losses() == local.losses()
    assert [line["loss"] for line in run.lines("metrics.jsonl", "eval")] == [
        line["loss"] for line in local.lines("metrics.jsonl", "eval")
    ]


@pytest.mark.nightly
def test_a_resume_on_two_replicas_goes_on_with_the_losses_of_the_disk(local, folder, tmp_path):
    losses = []
    with serving(WebServer(folder)) as server:
        for name, more in {"disk": [], "web": remote(server.address)}.items():
            settings = (*SETTINGS, *more, "parallel.data=2", f"run.name={name}")
            resume = local.checkpoint(8).path
            run = train(MAIN_JOB, *settings, f"run.dir={tmp_path}", resume=resume)
            losses.append([line["loss"] for line in run.lines("metrics.jsonl", "train")])
    assert losses[0] == losses[1] and len(losses[0]) == 16


def fetchers(command) -> list[psutil.Process]:
    """Processes that fetch shards: they alone are spawned by multiprocessing."""
    found = []
    for pid in command.family():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if "--multiprocessing-fork" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.timeout(300)
@pytest.mark.nightly
@pytest.mark.parametrize("kills", [3, 12])
def test_whoever_is_killed_the_bits_are_those_of_the_disk_and_nothing_is_left(
    local, folder, cache, tmp_path, kills
):
    """The fetcher is killed again and again, then a rank; the same command ends the run."""
    with serving(WebServer(folder)) as server:
        arguments = ["-m", "mmtrain", "train", MAIN_JOB, *SETTINGS, *remote(server.address)]
        arguments.append(f"run.dir={tmp_path}")
        run = tmp_path / "llava_pp4"
        most = 0
        with running(arguments, tmp_path) as command:
            for _ in range(kills):
                wait_for(lambda: fetchers(command) or command.process.poll() is not None, 60, "one")
                for process in fetchers(command):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                        process.wait(10)
                most = max(most, bytes_on_disk(cache))
            wait_for(lambda: steps_of(run) >= 9, 120, "a step after the first save")
            os.kill(ranks_of(run)[0], signal.SIGKILL)
            assert command.wait() != 0
            command.seconds_until_gone(30)
        assert not any(cache.iterdir())
        with running(arguments, tmp_path) as command:
            while command.process.poll() is None:
                most = max(most, bytes_on_disk(cache))
                time.sleep(0.02)
            assert command.wait() == 0, command.stderr
            command.seconds_until_gone(30)
            printed = command.stdout
    ended = Run(run, printed)
    assert ended.losses() == local.losses()
    assert 0 < most <= BOUND
    assert not any(cache.iterdir())
    *_, copies = ended.lines("metrics.jsonl", "copies")
    assert 2e6 < copies["fetched_bytes"] < 10e6 and copies["cache_bytes"] <= BOUND
    assert f"fetched in {copies['requests']:,} requests" in printed
