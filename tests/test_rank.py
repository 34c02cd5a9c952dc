from __future__ import annotations

import os

import pytest

from mmtrain.errors import UserError
from mmtrain.rank import ErrorRecord, PrefixedLog, Progress


def record_of(error: Exception) -> ErrorRecord:
    progress = Progress()
    progress.at(3, "FORWARD(stage 1, micro-batch 2)")
    try:
        raise error
    except Exception as raised:
        return ErrorRecord.of(raised, 1, progress)


def test_progress_can_be_read_after_the_process_was_killed(tmp_path):
    child = os.fork()
    if child == 0:
        progress = Progress(tmp_path / "progress")
        progress.at(41, "BACKWARD(stage 2, micro-batch 7)")
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert Progress.read(tmp_path / "progress") == (41, "BACKWARD(stage 2, micro-batch 7)")


def test_progress_of_a_rank_that_never_started_is_unknown(tmp_path):
    assert Progress.read(tmp_path / "progress") is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("no such model"), "user"),
        (OSError(28, "No space left on device", "metrics.jsonl"), "user"),
        (OSError(5, "Input/output error", "metrics.jsonl"), "error"),
        (ValueError("connection closed by peer"), "error"),
        (RuntimeError("CUDA out of memory"), "error"),
        (ConnectionResetError("reset"), "peer"),
        # as gloo and torch.distributed of torch 2.15 word them
        (RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:41346."), "peer"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error [::1]:19095: Connection reset by peer."), "peer"),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation"), "peer"),
    ],
)
def test_the_loss_of_a_peer_is_told_apart_from_an_own_error_and_from_what_the_user_can_mend(error, kind):
    assert record_of(error).kind == kind


def test_a_full_disk_is_said_with_the_file_and_how_to_go_on():
    said = record_of(OSError(28, "No space left on device", "runs/x/metrics.jsonl")).cause
    assert said.startswith("runs/x/metrics.jsonl cannot be written: No space left on device; free space, and start")


def test_a_distributed_error_of_torch_is_the_loss_of_a_peer():
    from torch.distributed import DistNetworkError

    assert record_of(DistNetworkError("the client socket has timed out")).kind == "peer"


def test_an_error_record_survives_writing_and_names_step_work_and_place(tmp_path):
    record = record_of(ValueError("bad"))
    record.write(tmp_path / "error-1")
    assert ErrorRecord.read(tmp_path / "error-1") == record
    assert (record.step, record.doing, record.cause) == (3, "FORWARD(stage 1, micro-batch 2)", "ValueError: bad")
    assert record.where.startswith("test_rank.py:")


def test_each_line_of_a_log_says_who_wrote_it_and_a_progress_bar_leaves_one_line(tmp_path):
    first, second = PrefixedLog(tmp_path / "log", "rank 0"), PrefixedLog(tmp_path / "log", "rank 1")
    first.write("half ")
    second.write("whole\nand an end without newline")
    first.write("line\n")
    first.write("10%\r50%\r100%\n")
    second.finish()
    assert (tmp_path / "log").read_text().splitlines() == [
        "[rank 1] whole",
        "[rank 0] half line",
        "[rank 0] 100%",
        "[rank 1] and an end without newline",
    ]
