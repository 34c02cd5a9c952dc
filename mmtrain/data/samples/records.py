"""Check LLaVA records and their images before they become samples.

any JSON value --parse_record--> Record: id, conversation, image names
image name, folder --read_image--> suffix and bytes of a file that Pillow decodes to its end
bytes of an image file --image_size--> how large it is, once it is turned

What fails raises BadSample with a reason code; what passes, `sample.read_sample` accepts.
"""

import contextlib
import io
import itertools
import json
import re
import struct
import sys
import unicodedata
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import ExifTags, Image, UnidentifiedImageError

from mmtrain.base.json_lines import without_nan
from mmtrain.base.printing import table_lines
from mmtrain.config.limits import MAX_IMAGE_PIXELS

IMAGE_MARK = "<image>"  # LLaVA's DEFAULT_IMAGE_TOKEN, in the text of a turn
ROLES = ("system", "human", "gpt")
# What Pillow decodes and is read, under any of these suffixes: data sets that renamed what they
# downloaded have GIFs under the name .jpg (OCR-VQA). Pillow knows more formats; EPS among them
# starts Ghostscript on the file's content.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
IMAGE_SUFFIXES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff")
_SUFFIX_OF = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp",
              "TIFF": "tif"}  # fmt: skip
# WebP's decoder takes 15 bytes a pixel where the others, with their RGB, take 8 (10,000 x 10,000)
WEBP_WEIGHT = 2
MAX_IMAGE_BYTES = 64 << 20
# Pixels. A thread of 1 x 65,000 is no large image, but the square that it is padded to is.
MAX_SIDE = 30_000
# Pillow's names of pixels with 32 bits, whose range nothing says, and of grey that is multiplied by
# its alpha.
_UNREAD_MODES = ("I", "F", "La")
# Of a JPEG: encoders write about 10. Each scan walks all blocks, which takes 14 bytes of a file and
# up to 30 ms.
MAX_SCANS = 100
# PNG chunks beside its pixels', JPEG segments: encoders write fewer than 50. A colour profile of 1
# kB takes 2 ms.
MAX_PARTS = 1000
MAX_RECORD_BYTES = 16 << 20
# Of a conversation, far above real ones (LLaVA's longest: fewer than 200 turns, 200 kB). Chat
# templates write it twice for each answer, so time grows with the square of turns: 500 short ones
# take 0.4 s, 4,000 take 24 s.
MAX_TURNS = 500
MAX_TEXT_BYTES = 1_000_000
CONTENT_KEYS = ("content", "value", "text")  # of a turn
UNREAD_KEYS = ("videos", "video", "audios", "audio", "tools", "functions")  # of a record
# Begin the keys of a turn with what chat templates write beside its text: reasoning_content,
# tool_calls, ...
_UNREAD_BEGINNINGS = (
    *("video", "audio", "reasoning", "thinking"),
    *("thought", "tool", "function", "refusal"),
)
# In a question, what another trainer or processor replaces by an image, a video or sound. HTML
# closes its <video>.
_PLACEHOLDER = re.compile(
    r"(?im)^[ \t]*(?:<image>[ \t]*)*<(video|audio)>"
    r"|<img>[^<>\n]{1,4096}</img>|<\|(?:vision|image|video|audio)\w*\|>|<(?:ImageHere|image_placeholder|IMG_CONTEXT)>"
)
_BYTES = re.compile(r"<memory at 0x[0-9a-f]+>")
_LONG_WORD = re.compile(r"[A-Za-z0-9+/]{80,}=*")
# of what has a length, and the end; in pixels there is none
_JPEG_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]")
_PNG_PIXELS = (b"IDAT", b"fcTL", b"fdAT")
# what may hold an orientation
_PNG_METADATA = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
TURNS = {  # by EXIF orientation, as PIL.ImageOps.exif_transpose
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow's decoders raise on damaged files, beyond the OSError that they document.
DECODE_ERRORS = (OSError, TypeError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)

Turns = Sequence[tuple[str, str]]  # (speaker of ROLES, text)

REASONS = {
    "not_an_object": "not a JSON object",
    "not_json": "text that is not Unicode: other JSON readers would fail",
    "bad_id": "an id that is neither text nor a whole number",
    "duplicate_id": "an id that an earlier record has",
    "no_conversation": "no list of turns, and no question with its answer",
    "unknown_role": "a turn that is not from human, gpt or (the first one only) system",
    "non_text_value": "a turn whose value is neither text nor one number",
    "no_caption": "no text that could be the caption (set data.caption_key to its key)",
    "no_answer": "no turn from gpt, or an empty one",
    "masked_answer": "an answer marked as not to be trained on: mmtrain supervises every answer",
    "turn_order": "turns that do not alternate human, gpt, human, gpt, ..., as all templates need",
    "too_long": "a conversation of more turns or text than allowed",
    "template": "a conversation that data.template cannot hold",
    "unread_media": "videos, sound or tools, which mmtrain does not read",
    "unread_part": "reasoning, tool calls, a second text or a placeholder, which "
    "mmtrain does not read",
    "bad_image_field": "an `image` that is neither a file name nor a list of them",
    "image_count": "a number of <image> marks that differs from the number of images",
    "outside_images": "an image path or link that leaves the images folder",
    "missing_image": "an image file that does not exist",
    "unreadable_image": "an image file that the system cannot read",
    "unsupported_image": f"an image file whose name does not end in {', '.join(IMAGE_SUFFIXES)}",
    "undecodable_image": "an image file that Pillow cannot decode to its end, or with pixels "
    "of no known range",
    "other_size": "an image whose size differs from its index",
    "too_many_pixels": "an image whose header declares more pixels, or a longer side, than allowed",
    "too_much_work": "an image with too many scans, chunks or segments to decode in "
    "reasonable time",
    "too_many_bytes": "a file larger than allowed",
    "unfit_shape": "an image too long and thin for the image layout (model.vision.layout)",
    "no_json": "a sample without KEY.json (a key ends at the first dot; "
    "a sample's files are neighbours in the tar)",
    "image_names": "images not named KEY.jpg alone, or KEY.0.jpg, KEY.1.jpg, ... without a gap",
    "duplicate_member": "a member that appears twice in a sample",
    "no_encoder": "a sample with images, where model.vision is null (data.images=strip "
    "trains on its text)",
    "checksum": "a member whose bytes differ from those indexed: the file is damaged",
}


def reason_lines(reasons: Counter[str]) -> list[str]:
    """Return a table of the number of bad samples by reason."""
    rows = ((f"  {count:,}", f"{code}: {REASONS[code]}") for code, count in reasons.most_common())
    return table_lines((">", ""), rows) if reasons else []


def listed_reasons(reasons: Counter[str], separator: str) -> str:
    """Return the number of bad samples by reason as one line."""
    listed = (f"{count:,} {code}: {REASONS[code]}" for code, count in reasons.most_common())
    return separator.join(listed)


class BadSample(Exception):  # noqa: N818
    """A record or sample that cannot be trained on: a code of REASONS and a detail."""

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


def parse_record(value: object) -> Record:
    """Check a record's text; raises BadSample. Image files are not opened."""
    if not isinstance(value, dict):
        raise BadSample("not_an_object", short(value))
    try:
        size = len(record_json(value))
    except (ValueError, RecursionError) as error:
        raise BadSample("not_json", str(error)) from None
    if size > MAX_RECORD_BYTES:
        raise BadSample(
            "too_many_bytes", f"{size:,} bytes of JSON; at most {MAX_RECORD_BYTES:,} are allowed"
        )
    identifier = value.get("id")
    if type(identifier) is int:
        identifier = str(identifier)
    if identifier == "" or not isinstance(identifier, str | None):
        raise BadSample("bad_id", f"id is {short(identifier)}")
    images = held(value.get("image"))
    if not all(isinstance(name, str) and name for name in images):
        raise BadSample("bad_image_field", f"image is {short(value['image'])}")
    refuse_wrong_image_count(parse_turns(value), len(images))
    return Record(value, identifier, tuple(images))


def record_json(record: dict) -> bytes:
    """Return KEY.json of a record, with NaN and infinities, which only unread keys hold, as text.

    Raises ValueError or RecursionError for what other JSON readers cannot read.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(without_nan(record), ensure_ascii=False)
    return text.encode()


def parse_turns(record: object) -> Turns:
    """Return the turns (speaker, text) of a conversation.

    They are perhaps one from system, then human, gpt, human, gpt, ...

    Raises BadSample for every other form, and for what `judged_turns` refuses.
    """
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not are_objects(turns):
        raise BadSample(
            "no_conversation",
            f"it needs a list `conversations` of {{from, value}}; {keys_or_value(record)}",
        )
    read = []
    for number, turn in enumerate(turns):
        speaker = turn.get("from")
        text = value_text(turn.get("value"))
        if speaker not in ROLES or (speaker == "system" and number > 0):
            raise BadSample("unknown_role", f"turn {number} is from {short(speaker)}")
        refuse_unread_parts(number, turn)
        if not isinstance(text, str):
            raise BadSample("non_text_value", f"turn {number} has the value {short(text)}")
        read.append((speaker, text))
    return judged_turns(read)


def value_text(value: object) -> object:
    """Return a number or a truth value as JSON writes it: 0, 0.5, true.

    NaN, infinity and other values stay.
    """
    if isinstance(value, int | float):
        with contextlib.suppress(ValueError):
            return json.dumps(value, allow_nan=False)
    return value


def are_objects(value: object) -> bool:
    """Tell whether a value is a list of objects, at least one."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, dict) for entry in value)


def objects_in(values: Iterable[object]) -> list[dict]:
    """Return the values that are objects."""
    return [value for value in values if isinstance(value, dict)]


def is_given(value: object) -> bool:
    """Tell whether a field holds a value: 0 and false are values, "" and [] are none."""
    return bool(value) or isinstance(value, int | float)


def held(field: object) -> list:
    """Return the list of what a field holds.

    Empty for "", [], [""], [null], {"bytes": b""} and "[]".
    """
    field = unpacked(field)
    entries = field if isinstance(field, list) else [field]
    for entry in entries:
        if isinstance(entry, dict):
            entry = any(entry.values())
        if entry:
            return entries
    return []


def unpacked(value: object) -> object:
    """Parse a list of texts or objects that a table holds as JSON text.

    Return others, as a box's [0.1, 0.9], as is.
    """
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(value)
            if all(isinstance(entry, str | dict | None) for entry in parsed):
                return parsed
    return value


def refuse_unread_parts(number: int, turn: dict, unread: Sequence[str] = ()) -> None:
    """Raise BadSample for a turn, or a part of one, that holds more than its text.

    That is reasoning, tool calls, or two texts.

    `unread` names more keys that must be empty. Numbers, as of reasoning tokens, are no text.
    """
    texts = [key for key in CONTENT_KEYS if is_given(turn.get(key))]
    more = [key for key in texts[1:] if turn[key] != turn[texts[0]]]
    for key, value in turn.items():
        is_unread = key.startswith((*unread, *_UNREAD_BEGINNINGS))
        if is_unread and isinstance(value, str | list | dict) and held(value):
            more.append(key)
    if more:
        raise BadSample("unread_part", f"turn {number} has {more[0]}: {short(turn[more[0]])}")


def judged_turns(turns: Turns) -> Turns:
    """Return turns that form a trainable conversation of limited length; raises BadSample."""
    if len(turns) > MAX_TURNS:
        raise BadSample("too_long", f"{len(turns):,} turns; at most {MAX_TURNS:,} are allowed")
    text_bytes = 0
    for number, (_, text) in enumerate(turns):
        try:
            text_bytes += len(text.encode())
        except UnicodeEncodeError as error:
            raise BadSample("not_json", f"turn {number}: {error}") from None
    if text_bytes > MAX_TEXT_BYTES:
        raise BadSample(
            "too_long", f"{text_bytes:,} bytes of text; at most {MAX_TEXT_BYTES:,} are allowed"
        )
    speakers = [speaker for speaker, _ in turns]
    if "gpt" not in speakers:
        raise BadSample("no_answer", f"{len(turns)} turns, none from gpt")
    for number, (speaker, text) in enumerate(turns):
        if speaker == "gpt" and not text.strip():
            raise BadSample("no_answer", f"turn {number}, from gpt, is empty")
        if speaker == "human":
            _refuse_placeholders(number, text)
    asked = speakers[speakers[0] == "system" :]
    if asked != ["human", "gpt"] * (len(asked) // 2):
        raise BadSample("turn_order", f"turns are from {short(', '.join(speakers))}")
    return tuple(turns)


def _refuse_placeholders(number: int, text: str) -> None:
    """Raise BadSample for a question with a placeholder of another program, which nothing here
    replaces.
    """
    found = {match[1]: match[0] for match in _PLACEHOLDER.finditer(text)}
    for tag, placeholder in found.items():
        if tag is None or f"</{tag}>" not in text:
            raise BadSample(
                "unread_part", f"turn {number} has the placeholder {short(placeholder)}"
            )


def refuse_wrong_image_count(turns: Turns, images: int) -> None:
    """Raise BadSample unless each image has one <image> mark."""
    marks = sum(text.count(IMAGE_MARK) for _, text in turns)
    if marks != images:
        raise BadSample(
            "image_count", f"{marks} {IMAGE_MARK} marks in the conversation, {images} images"
        )


def image_file(folder: Path, name: str) -> Path:
    """Return the file of an image's name.

    The name is tried as written, with slashes for back slashes, in NFC and in NFD.
    """
    slashes = name.replace("\\", "/")
    composed = unicodedata.normalize("NFC", slashes)
    decomposed = unicodedata.normalize("NFD", slashes)
    files = map(folder.joinpath, (name, slashes, composed, decomposed))
    return next(filter(Path.exists, files), folder / name)


def read_image(
    folder: Path | None,
    name: str,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> tuple[str, bytes]:
    """Return lower-case suffix and bytes of an image file in `folder`.

    The folder is an absolute path without links.

    The image is decoded to its end, after its size in bytes and pixels was checked. Raises
    BadSample.
    """
    if folder is None:
        raise BadSample("missing_image", f"{name}: no folder of images is set (--images)")
    suffix = Path(name).suffix.lower().removeprefix(".")
    if suffix not in IMAGE_SUFFIXES:
        raise BadSample(
            "unsupported_image", f"{name}: the name must end in {', '.join(IMAGE_SUFFIXES)}"
        )
    try:
        file = image_file(folder, name)
        path = file.resolve()
        if not path.is_relative_to(folder):
            raise BadSample(
                "outside_images",
                f"{name}: leads out of the images folder, to {path}; "
                "copy the files there, or name the folder that holds all of them by --images",
            )
        if not path.exists():
            seen = "no such file in the images folder"
            if file.is_symlink():
                seen = "a link to a file that is not there"
            raise BadSample("missing_image", f"{name}: {seen}")
        if not path.is_file():  # reading a named pipe would wait for ever
            raise BadSample("unreadable_image", f"{name}: is not a regular file")
        _refuse_large(name, path.stat().st_size)
        content = path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        # ValueError: a null byte; RuntimeError: links in a circle
        raise BadSample("unreadable_image", f"{name}: {error}") from None
    _decode(name, content, max_pixels)
    return suffix, content


def checked_image(
    name: str,
    content: memoryview,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> tuple[str, bytes]:
    """Return suffix, by its content, and bytes of an image that a row holds.

    Raises BadSample as `read_image` does.
    """
    _refuse_large(name, content.nbytes)
    image = bytes(content)
    return _SUFFIX_OF[_decode(name, image, max_pixels)], image


def _refuse_large(name: str, size: int) -> None:
    if size > MAX_IMAGE_BYTES:
        raise BadSample(
            "too_many_bytes", f"{name}: {size:,} bytes; at most {MAX_IMAGE_BYTES:,} are allowed"
        )


def _decode(name: str, content: bytes, max_pixels: int) -> str:
    """Decode an image to its end and return Pillow's name of its format; raises BadSample."""
    try:
        with open_image(content, max_pixels) as image:
            # JPEG at an eighth of its size: every bit is read. 190 kB take 1.6 ms instead of 2.5.
            image.draft(None, (1, 1))
            image.load()
            return image.format
    except BadSample as error:
        raise BadSample(error.reason, f"{name}: {error.detail}") from None
    except DECODE_ERRORS as error:
        raise BadSample("undecodable_image", f"{name}: {error}") from None


def open_image(content: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Open a Pillow image by its header.

    Raises BadSample for other files, too many pixels, and `refuse_unreadable`'s.

    WebP's pixels count WEBP_WEIGHT times: its limit is that much lower. A JPEG has MAX_SCANS, it
    and a PNG MAX_PARTS.
    """
    _refuse_much_work(content)
    try:
        # Pillow's warning about large images: `max_pixels` decides here
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=IMAGE_FORMATS)
    except UnidentifiedImageError:
        raise BadSample(
            "undecodable_image",
            f"{len(content):,} bytes in none of the formats {', '.join(IMAGE_FORMATS)}",
        ) from None
    except Image.DecompressionBombError as error:
        raise BadSample("too_many_pixels", str(error)) from None
    except DECODE_ERRORS as error:
        raise BadSample("undecodable_image", str(error)) from None

    pixels = "pixels"
    if image.format == "WEBP":
        pixels = "pixels of WebP"
        max_pixels //= WEBP_WEIGHT
    if image.width * image.height > max_pixels:
        raise BadSample(
            "too_many_pixels",
            f"{image.width} x {image.height} {pixels}; at most {max_pixels:,} are allowed",
        )
    refuse_unreadable(image)
    return image


def refuse_unreadable(image: Image.Image, scale: float = 1) -> None:
    """Raise BadSample for pixels of unknown range, and for a side over MAX_SIDE.

    The side counts once it is `scale` times as long.
    """
    if image.mode in _UNREAD_MODES:
        raise BadSample(
            "undecodable_image",
            f"its pixels (Pillow's mode {image.mode}) have no known range; "
            "save it with 8 or 16 bits a channel",
        )
    if max(image.size) * max(scale, 1) > MAX_SIDE:
        raise BadSample(
            "too_many_pixels",
            f"{image.width} x {image.height} pixels, too long and thin: "
            f"a side is over {MAX_SIDE:,}",
        )


def _refuse_much_work(content: bytes) -> None:
    """Raise BadSample for a JPEG or PNG of more parts than allowed.

    Pillow spends time on each before any pixel.
    """
    parts: Iterable[bytes] = ()
    if content.startswith(b"\xff\xd8"):
        parts = _jpeg_markers(content)
    elif content.startswith(b"\x89PNG"):
        parts = itertools.filterfalse(_PNG_PIXELS.__contains__, _png_chunks(content))
    counts = Counter(itertools.islice(parts, MAX_PARTS + 1))
    if counts[b"\xff\xda"] > MAX_SCANS:
        raise BadSample("too_much_work", f"a JPEG of more than {MAX_SCANS} scans")
    if counts.total() > MAX_PARTS:
        raise BadSample(
            "too_much_work", f"more than {MAX_PARTS:,} chunks or segments besides its pixels"
        )


def _jpeg_markers(content: bytes) -> Iterator[bytes]:
    """Yield the markers of a JPEG's segments, up to its end.

    Those of a thumbnail, inside a segment, are left out.
    """
    at = 0
    while (marker := _JPEG_MARKER.search(content, at)) and marker[0] != b"\xff\xd9":
        yield marker[0]
        at = marker.end() + int.from_bytes(content[marker.end() : marker.end() + 2])


def _png_chunks(content: bytes) -> Iterator[bytes]:
    """Yield the kind of each chunk of a PNG before IEND."""
    at = len(b"\x89PNG\r\n\x1a\n")
    while at + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, at)
        if kind == b"IEND":  # files may go on behind it
            break
        yield kind
        at += 8 + length + 4


def image_size(content: bytes) -> tuple[int, int]:
    """Return width and height of an image file, after turning by EXIF; raises BadSample.

    Only a PNG with metadata behind its pixels is decoded for it.
    """
    with open_image(content, sys.maxsize) as image:
        width, height = image.size
        if image.format == "TIFF":  # Pillow turns it itself
            return width, height
        if image.format == "PNG" and width * height <= MAX_IMAGE_PIXELS:
            pixels = content.find(b"IDAT")
            if any(content.find(name, pixels) >= 0 for name in _PNG_METADATA):
                with contextlib.suppress(*DECODE_ERRORS):  # the image is rejected when it is used
                    image.load()
        if orientation(image) >= 5:  # turned by 90 degrees
            return height, width
        return width, height


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 or a key of TURNS, in the metadata read so far.

    PIL.ImageOps.exif_transpose, and so transformers, turn by the same tags, EXIF's or else XMP's;
    blocks that these cannot read leave the picture as it is.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            # PNG's own would decode
            stated = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
        return int(stated) if stated in TURNS else 1
    except (*DECODE_ERRORS, LookupError, ArithmeticError):
        return 1


def keys_or_value(record: object) -> str:
    """Say what a record is, for messages: its keys, or the value that is no object."""
    if isinstance(record, dict):
        return f"its keys are {', '.join(map(str, record))[:200]}"
    return f"it is {short(record)}"


def short(value: object) -> str:
    """Show a value in a message, without the text of an image in base64."""
    try:
        text = _BYTES.sub("bytes", repr(value))
        return _LONG_WORD.sub(lambda word: f"({len(word[0]):,} characters)", text)[:120]
    except RecursionError:
        return "values nested too deeply"
