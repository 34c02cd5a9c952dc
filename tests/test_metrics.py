from __future__ import annotations

import io
import json
import math
import os
import pty
import subprocess
import sys

from mmtrain import metrics
from mmtrain.metrics import Console, Metrics


def show(console: Console, clock: list[float], steps: range, seconds_per_step: float, note: str = "") -> None:
    for step in steps:
        clock[0] += seconds_per_step
        console.step(step, loss=0.5, tokens_per_second=1000, note=note)


def console_with_clock(monkeypatch, max_steps: int) -> tuple[Console, io.StringIO, list[float]]:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    return Console(stream, max_steps), stream, clock


def test_each_write_appends_one_json_object(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as first:
        first.write(step=0, loss=1.5, nested={"images": [1, 2]})
    with Metrics(path) as second:
        second.write(step=1, loss=None)
        # readable before it is closed
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": 0, "loss": 1.5, "nested": {"images": [1, 2]}},
            {"step": 1, "loss": None},
        ]


def test_nan_and_infinities_are_strings_that_float_reads_back(tmp_path):
    with Metrics(tmp_path / "m") as file:
        file.write(values=[math.nan, math.inf, -math.inf, 1.0])
    values = json.loads((tmp_path / "m").read_text(), parse_constant=lambda name: 1 / 0)["values"]
    assert values == ["nan", "inf", "-inf", 1.0]
    assert math.isnan(float(values[0])) and float(values[2]) == -math.inf


def test_without_a_terminal_first_steps_then_one_line_in_five_seconds_then_the_last(monkeypatch):
    console, stream, clock = console_with_clock(monkeypatch, max_steps=50)
    show(console, clock, range(50), seconds_per_step=0.5)
    shown = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [1, 2, 3, 13, 23, 33, 43, 50]


def test_a_step_with_a_note_is_always_shown(monkeypatch):
    console, stream, clock = console_with_clock(monkeypatch, max_steps=50)
    show(console, clock, range(10), seconds_per_step=0.1)
    show(console, clock, range(10, 11), seconds_per_step=0.1, note="no supervised token in the step")
    assert stream.getvalue().splitlines()[-1].endswith("no supervised token in the step")


def test_time_left_is_the_mean_step_after_the_first_times_the_steps_left(monkeypatch):
    console, stream, clock = console_with_clock(monkeypatch, max_steps=100)
    show(console, clock, range(1), seconds_per_step=60)  # warm-up does not count
    show(console, clock, range(1, 3), seconds_per_step=40)
    assert [line.rsplit("left ", 1)[1] for line in stream.getvalue().splitlines()] == ["?", "1:05:20", "1:04:40"]


def test_a_console_that_goes_away_does_not_end_the_run():
    reader, writer = os.pipe()
    os.close(reader)
    console = Console(os.fdopen(writer, "w"), max_steps=3)
    for step in range(3):
        console.step(step, loss=1.0, tokens_per_second=1)


def test_ranks_without_a_console_print_nothing(capfd):
    with Console(None, max_steps=2) as console:
        console.line("text")
        console.step(0, loss=1.0, tokens_per_second=1)
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_live_bar_and_the_cursor_comes_back():
    code = (
        "import sys; from mmtrain.metrics import Console\n"
        "with Console(sys.stdout, 2) as console:\n"
        "    console.line('loading weights')\n"
        "    console.step(0, 0.25, 1234); console.step(1, 0.125, 1234)\n"
    )
    main, terminal = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    subprocess.run([sys.executable, "-c", code], stdout=terminal, stderr=subprocess.PIPE, env=env, check=True)
    os.close(terminal)
    shown = b""
    while chunk := read(main):
        shown += chunk
    text = shown.decode()
    assert "loading weights" in text and "2/2" in text and "loss 0.1250" in text and "1,234 tokens/s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux ends a terminal without writers with EIO
        return b""


def test_a_disk_that_fills_up_leaves_whole_lines_and_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    script = (
        "import resource, sys, pathlib; from mmtrain.metrics import Metrics\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "metrics = Metrics(pathlib.Path(sys.argv[1]))\n"
        "for step in range(1000): metrics.write(step=step, text='x' * 30)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0 and str(path) in ran.stderr.splitlines()[-1]
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(len(steps))) and len(steps) > 10
    assert path.read_text().endswith("\n")
