"""sources.py: whose files hold what is seen from their first rows, and what is none of them is
refused in one line.
"""

import functools
import json
import math
import pickle
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from archives import png_chunk
from pyarrow import parquet

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.data.prepare.sources import Adapter, Source, open_sources
from mmtrain.data.samples import records
from mmtrain.data.samples.formats import SampleFormat
from mmtrain.data.samples.records import BadSample, parse_turns
from mmtrain.data.samples.sample import read_sample

AUTO = SampleFormat("auto", caption_prompt="What?")
ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
TOLD = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]
GIF = b"GIF89a" + bytes(60)
CAPTIONED = "captions (image: image, caption: text)"


def opened(path: Path, content: bytes | str | list, form=AUTO, image_key=None):
    if isinstance(content, list):
        parquet.write_table(pyarrow.Table.from_pylist(content), path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_sources(path, form, image_key)


def lines(*rows: object) -> str:
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json", lines({"conversations": TOLD}), "LLaVA's conversations"),
        (
            "a.jsonl",
            lines(*[{"conversations": TOLD}] * 99, {"messages": ASKED}),
            "LLaVA's conversations",
        ),
        (
            "a.jsonl",
            lines(*[{"conversations": TOLD}] * 50, *[{"messages": ASKED}] * 50),
            "ShareGPT's messages",
        ),
        ("a.csv", "filepath,title\na.jpg,A.", "captions (image: filepath, caption: title)"),
        ("a.CSV", "image,caption\r\na.jpg,A.\r\n\r\n", "captions (image: image, caption: caption)"),
        (
            "a.tsv",
            "caption\timage_path\nA.\ta.jpg",
            "captions (image: image_path, caption: caption)",
        ),
        (
            "a.csv",
            f'messages\n"{json.dumps(ASKED).replace(chr(34), chr(34) * 2)}"',
            "ShareGPT's messages",
        ),
        ("a.parquet", [{"image": GIF, "text": "A."}], "captions (image: image, caption: text)"),
        (
            "a.parquet",
            [{"images": ["a.jpg"], "messages": ASKED, "x": 1.5}],
            "ShareGPT's messages; not read: x",
        ),
        ("a.json", lines({"images": ["a.jpg"], "conversations": TOLD}), "ShareGPT's messages"),
        ("a.jsonl", lines({"image_path": "a.jpg", "conversations": TOLD}), "ShareGPT's messages"),
        (
            "a.jsonl",
            lines({"image": "a.jpg", "text": ""}, {"image": "b.jpg", "text": "b"}),
            CAPTIONED,
        ),
    ],
)
def test_the_first_rows_say_what_a_file_is(tmp_path, name, content, found):
    sources, said = opened(tmp_path / name, content)
    assert said == found
    assert sum(source.records for source in sources) == sum(
        1 for source in sources for _ in source.rows()
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "image,caption", "has no records"),
        ("a.csv", "", "its first line names nothing. It must name the columns"),
        (
            "a.csv",
            "image,image,caption\na,b,c",
            "its first line names image, image, caption. It must name",
        ),
        (
            "a.csv",
            "picture\na.jpg",
            r"is known: picture\. Name its picture by --image-key NAME and",
        ),
        (
            "a.csv",
            'image,caption\na.jpg,"A" b\n',
            r"line 2 is not a row of a table .* double the quotes in them",
        ),
        ("a.csv", "image,caption\na.jpg,A\0\n", "line 2 has a null character"),
        ("a.csv", "image,caption\na.jpg,ü\n".encode("latin-1"), "is not UTF-8 text"),
        ("a.csv", "image,caption\n" + "a" * (17 << 20), "line 2 is longer than"),
        (
            "a.tsv",
            "a very typical bus station\thttp://lh6.ggpht.com/a.jpg\nb\thttp://c",
            "img2dataset",
        ),
        ("a.csv", "caption,image\nA.,HTTPS://c/a.jpg", r"its images are URLs \(HTTPS://c/a.jpg\)"),
        (
            "a.json",
            lines({"images": [], "dataset": "x"}),
            "as llava no_conversation: .*; as caption no_caption: ",
        ),
        ("a.tar", "", "already holds shards. Train on them with data.shards="),
        (
            "a.json",
            '{"annotations": [{"image_id": 1, "caption": "x"}], "images": [',
            "line 1 is not valid JSON",
        ),
        (
            "a.json",
            lines({"annotations": [{"image_id": 1, "bbox": []}], "images": []}),
            "no_caption: nothing under",
        ),
        ("a.parquet", b"PAR1" + bytes(50) + b"PAR1", "cannot be read .*Is the file complete"),
        ("a.arrow", pickle.dumps(print), "cannot be read"),
        ("a.arrow", b"ARROW1\0\0" + bytes(40), "cannot be read"),
        ("a.parquet", [{"image": 5, "caption": "x"}], r"bad_image_field: an image is 5"),
        ("a.parquet", [{"image": GIF, "text": b"A."}], "non_text_value: the caption is bytes"),
        ("a.parquet", [{"image": GIF, "query": "x"}], "no_conversation: .* It has image, query"),
        (
            "a.tsv",
            'image\tcaption\na.jpg\tA.\nb.jpg\t"B\nc.jpg\tC"\nd.jpg\tD.\n',
            "line 3 has a field with a tab and a line break",
        ),
        (
            "a.tsv",
            'image\tcaption\na.jpg\tA.\t"more\nb.jpg\tB.\nc.jpg\tC."\nd.jpg\tD.\n',
            "line 2 has a field with a tab and a line break",
        ),
    ],
)
def test_what_is_no_data_is_refused_with_what_was_seen_and_the_remedy(
    tmp_path, name, content, message
):
    with pytest.raises(UserError, match=rf"/{name}: [^\n]*{message}") as error:
        opened(tmp_path / name, content)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1500


def test_keys_that_are_named_are_taken_and_must_be_there(tmp_path):
    content = "foto,bild,caption,satz\na.jpg,b.jpg,A.,B.\n"
    (source,), said = opened(
        tmp_path / "a.csv", content, SampleFormat("auto", "satz", "Was?"), "bild"
    )
    (row,) = source.rows()
    adapted = source.adapter.adapt(row)
    assert adapted.record.images == ("b.jpg",)
    assert said == "captions (image: bild, caption: satz); not read: foto, caption"
    assert [turn["value"] for turn in adapted.record.content["conversations"]] == [
        "<image>\nWas?",
        "B.",
    ]
    for form, key, named in (
        (SampleFormat("auto", "satzz", "Was?"), None, "data.caption_key"),
        (AUTO, "bilt", "--image-key"),
    ):
        with pytest.raises(
            UserError,
            match=f"{named} .*there is no such key or column; it has foto, bild, caption, satz",
        ):
            opened(tmp_path / "a.csv", content, form, key)


def test_folders_say_which_of_their_files_are_meant(tmp_path):
    import datasets

    folder = tmp_path / "d"
    data = datasets.Dataset.from_list([{"image": "a.jpg", "caption": "A."}] * 3)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(folder)
    with pytest.raises(
        UserError, match=r"/d: holds no \*.parquet .* Name one of \S+/d/test, \S+/d/train$"
    ):
        open_sources(folder, AUTO, None)
    sources, _ = open_sources(folder / "train", AUTO, None)
    assert [source.name for source in sources] == ["train/data-00000-of-00001.arrow"]
    state = folder / "train" / "state.json"
    for content in (
        "{}",
        "[]",
        '{"_data_files": [{"filename": "../x.arrow"}]}',
        '{"_data_files": 3}',
        "[",
    ):
        state.write_text(content)
        with pytest.raises(
            UserError, match=r"state.json: was not written by datasets' save_to_disk"
        ):
            open_sources(folder / "train", AUTO, None)


@pytest.mark.parametrize("names", [("test", "train"), ("Train-00000-of-00001", "validation")])
def test_a_folder_of_several_splits_is_refused_with_the_command_for_one(tmp_path, names):
    folder = tmp_path / "d"
    folder.mkdir()
    for name in names:
        parquet.write_table(
            pyarrow.table({"image": ["a.jpg"], "caption": ["A."]}), folder / f"{name}.parquet"
        )
    seen = ", ".join(name.partition("-")[0] for name in names)
    with pytest.raises(
        UserError, match=rf"/d: holds several splits \({seen}\)\. .*: --from \S+/d/SPLIT\*\.parquet"
    ):
        open_sources(folder, AUTO, None)
    (folder / f"{names[1]}.parquet").rename(folder / "more.parquet")
    assert len(open_sources(folder, AUTO, None)[0]) == 2


def test_the_caption_is_of_one_column_whatever_rows_lack(tmp_path):
    rows = [
        {"image": "a.jpg", "caption": "" if number % 50 else "A.", "text": "B.", "images": None}
        for number in range(200)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (source,), said = open_sources(tmp_path / "a.parquet", AUTO, None)
    assert said == "captions (image: image, caption: caption); not read: text, images"
    outcomes = Counter(map(functools.partial(outcome, source), source.rows()))
    assert outcomes == {"A.": 4, "no_caption": 196}


def part_of(kind: str | None = "image", **image: object) -> dict:
    parts = [{"type": kind, **image}] if kind else [image]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "Hi"}]}


def outcome(source: Source, row: object) -> str:
    """The answer that a row becomes, read from its shard, or why it is none."""
    try:
        return parse_turns(source.adapter.adapt(row).record.content)[-1][1]
    except BadSample as error:
        return error.reason


SAYS = {"role": "assistant", "content": "Yes."}
SAID = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
REF = {"ref": ["cat"], "bbox": [[1, 2]]}
NOBODY = {"bytes": b"", "path": None}


@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        ("qa", {"question": "x", "answer": 0}, "0"),
        ("qa", {"question": "x", "answer": 0.0}, "0.0"),
        ("qa", {"question": "x", "answer": False}, "false"),
        ("qa", {"question": "x", "answer": True}, "true"),
        ("qa", {"question": "x", "answers": [0, 0, 1]}, "0"),
        ("qa", {"question": "x", "answer": [1, 2, 3, 4]}, "non_text_value"),
        ("qa", {"prompt": "x", "completion": 0}, "0"),
        ("qa", {"texts": [{"user": "x", "assistant": 0}]}, "0"),
        ("sharegpt", {"messages": [ASKED[0], {"role": "assistant", "value": 0}]}, "0"),
        ("interleaved", {"texts": [0, 1], "images": [None, None]}, "0\n\n1"),
        ("caption", {"image": "a.jpg", "caption": 0}, "0"),
        ("caption", {"image": "a.jpg", "caption": False}, "false"),
        ("sharegpt", {"messages": ASKED, "images": ""}, "Yes."),
        ("sharegpt", {"messages": ASKED, "images": [""]}, "Yes."),
        ("sharegpt", {"messages": ASKED, "images": [None], "videos": [""], "tools": "[]"}, "Yes."),
        ("sharegpt", {"messages": ASKED, "images": ["a.jpg", ""]}, "bad_image_field image_count"),
        ("qa", {"question": "x", "answer": "y", "image": NOBODY}, "y"),
        ("qa", {"question": "x", "answer": "y", "images": [NOBODY]}, "y"),
        ("qa", {"instruction": "x", "input": "", "output": "Yes."}, "Yes."),
        ("qa", {"instruction": "x", "input": [{"a": 1}], "output": "y"}, "non_text_value"),
        ("qa", {"query": "x", "response": "Yes.", "history": [["a", "b"], ["c", "d"]]}, "Yes."),
        ("qa", {"query": "x", "response": "y", "history": [["a"]]}, "unread_part"),
        ("qa", {"query": "x", "response": "y", "history": ["a"]}, "unread_part"),
        ("llava", {"conversations": TOLD, "score": math.nan}, "Yes."),
        ("llava", {"conversations": TOLD, "score": [math.inf, -math.inf]}, "Yes."),
        ("qa", {"question": "x", "answer": math.nan}, "non_text_value"),
        ("sharegpt", {"messages": [part_of(url="a.jpg"), SAID]}, "Yes."),
        ("sharegpt", {"messages": [part_of(path="a.jpg"), SAID]}, "Yes."),
        ("llava", {"conversations": TOLD, "image": ""}, "Yes."),
        ("llava", {"conversations": TOLD, "image": [None]}, "Yes."),
        ("sharegpt", {"messages": [ASKED[0], {**SAYS, "reasoning_content": "Hm."}]}, "unread_part"),
        ("sharegpt", {"messages": [ASKED[0], {**SAYS, "tool_calls": [{"type": "function"}]}]}, "unread_part"),
        ("sharegpt", {"messages": [ASKED[0], {**SAYS, "thinking": None, "tool_calls": []}]}, "Yes."),
        ("sharegpt", {"messages": [ASKED[0], {**SAYS, "text": "No."}]}, "unread_part"),
        ("sharegpt", {"messages": [{**ASKED[0], "images": ["b.jpg"]}, SAYS]}, "image_count"),
        ("sharegpt", {"messages": ASKED, "tools": '[{"name": "zoom"}]'}, "unread_media"),
        ("llava", {"conversations": [TOLD[0], {**TOLD[1], "thinking": "Hm."}]}, "unread_part"),
        ("llava", {"conversations": TOLD, "system": "Be kind."}, "unread_part"),
        ("qa", {"question": "Where?", "answer": "<bbox>", "objects": REF}, "unread_part"),
        ("sharegpt", {"messages": [ASKED[0], {**SAYS, "content": "<bbox>"}], "objects": REF}, "unread_part"),
        ("llava", {"conversations": [TOLD[0], {"from": "gpt", "value": "<bbox>"}], "objects": REF}, "unread_part"),
        ("llava", {"conversations": [{"from": "human", "value": "<video>\nWhat?"}, TOLD[1]]}, "unread_part"),
    ],
)  # fmt: skip
def test_a_row_is_judged_alike_in_json_in_parquet_and_in_a_tar(tmp_path, form, row, expected):
    named = replace(AUTO, name=form)
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    text = json.dumps(row, default=lambda image: None)  # JSON has no bytes
    (tmp_path / "a.jsonl").write_text(text)
    found = []
    for name in ("a.parquet", "a.jsonl"):
        adapter = Adapter(named, as_it_is=form == "llava" and name == "a.jsonl").settled([row])
        source = Source(tmp_path / name, name, adapter)
        found.append(outcome(source, next(source.rows())))
    images = {"jpg": b""} if "a.jpg" in str(row) else {}
    try:
        found.append(
            read_sample("k", "s.tar", {**images, "json": text.encode()}, 0, named).turns[-1][1]
        )
    except BadSample as error:
        found.append(error.reason)
    assert set(found) <= {expected, *expected.split()}, found


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (part_of(image="a.jpg"), "a.jpg"),
        (part_of(image={"path": "a.jpg"}), "a.jpg"),
        (part_of(url="file://a.jpg"), "a.jpg"),
        (part_of(path="a.jpg"), "a.jpg"),
        (part_of("image_url", image_url="a.jpg"), "a.jpg"),
        (part_of("image_url", image_url={"url": "a.jpg"}), "a.jpg"),
        (part_of(None, image="a.jpg"), "a.jpg"),
        (part_of(source={"type": "url", "url": "a.jpg"}), "a.jpg"),
        (part_of(base64="R0lGODlh"), b"GIF89a"),
        (part_of(base64="data:image/gif;base64,R0lGODlh"), b"GIF89a"),
        (part_of("input_image", image_url="data:image/gif;base64,R0lGODlh"), b"GIF89a"),
        (
            part_of(source={"type": "base64", "media_type": "image/gif", "data": "R0lGODlh"}),
            b"GIF89a",
        ),
        (part_of(), "its keys are type; needed is one of image, image_url, path, url, base64"),
        (
            part_of(source={"type": "file", "file_id": "f"}),
            "its keys are type, file_id; needed is one of",
        ),
        (part_of(image={"url": ["a"]}), r"an image is \['a'\]"),
        (part_of(base64="R"), "characters of base64"),
    ],
)
def test_an_image_is_found_in_a_part_however_it_is_written(part, expected):
    adapter = Adapter(replace(AUTO, name="sharegpt"))
    row = {"messages": [part, {"role": "assistant", "content": "Yes."}]}
    if isinstance(expected, str) and expected != "a.jpg":
        with pytest.raises(BadSample, match=expected):
            adapter.adapt(row)
        return
    (image,) = adapter.adapt(row).images
    assert expected in (image.name, image.content)


@pytest.mark.parametrize("history", [None, [["Who?", "Me."], ["Why?", "So."]]])
@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ({"instruction": "What?", "input": "<image>", "output": "A."}, "What?\n<image>"),
        ({"instruction": "What? <image>", "input": "", "output": "A."}, "What? <image>"),
        ({"instruction": "", "input": "What?", "output": "A."}, "<image>\nWhat?"),
        ({"query": "What?", "response": "A."}, "<image>\nWhat?"),
    ],
)
def test_alpacas_rows_and_queries_with_responses_are_read(tmp_path, names, asked, history):
    row = {**names, "images": ["a.jpg"], "system": "Be brief.", "history": history}
    (source,), said = opened(tmp_path / "a.json", json.dumps([row]))
    assert said == "questions with their answers"
    (row,) = source.rows()
    turns = [("system", "Be brief.")]
    for question, answer in [
        *(history or ()),
        (asked.removeprefix("<image>\n") if history else asked, "A."),
    ]:
        turns += [("human", question), ("gpt", answer)]
    if history and "<image>" not in turns[-2][1]:
        turns[1] = ("human", f"<image>\n{turns[1][1]}")
    assert parse_turns(source.adapter.adapt(row).record.content) == tuple(turns)


def test_a_number_of_32_bits_is_the_text_that_was_meant(tmp_path):
    table = pyarrow.table(
        {"question": ["x"] * 2, "answer": pyarrow.array([0.1, 3], pyarrow.float32())}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    (source,), _ = open_sources(tmp_path / "a.parquet", AUTO, None)
    assert [outcome(source, row) for row in source.rows()] == ["0.1", "3.0"]


@pytest.mark.parametrize(
    "more", [{"images": ["0.jpg"]}, {"file_name": "0.jpg"}, {"video": "0.mp4"}]
)
@pytest.mark.parametrize("form", ["auto", "llava"])
def test_images_that_the_first_rows_lack_are_not_lost_later(tmp_path, more, form):
    content = lines(*[{"conversations": TOLD}] * 150, {"conversations": TOLD} | more)
    (source,), description = opened(tmp_path / "a.jsonl", content, replace(AUTO, name=form))
    assert description == "LLaVA's conversations"
    (*_, last) = source.rows()
    with pytest.raises(BadSample, match=r"image_count|unread_media"):
        source.adapter.adapt(last)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_memory_is_that_of_a_few_rows(tmp_path, name):
    table = pyarrow.table({"image": [GIF + bytes(500_000)] * 200, "caption": ["A."] * 200})
    if name == "a.parquet":
        parquet.write_table(
            table, tmp_path / name, row_group_size=20, compression="none", use_dictionary=False
        )
    else:
        with (
            pyarrow.OSFile(str(tmp_path / name), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    del table
    before, peak, rows = pyarrow.total_allocated_bytes(), 0, 0
    (source,), _ = open_sources(tmp_path / name, AUTO, None)
    for row in source.rows():
        rows += row["image"].nbytes > 500_000
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
    assert rows == 200 and peak < (40_000_000 if name == "a.parquet" else 1_000_000)


def test_a_small_parquet_file_of_a_large_dictionary_value_does_not_fill_the_memory(tmp_path):
    """A few kB hold one value of 84 MB that 64 rows repeat: 5 GB, were they read together."""
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 64, pyarrow.int32()), [bytes(80 << 20)]
    )
    table = pyarrow.table({"image": column, "caption": ["A."] * 64})
    path = tmp_path / "a.parquet"
    parquet.write_table(
        table, path, compression="zstd", dictionary_pagesize_limit=1 << 30, write_statistics=False
    )
    del column, table
    assert path.stat().st_size < 50_000
    (source,) = [Source(path, path.name, Adapter(replace(AUTO, name="caption")))]
    before = pyarrow.total_allocated_bytes()
    row = next(source.rows())
    assert (
        row["image"].nbytes == 80 << 20 and pyarrow.total_allocated_bytes() - before < 400_000_000
    )
    with pytest.raises(BadSample, match="too_many_bytes"):
        records.checked_image("a.png", row["image"])


def test_hostile_rows_are_rejected_one_by_one(tmp_path, monkeypatch):
    """No image is decoded beyond its header's claim, no path leaves the folder, no value passes
    unchecked.
    """
    monkeypatch.setattr(records, "MAX_IMAGE_BYTES", 1000)
    head = struct.pack(">II5B", 1 << 16, 1 << 16, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", b"")
    (tmp_path / "images").mkdir()
    (tmp_path / "secret.jpg").write_bytes(GIF)
    bad = {
        "too_many_pixels": {"image": {"bytes": bomb, "path": None}, "caption": "x"},
        "undecodable_image": {
            "image": {"bytes": b"%!PS-Adobe-3.0 EPSF-3.0", "path": "a.jpg"},
            "caption": "x",
        },
        "too_many_bytes": {"image": {"bytes": bytes(1001), "path": None}, "caption": "x"},
        "outside_images": {"image": {"bytes": None, "path": "../secret.jpg"}, "caption": "x"},
        "unreadable_image": {"image": {"bytes": None, "path": "a\0b.jpg"}, "caption": "x"},
        "bad_image_field": {"image": {"bytes": None, "path": "x." * 2500}, "caption": "x"},
        "image_count": {"image": None, "caption": "x"},
        "no_caption": {"image": {"bytes": GIF, "path": None}, "caption": None},
        "no_answer": {"image": {"bytes": GIF, "path": None}, "caption": " <image> "},
        "too_long": {"image": {"bytes": GIF, "path": None}, "caption": "x" * 1_000_001},
    }
    parquet.write_table(pyarrow.Table.from_pylist(list(bad.values())), tmp_path / "a.parquet")
    arguments = [
        "--images",
        str(tmp_path / "images"),
        "--out",
        str(tmp_path / "out"),
        "--max-reject-rate",
        "1",
    ]
    assert main(["shard", "--from", str(tmp_path / "a.parquet"), *arguments, "--workers", "1"]) == 2
    found = [
        json.loads(line)["reason"]
        for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    ]
    assert found == list(bad)


def test_arrow_data_that_lies_of_its_lengths_is_refused(tmp_path):
    path = tmp_path / "a.arrow"
    nulls = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, 1 << 30], pyarrow.int32()), pyarrow.nulls(1 << 30)
    )
    for column, message in (
        (nulls, "a row has more than 16,777,216 bytes of text, or values in lists"),
        (None, "cannot be read"),
    ):
        table = pyarrow.table(
            {"image": ["a.jpg"], "messages": nulls} if column else {"image": ["a.jpg", "b.jpg"]}
        )
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
        if column is None:  # the offsets of its texts
            content = path.read_bytes()
            path.write_bytes(
                content.replace(
                    struct.pack("<3i", 0, 5, 10), struct.pack("<3i", 0, 1 << 28, 1 << 29)
                )
            )
        with pytest.raises(UserError, match=message):
            open_sources(path, AUTO, None)


def test_pickles_in_a_schema_do_not_run(tmp_path):
    """An extension type that pyarrow itself once unpickled (CVE-2023-47248) stays what it is stored
    as.
    """
    run = pickle.dumps(_Runs(str(tmp_path / "ran")))
    field = pyarrow.field("caption", pyarrow.string(), metadata={
        b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": run,
    })  # fmt: skip
    schema = pyarrow.schema([pyarrow.field("image", pyarrow.string()), field])
    path = tmp_path / "a.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        writer.write_table(
            pyarrow.Table.from_arrays(
                [pyarrow.array(["a.jpg"]), pyarrow.array(["A."])], schema=schema
            )
        )
    try:
        open_sources(path, AUTO, None)
    except UserError as error:
        assert "cannot be read" in str(error)
    assert not (tmp_path / "ran").exists()


class _Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")
