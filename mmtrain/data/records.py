"""LLaVA records: read from JSON one by one, and judged before they become samples.

JSON array or JSON lines --read_llava_json--> any JSON values --parse_record--> Record: id, conversation, image names
image name, folder --read_image--> suffix and bytes of a file that Pillow decodes to its end

What passes here, `samples.read_sample` accepts. What does not is `Rejected`, with a reason code: data sets of hundreds
of thousands of records always hold some bad ones, and one that was written would stop a training run days later.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from PIL import Image, UnidentifiedImageError

from mmtrain.errors import UserError

IMAGE_MARK = "<image>"  # LLaVA's DEFAULT_IMAGE_TOKEN, in the text of a turn
ROLES = ("human", "gpt")
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")  # that samples.read_sample takes for images
# GIF and BMP come under the name .jpg in data sets that renamed what they downloaded (OCR-VQA). Pillow knows more
# formats; EPS among them starts Ghostscript on the file's content.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# What Pillow's decoders raise on damaged files, beyond the OSError that they document.
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)

REASONS = {
    "not_an_object": "not a JSON object",
    "not_json": "text that is no Unicode, or NaN: other JSON readers would fail",
    "bad_id": "an id that is neither text nor a whole number",
    "duplicate_id": "an id that an earlier record has",
    "no_conversation": "no list of turns under `conversations`",
    "unknown_role": "a turn that is neither from human nor from gpt",
    "non_text_value": "a turn whose value is no text",
    "no_answer": "no turn from gpt, or an empty one",
    "turn_order": "turns that do not go human, gpt, human, gpt, ...: no template takes them",
    "image_in_answer": "an <image> mark in a turn from gpt: images belong to questions",
    "bad_image_field": "an `image` that is neither a file name nor a list of them",
    "image_count": "a number of <image> marks that differs from the number of images",
    "outside_images": "an image path or link that leaves the images folder",
    "missing_image": "an image file that does not exist",
    "unreadable_image": "an image file that the system cannot read",
    "unsupported_image": "an image file whose name does not end in jpg, jpeg, png or webp",
    "undecodable_image": "an image file that Pillow cannot decode to its end",
}

_CHUNK = 1 << 20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's own whitespace; str.isspace would take more
_NUMBER_GOES_ON = re.compile(r"[-+.0-9eE]*")
_DECODER = json.JSONDecoder()


class Rejected(Exception):  # noqa: N818
    """A record that cannot become a sample: a code of REASONS and what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Record:
    """A record whose text is sound; its images are still to be read."""

    content: dict  # as it stood in the file, JSON types
    id: str | None  # None where the record has none
    images: tuple[str, ...]  # file names, in the order of the <image> marks


def read_llava_json(path: Path) -> Iterator[object]:
    """Each element of a JSON array, or each line of a JSON-lines file; which of the two, its first character says.

    Elements are any JSON values. Memory is that of one record and a megabyte. Raises UserError, when it gets there, for
    what is neither, with the line (JSON lines) or the number of records before it and the character (array).
    """
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file; a LLaVA JSON or JSONL file is needed")
        with path.open(encoding="utf-8-sig") as stream:
            first = _Window(stream).peek()
            stream.seek(0)
            if first == "[":
                yield from _array_elements(stream, path)
            elif first == "{":
                yield from _lines(stream, path)
            else:
                seen = f"begins with {first!r}" if first else "is empty"
                raise UserError(f"{path}: {seen}; needed is a JSON array of records, or JSON lines: one record a line")
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
    window, number = _Window(stream), 0
    window.peek()
    window.at += 1  # the bracket
    separator = "]" if window.peek() == "]" else ","
    window.at += separator == "]"
    try:
        while separator == ",":
            yield window.value()
            number += 1
            separator = window.peek()
            if separator not in ("]", ","):
                raise ValueError("expecting , or ]" if separator else "the array does not end")
            window.at += 1
        if window.peek():
            raise ValueError("something follows the array's end")
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        seen = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UserError(
            f"{path}: not valid JSON after {number:,} records, at character {window.position:,} ({seen}); is the file "
            "complete?"
        ) from None


class _Window:
    """A moving part of a text file: `text[at:]` is what comes next."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.text = ""
        self.at = 0
        self.before = 0  # characters of the file that come before `text`

    @property
    def position(self) -> int:
        return self.before + self.at

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


def parse_record(value: object) -> Record:
    """Judge a record's text; raises Rejected. Image files are not looked at."""
    if not isinstance(value, dict):
        raise Rejected("not_an_object", _short(value))
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise Rejected("not_json", str(error)) from None
    identifier = value.get("id")
    if not (identifier is None or (isinstance(identifier, str) and identifier) or type(identifier) is int):
        raise Rejected("bad_id", f"id is {_short(identifier)}")
    images = _image_names(value.get("image"))
    marks = _count_marks(value)
    if marks != len(images):
        raise Rejected("image_count", f"{marks} {IMAGE_MARK} marks in the conversation, {len(images)} images")
    return Record(value, None if identifier is None else str(identifier), images)


def _count_marks(record: dict) -> int:
    """Check the turns; the number of <image> marks in them."""
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        keys = ", ".join(map(str, record))
        seen = _short(turns) if "conversations" in record else f"its keys are {keys[:200]}"
        raise Rejected("no_conversation", f"needed is a list `conversations` of {{from, value}}; {seen}")
    for number, turn in enumerate(turns):
        if turn.get("from") not in ROLES:
            raise Rejected("unknown_role", f"turn {number} is from {_short(turn.get('from'))}")
        if not isinstance(turn.get("value"), str):
            raise Rejected("non_text_value", f"turn {number} has the value {_short(turn.get('value'))}")
    answers = [(number, turn["value"]) for number, turn in enumerate(turns) if turn["from"] == "gpt"]
    if not answers:
        raise Rejected("no_answer", f"{len(turns)} turns, none from gpt")
    for number, text in answers:
        if not text.strip():
            raise Rejected("no_answer", f"turn {number}, from gpt, is empty")
        if IMAGE_MARK in text:
            raise Rejected("image_in_answer", f"turn {number}, from gpt, holds {IMAGE_MARK}")
    speakers = [turn["from"] for turn in turns]
    if speakers != list(ROLES) * (len(turns) // 2):
        raise Rejected("turn_order", f"turns are from {_short(', '.join(speakers))}")
    return sum(turn["value"].count(IMAGE_MARK) for turn in turns)


def _image_names(field: object) -> tuple[str, ...]:
    names = [] if field is None else field if isinstance(field, list) else [field]
    if not all(isinstance(name, str) and name for name in names):
        raise Rejected("bad_image_field", f"image is {_short(field)}")
    return tuple(names)


def read_image(folder: Path, name: str) -> tuple[str, bytes]:
    """The lower-case suffix and the unchanged bytes of an image file in `folder`, an absolute path without links.

    The image is decoded, in memory, to see that it can be. Raises Rejected.
    """
    suffix = Path(name).suffix.lower().removeprefix(".")
    if suffix not in IMAGE_SUFFIXES:
        raise Rejected("unsupported_image", f"{name}: the name must end in {', '.join(IMAGE_SUFFIXES)}")
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise Rejected("outside_images", f"{name}: leads to {path}")
        if not path.exists():
            raise Rejected("missing_image", f"{name}: no such file in the images folder")
        if not path.is_file():  # reading a named pipe would wait for ever
            raise Rejected("unreadable_image", f"{name}: is no regular file")
        content = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte; RuntimeError: links in a circle
        raise Rejected("unreadable_image", f"{name}: {error}") from None
    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            image.load()
    except DECODE_ERRORS as error:
        if isinstance(error, UnidentifiedImageError):
            error = f"{len(content):,} bytes that are none of {', '.join(IMAGE_FORMATS)}"
        raise Rejected("undecodable_image", f"{name}: {error}") from None
    return suffix, content


def _short(value: object) -> str:
    return repr(value)[:120]
