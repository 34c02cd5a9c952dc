"""JSON files of records, read record by record: arrays, lines, and COCO's captions.

JSON array or JSON lines, of any size --json_records--> any JSON values
{"images": [...], "annotations": [...]} --coco_captions--> {"id", "image", "caption"} of each annotation
"""

from __future__ import annotations

import contextlib
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


def json_records(path: Path) -> Iterator[object]:
    """Each element of a JSON array, or each line of a JSON-lines file; which of the two, its first character says.

    Elements are any JSON values. Memory is that of one record and a megabyte. Raises UserError, when it gets there, for
    what is neither, with the line (JSON lines) or the number of records before it and the character (array).
    """
    with opened_text(path, "a LLaVA JSON or JSONL file") as stream:
        first = _Window(stream).peek()
        stream.seek(0)
        if first == "[":
            yield from _array_elements(stream, path)
        elif first == "{":
            yield from _lines(stream, path)
        else:
            seen = f"begins with {first!r}" if first else "is empty"
            raise UserError(f"{path}: {seen}; needed is a JSON array of records, or JSON lines: one record a line")


def holds_coco(path: Path) -> bool:
    """Whether a file is one object with `annotations` of images, as COCO's are."""
    with contextlib.suppress(ValueError, RecursionError), opened_text(path, "a file") as stream:
        if _Window(stream).peek() == "{":
            stream.seek(0)
            first = next((element for key, element in _members(_Window(stream)) if key == "annotations"), None)
            return isinstance(first, dict) and "image_id" in first
    return False


def coco_captions(path: Path) -> Iterator[object]:
    """{"id", "image", "caption"} of each annotation of a COCO file, in their order; `image` may be None.

    Memory is that of the images' names. Raises UserError for what is no whole JSON.
    """
    names = {}
    for image in _coco_members(path, "images"):
        if isinstance(image, dict) and isinstance(image.get("id"), int | str):
            names[image["id"]] = image.get("file_name")
    for annotation in _coco_members(path, "annotations"):
        if not isinstance(annotation, dict):
            yield annotation
            continue
        of = annotation.get("image_id")
        name = names.get(of) if isinstance(of, int | str) else None
        yield {"id": annotation.get("id"), "image": name, "caption": annotation.get("caption")}


def _coco_members(path: Path, wanted: str) -> Iterator[object]:
    with opened_text(path, "a COCO file") as stream:
        window = _Window(stream)
        with _located(path, window):
            yield from (element for key, element in _members(window) if key == wanted)


@contextlib.contextmanager
def opened_text(path: Path, needed: str) -> Iterator[TextIO]:
    """A file of UTF-8 text, with a byte order mark or without, its line ends as they are; raises UserError."""
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file; {needed} is needed")
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield stream
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
    window = _Window(stream)
    with _located(path, window):
        yield from _elements(window)
        if window.peek():
            raise ValueError("something follows the array's end")


@contextlib.contextmanager
def _located(path: Path, window: _Window) -> Iterator[None]:
    """Turn what a window raises into a UserError that says where."""
    try:
        yield
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        seen = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UserError(
            f"{path}: not valid JSON after {window.records:,} records, at character {window.before + window.at:,} "
            f"({seen}); is the file complete?"
        ) from None


def _members(window: _Window) -> Iterator[tuple[object, object]]:
    """(key, element) for each element of the arrays in the object that comes next; other values are passed over."""
    for key in _separated(window, "{", "}"):
        if window.peek() != ":":
            raise ValueError("expecting :")
        window.at += 1
        if window.peek() == "[":
            yield from ((key, element) for element in _elements(window))
        else:
            window.value()


def _elements(window: _Window) -> Iterator[object]:
    """The elements of the array that comes next."""
    for value in _separated(window, "[", "]"):
        yield value
        window.records += 1


def _separated(window: _Window, begin: str, end: str) -> Iterator[object]:
    """The values between two brackets; what follows each but a comma, the caller has taken. Raises ValueError."""
    if window.peek() != begin:
        raise ValueError(f"expecting {begin}")
    window.at += 1
    separator = end if window.peek() == end else ","
    window.at += separator == end
    while separator == ",":
        yield window.value()
        separator = window.peek()
        if separator not in (end, ","):
            raise ValueError(f"expecting , or {end}" if separator else "the array does not end")
        window.at += 1


class _Window:
    """A moving part of a text file: `text[at:]` is what comes next."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.text = ""
        self.at = 0
        self.before = 0  # characters of the file that come before `text`
        self.records = 0  # elements of arrays that were taken

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
