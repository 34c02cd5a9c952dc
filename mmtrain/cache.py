"""Where mmtrain keeps what it has made: verdicts of probes, the demo's data, output of `pipe:` shards, and indexes of
shards whose folders cannot be written. All can be made again; an index made again believes its shard as it is then.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(purpose: str) -> Path:
    """$XDG_CACHE_HOME/mmtrain/PURPOSE, by default ~/.cache/mmtrain/PURPOSE; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mmtrain" / purpose
