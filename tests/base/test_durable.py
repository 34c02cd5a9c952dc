from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from mmtrain.base.durable import held, lock, whole_file, whole_folder, write_whole


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


def test_a_file_system_that_cannot_flush_folders_takes_them(tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with whole_folder(tmp_path / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("content")
    assert (tmp_path / "out" / "inner" / "file").read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
