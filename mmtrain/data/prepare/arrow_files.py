"""Parquet files, and the Arrow files of Hugging Face's datasets, read as data.

Nothing in them can name code that runs.

file --pyarrow: wanted columns, row by row, checked--> {"column": value, ...}
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.base.small_files import refuse_lost_link
from mmtrain.data.samples.records import MAX_RECORD_BYTES

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".arrow")
# begins Arrow's file format; the streaming format, which datasets writes, begins otherwise
_FILE_FORMAT = b"ARROW1"
# Text that is not UTF-8, damaged JSON, dates that Python does not have.
_PYTHON_ERRORS = (OSError, ValueError, LookupError, ArithmeticError, RecursionError)


def arrow_columns(path: Path) -> list[str]:
    with _opened(path) as file:
        return _schema(file).names


def count_rows(path: Path) -> int:
    with _opened(path) as file:
        if _is_parquet(path):
            return file.metadata.num_rows
        return sum(batch.num_rows for batch in _arrow_batches(file))


def arrow_rows(path: Path, wanted: Collection[str], first: int) -> Iterator[dict[str, Any]]:
    """Yield the rows from `first` on, of the wanted columns: JSON types, and memoryview for bytes.

    Rows are decoded one by one: a dictionary's value of 256 MB takes 9 kB of a file, however many
    rows repeat it.
    """
    with _opened(path) as file:
        names = [name for name in _schema(file).names if name in wanted]
        if len(set(names)) < len(names):
            raise ValueError(f"several columns have one name: {', '.join(names)}")
        read = _parquet_rows if _is_parquet(path) else _ipc_rows
        for row in read(file, names, first):
            reader = _RowReader()
            values = (reader.value(column[0]) for column in row.columns)
            yield dict(zip(names, values, strict=True))


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a ParquetFile, or a reader of Arrow's streaming or file format.

    Its errors become UserError.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: parquet and Arrow files need pyarrow, which is not installed. "
            "Run pip install 'mmtrain[datasets]'"
        ) from None
    refuse_lost_link(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file. Name a parquet or Arrow file")
    try:
        if _is_parquet(path):
            with ParquetFile(path, memory_map=True, pre_buffer=False) as file:
                yield file
            return
        with pyarrow.memory_map(str(path)) as content:
            is_file_format = content.read(len(_FILE_FORMAT)) == _FILE_FORMAT
            content.seek(0)
            open_content = pyarrow.ipc.open_file if is_file_format else pyarrow.ipc.open_stream
            with open_content(content) as file:
                yield file
    except (pyarrow.ArrowException, *_PYTHON_ERRORS) as error:
        raise UserError(
            f"{path}: cannot be read ({escape(str(error))}). Is the file complete?"
        ) from None


def _schema(file: Any) -> pyarrow.Schema:
    return getattr(file, "schema_arrow", file.schema)


def _parquet_rows(file: Any, names: list[str], first: int) -> Iterator[pyarrow.RecordBatch]:
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first < rows:
            batches = file.iter_batches(1, row_groups=[group], columns=names, use_threads=False)
            yield from itertools.islice(batches, first, None)
        first = max(first - rows, 0)


def _ipc_rows(file: Any, names: list[str], first: int) -> Iterator[pyarrow.RecordBatch]:
    for batch in _arrow_batches(file):
        if first < batch.num_rows:
            columns = batch.select(names)
            columns.validate(full=True)  # offsets of values may lead out of the file
            for place in range(first, batch.num_rows):
                yield columns.slice(place, 1)
        first = max(first - batch.num_rows, 0)


def _arrow_batches(file: Any) -> Iterator[pyarrow.RecordBatch]:
    if hasattr(file, "num_record_batches"):
        return map(file.get_batch, range(file.num_record_batches))
    return iter(file)


class _RowReader:
    """Converts the values of one row.

    Raises ValueError for more text, or longer lists, than a record may have.
    """

    left = MAX_RECORD_BYTES

    def value(self, scalar: pyarrow.Scalar) -> Any:
        """Convert a value to JSON types; bytes are not copied."""
        import pyarrow

        self._take(1)
        if not scalar.is_valid:
            return None
        if isinstance(scalar, pyarrow.DictionaryScalar):
            return self.value(scalar.value)
        if isinstance(scalar, pyarrow.StructScalar):
            return {name: self.value(inner) for name, inner in scalar.items()}
        if isinstance(scalar, pyarrow.ListScalar):  # also of large lists and those of a fixed size
            self._take(len(scalar.values))  # a billion nulls take no place in a file
            return list(map(self.value, scalar.values))

        # datasets' Json: values of one field are of several types
        if isinstance(scalar.type, pyarrow.JsonType):
            return json.loads(self.value(scalar.value))
        if isinstance(scalar, pyarrow.StringScalar):
            self._take(len(scalar.as_buffer()))
        elif isinstance(scalar, pyarrow.BinaryScalar):
            return memoryview(scalar.as_buffer())
        elif isinstance(scalar, pyarrow.FloatScalar):  # of 32 bits: 0.1, not 0.10000000149011612
            return float(scalar.cast(pyarrow.string()).as_py())
        return scalar.as_py()

    def _take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ValueError(
                f"a row has more than {MAX_RECORD_BYTES:,} bytes of text, or values in lists"
            )
