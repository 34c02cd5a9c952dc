"""A console that nobody reads, reads slowly, stops or has closed: real pipes, a real terminal, real
programs.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from processes import wait_for

from mmtrain.base.console_stream import QUEUE_BYTES, ConsoleStream

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOON = 0.5  # seconds: what blocks does so for ever, and the machine may be busy


def lines_of(stream: ConsoleStream, count: int) -> None:
    """Write numbered lines of 100 bytes, which together must take no time."""
    begun = time.monotonic()
    for number in range(count):
        stream.write(f"line {number:06} {'x' * 87}\n")
    assert time.monotonic() - begun < SOON * max(1, count / 1000)


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^line (\d{6}) x{87}$", text, re.MULTILINE)]


def read_all(reader: int) -> str:
    with os.fdopen(reader, encoding="utf-8", newline="") as file:
        return file.read()


def bytes_in(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def close_when_written(stream: ConsoleStream) -> None:
    stream.drain()
    os.close(stream.fileno())


def test_a_pipe_that_nobody_reads_never_blocks_and_its_reader_gets_the_newest_lines_and_the_number_of_the_others():
    reader, writer = os.pipe()
    stream = ConsoleStream(writer)
    os.close(writer)
    count = 3 * QUEUE_BYTES // 100
    lines_of(stream, count)
    begun = time.monotonic()
    stream.drain()
    assert 1 < time.monotonic() - begun < 5, "a bounded chance at the end"
    threading.Thread(target=close_when_written, args=[stream]).start()
    text = read_all(reader)
    # The note comes more than once where the machine fills the pipe more slowly than this test
    # writes.
    missing = re.findall(
        r"^\[([\d,]+) lines are missing here: nothing read them\]$", text, re.MULTILINE
    )
    numbers = numbers_in(text)
    assert len(numbers) + sum(int(lines.replace(",", "")) for lines in missing) == count
    assert len(text.splitlines()) == len(numbers) + 2 * len(missing), (
        "each line whole, an empty one before each note"
    )
    kept = QUEUE_BYTES // 100
    assert numbers == sorted(numbers) and numbers[-kept:] == list(range(count - kept, count))
    # Not line 0 in any case: lines may be dropped before the writing thread first runs.
    assert missing and numbers[0] < count - kept, "what the pipe took before it was full"


def test_a_reader_that_is_slow_loses_nothing_at_the_end():
    reader, writer = os.pipe()
    stream = ConsoleStream(writer)
    os.close(writer)
    lines_of(stream, 1500)
    draining = threading.Thread(target=close_when_written, args=[stream])
    draining.start()
    parts = []
    while part := os.read(reader, 10_000):
        parts.append(part)
        time.sleep(0.05)
    assert numbers_in(b"".join(parts).decode()) == list(range(1500))


def test_of_a_progress_bar_that_nobody_reads_the_newest_state_stays_and_the_loss_is_told():
    reader, writer = os.pipe()
    stream = ConsoleStream(writer)
    os.close(writer)
    for number in range(3 * QUEUE_BYTES // 100):
        stream.write(f"\r{number:06} {'x' * 92}")
    threading.Thread(target=close_when_written, args=[stream]).start()
    text = read_all(reader)
    assert f"\r{3 * QUEUE_BYTES // 100 - 1:06} " in text and "lines are missing here" in text


def test_a_pipe_that_another_program_has_made_non_blocking_gets_everything():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    stream = ConsoleStream(writer)
    os.close(writer)
    lines_of(stream, 1500)
    wait_for(lambda: bytes_in(reader) > 0.9 * size, 10, "the pipe to be full")
    threading.Thread(target=close_when_written, args=[stream]).start()
    assert numbers_in(read_all(reader)) == list(range(1500))


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_a_reader_that_has_left_and_a_full_disk_are_no_error_and_no_wait(disk_is_full):
    reader, writer = (-1, os.open("/dev/full", os.O_WRONLY)) if disk_is_full else os.pipe()
    if not disk_is_full:
        os.close(reader)
    stream = ConsoleStream(writer)
    lines_of(stream, 20)
    begun = time.monotonic()
    stream.drain()
    assert time.monotonic() - begun < SOON


def test_a_command_whose_standard_streams_are_closed_works(tiny, tmp_path):
    arguments = [tiny / "config.yaml"]
    program = [sys.executable, "-m", "mmtrain", "inspect", *arguments]
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *program]
    assert (
        subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
        ).returncode
        == 0
    )


def test_a_forked_process_writes_by_itself_and_not_what_its_parent_had_not_yet_written():
    reader, writer = os.pipe()
    stream = ConsoleStream(writer)
    os.close(writer)
    lines_of(stream, 1000)  # more than the pipe takes, so that much waits
    child = os.fork()
    if child == 0:
        stream.write("of the child\n")
        stream.drain()
        os._exit(0)
    text: list[str] = []
    reading = threading.Thread(target=lambda: text.append(read_all(reader)))
    reading.start()
    os.waitpid(child, 0)
    close_when_written(stream)
    reading.join()
    assert numbers_in(text[0].replace("of the child\n", "")) == list(range(1000))
    assert text[0].count("of the child\n") == 1
