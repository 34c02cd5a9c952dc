"""Indexes taken apart, changed and written again with the checksum that they then need."""

import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

# The format, as index.py's docstring says it.
TABLES = {
    "samples": [
        ("key_hash", "<u8"),
        ("keys", "<u4"),
        ("members", "<u4"),
        ("images", "<u4"),
    ],
    "members": [("suffix", "<u4"), ("offset", "<u8"), ("size", "<u8"), ("crc32", "<u4")],
    "images": [("width", "<i4"), ("height", "<i4")],
    "keys": "u1",
    "suffixes": "u1",
    "faults": "u1",
}


@dataclass
class Parts:
    header: dict[str, Any]
    tables: dict[str, np.ndarray]  # those of TABLES, then tokens by fingerprint
    faults: list[Any]  # rows of the table of faults


def take_apart(content: bytes) -> Parts:
    line, _, body = content.partition(b"\n")
    header = json.loads(line)
    rows = header["tables"] | dict.fromkeys(header["texts"], header["tables"]["samples"])
    tables = {}
    begin = 0
    for name, count in rows.items():
        table = np.frombuffer(body, np.dtype(TABLES.get(name, "<u4")), count, begin).copy()
        tables[name] = table
        begin += table.nbytes
    assert begin == len(body)
    faults = [json.loads(line) for line in tables["faults"].tobytes().splitlines()]
    return Parts(header, tables, faults)


def put_together(parts: Parts, **header: Any) -> bytes:
    """The file of these parts; `header` are values that its first line has all the same."""
    tables = dict(parts.tables)
    lines = b"".join(compact(row) + b"\n" for row in parts.faults)
    tables["faults"] = np.frombuffer(lines, np.uint8)
    counts = {name: len(tables[name]) for name in TABLES}
    fields = {**parts.header, "tables": counts, **header}
    fields.pop("crc32", None)
    body = b"".join(table.tobytes() for table in tables.values())
    fields["crc32"] = zlib.crc32(body, zlib.crc32(compact(fields)))
    return compact(fields) + b"\n" + body


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
