"""Start other loaders on whole tars of tiny samples, each in a process of its own.

python bench_data_rivals.py NAME prepare | start FOLDER --> JSON, the last line of the output

FOLDER/tars    webdataset and Megatron-Energon read them; Energon's index and metadata lie beside
FOLDER/mds     the samples of the tars for mosaicml-streaming

This file imports nothing of mmtrain: the interpreter that has the rivals need not have it.
"""

import importlib
import importlib.metadata
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench_data_memory import private_bytes

BUFFER = 1000  # samples that are shuffled together where a loader asks
DISTRIBUTIONS = {
    "webdataset": "webdataset",
    "streaming": "mosaicml-streaming",
    "energon": "megatron-energon",
}


def webdataset_samples(folder: Path) -> Callable[[], Iterator[Any]]:
    """Return what opens the tars, in random order, samples shuffled in a buffer."""
    webdataset = importlib.import_module("webdataset")

    def start() -> Iterator[Any]:
        tars = sorted(map(str, (folder / "tars").glob("*.tar")))
        return iter(webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(BUFFER))

    return start


def streaming_samples(folder: Path) -> Callable[[], Iterator[Any]]:
    """Return what opens the MDS shards, shuffled by the default algorithm."""
    streaming = importlib.import_module("streaming")

    def start() -> Iterator[Any]:
        return iter(
            streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=1)
        )

    return start


def energon_samples(folder: Path) -> Callable[[], Iterator[Any]]:
    """Return what opens the prepared tars, samples shuffled in a buffer."""
    energon = importlib.import_module("megatron.energon")

    def start() -> Iterator[Any]:
        workers = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
        samples = energon.get_train_dataset(
            folder / "tars",
            worker_config=workers,
            batch_size=1,
            shuffle_buffer_size=BUFFER,
            max_samples_per_sequence=100,
        )
        return iter(energon.get_loader(samples))

    return start


def prepare_streaming(folder: Path) -> None:
    """Write the samples of the tars as MDS shards."""
    streaming = importlib.import_module("streaming")
    columns = {"json": "bytes", "jpg": "bytes"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for path in sorted((folder / "tars").glob("*.tar")):
            with tarfile.open(path) as tar:
                members = iter(tar)
                for pair in zip(members, members, strict=True):
                    sample = {}
                    for column, member in zip(columns, pair, strict=True):
                        file = tar.extractfile(member)
                        assert file is not None, f"{member.name} is no file"
                        sample[column] = file.read()
                    writer.write(sample)


def prepare_energon(folder: Path) -> None:
    """Write Energon's index of the tars, and its metadata."""
    options = {
        "--split-ratio": "1,0,0",
        "--sample-type": "CaptioningSample",
        "--field-map": json.dumps({"image": "jpg", "caption": "json"}),
    }
    command = [str(Path(sys.executable).with_name("energon")), "prepare", "--non-interactive"]
    for option in options.items():
        command += option
    subprocess.run([*command, str(folder / "tars")], check=True, stdout=subprocess.DEVNULL)


PREPARE = {"streaming": prepare_streaming, "energon": prepare_energon}
START = {
    "webdataset": webdataset_samples,
    "streaming": streaming_samples,
    "energon": energon_samples,
}


def main(name: str, act: str, folder: Path) -> dict[str, Any]:
    """Prepare a loader's data, or start it until its first sample."""
    try:
        start = START[name](folder)
    except ImportError as error:
        return {"missing": str(error)}
    if act == "prepare":
        started = time.perf_counter()
        if name in PREPARE:
            PREPARE[name](folder)
        return {"seconds": time.perf_counter() - started}
    before = private_bytes()
    started = time.perf_counter()
    samples = start()
    next(samples)
    return {
        "version": importlib.metadata.version(DISTRIBUTIONS[name]),
        "seconds": time.perf_counter() - started,
        "megabytes": (private_bytes() - before) / 1e6,
    }


if __name__ == "__main__":
    result = main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    sys.stdout.write(f"{json.dumps(result)}\n")
