"""A configuration or model folder from anybody is refused in one message, within 5 s and 1 GB."""

import json
import subprocess
import sys
from pathlib import Path

from hostile_files import cases, damaged

SECONDS, BYTES = 5, 10**9


def launched(commands: list[list[str]], seconds: float) -> list[dict]:
    """What came of each launch command, with --plan; fewer results where one took the process with it."""
    ran = subprocess.run(
        [sys.executable, Path(__file__).parent / "hostile_files.py"],
        input="".join(json.dumps(command) + "\n" for command in commands),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_hostile_configurations_and_model_folders_are_refused_in_seconds_and_little_memory(tiny, tmp_path):
    commands = dict(cases(tmp_path, tiny / "llm"))
    results = dict(zip(commands, launched(list(commands.values()), 240), strict=True))
    wrong = {
        name: result
        for name, result in results.items()
        if result["code"] != 2
        or not result["said"].startswith("error: ")
        or len(result["said"]) > 6000
        or result["seconds"] > SECONDS
    }
    assert not wrong
    assert max(result["peak"] for result in results.values()) < BYTES


def test_a_damaged_byte_of_a_model_folder_is_a_clear_error_or_of_no_consequence_to_the_plan(tiny, tmp_path):
    commands = dict(damaged(tmp_path, tiny / "llm", 30))
    results = dict(zip(commands, launched(list(commands.values()), 120), strict=True))
    wrong = {
        name: result
        for name, result in results.items()
        if result["code"] != 0 and not (result["code"] == 2 and result["said"].startswith("error: "))
    }
    assert not wrong
    assert sum(result["code"] == 2 for result in results.values()) > 10
