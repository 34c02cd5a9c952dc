"""Writing shards: webdataset tars of LLaVA-form samples, byte for byte a function of the samples.

(key, record, [(suffix, bytes), ...]) --> KEY.json, then KEY.jpg, or KEY.0.jpg, KEY.1.jpg with several images

A tar gets its name when it is complete: it is written as NAME.tmp, flushed to the disk and renamed, so whatever stops
the writer leaves no half shard that a glob of *.tar would find.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmtrain.data.records import IMAGE_SUFFIXES
from mmtrain.errors import UserError

UNFINISHED = ".tmp"  # added to the name of a tar that is being written

# A dot would end the key, a slash make folders, underscores in front a name that webdataset passes over. 80 characters
# and what follows them fit into the 100 of a ustar header.
_SAFE_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
_READABLE = 60  # characters of an unsafe id that its key keeps


@dataclass(frozen=True)
class WrittenShard:
    """What a complete tar holds."""

    path: Path
    samples: int
    images: int
    size: int  # bytes of the file

    def as_dict(self) -> dict[str, str | int]:
        """JSON form, with the file's name alone."""
        return {"file": self.path.name, "samples": self.samples, "images": self.images, "bytes": self.size}


KeyedSample = tuple[str, dict, Sequence[tuple[str, bytes]]]  # key, KEY.json's content, (suffix, bytes) of each image


def sample_key(identifier: str) -> str:
    """The tar key of a record's id: the id itself where it is safe, else what is readable of it and a hash.

    Safe are letters, digits, - and _, at most 80, the first a letter or digit. A function of the id alone (the hash is
    12 digits of its SHA-256), so that keys do not depend on what else is in a data set; other ids get other keys.
    """
    if _SAFE_KEY.fullmatch(identifier):
        return identifier
    readable = re.sub(r"[^A-Za-z0-9]+", "-", identifier).strip("-")[:_READABLE]
    return "-".join(filter(None, (readable, hashlib.sha256(identifier.encode()).hexdigest()[:12])))


def write_shards(
    samples: Iterable[KeyedSample], folder: Path, samples_per_shard: int, prefix: str = "shard"
) -> list[WrittenShard]:
    """Write samples, in order, into folder/shard-000000.tar, shard-000001.tar, ...; the folder must exist.

    Memory is that of two samples, and of every key. Raises what `write_shard` raises; complete shards stay.
    """
    assert samples_per_shard > 0, samples_per_shard
    samples = _with_unique_keys(samples)
    shards: list[WrittenShard] = []
    for first in samples:
        path = folder / f"{prefix}-{len(shards):06d}.tar"
        shards.append(write_shard(path, itertools.chain([first], itertools.islice(samples, samples_per_shard - 1))))
    return shards


def _with_unique_keys(samples: Iterable[KeyedSample]) -> Iterator[KeyedSample]:
    keys: set[str] = set()
    for sample in samples:
        assert sample[0] not in keys, f"key {sample[0]} comes twice"
        keys.add(sample[0])
        yield sample


def write_shard(path: Path, samples: Iterable[KeyedSample]) -> WrittenShard:
    """Write one tar (POSIX.1-2008 ustar; times, owners and modes fixed), which appears under `path` when complete.

    Raises UserError if `path` exists, if another writer is at it or was killed there, and if the disk does not take it;
    an exception from `samples` passes through. In each case what was written of it is removed.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    if path.exists():
        raise UserError(f"{path}: exists already; shards are never written over, choose a new folder or delete them")
    count = images = 0
    stream, taken = None, False
    try:
        with _said_plainly(path):
            try:
                stream = unfinished.open("xb")
            except FileExistsError:
                taken = True
                raise UserError(
                    f"{unfinished}: is there: another process writes this shard, or was killed while it did; delete it"
                ) from None
        tar = tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        for key, record, files in samples:
            with _said_plainly(path):
                for name, content in _members(key, record, files):
                    member = tarfile.TarInfo(name)  # its defaults: time 0, owner 0 without a name, mode 0644
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
            count += 1
            images += len(files)
        with _said_plainly(path):
            tar.close()
            stream.flush()
            os.fsync(stream.fileno())  # a full disk may show only here, and a rename must not overtake the content
            size = stream.tell()
            stream.close()
            unfinished.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):  # what could not be written cannot be flushed either
            if stream is not None:
                stream.close()
        if not taken:  # whatever `stream` is: Ctrl-C may have come between the file's creation and the assignment
            with contextlib.suppress(OSError):
                unfinished.unlink()
        raise
    return WrittenShard(path, count, images, size)


def _members(key: str, record: dict, files: Sequence[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
    assert _SAFE_KEY.fullmatch(key), f"unsafe key {key!r}"
    yield f"{key}.json", json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    for number, (suffix, content) in enumerate(files):
        assert suffix in IMAGE_SUFFIXES, f"{key}: no suffix of an image: {suffix!r}"
        yield (f"{key}.{suffix}" if len(files) == 1 else f"{key}.{number}.{suffix}"), content


@contextlib.contextmanager
def _said_plainly(path: Path) -> Iterator[None]:
    """What the system says about writing, as a message for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); what was written of it is removed. Free space, or choose "
            "another folder"
        ) from error
