"""Rows of others' data as LLaVA's records: whose keys hold what, which form they have, what is written of them.

{"image_path": "a.jpg", "caption": "A cat."}                    row of a table, a JSON file, a parquet file, ...
{"images": [{"bytes": ..., "path": ...}], "messages": [...]}
    --Adapter--> {"id", "image", "conversations"}, judged, and the row's images: names of files, or bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.data.samples import formats
from mmtrain.data.samples.formats import SampleFormat, caption_turns, first_value, llava_turns, sharegpt_turns
from mmtrain.data.samples.records import IMAGE_SUFFIXES, BadSample, Record, keys_or_value, parse_record, short

IMAGE_COLUMNS = (*formats.IMAGE_KEYS, "filepath", "file_path", "file_name", "filename")
CAPTION_COLUMNS = (*formats.CAPTION_KEYS, "title")
_CONVERSATION = ("system", *formats.CONVERSATION_KEYS, *formats.UNREAD_KEYS)
_LONGEST_NAME = 4096  # characters; Linux opens no longer one


@dataclass(frozen=True)
class RowImage:
    """An image that a row names or holds."""

    name: str | None  # None where it has bytes alone
    content: memoryview | None = None  # None: it is a file of the images folder


@dataclass(frozen=True)
class Adapted:
    """What becomes of a row whose text is sound."""

    record: Record
    images: tuple[RowImage, ...]

    def named(self, key: str) -> Record:
        """Return the record with names for images that have none, made from the sample's key."""
        if all(image.name for image in self.images):
            return self.record
        several = len(self.images) > 1
        names = [image.name or (f"{key}.{number}" if several else key) for number, image in enumerate(self.images)]
        return replace(self.record, content={**self.record.content, "image": _one_or_all(names)}, images=tuple(names))


@dataclass(frozen=True)
class Adapter:
    """How the rows of a source are read."""

    form: SampleFormat
    image_key: str | None = None  # None: IMAGE_COLUMNS
    as_it_is: bool = False  # LLaVA's own files: each row is its record already, with whatever else it has

    @property
    def image_keys(self) -> tuple[str, ...]:
        """Keys where the images may be; the first that a row has counts."""
        return IMAGE_COLUMNS if self.image_key is None else (self.image_key,)

    @property
    def caption_keys(self) -> tuple[str, ...]:
        """Keys where the caption may be; the first that a row has counts."""
        return CAPTION_COLUMNS if self.form.caption_key is None else (self.form.caption_key,)

    @property
    def columns(self) -> frozenset[str]:
        """Every key that may count."""
        return frozenset({"id", *_CONVERSATION, *self.image_keys, *self.caption_keys})

    @property
    def description(self) -> str:
        """What the rows are, for messages."""
        if self.form.name != "caption":
            return {"llava": "LLaVA's conversations", "sharegpt": "ShareGPT's messages"}[self.form.name]
        return f"captions (image: {self.image_key or 'none'}, caption: {self.form.caption_key or 'none'})"

    def settled(self, rows: Sequence[object]) -> Adapter:
        """Return the adapter that reads captions, and their images, under one key: the first that any row uses.

        A row that is empty there would otherwise become a sample of another column: a title, a text in the image.
        """
        if self.form.name != "caption":
            return self
        fields = [row for row in rows if isinstance(row, dict)]
        image, caption = (
            next((key for key in keys if any(row.get(key) for row in fields)), None)
            for keys in (self.image_keys, self.caption_keys)
        )
        return replace(self, image_key=image, form=replace(self.form, caption_key=caption))

    def adapt(self, row: object) -> Adapted:
        """Turn a row into a record; raises BadSample."""
        try:
            return self._adapt(row)
        except RecursionError:  # arrays in arrays: a table may hold any depth
            raise BadSample("not_json", "its values are nested too deeply") from None

    def _adapt(self, row: object) -> Adapted:
        if self.form.name != "caption":
            formats.refuse_unread_media(row)
        if self.as_it_is:
            _refuse_unread_images(row)
            record = parse_record(row)
            return Adapted(record, tuple(map(RowImage, record.images)))
        if not isinstance(row, dict):
            raise BadSample("not_an_object", f"a row of other columns than its table, or no object: {short(row)}")
        images = self.images(row)
        identifier = row.get("id")
        if not isinstance(identifier, str | int | None):
            raise BadSample("bad_id", f"id is {short(identifier)}")
        turns = self._turns(row, len(images))
        content: dict[str, Any] = {} if identifier is None else {"id": identifier}
        if images:
            content["image"] = _one_or_all([image.name or "unnamed" for image in images])
        content["conversations"] = [{"from": speaker, "value": text} for speaker, text in turns]
        return Adapted(parse_record(content), images)

    def _turns(self, row: dict[str, Any], images: int) -> formats.Turns:
        if self.form.name == "caption":
            caption = first_value(row, self.caption_keys)
            if caption is None:
                raise BadSample("no_caption", _nothing(self.caption_keys, row))
            if not images:
                raise BadSample("image_count", f"a caption without an image: {_nothing(self.image_keys, row)}")
            return caption_turns(caption, images, self.form.caption_prompt)
        if first_value(row, formats.CONVERSATION_KEYS) is None:
            raise BadSample("no_conversation", _nothing(formats.CONVERSATION_KEYS, row))
        conversation = {key: _unpacked(row[key]) for key in row if key in _CONVERSATION}
        read = sharegpt_turns if self.form.name == "sharegpt" else llava_turns
        return read(conversation, images)

    def images(self, row: dict[str, Any]) -> tuple[RowImage, ...]:
        """Return the images of a row, in order; raises BadSample."""
        images = _unpacked(first_value(row, self.image_keys))
        if images is None:
            return tuple(map(_image, _images_in_parts(row))) if self.form.name == "sharegpt" else ()
        return tuple(map(_image, images if isinstance(images, list) else [images]))


def _refuse_unread_images(row: object) -> None:
    """Raise BadSample for a record that names images, but none under `image`: LLaVA's form would drop them."""
    if not isinstance(row, dict) or row.get("image") or not row.get("conversations"):
        return
    for key in IMAGE_COLUMNS:
        # Text alone may name the file that it comes from.
        if row.get(key) and ("image" in key or str(row[key]).lower().endswith(IMAGE_SUFFIXES)):
            seen = f"it names images under {key} and none under image, where LLaVA's are"
            raise BadSample("image_count", f"{seen}; --from with --format sharegpt reads them")


def _images_in_parts(row: dict[str, Any]) -> Iterator[object]:
    """Yield the images inside messages: {"type": "image", "image": "a.jpg"}."""
    messages = _unpacked(first_value(row, formats.CONVERSATION_KEYS))
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type") in formats.IMAGE_PARTS:
                image = first_value(part, ("image", "image_url", "path"))
                yield image.get("url") if isinstance(image, dict) and "url" in image else image


def _nothing(keys: Iterable[str], row: dict[str, Any]) -> str:
    return f"nothing under {' or '.join(keys)}; {keys_or_value(row)}"


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _image(value: object) -> RowImage:
    """Read an image: a name, bytes, or both, as datasets' Image has them; raises BadSample."""
    fields = value if isinstance(value, dict) else {"path": value} if isinstance(value, str) else {"bytes": value}
    name, content = fields.get("path") or None, fields.get("bytes") or None
    is_sound = isinstance(name, str | None) and isinstance(content, memoryview | None)
    if not is_sound or (name is None and content is None) or len(name or "") > _LONGEST_NAME:
        raise BadSample("bad_image_field", f"an image is {short(value)}")
    return RowImage(name and name.removeprefix("file://"), content)


def _unpacked(value: object) -> object:
    """Parse a list that a table holds as JSON text; return other values as they are."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
