"""A configuration or model folder from anybody is refused in one message, within 5 s and 1 GB."""

import json
import subprocess
import sys
from pathlib import Path

from hostile_files import cases

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
    made = dict(cases(tmp_path, tiny / "llm"))
    results = launched(list(made.values()), 240)
    assert len(results) == len(made)
    wrong = {
        name: result
        for name, result in zip(made, results, strict=True)
        if result["code"] != 2
        or not result["said"].startswith("error: ")
        or len(result["said"]) > 6000
        or result["seconds"] > SECONDS
    }
    assert not wrong
    assert results[-1]["peak"] < BYTES
