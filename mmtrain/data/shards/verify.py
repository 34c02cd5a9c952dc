"""Compare shards with their indexes, byte for byte.

tar, index --every member's CRC32; every header--> DamagedMember: shard, key, offset, what is wrong

The padding between a member's end and the next header is not compared: nothing reads it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.data.shards.archive import read_headers
from mmtrain.data.shards.index import Member, read_index
from mmtrain.data.shards.index_file import MissingIndex

_CHUNK = 1 << 20  # bytes


class DamagedMember(NamedTuple):
    """A damaged member; key and offset are None where the whole shard or its index is damaged."""

    shard: str
    key: str | None
    offset: int | None  # of the member's content in the shard, in bytes
    detail: str


def verify_shard(tar: Path, report: Callable[[int], None] = lambda size: None) -> list[DamagedMember]:
    """Read a shard once and list the members that differ from its index, in the tar's order.

    `report` gets the bytes of each sample that was compared. Memory is that of 1 MiB of content. Raises MissingIndex.
    """
    try:
        index = read_index(tar)
    except MissingIndex:
        raise
    except UserError as error:  # damaged, or of a tar of another size
        return [DamagedMember(str(tar), None, None, str(error))]
    indexed = {
        member.offset: (key, member)
        for key, members in zip(index.keys, index.members, strict=True)
        for member in members
    }
    wrong: dict[int, list[str]] = {}
    try:
        file = os.open(tar, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return [DamagedMember(str(tar), None, None, f"{tar}: cannot be read ({error.strerror})")]
    try:
        for members in index.members:
            for member in members:
                if detail := _content_fault(file, member):
                    wrong.setdefault(member.offset, []).append(f"{member.suffix}: {detail}")
            report(sum(member.size for member in members))
    finally:
        os.close(file)
    for offset, detail in _structure_faults(tar, indexed, index.tar_bytes):
        wrong.setdefault(offset, []).append(detail)
    key_at = {offset: key for offset, (key, _) in indexed.items()}
    return [DamagedMember(str(tar), key_at.get(offset), offset, "; ".join(wrong[offset])) for offset in sorted(wrong)]


def _content_fault(file: int, member: Member) -> str | None:
    crc32, done = 0, 0
    while done < member.size:
        try:
            chunk = os.pread(file, min(_CHUNK, member.size - done), member.offset + done)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        if not chunk:
            return "is cut off by the file's end"
        crc32, done = zlib.crc32(chunk, crc32), done + len(chunk)
    if crc32 != member.crc32:
        return f"{member.size:,} bytes whose CRC32 is {crc32:08x}, not {member.crc32:08x}"
    return None


def _structure_faults(tar: Path, indexed: dict[int, tuple[str, Member]], tar_bytes: int) -> list[tuple[int, str]]:
    """Return offset and fault of each member whose header is not where, or not what, the index says.

    After a header that cannot be read none is found: that is one fault, at the first member not reached.
    """
    missing = dict(indexed)
    faults: list[tuple[int, str]] = []
    reached = -1
    try:
        with tar.open("rb") as stream:
            for file in read_headers(tar, stream):
                reached = file.offset
                seen = f"{file.name!r}, {file.size:,} bytes"
                key, member = missing.pop(file.offset, ("", None))
                if member is None:
                    faults.append((file.offset, f"{seen}, is not in the index"))
                    continue
                name, wanted = file.name[: len(key)] + file.name[len(key) :].lower(), f"{key}.{member.suffix}"
                if (name, file.size) != (wanted, member.size):
                    faults.append((file.offset, f"its header says {seen}; indexed as {wanted!r}"))
    except (UserError, OSError) as error:
        at = next((offset for offset in sorted(missing) if offset > reached), tar_bytes)
        return [*faults, (at, str(error).removeprefix(f"{tar}: "))]
    return [*faults, *((offset, "no header leads to it") for offset in missing)]
