"""Text files of records, read one by one: JSON arrays and lines, COCO's captions, CSV, TSV.

JSON array, or JSON lines --json_records--> any JSON values
COCO's {"images": [...], "annotations": [...]} --json_records--> {"id", "image", "caption"}
column,column\\nvalue,value\\n... --table_rows--> {"column": "value", ...}

Memory is that of a record, or of a COCO file. Every function raises UserError, when it gets there.
"""

import contextlib
import csv
import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import refuse_lost_link
from mmtrain.data.samples.formats import CONVERSATION_KEYS, IMAGE_KEYS, QUESTION_KEYS, TEXTS_KEYS
from mmtrain.data.samples.records import MAX_RECORD_BYTES, are_objects, objects_in

SEPARATORS = {".csv": ",", ".tsv": "\t"}
MAX_COCO_BYTES = 256 << 20  # the captions of COCO 2017 have 92 MB
_KEYS_OF_A_RECORD = {*CONVERSATION_KEYS, *TEXTS_KEYS, *QUESTION_KEYS, *IMAGE_KEYS}
_CHUNK = 1 << 20
_NEEDED = "Give a JSON array of records, or JSON lines with one record a line"
_SPACE = re.compile(r"[ \t\r\n]*")  # that JSON allows between values


def json_records(path: Path) -> Iterator[object]:
    """Yield each element of a JSON array, line of JSON lines, or record in one object."""
    with _opened(path) as stream:
        letters = iter(functools.partial(stream.read, 1), "")
        first = next(itertools.dropwhile(" \t\r\n".__contains__, letters), "")
    if first not in ("[", "{"):
        seen = f"begins with {first!r}" if first else "is empty"
        raise UserError(f"{path}: {seen}. {_NEEDED}")
    if first == "[":
        yield from _array_elements(path)
    elif (content := _one_object(path)) is not None:
        yield from _records_inside(content)
    else:
        for number, line in _lines(path):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path}: line {number:,} is not valid JSON ({error}). {_NEEDED}"
                ) from None


def _array_elements(path: Path) -> Iterator[object]:
    """Yield the elements of a JSON array.

    Each is read from a window that grows until the element ends in it.
    """
    decoder = json.JSONDecoder()
    count = 0
    with _opened(path) as stream:
        text = ""
        while "[" not in text:
            text = stream.read(_CHUNK)
        at = text.index("[") + 1
        while True:
            try:
                at = _SPACE.match(text, at).end()
                is_empty = count == 0 and text[at] == "]"
                end = at
                if not is_empty:
                    value, end = decoder.raw_decode(text, at)
                end = _SPACE.match(text, end).end()
                mark = text[end]
            except (ValueError, IndexError, RecursionError) as error:
                text = text[at:]
                at = 0
                more = stream.read(min(max(_CHUNK, len(text)), MAX_RECORD_BYTES + 1 - len(text)))
                if not more:
                    raise UserError(
                        f"{path}: not valid JSON after {count:,} records ({error}). Is the file "
                        f"complete? A record may have at most {MAX_RECORD_BYTES:,} characters"
                    ) from None
                text += more
                continue
            if mark not in ",]":
                raise UserError(
                    f"{path}: not valid JSON after {count + 1:,} records (no comma follows)"
                )
            if not is_empty:
                yield value
            count += 1
            at = end + 1
            if mark == "]":
                if (text[at:] + stream.read(_CHUNK)).strip():
                    raise UserError(f"{path}: not valid JSON: text follows the array")
                return


def _one_object(path: Path) -> dict | None:
    """Return the content of a file that is one JSON object.

    It is None for other files and for JSON lines, even of one record.
    """
    with _opened(path) as stream:
        text = stream.readline(MAX_RECORD_BYTES)  # of JSON lines it is an object by itself
        try:
            content = json.loads(text)
            lines = iter(functools.partial(stream.readline, MAX_RECORD_BYTES), "")
            is_lines = path.suffix != ".json" or any(map(str.strip, lines))
            return None if is_lines else content
        # the object goes on in the next line
        except (ValueError, RecursionError):
            if path.stat().st_size > MAX_COCO_BYTES:
                return None
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text + stream.read())
    return None


def _records_inside(content: dict) -> Iterator[object]:
    """Yield COCO's captions, the records that an object holds by id or in a list, or itself."""
    images = content.get("images")
    annotations = content.get("annotations")
    are_lists = isinstance(images, list) and isinstance(annotations, list)
    if are_lists and any("image_id" in one for one in objects_in(annotations)):
        yield from _coco_captions(images, annotations)
        return

    lists = list(filter(are_objects, content.values()))
    if _KEYS_OF_A_RECORD & content.keys():
        yield content
    elif len(lists) == 1:
        yield from lists[0]
    elif are_objects(list(content.values())):
        for identifier, record in content.items():
            yield {"id": identifier, **record}
    else:
        yield content


def _coco_captions(images: list, annotations: list) -> Iterator[object]:
    """Yield {"id", "image", "caption"} of each annotation; `image` may be None."""
    names = {}
    for image in images:
        if isinstance(image, dict):
            names[str(image.get("id"))] = image.get("file_name")
    for annotation in annotations:
        if isinstance(annotation, dict):
            name = names.get(str(annotation.get("image_id")))
            yield {"id": annotation.get("id"), "image": name, "caption": annotation.get("caption")}
        else:
            yield annotation


def table_rows(path: Path) -> Iterator[object]:
    """Yield each row as a dict of texts.

    A row is a list where its length is not that of the first line.
    """
    csv.field_size_limit(MAX_RECORD_BYTES)
    separator = SEPARATORS[path.suffix.lower()]
    reader = csv.DictReader((line for _, line in _lines(path)), delimiter=separator, strict=True)
    first = 1  # line that the current row begins in
    mend = (
        "Quote fields that hold a separator, a quote or a line break, and double the "
        'quotes in them ("")'
    )
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        if not columns or len(set(columns)) < len(columns):
            seen = escape(", ".join(columns)) or "nothing"
            raise UserError(
                f"{path}: its first line names {seen}. It must name the columns, each once"
            )
        if len(columns) == 1 and (found := re.search(r"[,;|\t]", columns[0])):
            raise UserError(
                f"{path}: its first line has {found[0]!r} between the columns, but {path.suffix} "
                f"has {separator!r}. Save it so, with quotes around texts that hold one"
            )
        reader.fieldnames = columns
        first = reader.line_num + 1
        for row in reader:
            fields = list(row.values())
            # None stands for fields that a short row lacks, and is the key of those of a long one
            is_whole = None not in row and None not in fields
            if separator == "\t" and any(map(_spans_rows, [*fields, *row.get(None, ())])):
                raise UserError(
                    f"{path}: line {first:,} has a field with a tab and a line break: "
                    f"probably a quote is not closed and includes the rows that follow. {mend}"
                )
            yield row if is_whole else fields
            first = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}: line {first:,} is not a row of a table ({error}). {mend}"
        ) from None


def _spans_rows(field: object) -> bool:
    return isinstance(field, str) and "\t" in field and ("\n" in field or "\r" in field)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with _opened(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_RECORD_BYTES + 1), ""), 1):
            if len(line) > MAX_RECORD_BYTES:
                raise UserError(
                    f"{path}: line {number:,} is longer than {MAX_RECORD_BYTES:,} characters"
                )
            if "\0" in line:
                raise UserError(
                    f"{path}: line {number:,} has a null character. Save the file as UTF-8"
                )
            yield number, line


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a text in UTF-8, with or without a byte order mark, its line ends as they are."""
    try:
        refuse_lost_link(path)
        if not path.is_file():  # opening a named pipe would wait for ever
            raise UserError(f"{path}: no such file. Name a JSON, JSONL, CSV or TSV file")
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not UTF-8 text ({error.reason}). If it is compressed, unpack it"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
