"""The one exception for what a user can mend: the launcher prints its message without a traceback
and exits with 2.
"""


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
