"""mmtrain shard stopped by whatever: no half shard, and --resume makes the bytes of an undisturbed run."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from llava_data import command, contents, damaged_records, keys_in, slow_data, turns


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path


def start(folder: Path, *more: str) -> subprocess.Popen:
    """The tool, in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        command(*more), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(folder: Path, *more: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*more), cwd=folder, capture_output=True, text=True, timeout=100)


def shards_noted(folder: Path) -> int:
    """How many shards the run says it has finished; -1 before it begins."""
    state = folder / "out" / "unfinished.jsonl"
    try:
        return state.read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return -1


def wait_for_shards(number: int, folder: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 100
    while shards_noted(folder) < number:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.002)


def children(process: subprocess.Popen) -> list[int]:
    """Its worker processes."""
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moments_and_resumed_it_writes_the_bytes_of_an_undisturbed_run(folder, seed):
    """kill -9, of the tool alone: no worker may outlive it and write on."""
    (folder / "a.json").write_text(json.dumps(damaged_records(folder, 300)))
    options = ("--samples-per-shard", "9", "--max-reject-rate", "0.3")
    assert run(folder, *options, "--workers", "1").returncode == 0
    expected = contents(folder / "out")
    shutil.rmtree(folder / "out")
    draw, kills, process = random.Random(seed), 0, None
    while process is None or process.returncode != 0:
        process = start(folder, *options, "--resume", "--workers", str(draw.randint(1, 3)))
        enough = shards_noted(folder) + draw.choice([1, 2, 4, 8])
        while process.poll() is None and shards_noted(folder) < enough:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.02))
        workers = children(process) if process.poll() is None else []
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL)
        assert all(len(keys_in(tar)) <= 9 for tar in (folder / "out").glob("*.tar"))
        assert all(is_gone(worker) for worker in workers)
    assert kills >= 3
    assert contents(folder / "out") == expected


def is_gone(process: int) -> bool:
    """Whether a process ends, within seconds: the kernel tells it after its parent's end."""
    until = time.monotonic() + 10
    while Path(f"/proc/{process}/exe").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return not Path(f"/proc/{process}/exe").exists()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_leaves_whole_shards_only_and_the_run_goes_on_with_resume(folder, workers):
    slow_data(folder, 240)
    options = ("--samples-per-shard", "10", "--workers", workers)
    process = start(folder, *options)
    wait_for_shards(3, folder, process)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 130
    assert said == "stopped by Ctrl-C; out is unfinished: go on with --resume, or delete it\n"
    names = set(contents(folder / "out"))
    assert {"rejected.jsonl", "unfinished.jsonl"} < names and not [name for name in names if name.endswith(".tmp")]
    assert all(len(keys_in(tar)) == 10 for tar in (folder / "out").glob("*.tar")) and "dataset.json" not in names
    again = run(folder, *options)
    assert again.returncode == 2
    assert "holds shards already (shard-000000.tar, " in again.stderr and "go on with --resume" in again.stderr
    resumed = run(folder, *options, "--resume")
    assert resumed.returncode == 0 and "shards are there already" in resumed.stdout
    first = contents(folder / "out")
    shutil.rmtree(folder / "out")
    assert run(folder, *options).returncode == 0
    assert contents(folder / "out") == first


def test_a_worker_that_is_killed_is_an_error_and_the_run_goes_on_with_resume(folder):
    slow_data(folder, 300)
    process = start(folder, "--samples-per-shard", "10", "--workers", "2")
    wait_for_shards(4, folder, process)
    os.kill(children(process)[0], signal.SIGKILL)
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 2
    assert said.startswith("error: a worker process was killed from outside, ") and said.count("\n") == 1
    assert "out is unfinished: go on with --resume" in said
    assert not list((folder / "out").glob("*.tmp"))
    assert run(folder, "--samples-per-shard", "10", "--workers", "2", "--resume").returncode == 0
    assert len(list((folder / "out").glob("*.tar"))) == 30


def test_two_runs_cannot_write_into_one_folder(folder):
    slow_data(folder, 1600)
    process = start(folder, "--samples-per-shard", "20", "--workers", "1")
    try:
        wait_for_shards(1, folder, process)
        other = run(folder, "--samples-per-shard", "20", "--workers", "1", "--resume")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert other.returncode == 2 and "out: another run writes into this folder" in other.stderr


def stopped(folder: Path, *options: str) -> None:
    """An unfinished data set: part of its shards, as a kill leaves them."""
    process = start(folder, *options)
    wait_for_shards(3, folder, process)
    process.kill()
    process.communicate()


def test_what_a_run_cannot_go_on_from_is_refused_and_left_as_it_is(folder):
    slow_data(folder, 300)
    options = ("--samples-per-shard", "20", "--workers", "1")
    stopped(folder, *options)
    left = contents(folder / "out")
    other = run(folder, "--samples-per-shard", "30", "--workers", "1", "--max-side", "100", "--resume")
    assert other.returncode == 2
    assert "samples_per_shard was 20 and is 30; max_side was null and is 100" in other.stderr
    records = json.loads((folder / "a.json").read_text())
    records[5]["conversations"][1]["value"] = "Other."
    (folder / "a.json").write_text(json.dumps(records))
    other = run(folder, *options, "--resume")
    assert other.returncode == 2 and "unfinished.jsonl is of another run: input 0 was " in other.stderr
    assert contents(folder / "out") == left


def test_shards_that_were_damaged_or_lost_meanwhile_are_made_again(folder):
    slow_data(folder, 300)
    options = ("--samples-per-shard", "20", "--workers", "1")
    assert run(folder, *options).returncode == 0
    expected = contents(folder / "out")
    shutil.rmtree(folder / "out")
    stopped(folder, *options)
    os.truncate(folder / "out" / "shard-000000.tar", 20480)
    (folder / "out" / "shard-000001.tar.index").unlink()
    with (folder / "out" / "unfinished.jsonl").open("a") as stream:
        stream.write('{"shard": 7, "fir')  # a machine that lost its power
    assert run(folder, *options, "--resume").returncode == 0
    assert contents(folder / "out") == expected


def test_images_that_changed_in_size_are_noticed_where_shards_go_by_it(folder):
    slow_data(folder, 300)
    options = ("--shard-bytes", "1MiB", "--workers", "1")
    stopped(folder, *options)
    with (folder / "images" / "a.jpg").open("ab") as stream:
        stream.write(bytes(200_000))
    other = run(folder, *options, "--resume")
    assert other.returncode == 2 and "images have changed in size since it was written" in other.stderr


def test_resume_begins_where_there_is_nothing_and_ends_where_all_is_done(folder):
    slow_data(folder, 10)
    assert run(folder, "--workers", "1", "--resume").returncode == 0
    first = contents(folder / "out")
    again = run(folder, "--workers", "2", "--resume")
    assert again.returncode == 0 and "out: finished already, 1 shards, 10 samples" in again.stdout
    assert contents(folder / "out") == first
    other = run(folder, "--samples-per-shard", "5", "--resume")
    assert other.returncode == 2
    assert "dataset.json is of another run: samples_per_shard was 1000 and is 5" in other.stderr
    assert contents(folder / "out") == first
    assert run(folder, "--workers", "1").returncode == 2
    assert contents(folder / "out") == first


def test_shards_of_another_writer_are_never_resumed(folder):
    slow_data(folder, 3)
    (folder / "out").mkdir()
    (folder / "out" / "shard-000000.tar").write_bytes(b"of somebody else")
    ran = run(folder, "--resume")
    assert ran.returncode == 2 and "holds shards already (shard-000000.tar)" in ran.stderr
    assert contents(folder / "out") == {"shard-000000.tar": b"of somebody else"}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_limit_on_files_is_one_line_and_leaves_whole_shards_only(folder, workers):
    """The kernel refuses the same writes as on a full disk, with EFBIG for ENOSPC."""
    slow_data(folder, 6)
    size = (folder / "images" / "a.jpg").stat().st_size
    small = [{"id": f"s{number}", "conversations": turns("Hi", "Yes.")} for number in range(6)]
    (folder / "a.json").write_text(json.dumps(small + json.loads((folder / "a.json").read_text())))
    options = ("--samples-per-shard", "6", "--workers", workers)
    ran = subprocess.run(
        command(*options),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 * size, resource.RLIM_INFINITY)),
    )
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: out/shard-000001.tar: cannot be written (File too large); what was written of it is removed. Free "
        "space, or choose another folder. out is unfinished: go on with --resume, or delete it\n"
    )
    assert list(contents(folder / "out")) == [
        *("rejected.jsonl", "shard-000000.tar", "shard-000000.tar.index", "unfinished.jsonl")
    ]
    assert len(keys_in(folder / "out" / "shard-000000.tar")) == 6
    assert run(folder, *options, "--resume").returncode == 0


@pytest.fixture
def small_disk(folder):
    """folder/out on a file system of its own, of 300 kB; needs the right to mount."""
    (folder / "out").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder / "out"], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no right to mount here: {mounted.stderr.decode().strip()}")
    yield folder / "out"
    subprocess.run(["umount", folder / "out"], check=True)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_one_line_and_with_more_room_the_run_goes_on(folder, small_disk, workers):
    slow_data(folder, 24)
    options = ("--samples-per-shard", "1", "--workers", workers)
    ran = run(folder, *options)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: out/") and "cannot be written (No space left on device)" in ran.stderr
    # The disk may be full at a tar or at an index: each says so in its own words.
    assert "free space" in ran.stderr.lower() and ran.stderr.count("\n") == 1
    tars = list(small_disk.glob("*.tar"))
    assert all(len(keys_in(tar)) == 1 for tar in tars)
    # Of two workers one may fill the disk while the other is at the first shard: then nothing is left to go on with.
    goes_on = "go on with --resume" in ran.stderr
    assert goes_on == bool(tars) and (goes_on or workers == "2")
    assert not list(small_disk.glob("*.tmp")) and not (small_disk / "dataset.json").exists()
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    assert run(folder, *options, *["--resume"] * goes_on).returncode == 0
    assert sorted(key for tar in small_disk.glob("*.tar") for key in keys_in(tar)) == sorted(map(str, range(24)))
    assert len(contents(small_disk)) == 2 * 24 + 2
