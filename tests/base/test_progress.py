import contextlib
import io
import os
import pty
import re

from mmtrain.base import progress
from mmtrain.base.progress import ByteBars, ProgressBar


def test_without_a_terminal_lines_come_every_few_seconds_and_at_the_end(monkeypatch, logged):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressBar("shards", 2000) as bar:
        for second in range(1, 13):
            now[0] = 100.0 + second
            bar.show(100 * second, 1000 * second, "1 failed" if second > 9 else "")
        now[0] = 115.0
        bar.show(2000, 30000)
    assert logged == [
        "500 of 2,000 shards  1,000 samples/s",
        "1,000 of 2,000 shards  1,000 samples/s  1 failed",
        "2,000 of 2,000 shards  2,000 samples/s",
    ]


def test_a_rate_below_one_is_not_zero(monkeypatch, logged):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressBar("repetitions", 3, counted="steps") as bar:
        for done, now[0] in enumerate((6.0, 12.0, 60.0)):
            bar.show(done + 1, done)
    assert logged == [
        "1 of 3 repetitions  0 steps/s",
        "2 of 3 repetitions  0.083 steps/s",
        "3 of 3 repetitions  0.033 steps/s",
    ]


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch, logged):
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal, ProgressBar("shards", 3, terminal) as bar:  # noqa: PTH123 - a number
        bar.show(2, 50, "1 failed")
        bar.show(3, 70, "1 failed")
    written = ""
    # which a terminal without another end gives after its last byte
    with contextlib.suppress(OSError):
        while part := os.read(leader, 1 << 16):
            written += part.decode()
    os.close(leader)
    assert logged == []
    assert "shards" in written
    assert re.search(r"3/3.* samples/s.*1 failed", written)


def test_a_narrow_terminal_cuts_the_note_and_never_the_count(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    bar = progress.open_bar(terminal := Terminal(), "step", 160_000, 12_345)
    bar.update(
        0,
        completed=12_346,
        said="loss 0.0101  8,973 tokens/s  ETA 10:00:23",
        note="no update was made " * 5,
    )
    bar.stop()
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).splitlines()[-1]
    assert len(line) <= 80 and "step  12346/160000 " in line, line
    assert "loss 0.0101  8,973 tokens/s  ETA 10:00:23 no" in line and line.rstrip().endswith("…")


def test_of_several_things_each_has_its_megabytes(logged):
    with ByteBars(io.StringIO()) as progress:
        progress.show("written", 10**6, 1_500_000)
        progress.show("written", 1_500_000, 1_500_000)
        progress.show("read again", 7, 7)
    assert [re.sub(r"  .*", "", line) for line in logged] == [
        "2 of 2 MB written",
        "1 of 1 MB read again",
    ]
