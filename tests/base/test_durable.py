from __future__ import annotations

import ctypes
import errno
import fcntl
import multiprocessing
import os
import platform
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mmtrain.base.durable import held, lock, remove_folder, whole_file, whole_folder, write_whole


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    file = tmp_path / "file.json"
    write_whole(file, "old")
    with pytest.raises(OSError, match="full"), whole_file(file) as unfinished:
        unfinished.write_text("ne")
        assert file.read_text() == "old"
        raise OSError("the disk is full")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    write_whole(file, b"new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out") as unfinished:
        (unfinished / "file").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "out") as unfinished:
        (unfinished / "file").touch()
        assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_of_two_who_make_one_folder_the_first_wins_and_each_writes_its_own(tmp_path):
    out = tmp_path / "out[1]"
    with pytest.raises(OSError, match="not empty"), whole_folder(out) as second:
        with whole_folder(out) as first:
            (first / "first").touch()
        (second / "second").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "out[1]",
        "out[1]/first",
    ]


def test_what_killed_processes_left_of_a_folder_goes_after_a_day(tmp_path):
    for name in (
        ".out.0123abcd.tmp",
        ".out.4567abcd.tmp",
        ".out.x.0123abcd.tmp",
        "out.unfinished.tmp",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        os.utime(tmp_path / name, (0, 0))
    os.utime(tmp_path / ".out.4567abcd.tmp")  # which may still be written
    # as one that another process removes in this moment
    (tmp_path / ".out.89ababcd.tmp").symlink_to("gone")
    with whole_folder(tmp_path / "out"):
        pass
    remove_folder(tmp_path / "out.unfinished.tmp")
    (tmp_path / ".out.89ababcd.tmp").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".out.4567abcd.tmp",
        ".out.x.0123abcd.tmp",
        "out",
    ]


def test_permissions_are_those_of_the_umask_whoever_wrote_the_file(tmp_path):
    def private(path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))

    with whole_file(tmp_path / "file") as unfinished:
        unfinished.unlink()
        private(unfinished)
    with whole_folder(tmp_path / "folder") as unfinished:
        private(unfinished / "inner")
    (tmp_path / "usual").touch()
    files = (tmp_path / "file", tmp_path / "folder" / "inner", tmp_path / "usual")
    assert len({file.stat().st_mode for file in files}) == 1


def refuse_chmod() -> None:
    """Let the kernel refuse chmod to this process from now on, as mounts of exFAT and CIFS do."""
    numbers = {"x86_64": (90, 91, 268, 452), "aarch64": (52, 53, 452)}[platform.machine()]
    number, equal, end, refused, allowed = 0x20, 0x15, 0x06, 0x00050000 | errno.EPERM, 0x7FFF0000
    rules = [(number, 0, 0, 0)]
    rules += [(equal, len(numbers) - place, 0, each) for place, each in enumerate(numbers)]
    rules += [(end, 0, 0, allowed), (end, 0, 0, refused)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("H6xQ", len(rules), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, filtered = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(seccomp, filtered, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
    with pytest.raises(PermissionError):
        Path(__file__).chmod(0o600)


def write_where_chmod_is_refused(folder: Path) -> None:
    refuse_chmod()
    with whole_file(folder / "file") as unfinished:
        unfinished.unlink()
        save_file({"x": np.zeros(1)}, unfinished)  # which leaves it its owner's alone
    with whole_folder(folder / "folder") as unfinished:
        save_file({"x": np.zeros(1)}, unfinished / "inner")


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"),
    reason="numbers of other machines' system calls",
)
def test_where_chmod_is_refused_files_are_written_with_the_permissions_that_they_have(tmp_path):
    writer = multiprocessing.get_context("fork").Process(
        target=write_where_chmod_is_refused, args=(tmp_path,)
    )
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert (
        load_file(tmp_path / "file").keys()
        == load_file(tmp_path / "folder" / "inner").keys()
        == {"x"}
    )


def hold(path: Path, number: int, ran: Path) -> None:
    for _ in range(50):
        with held(path, wait=True):
            before = ran.read_text()
            ran.write_text(f"{before}{number}")


def test_waiting_processes_hold_a_lock_one_after_the_other(tmp_path):
    path, ran = tmp_path / "lock", tmp_path / "ran"
    ran.touch()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=hold, args=(path, number, ran)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(ran.read_text()) == 150 and not path.exists()


def test_a_process_that_was_forked_meanwhile_does_not_go_on_holding_a_lock(tmp_path):
    with held(tmp_path / "lock", wait=False):
        context = multiprocessing.get_context("fork")
        runs = context.Event()
        child = context.Process(target=lambda: (runs.set(), time.sleep(60)))
        child.start()
        runs.wait(60)
        # as if this process were killed, nothing removes it
        (tmp_path / "lock").rename(tmp_path / "locked")
    with (tmp_path / "locked").open("ab") as file:
        lock(file, wait=False)
    child.kill()
    child.join()


def test_where_a_file_system_has_no_locks_only_who_would_not_wait_is_refused(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with held(tmp_path / "lock", wait=True):
        pass
    with pytest.raises(OSError, match="not implemented"), held(tmp_path / "lock", wait=False):
        pass
    with (tmp_path / "file").open("wb") as file:
        lock(file, wait=False)


def test_a_file_has_its_name_on_the_disk_too(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        os, "fsync", lambda file: flushed.append(Path(f"/proc/self/fd/{file}").readlink())
    )
    write_whole(tmp_path / "file", "content")
    assert flushed[0].name.startswith(".file.") and flushed[1:] == [tmp_path]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_takes_files_and_folders(tmp_path, monkeypatch, code):
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with whole_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("content")
    assert (tmp_path / "out" / "inner" / "file").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
