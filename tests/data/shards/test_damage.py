"""Any damage to a tar, its index or a record is an error of one line, or costs the damaged samples
alone.

hypothesis flips, overwrites, cuts and inserts bytes anywhere; it also makes up indexes whose
checksum is right.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import conversation, picture, write_tar
from catalogs import opened, reasons
from crafted_index import put_together, take_apart
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtrain.base.errors import UserError
from mmtrain.base.small_files import parse_json
from mmtrain.data.samples.formats import NAMES, SampleFormat
from mmtrain.data.samples.records import BadSample
from mmtrain.data.samples.sample import QuarantinedSample, Sample, read_sample
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.data.shards.index import ShardIndex, TextLengths, read_index, write_index
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.data.stream.catalog import Reader
from mmtrain.data.stream.order import Capacity, PackOrder
from mmtrain.inspection.survey import survey
from mmtrain.layouts.anyres import Anyres, AnyresMax9
from mmtrain.layouts.layout import ImageLayout
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles

pytestmark = pytest.mark.slow

TEXT = "f" * 16  # the fingerprint of the texts' lengths
LONG = "folder/" + "k" * 120  # its name needs a pax header
SIDE = 28  # pixels of a tile
LAYOUTS: list[ImageLayout] = [Square(4), Tiles(4, SIDE), Anyres(4, SIDE), AnyresMax9(4, SIDE)]
RECORD = conversation("<image>\nWhat is it?", "A red é.", "And <b>?", "Nothing.")


def examples(count: int) -> settings:
    """Settings that give the same examples on every machine."""
    fixture = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=fixture,
    )


@dataclass(frozen=True)
class Sound:
    """A shard in a folder of its own, before anything happens to it."""

    path: Path
    tar: bytes
    index: bytes
    parsed: ShardIndex
    samples: list[Sample]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Sound:
    files = []
    for number, key in enumerate(("a", "b", "c", "d/e", LONG)):
        images = number % 3
        files.append(
            (f"{key}.json", conversation("<image>" * images + "What?", f"Number {number}."))
        )
        files += [(f"{key}.{image}.png", picture(3 + number, 2 + image)) for image in range(images)]
    path = write_tar(tmp_path_factory.mktemp("sound") / "s.tar", files, tarfile.PAX_FORMAT)
    index = indexed(path)
    samples = list(read_all(path))
    assert [sample.key for sample in samples] == index.keys
    return Sound(path, path.read_bytes(), beside(path).read_bytes(), read_index(path), samples)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo:llm")


def beside(tar: Path) -> Path:
    return tar.with_name(tar.name + ".index")


def indexed(tar: Path) -> ShardIndex:
    index = scan_shard(tar, lambda sample: None)
    index.texts[TEXT] = TextLengths(
        [0 if place in index.faults["llava"] else 9 for place in range(len(index.keys))]
    )
    write_index(tar, index)
    return index


def read_all(tar: Path, layout: ImageLayout = LAYOUTS[0]) -> Iterator[Sample | QuarantinedSample]:
    reader = Reader(opened((tar,), layout, TEXT), retry_seconds=0)
    return map(reader.read, range(len(reader.catalog)))


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with a bit flipped, or a stretch overwritten, cut out, inserted, or missing at
    the end.
    """
    at = draw(st.integers(0, len(content) - 1))
    # headers, and in them names, sizes and checksums, are a small part of a tar
    if draw(st.booleans()):
        at = min(at // 512 * 512 + draw(st.integers(0, 160)), len(content) - 1)
    length = draw(st.one_of(st.integers(1, 9), st.integers(1, 1200)))
    kind = draw(st.sampled_from(("flip", "overwrite", "zero", "cut", "insert", "end")))
    if kind == "flip":
        return (
            content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
        )
    if kind == "end":
        return content[:at]
    new = {"cut": b"", "zero": bytes(length)}.get(kind)
    new = draw(st.binary(min_size=1, max_size=length)) if new is None else new
    end = {"cut": at + length, "insert": at}.get(kind, at + len(new))
    return (content[:at] + new + content[end:])[
        : len(content) if kind in ("zero", "overwrite") else None
    ]


def check_message(error: UserError, tar: Path) -> None:
    assert str(tar) in str(error) and "\n" not in str(error) and "\x1b" not in str(error)


@examples(150)
@given(data=st.data())
def test_damage_after_indexing_costs_the_samples_whose_bytes_differ_and_moves_no_other(sound, data):
    tar = data.draw(damaged(sound.tar))
    sound.path.write_bytes(tar)
    beside(sound.path).write_bytes(sound.index)
    try:
        samples = list(read_all(sound.path))
    except UserError as error:
        check_message(error, sound.path)
        assert len(tar) != len(sound.tar)
        return
    for before, after, members in zip(sound.samples, samples, sound.parsed.members, strict=True):
        if all(
            tar[m.offset : m.offset + m.size] == sound.tar[m.offset : m.offset + m.size]
            for m in members
        ):
            assert after == before
        else:
            assert (after.key, after.reason) == (before.key, "checksum")


@examples(200)
@given(data=st.data())
def test_damage_before_indexing_hides_no_member_and_makes_no_other_sample(sound, data):
    tar = data.draw(damaged(sound.tar))
    sound.path.write_bytes(tar)
    try:
        index = indexed(sound.path)
        samples = list(read_all(sound.path))
    except UserError as error:
        check_message(error, sound.path)
        return
    named = [
        (f"{key}.{one.suffix}", one)
        for key, of in zip(index.keys, index.members, strict=True)
        for one in of
    ]
    with tarfile.open(sound.path) as archive:
        members = [
            (each.name.lower(), each.offset_data, each.size) for each in archive if each.isreg()
        ]
    assert [(name.lower(), member.offset, member.size) for name, member in named] == members
    for place, sample in enumerate(samples):
        if place in index.faults["llava"]:
            assert (sample.key, sample.reason) == (
                index.keys[place],
                index.faults["llava"][place][0],
            )
        else:
            contents = {
                one.suffix: tar[one.offset : one.offset + one.size] for one in index.members[place]
            }
            assert sample == read_sample(
                index.keys[place], str(sound.path), contents, index.members[place][0].offset
            )


@examples(200)
@given(data=st.data())
def test_a_damaged_index_is_refused_or_says_the_same(sound, data):
    sound.path.write_bytes(sound.tar)
    beside(sound.path).write_bytes(data.draw(damaged(sound.index)))
    try:
        index = read_index(sound.path)
    except UserError as error:
        check_message(error, sound.path)
    else:
        assert index == sound.parsed


VALUES = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            0,
            1,
            2,
            2**31 - 1,
            2**31,
            2**62,
            2**63,
            10**400,
            0.5,
            "",
            "json",
            "1.png",
            "a\n",
        ]
    ),
    st.text(max_size=3),
    st.recursive(st.integers(-9, 9000), lambda inner: st.lists(inner, max_size=4), max_leaves=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """Every container inside a JSON value, with each of its keys or indices."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in places_of(value[key])]


NUMBERS = st.sampled_from((0, 1, 2, 3, 400, 2**31 - 1, 2**31, 2**62, 2**63 - 1))


def change_table(data: st.DataObject, tables: dict[str, np.ndarray]) -> None:
    """Another number in a table, or a row less, or twice."""
    table = data.draw(st.sampled_from(sorted(tables)))
    rows = tables[table]
    row = data.draw(st.integers(0, len(rows) - 1))
    action = data.draw(st.sampled_from(("number", "number", "number", "delete", "repeat")))
    if action == "delete":
        tables[table] = np.delete(rows, row)
    elif action == "repeat":
        tables[table] = np.insert(rows, row, rows[row])
    else:
        column = rows[data.draw(st.sampled_from(rows.dtype.names))] if rows.dtype.names else rows
        number = data.draw(NUMBERS) % 2 ** (8 * column.itemsize)
        column[row] = np.array(number, np.uint64).astype(column.dtype)


def change_json(data: st.DataObject, value: Any) -> None:
    places = places_of(value)
    container, key = places[data.draw(st.integers(0, len(places) - 1))]
    action = data.draw(st.sampled_from(("replace", "delete", "exchange", "repeat")))
    if action == "replace":
        container[key] = data.draw(VALUES)
    elif action == "delete":
        del container[key]
    elif action == "exchange":
        other, name = places[data.draw(st.integers(0, len(places) - 1))]
        container[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(container[key])
    elif isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))


@examples(300)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_an_index_that_somebody_made_up_is_refused_or_costs_samples(sound, tokenizer, data, layout):
    sound.path.write_bytes(sound.tar)
    parts = take_apart(sound.index)
    parts.faults = [["llava", 1, "not_json", "x"], ["llava", 3, "no_answer", "y"]]
    tables = {name: rows for name, rows in parts.tables.items() if name != "faults"}
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(("table", "table", "table", "faults", "header")))
        if kind == "table":
            change_table(data, tables)
        else:
            change_json(data, {"x": getattr(parts, kind)})
    parts.tables.update(tables)
    beside(sound.path).write_bytes(put_together(parts))
    write = make_template("chat", tokenizer, layout, sys.maxsize)
    try:
        samples = list(read_all(sound.path, layout))
        catalog = opened((sound.path,), layout, TEXT, capacity=Capacity(4096, 60))
        PackOrder(catalog.sample_sets, 0, catalog.capacity, 4, 64).packs(0, 1)
        survey([sound.path], TEXT, layout)
        faults = reasons(catalog)
        for number, sample in enumerate(samples):
            if isinstance(sample, Sample) and number not in faults:
                write(sample)
    except (UserError, BadSample) as error:
        assert "\n" not in str(error) and "\x1b" not in str(error)
    else:
        assert all(isinstance(sample, Sample | QuarantinedSample) for sample in samples)
        assert all(
            len(one.sizes) in (0, len(one.images)) for one in samples if isinstance(one, Sample)
        )


@examples(300)
@given(content=damaged(RECORD), form=st.sampled_from(NAMES))
def test_a_damaged_record_is_a_sample_of_texts_or_has_a_reason(content, form):
    for suffix in ("json", "txt"):
        try:
            sample = read_sample(
                "k", "s.tar", {suffix: content, "jpg": b""}, form=SampleFormat(form)
            )
        except BadSample as error:
            assert error.reason and "\n" not in str(error)
        else:
            assert all(
                isinstance(text, str) and text.strip() for who, text in sample.turns if who == "gpt"
            )


@examples(200)
@given(
    content=damaged(
        b'{"model_type": "llama", "layers": [1, 2.5e3, {"a": null}], "name": "\\u00e9"}'
    )
)
def test_a_damaged_json_file_is_a_value_or_a_value_error(content):
    with contextlib.suppress(ValueError):
        json.dumps(parse_json(content))
