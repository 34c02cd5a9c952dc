"""Files that somebody else may have written, read whole within limits: configurations and the JSON
of model folders.

A pipe, a device or a folder is refused instead of waited for; so is what is larger or nested deeper
than any such file.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mmtrain.base.errors import UserError

# Of a file of JSON. The index of 150,000 tensors, more than the largest models have, takes 14 MB;
# Python's objects take up to 25 times as much memory as their text.
MAX_JSON_BYTES = 25_000_000
# of lists and objects inside each other; model folders have 6. transformers copies them by
# recursion
MAX_DEPTH = 64
LONGEST_NUMBER = 100  # digits; Python refuses to read or print integers of more than 4,300


def open_file(path: Path) -> BinaryIO:
    """Open a file to read without waiting. Raises OSError, and UserError for a pipe or a device."""
    # Not blocking: a pipe without a writer would be waited for.
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115, returned
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise UserError(f"{path}: is a pipe or device. Write its content into a file")
    return stream


def refuse_lost_link(path: Path) -> None:
    """Raise UserError for a link whose target is missing, as an unfinished download leaves in the
    hub's cache.
    """
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{path}: is a link to {path.readlink()}, which is not there. "
            "Finish the download or copy"
        )


@contextlib.contextmanager
def opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """Open a file to read; `what` is the kind of file that errors ask for.

    Raises FileNotFoundError, and UserError for what is no file or cannot be read, also later, in
    the caller's block.
    """
    try:
        with open_file(path) as stream:
            yield stream
    except FileNotFoundError:
        refuse_lost_link(path)
        raise
    except (OSError, ValueError) as error:  # a ValueError for a null character in the path
        if getattr(error, "errno", None) == errno.EISDIR:
            raise UserError(f"{path}: is a folder; {what} is needed") from None
        raise UserError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None


def read_limited(path: Path, limit: int, what: str) -> bytes:
    """Return all bytes of a file, at most `limit`; `what` is the kind of file that errors ask for.

    Raises FileNotFoundError, and UserError for what is no file, cannot be read or is larger.
    """
    with opened(path, what) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(
            f"{path}: larger than {limit:,} bytes; {what} is needed, and none is so large"
        )
    return content


def parse_json(text: bytes) -> Any:
    """Return the content of JSON text in UTF-8. Raises ValueError for other text, and for deep
    nesting.
    """
    with contextlib.suppress(RecursionError):
        content = json.loads(text.decode("utf-8"), parse_int=_integer)
        level = [content]
        for _ in range(MAX_DEPTH + 1):
            level = [inner for outer in level for inner in _inside(outer)]
            if not level:
                return content
    raise ValueError(f"lists or objects are nested more than {MAX_DEPTH} deep")


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
