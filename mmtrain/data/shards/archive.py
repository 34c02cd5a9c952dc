"""Read the headers of tars: their files and where these lie; any damage is an error.

tar --headers, 512 bytes a member (POSIX.1-2008 ustar and pax, GNU long names)-->
    ArchiveFile: name, offset, size

Python's tarfile, and so webdataset, takes a damaged header for the archive's end and drops the rest
in silence. Nothing is ever extracted.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from mmtrain.base.errors import UserError

BLOCK = tarfile.BLOCKSIZE
PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
LONG_TYPES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
FILE_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
MAX_EXTENSION_BYTES = 1 << 20  # of a pax header or a long name: they are read into memory

# as webdataset.tariterators.base_plus_ext, which imports torch
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
# "LENGTH KEYWORD=", then the value and a line break
_PAX_RECORD = re.compile(rb"(\d{1,20}) ([^=\n]{1,1000})=")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ZEROS = bytes(1 << 16)


class ArchiveFile(NamedTuple):
    """A regular file in a tar."""

    name: str
    offset: int  # of its content, in bytes
    size: int  # bytes


def sample_name(name: str) -> tuple[str, str] | None:
    """Return key and lower-case suffix of a file's name.

    They are None for a file that webdataset drops from its samples.

    It drops names without a key or a suffix, or with a part that begins with two underscores.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[1].endswith("/") or "/__" in f"/{name}":
        return None
    return match[1], match[2].lower()


def read_headers(path: object, stream: BinaryIO) -> Iterator[ArchiveFile]:
    """Yield each regular file of the tar that `stream` reads, in order.

    Folders are skipped, contents not read.

    The stream may be moved between two files. Raises UserError, naming the member and the offset,
    for damage, compressed tars, what is no regular file, and names that are unsafe or not UTF-8.
    """
    end = stream.seek(0, 2)
    offset = 0
    last = "the start"
    # path and size of the next header's file, where ustar has no room for them
    extended = {}
    while True:
        stream.seek(offset)
        block = stream.read(BLOCK)
        hint = "Is it compressed? Then gunzip it" if offset == 0 else "Copy it again"
        if len(block) < BLOCK:
            raise UserError(
                f"{path}: ends at byte {end} without an end of archive, after {last}. {hint}"
            )
        if not any(block):
            if extended:
                raise UserError(
                    f"{path}: ends at byte {offset} where a header "
                    f"must follow, after {last}. {hint}"
                )
            _refuse_more(path, stream, offset, last)
            return

        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            size = int(extended.get("size", header.size))
        except (tarfile.HeaderError, ValueError) as error:
            raise UserError(
                f"{path}: damaged tar header at byte {offset}, after {last} ({error}). {hint}"
            ) from None
        name = header.name
        if "path" in extended:
            name = extended["path"].decode("utf-8", "surrogateescape")
        content = 0 if header.isdir() else size
        if content < 0 or offset + BLOCK + content > end:
            raise UserError(
                f"{path}: {name!r} at byte {offset} is cut off by the end of the file. "
                "Copy it again"
            )

        # A header before a file's own, with a name or size for which that has no room.
        if header.type in (*PAX_TYPES, *LONG_TYPES):
            if size > MAX_EXTENSION_BYTES:
                raise UserError(
                    f"{path}: a header at byte {offset} holds {size:,} bytes: more than a name; "
                    "no shard"
                )
            extended.update(_extensions(path, offset, header.type, stream.read(size)))
        else:
            if header.type in FILE_TYPES:
                _refuse_unsafe(path, offset, name)
                yield ArchiveFile(name, offset + BLOCK, size)
            elif not header.isdir():
                raise UserError(
                    f"{path}: {name!r} at byte {offset} is a link, "
                    f"a device or similar (type {header.type!r}). Shards hold regular files only"
                )
            last = repr(name)
            extended = {}
        offset += BLOCK + -(-content // BLOCK) * BLOCK


def _refuse_more(path: object, stream: BinaryIO, offset: int, last: str) -> None:
    """Raise UserError for anything but zeros behind the end of archive.

    Readers drop it in silence.
    """
    while rest := stream.read(len(_ZEROS)):
        if rest != _ZEROS[: len(rest)]:
            raise UserError(
                f"{path}: has an end of archive at byte {offset}, after {last}, "
                "but more follows it: a header was overwritten with zeros (copy the file again), "
                "or tars were joined by cat (unpack and shard them again)"
            )


def _extensions(path: object, offset: int, kind: bytes, content: bytes) -> dict[str, bytes]:
    """Return path and size of the next file, as a pax header or a GNU long name gives them."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.partition(b"\0")[0]}
    if kind == tarfile.GNUTYPE_LONGLINK:
        return {}
    extensions = {}
    at = 0
    while at < len(content) and content[at]:
        record = _PAX_RECORD.match(content, at)
        end = at + int(record[1]) if record else 0
        if not record or end <= record.end() or content[end - 1 : end] != b"\n":
            raise UserError(f"{path}: damaged pax header at byte {offset}. Copy the file again")
        keyword = record[2].decode("utf-8", "replace")
        if keyword.startswith("GNU.sparse"):
            raise UserError(
                f"{path}: holds a sparse file at byte {offset}. Write the tar without --sparse"
            )
        if keyword in ("path", "size"):
            extensions[keyword] = content[record.end() : end - 1]
        at = end
    if extensions and kind == tarfile.XGLTYPE:
        raise UserError(
            f"{path}: a global header at byte {offset} gives all files one "
            f"{' and '.join(sorted(extensions))}"
        )
    return extensions


def _refuse_unsafe(path: object, offset: int, name: str) -> None:
    parts = re.split(r"[/\\]", name)
    fault = None
    if ".." in parts:
        fault = "has .. in its path"
    elif parts[0] == "" or re.match(r"[A-Za-z]:", name):
        fault = "is an absolute path"
    elif _CONTROL.search(name):
        fault = "holds a control character"
    elif _SURROGATE.search(name):
        fault = "is not UTF-8"
    if fault is not None:
        raise UserError(
            f"{path}: the name {name!r} at byte {offset} {fault}. "
            "Rename the file and write the tar again"
        )
