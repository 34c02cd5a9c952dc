"""Random access to the samples of a catalog, each byte checked against the checksum that was taken when it was indexed.

global sample number --pread at the indexed offsets, CRC32--> Sample, or the Fault that it is quarantined for

What is wrong decides what happens: a fault of the content (damaged bytes) is that sample's alone; a read that fails is
tried again, then ends the run; a shard that is not the one that was indexed ends the run at once.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections import OrderedDict
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.data.samples.records import Rejected
from mmtrain.data.samples.sample import Fault, Sample, image_number, read_sample
from mmtrain.data.shards.index import MEND, Member
from mmtrain.data.shards.retry import read_again
from mmtrain.data.stream.catalog import Catalog, Place

OPEN_FILES = 64  # shards kept open, those read last


class Reader:
    """Reads samples by number; each process needs its own, but a forked copy is one."""

    def __init__(self, catalog: Catalog, retry_seconds: float) -> None:
        self.catalog = catalog
        self.retry_seconds = retry_seconds
        self._files: OrderedDict[Path, int] = OrderedDict()

    def read(self, number: int) -> Sample | Fault:
        """The sample of a global number.

        Raises UserError for a shard that cannot be read for `retry_seconds`, and for one that its index is not of.
        """
        place = self.catalog.find(number)
        members: dict[str, bytes] = {}
        for member in place.members:
            if member.suffix != "json" and image_number(member.suffix) is None:
                continue  # no part of the sample, and of any size
            content = self._read(place.shard, member)
            if zlib.crc32(content) != member.crc32:
                self._refuse_stale(place, member)
                detail = f"{member.suffix}: {member.size:,} bytes whose CRC32 is not {member.crc32:08x}"
                return Fault(place.key, str(place.shard), member.offset, "checksum", detail)
            members[member.suffix] = content
        offset = place.members[0].offset
        try:
            return read_sample(place.key, str(place.shard), members, offset)
        except Rejected as error:
            return Fault(place.key, str(place.shard), offset, error.reason, error.detail)

    def close(self) -> None:
        """Close the files that are open; the reader may be used again."""
        for shard in list(self._files):
            self._close(shard)

    __del__ = close  # descriptors are numbers, which nothing else closes

    def _read(self, shard: Path, member: Member) -> bytes:
        """A member's bytes, read again and again while the system fails to."""
        return read_again(lambda: self._read_once(shard, member), shard, self.retry_seconds, lambda error: True)

    def _read_once(self, shard: Path, member: Member) -> bytes:
        try:
            content = self._pread(shard, member)
            if len(content) < member.size:
                raise OSError(f"its {member.suffix} member at byte {member.offset:,} is cut off by the file's end")
        except OSError:
            self._close(shard)  # a file that came back, or another server's copy, has to be opened again
            raise
        return content

    def _pread(self, shard: Path, member: Member) -> bytes:
        file = self._files.get(shard)
        if file is None:
            file = self._files[shard] = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                self._close(next(iter(self._files)))
        self._files.move_to_end(shard)
        content = os.pread(file, member.size, member.offset)
        while 0 < len(content) < member.size:  # a read may give less than there is, above 2 GiB always
            more = os.pread(file, member.size - len(content), member.offset + len(content))
            if not more:
                break
            content += more
        return content

    def _close(self, shard: Path) -> None:
        file = self._files.pop(shard, None)
        if file is not None:
            os.close(file)

    def _refuse_stale(self, place: Place, member: Member) -> None:
        """Raise UserError if the header before a damaged member is sound and speaks of another one."""
        name = f"{place.name}.{member.suffix}"
        header = Member("", member.offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE, 0)
        try:
            found = tarfile.TarInfo.frombuf(self._read(place.shard, header), tarfile.ENCODING, "surrogateescape")
        except tarfile.HeaderError:
            return  # damaged as well
        # Others are in a header of their own, and this one has a makeshift.
        plain = name.isascii() and len(name) <= tarfile.LENGTH_NAME
        if found.size != member.size or (plain and found.name.lower() != name.lower()):
            raise UserError(
                f"{place.shard}: at byte {member.offset:,} lies {found.name!r}, {found.size:,} bytes, where its index "
                f"has {name}, {member.size:,} bytes: the shard was replaced after it was indexed; index it again: "
                f"{MEND} {place.shard}"
            )
