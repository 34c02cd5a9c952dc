"""Where mmtrain keeps what it has made: verdicts of probes, calibrations, the demo's data, exports that were chatted
with, output of `pipe:` shards, and indexes of shards whose folders cannot be written. All can be made again; an index
made again believes its shard as it is then.
"""

from __future__ import annotations

import os
from pathlib import Path

from mmtrain.base.errors import UserError


def cache_folder(purpose: str) -> Path:
    """$XDG_CACHE_HOME/mmtrain/PURPOSE, by default ~/.cache/mmtrain/PURPOSE; it may not exist yet."""
    return user_cache() / "mmtrain" / purpose


def user_cache() -> Path:
    """$XDG_CACHE_HOME, by default ~/.cache; raises UserError for a user without a home, as containers have them."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise UserError(
            f"user {os.getuid()} has no home folder, and HOME is not set: set XDG_CACHE_HOME to a folder for caches"
        ) from None
