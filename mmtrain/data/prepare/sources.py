"""Sources of `mmtrain shard`: files and folders as others have them, row by row.

.json .jsonl (LLaVA, ShareGPT, captions, COCO), .csv .tsv, .parquet, .arrow, datasets' folders
    --open_sources--> Source
Source
    --rows--> {"image_path": "a.jpg", "caption": "A cat."}, {"images": [...], "messages": [...]}
    --its Adapter--> {"id", "image", "conversations"}, checked, and the row's images:
        names of files, or bytes, which texts hold in base64
"""

from __future__ import annotations

import binascii
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, first_few
from mmtrain.base.small_files import MAX_JSON_BYTES, parse_json, read_limited
from mmtrain.data.prepare import arrow_files, text_files
from mmtrain.data.prepare.sharding import Candidate
from mmtrain.data.samples.formats import (
    ANSWER_KEYS,
    CAPTION_KEYS,
    CONVERSATION_KEYS,
    IMAGE_KEYS,
    READERS,
    SEEN,
    TEXTS_KEYS,
    SampleFormat,
    best,
    candidates,
    caption_turns,
    first_held,
    first_value,
    is_image_part,
    llava_turns,
    refuse_unread,
)
from mmtrain.data.samples.records import (
    CONTENT_KEYS,
    IMAGE_SUFFIXES,
    UNREAD_KEYS,
    BadSample,
    Record,
    Turns,
    held,
    is_given,
    keys_or_value,
    objects_in,
    parse_record,
    short,
    unpacked,
)
from mmtrain.data.shards.detection import AUTO

_JSON = (".json", ".jsonl", ".ndjson")
_SUFFIXES = (*_JSON, *text_files.SEPARATORS, *arrow_files.SUFFIXES)
_URL = re.compile(r"(https?|s3|gs)://", re.IGNORECASE)
_DOWNLOAD = (
    "mmtrain downloads nothing: `img2dataset --output_format webdataset` does, "
    "and data.shards reads what it writes"
)
# As datasets and its hub name them: train-00000-of-00002.parquet, validation.parquet.
_SPLIT_FILE = re.compile(
    r"(.+)-\d+-of-\d+.*\.parquet|(train|test|val|valid|validation|dev)\.parquet", re.IGNORECASE
)
IMAGE_COLUMNS = (*IMAGE_KEYS, "filepath", "file_path", "file_name", "filename")
CAPTION_COLUMNS = (*CAPTION_KEYS, "title")
# What a table may hold as JSON text.
_LISTS = (*CONVERSATION_KEYS, *TEXTS_KEYS, "prompt", *ANSWER_KEYS)
_CONVERSATION = (
    "system",
    *chain.from_iterable(reader.keys for reader in READERS.values()),
    *UNREAD_KEYS,
    "objects",
)
# a name of an image has a dot
_BASE64 = re.compile(r"(?i:data:)[^,]{0,100};base64,|(?=[A-Za-z0-9+/\s]{64,}+=*+\s*+\Z)")
# of an image among a content's parts
_PART_KEYS = ("image", "image_url", "path", "url", "base64", "data")
_LONGEST_NAME = 4096  # characters; Linux opens no longer one


@dataclass(frozen=True)
class RowImage:
    """An image that a row names or holds."""

    name: str | None  # None where it has bytes alone
    content: memoryview | None  # None: it is a file of the images folder


@dataclass(frozen=True)
class Adapted:
    """The record and images of a row with sound text."""

    record: Record
    images: tuple[RowImage, ...]

    def named(self, key: str) -> Record:
        """Return the record with names for images that have none, made from the sample's key."""
        if all(image.name for image in self.images):
            return self.record
        names = []
        for number, image in enumerate(self.images):
            made = f"{key}.{number}" if len(self.images) > 1 else key
            names.append(image.name or made)
        content = {**self.record.content, "image": _one_or_all(names)}
        return replace(self.record, content=content, images=tuple(names))


@dataclass(frozen=True)
class Adapter:
    """The way to read the rows of a source."""

    form: SampleFormat
    image_key: str | None = None  # None: IMAGE_COLUMNS
    as_it_is: bool = False  # LLaVA's own files: each row is its record already, with any other keys

    @property
    def image_keys(self) -> tuple[str, ...]:
        """Keys where the images may be; the first that a row has counts."""
        if self.as_it_is:
            return ("image",)
        return IMAGE_COLUMNS if self.image_key is None else (self.image_key,)

    @property
    def caption_keys(self) -> tuple[str, ...]:
        return CAPTION_COLUMNS if self.form.caption_key is None else (self.form.caption_key,)

    @property
    def columns(self) -> set[str]:
        return {"id", *_CONVERSATION, *self.image_keys, *self.caption_keys}

    @property
    def description(self) -> str:
        if self.form.name != "caption":
            return READERS[self.form.name].description
        caption = self.form.caption_key or "none"
        return f"captions (image: {self.image_key or 'none'}, caption: {caption})"

    def unread(self, keys: Iterable[str]) -> list[str]:
        """Return the keys or columns that no row's sample is made from."""
        if self.as_it_is:
            return []
        read = {"id", self.image_key, self.form.caption_key}
        if self.form.name != "caption":
            read = {"id", "system", *self.image_keys, *READERS[self.form.name].keys}
        return [key for key in keys if key not in read]

    def settled(self, rows: Sequence[object]) -> Adapter:
        """Return the adapter for captions and images under one key each.

        It is the first key that any row uses.
        """
        if self.form.name != "caption":
            return self
        fields = objects_in(rows)
        image = _first_used(self.image_keys, fields, held)
        caption = _first_used(self.caption_keys, fields, is_given)
        return replace(self, image_key=image, form=replace(self.form, caption_key=caption))

    def adapt(self, row: object) -> Adapted:
        """Turn a row into a record; raises BadSample."""
        if self.form.name != "caption":
            refuse_unread(row)
        if self.as_it_is:
            record = parse_record(row)
            if not record.images:
                _refuse_unread_images(row)
            llava_turns(row, len(record.images))
            return Adapted(record, self.images(row))

        if not isinstance(row, dict):
            raise BadSample(
                "not_an_object",
                f"a row with other columns than its table, or not an object: {short(row)}",
            )
        images = self.images(row)
        identifier = row.get("id")
        if not isinstance(identifier, str | int | None):
            raise BadSample("bad_id", f"id is {short(identifier)}")
        turns = self._turns(row, len(images))
        content = {}
        if identifier is not None:
            content["id"] = identifier
        if images:
            content["image"] = _one_or_all([image.name or "unnamed" for image in images])
        content["conversations"] = [{"from": speaker, "value": text} for speaker, text in turns]
        return Adapted(parse_record(content), images)

    def _turns(self, row: dict, images: int) -> Turns:
        if self.form.name == "caption":
            caption = first_value(row, self.caption_keys)
            if caption is None:
                raise BadSample("no_caption", _nothing(self.caption_keys, row))
            if not images:
                raise BadSample(
                    "image_count", f"a caption without an image: {_nothing(self.image_keys, row)}"
                )
            return caption_turns(caption, images, self.form.caption_prompt)
        conversation = dict(row)
        for key in row:
            if key in _LISTS:
                conversation[key] = unpacked(row[key])
            elif key in IMAGE_KEYS:  # counted by `images`
                conversation[key] = None
        if self.form.name == "interleaved":
            conversation["images"] = unpacked(first_value(row, self.image_keys))
        return READERS[self.form.name].turns(conversation, images)

    def images(self, row: dict) -> tuple[RowImage, ...]:
        """Return the images of a row, in order; raises BadSample."""
        images = first_held(row, self.image_keys)
        if self.form.name == "interleaved":
            images = filter(held, images)
        elif not images and self.form.name in ("sharegpt", "qa"):
            images = _images_in_parts(row)
        return tuple(map(_image, images))


def _first_used(
    keys: Iterable[str],
    rows: Sequence[dict],
    is_used: Callable[[object], object],
) -> str | None:
    for key in keys:
        if any(is_used(row.get(key)) for row in rows):
            return key
    return None


def _refuse_unread_images(row: dict) -> None:
    """Raise BadSample for a text that names images elsewhere; it may name the file it is from."""
    for key in IMAGE_COLUMNS:
        value = row.get(key)
        is_image = "image" in key or str(value).lower().endswith(IMAGE_SUFFIXES)
        if is_image and held(value):
            raise BadSample(
                "image_count",
                f"it names images under {key}, but LLaVA's format has them under image; "
                "use --from with --format sharegpt",
            )


def _images_in_parts(row: dict) -> Iterator[object]:
    """Yield the images inside messages: {"type": "image", "image": "a.jpg"}."""
    for message in first_held(row, (*CONVERSATION_KEYS, "prompt")):
        for part in first_held(message, CONTENT_KEYS):
            if isinstance(part, dict) and is_image_part(part):
                yield _image_of_part(part)


def _image_of_part(part: dict) -> object:
    """Return the image of a part, perhaps inside OpenAI's `image_url` or Anthropic's `source`.

    Raises BadSample.
    """
    inner = first_value(part, ("image", "image_url", "source"))
    fields = part
    if isinstance(inner, dict) and "bytes" not in inner:
        fields = inner

    for key in _PART_KEYS:
        image = fields.get(key)
        if is_given(image):
            is_bare = key in ("base64", "data") and isinstance(image, str)
            if is_bare and not _BASE64.match(image):
                return f"data:;base64,{image}"
            return image
    raise BadSample(
        "bad_image_field",
        f"an image part without image: {keys_or_value(fields)}; "
        f"needed is one of {', '.join(_PART_KEYS)}",
    )


def _nothing(keys: Iterable[str], row: dict) -> str:
    return f"nothing under {' or '.join(keys)}; {keys_or_value(row)}"


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _image(value: object) -> RowImage:
    """Read an image: a name, bytes, or both, as datasets' Image has them; raises BadSample."""
    fields = {"bytes": value}
    if isinstance(value, dict):
        fields = value
    elif isinstance(value, str):
        fields = {"path": value}
    name = fields.get("path") or None
    content = fields.get("bytes") or None

    if isinstance(name, str) and (begin := _BASE64.match(name)):
        try:
            return RowImage(None, memoryview(binascii.a2b_base64(name[begin.end() :])))
        except ValueError as error:
            raise BadSample(
                "undecodable_image", f"{len(name):,} characters of base64: {error}"
            ) from None
    is_sound = isinstance(name, str | None) and isinstance(content, memoryview | None)
    if not is_sound or (name is None and content is None) or len(name or "") > _LONGEST_NAME:
        raise BadSample("bad_image_field", f"an image is {short(value)}")
    return RowImage(name and name.removeprefix("file://"), content)


@dataclass(frozen=True)
class Source:
    """A file of rows."""

    path: Path
    name: str  # in rejected.jsonl and dataset.json; after its folder's, where that was named
    adapter: Adapter
    records: int = 0

    @property
    def is_arrow(self) -> bool:
        return self.path.suffix.lower() in arrow_files.SUFFIXES

    def rows(self, first: int = 0) -> Iterator[object]:
        """Yield the rows from `first` on.

        Raises UserError, when it gets there, for a damaged file.
        """
        if self.is_arrow:
            return arrow_files.arrow_rows(self.path, self.adapter.columns, first)
        if self.path.suffix.lower() in text_files.SEPARATORS:
            rows = text_files.table_rows(self.path)
        else:
            rows = text_files.json_records(self.path)
        return islice(rows, first, None)

    def count(self) -> int:
        """Return the number of rows; raises UserError for a damaged file."""
        if self.is_arrow:
            return arrow_files.count_rows(self.path)
        return sum(1 for _ in self.rows())


def open_sources(path: Path, form: SampleFormat, image_key: str | None) -> tuple[list[Source], str]:
    """Return the files of rows that a path names, read in one way, and its description.

    A `form` named auto is chosen by the first rows. Raises UserError where nothing can be read, or
    no form fits.
    """
    files = _files(path)
    sources = [Source(file, name, Adapter(form, image_key)) for name, file in files]
    all_rows = chain.from_iterable(map(Source.rows, sources))
    rows = list(map(_without_contents, islice(all_rows, SEEN)))
    if not rows:
        raise UserError(f"{path}: has no records")
    if sources[0].is_arrow:
        keys = arrow_files.arrow_columns(sources[0].path)
    else:
        keys = list(dict.fromkeys(chain.from_iterable(objects_in(rows))))

    are_json = all(file.suffix.lower() in _JSON for _, file in files)
    adapters = []
    for name in candidates(rows) if form.name == AUTO else (form.name,):
        as_it_is = name == "llava" and image_key is None and are_json
        adapters.append(Adapter(replace(form, name=name), image_key, as_it_is))
    adapter, has_images = _fitting(path, rows, adapters, keys)
    counted = [replace(source, adapter=adapter, records=source.count()) for source in sources]

    description = adapter.description
    unread = adapter.unread(keys)
    if unread and not has_images:
        description += "; without images"
    if unread:
        description += f"; not read: {_named(unread)}"
    return counted, description


def place(sources: Sequence[Source], number: int) -> tuple[Source, int]:
    """Return the source of a record, by its number over all sources, and its number there."""
    for source in sources:
        if number < source.records:
            return source, number
        number -= source.records
    raise AssertionError(f"{number} records more than there are")


class ImageReader:
    """Reads the images that rows hold, once more: jobs get their candidates without them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.opened: Source | None = None
        self.rows: Iterator[object] = iter(())
        self.next_row = 0

    def __call__(self, candidates: Iterable[Candidate]) -> Iterator[Sequence[memoryview | None]]:
        """Yield for each candidate the bytes of its images that its row holds.

        The bytes of one that is a file are None.
        """
        if self.opened is not None and self.opened.is_arrow:
            self.opened = None  # its rows are found by their number; a text's only from its begin
        for candidate in candidates:
            if not candidate.holds_images:
                yield (None,) * len(candidate.images)
                continue
            source, row = place(self.sources, candidate.record)
            if source is not self.opened or row < self.next_row:
                self.opened = source
                self.rows = source.rows(row)
                self.next_row = row
            content = next(islice(self.rows, row - self.next_row, None), None)
            self.next_row = row + 1
            images = source.adapter.images(content) if isinstance(content, dict) else ()
            if len(images) != len(candidate.images):
                raise UserError(f"{source.path}: has changed while it was read. Start again")
            yield [image.content for image in images]


def _without_contents(value: object, levels: int = 4) -> object:
    """Keep one byte of each image, at most 4 levels deep: row, list, {"bytes", "path"}, bytes."""
    if isinstance(value, memoryview):
        return memoryview(bytes(value[:1]))
    if isinstance(value, dict) and levels:
        return {key: _without_contents(inner, levels - 1) for key, inner in value.items()}
    if isinstance(value, list) and levels:
        return [_without_contents(inner, levels - 1) for inner in value]
    return value


def _fitting(
    path: Path,
    rows: Sequence[object],
    adapters: Sequence[Adapter],
    keys: list[str],
) -> tuple[Adapter, bool]:
    """Return the first adapter that takes nearly all rows, and whether it finds images."""
    asked = {
        "--image-key": adapters[0].image_key,
        "data.caption_key": adapters[0].form.caption_key,
    }
    for option, key in asked.items():
        if key is not None and key not in keys:
            raise UserError(
                f"{path}: {option} {key}: there is no such key or column; it has {_named(keys)}"
            )
    adapters = [adapter.settled(rows) for adapter in adapters]
    trials = [_tried(adapter, rows) for adapter in adapters]
    choice = best([len(adapted) for adapted, _ in trials], len(rows))
    adapted, _ = trials[choice]

    if not adapted and len(adapters) > 1:
        seen = []
        for adapter, (_, faults) in zip(adapters, trials, strict=True):
            fault, _ = Counter(faults).most_common(1)[0]
            seen.append(f"as {adapter.form.name} {fault.partition('; its keys are ')[0]}")
        mend = "Name its picture by --image-key NAME and its caption by data.caption_key=NAME"
        if any("url" in key.lower() or _URL.match(key) for key in keys):
            mend = _DOWNLOAD
        if not {*CONVERSATION_KEYS, *IMAGE_COLUMNS, *CAPTION_COLUMNS} & {*keys}:
            raise UserError(f"{path}: none of its keys or columns is known: {_named(keys)}. {mend}")
        raise UserError(
            f"{path}: none of its first {len(rows):,} records is a sample: {'; '.join(seen)}. "
            f"It has {_named(keys)}. {mend}"
        )

    images = list(chain.from_iterable(one.images for one in adapted))
    files = [image.name for image in images if image.content is None]
    if files and _URL.match(files[0]):
        raise UserError(f"{path}: its images are URLs ({escape(files[0])}). {_DOWNLOAD}")
    return adapters[choice], bool(images)


def _tried(adapter: Adapter, rows: Sequence[object]) -> tuple[list[Adapted], list[str]]:
    adapted = []
    faults = []
    for row in rows:
        try:
            adapted.append(adapter.adapt(row))
        except BadSample as error:
            faults.append(str(error))
    return adapted, faults


def _named(keys: list[str]) -> str:
    return escape(first_few(keys, 20)) or "nothing"


def _files(path: Path) -> list[tuple[str, Path]]:
    if path.suffix.lower() == ".tar" or any(path.glob("*.tar")):
        raise UserError(f"{path}: already holds shards. Train on them with data.shards={path}")
    if not path.is_dir():
        if path.suffix.lower() not in _SUFFIXES:
            raise UserError(
                f"{path}: the name must end in one of {', '.join(_SUFFIXES)}, "
                "or be a folder of datasets' save_to_disk"
            )
        return [(path.name, path)]
    if (path / "state.json").is_file():
        names = _saved_files(path)
    else:
        names = sorted(file.name for file in path.glob("*.parquet"))
    if not names:
        below = [*path.glob("*/*.parquet"), *path.glob("*/state.json")]
        inner = sorted({str(file.parent) for file in below})
        seen = f". Name one of {', '.join(inner[:5])}" if inner else ""
        raise UserError(
            f"{path}: holds no *.parquet and no state.json of datasets' save_to_disk{seen}"
        )

    parts = filter(None, map(_SPLIT_FILE.fullmatch, names))
    splits = {part[1] or part[2] for part in parts}
    if len(splits) > 1:
        seen = ", ".join(sorted(splits))
        raise UserError(
            f"{path}: holds several splits ({seen}). "
            f"Name the files of one: --from {path}/SPLIT*.parquet"
        )
    return [(f"{path.name}/{name}", path / name) for name in names]


def _saved_files(folder: Path) -> list[str]:
    state = folder / "state.json"
    with contextlib.suppress(ValueError, LookupError, TypeError):
        content = parse_json(read_limited(state, MAX_JSON_BYTES, "the state of a saved data set"))
        names = [entry["filename"] for entry in content["_data_files"]]
        if all(Path(name).name == name and name.endswith(".arrow") for name in names):
            return names
    raise UserError(f"{state}: was not written by datasets' save_to_disk. Save the data set again")
