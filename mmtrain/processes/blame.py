"""Who failed first, where and why: from ranks' last words, exit codes and the log to one message for the user.

torch's agent reports the process that ended first, which may be a victim ("Connection closed by peer"). The true origin
is, in this order: a process that ended without last words (killed by a signal, say), the earliest error that is not
the loss of a peer, the earliest loss of a peer. That holds because a failing rank stays a while, connections open.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmtrain.processes.job import Job
from mmtrain.processes.rank_records import OUT_OF_MEMORY, ErrorRecord, Whereabouts

FORK_SERVER_IS_GONE = 255  # the exit code that multiprocessing gives to its children then (popen_forkserver.py)
FORK_SERVER_ENDED = f"the process that all ranks were forked from was killed ({OUT_OF_MEMORY})"
# A rank that has waited too long for another one aborts in C++: "[rank3]:[E1218 20:27:21 ProcessGroupNCCL.cpp] ...",
# with the words of ProcessGroupNCCL or those of ProcessGroupNCCL2.
WATCHDOG = re.compile(rb"\[rank(\d+)\]:.*(Watchdog caught collective operation timeout.*|Operation timed out after.*)")


@dataclass(frozen=True)
class Failure:
    """How a run ended that did not reach its end: exit code of the launcher and the one message for the user."""

    exit_code: int
    message: str


def describe(job: Job, record: ErrorRecord) -> str:
    """The message of a rank's failure; a UserError speaks for itself."""
    if record.kind == "user":
        return record.cause
    what = "lost its connection to another rank" if record.kind == "peer" else "failed"
    where = f" ({record.where})" if record.where and record.kind == "error" else ""
    return f"{_name(job, record.rank)} {what} {_at(record.step, record.doing)}: {record.cause}{where}"


def find_origin(
    job: Job, records: Path, exit_codes: Mapping[int, int], log_begins: int, *, fork_server_lives: bool
) -> Failure:
    """The failure to report, of the ranks on this node; the exit codes are those that torch's agent saw first.

    `records` is the folder of the ranks' progress and last words; the run wrote to its log from byte `log_begins` on.
    """
    found = [ErrorRecord.read(records / f"error-{rank}") for rank in job.local_ranks]
    errors = [error for error in found if error is not None]
    waited = _ended_by_watchdog(job.log, log_begins)
    for rank in sorted(exit_codes.keys() - {error.rank for error in errors}):  # it had no time for last words
        code = exit_codes[rank]
        if code == -signal.SIGABRT and rank in waited:
            step, doing = Whereabouts.read(records / f"progress-{rank}") or (0, "start-up")
            errors.append(ErrorRecord(rank, step, doing, "peer", waited[rank], "", time.time()))
            continue
        if code == FORK_SERVER_IS_GONE and not job.on_gpus and not fork_server_lives:
            return Failure(1, f"{FORK_SERVER_ENDED}; {whereabouts(job, records, rank)}\nlog: {job.log}")
        return Failure(1, f"{whereabouts(job, records, rank, _end(code))}\nlog: {job.log}")
    first = min(errors, key=lambda error: (error.kind == "peer", error.time))
    if first.kind == "user":
        return Failure(2, first.cause)
    lines = [describe(job, first)]
    if first.kind == "peer":
        if job.nodes > 1:
            lines.append(
                "no rank of this node failed by itself: the launcher of another node names the cause; if that says the "
                "same, the network between them is at fault"
            )
        lines += [whereabouts(job, records, rank) for rank in job.local_ranks]
    return Failure(1, "\n".join([*lines, f"log: {job.log}"]))


def whereabouts(job: Job, records: Path, rank: int, what: str = "was") -> str:
    """`what` happened to a rank ("was killed by SIGKILL"), or where it was: in which step, at what work."""
    seen = Whereabouts.read(records / f"progress-{rank}")
    if seen is None:
        return f"{_name(job, rank)} {'had not begun' if what == 'was' else f'{what} before'} its first step"
    return f"{_name(job, rank)} {what} {_at(*seen)}"


def _name(job: Job, rank: int) -> str:
    return f"rank {rank} ({job.places[rank]})"


def _at(step: int, doing: str) -> str:
    return f"in step {step} (counted from 0), at {doing}"


def _ended_by_watchdog(log: Path, begin: int) -> dict[int, str]:
    """Ranks that waited longer than NCCL's timeout, and what its watchdog wrote to `log`, from byte `begin` on."""
    written = b""
    with contextlib.suppress(OSError), log.open("rb") as file:  # its folder may have been removed
        file.seek(begin)
        written = file.read()
    return {int(rank): text.decode(errors="replace") for rank, text in WATCHDOG.findall(written)}


def _end(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}{f' ({OUT_OF_MEMORY})' if exit_code == -signal.SIGKILL else ''}"
