"""Files and folders that appear under their name whole, and on the disk; locks between processes.

write under another name --> flush --> rename: readers see the old content or the new one, never a
part. A process that is killed leaves .NAME.<8 hex digits>.tmp, an error nothing.
"""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

A_DAY = 86400  # seconds
UNFINISHED = ".tmp"  # ends the name of what is being written

_held: set[IO[bytes]] = set()
# a lock lasts while any copy is open
os.register_at_fork(after_in_child=lambda: [file.close() for file in _held])


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write, which replaces `path` when the block ends without error.

    Its permissions are the umask's, or the mount's. Several processes may write one `path`: the
    last one's stays. Raises OSError, and removes what was written.
    """
    unfinished = _unfinished(path)
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
    with contextlib.suppress(PermissionError):  # a folder that may be written and not read
        flush(path.parent)


def leftovers(name: str) -> str:
    """Return a glob pattern of the files that killed processes left unfinished under this name or
    pattern.
    """
    return f".{name}.{'[0-9a-f]' * 8}{UNFINISHED}"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, as `whole_file` does."""
    if isinstance(content, str):
        content = content.encode()
    with whole_file(path) as unfinished:
        unfinished.write_bytes(content)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which becomes `path`, new or empty, when the block ends
    without error.

    What killed processes left of it more than a day ago is removed. Raises OSError, also where
    another process has made `path` in the meantime, and removes what was written.
    """
    for leftover in path.parent.glob(leftovers(glob.escape(path.name))):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if time.time() - leftover.stat().st_mtime > A_DAY:
                shutil.rmtree(leftover, ignore_errors=True)
    unfinished = _unfinished(path)
    try:
        unfinished.mkdir()
        mode = unfinished.stat().st_mode & 0o666
        yield unfinished
        for entry in unfinished.rglob("*"):
            if entry.is_dir():
                flush(entry)
            else:
                _finish(entry, mode)
        flush(unfinished)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    flush(path.parent)


def _finish(file: Path, mode: int) -> None:
    # safetensors' files are their owner's alone. Mounts without permissions (exFAT, CIFS) refuse,
    # and keep theirs.
    with contextlib.suppress(OSError):
        file.chmod(mode)
    flush(file)


def remove_folder(path: Path) -> None:
    """Delete a folder: its name vanishes at once, then its content. Raises OSError."""
    doomed = _unfinished(path)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on a disk that can be asked."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`, which names this process, until the block or the process ends.

    Forks do not hold it. Raises BlockingIOError where another process holds it, unless it may
    `wait`; OSError where the file cannot be made, and, unless it may `wait`, where the file system
    has no locks.
    """
    while True:
        with path.open("ab") as file:
            lock(file, wait=wait, needed=not wait)
            try:
                is_there = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                is_there = False
            # else its last holder has just removed it: this lock would keep nobody out
            if is_there:
                file.truncate(0)
                file.write(str(os.getpid()).encode())
                file.flush()
                _held.add(file)
                try:
                    yield
                finally:
                    _held.remove(file)
                    path.unlink(missing_ok=True)
                return


def holder(path: Path) -> psutil.Process | None:
    """Return this user's process on this machine that is in `held(path)`, None if there is none."""
    # else not held, or by a process that has ended
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(path.read_bytes()))
        if path.resolve() in [Path(file.path) for file in process.open_files()]:
            return process
    return None


def lock(
    file: IO[bytes] | int, *, shared: bool = False, wait: bool = True, needed: bool = False
) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError unless it may `wait`.

    Where the file system has no locks, do nothing, or raise OSError if it is `needed`.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, "another process uses it") from None
    except OSError:
        if needed:
            raise
