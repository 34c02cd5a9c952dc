"""Synthetic shards for `bench.py data`: whole indexes, tars that hold only what is read.

number of shards --SyntheticShards.write--> shard-000000.tar (sparse), shard-000000.tar.index
numbers of samples --write_contents--> their texts and pictures, at their offsets in the tars
number of shards --write_real_tars--> whole tars of tiny pictures, which programs without such
    indexes need

A shard has 1,000 samples: a LLaVA record of one turn, and a JPEG of 640 x 480 pixels. Shards are of
a few kinds; those of one kind differ in their keys only. A sample's `key_hash` is a random number:
computing 100 million of them takes minutes, and no reader compares them with the keys.
"""

from __future__ import annotations

import functools
import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy import ndarray
from PIL import Image

from mmtrain.base.json_lines import compact_json
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.formats import LLAVA
from mmtrain.data.samples.sample import Tokenization, read_sample
from mmtrain.data.samples.templates import TextCounter
from mmtrain.data.shards.index import FORMAT, TABLES, TOKENS, VERSION
from mmtrain.facts.models import models_of

SAMPLES = 1000  # of a shard
TEXTS = 64
KINDS = 4
SHARD_DIGITS = 6  # a key is a shard's number, then three digits
KEY_DIGITS = SHARD_DIGITS + 3
BLOCK = tarfile.BLOCKSIZE
PICTURE = (640, 480)
TINY_PICTURE = (8, 8)
WORDS = "a red old street boat woman near wooden table under sky bridge"

# Bytes on disk: a row of each table in the index and again in the catalogue, lengths and tiles.
_ROW = sum(TABLES[name].itemsize for name in ("samples", "images")) + KEY_DIGITS
BYTES_A_SAMPLE = 2 * (_ROW + 2 * TABLES["members"].itemsize) + 3 * TOKENS.itemsize
REAL_BYTES_A_SAMPLE = 6 * BLOCK  # of `write_real_tars`


def run_config(folder: Path) -> RunConfig:
    """Return the configuration of a run on the shards of a folder, with defaults for the rest."""
    return RunConfig.model_validate(
        {
            "run": {"name": "bench"},
            "model": {
                "llm": {"path": "demo:llm"},
                "vision": {"name": "vit_large_patch14_clip_quickgelu_336.openai"},
            },
            "data": {
                "shards": f"{folder}/*.tar",
                "pack_length": 2048,
                "workers": 0,
                "format": "llava",
            },
            "train": {"packs_per_step": 96, "max_steps": 100_000_000},
        }
    )


def shard_path(folder: Path, shard: int) -> Path:
    """Return the path of a shard's tar."""
    return folder / f"shard-{shard:0{SHARD_DIGITS}d}.tar"


def picture(size: tuple[int, int]) -> bytes:
    """Return a JPEG of coarse random colours."""
    draw = np.random.RandomState(0)
    colours = Image.fromarray(draw.randint(0, 256, (12, 16, 3), np.uint8))
    file = io.BytesIO()
    colours.resize(size).save(file, "JPEG", quality=80)
    return file.getvalue()


def records() -> list[bytes]:
    """Return LLaVA records of different lengths."""
    draw = np.random.RandomState(0)
    made = []
    for number in range(TEXTS):
        turns = [
            {"from": "human", "value": "<image>\nWhat is it?"},
            {"from": "gpt", "value": " ".join(draw.choice(WORDS.split(), 3 + 2 * number))},
        ]
        record = {"id": number, "image": "x.jpg", "conversations": turns}
        made.append(json.dumps(record).encode())
    return made


class _Kind(NamedTuple):
    """Shards that are equal but for their keys."""

    texts: ndarray  # (SAMPLES,) number of each sample's record
    offsets: ndarray  # (SAMPLES, 2) of its text and of its picture, in bytes
    tar_bytes: int
    header: dict  # the first line of an index, without crc32
    tables: dict[str, ndarray]  # in the order of the file


@dataclass
class SyntheticShards:
    """Shards of a data set, and what they contain."""

    folder: Path

    def __post_init__(self) -> None:
        """Count the tokens of each record."""
        self.records = records()
        self.picture = picture(PICTURE)
        layout = models_of(run_config(self.folder)).layout
        self.how = Tokenization("demo:llm", "plain", layout, LLAVA)
        count = TextCounter(self.how)
        tokens = []
        for record in self.records:
            contents = {"json": record, "jpg": b""}
            tokens.append(count(read_sample("key", "shard", contents, 0, LLAVA)))
        self.tokens = np.array(tokens, TOKENS)
        self.kinds = [self._kind(number) for number in range(KINDS)]

    def _kind(self, number: int) -> _Kind:
        texts = np.minimum(np.random.RandomState(number).geometric(0.08, SAMPLES), TEXTS) - 1
        members: ndarray = np.zeros((SAMPLES, 2), TABLES["members"])
        members["suffix"] = (0, 1)
        members["size"][:, 0] = np.array([len(record) for record in self.records])[texts]
        members["size"][:, 1] = len(self.picture)
        members["crc32"][:, 0] = np.array([zlib.crc32(record) for record in self.records])[texts]
        members["crc32"][:, 1] = zlib.crc32(self.picture)
        # A header, and the content in whole blocks.
        blocks: ndarray = BLOCK + -(-members["size"].reshape(-1) // BLOCK) * BLOCK
        offsets = np.cumsum(blocks) - blocks + BLOCK
        members["offset"] = offsets.reshape(SAMPLES, 2)
        tar_bytes = int(blocks.sum()) + 2 * BLOCK

        samples: ndarray = np.zeros(SAMPLES, TABLES["samples"])
        samples["key_hash"] = np.random.RandomState(number).randint(0, 2**63, SAMPLES, np.uint64)
        samples["key_hash"] *= np.uint64(2)
        samples["keys"] = KEY_DIGITS
        samples["members"] = 2
        samples["images"] = 1
        images: ndarray = np.zeros(SAMPLES, TABLES["images"])
        images["width"], images["height"] = PICTURE
        keys = "".join(f"{at:0{KEY_DIGITS}d}" for at in range(SAMPLES)).encode()
        fingerprint = self.how.fingerprint
        tables = {
            "samples": samples,
            "members": members.reshape(-1),
            "images": images,
            "keys": np.frombuffer(keys, np.uint8).reshape(SAMPLES, KEY_DIGITS).copy(),
            "suffixes": np.frombuffer(b"json\0jpg\0", np.uint8),
            "faults": np.empty(0, np.uint8),
        }
        header = {
            "format": FORMAT,
            "version": VERSION,
            "tar_bytes": tar_bytes,
            "readings": [LLAVA.reading],
            "texts": [fingerprint],
            "tables": {name: tables[name].size for name in TABLES},
        }
        tables[fingerprint] = self.tokens[texts]
        return _Kind(texts, members["offset"], tar_bytes, header, tables)

    def write(self, shards: int) -> None:
        """Write indexes and empty tars. Cost: 0.5 ms a shard."""
        self.folder.mkdir(parents=True)
        for shard in range(shards):
            kind = self.kinds[shard % KINDS]
            digits = np.frombuffer(f"{shard:0{SHARD_DIGITS}d}".encode(), np.uint8)
            kind.tables["keys"][:, :SHARD_DIGITS] = digits
            body = b"".join(table.tobytes() for table in kind.tables.values())
            crc32 = zlib.crc32(body, zlib.crc32(compact_json(kind.header)))
            tar = shard_path(self.folder, shard)
            with tar.open("wb") as file:
                file.truncate(kind.tar_bytes)
            line = compact_json({**kind.header, "crc32": crc32})
            tar.with_name(f"{tar.name}.index").write_bytes(line + b"\n" + body)
        # A launcher reads headers until it meets a file.
        first = tarfile.TarInfo(f"{0:0{KEY_DIGITS}d}.json")
        with shard_path(self.folder, 0).open("r+b") as file:
            file.write(first.tobuf(tarfile.USTAR_FORMAT))

    def write_contents(self, numbers: Iterable[int]) -> None:
        """Write the texts and pictures of some samples of the data set."""
        for number in numbers:
            shard, place = divmod(number, SAMPLES)
            kind = self.kinds[shard % KINDS]
            contents = (self.records[kind.texts[place]], self.picture)
            tar = shard_path(self.folder, shard)
            # as it was: a catalogue of a tar that has changed is made again
            found = tar.stat()
            with tar.open("r+b") as file:
                for content, offset in zip(contents, kind.offsets[place].tolist(), strict=True):
                    file.seek(offset)
                    file.write(content)
            os.utime(tar, ns=(found.st_atime_ns, found.st_mtime_ns))


@functools.cache
def _real_tar() -> tuple[ndarray, ndarray, ndarray]:
    """Return a tar of shard 0, the offsets of its headers, and the sums of their bytes."""
    made = records()
    texts = np.minimum(np.random.RandomState(0).geometric(0.08, SAMPLES), TEXTS) - 1
    file = io.BytesIO()
    headers = []
    sums = []
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for place, text in enumerate(texts.tolist()):
            for suffix, content in (("json", made[text]), ("jpg", picture(TINY_PICTURE))):
                member = tarfile.TarInfo(f"{place:0{KEY_DIGITS}d}.{suffix}")
                member.size = len(content)
                headers.append(tar.offset)
                header = member.tobuf(tarfile.USTAR_FORMAT)
                sums.append(int(header[148:154], 8))
                tar.addfile(member, io.BytesIO(content))
    content = np.frombuffer(file.getvalue(), np.uint8).copy()
    return content, np.array(headers), np.array(sums)


def write_real_tars(folder: Path, shards: int) -> None:
    """Write whole tars, with pictures of 8 x 8 pixels. Cost: 3 kB a sample."""
    content, headers, sums = _real_tar()
    folder.mkdir(parents=True)
    for shard in range(shards):
        digits = np.frombuffer(f"{shard:0{SHARD_DIGITS}d}".encode(), np.uint8)
        content[headers[:, None] + np.arange(SHARD_DIGITS)] = digits
        # The checksum of a header is the sum of its bytes, as six octal digits.
        checksums: ndarray = sums + int((digits - ord("0")).sum())
        octal = (checksums[:, None] >> (3 * np.arange(5, -1, -1))) & 7
        content[headers[:, None] + 148 + np.arange(6)] = octal + ord("0")
        shard_path(folder, shard).write_bytes(content.tobytes())
