"""Cost of a data set by its size: counting and opening it, the first batch, planning.

Synthetic shards of 1,000 samples, tars that are holes but for what is read --> an act at a time,
each in a process of its own --> a column of each size, and exponents of growth

Times are taken after imports. Memory is the process's own, without what imports took; pages of
mapped tables count while no other process maps them. A wait is the slowest micro-batch of a step
less the median one; a border of two groups, or of two epochs, lies in the middle of the step. There
are no workers, so reading and decoding are included. With --rivals other loaders start on whole
tars of tiny pictures, which favours them; they neither tokenize nor pack.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_tables import finish, print_table

from mmtrain.base.printing import print_info
from mmtrain.doctor.machine import describe_machine
from mmtrain.runtime.child import python_child

EXAMPLES = """\
examples:
  100,000 and a million samples, a minute; the numbers as JSON too:
    python tools/bench/bench.py data --json data.json
  up to 100 million, some minutes, on a disk with room for 20 GB:
    python tools/bench/bench.py data --samples 100000 1000000 10000000 100000000 --folder /scratch
  beside webdataset, mosaicml-streaming and Megatron-Energon, which an environment RIVALS has:
    python tools/bench/bench.py data --rivals RIVALS/bin/python
  shards on a server, behind slow and broken lines, 6 minutes and 1.5 GB:
    python tools/bench/bench.py data --remote
"""
HERE = Path(__file__).parent
RIVALS = {
    "webdataset": "webdataset",
    "streaming": "mosaicml-streaming",
    "energon": "Megatron-Energon",
}
MOST_OF_RIVALS = 1_000_000  # samples: they take minutes to prepare
KEPT_FREE = 2e9  # bytes of the disk

Found = dict[str, dict[str, float]]  # by act


def shards_of(text: str) -> int:
    """Parse a number of samples that fills whole shards."""
    number = int(float(text))
    if number < 1000 or number % 1000:
        raise argparse.ArgumentTypeError("a multiple of 1000 is needed")
    return number


def shards_on_servers(text: str) -> int:
    """Parse a number of shards that take more than their copies may."""
    number = int(text)
    if number < 5:
        raise argparse.ArgumentTypeError("at least 5 are needed")
    return number


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write every single measurement there")
    add(
        "--samples",
        type=shards_of,
        nargs="+",
        default=[100_000, 1_000_000],
        metavar="N",
        help="sizes of the data set (100000 1000000)",
    )
    add("--folder", type=Path, metavar="PATH", help="disk for the data, which are removed again")
    add(
        "--rivals",
        metavar="PYTHON",
        help="start other loaders, too, up to a million samples, by this interpreter",
    )
    add(
        "--remote",
        type=shards_on_servers,
        nargs="?",
        const=7,
        metavar="SHARDS",
        help="read shards of 1,000 samples from servers on this machine instead (7, 430 MB)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure one size after the other, and print a table."""
    if options.remote:
        from bench_data_remote import run as run_remote

        return run_remote(options)
    result: dict[str, Any] = {"machine": describe_machine(), "samples": {}, "left_out": []}
    sizes = sorted(set(options.samples))
    for samples in sizes:
        with tempfile.TemporaryDirectory(prefix="bench_data-", dir=options.folder) as name:
            folder = Path(name)
            refusal = why_no_room(folder, samples, options.rivals is not None)
            if refusal:
                print_info(refusal)
                result["left_out"].append(refusal)
                continue
            print_info(f"measuring {samples:,} samples")
            found = measure(folder, samples)
            if options.rivals and samples <= MOST_OF_RIVALS:
                found |= measure_rivals(folder, samples, options.rivals)
        result["samples"][str(samples)] = found

    measured = {int(samples): found for samples, found in result["samples"].items()}
    result["growth"] = {}
    rows = []
    for label, act, key, scale, form, is_cost in ROWS:
        values = values_of(measured, act, key)
        if not values:
            continue
        exponent = growth(values) if is_cost else None
        if exponent is not None:
            result["growth"][label] = exponent
        cells = []
        for samples in measured:
            cells.append(f"{values[samples] * scale:{form}}" if samples in values else "")
        rows.append((label, *cells, "" if exponent is None else f"{exponent:.2f}"))
    print_info("")
    print_table(("", *(f">{samples:,}" for samples in measured), ">growth"), rows)
    print_info("", "growth: exponent of the number of samples that fits the times best")
    print_info(*result["left_out"])
    finish(result, options.json)
    return 0


# Label, act, value, factor, format; whether it has an exponent of growth.
ROWS: list[tuple[str, str, str, float, str, bool]] = [
    ("catalogue, one worker: processor s", "count one", "processor_seconds", 1, ".2f", True),
    ("  million samples a processor second", "count one", "samples_per_second", 1e-6, ".2f", False),
    ("  wall s", "count one", "seconds", 1, ".2f", False),
    ("catalogue, all cores: wall s", "count all", "seconds", 1, ".2f", True),
    ("opening the catalogue: ms", "open", "catalog_seconds", 1e3, ".1f", True),
    ("  private MB", "open", "catalog_megabytes", 1, ".1f", False),
    ("opening catalogue, tokenizer, epoch: ms", "open", "seconds", 1e3, ".0f", True),
    ("  private MB", "open", "megabytes", 1, ".1f", False),
    ("first batch, new run: s", "batch fresh", "first_seconds", 1, ".3f", True),
    ("first batch, resumed in epoch 3: s", "batch resumed", "first_seconds", 1, ".3f", True),
    ("  private MB after a step", "batch resumed", "megabytes", 1, ".1f", False),
    ("median batch: ms", "batch fresh", "median_seconds", 1e3, ".1f", False),
    ("wait at a border of groups: ms", "batch groups", "longest_wait_seconds", 1e3, ".1f", True),
    ("wait at a border of epochs: ms", "batch epochs", "longest_wait_seconds", 1e3, ".1f", True),
    ("drawing an epoch's shards: ms", "plan", "epoch_seconds", 1e3, ".1f", True),
    ("planning: million samples a core second", "plan", "samples_per_second", 1e-6, ".2f", False),
    ("  2,048 tiles a pack", "plan", "samples_per_second_with_tiles", 1e-6, ".2f", False),
]
for _name, _label in RIVALS.items():
    ROWS.append((f"{_label}, first sample: s", f"start {_name}", "seconds", 1, ".3f", True))
    ROWS.append(("  private MB", f"start {_name}", "megabytes", 1, ".1f", False))
ROWS.append(("energon prepare: s", "prepare energon", "seconds", 1, ".1f", True))


def values_of(measured: Mapping[int, Found], act: str, key: str) -> dict[int, float]:
    """Return a measurement by the number of samples, where it was made."""
    values = {}
    for samples, found in measured.items():
        if key in found.get(act, {}):
            values[samples] = found[act][key]
    return values


def growth(values: Mapping[int, float]) -> float | None:
    """Return the exponent e for which values ~ samples ** e, by least squares; None for one."""
    if len(values) < 2 or min(values.values()) <= 0:
        return None
    logs = [math.log(value) for value in values.values()]
    return float(np.polyfit([math.log(samples) for samples in values], logs, 1)[0])


def why_no_room(folder: Path, samples: int, with_rivals: bool) -> str:
    """Return why a data set does not fit on a disk; nothing where it does."""
    from bench_data_shards import BYTES_A_SAMPLE, REAL_BYTES_A_SAMPLE, SAMPLES

    needed = samples * BYTES_A_SAMPLE + KEPT_FREE
    if with_rivals and samples <= MOST_OF_RIVALS:
        needed += 2 * samples * REAL_BYTES_A_SAMPLE
    files = 2 * samples // SAMPLES
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    # 0: the file system has no limit
    lacks_files = disk.f_files > 0 and disk.f_favail < files
    if free >= needed and not lacks_files:
        return ""
    return (
        f"{samples:,} samples are not measured: they need {needed / 1e9:.1f} GB and {files:,} "
        f"files, but the disk of {folder.parent} has {free / 1e9:.1f} GB and "
        f"{disk.f_favail:,} files free. Name another disk by --folder"
    )


def measure(folder: Path, samples: int) -> Found:
    """Return what each act measured on a data set that is made for it."""
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}

    def act(*arguments: object) -> dict[str, float]:
        name, *others = arguments
        script = (HERE / "bench_data_acts.py", name, folder, *others)
        return last_line(script, **environment)

    found = {"write": act("write", samples), "count one": act("count", "one")}
    found["count one"]["samples_per_second"] = samples / found["count one"]["processor_seconds"]
    shutil.rmtree(folder / "cache")
    found["count all"] = act("count", "all")
    found["prepare"] = act("prepare")
    found["open"] = act("open")
    for name, start in (
        ("fresh", "fresh"),
        ("resumed", "resumed"),
        ("groups", "border of groups"),
        ("epochs", "border of epochs"),
    ):
        found[f"batch {name}"] = act("batch", start)
    found["plan"] = act("plan")
    return found


def measure_rivals(folder: Path, samples: int, interpreter: str) -> Found:
    """Return how other loaders start, those that an interpreter has."""
    script = HERE / "bench_data_rivals.py"
    last_line((HERE / "bench_data_acts.py", "write_real", folder, samples))
    found = {}
    for name, label in RIVALS.items():
        prepared = last_line((script, name, "prepare", folder), interpreter=interpreter)
        if "missing" in prepared:
            print_info(f"{label} is not measured: {prepared['missing']}")
            continue
        found[f"prepare {name}"] = prepared
        start = (script, name, "start", folder)
        found[f"start {name}"] = last_line(start, interpreter=interpreter)
    return found


def last_line(script: Sequence[object], **options: str) -> dict[str, Any]:
    """Run a script in a new process, and return the JSON of the last line that it prints.

    `options` are the interpreter, and variables of its environment.
    """
    command = python_child(*script, **options)
    ran = subprocess.run(**command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout.splitlines()[-1])
