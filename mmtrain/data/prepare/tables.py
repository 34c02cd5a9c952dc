"""Tables whose first line names their columns: CSV and TSV, as Python's csv, pandas and spreadsheets write them.

column,column\\nvalue,value\\n... --table_rows--> {"column": "value", ...}
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from mmtrain.base.errors import UserError
from mmtrain.base.printing import harmless
from mmtrain.data.prepare.json_files import opened_text
from mmtrain.data.samples.records import MAX_RECORD_BYTES

SEPARATORS = {".csv": ",", ".tsv": "\t"}


def table_columns(path: Path) -> list[str]:
    """Names of a table's columns; raises UserError."""
    return next(_lines(path))


def table_rows(path: Path) -> Iterator[object]:
    """Each row of a table as a dict of texts; as the list that it is where its length is not that of the first line.

    Memory is that of one row. Raises UserError, when it gets there, for what is no table, with the line.
    """
    lines = _lines(path)
    columns = next(lines)
    for row in lines:
        yield dict(zip(columns, row, strict=True)) if len(row) == len(columns) else row


def _lines(path: Path) -> Iterator[list[str]]:
    """The fields of each line that has any; the first are the columns' names."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    separator = SEPARATORS[path.suffix.lower()]
    with opened_text(path, "a table") as stream:
        reader = csv.reader(_bounded(stream, path), delimiter=separator, strict=True)
        columns: list[str] = []
        first = 1  # line of the row that is read
        try:
            for row in reader:
                if separator == "\t" and any("\t" in field and ("\n" in field or "\r" in field) for field in row):
                    raise UserError(
                        f"{path}: line {first:,} begins a row of which one field holds a tab and a line break, so "
                        "most likely its first quote has no end and took in the rows that follow. Save it as JSON "
                        'lines or parquet, or put that field in quotes and double its own ("")'
                    )
                if row and not columns:
                    columns = row = [name.strip() for name in row]
                    if len(set(columns)) < len(columns):
                        raise UserError(f"{path}: its first line names a column twice: {harmless(', '.join(columns))}")
                if row:
                    yield row
                first = reader.line_num + 1
        except csv.Error as error:
            raise UserError(
                f"{path}: line {first:,} is none of a table ({error}). A field that holds a separator, a "
                'quote or a line break stands in quotes, and quotes in it are doubled ("")'
            ) from None
        if not columns:
            raise UserError(f"{path}: is empty; needed is a table whose first line names its columns")


def _bounded(stream: TextIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: stream.readline(MAX_RECORD_BYTES + 1), ""), 1):
        if len(line) > MAX_RECORD_BYTES or "\0" in line:
            seen = "has a null character" if "\0" in line else f"is longer than {MAX_RECORD_BYTES:,} characters"
            raise UserError(f"{path}: line {number:,} {seen}: no table, or none in UTF-8; save it as UTF-8")
        yield line
