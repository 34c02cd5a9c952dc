"""/dev/shm, where processes share semaphores: errors of that folder name no file, and another one
would be blamed.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from mmtrain.base.errors import UserError

REMEDY = (
    "make room there (df -h /dev/shm), mount a tmpfs that can be written, or start the container "
    "with --ipc=host or --shm-size=8g"
)
IS_FULL = f"/dev/shm may be full: {REMEDY}"
SEMAPHORES = "multiprocessing/synchronize.py"  # of Python: its files in /dev/shm are opened there


@contextlib.contextmanager
def naming_shared_memory() -> Iterator[None]:
    """Raise UserError, naming /dev/shm, where a semaphore cannot be made in the block."""
    try:
        yield
    except OSError as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith(SEMAPHORES):
            raise
        raise UserError(f"/dev/shm cannot be used ({error.strerror}): {REMEDY}") from error
