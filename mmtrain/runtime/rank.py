"""One rank's process: its place in the run, and the record that it leaves when it fails.

All that it or a library prints, C++ included, goes to the run's log; rank 0 has a stream to the
console for progress.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from mmtrain.base.console_stream import ConsoleStream
from mmtrain.base.errors import naming_shared_memory
from mmtrain.base.printing import print_info, show_error, show_logs
from mmtrain.runtime.child import die_with_parent, leave_out_gpu_kernels, wake_stopped
from mmtrain.runtime.failures import ErrorRecord, RankProgress
from mmtrain.runtime.job import Job
from mmtrain.runtime.log import log_name, send_output_to
from mmtrain.runtime.stop import STOP_FILE, StopRequest

# at once; SIGTERM and SIGUSR1 are stop.STOP_SIGNALS
ENDING_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# A failed rank stays this long, its connections open, so that the launcher can end its peers before
# they fail in turn.
SECONDS_AFTER_FAILURE = 1.0
# A rank that only lost a peer stays longer: the launcher must find that peer first, not this
# victim.
SECONDS_AFTER_LOST_PEER = 3.0


@dataclass(frozen=True)
class Rank:
    """The place of one process in a run; `console` is None everywhere but on rank 0."""

    rank: int
    world_size: int
    device: str
    folder: Path
    console: TextIO | None
    progress: RankProgress
    stop: StopRequest

    def print_info(self, *messages: str) -> None:
        """Print messages for the user, on rank 0."""
        if self.console is not None:
            print_info(*messages, stream=self.console)


def run_rank(job: Job, records: Path | None = None) -> str | None:
    """Be the rank that RANK, WORLD_SIZE and LOCAL_RANK name, and return what the target returns.

    A failure ends the process: exit code 2 for a UserError, 1 otherwise. The launcher's `records`
    hold progress, error records and its request to stop; without them torchrun is the launcher, and
    this rank prints how the run ended.
    """
    die_with_parent()
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)  # it died before the kernel was asked
    for number in ENDING_SIGNALS:
        # Python's handlers would wait for the main thread, which may hang in a collective. What
        # nohup ignores stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    stop = StopRequest(records and records / STOP_FILE)
    stop.listen()
    _keep_to_this_machine()

    rank = int(os.environ["RANK"])
    job.folder.mkdir(parents=True, exist_ok=True)
    log_path = job.folder / log_name(int(os.environ.get("GROUP_RANK", "0")))
    console = ConsoleStream(1) if rank == 0 else None
    errors = ConsoleStream(2)
    log = send_output_to(log_path, f"rank {rank}", [1, 2])
    faulthandler.enable(file=2)

    progress = RankProgress(records and records / f"progress-{rank}")
    try:
        if not job.on_gpus:
            leave_out_gpu_kernels()
        import torch

        torch.set_num_threads(job.threads)
        device = f"cuda:{int(os.environ['LOCAL_RANK'])}" if job.on_gpus else "cpu"
        me = Rank(
            rank,
            int(os.environ["WORLD_SIZE"]),
            device,
            job.folder,
            console,
            progress,
            stop,
        )
        # print writes into the log
        show_logs(me.print_info if rank == 0 else print)
        print(
            f"process {os.getpid()} on {socket.gethostname()}, {me.device}, threads {job.threads}"
        )
        if job.agreement is not None:
            from mmtrain.runtime.rendezvous import agree

            progress.at(0, "comparing plans with rank 0")
            agree(job.agreement, rank, job.timeout_seconds)
        module, _, function = job.target.partition(":")
        with naming_shared_memory():
            stopped = getattr(importlib.import_module(module), function)(rank=me, **job.arguments)
        if stopped is not None and not records:
            me.print_info(f"{stopped}. {job.how_to_resume}")
    except BaseException as error:
        # this is the process's outermost frame: nothing above could report it
        record = ErrorRecord.of(error, rank, progress)
        if records:
            record.write(records / f"error-{rank}")
        traceback.print_exc()
        log.finish()
        wake_stopped(psutil.Process().parent().children())
        seconds = SECONDS_AFTER_FAILURE
        if record.kind == "peer":
            seconds = SECONDS_AFTER_LOST_PEER
        time.sleep(seconds)
        if console is not None:
            console.drain()
        if not records:
            time.sleep(seconds_before_message(rank))
            show_error(f"{record.message(job)}\nlog: {log_path}", errors)
            errors.drain()
        # Not sys.exit: handlers at exit may wait for a peer that is gone.
        os._exit(2 if record.kind == "user" else 1)
    if console is not None:
        console.drain()
    # torch's handler raises for a data worker that is killed
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        # a data worker that hangs, and ignores SIGTERM: Python's exit would wait for it
        child.kill()
    log.finish()
    return stopped


def seconds_before_message(rank: int) -> float:
    """Return how long a rank under torchrun waits before it prints an error that others may have,
    too.

    Rank 0 prints and ends, then torchrun ends the others: the user reads one message.
    """
    return min(2.5 + 0.5 * rank, 6.0) if rank else 0.0


def _keep_to_this_machine() -> None:
    """Let gloo and NCCL listen on the loopback interface alone where all ranks are on one machine
    (Linux).
    """
    # not said by every script that sets what torchrun sets
    here = os.environ.get("LOCAL_WORLD_SIZE")
    meet_here = os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost", "::1")
    if sys.platform == "linux" and (
        here == os.environ["WORLD_SIZE"] or (here is None and meet_here)
    ):
        # Over what a cluster names for runs on several machines. "=": "lo" and no other name that
        # begins so.
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"})
