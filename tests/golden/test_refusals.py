"""Wrong input against its record: exit code, and what the message must name: a key, an option, a
file, advice.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden.wrong_things import make_wrong_things
from json_files import read_json

from mmtrain.__main__ import main

RECORD = read_json(Path(__file__).with_name("refusals.json"))
CASES = RECORD["cases"]


@pytest.fixture(scope="module")
def places(tiny, checkpoint, tmp_path_factory) -> dict[str, Path]:
    """The folders that the recorded arguments name in braces."""
    wrong = tmp_path_factory.mktemp("wrong")
    make_wrong_things(wrong, RECORD["files"], tiny, checkpoint.path)
    return {"tiny": tiny, "wrong": wrong, "checkpoint": checkpoint.path}


def filled(text: str, places: dict[str, Path]) -> str:
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


def exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse's
        return ended.code


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case["argv"])[:80])
def test_wrong_input_is_refused_by_the_name_of_what_is_wrong(
    case, places, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in case.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    code = exit_code([filled(argument, places) for argument in case["argv"]])
    printed, message = capsys.readouterr()
    assert code == case["exit"], message or printed
    assert "Traceback" not in message and "[A-Za-z" not in message and "{%]" not in message
    missing = [word for word in case["words"] if filled(word, places) not in message]
    assert missing == [], f"not named in: {message}"
    assert list(tmp_path.rglob("*.*")) == [], "something was written"


def test_the_record_holds_200_wrong_inputs_of_every_command() -> None:
    assert len(CASES) >= 200 and len({json.dumps(case) for case in CASES}) == len(CASES)
    commands = {
        "train",
        "plan",
        "calibrate",
        "shard",
        "index",
        "inspect",
        "report",
        "export",
        "chat",
        "convert",
    }
    assert commands | {"record", "doctor"} <= {case["argv"][0] for case in CASES}
