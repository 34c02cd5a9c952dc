"""Compare shards with their indexes, byte for byte.

tar, index --every member's CRC32; every header--> DamagedMember: shard, key, offset, what is wrong

The padding between a member's end and the next header is not compared: nothing reads it.
"""

import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

from mmtrain.base.errors import UserError
from mmtrain.data.shards.archive import read_headers
from mmtrain.data.shards.index import Member, MissingIndex, ShardIndex, read_index
from mmtrain.data.shards.remote import Tar

_CHUNK = 1 << 20  # bytes


class DamagedMember(NamedTuple):
    """A damaged member; key and offset are None where the whole shard or its index is damaged."""

    shard: str
    key: str | None
    offset: int | None  # of the member's content in the shard, in bytes
    detail: str


def verify_shard(
    tar: Tar,
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
            # A member's header, then its content: a remote tar is read forward only.
            header_faults = _header_faults(tar, stream, index)
            for key, members in zip(index.keys, index.members, strict=True):
                for member in members:
                    keys[member.offset] = key
                    offset, fault = next(header_faults, (0, None))
                    if fault is not None:
                        faults.setdefault(offset, []).append(fault)
                    if detail := _content_fault(stream, member):
                        faults.setdefault(member.offset, []).append(f"{member.suffix}: {detail}")
                report(sum(member.size for member in members))
            for offset, fault in header_faults:
                faults.setdefault(offset, []).append(fault)
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


def _header_faults(
    tar: Tar, stream: BinaryIO, index: ShardIndex
) -> Iterator[tuple[int, str | None]]:
    """Yield offset and fault of each member's header, in turn; the fault of a sound one is None.

    The first fault is the last yield: headers after it cannot be found. A file after the last
    member is a fault, too.
    """
    headers = read_headers(tar, stream)
    at = index.tar_bytes
    try:
        for key, members in zip(index.keys, index.members, strict=True):
            for member in members:
                at = member.offset
                if (file := next(headers, None)) is None:
                    yield at, "no header leads to it"
                    return
                name = f"{key}.{member.suffix}"
                lowered = file.name[: len(key)] + file.name[len(key) :].lower()
                if (lowered, file.offset, file.size) != (name, member.offset, member.size):
                    yield (
                        at,
                        f"its header says {file.name!r}, {file.size:,} bytes at byte "
                        f"{file.offset:,}, but the index says {name!r}, {member.size:,} bytes",
                    )
                    return
                yield at, None
        at = index.tar_bytes
        if (file := next(headers, None)) is not None:
            yield file.offset, f"{file.name!r} is not in the index"
    except (UserError, OSError) as error:
        yield at, str(error).removeprefix(f"{tar}: ")
