"""A folder that is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from mmtrain.base.durable import whole_folder
from mmtrain.base.errors import UserError


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end of the block; after an error nothing of it is left.

    Raises UserError where `out` is there already (an empty folder is taken), and for a full disk.
    """
    out = out.expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty; choose a new folder, or move that one away")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as unfinished:
            yield unfinished
    except Exception as error:  # tokenizers, which write files too, have exceptions of their own for a full disk
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise UserError(
                f"{out}: no space is left on its disk; nothing was left there. Make room, or choose another disk"
            ) from error
        if isinstance(error, OSError):
            raise UserError(f"{out}: cannot be written: {error}") from error
        raise


def require_space(folder: Path, size: int) -> None:
    """Raise UserError where `size` bytes do not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(
            f"{folder.parent}: {size / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; make room, or choose "
            "another disk or a smaller --dtype"
        )
