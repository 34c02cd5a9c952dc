"""Which tars a run reads, and whether they are whole: what can be said of shards without reading a sample.

`data.shards` --paths, globs, brace ranges--> tar files --headers, 512 bytes a member--> members

Nothing here imports torch or webdataset, so that the launcher refuses missing and empty shards before a rank starts.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from glob import glob
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand

from mmtrain.demo.names import is_demo
from mmtrain.errors import UserError

BLOCK = tarfile.BLOCKSIZE
HEADERS_ONLY = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def expand_shards(
    shards: str | Sequence[str], key: str = "data.shards", say: Callable[[str], None] = lambda line: None
) -> tuple[Path, ...]:
    """List the tar files that `shards` names: paths, globs (*, ?) and brace ranges ({00000..00099}), in order.

    A glob's files are sorted; braces mean what they mean to webdataset. `demo:train` and `demo:held-out` are the
    demo's, made on first use; `say` is told when that takes time. `key` is the configuration's name for the list, for
    messages. Raises UserError for a pattern without files, a file named twice, and URLs.
    """
    patterns = (shards,) if isinstance(shards, str) else tuple(shards)
    found: list[Path] = []
    for pattern in patterns:
        if is_demo(pattern):
            from mmtrain.demo.data import demo_shards  # numpy and Pillow, which other runs' launchers do without

            try:
                found += sorted(demo_shards(pattern, say).glob("*.tar"))
            except UserError as error:
                raise UserError(f"{key}: {error}") from error
            continue
        if not pattern:
            raise UserError(f"{key}: an empty name; name a webdataset tar, or set {key}=null where that is allowed")
        if "://" in pattern or pattern.startswith("pipe:"):
            raise UserError(f"{key}: {pattern!r} is a URL or a command; shards are read from local files only")
        try:
            names = list(braceexpand(pattern))
        except UnbalancedBracesError:
            raise UserError(
                f"{key}: {pattern!r} opens a brace that it does not close, or the other way round; a range is "
                "shard-{000000..000099}.tar, and a brace that is part of a name is written \\{"
            ) from None
        for name in names:
            whole = Path(name).expanduser()
            # Path.glob takes no absolute pattern; a file whose name holds brackets is no pattern.
            paths = [whole] if whole.exists() else sorted(map(Path, glob(str(whole), recursive=True)))  # noqa: PTH207
            if not paths:
                raise UserError(f"{key}: no file {name}" + (f" (from {pattern})" if name != pattern else ""))
            found += paths
    if not found:
        raise UserError(f"{key}: the list is empty; name at least one webdataset tar")
    for path in found:
        if not path.is_file():
            raise UserError(f"{key}: {path} is no file; name the tars in it, e.g. {path}/*.tar")
    if len(set(found)) < len(found):
        twice = next(path for number, path in enumerate(found) if path in found[:number])
        raise UserError(f"{key}: {twice} is named twice; every sample would count twice")
    return tuple(found)


def refuse_unfinished_shards(paths: Sequence[Path], key: str = "data.shards") -> None:
    """Raise UserError for shards of a data set that tools/shard_dataset.py did not finish: part of it would be missing.

    That tool begins with rejected.jsonl and ends with dataset.json.
    """
    for folder in dict.fromkeys(path.parent for path in paths):
        if (folder / "rejected.jsonl").is_file() and not (folder / "dataset.json").is_file():
            raise UserError(
                f"{key}: {folder} holds an unfinished data set: tools/shard_dataset.py was stopped before it wrote "
                "dataset.json there; delete the folder and make it again"
            )


def refuse_empty_shards(paths: Sequence[Path], key: str = "data.shards") -> None:
    """Raise UserError if the shards hold nothing to train on, or one has no bytes at all.

    Reads the headers of one shard after the other until the first regular file, one 512-byte block where all is well.
    Raises UserError for damage met on that way, and for compressed tars.
    """
    for path in paths:
        if path.stat().st_size == 0:
            raise UserError(f"{key}: {path} is empty, 0 bytes; copy it again, or take it out of the list")
    if not any(member.isreg() for path in paths for member in read_headers(path)):
        what = f"{paths[0]} is an empty archive" if len(paths) == 1 else f"all {len(paths)} shards are empty archives"
        raise UserError(f"{key}: {what}, without a single file; name tars that hold samples")


def check_archive(path: Path) -> int:
    """Walk a tar's headers to its end; return the number of regular files in it. Raises what `read_headers` raises."""
    return sum(member.isreg() for member in read_headers(path))


def read_headers(path: Path) -> Iterator[tarfile.TarInfo]:
    """Each member of a tar, from its headers alone (POSIX.1-2008 ustar, 512-byte blocks); contents are passed over.

    Raises UserError with the offset for a damaged header, a truncated file, links and devices, and compressed tars.
    """
    offset, last = 0, "the start"
    size = path.stat().st_size
    with path.open("rb") as stream:
        while True:
            stream.seek(offset)
            block = stream.read(BLOCK)
            hint = "is it compressed? gunzip it" if offset == 0 else "copy it again"
            if not any(block) and len(block) == BLOCK:
                return
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
                last = member.name
                yield member
            offset += BLOCK + -(-content // BLOCK) * BLOCK
