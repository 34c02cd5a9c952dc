"""Find how ranks failed, and which first: by progress files, error records, exit codes and the log.

torch's agent reports the process that ended first, which may be a victim ("Connection closed by
peer"). The root cause is, in this order: a process that ended without an error record (killed by a
signal, say), the earliest error that is not the loss of a peer, the earliest loss of a peer.
"""

import contextlib
import errno
import json
import mmap
import re
import signal
import struct
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

from mmtrain.base.durable import write_whole
from mmtrain.base.errors import SHARED_MEMORY_IS_FULL, UserError
from mmtrain.runtime.job import Job

PACKAGE = str(Path(__file__).parents[1])
# its frames are above those of what a rank was doing
RANK_PROCESS = str(Path(__file__).with_name("rank.py"))
CANNOT_GROW = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|remote process "
    r"exited|ncclRemoteError|"
    r"socket (closed|error)|(gloo|nccl).*timed? ?out|nccl.*remote error|timed out waiting "
    r"for (recv|send)",
    re.IGNORECASE | re.DOTALL,
)
NCCL_LACKS_ROOM = re.compile(r"Error.*/dev/shm/nccl-.*")  # NCCL's src/os/linux.cc
# by strsignal's name
DEAD_WORKER = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([\w ]+)")
WHY_KILLED = {  # by signal
    signal.SIGKILL: "if nobody killed it, the machine ran out of memory: see dmesg",
    signal.SIGBUS: SHARED_MEMORY_IS_FULL,
}
# A rank that has waited too long for another one aborts in C++: "[rank3]:[E1218 20:27:21
# ProcessGroupNCCL.cpp] ...", with the words of ProcessGroupNCCL or those of ProcessGroupNCCL2.
WATCHDOG = re.compile(
    rb"\[rank(\d+)\]:.*(Watchdog caught collective operation timeout.*|Operation timed out after.*)"
)


class RankProgress:
    """Step and current work of a rank, in a file that survives it (None: in memory alone)."""

    _FORMAT = struct.Struct("<q200s")

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, self._FORMAT.size)
        else:
            with path.open("w+b") as file:
                file.truncate(self._FORMAT.size)
                self._memory = mmap.mmap(file.fileno(), self._FORMAT.size)
        self.at(0, "start-up")

    def at(self, step: int, work: object) -> None:
        """Record that this rank now does `work`, an instruction or words, in step `step`."""
        self.step = step
        self.work = str(work)
        self._FORMAT.pack_into(self._memory, 0, step, self.work.encode()[:200])

    @classmethod
    def read(cls, path: Path) -> tuple[int, str]:
        """Return (step, work) of the rank that wrote `path`, or would have written it."""
        data = path.read_bytes() if path.exists() else b""
        if len(data) != cls._FORMAT.size:
            return 0, "start-up"
        step, work = cls._FORMAT.unpack(data)
        return step, work.rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True)
class ErrorRecord:
    """Record of a failed rank; `kind`: "user" (wrong input), "peer" (a lost rank) or "error"."""

    rank: int
    step: int
    work: str
    kind: Literal["user", "peer", "error"]
    cause: str
    where: str
    time: float

    @classmethod
    def of(cls, error: BaseException, rank: int, progress: RankProgress) -> Self:
        kind, cause = _kind_and_cause(error)
        where = ""
        is_own = False
        for frame in traceback.extract_tb(error.__traceback__):
            # the last frame of our own code, else the last of any
            in_package = frame.filename.startswith(PACKAGE) and frame.filename != RANK_PROCESS
            if in_package or not is_own:
                where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
            is_own = is_own or in_package
        return cls(rank, progress.step, progress.work, kind, cause, where, time.time())

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def message(self, job: Job) -> str:
        """Return the line for the user; a UserError speaks for itself."""
        if self.kind == "user":
            return self.cause
        rank = _name(job, self.rank)
        place = _at(self.step, self.work)
        if self.kind == "peer":
            return f"{rank} lost its connection to another rank {place}: {self.cause}"
        where = f" ({self.where})" if self.where else ""
        return f"{rank} failed {place}: {self.cause}{where}"


@dataclass(frozen=True)
class Failure:
    """A run that did not reach its end: the launcher's exit code, and one message for the user."""

    exit_code: int
    message: str


def root_cause(job: Job, records: Path, exit_codes: Mapping[int, int], log_begins: int) -> Failure:
    """Return the failure to report, of this node's ranks.

    `records` is the folder of progress files and error records; the run wrote to its log from byte
    `log_begins` on.
    """
    read = (ErrorRecord.read(records / f"error-{rank}") for rank in job.local_ranks)
    errors = [error for error in read if error is not None]
    timed_out = _ended_by_watchdog(job.log, log_begins)
    for rank in sorted(exit_codes.keys() - {error.rank for error in errors}):
        if exit_codes[rank] != -signal.SIGABRT or rank not in timed_out:
            code = exit_codes[rank]
            end = f"ended with exit code {code}"
            if code < 0:
                end = f"was killed by {signal.Signals(-code).name}"
            if -code in WHY_KILLED:
                end += f" ({WHY_KILLED[-code]})"
            return Failure(1, f"{last_seen(job, records, rank, end)}\nlog: {job.log}")
        step, work = RankProgress.read(records / f"progress-{rank}")
        errors.append(
            ErrorRecord(
                rank,
                step,
                work,
                "peer",
                timed_out[rank],
                "",
                time.time(),
            )
        )
    first = min(errors, key=lambda error: (error.kind == "peer", error.time))
    if first.kind == "user":
        return Failure(2, first.cause)
    lines = [first.message(job)]
    if first.kind == "peer":
        if job.nodes > 1:
            lines.append(
                "No rank of this node failed first. See the other launchers, then the network"
            )
        lines += [last_seen(job, records, rank) for rank in job.local_ranks]
    return Failure(1, "\n".join([*lines, f"log: {job.log}"]))


def last_seen(job: Job, records: Path, rank: int, what: str = "was") -> str:
    """Return a line on a rank: what happened to it ("was killed by SIGKILL"), in which step, at
    what work.
    """
    return f"{_name(job, rank)} {what} {_at(*RankProgress.read(records / f'progress-{rank}'))}"


def _name(job: Job, rank: int) -> str:
    return f"rank {rank} ({job.places[rank]})"


def _at(step: int, work: str) -> str:
    return f"in step {step} (counted from 0), at {work}"


def _ended_by_watchdog(log: Path, begin: int) -> dict[int, str]:
    """Return the ranks that waited longer than NCCL's timeout, with its watchdog's words."""
    written = b""
    with contextlib.suppress(OSError), log.open("rb") as file:  # its folder may have been removed
        file.seek(begin)
        written = file.read()
    return {int(rank): text.decode(errors="replace") for rank, text in WATCHDOG.findall(written)}


def _kind_and_cause(error: BaseException) -> tuple[Literal["user", "peer", "error"], str]:
    name = type(error).__name__
    text = str(error)
    if isinstance(error, UserError):
        return "user", text
    if isinstance(error, OSError) and error.errno in CANNOT_GROW:
        cause = (
            f"{error.filename or 'a file'} cannot be written: {error.strerror}; "
            f"{CANNOT_GROW[error.errno]}, and start again: a run resumes from its newest checkpoint"
        )
        return "user", cause
    if isinstance(error, RuntimeError) and (lacks_room := NCCL_LACKS_ROOM.search(text)):
        return "user", f"{lacks_room[0]}; {SHARED_MEMORY_IS_FULL}"
    # Where torch notices the worker's end in another way, the message that names the signal is that
    # of the cause.
    if worker := DEAD_WORKER.search(f"{error}\n{error.__cause__ or error.__context__}"):
        end = worker[2]
        remedy = "the log may say why"
        for number in signal.Signals:
            if signal.strsignal(number) == worker[2]:
                end = number.name
                remedy = WHY_KILLED.get(number, remedy)
        return (
            "error",
            f"its data worker (process {worker[1]}) was killed by {end} ({remedy})",
        )
    # torch.distributed's errors by name: this module imports no torch. A DistBackendError may be of
    # any kind.
    lost_peer = (
        isinstance(error, ConnectionError)
        or name in ("DistNetworkError", "DistStoreError")
        or (isinstance(error, RuntimeError) and LOST_PEER.search(text))
    )
    cause = f"{name}: {text}" if text else name
    return ("peer" if lost_peer else "error"), cause
