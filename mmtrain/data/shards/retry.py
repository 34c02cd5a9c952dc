"""Reads that are tried again while the storage fails: network storage stalls, restarts and loses its handles."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mmtrain.base.errors import UserError
from mmtrain.config.schema import DataSection

Read = TypeVar("Read")

RETRY_SECONDS: float = DataSection.model_fields["io_retry_seconds"].default  # of tools, which read no configuration
FIRST_PAUSE = 0.1  # seconds before a failed read is tried again; each pause is twice the one before
LONGEST_PAUSE = 10.0
# What a path or its mode is to blame for. Everything else, ESTALE, EIO, ETIMEDOUT and their like, may pass.
_LASTING = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
)


class UnreadableError(UserError):
    """The storage has failed for as long as was allowed: others of its files will do no better."""


def may_pass(error: OSError) -> bool:
    """Whether waiting may help against an error."""
    return error.errno not in _LASTING


def read_again(
    read: Callable[[], Read], file: Path, seconds: float, is_tried_again: Callable[[OSError], bool] = may_pass
) -> Read:
    """What `read` returns, which is called again and again while it fails with an OSError that `is_tried_again`.

    Raises other OSErrors as they are, and UnreadableError, naming `file`, once the next try would be after `seconds`.
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            return read()
        except OSError as error:
            if not is_tried_again(error):
                raise
            if time.monotonic() + pause > deadline:
                raise UnreadableError(
                    f"{error.filename or file}: cannot be read ({error.strerror or error}), tried for {seconds:g} s "
                    "(data.io_retry_seconds); mend the storage, or copy the file again, and start again"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
