"""Shards: plain webdataset tars, listed, checked and read member by member.

data.shards --paths, globs, brace ranges--> tar files --webdataset--> {"__key__", "json", "jpg", ...} of each sample

webdataset alone would lose data in silence: at a damaged tar header Python's tarfile ends the archive without an error,
and members that are no regular files are passed over. So every archive's headers are walked before it is read; that
costs one 512-byte read and one seek per member.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path

import webdataset
from webdataset.shardlists import expand_urls

from mmtrain.errors import UserError

BLOCK = tarfile.BLOCKSIZE
HEADERS_ONLY = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def expand_shards(shards: str | Sequence[str]) -> tuple[Path, ...]:
    """List the tar files that `data.shards` names: paths, globs (*, ?) and brace ranges ({00000..00099}), in order.

    A glob's files are sorted. Raises UserError for a pattern without files, a file named twice, and URLs.
    """
    patterns = (shards,) if isinstance(shards, str) else tuple(shards)
    found: list[Path] = []
    for pattern in patterns:
        if "://" in pattern or pattern.startswith("pipe:"):
            raise UserError(f"data.shards: {pattern!r} is a URL or a command; shards are read from local files only")
        for name in expand_urls(pattern):
            whole = Path(name).expanduser()
            # Path.glob takes no absolute pattern; a file whose name holds brackets is no pattern.
            paths = [whole] if whole.exists() else sorted(map(Path, glob(str(whole), recursive=True)))  # noqa: PTH207
            if not paths:
                raise UserError(f"data.shards: no file {name}" + (f" (from {pattern})" if name != pattern else ""))
            found += paths
    if not found:
        raise UserError("data.shards: the list is empty; name at least one webdataset tar")
    for path in found:
        if not path.is_file():
            raise UserError(f"data.shards: {path} is no file; name the tars in it, e.g. {path}/*.tar")
    if len(set(found)) < len(found):
        twice = next(path for number, path in enumerate(found) if path in found[:number])
        raise UserError(f"data.shards: {twice} is named twice; every sample would count twice")
    return tuple(found)


def check_archive(path: Path) -> int:
    """Walk a tar's headers (POSIX.1-2008 ustar, 512-byte blocks); return the number of regular files in it.

    Raises UserError with the offset for a damaged header, a truncated file, links and devices, and compressed tars.
    """
    files, offset, last = 0, 0, "the start"
    size = path.stat().st_size
    with path.open("rb") as stream:
        while True:
            stream.seek(offset)
            block = stream.read(BLOCK)
            hint = "is it compressed? gunzip it" if offset == 0 else "copy it again"
            if not any(block) and len(block) == BLOCK:
                return files
            if len(block) < BLOCK:
                raise UserError(f"{path}: ends at byte {size} without an end of archive, after {last}; {hint}")
            try:
                member = tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
            except tarfile.HeaderError as error:
                raise UserError(
                    f"{path}: damaged tar header at byte {offset}, after {last} ({error}); {hint}"
                ) from None
            if member.issym() or member.islnk() or member.isdev():
                raise UserError(f"{path}: {member.name} is a link or a device; shards hold regular files only")
            content = 0 if member.isdir() else member.size
            if offset + BLOCK + content > size:
                raise UserError(f"{path}: {member.name} at byte {offset} is cut off by the file's end; copy it again")
            if member.type not in HEADERS_ONLY:
                files += member.isreg()
                last = member.name
            offset += BLOCK + -(-content // BLOCK) * BLOCK


def read_members(path: Path) -> Iterator[dict[str, bytes | str]]:
    """Read a shard in order: per sample its key, its shard and each member's bytes by lower-case suffix.

    Raises UserError naming shard and key for damage, for a name given twice and for a member without a suffix.
    """
    files = check_archive(path)
    read, key = 0, "the start"
    try:
        for sample in webdataset.tariterators.tarfile_samples([{"url": os.fspath(path)}]):
            read += sum(not name.startswith("__") for name in sample)
            key = sample["__key__"]
            yield sample
    except (tarfile.TarError, ValueError, OSError) as error:
        raise UserError(
            f"{path}: cannot be read after sample {key}: {error.args[0] if error.args else error}"
        ) from error
    if read != files:
        raise UserError(
            f"{path}: {files} files in the archive, but samples made of {read}: members without a suffix, or whose "
            "names begin with two underscores, belong to no sample; remove them"
        )
