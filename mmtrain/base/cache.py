"""Folders for files that mmtrain can make again.

They hold verdicts of the probe, calibrations, the demo's data, exports for chatting, output of
`pipe:` shards, compiled layers, copies of remote shards while a run lasts, indexes of remote shards
and of shards in read-only folders, catalogues of data sets, and shapes by `mmtrain record`.
"""

import os
from pathlib import Path

from mmtrain.base.errors import UserError


def cache_folder(purpose: str) -> Path:
    """Return $XDG_CACHE_HOME/mmtrain/PURPOSE, by default ~/.cache/mmtrain/PURPOSE; it may not exist
    yet.
    """
    return user_cache() / "mmtrain" / purpose


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME, by default ~/.cache. Raises UserError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise UserError(
            f"user {os.getuid()} has no home folder, and HOME is not set: "
            "set XDG_CACHE_HOME to a folder for caches"
        ) from None
