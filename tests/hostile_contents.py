"""Texts and images that are none, in sound tars; see broken_shards."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from broken_shards import (
    BEFORE,
    Broken,
    Case,
    File,
    Kind,
    key,
    with_files,
)
from PIL import Image


def edited(case: Case, edit: Callable[[dict], bytes], reason: str | None, among: Callable[[str], Any] = bool) -> Broken:
    """A sample's json changed by hand; without a reason, into one that says the same."""
    victim = case.shard.pick(case.draw, "json", among)

    def change(files: list[File]) -> list[File]:
        return [(file, edit(json.loads(data)) if file.name == victim.name else data) for file, data in files]

    return Broken(case.shard.rewritten(change), unusable={key(victim): reason} if reason else {})


def turns(*said: Any) -> Callable[[dict], bytes]:
    """A record whose turns are these, from human and gpt by turns, or {"from", "value"}; <I> is what the human said."""

    def edit(record: dict) -> bytes:
        asked = record["conversations"][0]["value"]
        made = [
            turn
            if not isinstance(turn, str)
            else {"from": ("human", "gpt")[n % 2], "value": turn.replace("<I>", asked)}
            for n, turn in enumerate(said)
        ]
        return json.dumps({**record, "conversations": made}).encode()

    return edit


def answer(value: Any, speaker: Any = "gpt") -> Callable[[dict], bytes]:
    return turns("<I>", {"from": speaker, "value": value})


def text(edit: Callable[[bytes], bytes]) -> Callable[[dict], bytes]:
    return lambda record: edit(json.dumps(record).encode())


BAD_JSON: list[tuple[Callable[[dict], bytes], str]] = [
    *[(text(lambda _, made=made: made), "not_json") for made in (b"", b"\xff{}", b"\0" * 90, b"[" * 100_000)],
    (text(lambda whole: whole + whole), "not_json"),
    (text(lambda whole: whole.replace(b" a ", b" \\ud800 ")), "not_json"),
    (text(lambda whole: whole.replace(b'"id": ', b'"n": ' + b"1" * 5000 + b', "id": ')), "not_json"),
    *[(text(lambda whole, part=part: whole[: len(whole) * part // 4]), "not_json") for part in range(1, 4)],
    *[(text(lambda _, made=made: made), "no_conversation") for made in (b"null", b"[]", b'"text"', b"{}")],
    (lambda record: json.dumps({**record, "conversations": [[]]}).encode(), "no_conversation"),
    *[(answer("A cat.", speaker), "unknown_role") for speaker in ("user", None, ["gpt"])],
    *[(answer(value), "non_text_value") for value in (None, ["A cat."], {"text": "A cat."})],
    (answer(" \n\t"), "no_answer"),
    (turns("<I>", "A cat.", "Why?"), "turn_order"),
    (turns("<image>" * 100_000, "A cat."), "image_count"),
    (turns("<I>", "A cat.", "And?", "A dog."), "template"),
    (answer("A cat.</s>"), "template"),
]


SAME_JSON: list[Callable[[dict], bytes]] = [
    lambda record: json.dumps(record, indent=8).encode(),
    lambda record: b"\xef\xbb\xbf" + json.dumps(record).encode(),
    lambda record: json.dumps(record).encode("utf-16"),
    lambda record: json.dumps({"more": [[{}]] * 9, **dict(reversed(record.items())), "id": None}).encode(),
]


def moved_mark(case: Case) -> Broken:
    """<image> in the caption, where the plain template cannot put it."""
    return edited(case, turns("What?", "<image> A cat."), "template", lambda name: len(case.shard.files_of(name)) == 2)


def filled(case: Case, content: bytes, reason: str, at: str, when: str = "unusable") -> Broken:
    """A member with another content."""

    def change(files: list[File], place: int) -> None:
        files[place] = (files[place][0], content)

    return with_files(case, change, at=at, **{when: lambda name: {name: reason}})


def shortened_image(case: Case) -> Broken:
    """Its header is there, so the index is made; the pixels are not."""
    victim = case.shard.pick(case.draw, ("png", "jpg")[case.number % 2])
    content = case.shard.content(victim)
    # a JPEG's tables fill its first 623 bytes, a PNG's pixels begin at byte 41
    begin = 640 if case.number % 2 else 45

    def cut(files: list[File]) -> list[File]:
        length = begin + (len(content) - 40 - begin) * (case.number + 1) // 16
        return [(file, data[:length] if file.name == victim.name else data) for file, data in files]

    return Broken(case.shard.rewritten(cut), quarantined={key(victim): "undecodable_image"})


def chunk(name: bytes, content: bytes) -> bytes:
    body = name + content
    return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))


def encoded(form: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (24, 20), "red").save(stream, form)
    return stream.getvalue()


SIDE = 60_000  # pixels


def png(*extra: bytes, end: bytes = b"", side: int = 4) -> bytes:
    rows = zlib.compress(bytes((3 * 4 + 1) * 4))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = (chunk(b"IHDR", head), *extra, chunk(b"IDAT", rows), end, chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff(side: int) -> bytes:
    entries = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, side), (279, 64)]
    packed = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries)) + packed + bytes(4)


def claims(form: str) -> bytes:
    """An image of a few hundred bytes whose header claims SIDE x SIDE pixels."""
    if form == "PNG":
        return png(side=SIDE)
    if form == "TIFF":
        return tiff(SIDE)
    whole = encoded(form)
    at = {"GIF": 6, "BMP": 18, "JPEG": whole.find(b"\xff\xc0") + 5}.get(form, 0)
    if form == "WEBP":  # an extended header before the picture
        extended = b"VP8X" + struct.pack("<II", 10, 2) + struct.pack("<I", SIDE - 1)[:3] * 2
        frame = bytes(6) + struct.pack("<I", SIDE - 1)[:3] * 2 + bytes(4) + whole[12:]
        body = b"WEBP" + extended + b"ANIM" + struct.pack("<I", 6) + bytes(6)
        body += b"ANMF" + struct.pack("<I", len(frame)) + frame
        return b"RIFF" + struct.pack("<I", len(body)) + body
    sides = struct.pack({"GIF": "<HH", "BMP": "<ii", "JPEG": ">HH"}[form], SIDE, SIDE)
    return whole[:at] + sides + whole[at + len(sides) :]


def bombs() -> Iterator[tuple[str, Callable[[Case], Broken]]]:
    for form in ("PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG"):
        # WebP's own decoder, which asks for the memory first, may be refused it by the system
        reason = "too_many_pixels|undecodable_image" if form == "WEBP" else "too_many_pixels"
        yield f"{form} of 60,000 x 60,000", partial(filled, content=claims(form), reason=reason, at="(png|jpg)")
    huge = zlib.compress(bytes(64 << 20), 1)
    for name, content in ((b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")):
        packed = png(chunk(name, content + huge))
        spoilt = partial(filled, content=packed, reason="undecodable_image", at="(png|jpg)")
        yield f"PNG whose {name.decode()} unpacks to 64 MiB", spoilt
    behind = partial(filled, content=png(end=chunk(b"zTXt", b"a\0\0" + huge)), reason="undecodable_image")
    yield "PNG whose zTXt after the pixels unpacks to 64 MiB", partial(behind, at="(png|jpg)", when="quarantined")


NO_IMAGES = (b"", b"%!PS-Adobe-3.0\nshowpage\n", b"<svg/>", b"\xff\xd8\xff")


CONTENTS = [
    *[
        Kind(f"json {number}: {reason}", BEFORE, 1, partial(edited, edit=edit, reason=reason))
        for number, (edit, reason) in enumerate(BAD_JSON)
    ],
    Kind("image mark in the caption", BEFORE, 1, moved_mark),
    *[
        Kind(f"json written otherwise {number}", BEFORE, 1, partial(edited, edit=edit, reason=None))
        for number, edit in enumerate(SAME_JSON)
    ],
    Kind("zero-byte text", BEFORE, 2, partial(filled, content=b"", reason="not_json", at="json")),
    *[
        Kind(
            f"{content[:8]!r}", BEFORE, 1, partial(filled, content=content, reason="undecodable_image", at="(png|jpg)")
        )
        for content in NO_IMAGES
    ],
    *[Kind(name, BEFORE, 1, inject) for name, inject in bombs()],
    Kind("oversized text", BEFORE, 1, partial(filled, content=b" " * (17 << 20), reason="too_many_bytes", at="json")),
    Kind("oversized image", BEFORE, 1, partial(filled, content=bytes(65 << 20), reason="too_many_bytes", at="png")),
    Kind("shortened image", BEFORE, 12, shortened_image),
]
