"""Starts this node's ranks through torch's elastic agent, waits, ends everything, and finds out who failed first.

The agent reports the process that ended first, which may be a victim ("Connection closed by peer"). The true origin
is, in this order: a process that ended without last words (killed by a signal, say), the earliest error that is not
the loss of a peer, the earliest loss of a peer. That holds because a failing rank stays a while, connections open.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import multiprocessing.forkserver
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmtrain.base.console_stream import ConsoleStream
from mmtrain.base.errors import UserError
from mmtrain.processes.rank import (
    ENDING_SIGNALS,
    STOP_FILE,
    PrefixedLog,
    Rank,
    log_name,
    redirect_file_descriptor,
    redirect_python_output,
    run_rank,
)
from mmtrain.processes.rank_records import OUT_OF_MEMORY, ErrorRecord, Progress
from mmtrain.processes.stop import SECONDS_TOGETHER, STOP_SIGNALS, Asked, StopFile

PR_SET_CHILD_SUBREAPER = 36
FORK_SERVER_IS_GONE = 255  # the exit code that multiprocessing gives to its children then (popen_forkserver.py)
FORK_SERVER_ENDED = (
    f"and all others ended with the process that they were forked from, which was killed ({OUT_OF_MEMORY}),"
)
# A rank that has waited too long for another one aborts in C++: "[rank3]:[E1218 20:27:21 ProcessGroupNCCL.cpp:629] ..."
WATCHDOG = re.compile(rb"\[rank(\d+)\]:.*(Watchdog caught collective operation timeout.*)")
LONGEST_TEMPORARY_FOLDER = 70  # bytes: a socket's path has 107 at most, of which multiprocessing adds 32
STOPPED = 3  # exit code of a run that a signal has ended in good order, everything saved


@dataclass(frozen=True)
class Job:
    """The processes of a run. `places[r]` is what messages call global rank r's place in the pipeline."""

    places: tuple[str, ...]
    folder: Path
    threads: int
    timeout_seconds: int
    start_method: Literal["forkserver", "spawn"] = "forkserver"
    nodes: int = 1
    node: int = 0
    endpoint: str | None = None
    saves_when_asked: bool = False  # SIGTERM and SIGUSR1 ask its ranks to save and end; otherwise they end it at once

    @property
    def log(self) -> Path:
        return self.folder / log_name(self.node)

    @property
    def local_ranks(self) -> int:
        return len(self.places) // self.nodes

    def describe(self, record: ErrorRecord) -> str:
        """The message of a rank's failure; a UserError speaks for itself."""
        if record.kind == "user":
            return record.cause
        rank = f"rank {record.rank} ({self.places[record.rank]})"
        what = "lost its connection to another rank" if record.kind == "peer" else "failed"
        where = f" ({record.where})" if record.where and record.kind == "error" else ""
        return f"{rank} {what} {_at(record.step, record.doing)}: {record.cause}{where}"


@dataclass(frozen=True)
class Failure:
    """How a run ended that did not reach its end: exit code of the launcher and the one message for the user."""

    exit_code: int
    message: str


@contextlib.contextmanager
def output_to_log(log: Path) -> Iterator[None]:
    """Send this process's own chatter (imports, agent, C++ on stderr) to `log`; ranks still inherit the real stdout."""
    stdout, stderr, stderr_copy = sys.stdout, sys.stderr, os.dup(2)
    sys.stdout.flush()
    writer = PrefixedLog(log, "launcher")
    redirect_file_descriptor(2, log)
    redirect_python_output(writer)
    try:
        yield
    finally:
        writer.finish()
        sys.stdout, sys.stderr = stdout, stderr
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def set_rank_environment(threads: int, *, on_gpus: bool) -> None:
    """Set what libraries read once, when they are imported: before any of those imports, for this process's ranks."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizers warns, or hangs, in forked data workers
    if on_gpus:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue a stream: none waits for another's work
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"


def start_fork_server() -> None:
    """Begin to import what ranks need in a process from which they are then forked (CPU only): 4 s earlier than spawn.

    Forking from the launcher itself hung one start in ten: the agent's threads hold locks that a fork copies. Call it
    when environment and output are as the ranks shall inherit them. Raises UserError where no temporary folder can be
    used.
    """
    _use_short_temporary_folder()
    multiprocessing.set_forkserver_preload(["mmtrain.processes.fork_server"])
    multiprocessing.forkserver.ensure_running()


def _use_short_temporary_folder() -> None:
    """Where TMPDIR is too long for the sockets that multiprocessing makes below it, take the system's, ranks too."""
    try:
        given = tempfile.gettempdir()  # passes over a TMPDIR that is missing or read-only
    except FileNotFoundError as error:
        raise UserError(f"{error.strerror}: set TMPDIR to a folder that can be written") from error
    if len(os.fsencode(given)) <= LONGEST_TEMPORARY_FOLDER:
        return
    usable = (name for name in ("/tmp", "/var/tmp") if os.access(name, os.W_OK | os.X_OK))
    short = next(usable, None)
    if short is None:
        raise UserError(
            f"TMPDIR={given} is too long for the sockets of the ranks: set it to a folder of at most "
            f"{LONGEST_TEMPORARY_FOLDER} characters"
        )
    tempfile.tempdir = os.environ["TMPDIR"] = short


def run_ranks(target: Callable[[Rank], str | None], job: Job) -> Failure | None:
    """Run `target`, which must be picklable, in every local rank of `job` until all return or one fails.

    `target` returns None at the run's end, or what there is to say of one that was stopped before. If the job
    `saves_when_asked`, the first SIGTERM or SIGUSR1 asks for that, and a second SIGTERM ends the ranks at once. No
    process that a rank started is left, however it ends.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mmtrain.processes.rendezvous import BACKEND, THIS_MACHINE

    for handler in logging.getLogger("torch.distributed").handlers:
        # torch's own formatter imports torch._dynamo to write down that a rank has died: 2 to 6 s before the job ends.
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    # A signal that the caller ignores stays ignored: nohup's SIGHUP would end the run when the terminal closes.
    at_once = ENDING_SIGNALS if job.saves_when_asked else (*ENDING_SIGNALS, *STOP_SIGNALS)
    signals = [number for number in at_once if signal.getsignal(number) is not signal.SIG_IGN]
    earlier_children = set(_children(os.getpid()))
    if sys.platform == "linux":  # what a dead rank started becomes our child, to be ended below
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    log_begins = job.log.stat().st_size if job.log.exists() else 0
    with tempfile.TemporaryDirectory(prefix="mmtrain-") as name, _handlers_restored([*signals, *STOP_SIGNALS]):
        records = Path(name)
        stop_file = StopFile(records / STOP_FILE)
        console = ConsoleStream(1)  # sys.stdout is the log

        def ask(number: int, frame: object) -> None:
            asked, seconds = stop_file.read()
            if number == signal.SIGTERM and asked is not Asked.NOTHING and seconds > SECONDS_TOGETHER:
                stop_file.ask(Asked.END_NOW)
                raise SignalException("a second SIGTERM", signal.SIGTERM)
            if asked is Asked.NOTHING:
                stop_file.ask(Asked.SAVE_AND_END)
                console.write(f"{signal.Signals(number).name}: the run saves after the step it is in, and ends\n")

        class Logs(DefaultLogsSpecs):
            """torch asks it for the ranks' outputs right before it starts them: from then on they can be asked to stop.

            Before, a signal ends this process at once: no Python handler runs while it waits in C++ for other nodes.
            """

            def reify(self, *arguments: Any, **options: Any) -> Any:
                if job.saves_when_asked:
                    for number in STOP_SIGNALS:
                        signal.signal(number, ask)
                return super().reify(*arguments, **options)

        config = LaunchConfig(
            min_nodes=job.nodes,
            max_nodes=job.nodes,
            nproc_per_node=job.local_ranks,
            run_id="mmtrain",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=job.start_method,
            logs_specs=Logs(log_dir=str(records / "elastic")),
            signals_to_handle=",".join(number.name for number in signals),
            rdzv_backend=BACKEND,
            rdzv_endpoint=job.endpoint if job.nodes > 1 else THIS_MACHINE,
            rdzv_configs={"rank": job.node, "timeout": job.timeout_seconds},
        )
        entry = functools.partial(run_rank, target, job.folder, threads=job.threads, records=records)
        try:
            with _stopped_ranks_continued(records):
                ends = elastic_launch(config, _call)(entry)
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return _origin(job, records, exit_codes, _ended_by_watchdog(job.log, log_begins))
        except SignalException as error:
            return _stopped(job, records, error.sigval)
        except UserError as error:
            return Failure(2, str(error))
        except (RendezvousError, DistError) as error:
            where = "the launcher's store was lost"
            if job.nodes > 1:
                where = f"the {job.nodes} nodes did not come together at {job.endpoint}"
            return Failure(1, f"{where}: {error}")
        finally:
            for number in (*signals, *STOP_SIGNALS):
                signal.signal(number, signal.SIG_IGN)
            _end_children(earlier_children)
            console.drain()
    stopped = next(iter(ends.values()))
    return None if stopped is None else Failure(STOPPED, stopped)


def _call(entry: Callable[[], str | None]) -> str | None:
    """The agent wants a function with a name."""
    return entry()


@contextlib.contextmanager
def _handlers_restored(signals: list[signal.Signals]) -> Iterator[None]:
    """Default handlers while the agent waits for other nodes, which no Python handler can interrupt; then the old ones.

    torch sets its own handlers when it starts the ranks.
    """
    earlier = {number: signal.signal(number, signal.SIG_DFL) for number in dict.fromkeys(signals)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _stopped_ranks_continued(records: Path) -> Iterator[None]:
    """In the block a stopped rank (SIGSTOP, a debugger) that was told to end is continued, so that it does (Linux).

    A signal waits while a process is stopped, and torch's agent would wait for it, 30 s long.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1):
            for file in records.glob("progress-*"):
                process = Progress.process(file)
                if process and _is_stopped_and_told_to_end(process):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGCONT)

    threading.Thread(target=watch, name="stopped ranks", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _is_stopped_and_told_to_end(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    pending = sum(int(mask, 16) for mask in re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", status, re.MULTILINE))
    told = any(pending >> (number - 1) & 1 for number in (*ENDING_SIGNALS, signal.SIGTERM))
    return told and re.search(r"^State:\s*[Tt]", status, re.MULTILINE) is not None


def _origin(job: Job, records: Path, exit_codes: Mapping[int, int], waited: Mapping[int, str]) -> Failure:
    """The failure to report, of the ranks on this node; the exit codes are those that the agent saw first.

    `waited` are the ranks that NCCL's watchdog ended, and its words.
    """
    found = [ErrorRecord.read(records / f"error-{rank}") for rank in range(len(job.places))]
    errors = [error for error in found if error is not None]
    silent = {rank: code for rank, code in exit_codes.items() if not (records / f"error-{rank}").exists()}
    for rank, code in silent.items():  # it had no time for last words
        if code == FORK_SERVER_IS_GONE and job.start_method == "forkserver" and not _fork_server_lives():
            return Failure(1, f"{_whereabouts(job, records, rank, FORK_SERVER_ENDED)}\n{_log_line(job)}")
        if code == -signal.SIGABRT and rank in waited:
            step, doing = Progress.read(records / f"progress-{rank}") or (0, "start-up")
            errors.append(ErrorRecord(rank, step, doing, "peer", waited[rank], "", time.time()))
        else:
            return Failure(1, f"{_whereabouts(job, records, rank, _end(code))}\n{_log_line(job)}")
    first = min(errors, key=lambda error: (error.kind == "peer", error.time))
    if first.kind == "user":
        return Failure(2, first.cause)
    lines = [job.describe(first)]
    if first.kind == "peer":
        if job.nodes > 1:
            lines.append(
                "no rank of this node failed by itself: the launcher of another node names the cause; if that says the "
                "same, the network between them is at fault"
            )
        ranks = range(job.node * job.local_ranks, (job.node + 1) * job.local_ranks)
        lines += [_whereabouts(job, records, rank, "was") for rank in ranks]
    return Failure(1, "\n".join([*lines, _log_line(job)]))


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
    end = f"was killed by {signal.Signals(-exit_code).name}"
    if exit_code == -signal.SIGKILL:
        end += f" ({OUT_OF_MEMORY})"
    return end


def _stopped(job: Job, records: Path, number: signal.Signals) -> Failure:
    by = "Ctrl-C" if number == signal.SIGINT else number.name
    at = _whereabouts(job, records, job.node * job.local_ranks, "was")
    return Failure(128 + number, f"stopped by {by}; {at}\n{_log_line(job)}")


def _whereabouts(job: Job, records: Path, rank: int, what: str) -> str:
    seen = Progress.read(records / f"progress-{rank}")
    at = "before its first step" if seen is None else _at(*seen)
    return f"rank {rank} ({job.places[rank]}) {what} {at}"


def _at(step: int, doing: str) -> str:
    return f"in step {step} (counted from 0), at {doing}"


def _log_line(job: Job) -> str:
    return f"log: {job.log}"


def _children(parent: int) -> list[int]:
    """Living direct children of a process, by /proc; none where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, ppid = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _end_children(spared: set[int]) -> None:
    """Kill every child of this process, and what they leave to us, except `spared` and multiprocessing's trackers.

    A resource tracker ends by itself, after freeing the shared memory of its dead processes.
    """
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        left = [pid for pid in _children(os.getpid()) if pid not in spared and not _is_tracker(pid)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _is_tracker(pid: int) -> bool:
    return _runs(pid, b"resource_tracker")


def _fork_server_lives() -> bool:
    return any(_runs(pid, b"multiprocessing.forkserver") for pid in _children(os.getpid()))


def _runs(pid: int, module: bytes) -> bool:
    try:
        return module in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
