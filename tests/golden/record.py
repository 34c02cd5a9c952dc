"""Read, compute, compare and write the golden files. To record anew what has changed on purpose,
from the root:

PYTHONPATH=.:tests:tools/demo_backbones .venv/bin/python -m golden.record
order|tokens|exports|projectors|faults ...

The cases stay; the commit says why what comes of them has changed. Wrong inputs are a table to edit
by hand.
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
from golden.faults import outcome_of
from tiny_models import make_config, make_tiny_llm, make_tiny_shards, make_tiny_vision

# NAME.json: `facts` by case and what they were `recorded_with`; of faults `records`
FOLDER = Path(__file__).parent


def fault_records() -> list[dict[str, Any]]:
    """Read the records of faults."""
    return json.loads((FOLDER / "faults.json").read_text())["records"]


def surroundings(name: str) -> dict[str, str]:
    """Return the versions, and for trained bits the CPU, that facts depend on."""
    found = {library: version(library) for library in CASES["libraries"][name]}
    if name == "projectors":
        lines = re.findall(
            r"^(model name|cpu family|model)\s*: (.*)$",
            Path("/proc/cpuinfo").read_text(),
            re.MULTILINE,
        )
        found |= dict(lines) | {"instructions": torch.backends.cpu.get_cpu_capability()}
    return found


def compute(name: str, case: str, folder: Path) -> Any:
    """Compute a case's facts as JSON holds them, in a folder that cases share."""
    return json.loads(json.dumps(FACTS[name](folder, case)))


def differences(recorded: Any, computed: Any, path: str = "") -> Iterator[str]:
    """Say for each value that differs where it is, what was recorded and what was computed."""
    if isinstance(recorded, dict) and isinstance(computed, dict):
        for key in dict.fromkeys((*recorded, *computed)):
            yield from differences(
                recorded.get(key, "nothing"), computed.get(key, "nothing"), f"{path}/{key}"
            )
    elif (
        isinstance(recorded, list) and isinstance(computed, list) and len(recorded) == len(computed)
    ):
        for place, pair in enumerate(zip(recorded, computed, strict=True)):
            yield from differences(*pair, f"{path}/{place}")
    elif recorded != computed:
        yield f"{path}: recorded {recorded!r}, is {computed!r}"


def renewed_facts(name: str, scratch: Path) -> str:
    """Compute the facts of a file again, as its text."""
    facts = {case: compute(name, case, scratch) for case in CASES[name]}
    text = json.dumps(
        {"recorded_with": surroundings(name), "facts": facts}, indent=1, ensure_ascii=False
    )
    return re.sub(
        r"\[\n *([^][{}]{1,100})\n *\]",
        lambda found: "[" + re.sub(r"\n *", " ", found[1]) + "]",
        text,
    )


def renewed_faults(scratch: Path) -> str:
    """Make every fault again; return the records, one a line, so that a diff shows which have
    changed.
    """
    records = fault_records()
    make_tiny_llm(scratch / "llm")
    make_tiny_vision(scratch / "vision")
    make_tiny_shards(scratch / "shards", two_image_fraction=0.125)
    make_config(scratch, "tiny")
    for number, record in enumerate(records):
        record["outcome"] = outcome_of(record["case"], scratch, scratch / str(number))
        print(record["name"], record["outcome"], flush=True)
        del record["outcome"]["stderr"]
    lines = ",\n".join(map(json.dumps, records))
    return f'{{"records": [\n{lines}\n]}}'


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            renewed = (
                renewed_facts(name, Path(folder)) if name in FACTS else renewed_faults(Path(folder))
            )
        (FOLDER / f"{name}.json").write_text(renewed + "\n")
