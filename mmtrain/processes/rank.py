"""One rank's process: its place in the run, where its output goes, and its last words when it fails.

A rank never prints: everything that it or a library writes, C++ included, goes to the run's log, and rank 0 gets a
stream to the console for progress. What outlives it for the launcher is in rank_records.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from mmtrain.base.console_stream import ConsoleStream
from mmtrain.base.printing import printable, say, show_error
from mmtrain.processes.rank_records import ErrorRecord, Progress
from mmtrain.processes.stop import StopRequest

Result = TypeVar("Result")

PR_SET_PDEATHSIG = 1
STOP_FILE = "stop"  # among the launcher's records
ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # at once; SIGTERM and SIGUSR1 are stop.STOP_SIGNALS

# A failed rank stays this long, its connections open, so that the launcher can end its peers before they fail in turn.
SECONDS_AFTER_FAILURE = 1.0
# A rank that only lost a peer stays longer: the launcher must find that peer first, not this victim.
SECONDS_AFTER_LOST_PEER = 3.0


@dataclass(frozen=True)
class Rank:
    """What one process of a run knows about its place. `console` is None everywhere but on rank 0."""

    rank: int
    world_size: int
    local_rank: int
    device: str
    folder: Path
    console: TextIO | None
    progress: Progress
    stop: StopRequest

    def tell(self, *messages: str) -> None:
        """Print messages for the user, on rank 0."""
        if self.console is not None:
            say(*messages, stream=self.console)


class PrefixedLog(io.TextIOWrapper):
    """A log that several processes append to: whole lines, each with the writer's name in front.

    A line that cannot be written (a full disk, an I/O error) is lost: a log does not decide how a run ends.
    """

    def __init__(self, path: Path, name: str) -> None:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        super().__init__(io.BufferedWriter(io.FileIO(file, "ab")), encoding="utf-8", errors="replace")
        self._prefix = f"[{name}] "
        self._partial = ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        with contextlib.suppress(OSError):
            for line in lines:
                # of a progress bar, which redraws with carriage returns, only the last state of the line is kept
                super().write(self._prefix + printable(line.rstrip("\r").rsplit("\r", 1)[-1]) + "\n")
            if lines:
                super().flush()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def finish(self) -> None:
        """Write a last line that has no end."""
        if self._partial:
            self.write("\n")


def redirect_python_output(log: PrefixedLog) -> None:
    """Send print, warnings and every logging handler that keeps a standard stream of this process to `log`.

    Only what a handler keeps is replaced, and nothing of it is called: some have a `stream` that cannot be set, such as
    logging.lastResort, which follows sys.stderr by itself, and others brought streams of any kind.
    """
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        kept = getattr(handler, "__dict__", {}).get("stream")
        if isinstance(kept, PrefixedLog) or (kept is not None and any(kept is stream for stream in streams)):
            vars(handler)["stream"] = log
    sys.stdout = sys.stderr = log


def redirect_file_descriptor(number: int, path: Path) -> None:
    """Send what is written to file descriptor `number`, by C++ too, to the end of the file `path`."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(file, number)
    os.close(file)


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends: no orphan outlives kill -9 (Linux).

    `parent` is that one's process id, where it is known: if it has died before this call, this process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def run_rank(
    target: Callable[[Rank], Result],
    folder: Path,
    *,
    threads: int,
    records: Path | None = None,
    describe: Callable[[ErrorRecord], str] | None = None,
) -> Result:
    """Be one rank: RANK, WORLD_SIZE and LOCAL_RANK of the environment say which. Returns what `target` returns.

    A failure ends the process: exit code 2 for a UserError, 1 otherwise. `records` is where the launcher looks for
    progress and error records, and where it asks to stop; without it (torchrun is the launcher) `describe` makes the
    message that this rank prints itself.
    """
    die_with_parent()
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)  # it died before the kernel was asked
    for number in ENDING_SIGNALS:
        # Python's handlers would wait for the main thread, which may hang in a collective. What nohup ignores stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    stop = StopRequest(records / STOP_FILE if records else None)
    stop.listen()
    _keep_to_this_machine()

    rank = int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / log_name(int(os.environ.get("GROUP_RANK", "0")))
    console = ConsoleStream(1) if rank == 0 else None
    errors = ConsoleStream(2)
    log = PrefixedLog(log_path, f"rank {rank}")
    for number in (1, 2):
        redirect_file_descriptor(number, log_path)
    redirect_python_output(log)
    faulthandler.enable(file=2)

    progress = Progress(records / f"progress-{rank}" if records else None)
    try:
        me = _rank(rank, folder, console, progress, stop, threads)
        print(f"process {os.getpid()} on {socket.gethostname()}, {me.device}, threads {threads}")
        result = target(me)
    except BaseException as error:  # this is the process's outermost frame: nothing above could report it
        record = ErrorRecord.of(error, rank, progress)
        if records:
            record.write(records / f"error-{rank}")
        traceback.print_exc()
        log.finish()
        time.sleep(SECONDS_AFTER_LOST_PEER if record.kind == "peer" else SECONDS_AFTER_FAILURE)
        if console is not None:
            console.drain()
        if describe:
            time.sleep(seconds_before_message(rank))
            show_error(f"{describe(record)}\nlog: {log_path}", errors)
            errors.drain()
        # Not sys.exit: handlers at exit may wait for a peer that is gone.
        os._exit(2 if record.kind == "user" else 1)
    if console is not None:
        console.drain()
    for child in multiprocessing.active_children():
        child.kill()  # a data worker that hangs, and ignores SIGTERM: Python's exit would wait for it
    log.finish()
    return result


def _keep_to_this_machine() -> None:
    """Let gloo and NCCL listen on the loopback interface alone where all ranks are on one machine (Linux).

    They would on the one that the host's name belongs to, for anybody, and it may not even resolve.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE")  # not said by every script that sets what torchrun sets
    meet_here = os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost", "::1")
    if sys.platform == "linux" and (here == os.environ["WORLD_SIZE"] or (here is None and meet_here)):
        # Whatever a cluster names for runs on several machines. "=": "lo" and no other name that begins so.
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"})


def seconds_before_message(rank: int) -> float:
    """How long a rank under torchrun waits before it prints: ranks with the same error speak in turn.

    The first one ends, torchrun ends the others, and the user reads one message.
    """
    return min(0.5 * rank, 3.0)


def log_name(node: int) -> str:
    """Name of the log that the ranks of a node share; nodes that share the folder must not append to one file."""
    return "log.txt" if node == 0 else f"log-node{node}.txt"


def _rank(rank: int, folder: Path, console: TextIO | None, progress: Progress, stop: StopRequest, threads: int) -> Rank:
    import torch

    torch.set_num_threads(threads)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    return Rank(rank, int(os.environ["WORLD_SIZE"]), local_rank, device, folder, console, progress, stop)
