"""Everything that can be wrong with a shard or its index, made from a sound shard's bytes, and what must come of it.

a sound shard, a number --inject--> Broken: the tar's bytes, its index's bytes, the expected outcome

A kind is injected AFTER its shard was indexed, BEFORE (there is no index yet), or BETWEEN: the index was made, but for
another tokenizer, so that texts are measured once more. A flipped bit that an image survives, or one in a text that
stays text, cannot be known BEFORE, when nobody has ever seen the sound bytes: no such kind is in the list.
"""

from __future__ import annotations

import copy
import io
import random
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BLOCK = tarfile.BLOCKSIZE
AFTER, BEFORE, BETWEEN = "after indexing", "before indexing", "between two tokenizers"
File = tuple[tarfile.TarInfo, bytes]


@dataclass(frozen=True)
class SoundShard:
    """A tar as it should be, and its index; `read` are the keys that an epoch reads: all that fit into a pack."""

    tar: bytes
    index: bytes
    files: tuple[tarfile.TarInfo, ...]
    read: frozenset[str]

    def content(self, file: tarfile.TarInfo) -> bytes:
        return self.tar[file.offset_data : file.offset_data + file.size]

    @property
    def end(self) -> int:
        """Where the end of archive begins."""
        last = self.files[-1]
        return last.offset_data + -(-last.size // BLOCK) * BLOCK

    def pick(self, draw: random.Random, ending: str = "", among: Callable[[str], Any] = bool) -> tarfile.TarInfo:
        """One of the files that are read, whose name ends so; `among` judges keys."""
        named = [file for file in self.files if re.search(f"{ending}$", file.name)]
        return draw.choice([file for file in named if key(file) in self.read and among(key(file))])

    def files_of(self, name: str) -> list[tarfile.TarInfo]:
        return [file for file in self.files if key(file) == name]

    def rewritten(self, edit: Callable[[list[File]], list[File] | None], form: int = tarfile.USTAR_FORMAT) -> bytes:
        """Another tar: of the files that `edit` makes of these, or leaves in their list."""
        files = [(copy.copy(file), self.content(file)) for file in self.files]
        files = edit(files) or files
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=form, errors="surrogateescape") as tar:
            for file, content in files:
                file.size = len(content)
                tar.addfile(file, io.BytesIO(content) if content else None)
        return stream.getvalue()


@dataclass
class Broken:
    """A broken shard and what must come of it; what is not named must be trained on as if nothing had happened."""

    tar: bytes
    index: bytes | None = None  # None: the sound one, if there is one in this regime
    error: str | None = None  # a pattern of the message that ends the run
    unusable: dict[str, str] = field(default_factory=dict)  # key -> reason, known from the index
    quarantined: dict[str, str] = field(default_factory=dict)  # key -> reason, found when it is read
    added: int = 0  # samples more than in the sound shard
    repeated: tuple[str, ...] = ()  # keys of the samples that the shard holds twice, both sound


@dataclass(frozen=True)
class Case:
    """What an injection starts from."""

    shard: SoundShard
    other: SoundShard  # of the same size
    number: int
    draw: random.Random


@dataclass(frozen=True)
class Kind:
    """Faults of one kind: numbers 0 to count - 1."""

    name: str
    regime: str
    count: int
    inject: Callable[[Case], Broken]

    def __str__(self) -> str:
        return f"{self.name}, {self.regime}"


def key(file: tarfile.TarInfo) -> str:
    return file.name.partition(".")[0]


def changed(shard: SoundShard, tar: bytes) -> dict[str, str]:
    """The samples whose content differs, as they are quarantined once their checksums are known."""
    return {
        key(file): "checksum"
        for file in shard.files
        if shard.content(file) != tar[file.offset_data : file.offset_data + file.size]
    }


def flipped(content: bytes, byte: int, draw: random.Random) -> bytes:
    return content[:byte] + bytes([content[byte] ^ 1 << draw.randrange(8)]) + content[byte + 1 :]


def zeroed(content: bytes, start: int, length: int) -> bytes:
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]


def with_files(case: Case, change: Callable[[list[File], int], Any], *, at: str = "json", **expected: Any) -> Broken:
    """Files changed around one of a sample; `expected` is told by its key."""
    victim = case.shard.pick(case.draw, at, lambda name: len(case.shard.files_of(name)) == 2)

    def edit(files: list[File]) -> list[File]:
        change(files, next(place for place, (file, _) in enumerate(files) if file.name == victim.name))
        return files

    return Broken(
        case.shard.rewritten(edit, tarfile.GNU_FORMAT),
        **{name: value(key(victim)) if callable(value) else value for name, value in expected.items()},
    )
