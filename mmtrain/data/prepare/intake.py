"""LLaVA's data files, read record by record, and what goes into which shard, decided before any image is read.

JSON array or JSON lines, of any size --read_llava_json--> any JSON values
--Intake: judged by their text, given keys--> candidates --N of them, or what fits into a size--> ShardJob

Everything here is a function of the JSON files (and, for shards of a size, of the image files' sizes): so any number of
workers, and a run that was interrupted, make the same shards.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE
from typing import TextIO

from mmtrain.base.errors import UserError
from mmtrain.data.prepare.sharding import Candidate, Rejection, ShardJob, sample_key, tar_bytes
from mmtrain.data.samples.records import Record, Rejected, parse_record, record_json

_CHUNK = 1 << 20  # characters
_SPACE = re.compile(r"[ \t\r\n]*")  # JSON's own whitespace; str.isspace would take more
_NUMBER_GOES_ON = re.compile(r"[-+.0-9eE]*")
_DECODER = json.JSONDecoder()


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
            f"{path}: not valid JSON after {number:,} records, at character {window.before + window.at:,} ({seen}); is "
            "the file complete?"
        ) from None


class _Window:
    """A moving part of a text file: `text[at:]` is what comes next."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.text = ""
        self.at = 0
        self.before = 0  # characters of the file that come before `text`

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


@dataclass(eq=False)
class Intake:
    """The jobs of all shards, in the files' order; `samples_per_shard` or `shard_bytes` says when one is full."""

    files: dict[Path, int]  # each with its number of records
    images: Path | None  # their folder; None: no record has any
    samples_per_shard: int | None  # candidates: records with sound text
    shard_bytes: int | None  # of the tar, by the files' sizes before --max-side; a larger sample is alone in its tar
    keep_duplicates: bool  # a repeated id gets a key of its own
    allowed_rejections: int  # for the text; reading ends early, after more
    keys: dict[str, int] = field(init=False, default_factory=dict)  # of candidates -> the record's number in all files
    repeats: Counter[str] = field(init=False, default_factory=Counter)  # of a key, so far
    text_rejections: int = field(init=False, default=0)

    def __iter__(self) -> Iterator[ShardJob]:
        number = first = record = 0
        candidates: list[Candidate] = []
        rejected: list[Rejection] = []
        filled = 0
        for file in self.files:
            for value in read_llava_json(file):
                candidate, size = None, 0
                try:
                    candidate = self._candidate(value, record)
                except Rejected as error:
                    rejected.append(Rejection(record, _identifier(value), error.reason, error.detail))
                    self.text_rejections += 1
                else:
                    size = self._size(candidate)
                    if candidates and filled + size > self._full:
                        yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))
                        number, first, filled, candidates, rejected = number + 1, record, 0, [], []
                    candidates.append(candidate)
                    filled += size
                record += 1
                if self.text_rejections > self.allowed_rejections:
                    yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))
                    return
        if record > first:
            yield ShardJob(number, first, record, tuple(candidates), tuple(rejected))

    @property
    def _full(self) -> int:
        if self.shard_bytes is None:
            return self.samples_per_shard
        return self.shard_bytes // RECORDSIZE * RECORDSIZE - 2 * BLOCKSIZE  # the archive's end

    def _size(self, candidate: Candidate) -> int:
        """What it adds to its shard, in the limit's unit."""
        if self.shard_bytes is None:
            return 1
        return tar_bytes([len(record_json(candidate.content)), *map(self._file_size, candidate.images)])

    def _file_size(self, name: str) -> int:
        if self.images is None:
            return 0
        try:
            return (self.images / name).stat().st_size
        except (OSError, ValueError):  # the job that reads it will say why
            return 0

    def _candidate(self, value: object, number: int) -> Candidate:
        record = parse_record(value)
        key = self._key(record, number)
        self.keys[key] = number
        return Candidate(number, _identifier(value), key, record.content, record.images)

    def _key(self, record: Record, number: int) -> str:
        key = sample_key(f"record-{number:08d}" if record.id is None else record.id)
        if key not in self.keys:
            return key
        if not self.keep_duplicates:
            file, first = self.place(self.keys[key])
            raise Rejected("duplicate_id", f"record {first} of {file.name} has it too")
        while True:
            self.repeats[key] += 1
            numbered = f"{key}-{self.repeats[key] + 1}"
            if numbered not in self.keys:  # else it is an id of its own
                return numbered

    def place(self, number: int) -> tuple[Path, int]:
        """A record's file and its number in it."""
        for file, records in self.files.items():
            if number < records:
                return file, number
            number -= records
        raise AssertionError(f"{number} records more than there are")


def _identifier(value: object) -> str | int | None:
    """A record's id as rejected.jsonl shows it."""
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str | int) else None
