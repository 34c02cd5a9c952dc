"""Measure the data layer on this machine: the loader, the sharding tool, and the planning of an epoch.

    loader      samples/s against webdataset + Pillow doing the same work with the same workers, and against the bound:
                the same images, already in memory, decoded, padded and resized in a bare loop
    sharding    MB/s of tools/shard_dataset.py, start of the program included, against `tar` of the same files, which
                decodes no image, and against `tar` followed by what the tool does beyond it
    planning    seconds, memory and fill of an epoch's packs, against best-fit decreasing over the whole epoch at once:
                from lengths in memory, and from index files
    all         one after the other

Everything is made up here from a seed, in a folder that is deleted at the end: photographs of some 55 kB, 640 x 480 and
the like; index files of 558,128 samples in 559 shards. Contestants take turns in one run; a table shows the median of
all repetitions and, in brackets, the least and the largest. That contestants do equal work is checked first. What else
runs on the machine distorts every number: see the load average that is printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_photographs import SHARDS, make_photographs
from bench_tables import print_table
from bench_timing import Spread, Times, rates, ratios

from mmtrain.base.printing import run_command, say

EXAMPLES = """\
examples:
  everything, some minutes; the numbers as JSON too:
    python tools/bench/bench_data.py --json bench_data.json
  the loader with 4 and 8 workers, packs of 4096 tokens:
    python tools/bench/bench_data.py loader --workers 4 8 --pack-length 4096
  what a fast disk makes of sharding (the folder must be on it):
    python tools/bench/bench_data.py sharding --images 10000 --folder /fast/disk
  does it run at all? a few seconds, numbers without meaning:
    python tools/bench/bench_data.py --quick

exit codes:
  0    done
  2    wrong input; the message says what to do
  130  stopped by Ctrl-C
"""
PARTS = ("loader", "sharding", "planning")
PLANNED_SAMPLES, PLANNED_SHARDS = 558_128, 559  # of LLaVA's pre-training data, a thousand a shard
PACK_LENGTHS = (2048, 4096, 8192)
QUICK = {"images": 24, "repetitions": 1, "samples": 3_000, "shards": 3, "workers": [0, 1]}
LIBRARIES = ("numpy", "pillow", "tokenizers", "torch", "transformers", "webdataset")


def bench_data(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that the options name, print their tables and return all numbers."""
    parts = PARTS if options.part == "all" else (options.part,)
    result: dict[str, Any] = {
        "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "repetitions": options.repetitions,
        "load_average_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory(prefix="bench_data-", dir=options.folder) as folder:
        data = Path(folder) / "data"
        data.mkdir()
        if "loader" in parts or "sharding" in parts:
            say(f"making {options.images:,} photographs")
            make_photographs(data, options.images)
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "loader": lambda: bench_loader(data, options),
            "sharding": lambda: bench_sharding(data, options),
            "planning": lambda: bench_planning(Path(folder) / "indexes", options),
        }
        for part in parts:
            result[part] = runs[part]()
    result["load_average_after"] = os.getloadavg()[0]
    cores, before, after = result["machine"]["cores"], result["load_average_before"], result["load_average_after"]
    say("", f"{cores} cores; load average of the last minute {before:.1f} at the beginning, {after:.1f} at the end")
    return result


def bench_loader(data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Samples per second for each number of workers."""
    import bench_loader as loader
    import bench_sharding
    import torch  # not above: the processes that planning is measured in would import it, and have its memory

    torch.set_num_threads(1)  # as in the workers
    shards = data / "shards"
    bench_sharding.shard(data, shards, 1, "--tokenizer", loader.LLM, "--template", "plain")
    say("loader: comparing the tokens, labels and pixels of all samples")
    loader.check_equal_work(shards, options.pack_length)
    result: dict[str, Any] = {"samples": options.images, "pack_length": options.pack_length, "workers": {}}
    rows = []
    for workers in options.workers:
        say(f"loader: racing with {workers} workers")
        times = loader.race(shards, options.pack_length, workers, options.repetitions)
        rivals = [name for name in times if name != loader.MMTRAIN]
        result["workers"][str(workers)] = _as_dict(times, options.images, {loader.MMTRAIN: rivals})
        speed = rates(times, options.images)
        rows.append((f"{workers} workers", *(speed[name].text(",.1f") for name in times)))
        against = [ratios(times, loader.MMTRAIN, name).text(".3f") for name in rivals]
        rows.append((f"{loader.MMTRAIN}, as a multiple", "1", *against))
    say("", f"loader, samples/s: {options.images:,} samples, packs of {options.pack_length:,} tokens")
    print_table(("", *(f">{name}" for name in times)), rows)
    return result


def bench_sharding(data: Path, options: argparse.Namespace) -> dict[str, Any]:
    """MB per second."""
    import bench_sharding as sharding

    say("sharding: comparing the images' bytes")
    shards = data / "checked_shards"
    sharding.shard(data, shards, 2)
    sharding.check_equal_work(data, shards)
    say("sharding: racing")
    size = sharding.bytes_of(data)
    times = sharding.race(data, [1, 2], options.repetitions)
    tools = [sharding.tool_name(workers) for workers in (1, 2)]
    speed = rates(times, size / 1e6)
    rows = [
        (name, speed[name].text(",.1f"), *(ratios(times, tool, name).text(".3f") for tool in tools)) for name in times
    ]
    say("", f"sharding, MB/s: {options.images:,} images and their JSON, {size / 1e6:,.1f} MB")
    print_table(("", ">MB/s", *(f">{tool}, as a multiple" for tool in tools)), rows)
    return {
        "images": options.images,
        "bytes": size,
        **_as_dict(times, size / 1e6, {tool: list(times) for tool in tools}),
    }


def bench_planning(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, MB and fill."""
    import bench_planning as planning

    samples, shards, repetitions = options.samples, options.shards, options.repetitions
    say(f"planning: {samples:,} lengths in memory")
    arrays = [
        planning.plan_arrays(kind, pack_length, samples, shards, repetitions)
        for kind in planning.KINDS
        for pack_length in PACK_LENGTHS
    ]
    folder.mkdir()
    say(f"planning: writing {shards:,} index files")
    planning.write_indexes(folder, samples, shards)
    opened = planning.plan_indexes(folder, options.pack_length, repetitions)
    say("", f"planning an epoch of {samples:,} samples from lengths in memory")
    columns = ("", ">pack_length", ">packs", ">full", ">of whole-epoch fill", ">seconds", ">peak MB")
    print_table(
        (*columns, ">after imports"),
        [
            (
                one.kind,
                f"{one.pack_length:,}",
                f"{one.packs:,}",
                f"{one.fill:.2%}",
                f"{one.fill_ratio:.4f}",
                one.seconds.text(".2f"),
                f"{one.peak_bytes / 1e6:,.0f}",
                f"{one.extra_peak_bytes / 1e6:,.0f}",
            )
            for one in arrays
        ],
    )
    say(
        "",
        f"the same from {shards:,} index files, {opened.index_bytes / 1e6:,.1f} MB, packs of {options.pack_length:,}",
    )
    spreads = {
        "reading the indexes, seconds": opened.catalog_seconds.text(".2f"),
        "planning the epoch, seconds": opened.plan_seconds.text(".2f"),
        "both, seconds": opened.both_seconds.text(".2f"),
        "peak of the process, MB": _in_mb(opened.peak_bytes),
        "of it after the imports, MB": _in_mb(opened.extra_peak_bytes),
    }
    print_table(("", ">"), spreads.items())
    return {
        "samples": samples,
        "shards": shards,
        "lengths": [{**asdict(one), "fill_ratio": one.fill_ratio} for one in arrays],
        "indexes": {"pack_length": options.pack_length, **asdict(opened)},
    }


def _as_dict(times: Times, work: float, compared: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """JSON form of a race: rates, and for some contestants the ratios to others."""
    return {
        "rates": {name: asdict(rate) for name, rate in rates(times, work).items()},
        "ratios": {
            name: {rival: asdict(ratios(times, name, rival)) for rival in rivals} for name, rivals in compared.items()
        },
    }


def _in_mb(values: Spread) -> str:
    return f"{values.median / 1e6:,.0f} ({values.min / 1e6:,.0f} - {values.max / 1e6:,.0f})"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; `--help` teaches by example."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = lambda text: Path(text).expanduser()  # noqa: E731 - the shell leaves --folder=~/data as it is
    add = parser.add_argument
    add("part", nargs="?", choices=(*PARTS, "all"), default="all", help="what to measure (all)")
    add("--json", type=path, metavar="FILE", help="write every single measurement there")
    add("--folder", type=path, metavar="DIR", help="where the made-up data lie meanwhile (the system's temporary one)")
    add("--repetitions", type=int, default=5, metavar="N", help="of each contestant (%(default)s)")
    add("--images", type=int, default=1000, metavar="N", help="photographs, for loader and sharding (%(default)s)")
    add("--workers", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="of the loaders (0 1 2)")
    add("--pack-length", type=int, default=2048, metavar="N", help="tokens, for loader and index files (%(default)s)")
    add("--samples", type=int, default=PLANNED_SAMPLES, metavar="N", help="for planning (%(default)s)")
    add("--shards", type=int, default=PLANNED_SHARDS, metavar="N", help="for planning (%(default)s)")
    add("--quick", action="store_true", help="a few seconds: so little of everything that only its running is shown")
    options = parser.parse_args(arguments)
    if options.quick:
        for name, value in QUICK.items():
            setattr(options, name, value)
    least = {"repetitions": 1, "images": SHARDS, "samples": 1, "shards": 1, "pack_length": 1024}
    for name, number in least.items():
        if getattr(options, name) < number:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: at least {number} is needed")
    for number in options.workers:
        if not 0 <= number <= SHARDS:
            parser.error(f"--workers {number}: from 0 to {SHARDS} can share the {SHARDS} shards of webdataset's loader")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 and one message for what the user can mend."""
    options = parse_arguments(arguments)

    def run() -> None:
        result = bench_data(options)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    return run_command(run, options.folder, "stopped by Ctrl-C; nothing is left")


if __name__ == "__main__":
    sys.exit(main())
