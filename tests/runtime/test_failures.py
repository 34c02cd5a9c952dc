from __future__ import annotations

import errno
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError
from torch.utils.data import DataLoader, IterableDataset

from mmtrain.base.errors import UserError
from mmtrain.runtime.failures import ErrorRecord, RankProgress, root_cause
from mmtrain.runtime.job import Job


def record_of(error: Exception) -> ErrorRecord:
    progress = RankProgress()
    progress.at(3, "FORWARD(stage 1, micro-batch 2)")
    try:
        raise error
    except Exception as raised:
        return ErrorRecord.of(raised, 1, progress)


def test_progress_can_be_read_after_the_process_was_killed(tmp_path):
    child = os.fork()
    if child == 0:
        progress = RankProgress(tmp_path / "progress")
        progress.at(41, "BACKWARD(stage 2, micro-batch 7)")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert RankProgress.read(tmp_path / "progress") == (41, "BACKWARD(stage 2, micro-batch 7)")


def nccl(said: str, of: str) -> DistBackendError:
    """As torch words it (NCCLUtils.hpp), with NCCL's last warning behind it."""
    head = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
        "NCCL version 2.27.5"
    )
    return DistBackendError(f"{head}\n{of}\nLast error:\n{said}")


SYSTEM = (
    "ncclSystemError: System call (e.g. "
    "socket, malloc) or external library call failed or device error. "
)
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
REMOTE = (
    "ncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely."
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("no such model"), "user"),
        (OSError(5, "Input/output error", "metrics.jsonl"), "error"),
        (ValueError("connection closed by peer"), "error"),
        (RuntimeError("CUDA out of memory"), "error"),
        (ConnectionResetError("reset"), "peer"),
        # as gloo and torch.distributed of torch 2.15 word them
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:41346."
            ),
            "peer",
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:545] Read error [::1]:19095: Connection reset by peer."
            ),
            "peer",
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms "
                "for recv operation"
            ),
            "peer",
        ),
        # ProcessGroupNCCL2 at the next operation
        (DistBackendError("NCCL operation timed out"), "peer"),
        (DistNetworkError("the client socket has timed out"), "peer"),
        (nccl("socketProgress: Connection closed by remote peer node-1<43567>", REMOTE), "peer"),
        (
            nccl(
                "Net : Call to recv from 10.0.0.2<43567> failed : Connection reset by peer", SYSTEM
            ),
            "peer",
        ),
        (
            nccl(
                "Cuda failure 'out of memory'",
                "ncclUnhandledCudaError: Call to CUDA function failed.",
            ),
            "error",
        ),
        (
            nccl("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000", USAGE),
            "error",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_the_loss_of_a_peer_is_told_apart_from_an_own_error_and_from_what_the_user_can_mend(
    error, kind
):
    assert record_of(error).kind == kind


@pytest.mark.parametrize(
    "said",
    [  # as NCCL 2.30, or before, has it
        "Error: failed to extend /dev/shm/nccl-9pQ1fe to 9637892 bytes, error: "
        "No space left on device (28)",
        "Error while creating shared memory segment /dev/shm/nccl-9pQ1fe, error: "
        "No space left on device",
    ],
)
def test_too_little_shared_memory_for_nccl_is_one_line_with_the_remedy(said):
    record = record_of(nccl(said, SYSTEM))
    assert record.kind == "user" and record.cause.startswith(f"{said}; /dev/shm may be full: ")
    assert record.cause.endswith("--shm-size=8g")


def test_the_installed_torch_speaks_the_words_that_are_looked_for_in_the_log():
    libraries = [*(Path(torch.__file__).parent / "lib").glob("libtorch_cuda.so")]
    if not libraries:
        pytest.skip("a torch without CUDA")
    with (
        libraries[0].open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
    ):
        assert library.find(b"Watchdog caught collective operation timeout: ") > 0
        if hasattr(torch.distributed, "ProcessGroupNCCL2"):
            assert library.find(b"Operation timed out after ") > 0


class KilledWorker(IterableDataset):
    """Its worker process ends by a signal instead of giving anything."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[torch.Tensor]:
        os.kill(os.getpid(), self._number)
        yield torch.ones(1)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "SIGKILL (if nobody killed it, the machine ran out of memory"),
        (signal.SIGBUS, "SIGBUS (/dev/shm"),
    ],
)
def test_a_killed_data_worker_is_named_with_its_signal(number, said):
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(KilledWorker(number), num_workers=1)))
    record = record_of(caught.value)
    assert record.kind == "error" and said in record.cause
    assert (
        record.cause.startswith("its data worker (process ")
        and ") was killed by SIG" in record.cause
    )


def test_a_rank_that_is_killed_where_its_shared_memory_ends_is_told_where_that_is(tmp_path):
    job = Job(("stage 0",), tmp_path, threads=1, timeout_seconds=1, target="")
    failure = root_cause(job, tmp_path, {0: -signal.SIGBUS}, 0)
    assert failure.message.startswith(
        "rank 0 (stage 0) was killed by SIGBUS (/dev/shm may be full: make room there"
    )


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free space, and start"),
        (errno.EFBIG, "raise the limit on the size of files"),
    ],
)
def test_a_file_that_cannot_grow_is_no_bug_but_named_with_how_to_go_on(code, remedy):
    record = record_of(OSError(code, os.strerror(code), "runs/x/metrics.jsonl"))
    said = f"runs/x/metrics.jsonl cannot be written: {os.strerror(code)}; {remedy}"
    assert record.kind == "user" and record.cause.startswith(said)


def test_an_error_record_survives_writing_and_names_step_work_and_place(tmp_path):
    record = record_of(ValueError("bad"))
    record.write(tmp_path / "error-1")
    assert ErrorRecord.read(tmp_path / "error-1") == record
    assert (record.step, record.work, record.cause) == (
        3,
        "FORWARD(stage 1, micro-batch 2)",
        "ValueError: bad",
    )
    assert record.where.startswith("test_failures.py:")
