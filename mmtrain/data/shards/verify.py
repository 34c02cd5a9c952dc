"""Compare shards with their indexes, byte for byte.

tar, index --every member's CRC32; every header--> DamagedMember: shard, key, offset, what is wrong

The padding between a member's end and the next header is not compared: nothing reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.data.shards.archive import read_headers
from mmtrain.data.shards.index import Member, MissingIndex, read_index

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
    faults: dict[int, list[str]] = {}
    try:
        index = read_index(tar)
        members = {
            member.offset: (key, member)
            for key, of_sample in zip(index.keys, index.members, strict=True)
            for member in of_sample
        }
        with tar.open("rb") as stream:
            for of_sample in index.members:
                for member in of_sample:
                    if detail := _content_fault(stream, member):
                        faults.setdefault(member.offset, []).append(f"{member.suffix}: {detail}")
                report(sum(member.size for member in of_sample))
            for offset, detail in _header_faults(tar, stream, dict(members), index.tar_bytes):
                faults.setdefault(offset, []).append(detail)
    except MissingIndex:
        raise
    except OSError as error:
        return [DamagedMember(str(tar), None, None, f"{tar}: cannot be read ({error.strerror})")]
    except UserError as error:  # the index is damaged, or of a tar of another size
        return [DamagedMember(str(tar), None, None, str(error))]
    keys = {offset: key for offset, (key, _) in members.items()}
    return [DamagedMember(str(tar), keys.get(offset), offset, "; ".join(faults[offset])) for offset in sorted(faults)]


def _content_fault(stream: BinaryIO, member: Member) -> str | None:
    stream.seek(member.offset)
    crc32, rest = 0, member.size
    while rest:
        try:
            chunk = stream.read(min(_CHUNK, rest))
        except OSError as error:  # a bad sector: the others are compared all the same
            return f"cannot be read ({error.strerror})"
        if not chunk:
            return "is cut off by the file's end"
        crc32, rest = zlib.crc32(chunk, crc32), rest - len(chunk)
    if crc32 != member.crc32:
        return f"{member.size:,} bytes whose CRC32 is {crc32:08x}, not {member.crc32:08x}"
    return None


def _header_faults(
    tar: Path, stream: BinaryIO, missing: dict[int, tuple[str, Member]], tar_bytes: int
) -> list[tuple[int, str]]:
    """Return offset and fault of each member whose header is not where, or not what, the index says.

    `missing` holds all members by offset. A header that cannot be read is one fault, at the first member not reached.
    """
    faults: list[tuple[int, str]] = []
    reached = -1
    try:
        for file in read_headers(tar, stream):
            reached = file.offset
            seen = f"{file.name!r}, {file.size:,} bytes"
            key, member = missing.pop(file.offset, ("", None))
            if member is None:
                faults.append((file.offset, f"{seen}, is not in the index"))
                continue
            name, indexed = file.name[: len(key)] + file.name[len(key) :].lower(), f"{key}.{member.suffix}"
            if (name, file.size) != (indexed, member.size):
                faults.append((file.offset, f"its header says {seen}; indexed as {indexed!r}"))
    except (UserError, OSError) as error:
        at = next((offset for offset in sorted(missing) if offset > reached), tar_bytes)
        return [*faults, (at, str(error).removeprefix(f"{tar}: "))]
    return [*faults, *((offset, "no header leads to it") for offset in missing)]
