"""Remote shards read by copies: the samples of the disk, whatever happens to store and fetcher."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from processes import ran_python
from small_disk import small_disk
from stores import Faults, WebServer, bytes_on_disk, serving

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import held
from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.packs import PackedBatch

pytestmark = pytest.mark.usefixtures("own_cache")
STEPS = 24  # two epochs and a half
SETTINGS = {
    "data.workers": 0,
    "data.io_retry_seconds": 5,
    "data.shuffle_shards": 1,
    "data.pack_window": 16,
    "train.packs_per_step": 4,
    "train.packs_per_microbatch": 1,
    "train.max_steps": STEPS,
}


@pytest.fixture(scope="module")
def shards(make_tiny, tmp_path_factory, tiny) -> Path:
    """A folder of 6 shards with indexes, of 16 samples each."""
    folder = tmp_path_factory.mktemp("shards")
    make_tiny.make_tiny_shards(folder, shards=6)
    opened(tiny, str(folder))
    return folder


@pytest.fixture
def server(shards, tmp_path) -> Iterator[WebServer]:
    """A web server with a copy of the shards."""
    shutil.copytree(shards, tmp_path / "served")
    with serving(WebServer(tmp_path / "served")) as server:
        yield server


def opened(tiny: Path, names: str, replicas: int = 1, **changes: object) -> PackedBatches:
    values = {**SETTINGS, "data.shards": names}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"{name}={value}" for name, value in values.items()]
    return PackedBatches(load_config(tiny / "config.yaml", overrides), 0, replicas)


def remote(tiny: Path, server: WebServer, **more) -> PackedBatches:
    return opened(tiny, f"{server.address}/tiny-{{00000..00005}}.tar", **more)


def copies() -> Path:
    return cache_folder("copies") / "run"


def read(packed: PackedBatches, steps: int = STEPS) -> list[PackedBatch]:
    """Read a run's batches through the copies of a fetcher, and end it."""
    fetching = packed.fetch(copies(), [0], steps)
    try:
        return list(itertools.islice(packed, 4 * steps))
    finally:
        fetching.stop()


def same(one: PackedBatch, other: PackedBatch) -> None:
    assert one.keys == other.keys
    assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.labels, other.labels)
    assert (one.tiles is None) == (other.tiles is None)
    assert one.tiles is None or torch.equal(one.tiles, other.tiles)


def keys(batches: list[PackedBatch]) -> list[tuple[str, ...]]:
    return [batch.keys for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_disk_while_requests_fail_and_bodies_are_cut(
    tiny, shards, server, workers
):
    server.faults = Faults(fail=0.1, cut=0.1)
    local = opened(tiny, str(shards))
    found = read(remote(tiny, server, data__workers=workers))
    for one, other in zip(found, itertools.islice(local, 4 * STEPS), strict=True):
        same(one, other)
    assert not list(copies().parent.iterdir())


def test_no_process_that_reads_or_forks_has_the_stores_client(tiny, server):
    read(remote(tiny, server), 1)
    assert "obstore" not in sys.modules


def flip(tar: Path) -> None:
    content = bytearray(tar.read_bytes())
    for offset in range(700, len(content), 2000):
        content[offset] ^= 1
    tar.write_bytes(content)


def truncate(tar: Path) -> None:
    tar.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])


def replace(tar: Path) -> None:
    tar.write_bytes(bytes(tar.stat().st_size))


@pytest.mark.parametrize("damage", [flip, truncate, replace])
def test_an_object_that_is_other_than_indexed_costs_its_samples_alone(
    tiny, shards, server, tmp_path, damage
):
    packed = remote(tiny, server)
    sound = keys(list(itertools.islice(opened(tiny, str(shards)), 4 * STEPS)))
    damage(server.folder / "tiny-00003.tar")
    found = read(packed)
    lost = {fault.key for batch in found for _, fault in batch.faults}
    reasons = {fault.reason for batch in found for _, fault in batch.faults}
    own = {f"{number:06d}" for number in range(48, 64)}  # the fourth shard's
    assert lost and lost <= own and reasons == {"checksum"}
    if damage is replace:
        assert lost == own
    for batch, of_disk in zip(keys(found), sound, strict=True):
        assert batch == tuple(key for key in of_disk if key not in lost)


def test_an_object_that_vanishes_ends_the_run_by_name(tiny, server):
    packed = remote(tiny, server)
    (server.folder / "tiny-00002.tar").unlink()
    started = time.monotonic()
    with pytest.raises(UserError, match=r"tiny-00002\.tar: there is no such object.*name$"):
        read(packed)
    assert time.monotonic() - started < 10


def test_a_store_that_fails_for_long_ends_the_run(tiny, server):
    packed = remote(tiny, server, data__io_retry_seconds=1)
    server.faults = Faults(fail=1.0)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"tiny-0000\d\.tar: cannot be read.*_seconds is 1\. Start"):
        read(packed)
    assert time.monotonic() - started < 12


def test_a_bound_that_does_not_hold_two_groups_is_refused_with_the_number(tiny, server):
    packed = remote(tiny, server, data__cache_gib=20_000 / 2**30)
    with pytest.raises(UserError, match=r"may take 19\.5 KiB, but two groups .* need \d+\.\d KiB"):
        read(packed)
    packed = remote(tiny, server, data__cache_gib=20_000 / 2**30, eval__fraction=0.5)
    fetching = packed.fetch(copies(), [0], STEPS)
    with pytest.raises(
        UserError, match=r"but the held-out .* Raise it, or lower eval\.max_samples"
    ):
        while not packed.reader.copies.is_damaged("", 0):
            time.sleep(0.02)
    fetching.stop()


def test_killed_again_and_again_within_its_bound_the_keys_are_those_of_the_disk(
    tiny, shards, server
):
    expected = keys(list(itertools.islice(opened(tiny, str(shards)), 4 * STEPS)))
    bound = 3 * (shards / "tiny-00000.tar").stat().st_size
    packed = remote(tiny, server, data__cache_gib=bound / 2**30)
    fetching = packed.fetch(copies(), [0], STEPS)
    found = []
    try:
        for number, batch in enumerate(itertools.islice(packed, 4 * STEPS)):
            found.append(batch)
            assert bytes_on_disk(copies()) <= bound
            if number % 30 == 10:
                for child in psutil.Process().children():
                    if "--multiprocessing-fork" in child.cmdline():
                        child.kill()
    finally:
        fetching.stop()
    assert keys(found) == expected


def test_copies_of_killed_runs_go_and_those_of_living_ones_stay(tiny, server):
    folder = copies().parent
    for name in ("killed", "living"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.tar").write_bytes(b"copy")
    with held(folder / "living.lock", wait=True):
        read(remote(tiny, server), 1)
        assert [path.name for path in sorted(folder.iterdir())] == ["living", "living.lock"]


def test_copies_that_are_removed_end_the_run_by_name(tiny, server):
    packed = remote(tiny, server)
    fetching = packed.fetch(copies(), [0], STEPS)
    shutil.rmtree(copies().parent)
    with pytest.raises(UserError, match=r"run: the run's copies of remote shards were removed"):
        next(iter(packed))
    fetching.stop()


def test_a_full_disk_ends_the_run_by_name_in_seconds(tiny, server, tmp_path):
    packed = remote(tiny, server)
    started = time.monotonic()
    with small_disk(tmp_path / "disk", kilobytes=64) as disk:
        fetching = packed.fetch(disk / "copies" / "run", [0], STEPS)
        with pytest.raises(
            UserError, match=r"cannot be written \(No space left on device\)\. Free"
        ):
            list(itertools.islice(packed, 4 * STEPS))
        fetching.stop()
    assert time.monotonic() - started < 10


@pytest.mark.nightly
def test_a_process_that_exits_without_ending_its_fetcher_does_not_wait_for_it(tiny, server):
    script = (
        "import sys; from pathlib import Path\n"
        "from mmtrain.config.load import load_config\n"
        "from mmtrain.data.stream.loader import PackedBatches\n"
        "packed = PackedBatches(load_config(sys.argv[1], sys.argv[3:]), 0, 1)\n"
        "packed.fetch(Path(sys.argv[2]), [0], 24)\n"
        "next(iter(packed))\n"
    )
    size = (server.folder / "tiny-00000.tar").stat().st_size
    settings = {**SETTINGS, "data.cache_gib": 3 * size / 2**30}
    settings["data.shards"] = f"{server.address}/tiny-{{00000..00005}}.tar"
    overrides = [f"{name}={value}" for name, value in settings.items()]
    copies().parent.mkdir(parents=True)
    ran = ran_python("-c", script, tiny / "config.yaml", copies(), *overrides, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("starts", [3, pytest.param(100, marks=pytest.mark.nightly)])
def test_starts_and_ends_leave_no_process_and_no_file(tiny, server, starts):
    packed = remote(tiny, server)
    for _ in range(starts):
        packed.fetch(copies(), [0], STEPS).stop()
    left = [child for child in psutil.Process().children() if "spawn_main" in str(child.cmdline())]
    assert not left
    assert not list(copies().parent.iterdir())
