"""Starts this node's ranks through torch's elastic agent, waits, and ends every process that is
left.
"""

import contextlib
import ctypes
import logging
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from mmtrain.base.console_stream import ConsoleStream
from mmtrain.base.errors import UserError
from mmtrain.runtime.child import shield_multiprocessing, wake_stopped
from mmtrain.runtime.failures import Failure, last_seen, root_cause
from mmtrain.runtime.job import Job
from mmtrain.runtime.log import output_to_log
from mmtrain.runtime.rank import ENDING_SIGNALS, run_rank
from mmtrain.runtime.stop import SECONDS_TOGETHER, STOP_FILE, STOP_SIGNALS, Asked, StopFile

PR_SET_CHILD_SUBREAPER = 36
# bytes: a socket's path has 107 at most, of which multiprocessing adds 32
LONGEST_TEMPORARY_FOLDER = 70
TRACKER = "resource_tracker"
STOPPED = 3  # exit code of a run that a signal has ended in good order, everything saved


def set_rank_environment(threads: int, *, on_gpus: bool) -> None:
    """Set what libraries read once, when they are imported: before any of those imports, for this
    process's ranks.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # a thread that spins takes a core from the one it waits for
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # tokenizers warns, or hangs, in forked data workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if on_gpus:
        os.environ.pop("DS_ACCELERATOR", None)  # DeepSpeed would move the model to what it names
        # a queue a stream: none waits for another's work
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"


@contextlib.contextmanager
def prepared(job: Job) -> Iterator[None]:
    """Set environment and output of this process as `run_ranks`, called in the block, needs them.

    CPU ranks are forked from a process that begins here to import `job.preload`: 4 s faster than
    spawned. Forking from the launcher hung one start in ten: the agent's threads hold locks that a
    fork copies.
    """
    set_rank_environment(job.threads, on_gpus=job.on_gpus)
    shield_multiprocessing()
    with output_to_log(job.log):
        if not job.on_gpus:
            if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY_FOLDER:
                tempfile.tempdir = os.environ["TMPDIR"] = "/tmp"
            os.environ["MMTRAIN_PRELOAD"] = " ".join(job.preload)
            multiprocessing.set_forkserver_preload(["mmtrain.runtime.fork_server"])
            multiprocessing.forkserver.ensure_running()
        yield


def run_ranks(job: Job) -> Failure | None:
    """Run every local rank of a `prepared` job until all return or one fails; end all that they
    have started.

    If the job `saves_when_asked`, the first SIGTERM or SIGUSR1 asks for that; a second SIGTERM ends
    the ranks at once.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from mmtrain.runtime.rendezvous import BACKEND, THIS_MACHINE

    for handler in logging.getLogger("torch.distributed").handlers:
        # torch's own formatter imports torch._dynamo to write down that a rank has died: 2 to 6 s
        # before the job ends.
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    # A signal that the caller ignores stays ignored: nohup's SIGHUP would end the run when the
    # terminal closes.
    at_once = ENDING_SIGNALS if job.saves_when_asked else (*ENDING_SIGNALS, *STOP_SIGNALS)
    signals = [number for number in at_once if signal.getsignal(number) is not signal.SIG_IGN]
    earlier_children = set(psutil.Process().children())
    if sys.platform == "linux":  # what a dead rank started becomes our child, to be ended below
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    log_begins = job.log.stat().st_size if job.log.exists() else 0
    with (
        tempfile.TemporaryDirectory(prefix="mmtrain-") as name,
        _handlers_restored([*signals, *STOP_SIGNALS]),
    ):
        records = Path(name)
        stop_file = StopFile(records / STOP_FILE)
        console = ConsoleStream(1)  # sys.stdout is the log

        def ask(number: int, frame: object) -> None:
            asked, seconds = stop_file.read()
            if asked is Asked.NOTHING:
                stop_file.ask(Asked.SAVE_AND_END)
                console.write(
                    f"{signal.Signals(number).name}: the run saves after the current "
                    "step, and ends\n"
                )
            elif number == signal.SIGTERM and seconds > SECONDS_TOGETHER:
                stop_file.ask(Asked.END_NOW)
                wake_stopped(psutil.Process().children(recursive=True))
                raise SignalException("a second SIGTERM", signal.SIGTERM)

        class Logs(DefaultLogsSpecs):
            """The outputs of ranks, which torch asks for right before it starts these. From then on
            they can be asked to stop.

            Before, a signal ends this process at once: no Python handler runs while it waits in C++
            for other nodes.
            """

            def reify(self, *arguments: Any, **options: Any) -> Any:
                if job.saves_when_asked:
                    for number in STOP_SIGNALS:
                        signal.signal(number, ask)
                return super().reify(*arguments, **options)

        config = LaunchConfig(
            min_nodes=job.nodes,
            max_nodes=job.nodes,
            nproc_per_node=len(job.local_ranks),
            run_id="mmtrain",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn" if job.on_gpus else "forkserver",
            logs_specs=Logs(log_dir=str(records / "elastic")),
            signals_to_handle=",".join(number.name for number in signals),
            rdzv_backend=BACKEND,
            rdzv_endpoint=job.endpoint if job.nodes > 1 else THIS_MACHINE,
            rdzv_configs={"rank": job.node, "timeout": job.timeout_seconds},
        )
        try:
            ends = elastic_launch(config, run_rank)(job, records)
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return root_cause(job, records, exit_codes, log_begins)
        except SignalException as error:
            by = "Ctrl-C" if error.sigval == signal.SIGINT else error.sigval.name
            seen = last_seen(job, records, job.local_ranks[0])
            return Failure(128 + error.sigval, f"stopped by {by}; {seen}\nlog: {job.log}")
        except UserError as error:
            return Failure(2, str(error))
        except (RendezvousError, DistError) as error:
            where = "the launcher's store was lost"
            if job.nodes > 1:
                where = f"the {job.nodes} nodes did not meet at {job.endpoint}"
            return Failure(1, f"{where}: {error}")
        finally:
            for number in (*signals, *STOP_SIGNALS):
                signal.signal(number, signal.SIG_IGN)
            _end_children(earlier_children)
            console.drain()
    stopped = next(iter(ends.values()))
    return stopped and Failure(STOPPED, stopped)


@contextlib.contextmanager
def _handlers_restored(signals: list[signal.Signals]) -> Iterator[None]:
    """Set default handlers, since the agent waits in C++ for other nodes; restore the old ones at
    the end.
    """
    earlier = {number: signal.signal(number, signal.SIG_DFL) for number in dict.fromkeys(signals)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end_children(spared: set[psutil.Process]) -> None:
    """Kill this process's children, and theirs, except `spared` and trackers, which first free
    shared memory.
    """
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        killed = False
        for child in psutil.Process().children():
            # it has just ended; a zombie has no command line
            with contextlib.suppress(psutil.NoSuchProcess):
                if child not in spared and TRACKER not in " ".join(child.cmdline()):
                    child.kill()
                    killed = True
        if not killed:
            return
        time.sleep(0.05)
