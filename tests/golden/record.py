"""Compute, compare and write the golden files. To record anew what has changed on purpose, from the repository's root:

PYTHONPATH=.:tests .venv/bin/python -m golden.record order tokens
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from golden.facts import CASES, FACTS

FOLDER = Path(__file__).parent  # NAME.json: `facts` by case, and what they were `recorded_with`


def surroundings(name: str) -> dict[str, str]:
    """Return the versions, and for trained bits the CPU, that facts depend on."""
    found = {library: version(library) for library in CASES["libraries"][name]}
    if name == "projectors":
        lines = re.findall(r"^(model name|cpu family|model)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        found |= dict(lines) | {"instructions": torch.backends.cpu.get_cpu_capability()}
    return found


def compute(name: str, case: str, folder: Path) -> Any:
    """Compute a case's facts as JSON holds them, in a folder that cases share."""
    return json.loads(json.dumps(FACTS[name](folder, case)))


def differences(recorded: Any, computed: Any, path: str = "") -> Iterator[str]:
    """Say for each value that differs where it is, what was recorded and what was computed."""
    if isinstance(recorded, dict) and isinstance(computed, dict):
        for key in dict.fromkeys((*recorded, *computed)):
            yield from differences(recorded.get(key, "nothing"), computed.get(key, "nothing"), f"{path}/{key}")
    elif isinstance(recorded, list) and isinstance(computed, list) and len(recorded) == len(computed):
        for place, pair in enumerate(zip(recorded, computed, strict=True)):
            yield from differences(*pair, f"{path}/{place}")
    elif recorded != computed:
        yield f"{path}: recorded {recorded!r}, is {computed!r}"


if __name__ == "__main__":
    for name in sys.argv[1:] or FACTS:
        with tempfile.TemporaryDirectory() as folder:
            facts = {case: compute(name, case, Path(folder)) for case in CASES[name]}
        text = json.dumps({"recorded_with": surroundings(name), "facts": facts}, indent=1, ensure_ascii=False)
        text = re.sub(r"\[\n *([^][{}]{1,100})\n *\]", lambda found: "[" + re.sub(r"\n *", " ", found[1]) + "]", text)
        (FOLDER / f"{name}.json").write_text(text + "\n")
