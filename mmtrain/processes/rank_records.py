"""What outlives a rank's process: where it was, in a small file that it shares, and its last words if it failed.

By them the launcher says who failed, where and why (see blame).
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import signal
import struct
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import UserError

PACKAGE = str(Path(__file__).parents[1])
RANK_PROCESS = str(Path(__file__).with_name("rank.py"))  # its frames are above those of what a rank was doing
CANNOT_GROW = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space, or ask for a larger quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f; some file systems have their own)",
}
LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|remote process exited|ncclRemoteError|"
    r"socket (closed|error)|(gloo|nccl).*timed? ?out|nccl.*remote error|timed out waiting for (recv|send)",
    re.IGNORECASE | re.DOTALL,
)
NCCL_REMEDIES = {  # what NCCL says of this machine (its src/init.cc and src/os/linux.cc), and what helps
    re.compile(
        r"Duplicate GPU detected.*|Multiple Ranks are using the same GPU[^.]*"
    ): "each rank needs a GPU of its own: CUDA_VISIBLE_DEVICES must name as "
    "many different ones as this machine has ranks, and ranks of another launcher or machine must not share them",
    re.compile(r"Error.*/dev/shm/nccl-.*"): "NCCL needs room in /dev/shm: see df -h /dev/shm; remove what dead "
    "processes have left there, or start the container with --shm-size=1g or more (--ipc=host)",
}
DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid[^\d]*(?P<pid>[\d, ]+)\)(?: is killed by signal: (?P<signal>[\w ]+))?"
)
OUT_OF_MEMORY = "if nobody did that, the machine ran out of memory: see dmesg"


class Whereabouts:
    """Step and current work of a rank in a file that survives the process; `path` None keeps them in memory."""

    _FORMAT = struct.Struct("<qi200s")

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, self._FORMAT.size)
        else:
            with path.open("w+b") as file:
                file.truncate(self._FORMAT.size)
                self._memory = mmap.mmap(file.fileno(), self._FORMAT.size)
        self.at(0, "start-up")

    def at(self, step: int, doing: object) -> None:
        """Record that this rank now does `doing` (an instruction, or words) in step `step`."""
        self.step, self.doing = step, str(doing)
        self._FORMAT.pack_into(self._memory, 0, step, os.getpid(), self.doing.encode()[:200])

    @classmethod
    def read(cls, path: Path) -> tuple[int, str] | None:
        """(step, doing) of the rank that wrote `path`, None when it never came to write it."""
        written = cls._written(path)
        return written and (written[0], written[2].rstrip(b"\0").decode(errors="replace"))

    @classmethod
    def process(cls, path: Path) -> int | None:
        """Process id of the rank that writes `path`, None when it never came to write it."""
        written = cls._written(path)
        return written and written[1]

    @classmethod
    def _written(cls, path: Path) -> tuple[int, int, bytes] | None:
        data = path.read_bytes() if path.exists() else b""
        return cls._FORMAT.unpack(data) if len(data) == cls._FORMAT.size else None


@dataclass(frozen=True)
class ErrorRecord:
    """Last words of a failed rank. kind: "user" (wrong input), "peer" (lost a peer, a victim) or "error"."""

    rank: int
    step: int
    doing: str
    kind: Literal["user", "peer", "error"]
    cause: str
    where: str
    time: float

    @classmethod
    def of(cls, error: BaseException, rank: int, progress: Whereabouts) -> Self:
        kind, cause = _kind_and_cause(error)
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.filename.startswith(PACKAGE) and f.filename != RANK_PROCESS] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
        return cls(rank, progress.step, progress.doing, kind, cause, where, time.time())

    def write(self, path: Path) -> None:
        """Write whole or not at all: the launcher may read at any time."""
        write_whole(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        return cls(**json.loads(path.read_text())) if path.exists() else None


def _kind_and_cause(error: BaseException) -> tuple[Literal["user", "peer", "error"], str]:
    name, text = type(error).__name__, str(error)
    if isinstance(error, UserError):
        return "user", text
    if isinstance(error, OSError) and error.errno in CANNOT_GROW:
        said = f"{error.filename or 'a file'} cannot be written: {error.strerror}; {CANNOT_GROW[error.errno]}"
        return "user", f"{said}, and start again: a run goes on from its newest checkpoint"
    for pattern, remedy in NCCL_REMEDIES.items():
        if isinstance(error, RuntimeError) and (found := pattern.search(text)):
            return "user", f"{found[0]}; {remedy}"
    if isinstance(error, RuntimeError) and (dead := _dead_worker(error)):
        return "error", dead
    # torch.distributed's errors by name: this module imports no torch. A DistBackendError may be of any kind.
    lost_peer = (
        isinstance(error, ConnectionError)
        or name in ("DistNetworkError", "DistStoreError")
        or (isinstance(error, RuntimeError) and LOST_PEER.search(text))
    )
    return "peer" if lost_peer else "error", f"{name}: {text}" if text else name


def _dead_worker(error: BaseException) -> str | None:
    """What became of a data worker, from torch's message about it, or the one that led to that."""
    found = None
    cause: BaseException | None = error
    while cause is not None and (matched := DEAD_WORKER.search(str(cause))):
        found = matched if found is None or matched["signal"] else found
        cause = cause.__cause__ or cause.__context__
    if found is None:
        return None
    worker, described = f"its data worker (process {found['pid']})", found["signal"]
    if described is None:
        return f"{worker} ended by itself; the log may say why"
    name = next((number.name for number in signal.Signals if signal.strsignal(number) == described), described)
    remedies = {"SIGKILL": OUT_OF_MEMORY, "SIGBUS": "/dev/shm may be full: see df -h /dev/shm"}
    return f"{worker} was killed by {name}" + (f" ({remedies[name]})" if name in remedies else "")
