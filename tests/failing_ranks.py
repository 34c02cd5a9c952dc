"""Two real ranks that end in the way that the command line says: python failing_ranks.py HOW
FOLDER.
"""

import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.runtime.job import Job
from mmtrain.runtime.rank import Rank
from mmtrain.runtime.supervise import prepared, run_ranks

LAST_STEP = 5
# What NCCL's watchdog writes before it aborts the process that it watches: ProcessGroupNCCL as
# somebody's log has it, ProcessGroupNCCL2 as torch 2.15 wrote it here, with a receive that nobody
# sent anything for.
WATCHDOGS = {
    "watchdog": b"[rank0]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog "
    b"caught collective "
    b"operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=1, NumelOut=1, "
    b"Timeout(ms)=60000) ran for 60081 "
    b"milliseconds before timing out.\n",
    "watchdog of NCCL2": b"[rank0]:[E1124 19:10:32.417834345 WorkNCCL.cpp:372] "
    b"[TC][rank=0][name=1] Operation timed "
    b"out after 4000 ms\n"
    b"[rank0]:[E1124 19:10:33.607397765 ProcessGroupNCCL.cpp:638] [TC][rank=0][name=1] Aborting "
    b"process on rank 0 due "
    b"to timeout - timeout watchdog detected operation timeout\n",
}


class Unhashable:
    """A stream as others may bring: no hash, and equal to everything."""

    write = flush = lambda self, *_: None
    __eq__ = lambda self, other: True  # noqa: E731


# What libraries have set up when they are imported; dill's is as the first one, of which the stream
# cannot be set.
logging.getLogger("like dill").addHandler(logging._StderrHandler(logging.WARNING))
logging.getLogger("plain").addHandler(logging.StreamHandler())
logging.getLogger("odd").addHandler(logging.StreamHandler(Unhashable()))


def work(how: str, rank: Rank) -> None:
    """Reduce a tensor with the other rank in every step; rank 1 ends as `how` says."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=3 if how == "hang" else 60))
    if rank.console is not None:
        rank.console.write("to the console\n")
        rank.console.flush()
    print("printed")
    warnings.warn("warned", stacklevel=1)
    logging.getLogger("library").error("logged")
    logging.getLogger("mmtrain.data").info("shown")
    logging.getLogger("like dill").error("logged by dill")
    logging.getLogger("plain").error("logged by a handler on stderr")
    os.system("echo said by another program")
    for step in range(LAST_STEP + 1):
        rank.progress.at(step, "ALL_REDUCE")
        if step == LAST_STEP and rank.rank == 0 and how in WATCHDOGS:
            os.write(2, WATCHDOGS[how])
            os.abort()
        if step == LAST_STEP and rank.rank == 1:
            end(how)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
    if how == "children left":
        read_with_workers()
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    dist.destroy_process_group()


def read_with_workers() -> None:
    """Leave two data workers behind, as a run does that ends in the middle of its data."""
    from torch.utils.data import DataLoader

    global batches
    batches = iter(
        DataLoader(range(100), batch_size=None, num_workers=2, multiprocessing_context="fork")
    )
    next(batches)


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("a bad value")
    if how == "wrong input":
        raise UserError("this file is damaged: make it anew")
    if how == "exit":
        os._exit(7)
    if how == "hang" or how in WATCHDOGS:
        time.sleep(300)
    if how.startswith("stuck"):  # both ranks, each waiting for the other
        import torch
        import torch.distributed as dist

        dist.recv(torch.ones(1), src=0)


if __name__ == "__main__":
    how, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir()
    os.environ["OMP_NUM_THREADS"] = "1"
    job = Job(
        ("stage 0", "stage 1"),
        folder,
        threads=1,
        timeout_seconds=60,
        target="__main__:work",
        arguments={"how": how},
        preload=("torch.distributed",),
        saves_when_asked=how == "stuck",
    )
    signal.signal(signal.SIGTERM, before := lambda *_: None)
    with prepared(job):
        failure = run_ranks(job)
    assert signal.getsignal(signal.SIGTERM) is before, "the caller's handlers are back"
    if failure is not None:
        print(failure.message, file=sys.stderr)
        sys.exit(failure.exit_code)
