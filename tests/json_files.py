"""JSON files of tests, read and written."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
