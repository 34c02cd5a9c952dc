"""Where a shard's index lies: beside the tar, or in the user's cache where that folder cannot be written."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from mmtrain.base.cache import cache_folder
from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.data.shards.retry import may_pass

MAKE = "mmtrain index --tokenizer PATH --template NAME"
MEND = "mmtrain index --rebuild --tokenizer PATH --template NAME"
_CANNOT_WRITE_HERE = (errno.EACCES, errno.EPERM, errno.EROFS)


class MissingIndex(UserError):  # noqa: N818
    """A shard has no index yet."""


def index_path(tar: Path) -> Path:
    """Where a shard's index is, or would be written: beside the tar, or in the cache if that folder is read-only.

    One in the cache comes first: it was made because the one beside the tar, if any, could not be changed. Raises
    OSError where the storage fails to tell.
    """
    cached, beside = _in_cache(tar), _beside(tar)
    if _is_file(cached) or not (_is_file(beside) or os.access(beside.parent, os.W_OK)):
        return cached
    return beside


def _beside(tar: Path) -> Path:
    return tar.with_name(tar.name + ".index")


def _in_cache(tar: Path) -> Path:
    name = hashlib.sha256(os.fsencode(tar.absolute())).hexdigest()[:24]
    return cache_folder("index") / f"{name}.index"


def _is_file(path: Path) -> bool:
    """As Path.is_file, which in some releases of Python takes a failure of the storage for "no"."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if may_pass(error):
            raise
        return False


def read_lines(tar: Path) -> tuple[Path, bytes, int]:
    """File and bytes of a tar's index, and the tar's size; raises MissingIndex, UserError, and OSErrors that may pass.

    All three are asked for together: a try that follows a failure must not mix what was before with what is after.
    """
    path = index_path(tar)
    file = path
    try:
        with path.open("rb") as stream:
            lines = stream.read()
        file = tar
        return path, lines, tar.stat().st_size
    except OSError as error:
        if may_pass(error):
            raise
        if file == path and isinstance(error, FileNotFoundError):
            raise MissingIndex(f"{tar}: has no index {path}; make it: {MAKE} {tar}") from None
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def write_lines(tar: Path, lines: bytes) -> None:
    """Write the file of a tar's index, which has its name only when it is complete; raises UserError."""
    beside, cached = _beside(tar), _in_cache(tar)
    for path in (beside, cached):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, lines)
            break
        except OSError as error:
            if path is cached or error.errno not in _CANNOT_WRITE_HERE:
                raise UserError(
                    f"{path}: cannot be written ({error.strerror}); free space, or make the folder writable"
                ) from error
    if path is beside:
        cached.unlink(missing_ok=True)  # it would hide the new one
