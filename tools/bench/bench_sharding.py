"""MB per second of tools/shard_dataset.py against `tar` of the same files, which looks into none of them.

FOLDER/llava.json, FOLDER/images --shard_dataset--> tars, indexes, checksums; every image decoded once
                                 --tar cf--> one tar; then what the tool does beyond it:
    flush           wait until the disk has it
    image check     read each image again and decode it as the tool does: every bit is read, at an eighth of the size
    full decode     the same at full size, as a loop that one writes by hand would check images

Page cache warm; what was written before is flushed to the disk before the clock starts. The checks run in one process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_photographs import IMAGES, JSON, SHARDS
from bench_timing import Times, alternate

from mmtrain.data.samples.records import read_image
from mmtrain.data.stream.images import decode_image

TOOL = Path(__file__).parents[1] / "shard_dataset.py"
TAR = "tar"
FLUSHED = "tar + flush"
CHECKED = "tar + flush + image check"
DECODED = "tar + flush + full decode"


def tool_name(workers: int) -> str:
    """Of a contestant."""
    return f"shard_dataset, {workers} worker{'s' if workers > 1 else ''}"


def race(folder: Path, workers: list[int], repetitions: int) -> Times:
    """Seconds for all files of a data set, by contestant; of one that is a program, its start included."""
    out = folder / "raced"
    names = sorted(str(file.relative_to(folder / IMAGES)) for file in (folder / IMAGES).rglob("*.jpg"))
    contestants: dict[str, Callable[[], None]] = {
        **{tool_name(number): lambda number=number: shard(folder, out, number) for number in workers},
        TAR: lambda: _tar(folder, out),
        FLUSHED: lambda: _flushed(folder, out),
        CHECKED: lambda: _checked(folder, out, names),
        DECODED: lambda: _decoded(folder, out, names),
    }
    return alternate({name: _timed(run, out) for name, run in contestants.items()}, repetitions)


def _timed(run: Callable[[], None], out: Path) -> Callable[[], float]:
    def timed() -> float:
        out.mkdir()
        os.sync()
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        shutil.rmtree(out)
        return seconds

    return timed


def shard(folder: Path, out: Path, workers: int, *options: str) -> None:
    """Run the tool on a data set of bench_photographs."""
    records = sum(1 for _ in (folder / IMAGES).rglob("*.jpg"))
    command = [sys.executable, TOOL, "--json", folder / JSON, "--images", folder / IMAGES, "--out", out]
    command += ["--workers", str(workers), "--samples-per-shard", str(max(records // SHARDS, 1)), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def bytes_of(folder: Path) -> int:
    """What all contestants read: images and JSON."""
    return (folder / JSON).stat().st_size + sum(file.stat().st_size for file in (folder / IMAGES).rglob("*.jpg"))


def check_equal_work(folder: Path, shards: Path) -> None:
    """Assert that the tool's tars and tar's own hold the same images, byte for byte."""
    out = folder / "checked"
    out.mkdir()
    _tar(folder, out)
    ours, theirs = (_images(list(where.glob("*.tar"))) for where in (shards, out))
    shutil.rmtree(out)
    sources = sorted(file.read_bytes() for file in (folder / IMAGES).rglob("*.jpg"))
    assert ours == theirs == sources, f"{len(ours)}, {len(theirs)} and {len(sources)} images, or their bytes differ"


def _images(tars: list[Path]) -> list[bytes]:
    found = []
    for path in tars:
        with tarfile.open(path) as tar:
            found += [tar.extractfile(member).read() for member in tar if member.name.endswith(".jpg")]
    return sorted(found)


def _tar(folder: Path, out: Path) -> None:
    subprocess.run(["tar", "cf", out / "all.tar", "-C", folder, JSON, IMAGES], check=True)


def _flushed(folder: Path, out: Path) -> None:
    _tar(folder, out)
    with (out / "all.tar").open("rb+") as stream:
        os.fsync(stream.fileno())


def _checked(folder: Path, out: Path, names: list[str]) -> None:
    _flushed(folder, out)
    images = (folder / IMAGES).resolve()
    for name in names:
        read_image(images, name)


def _decoded(folder: Path, out: Path, names: list[str]) -> None:
    _flushed(folder, out)
    for name in names:
        decode_image((folder / IMAGES / name).read_bytes())
