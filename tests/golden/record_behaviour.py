"""Record anew how plans, instruction lists and broken runs are now; the commit then says why they have changed.

`PYTHONPATH=.:tests python -m golden.record_behaviour instructions|plans|faults [NAME ...]`: the cases in that JSON file
stay, or those of these names; what comes of them is written again. Wrong inputs are a table to edit by hand.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from golden.faults import outcome_of
from golden.planning import facts_of, lists_of, shape_of
from tiny_models import make_config, make_tiny_llm, make_tiny_shards, make_tiny_vision


def records_of(kind: str) -> list[dict[str, Any]]:
    """Read the records of plans, instructions or faults."""
    return json.loads(Path(__file__).with_name(f"{kind}.json").read_text())["records"]


def renew(kind: str, names: Sequence[str], scratch: Path) -> None:
    """Compute a file's records again and write them one a line, so that a diff shows which have changed."""
    records, began = records_of(kind), time.perf_counter()
    if kind == "faults":
        make_tiny_llm(scratch / "llm")
        make_tiny_vision(scratch / "vision")
        make_tiny_shards(scratch / "shards", two_image_fraction=0.125)
        make_config(scratch, "tiny")
    for number, record in enumerate(records):
        if names and record["name"] not in names:
            continue
        if kind == "faults":
            record["outcome"] = outcome_of(record["case"], scratch, scratch / str(number))
            print(record["name"], record["outcome"], flush=True)
            del record["outcome"]["stderr"]
        elif kind == "plans":
            record["facts"] = facts_of(record["case"], scratch)
            record["facts"].pop("message", None)
        else:
            record["shape"] = shape_of(record["case"], scratch)
            record["lists"] = lists_of(record["shape"])
    lines = ",\n".join(map(json.dumps, records))
    text = f'{{"seconds_to_record": {time.perf_counter() - began:.0f}, "records": [\n{lines}\n]}}\n'
    Path(__file__).with_name(f"{kind}.json").write_text(text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        renew(sys.argv[1], sys.argv[2:], Path(folder))
