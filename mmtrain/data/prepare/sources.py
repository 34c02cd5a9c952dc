"""What `mmtrain shard` reads: files and folders as others have them, one after the other, row by row.

.json .jsonl (LLaVA, ShareGPT, captions, COCO), .csv .tsv, .parquet, .arrow, datasets' folders --open_sources--> Source
Source --rows--> any values --its Adapter--> records and images
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, first_few
from mmtrain.base.small_files import MAX_JSON_BYTES, parse_json, read_limited
from mmtrain.data.prepare import arrow_files, text_files
from mmtrain.data.prepare.rows import Adapted, Adapter
from mmtrain.data.prepare.sharding import Candidate
from mmtrain.data.samples.formats import LLAVA, SEEN, SampleFormat, best, candidates
from mmtrain.data.samples.records import BadSample
from mmtrain.data.shards.detection import AUTO

_JSON = (".json", ".jsonl", ".ndjson")
_SUFFIXES = (*_JSON, *text_files.SEPARATORS, *arrow_files.SUFFIXES)
_URL = re.compile(r"(https?|s3|gs)://", re.IGNORECASE)
_DOWNLOAD = (
    "mmtrain downloads nothing: `img2dataset --output_format webdataset` does, and data.shards reads what it writes"
)
# As datasets and its hub name them: train-00000-of-00002.parquet, validation.parquet.
_SPLIT_FILE = re.compile(r"(.+)-\d+-of-\d+.*\.parquet|(train|test|val|valid|validation|dev)\.parquet", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A file of rows."""

    path: Path
    name: str  # in rejected.jsonl and dataset.json; after its folder's, where that was named
    adapter: Adapter
    records: int = 0

    @property
    def holds_bytes(self) -> bool:
        """Whether its rows may hold images themselves."""
        return self.path.suffix.lower() in arrow_files.SUFFIXES

    def rows(self, first: int = 0) -> Iterator[object]:
        """Yield the rows from `first` on; raises UserError, when it gets there, for a damaged file."""
        if self.holds_bytes:
            return arrow_files.arrow_rows(self.path, self.adapter.columns, first)
        if self.path.suffix.lower() in text_files.SEPARATORS:
            rows = text_files.table_rows(self.path)
        else:
            rows = text_files.json_records(self.path)
        return itertools.islice(rows, first, None)

    def counted(self) -> Source:
        """Return the source with its number of records; raises UserError for a damaged file."""
        records = arrow_files.count_rows(self.path) if self.holds_bytes else sum(1 for _ in self.rows())
        return replace(self, records=records)

    def keys(self, rows: Sequence[object]) -> list[str]:
        """Return the names of the columns, or the keys of the first rows."""
        if self.holds_bytes:
            return arrow_files.arrow_columns(self.path)
        if self.path.suffix.lower() in text_files.SEPARATORS:
            return text_files.table_columns(self.path)
        return list(dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row))


def llava_source(path: Path) -> Source:
    """Open a file of LLaVA's records; raises UserError."""
    return Source(path, path.name, Adapter(LLAVA, as_it_is=True)).counted()


def open_sources(path: Path, form: SampleFormat, image_key: str | None) -> tuple[list[Source], str]:
    """Return the files of rows that a path names, all read in one way, and a description of that way.

    A `form` named auto is chosen by the first rows. Raises UserError where nothing can be read, or no form fits.
    """
    files = _files(path)
    any_form = Adapter(form, image_key)
    sources = [Source(file, name, any_form) for name, file in files]
    rows = itertools.islice(itertools.chain.from_iterable(source.rows() for source in sources), SEEN)
    rows = [_without_contents(row) for row in rows]
    if not rows:
        raise UserError(f"{path}: holds no record")
    as_it_is = all(map(_is_json, (file for _, file in files))) and image_key is None
    names = candidates(rows) if form.name == AUTO else (form.name,)
    adapters = [
        replace(any_form, form=replace(form, name=name), as_it_is=as_it_is and name == "llava") for name in names
    ]
    adapter = _fitting(path, rows, adapters, sources[0].keys(rows))
    return [replace(source, adapter=adapter).counted() for source in sources], adapter.description


def place(sources: Sequence[Source], number: int) -> tuple[Source, int]:
    """Return the source of a record, by its number over all sources, and its number in that source."""
    for source in sources:
        if number < source.records:
            return source, number
        number -= source.records
    raise AssertionError(f"{number} records more than there are")


def stored_images(sources: Sequence[Source], candidates: Iterable[Candidate]) -> Iterator[Sequence[memoryview | None]]:
    """Yield for each candidate the bytes of its images that its row holds; None for one that is a file."""
    opened: Source | None = None
    rows: Iterator[object] = iter(())
    at = 0
    for candidate in candidates:
        source, row = place(sources, candidate.record)
        if not source.holds_bytes:
            yield (None,) * len(candidate.images)
            continue
        if source is not opened:
            opened, rows, at = source, source.rows(row), row
        content = next(itertools.islice(rows, row - at, None), None)
        at = row + 1
        images = source.adapter.images(content) if isinstance(content, dict) else ()
        if len(images) != len(candidate.images):
            raise UserError(f"{source.path}: was changed while it was read; start again")
        yield [image.content for image in images]


def _without_contents(value: object, levels: int = 4) -> object:
    """Replace each image of a row by one byte, as a hundred images may not fit into memory.

    They are at most 4 levels deep: the row, a list, {"bytes", "path"}, the bytes.
    """
    if isinstance(value, memoryview):
        return memoryview(b"?" if value.nbytes else b"")
    if isinstance(value, dict) and levels:
        return {key: _without_contents(inner, levels - 1) for key, inner in value.items()}
    if isinstance(value, list) and levels:
        return [_without_contents(inner, levels - 1) for inner in value]
    return value


def _fitting(path: Path, rows: Sequence[object], adapters: Sequence[Adapter], keys: list[str]) -> Adapter:
    """Return the adapter that takes the rows; of several that take nearly all of them, the first."""
    for option, key in (("--image-key", adapters[0].image_key), ("--caption-key", adapters[0].form.caption_key)):
        if key is not None and key not in keys:
            raise UserError(f"{path}: {option} {key}: nothing is called so; there is {_named(keys)}")
    adapters = [adapter.settled(rows) for adapter in adapters]
    trials = [_tried(adapter, rows) for adapter in adapters]
    choice = best([len(adapted) for adapted, _ in trials], len(rows))
    adapted, _ = trials[choice]
    if not adapted and len(adapters) > 1:
        faults = (max(faults, key=len)[0] for _, faults in trials)
        seen = "; ".join(f"as {adapter.form.name} {fault}" for adapter, fault in zip(adapters, faults, strict=True))
        raise UserError(f"{path}: none of its first {len(rows):,} records is a sample: {seen}. {_remedy(path, keys)}")
    names = (image.name for record in adapted for image in record.images if image.content is None and image.name)
    if _URL.match(name := next(names, "")):
        raise UserError(f"{path}: its images are addresses ({escape(name)}). {_DOWNLOAD}")
    return adapters[choice]


def _tried(adapter: Adapter, rows: Sequence[object]) -> tuple[list[Adapted], list[list[str]]]:
    """Return what rows become, and the faults of the others: a list for each reason."""
    adapted: list[Adapted] = []
    faults: dict[str, list[str]] = {}
    for row in rows:
        try:
            adapted.append(adapter.adapt(row))
        except BadSample as error:
            faults.setdefault(error.reason, []).append(str(error))
    return adapted, list(faults.values())


def _remedy(path: Path, keys: list[str]) -> str:
    if any("url" in key.lower() for key in keys) or any(_URL.match(key) for key in keys):
        return _DOWNLOAD
    of_table = ""
    if path.suffix.lower() in text_files.SEPARATORS:
        of_table = f"; the names of columns stand in the first line, which is {_named(keys)}"
    elif not _is_json(path):
        of_table = f"; its columns are {_named(keys)}"
    return f"--image-key and --caption-key say what holds them{of_table}"


def _named(keys: list[str]) -> str:
    return escape(first_few(keys, 20)) or "nothing"


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in _JSON


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return the name and path of each file of rows that a path stands for, in order; raises UserError."""
    if not path.is_dir():
        if path.suffix.lower() == ".tar":
            raise UserError(f"{path}: is a shard already: data.shards={path} trains on it")
        if path.suffix.lower() not in _SUFFIXES:
            suffixes = ", ".join(_SUFFIXES)
            raise UserError(
                f"{path}: its name must end in one of {suffixes}; or name a folder of datasets' save_to_disk"
            )
        return [(path.name, path)]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.parent.name for folder in path.glob("*/state.json"))
        raise UserError(f"{path}: holds splits; name one or several: {' '.join(str(path / split) for split in splits)}")
    names = _saved_files(path) if (path / "state.json").is_file() else sorted(f.name for f in path.glob("*.parquet"))
    if not names and any(path.glob("*.tar")):
        raise UserError(f"{path}: holds shards already: data.shards={path} trains on them")
    if not names:
        inner = sorted({str(file.parent) for file in path.glob("*/*.parquet")})
        seen = f"; {first_few(inner, 3)} has some" if inner else ""
        raise UserError(f"{path}: holds no *.parquet and no state.json of datasets' save_to_disk{seen}. Name files")
    matches = [match for name in names if (match := _SPLIT_FILE.fullmatch(name))]
    splits = {match[1] or match[2]: f"{match[1]}-*.parquet" if match[1] else match[0] for match in matches}
    if len(splits) > 1:
        files = next((files for split, files in splits.items() if split.lower() == "train"), matches[0][0])
        raise UserError(f"{path}: holds splits ({', '.join(splits)}); name the files of one: --from {path}/{files}")
    return [(f"{path.name}/{name}", path / name) for name in names]


def _saved_files(folder: Path) -> list[str]:
    """Return the names of the files that datasets' save_to_disk lists in state.json."""
    state = folder / "state.json"
    with contextlib.suppress(ValueError, LookupError, TypeError):
        content = parse_json(read_limited(state, MAX_JSON_BYTES, "the state of a saved data set"))
        names = [entry["filename"] for entry in content["_data_files"]]
        if content.get("_indices_data_files"):
            raise UserError(f"{state}: lists its rows apart, as datasets did before version 2: save it again")
        if all(Path(name).name == name and name.endswith(".arrow") for name in names):
            return names
    raise UserError(f"{state}: is not what datasets' save_to_disk writes; save the data set again")
