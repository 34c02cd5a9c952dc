"""Where mmtrain keeps what it has made and could make again: verdicts of probes, the demo's data."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(purpose: str) -> Path:
    """$XDG_CACHE_HOME/mmtrain/PURPOSE, by default ~/.cache/mmtrain/PURPOSE; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mmtrain" / purpose
