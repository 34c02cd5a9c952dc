"""Tars for tests, written by Python's tarfile."""

import io
import json
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from PIL import Image


def write_tar(
    path: Path, files: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT
) -> Path:
    """A tar of these names and contents, in this order."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def picture(width: int, height: int, file_format: str = "PNG") -> bytes:
    """An encoded image of one colour."""
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (90, 40, 200)).save(stream, file_format)
    return stream.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return (
        len(content).to_bytes(4, "big")
        + kind
        + content
        + zlib.crc32(kind + content).to_bytes(4, "big")
    )


def conversation(question: str, answer: str, *more: str) -> bytes:
    """KEY.json of a sample: turns from human and gpt in alternation."""
    turns = [
        {"from": ("human", "gpt")[number % 2], "value": text}
        for number, text in enumerate((question, answer, *more))
    ]
    return json.dumps({"conversations": turns}).encode()
