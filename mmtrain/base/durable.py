"""Files and folders that appear under their name whole, and on the disk; and locks between processes.

write under another name --> flush --> rename: readers see the old content or the new one, never a part. A process that
is killed leaves NAME.*.tmp, an error nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

UNFINISHED = ".tmp"  # ends the name of what is being written


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write, which becomes `path` when the block ends without error; a file that is there is replaced.

    It then has the permissions of the umask, whoever wrote it. Several processes may write one `path`: the last one's
    stays. Raises OSError, and removes what was written.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        unfinished.touch(exist_ok=False)
        mode = unfinished.stat().st_mode & 0o666
        yield unfinished
        _finish(unfinished, mode)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def leftovers(name: str) -> str:
    """A glob pattern: what killed processes have left of files of this name, or of names like this pattern."""
    return f"{name}.{'[0-9a-f]' * 8}{UNFINISHED}"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, as `whole_file` does."""
    with whole_file(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `path` when the block ends without error; `path` is new, or empty.

    Its files then have the permissions of the umask. One process at a time: what another has left under the unfinished
    name is removed. Raises OSError, and removes what was written.
    """
    unfinished = _unfinished(path)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        mode = unfinished.stat().st_mode & 0o666
        yield unfinished
        for entry in unfinished.rglob("*"):
            if entry.is_dir():
                flush_folder(entry)
            else:
                _finish(entry, mode)
        flush_folder(unfinished)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    flush_folder(path.parent)


def _finish(file: Path, mode: int) -> None:
    if file.stat().st_mode & 0o777 != mode:  # safetensors' files are their owner's alone
        file.chmod(mode)
    flush(file)


def remove_folder(path: Path) -> None:
    """Delete a folder; no moment shows a part of it under its name. Raises OSError."""
    doomed = _unfinished(path)
    shutil.rmtree(doomed, ignore_errors=True)  # what an earlier try has left
    path.rename(doomed)
    shutil.rmtree(doomed)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.unfinished{UNFINISHED}")


def flush(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Wait until a folder's names are on the disk; some network file systems cannot be asked for that."""
    try:
        flush(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


@contextlib.contextmanager
def held(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`, made if need be, until the block ends; the kernel lets go of what a dead process held.

    Another process that holds it is waited for, or a BlockingIOError. Raises OSError where the file cannot be made,
    and, unless it would `wait`, where the file system has no locks.
    """
    while True:
        with path.open("ab") as file:
            lock(file, wait=wait, needed=not wait)
            try:
                is_there = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                is_there = False
            if is_there:  # else its last holder has just removed it: this lock would keep nobody out
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def lock(file: IO[bytes], *, shared: bool = False, wait: bool = True, needed: bool = False) -> None:
    """Lock an open file until it is closed; where the file system has no locks, do not, or raise OSError if `needed`.

    Raises BlockingIOError where another process holds it and `wait` is false.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another process uses it") from None
    except OSError:
        if needed:
            raise
