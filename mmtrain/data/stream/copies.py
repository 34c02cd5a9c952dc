"""Copies of remote shards on this machine's disk, which one process fills ahead of their readers.

packs that this machine will read --`fetcher`, a process--> ranges of shards, by first need
    --> sparse files, each range at its own offset --Reader: pread, CRC32--> samples

A reader takes bytes as there when their checksum is right, so a killed process leaves nothing to
mend. The folder of a run's copies also holds

    readers   two int64 for each reader: the pack that it reads, microseconds that it has waited
    damaged   a line for each member whose bytes are wrong in the store: offset, URL
    failed    why the fetcher has given up
    stats     JSON: bytes and requests so far, seconds that they took, bytes that the copies take
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy import ndarray

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError
from mmtrain.base.printing import bytes_text
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.order import Position
from mmtrain.data.stream.stored import StoredData, StoredSet

NOT_BEGUN = -1  # pack of a reader that has read held-out samples at most


@dataclass(frozen=True)
class FetchTask:
    """The samples that readers of this machine will read, in order."""

    config: RunConfig
    data: StoredData
    held_out: tuple[Sequence[StoredSet], ndarray]  # sets, and the samples' numbers in their catalog
    replicas: Sequence[int]  # that read on this machine
    share: int  # packs of one replica in each step
    start: Position
    first_step: int
    max_steps: int
    bound: int  # bytes that copies may take, those on their way included


class Copies:
    """A run's copies on one machine. This rank's readers are numbered from `first_reader` on."""

    def __init__(self, folder: Path, first_reader: int = 0) -> None:
        self.folder = folder
        self._first_reader = first_reader

    def path(self, url: str) -> Path:
        return self.folder / f"{hashlib.sha256(url.encode()).hexdigest()[:24]}.tar"

    def _opened(self, name: str, mode: str) -> BinaryIO:
        try:
            return (self.folder / name).open(mode)
        except FileNotFoundError:
            raise UserError(
                f"{self.folder}: the run's copies of remote shards were removed. "
                "Start again: a run resumes from its newest checkpoint"
            ) from None

    def note(self, reader: int, pack: int, waited: float) -> None:
        """Note the pack that a reader of this rank reads next, and the seconds that it has waited.

        Packs before it are no longer needed by this reader.
        """
        entry = np.array([pack, round(waited * 1e6)], np.int64)
        with self._opened("readers", "r+b") as file:
            file.seek((self._first_reader + reader) * entry.nbytes)
            file.write(entry.tobytes())

    def readers(self) -> ndarray:
        """Return (readers, 2) int64: the pack that each reads, microseconds that it has waited."""
        with self._opened("readers", "rb") as file:
            return np.fromfile(file, np.int64).reshape(-1, 2)

    def is_damaged(self, url: str, offset: int) -> bool:
        """Tell whether the store has wrong bytes of a member.

        Raises UserError if the fetcher has given up.
        """
        with contextlib.suppress(FileNotFoundError):
            raise UserError((self.folder / "failed").read_text())
        with contextlib.suppress(FileNotFoundError):
            return f"{offset} {url}" in (self.folder / "damaged").read_text().split("\n")
        return False

    def give_up(self, why: str) -> None:
        """Tell readers why no more is fetched. A full disk has room for that without the copies."""
        with contextlib.suppress(FileNotFoundError):  # a folder that was removed
            try:
                write_whole(self.folder / "failed", why)
            except OSError:
                for copy in self.folder.glob("*.tar"):
                    copy.unlink()
                write_whole(self.folder / "failed", why)

    def stats(self) -> dict[str, Any]:
        """Return the fetcher's stats, and the seconds that all readers have waited."""
        with self._opened("stats", "rb") as file:
            stats = json.load(file)
        return {**stats, "waited_seconds": float(self.readers()[:, 1].sum()) / 1e6}


def summary_of(stats: Mapping[str, float]) -> str:
    """Describe the stats of a machine's copies for people."""
    rate = stats["fetched_bytes"] / max(stats["seconds"], 1e-3) / 1e6
    return (
        f"shards: {bytes_text(stats['fetched_bytes'])} fetched in {stats['requests']:,} requests, "
        f"{rate:,.1f} MB/s; waited for them {stats['waited_seconds']:,.1f} s; "
        f"copies take {bytes_text(stats['cache_bytes'])}"
    )
