"""LLaVA's data files, read record by record: a JSON array or JSON lines, of any size.

JSON array or JSON lines --read_llava_json--> any JSON values, which records.py judges
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from mmtrain.base.errors import UserError

_CHUNK = 1 << 20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's own whitespace; str.isspace would take more
_NUMBER_GOES_ON = re.compile(r"[-+.0-9eE]*")
_DECODER = json.JSONDecoder()


def read_llava_json(path: Path) -> Iterator[object]:
    """Each element of a JSON array, or each line of a JSON-lines file; which of the two, its first character says.

    Elements are any JSON values. Memory is that of one record and a megabyte. Raises UserError, when it gets there, for
    what is neither, with the line (JSON lines) or the number of records before it and the character (array).
    """
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file; a LLaVA JSON or JSONL file is needed")
        with path.open(encoding="utf-8-sig") as stream:
            first = _Window(stream).peek()
            stream.seek(0)
            if first == "[":
                yield from _array_elements(stream, path)
            elif first == "{":
                yield from _lines(stream, path)
            else:
                seen = f"begins with {first!r}" if first else "is empty"
                raise UserError(f"{path}: {seen}; needed is a JSON array of records, or JSON lines: one record a line")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error.reason}); if it is compressed, unpack it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _lines(stream: TextIO, path: Path) -> Iterator[object]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path}: line {number} is not valid JSON ({error}); needed is a JSON array of records, or JSON "
                    "lines: one record a line"
                ) from None


def _array_elements(stream: TextIO, path: Path) -> Iterator[object]:
    window, number = _Window(stream), 0
    window.peek()
    window.at += 1  # the bracket
    separator = "]" if window.peek() == "]" else ","
    window.at += separator == "]"
    try:
        while separator == ",":
            yield window.value()
            number += 1
            separator = window.peek()
            if separator not in ("]", ","):
                raise ValueError("expecting , or ]" if separator else "the array does not end")
            window.at += 1
        if window.peek():
            raise ValueError("something follows the array's end")
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        seen = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UserError(
            f"{path}: not valid JSON after {number:,} records, at character {window.position:,} ({seen}); is the file "
            "complete?"
        ) from None


class _Window:
    """A moving part of a text file: `text[at:]` is what comes next."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.text = ""
        self.at = 0
        self.before = 0  # characters of the file that come before `text`

    @property
    def position(self) -> int:
        return self.before + self.at

    def more(self) -> bool:
        """Read on and forget what was used; doubling keeps the retries over one long record linear in its length."""
        chunk = self.stream.read(max(_CHUNK, len(self.text) - self.at))
        if not chunk:
            return False
        self.before += self.at
        self.text = self.text[self.at :] + chunk
        self.at = 0
        return True

    def peek(self) -> str:
        """The next character that is no whitespace, "" at the file's end; it stays the next one."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self) -> object:
        """The next JSON value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except ValueError:
                if not self.more():  # what seemed broken may only have been cut off by the window's end
                    raise
                continue
            # -1 before the window's end may be the beginning of -12, or of -1.5e3 cut off behind the point.
            if _NUMBER_GOES_ON.match(self.text, end).end() < len(self.text) or not self.more():
                self.at = end
                return value
