"""Exceptions for what a user can mend: the launcher prints their message without a traceback and
exits with 2.

Errors of /dev/shm, where processes share semaphores, name no file, and another one would be blamed.
"""

import contextlib
import traceback
from collections.abc import Iterator

MORE_SHARED_MEMORY = (
    "make room there (df -h /dev/shm), mount a tmpfs that can be written, or start the container "
    "with --ipc=host or --shm-size=8g"
)
SHARED_MEMORY_IS_FULL = f"/dev/shm may be full: {MORE_SHARED_MEMORY}"
SEMAPHORES = "multiprocessing/synchronize.py"  # of Python: its files in /dev/shm are opened there


class UserError(Exception):
    """Wrong input. The message says what was seen, what is needed and how to get there."""


class MemoryLimitError(UserError):
    """A run does not fit into the memory of its ranks."""


class EncoderSliceError(UserError):
    """Slices of this encoder may compute something else than the whole one does on rank 0."""


class NonFiniteError(RuntimeError):
    """Loss or gradient of a step is NaN or infinite; raised on every rank, before any update."""


class UnrecordedError(NonFiniteError):
    """A NonFiniteError on rank 0 alone: the record of the step could not be written."""


@contextlib.contextmanager
def naming_shared_memory() -> Iterator[None]:
    """Raise UserError, naming /dev/shm, where a semaphore cannot be made in the block."""
    try:
        yield
    except OSError as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith(SEMAPHORES):
            raise
        raise UserError(
            f"/dev/shm cannot be used ({error.strerror}): {MORE_SHARED_MEMORY}"
        ) from error
