"""Parquet files, and the Arrow files of Hugging Face's datasets, read as data: nothing in them can name code that runs.

file --columns that are asked for, some rows at a time, checked--> {"column": value, ...}, bytes as views of the file

pyarrow reads both. datasets itself is not needed: what its folders say of features, beyond Arrow's own types, does not
count.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmtrain.base.errors import UserError
from mmtrain.base.printing import harmless

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".parquet", ".arrow")
_BATCH = 32  # rows; of a few hundred kilobytes each where they hold images
_LONGEST_LIST = 10_000  # values; of turns, images
_FILE_FORMAT = b"ARROW1"  # what Arrow's file format begins with; its streaming format, datasets' own, does not


def arrow_columns(path: Path) -> list[str]:
    """Names of a file's columns; raises UserError."""
    with _opened(path) as file:
        return _schema(file).names


def count_rows(path: Path) -> int:
    """How many rows a file says it has; raises UserError."""
    with _opened(path) as file:
        return file.metadata.num_rows if _is_parquet(path) else sum(batch.num_rows for batch in _arrow_batches(file))


def arrow_rows(path: Path, wanted: Collection[str], first: int = 0) -> Iterator[dict[str, Any]]:
    """The rows from `first` on, of those columns that are wanted: JSON types, and memoryview for bytes.

    Those before `first` are passed over. Memory is that of a few rows and, of parquet, of a page: 1,024 rows as pandas
    writes it, at most 100 as datasets does. Raises UserError for a damaged file.
    """
    with _opened(path) as file:
        names = [name for name in _schema(file).names if name in wanted]
        if len(set(names)) < len(names):
            raise ValueError(f"columns of equal names: {', '.join(names)}")
        for batch in _parquet_batches(file, names, first) if _is_parquet(path) else _arrow_parts(file, names, first):
            batch.validate(full=True)
            columns = [_values(column) for column in batch.columns]
            for place in range(batch.num_rows):
                yield {name: values[place] for name, values in zip(names, columns, strict=True)}


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A ParquetFile, or a reader of Arrow's streaming or file format; what reading it raises becomes a UserError."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise UserError(
            f"{path}: parquet and Arrow files are read by pyarrow, which is not installed: pip install "
            "'mmtrain[datasets]'"
        ) from None
    if not path.is_file():
        raise UserError(f"{path}: no such file; a parquet or Arrow file is needed")
    try:
        if _is_parquet(path):
            with ParquetFile(path, memory_map=True, pre_buffer=False) as file:
                yield file
            return
        with pyarrow.memory_map(str(path)) as content:
            is_file_format = content.read(len(_FILE_FORMAT)) == _FILE_FORMAT
            content.seek(0)
            with (pyarrow.ipc.open_file if is_file_format else pyarrow.ipc.open_stream)(content) as file:
                yield file
    # Besides pyarrow's errors Python's: for text that is none, JSON that is none, dates that Python has not.
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({harmless(str(error))}); is the file complete?") from None


def _schema(file: Any) -> pyarrow.Schema:
    return file.schema_arrow if hasattr(file, "schema_arrow") else file.schema


def _parquet_batches(file: Any, names: list[str], first: int) -> Iterator[pyarrow.RecordBatch]:
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first < rows:
            for batch in file.iter_batches(_BATCH, row_groups=[group], columns=names, use_threads=False):
                yield batch.slice(min(first, batch.num_rows))
                first -= min(first, batch.num_rows)
        else:
            first -= rows


def _arrow_parts(file: Any, names: list[str], first: int) -> Iterator[pyarrow.RecordBatch]:
    for batch in _arrow_batches(file):
        for start in range(first, batch.num_rows, _BATCH):
            yield batch.select(names).slice(start, _BATCH)
        first -= min(first, batch.num_rows)


def _arrow_batches(file: Any) -> Iterator[pyarrow.RecordBatch]:
    if hasattr(file, "num_record_batches"):
        return (file.get_batch(number) for number in range(file.num_record_batches))
    return iter(file)


def _values(column: pyarrow.Array) -> list[Any]:
    is_plain = not (column.type.num_fields or _is_bytes(column.type) or _is_json(column.type))
    return column.to_pylist() if is_plain else [_value(scalar) for scalar in column]


def _value(scalar: pyarrow.Scalar) -> Any:
    """What `as_py` gives, but for bytes, which are not copied, for JSON, which is read, and for endless lists."""
    import pyarrow

    if not scalar.is_valid:
        return None
    if _is_bytes(scalar.type):
        return memoryview(scalar.as_buffer())
    if _is_json(scalar.type):
        return json.loads(scalar.as_py())
    if isinstance(scalar, pyarrow.StructScalar):
        return {name: _value(inner) for name, inner in scalar.items()}
    if isinstance(scalar, pyarrow.ListScalar):  # also of large lists and those of a fixed size
        if len(scalar.values) > _LONGEST_LIST:  # of nulls, a billion takes no place in a file
            raise ValueError(f"a list of {len(scalar.values):,} values in a row")
        return [_value(inner) for inner in scalar.values]
    return scalar.as_py()


def _is_bytes(kind: pyarrow.DataType) -> bool:
    from pyarrow.types import is_binary, is_binary_view, is_fixed_size_binary, is_large_binary

    return is_binary(kind) or is_large_binary(kind) or is_fixed_size_binary(kind) or is_binary_view(kind)


def _is_json(kind: pyarrow.DataType) -> bool:
    """Whether it is what datasets' Json is stored as, where the values of one field are of several types."""
    import pyarrow

    return isinstance(kind, pyarrow.JsonType)
