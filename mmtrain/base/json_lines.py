"""Records of a program for programs: one JSON object a line."""

import contextlib
import errno
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from mmtrain.base.errors import UserError
from mmtrain.base.small_files import MAX_JSON_BYTES, parse_json


class JsonLines:
    """Appends one JSON object a line; each line is one write, so a killed run leaves whole lines.

    NaN and infinities are written as the strings "nan", "inf" and "-inf", which float() reads back.
    `path` is None on ranks that write nothing. Raises OSError when the file cannot be written,
    UserError when its folder was moved since.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = None
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, **values: Any) -> None:
        """Append one line with these keys; values are JSON types, nested as needed."""
        if self._file is None:
            return
        line = (json.dumps(without_nan(values), allow_nan=False) + "\n").encode()
        size = self._refuse_lost()
        try:
            # a full disk, or a limit, takes what still fits: the next write says which of them it
            # is
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # not a regular file: nothing to take back
                os.ftruncate(self._file, size)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _refuse_lost(self) -> int:
        """Return the file's size. Raises UserError unless it is the one at its path."""
        opened = os.fstat(self._file)
        try:
            is_there = os.path.samestat(opened, self._path.stat())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            is_there = False
        if not is_there:
            raise UserError(
                f"{self._path} is not there any more, or is another file: {self._path.parent} was "
                "removed, moved or replaced while it was written. Put it back, and give the same "
                "command again, which goes on with it"
            )
        return opened.st_size

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compact_json(value: object) -> bytes:
    """Return JSON without spaces, in ASCII, for files and fingerprints that must not change."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def without_nan(value: Any) -> Any:
    """Return a copy with "nan", "inf" and "-inf" for numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return value


def whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the whole lines of a file of records. A line longer than any record loses its
    beginning, so it is no JSON.
    """
    lines = iter(functools.partial(stream.readline, MAX_JSON_BYTES), b"")
    return (line for line in lines if line.endswith(b"\n"))


def recorded(file: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield the records of these kinds, or all, in a file of JSON lines, which may be missing.
    Others are skipped.
    """
    if not file.is_file():
        return
    with file.open("rb") as stream:
        for line in whole_lines(stream):
            if kinds and not any(f'"{kind}"'.encode() in line for kind in kinds):
                continue  # parsing all lines of a long run takes seconds
            record = parse_line(line)
            if isinstance(record, dict) and (not kinds or record.get("kind") in kinds):
                yield record


def parse_line(line: bytes) -> Any:
    """Return the content of a line of JSON, its text if it is none."""
    try:
        return parse_json(line)
    except ValueError:
        return line.decode(errors="replace").rstrip("\n")
