"""What `mmtrain shard` reads: files and folders as others have them, one after the other, row by row.

.json .jsonl (LLaVA, ShareGPT, captions, COCO), .csv .tsv, .parquet, .arrow, datasets' folders --open_sources--> Source
Source --rows--> any values --its Adapter--> records and images
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, first_few
from mmtrain.base.small_files import MAX_JSON_BYTES, parse_json, read_limited
from mmtrain.data.prepare import arrow_files, text_files
from mmtrain.data.prepare.rows import Adapted, Adapter
from mmtrain.data.prepare.sharding import Candidate
from mmtrain.data.samples.formats import SEEN, SampleFormat, best, candidates
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
    if sources[0].holds_bytes:
        keys = arrow_files.arrow_columns(sources[0].path)
    else:
        keys = list(dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row))
    as_it_is = image_key is None and all(file.suffix.lower() in _JSON for _, file in files)
    names = candidates(rows) if form.name == AUTO else (form.name,)
    adapters = [
        replace(any_form, form=replace(form, name=name), as_it_is=as_it_is and name == "llava") for name in names
    ]
    adapter = _fitting(path, rows, adapters, keys)
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
        seen = "; ".join(
            f"as {adapter.form.name} {Counter(faults).most_common(1)[0][0]}"
            for adapter, (_, faults) in zip(adapters, trials, strict=True)
        )
        raise UserError(f"{path}: none of its first {len(rows):,} records is a sample: {seen}. {_remedy(keys)}")
    names = (image.name for record in adapted for image in record.images if image.content is None and image.name)
    if _URL.match(name := next(names, "")):
        raise UserError(f"{path}: its images are addresses ({escape(name)}). {_DOWNLOAD}")
    return adapters[choice]


def _tried(adapter: Adapter, rows: Sequence[object]) -> tuple[list[Adapted], list[str]]:
    """Return what rows become, and the faults of the others."""
    adapted: list[Adapted] = []
    faults: list[str] = []
    for row in rows:
        try:
            adapted.append(adapter.adapt(row))
        except BadSample as error:
            faults.append(str(error))
    return adapted, faults


def _remedy(keys: list[str]) -> str:
    if any("url" in key.lower() for key in keys) or any(_URL.match(key) for key in keys):
        return _DOWNLOAD
    return f"--image-key and --caption-key say what holds them; its keys or columns are {_named(keys)}"


def _named(keys: list[str]) -> str:
    return escape(first_few(keys, 20)) or "nothing"


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return the name and path of each file of rows that a path stands for, in order; raises UserError."""
    if path.suffix.lower() == ".tar" or any(path.glob("*.tar")):
        raise UserError(f"{path}: holds shards already: data.shards={path} trains on them")
    if not path.is_dir():
        if path.suffix.lower() not in _SUFFIXES:
            suffixes = ", ".join(_SUFFIXES)
            raise UserError(
                f"{path}: its name must end in one of {suffixes}; or name a folder of datasets' save_to_disk"
            )
        return [(path.name, path)]
    names = _saved_files(path) if (path / "state.json").is_file() else sorted(f.name for f in path.glob("*.parquet"))
    if not names:
        inner = sorted({str(file.parent) for name in ("*.parquet", "state.json") for file in path.glob(f"*/{name}")})
        seen = f". Name one of {', '.join(inner[:5])}" if inner else ""
        raise UserError(f"{path}: holds no *.parquet and no state.json of datasets' save_to_disk{seen}")
    splits = {match[1] or match[2] for name in names if (match := _SPLIT_FILE.fullmatch(name))}
    if len(splits) > 1:
        seen = ", ".join(sorted(splits))
        raise UserError(f"{path}: holds splits ({seen}); name the files of one: --from {path}/SPLIT*.parquet")
    return [(f"{path.name}/{name}", path / name) for name in names]


def _saved_files(folder: Path) -> list[str]:
    """Return the names of the files that datasets' save_to_disk lists in state.json."""
    state = folder / "state.json"
    with contextlib.suppress(ValueError, LookupError, TypeError):
        content = parse_json(read_limited(state, MAX_JSON_BYTES, "the state of a saved data set"))
        names = [entry["filename"] for entry in content["_data_files"]]
        if all(Path(name).name == name and name.endswith(".arrow") for name in names):
            return names
    raise UserError(f"{state}: is not what datasets' save_to_disk writes; save the data set again")
