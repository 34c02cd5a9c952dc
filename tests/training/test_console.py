from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

from mmtrain.training import console as metrics
from mmtrain.training.console import Console


def show(
    console: Console, clock: list[float], steps: range, seconds_per_step: float, note: str = ""
) -> None:
    for step in steps:
        clock[0] += seconds_per_step
        console.step(step, loss=0.5, tokens_per_second=1000, note=note)


def console_with_clock(monkeypatch, max_steps: int) -> tuple[Console, io.StringIO, list[float]]:
    clock = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    return Console(stream, max_steps), stream, clock


def test_without_a_terminal_first_steps_then_one_line_in_five_seconds_then_the_last(monkeypatch):
    console, stream, clock = console_with_clock(monkeypatch, max_steps=50)
    show(console, clock, range(50), seconds_per_step=0.5)
    shown = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [1, 2, 3, 13, 23, 33, 43, 50]


def test_a_step_with_a_note_is_always_shown(monkeypatch):
    console, stream, clock = console_with_clock(monkeypatch, max_steps=50)
    show(console, clock, range(10), seconds_per_step=0.1)
    show(
        console, clock, range(10, 11), seconds_per_step=0.1, note="no supervised token in the step"
    )
    assert stream.getvalue().splitlines()[-1].endswith("no supervised token in the step")


def test_time_left_is_the_mean_step_after_the_first_times_the_steps_left(monkeypatch):
    console, stream, clock = console_with_clock(monkeypatch, max_steps=100)
    show(console, clock, range(1), seconds_per_step=60)  # warm-up does not count
    show(console, clock, range(1, 3), seconds_per_step=40)
    lines = stream.getvalue().splitlines()
    assert [line.partition("ETA ")[2] for line in lines] == ["", "1:05:20", "1:04:40"]


def test_ranks_without_a_console_print_nothing(capfd):
    console = Console(None, max_steps=2)
    console.line("text")
    console.step(0, loss=1.0, tokens_per_second=1)
    console.close()
    assert capfd.readouterr() == ("", "")


def on_a_terminal(code: str, kind: str = "xterm", columns: int = 120) -> str:
    """What a terminal receives from Python code; it must hold less than the terminal's buffer."""
    main, terminal = pty.openpty()
    env = os.environ | {
        "TERM": kind,
        "COLUMNS": str(columns),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    subprocess.run(
        [sys.executable, "-c", code], stdout=terminal, stderr=subprocess.PIPE, env=env, check=True
    )
    os.close(terminal)
    shown = b""
    while chunk := read(main):
        shown += chunk
    return shown.decode()


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux ends a terminal without writers with EIO
        return b""


def scores(**values: float | None) -> SimpleNamespace:
    """What the console reads of `answers.Scores`, which would bring torch into every process
    here.
    """
    known = {
        "loss": 0.12341,
        "token_accuracy": 0.982,
        "exact_match": 0.9312,
        "answers": 240,
        "samples": 200,
    }
    return SimpleNamespace(**(known | values))


def test_an_evaluation_is_one_line_and_so_is_its_control():
    stream = io.StringIO()
    console = Console(stream, max_steps=2)
    console.evaluation(120, scores())
    console.evaluation(0, scores(loss=math.nan, exact_match=None, token_accuracy=0.0, answers=0))
    console.control(scores(exact_match=0.0461), scores(), permuted=200)
    console.control(scores(exact_match=0.0461), scores(), permuted=188)
    assert stream.getvalue().splitlines() == [
        "eval at step 120: loss 0.1234, exact match 93.1% of 240 answers, token accuracy 98.2%",
        "eval at step 0: loss nan, exact match - of 0 answers, token accuracy 0.0%",
        "control with shuffled images: exact match 4.6% (with the right images: 93.1%)",
        "control with shuffled images: exact match 4.6% (with the right images: 93.1%; "
        "12 of 200 samples kept theirs)",
    ]


def test_only_an_evaluation_that_takes_long_says_how_far_it_is(monkeypatch):
    console, stream, clock = console_with_clock(monkeypatch, max_steps=50)
    for seconds_per_round in (0.3, 2.0):
        for done in range(0, 41, 4):
            console.evaluating(done, 40)
            clock[0] += seconds_per_round
    assert stream.getvalue().splitlines() == [
        f"evaluating: {done} of 40 micro-batches done" for done in (12, 24, 36)
    ]


NASTY = "[red]\x1b[31mred\x1b[0m[/red]\u202e\ud800\r\n\ttab \x9b2J [link=x]"
ANSWERS = [
    SimpleNamespace(
        key="k1",
        question="Which colour,\nplease?",
        given="seven red",
        truth="seven red",
        right=True,
    ),
    SimpleNamespace(key="k\x1b2", question=NASTY, given=NASTY, truth="x" * 1000, right=False),
]


def test_what_stands_in_for_scores_and_answers_here_has_their_names():
    # here: processes that import this module need no torch
    from mmtrain.training.answers import Answer, Scores

    assert {field.name for field in fields(Scores)} == {*vars(scores()), "seconds"}
    assert {field.name for field in fields(Answer)} == {*vars(ANSWERS[0]), "images"}


def test_answers_are_readable_lines_that_say_right_or_wrong():
    stream = io.StringIO()
    Console(stream, max_steps=2).answers(ANSWERS)
    assert stream.getvalue().splitlines() == [
        "",
        "2 held-out questions, answered one token at a time: 1 right",
        "  right  k1: Which colour, please?",
        "         given  seven red",
        "         true   seven red",
        "  wrong  k\\x1b2: "
        + (nasty := r"[red]\x1b[31mred\x1b[0m[/red]\u202e\ud800 tab \x9b2J [link=x]"),
        "         given  " + nasty,
        "         true   " + "x" * 297 + "...",
    ]


def test_on_a_terminal_answers_obey_no_markup_and_the_bar_lives_on():
    code = (
        "import sys; from contextlib import closing; from mmtrain.training.console import Console\n"
        "from test_console import ANSWERS, scores\n"
        "with closing(Console(sys.stdout, 2)) as console:\n"
        "    console.line('loading weights'); console.evaluating(0, 9); console.evaluating(4, 9)\n"
        "    console.evaluation(0, scores())\n"
        "    console.step(0, 0.25, 1234); console.step(1, 0.125, 1234)\n"
        "    console.control(scores(), scores(), 200); console.answers(ANSWERS)\n"
    )
    text = on_a_terminal(code)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert (
        "loading weights" in plain
        and "eval at step 0: loss 0.1234, exact match 93.1% of 240 answers" in plain
    )
    assert (
        "2/2" in plain
        and "loss 0.1250" in plain
        and "1,234 tokens/s" in plain
        and "control with shuffled images" in plain
    )
    assert "seven red" in plain and "right" in plain and "wrong" in plain
    assert (
        r"[red]\x1b[31mred" in plain.replace("\n", "")
        and "\x1b[31m" not in text
        and "\x9b" not in text
    )
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_lines_and_a_narrow_one_readable_answers():
    code = (
        "import sys; from contextlib import closing; from mmtrain.training.console import Console\n"
        "from test_console import ANSWERS\n"
        "with closing(Console(sys.stdout, 2)) as console:\n"
        "    console.step(0, 0.25, 1234); console.answers(ANSWERS[:1])\n"
    )
    dumb = on_a_terminal(code, "dumb").replace("\r\n", "\n")
    assert dumb.startswith("step 1/2  loss 0.2500  1,234 tokens/s\n")
    for text in (dumb, on_a_terminal(code, columns=40)):
        assert "  right  k1: Which colour, please?" in text and "given  seven red" in text
