"""Text files of records, read one record at a time: JSON arrays and lines, COCO's captions, CSV and TSV tables.

JSON array, or JSON lines --json_records--> any JSON values
COCO's {"images": [...], "annotations": [...]} --json_records--> {"id", "image", "caption"} of each annotation
column,column\\nvalue,value\\n... --table_rows--> {"column": "value", ...}

Memory is that of one record. Every function raises UserError, when it gets there, for what it cannot read.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.data.samples.records import MAX_RECORD_BYTES

SEPARATORS = {".csv": ",", ".tsv": "\t"}
MAX_COCO_BYTES = 256 << 20  # one list is skipped to reach the other; the captions of COCO 2017 have 92 MB in all
MAX_DEPTH = 1000
_CHUNK = 1 << 20
# The next bracket outside of texts, behind all that is none; no match where a text has no end yet.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+(?:([\[\]{}])|\Z)', re.DOTALL)


def json_records(path: Path) -> Iterator[object]:
    """Yield each element of a JSON array, each line of a JSON-lines file, or each caption of a COCO file."""
    needed = "a JSON array of records, or JSON lines: one record a line"
    first = _first_character(path)
    if first == "[":
        yield from _elements(path, None, MAX_RECORD_BYTES)
    elif first == "{" and _holds_coco(path):
        yield from _coco_captions(path)
    elif first == "{":
        for number, line in _lines(path):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{path}: line {number:,} is not valid JSON ({error}); needed is {needed}"
                    ) from None
    else:
        seen = f"begins with {first!r}" if first else "is empty"
        raise UserError(f"{path}: {seen}; needed is {needed}")


def _holds_coco(path: Path) -> bool:
    """Tell whether a JSON file is one object with `annotations` of images, as COCO's are."""
    try:
        annotation = next(_elements(path, "annotations", MAX_COCO_BYTES), None)
    except UserError:  # JSON lines, for example
        return False
    return isinstance(annotation, dict) and "image_id" in annotation


def _coco_captions(path: Path) -> Iterator[object]:
    """Yield {"id", "image", "caption"} of each annotation of a COCO file; `image` may be None.

    Memory is that of all images' names.
    """
    names = {}
    for image in _elements(path, "images", MAX_COCO_BYTES):
        if isinstance(image, dict) and isinstance(image.get("id"), int | str):
            names[image["id"]] = image.get("file_name")
    for annotation in _elements(path, "annotations", MAX_COCO_BYTES):
        if isinstance(annotation, dict):
            image_id = annotation.get("image_id")
            name = names.get(image_id) if isinstance(image_id, int | str) else None
            yield {"id": annotation.get("id"), "image": name, "caption": annotation.get("caption")}
        else:
            yield annotation


def table_columns(path: Path) -> list[str]:
    """Return the names in a table's first line."""
    return next(_table_lines(path))


def table_rows(path: Path) -> Iterator[object]:
    """Yield each row as a dict of texts; as a list where its length is not that of the first line."""
    lines = _table_lines(path)
    columns = next(lines)
    for row in lines:
        yield dict(zip(columns, row, strict=True)) if len(row) == len(columns) else row


def _table_lines(path: Path) -> Iterator[list[str]]:
    """Yield the fields of each line that has any, the columns' names first."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    separator = SEPARATORS[path.suffix.lower()]
    reader = csv.reader((line for _, line in _lines(path)), delimiter=separator, strict=True)
    columns: list[str] = []
    first = 1  # line that the current row begins in
    try:
        for row in reader:
            if separator == "\t" and any("\t" in field and ("\n" in field or "\r" in field) for field in row):
                raise UserError(
                    f"{path}: line {first:,} has a field with a tab and a line break: most likely a quote has no end "
                    'and took in the rows that follow. Double the quotes of that field (""), or save JSON lines'
                )
            if row and not columns:
                columns = row = [name.strip() for name in row]
                if len(set(columns)) < len(columns):
                    raise UserError(f"{path}: its first line names a column twice: {escape(', '.join(columns))}")
            if row:
                yield row
            first = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}: line {first:,} is not a row of a table ({error}). Quote fields that hold a separator, a quote or "
            'a line break, and double the quotes in them ("")'
        ) from None
    if not columns:
        raise UserError(f"{path}: is empty; needed is a table whose first line names its columns")


def _elements(path: Path, key: str | None, limit: int) -> Iterator[object]:
    """Yield the elements of a JSON array, which is the file, or the value of `key` in the object that the file is.

    Each element is cut out at its brackets and read by itself: memory is that of one, at most `limit` bytes.
    """
    wanted = None if key is None else re.compile(rb'"%s"\s*:\s*\Z' % key.encode())
    records = depth = begin = at = 0
    inside: int | None = None  # depth between the array's elements
    is_first = True
    with _opened(path, "rb") as stream:
        data = stream.read(_CHUNK).removeprefix(codecs.BOM_UTF8)
        try:
            while True:
                found = _TO_BRACKET.match(data, at)
                if found is None or found[1] is None:
                    if len(data) - begin > limit:
                        raise ValueError(f"no record ends within {limit:,} bytes")
                    if not (more := stream.read(_CHUNK)):
                        break
                    data, at, begin = data[begin:] + more, at - begin, 0
                    continue
                bracket, before, at = found[1], data[begin : found.start(1)], found.end()
                if bracket in b"[{":
                    if inside is None:
                        is_array = depth == 0 if wanted is None else depth == 1 and wanted.search(before) is not None
                        inside = depth + 1 if is_array and bracket == b"[" else None
                        begin = at
                    elif depth == inside:
                        yield from _values(before, is_first=is_first)
                        is_first, begin = False, found.start(1)
                    depth += 1
                    if depth > MAX_DEPTH:
                        raise ValueError(f"more than {MAX_DEPTH:,} brackets are open")
                    continue
                depth -= 1
                if inside is None:
                    begin = at
                elif depth == inside:
                    try:
                        yield json.loads(data[begin:at])
                    except RecursionError:  # at some 900 levels
                        yield None  # no record
                    records, begin = records + 1, at
                elif depth < inside:
                    yield from _values(before, is_first=is_first, is_last=True)
                    if bracket == b"}" or (key is None and (data[at:] + stream.read(_CHUNK)).strip()):
                        raise ValueError("its array does not end where the file does")
                    return
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not valid JSON after {records:,} records ({error})") from None
    if key is None or inside is not None:
        raise UserError(f"{path}: not valid JSON after {records:,} records (it has no end); is the file complete?")


def _values(text: bytes, *, is_first: bool, is_last: bool = False) -> list[object]:
    """Return what stands between an array's brackets: nothing but a comma, or numbers and texts. Raises ValueError."""
    values = json.loads(b"[%s%s%s]" % (b"" if is_first else b"0", text, b"" if is_last else b"0"))
    return values[0 if is_first else 1 : None if is_last else -1]


def _first_character(path: Path) -> str:
    """Return a text's first character that JSON does not take for white space; "" if there is none."""
    with _opened(path, "r") as stream:
        while text := stream.read(4096):
            if text := text.lstrip(" \t\r\n"):
                return text[0]
    return ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line."""
    with _opened(path, "r") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_RECORD_BYTES + 1), ""), 1):
            if len(line) > MAX_RECORD_BYTES:
                raise UserError(f"{path}: line {number:,} is longer than {MAX_RECORD_BYTES:,} characters")
            if "\0" in line:
                raise UserError(f"{path}: line {number:,} has a null character; save the file as UTF-8")
            yield number, line


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[IO]:
    """Open a file; as text, UTF-8 with or without a byte order mark, its line ends as they are."""
    text = {} if "b" in mode else {"encoding": "utf-8-sig", "newline": ""}
    try:
        if not path.is_file():  # opening a named pipe would wait for ever
            raise UserError(f"{path}: no such file; a JSON, JSONL, CSV or TSV file is needed")
        with path.open(mode, **text) as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error.reason}); if it is compressed, unpack it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
