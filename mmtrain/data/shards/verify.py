"""Compare shards with their indexes, byte for byte.

tar, index --every member's CRC32; every header--> DamagedMember: shard, key, offset, what is wrong

The padding between a member's end and the next header is not compared: nothing reads it.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.data.shards.archive import read_headers
from mmtrain.data.shards.index import Member, MissingIndex, ShardIndex, read_index

_CHUNK = 1 << 20  # bytes


class DamagedMember(NamedTuple):
    """A damaged member; key and offset are None where the whole shard or its index is damaged."""

    shard: str
    key: str | None
    offset: int | None  # of the member's content in the shard, in bytes
    detail: str


def verify_shard(
    tar: Path,
    report: Callable[[int], None] = lambda size: None,
) -> list[DamagedMember]:
    """Read a shard once and list the members that differ from its index, in the tar's order.

    Raises MissingIndex.

    `report` gets the bytes of each sample that was compared.
    """
    faults = {}
    keys = {}
    try:
        index = read_index(tar)
        with tar.open("rb") as stream:
            for key, members in zip(index.keys, index.members, strict=True):
                for member in members:
                    keys[member.offset] = key
                    if detail := _content_fault(stream, member):
                        faults.setdefault(member.offset, []).append(f"{member.suffix}: {detail}")
                report(sum(member.size for member in members))
            if fault := _header_fault(tar, stream, index):
                faults.setdefault(fault[0], []).append(fault[1])
    except MissingIndex:
        raise
    except OSError as error:
        return [DamagedMember(str(tar), None, None, f"{tar}: cannot be read ({error.strerror})")]
    except UserError as error:  # the index is damaged, or of a tar of another size
        return [DamagedMember(str(tar), None, None, str(error))]
    return [
        DamagedMember(str(tar), keys.get(offset), offset, "; ".join(details))
        for offset, details in sorted(faults.items())
    ]


def _content_fault(stream: BinaryIO, member: Member) -> str | None:
    stream.seek(member.offset)
    crc32 = 0
    rest = member.size
    while rest:
        try:
            chunk = stream.read(min(_CHUNK, rest))
        except OSError as error:  # a bad sector: the others are compared all the same
            return f"cannot be read ({error.strerror})"
        if not chunk:
            return "is cut off by the end of the file"
        crc32 = zlib.crc32(chunk, crc32)
        rest -= len(chunk)
    if crc32 != member.crc32:
        return f"{member.size:,} bytes whose CRC32 is {crc32:08x}, not {member.crc32:08x}"
    return None


def _header_fault(tar: Path, stream: BinaryIO, index: ShardIndex) -> tuple[int, str] | None:
    """Return offset and fault of the first member whose header differs from the index."""
    headers = read_headers(tar, stream)
    at = index.tar_bytes
    try:
        for key, members in zip(index.keys, index.members, strict=True):
            for member in members:
                at = member.offset
                if (file := next(headers, None)) is None:
                    return at, "no header leads to it"
                name = f"{key}.{member.suffix}"
                lowered = file.name[: len(key)] + file.name[len(key) :].lower()
                if (lowered, file.offset, file.size) != (name, member.offset, member.size):
                    return at, (
                        f"its header says {file.name!r}, {file.size:,} bytes at byte "
                        f"{file.offset:,}, but the index says {name!r}, {member.size:,} bytes"
                    )
        at = index.tar_bytes
        if (file := next(headers, None)) is not None:
            return file.offset, f"{file.name!r} is not in the index"
    except (UserError, OSError) as error:
        return at, str(error).removeprefix(f"{tar}: ")
    return None
