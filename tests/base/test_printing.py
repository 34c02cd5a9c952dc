"""printing.py: no text of a file steers a terminal or a log, or looks like a message of mmtrain's
own.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from archives import conversation, picture, write_tar
from conftest import TOOLS

from mmtrain.__main__ import main
from mmtrain.base.printing import (
    escape,
    escape_lines,
    message,
    print_info,
    print_table,
    run_command,
    show_error,
    table_lines,
)
from mmtrain.data.samples.records import REASONS, reason_lines

ROOT = TOOLS.parent
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
FORGED = "error: all is well"
HOSTILE = f"\x1b]0;title\x07\x1b[2J\x9b31m\u202etxt.exe\u2066\u2028\x7f\r\n{FORGED}"
NAME = "\x9b31m\u202ee\u2066\u2028\u0085error"  # tars with names that hold C0 controls are refused


def assert_obeyed_by_none(said: bytes) -> None:
    text = said.decode()
    assert not OBEYED.search(text), ascii(text)
    assert not [line for line in text.splitlines() if line.startswith(FORGED)], text


def test_controls_are_escaped_and_words_of_all_languages_stay():
    text = "図書館 é\tb\n\U0001f468\u200d\U0001f469"
    assert escape_lines(text) == text
    assert (
        escape_lines("\x1b[2J\r\x85\x9b\u202e\u2066\u2028\udcff")
        == r"\x1b[2J\r\x85\x9b\u202e\u2066\u2028\udcff"
    )


def test_what_is_printed_holds_no_logins(capsys):
    print_info("https://me:secret@host/a.tar cannot be read")
    assert capsys.readouterr().out == "https://host/a.tar cannot be read\n"


def test_a_part_of_a_message_is_one_short_line():
    assert escape("two\n lines\x1b") == r"two lines\x1b"
    assert (len(escape("x" * 1000)), len(escape("x" * 1000, 20))) == (300, 20)


def test_a_line_break_within_a_message_begins_no_message():
    assert message(f"x\n{FORGED}\n    more\n") == f"x\n  {FORGED}\n    more\n"


def test_an_error_within_an_error_ends_with_one_full_stop(capsys):
    for text in (
        "run: no space. Choose --out FILE.. Use hf",
        "a.. b: ../c.. and ... d. Set e.",
        "'x.'.. Use y",
    ):
        show_error(text)
    said = [
        "run: no space. Choose --out FILE. Use hf",
        "a. b: ../c. and ... d. Set e.",
        "'x.'. Use y",
    ]
    assert capsys.readouterr().err.splitlines() == [f"error: {text}" for text in said]


def test_a_table_fits_80_columns_keeps_numbers_whole_and_obeys_no_text_of_a_cell():
    long, number = "[red]front[/red], 0-6, " * 10, "1,234,567,890"
    lines = table_lines(
        (">size\nMiB", "layers", ">a", "text"), [(number, long, 7, HOSTILE + "x" * 100)]
    )
    assert lines[0].split() == ["size", "layers", "a", "text"] and lines[1].strip() == "MiB"
    assert lines[2].startswith(f"{number}  [red]front[/red], 0-6, ") and max(map(len, lines)) <= 80
    assert_obeyed_by_none("\n".join(lines).encode())
    assert table_lines(("", ">"), [("a", 1), ("b", 20)]) == ["a   1", "b  20"], (
        "no names, no line of names"
    )
    assert table_lines(("a", ">b"), [("x",), ("y\nz", "1\n22")]) == [
        "a   b",
        "x",
        "y   1",
        "z  22",
    ], "cells may be missing"


def test_reasons_are_told_within_80_columns():
    lines = reason_lines(Counter(dict.fromkeys(REASONS, 12_345)))
    assert max(map(len, lines)) <= 80 and all(f" {code}: " in " ".join(lines) for code in REASONS)


@pytest.mark.parametrize("width", [5, 20, 38, 58])
def test_a_number_is_never_cut_however_narrow_the_terminal(width):
    row = ("what it is called, which is long", "1,234,567", "99.00%", "7")
    lines = table_lines(("name", ">samples", ">share", ">last"), [row], width)
    assert "1,234,567" in "\n".join(lines) and any(
        line.split()[-3:] == ["1,234,567", "99.00%", "7"] for line in lines
    )


def test_a_table_on_a_terminal_holds_no_escape_codes(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(("name", ">size"), [("a", 1)])
    assert capsys.readouterr().out == "  name  size\n  a        1\n"


def test_messages_are_one_write_so_that_no_other_process_writes_between_a_line_and_its_end():
    class Recorder(io.StringIO):
        def write(self, text: str) -> int:
            writes.append(text)
            return len(text)

    writes: list[str] = []
    print_info("one", "two\nand more", stream=Recorder())
    assert [text for text in writes if text] == ["one\ntwo\n  and more\n"]


def test_what_libraries_log_is_printed_by_a_command_and_left_to_logging_elsewhere(
    capsys, caplog, monkeypatch
):
    package, library, mine = (
        logging.getLogger("mmtrain"),
        logging.getLogger("mmtrain.data"),
        logging.NullHandler(),
    )
    monkeypatch.setattr(package, "handlers", [mine])
    caplog.set_level(logging.INFO)
    assert run_command(lambda: library.info("all 100% of it")) == 0
    assert capsys.readouterr().out == "all 100% of it\n" and caplog.messages == []
    library.info("from a notebook")
    assert capsys.readouterr().out == "" and caplog.messages == ["from a notebook"]
    assert package.handlers == [mine]


def test_a_home_that_is_not_here_is_an_error_of_one_line(capsys):
    assert run_command(lambda: Path("~nobody-of-this-name/a.tar").expanduser()) == 2
    assert capsys.readouterr().err.startswith("error: a path begins with ~ or ~USER")


def test_what_nobody_expected_is_a_traceback_that_steers_no_terminal():
    script = (
        f"from mmtrain.base.printing import run_command; run_command(lambda: exec({HOSTILE!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert ended.returncode == 1 and b"Traceback" in ended.stderr and b"SyntaxError" in ended.stderr
    assert_obeyed_by_none(ended.stderr)


Command = Callable[[Path, Path], list[str]]  # the tiny set, a new folder --> a command line


def plan_with_a_key(tiny: Path, folder: Path):
    content = yaml.safe_load((tiny / "config.yaml").read_text())
    content["train"][HOSTILE] = {HOSTILE: 1}
    (folder / "c.yaml").write_text(yaml.safe_dump(content))
    return ["train", str(folder / "c.yaml"), "--plan"]


def chat_with_a_model_type(tiny: Path, folder: Path):
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    (folder / HOSTILE).write_bytes(picture(8, 8))
    return ["chat", str(folder), "--image", str(folder / HOSTILE)]


def shard(tiny: Path, folder: Path):
    turns = [{"from": HOSTILE, "value": HOSTILE}, {"from": "gpt", "value": HOSTILE}]
    records = [
        {"id": HOSTILE, "image": HOSTILE, "conversations": turns},
        {"id": HOSTILE, HOSTILE: 1},
        HOSTILE,
    ]
    (folder / HOSTILE).write_text(json.dumps(records))
    out = folder / f"out{HOSTILE}"
    return ["shard", "--json", str(folder / HOSTILE), "--images", str(folder), "--out", str(out)]


def hostile_tar(folder: Path) -> Path:
    bad = json.dumps({"conversations": [{"from": HOSTILE, HOSTILE: HOSTILE}], HOSTILE: 1}).encode()
    files = [
        (f"{NAME}.json", conversation(HOSTILE, HOSTILE)),
        (f"{NAME}.{NAME}", b""),
        (f"bad{NAME}.json", bad),
    ]
    return write_tar(folder / f"{HOSTILE}.tar", files)


def inspect(*more: str) -> Command:
    def command(tiny: Path, folder: Path):
        hostile_tar(folder)
        return ["inspect", str(tiny / "config.yaml"), str(folder), *more]

    return command


COMMANDS = {
    "launch --plan, a YAML key": plan_with_a_key,
    "chat, a model_type": chat_with_a_model_type,
    "shard, records": shard,
    "inspect, a tar": inspect(),
    "inspect --show, a tar": inspect("--show", NAME),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_prints_what_a_terminal_obeys(tiny, tmp_path, own_cache, capfdbinary, command):
    main(command(tiny, tmp_path))
    captured = capfdbinary.readouterr()
    assert captured.out or captured.err
    for said in captured:
        assert_obeyed_by_none(said)


@pytest.mark.nightly
def test_neither_a_run_nor_its_log_holds_what_a_terminal_obeys(tiny, tmp_path):
    tar = hostile_tar(tmp_path)
    folder = tmp_path / "run"
    overrides = [
        f"data.shards={json.dumps(str(tar))}",
        "data.pack_length=512",
        "data.max_quarantine_rate=0",
    ]
    command = [
        "-m",
        "mmtrain.launch",
        str(tiny / "config.yaml"),
        f"run.dir={folder}",
        "parallel.pipeline=1",
    ]
    ended = subprocess.run(
        [sys.executable, *command, *overrides], capture_output=True, timeout=120, check=False
    )
    (log,) = folder.glob("*/log.txt")
    assert b"samples read are quarantined" in ended.stderr and ended.returncode == 2
    assert (
        b"quarantined bad" in ended.stdout and b"samples read are quarantined" in log.read_bytes()
    )
    for said in (ended.stdout, ended.stderr, log.read_bytes()):
        assert_obeyed_by_none(said)


# Their stdout is log.PrefixedLog, in ranks and while the launcher waits for them; of gpus.py and
# both probes, a pipe.
OTHERS = {
    "mmtrain/runtime/rank.py",
    "mmtrain/checkpoint/write.py",
    "mmtrain/doctor/runs.py",
    "mmtrain/model/probe.py",
    "mmtrain/training/loop.py",
    "mmtrain/runtime/rendezvous.py",
    "mmtrain/runtime/gpus.py",
}


def test_only_one_module_prints():
    printing = set()
    for file in (*ROOT.glob("mmtrain/**/*.py"), *TOOLS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ):
                printing.add(file.relative_to(ROOT).as_posix())
    assert printing == {"mmtrain/base/printing.py", *OTHERS}
