"""text_files.py: JSON is read record by record, and what is neither an array nor lines is refused
with its place.
"""

import gzip
import json
import os
import re
import tracemalloc

import pytest

from mmtrain.base.errors import UserError
from mmtrain.data.prepare import text_files
from mmtrain.data.prepare.text_files import json_records, table_rows


def record(answer="A cat.", **fields) -> dict:
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": answer}]
    return {"id": "a1", "image": "a.png", "conversations": turns} | fields


MANY = [
    record(id=f"r{number}", answer="ü\u2028 \U0001f600" * (number % 50 + 1))
    for number in range(400)
]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(MANY),
        json.dumps(MANY, indent=2, ensure_ascii=False),
        "\ufeff \n" + json.dumps(MANY, ensure_ascii=False) + "\n\n",
        "\n".join(json.dumps(record, ensure_ascii=False) for record in MANY),
        "\r\n\r\n".join(json.dumps(record) for record in MANY) + "\r\n",
    ],
    ids=[
        "array",
        "indented array",
        "array after a byte order mark",
        "lines",
        "lines from Windows, some empty",
    ],
)
def test_json_arrays_and_json_lines_give_their_records_in_order(tmp_path, monkeypatch, text):
    monkeypatch.setattr(text_files, "_CHUNK", 100)  # windows end anywhere
    path = tmp_path / "data.json"
    path.write_bytes(text.encode())
    assert list(json_records(path)) == MANY


def test_an_array_gives_its_values_halves_of_pairs_nan_and_huge_numbers_included(tmp_path):
    """Whoever takes the records judges them; brackets in texts are no structure."""
    records = [
        r'{"a": "smile \ud83d end"}',
        '{"b": NaN}',
        '{"c": 36893488147419103232}',
        '{"d": "]}[{\\\\\\""}',
        '{"e": [[1]]}',
        *("123", "-4500000.0", '"a\\u00e9\\n"', "true", "null"),
    ]
    (tmp_path / "a.json").write_text(f"[{', '.join(records)}]")
    assert list(map(repr, json_records(tmp_path / "a.json"))) == [
        repr(json.loads(record)) for record in records
    ]
    (tmp_path / "none.json").write_text(" [ ] ")
    assert list(json_records(tmp_path / "none.json")) == []


@pytest.mark.parametrize("indent", [None, 1])
def test_records_inside_one_object_are_found(tmp_path, indent):
    """By id, in a list under any key, or as the object itself, in one line or in several."""
    path, one, two = tmp_path / "data.json", record(), record(id="a2")
    captioned = {"image": "a.png", "caption": "A.", "boxes": [{"x": 1}]}
    unnamed = {key: value for key, value in two.items() if key != "id"}
    for content, expected in (
        ({"data": [one, two]}, [one, two]),
        ({"version": "1.0", "info": {"year": 2024}, "data": [one]}, [one]),
        ({"a1": one, "a2": unnamed}, [one, two]),
        (one, [one]),
        (captioned, [captioned]),
        ({"question": "x", "answer": "y"}, [{"question": "x", "answer": "y"}]),
    ):
        path.write_text(json.dumps(content, indent=indent) + "\n\n")
        assert list(json_records(path)) == expected


def test_one_line_of_json_lines_is_a_record_with_lists_of_objects_in_it(tmp_path):
    path, content = (
        tmp_path / "metadata.jsonl",
        {"file_name": "a.png", "text": "A.", "objects": [{"bbox": [1]}]},
    )
    path.write_text(json.dumps(content))
    assert list(json_records(path)) == [content]


@pytest.mark.parametrize(
    ("name", "separator"),
    [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", ","), ("a.tsv", ";")],
)
def test_a_table_with_another_separator_is_refused_by_it(tmp_path, name, separator):
    (tmp_path / name).write_text(f"image{separator}caption\na.jpg{separator}A, b; c\n")
    seen = re.escape(f"{name}: its first line has {separator!r} between the columns")
    with pytest.raises(UserError, match=seen):
        list(table_rows(tmp_path / name))
    (tmp_path / name).write_text("caption\nA.\n")  # one column
    assert list(table_rows(tmp_path / name)) == [{"caption": "A."}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "coco.json"])
def test_a_record_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text_files, "MAX_COCO_BYTES", text_files.MAX_RECORD_BYTES)
    begin = {
        "a.json": b'[1, ["',
        "a.jsonl": b'{"a": "',
        "coco.json": b'{"annotations": [{"image_id": 1}, {"image_id": "',
    }[name]
    (tmp_path / name).write_bytes(begin + b"a" * (1 << 25))
    tracemalloc.start()
    with pytest.raises(
        UserError,
        match=r"A record may have at most 16,777,216 characters|line 1 is longer than 16,777,216",
    ):
        list(json_records(tmp_path / name))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80_000_000


def test_memory_is_that_of_a_window_and_not_of_the_file(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([record(answer="x" * 1000)] * 20_000))
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    assert sum(1 for _ in json_records(path)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"id,image\n1,a.jpg\n", "begins with 'i'. Give a JSON array"),
        (gzip.compress(b"[]", mtime=0), "is not UTF-8 text .*unpack it"),
        ('[{"id": "ü"}]'.encode("utf-16"), "is not UTF-8 text"),
        (b'{\n "images": []\n', "line 1 is not valid JSON"),
        (b'{"id": 1}\n\n{"id": 2', "line 3 is not valid JSON"),
        (b'[{"id": 1}, {"id": 2}', r"not valid JSON after 1 records \(.*\). Is the file complete"),
        (b'[{"id": 1}, {"id', r"not valid JSON after 1 records .*Is the file complete"),
        (b'[{"id": 1} {"id": 2}]', r"after 1 records \(no comma follows\)"),
        (b'[{"id": 1}]{"id": 2}', "text follows the array"),
        (b"[" * 100_000, "not valid JSON after 0 records .*recursion"),
        (b"[1, \xff]", "is not UTF-8 text"),
        (b"[1, " + b" " * 10_000 + b'"\xff"]', "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_neither_is_refused(tmp_path, content, message):
    path = tmp_path / "data.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.json: .*" + message):
        list(json_records(path))


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path):
    (tmp_path / "link.json").symlink_to("../blobs/gone")
    with pytest.raises(
        UserError, match=r"link\.json: is a link to \.\./blobs/gone, which is not there"
    ):
        list(json_records(tmp_path / "link.json"))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match=r"no such file\. Name a JSON, JSONL, CSV or TSV file"):
            list(json_records(path))


def test_a_coco_file_is_one_whatever_its_first_annotations_are(tmp_path):
    file = tmp_path / "coco.json"
    notes = [None, {"id": 1, "caption": "A."}, {"id": 2, "image_id": 7, "caption": "B."}]
    file.write_text(json.dumps({"images": [{"id": 7, "file_name": "b.jpg"}], "annotations": notes}))
    assert list(json_records(file)) == [
        None,
        {"id": 1, "image": None, "caption": "A."},
        {"id": 2, "image": "b.jpg", "caption": "B."},
    ]
