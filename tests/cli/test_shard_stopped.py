"""mmtrain shard stopped by whatever: no half shard, and --resume makes the bytes of an undisturbed
run.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from json_files import read_json, write_json
from llava_data import command, contents, damaged_records, good_records, keys_in, slow_data, turns

from mmtrain.__main__ import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*more: str) -> subprocess.Popen:
    """The tool, in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        command(*more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def shard(*more: str) -> int:
    """The tool in this process."""
    return main(["shard", *command(*more)[2:], "--workers", "1"])


def shards_noted(folder: Path) -> int:
    """How many shards the run says it has finished; -1 before it begins."""
    state = folder / "out" / "unfinished.jsonl"
    try:
        return state.read_bytes().count(b"\n") - 1
    except FileNotFoundError:  # also once it has ended
        return -1


def wait_for_shards(number: int, folder: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 100
    while shards_noted(folder) < number:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.002)


def children(process: subprocess.Popen) -> list[int]:
    """Its worker processes."""
    return list(
        map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    )


def test_killed_at_any_moments_and_resumed_it_writes_the_bytes_of_an_undisturbed_run(folder):
    """kill -9, of the tool alone: no worker may outlive it and write on."""
    write_json(folder / "a.json", damaged_records(folder, 150))
    options = ("--samples-per-shard", "9", "--max-reject-rate", "0.3")
    assert shard(*options) == 0
    expected = contents(folder / "out")
    shutil.rmtree(folder / "out")
    draw, kills, process = random.Random(0), 0, None
    while process is None or process.returncode != 0:
        process = start(*options, "--resume", "--workers", str(draw.randint(1, 3)))
        enough = shards_noted(folder) + draw.choice([2, 4, 8])
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
    assert kills >= 2
    assert contents(folder / "out") == expected


def is_gone(process: int) -> bool:
    """Whether a process ends, within seconds: the kernel tells it after its parent's end."""
    until = time.monotonic() + 10
    while Path(f"/proc/{process}/exe").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return not Path(f"/proc/{process}/exe").exists()


def test_ctrl_c_leaves_whole_shards_only_and_the_run_goes_on_with_resume(folder, capsys):
    slow_data(folder, 200)
    options = ("--samples-per-shard", "10")
    process = start(*options, "--workers", "2")
    wait_for_shards(3, folder, process)
    os.killpg(process.pid, signal.SIGINT)
    message = process.communicate(timeout=100)[1]
    assert process.returncode == 130
    assert message == "stopped by Ctrl-C; out is unfinished: go on with --resume, or delete it\n"
    names = set(contents(folder / "out"))
    assert {"rejected.jsonl", "unfinished.jsonl"} < names and not [
        name for name in names if name.endswith(".tmp")
    ]
    assert (
        all(len(keys_in(tar)) == 10 for tar in (folder / "out").glob("*.tar"))
        and "dataset.json" not in names
    )
    assert shard(*options) == 2
    message = capsys.readouterr().err
    assert (
        "already holds shards (shard-000000.tar, " in message
        and "Continue with --resume" in message
    )
    assert shard(*options, "--resume") == 0
    assert "shards are there already" in capsys.readouterr().out
    assert len(list((folder / "out").glob("*.tar"))) == 20


def test_a_worker_that_is_killed_is_an_error_and_meanwhile_nobody_else_writes_into_the_folder(
    folder, capsys
):
    slow_data(folder, 600)
    process = start("--samples-per-shard", "10", "--workers", "2")
    wait_for_shards(1, folder, process)
    assert shard("--samples-per-shard", "10", "--resume") == 2
    assert "out: another run writes into this folder" in capsys.readouterr().err
    os.kill(children(process)[0], signal.SIGKILL)
    message = process.communicate(timeout=100)[1]
    assert process.returncode == 2
    assert (
        message.startswith("error: a worker process was killed from outside, ")
        and message.count("\n") == 1
    )
    assert "out is unfinished: go on with --resume" in message
    assert not list((folder / "out").glob("*.tmp"))


@pytest.fixture
def stopped(folder, capsys) -> tuple[str, ...]:
    """The options of a run that stopped after 3 shards of 5 records, at a bad one more than is
    allowed.
    """
    records = good_records(folder / "images", 20)
    records[17]["conversations"] = []
    write_json(folder / "a.json", records)
    options = ("--samples-per-shard", "5")
    assert shard(*options, "--max-reject-rate", "0") == 2
    assert len(list((folder / "out").glob("*.tar"))) >= 3
    capsys.readouterr()
    return (*options, "--max-reject-rate", "0.1", "--resume")


def test_what_a_run_cannot_go_on_from_is_refused_and_left_as_it_is(folder, stopped, capsys):
    before = contents(folder / "out")
    assert shard(*stopped, "--samples-per-shard", "6", "--max-pixels", "100") == 2
    assert (
        "samples_per_shard was 5 and is 6; max_pixels was 100000000 and is 100"
        in capsys.readouterr().err
    )
    records = read_json(folder / "a.json")
    records[5]["conversations"][1]["value"] = "Other."
    write_json(folder / "a.json", records)
    assert shard(*stopped) == 2
    assert "unfinished.jsonl is from another run: inputs was " in capsys.readouterr().err
    assert contents(folder / "out") == before


def test_shards_that_were_damaged_or_lost_meanwhile_are_made_again(folder, stopped):
    os.truncate(folder / "out" / "shard-000000.tar", 20480)
    (folder / "out" / "shard-000001.tar.index").unlink()
    (folder / "out" / ".shard-000007.tar.01234567.tmp").touch()  # of a worker that was killed
    with (folder / "out" / "unfinished.jsonl").open("a") as stream:
        stream.write('{"shard": 7, "wri')  # a machine that lost its power
    assert shard(*stopped) == 0
    resumed = contents(folder / "out")
    shutil.rmtree(folder / "out")
    assert shard(*stopped) == 0
    assert contents(folder / "out") == resumed


def test_a_resumed_run_that_fails_at_its_first_record_keeps_the_finished_shards(
    folder, stopped, capsys
):
    records = read_json(folder / "a.json")
    records[0]["conversations"] = []
    write_json(folder / "a.json", records)
    shutil.rmtree(folder / "out")
    options = stopped[: stopped.index("--max-reject-rate")]
    assert shard(*options, "--max-reject-rate", "0.05") == 2
    finished = dict(list(contents(folder / "out").items())[1:7])
    assert list(finished)[::2] == [f"shard-00000{number}.tar" for number in range(3)]
    assert shard(*options, "--max-reject-rate", "0", "--resume") == 2
    assert "out is unfinished: go on with --resume, or delete it" in capsys.readouterr().err
    assert finished.items() <= contents(folder / "out").items()
    assert shard(*stopped) == 0


def test_images_that_changed_in_size_are_noticed_where_shards_go_by_it(folder, capsys):
    slow_data(folder, 60)
    records = read_json(folder / "a.json")
    records[50]["conversations"] = []
    write_json(folder / "a.json", records)
    assert shard("--shard-bytes", "1MiB", "--max-reject-rate", "0") == 2
    with (folder / "images" / "a.jpg").open("ab") as stream:
        stream.write(bytes(200_000))
    assert shard("--shard-bytes", "1MiB", "--resume") == 2
    assert "images have changed in size" in capsys.readouterr().err


def test_resume_begins_where_there_is_nothing_and_ends_where_all_is_done(folder, capsys):
    write_json(folder / "a.json", good_records(folder / "images", 10))
    assert shard("--resume") == 0
    first = contents(folder / "out")
    assert shard("--resume") == 0
    assert "out: finished already" in capsys.readouterr().out
    assert shard("--samples-per-shard", "5", "--resume") == 2
    assert (
        "dataset.json is from another run: samples_per_shard was 1000 and is 5"
        in capsys.readouterr().err
    )
    assert shard() == 2
    assert contents(folder / "out") == first


def test_a_full_disk_is_one_line_and_leaves_whole_shards_only(folder):
    """A limit on the size of files stands for the disk: the kernel refuses the same writes, with
    EFBIG for ENOSPC.
    """
    slow_data(folder, 6)
    size = (folder / "images" / "a.jpg").stat().st_size
    small = [{"id": f"s{number}", "conversations": turns("Hi", "Yes.")} for number in range(6)]
    write_json(folder / "a.json", small + read_json(folder / "a.json"))
    options = ("--samples-per-shard", "6")
    ran = subprocess.run(
        command(*options, "--workers", "2"),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (4 * size, resource.RLIM_INFINITY)
        ),
    )
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: out/shard-000001.tar: cannot be written (File too large); "
        "the unfinished file is removed. Free "
        "space, or choose another folder. out is unfinished: go on with --resume, or delete it\n"
    )
    assert list(contents(folder / "out")) == [
        *("rejected.jsonl", "shard-000000.tar", "shard-000000.tar.index", "unfinished.jsonl")
    ]
    assert len(keys_in(folder / "out" / "shard-000000.tar")) == 6
    assert shard(*options, "--resume") == 0
