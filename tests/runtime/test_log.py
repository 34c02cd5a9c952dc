from __future__ import annotations

from pathlib import Path

from mmtrain.runtime.log import PrefixedLog


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


def test_a_log_that_cannot_be_written_ends_nothing():
    log = PrefixedLog(Path("/dev/full"), "rank 0")
    for _ in range(1000):  # far more than buffers take
        log.write("a line as libraries write them\n" * 10)
    log.flush()
    log.finish()
    log.close()
