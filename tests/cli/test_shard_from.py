"""mmtrain shard --from: others' files and folders become the shards that the same data in LLaVA's
JSON becomes.
"""

import base64
import csv
import json
import random
import re
import sys
from pathlib import Path

import datasets
import pandas
import pyarrow
import pytest
from json_files import read_json, read_lines
from llava_data import contents, picture, read_members
from pyarrow import parquet

from mmtrain.__main__ import main

datasets.disable_progress_bars()
PROMPT = "Describe the image."
IMAGE = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
CAPTIONS = [
    "A red door.",
    'He said "no", twice',
    "two\nlines",
    "図書館 \U0001f600",
    "[1] a, b",
    "tab\there",
] * 3


def asked(*texts: str, names=("human", "gpt"), keys=("from", "value")) -> list[dict]:
    return [{keys[0]: names[number % 2], keys[1]: text} for number, text in enumerate(texts)]


def llava(number: int, name: object, caption: str, prompt: str = PROMPT) -> dict:
    return {"id": number, "image": name, "conversations": asked(f"<image>\n{prompt}", caption)}


@pytest.fixture
def folder(tmp_path):
    draw = random.Random(0)
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for number in range(len(CAPTIONS)):
        kind = ("jpg", "JPEG") if number % 2 else ("png", "PNG")
        (tmp_path / "images" / "deep" / f"{number}.{kind[0]}").write_bytes(picture(draw, kind[1]))
    return tmp_path


def names(folder: Path) -> list[str]:
    files = sorted((folder / "images" / "deep").iterdir(), key=lambda file: int(file.stem))
    return [f"deep/{file.name}" for file in files]


def shard(folder: Path, *paths: str | Path, out="out", more=(), option="--from") -> int:
    chosen = [] if "--workers" in more else ["--workers", "1"]
    files = [str(folder / path) for path in paths]
    arguments = [
        "--images",
        str(folder / "images"),
        "--out",
        str(folder / out),
        "--samples-per-shard",
        "7",
    ]
    return main(["shard", option, *files, *arguments, *chosen, *more])


def tars(out: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(out).items() if ".tar" in name}


@pytest.mark.parametrize("option", ["--from", "--json"])
def test_a_quoted_pattern_names_files_as_the_shells_does(folder, option, capsys):
    for number, name in enumerate(names(folder)[:4]):
        record = {"id": str(number), "image": name, "conversations": asked("<image>\nWhat?", "A.")}
        (folder / f"x-{number}.jsonl").write_text(json.dumps(record))
    files = [f"x-{number}.jsonl" for number in range(4)]
    assert shard(folder, *files, out="listed", option=option) == 0
    for number, pattern in enumerate(["x-*.jsonl", "x-{0..3}.jsonl", "x-[0-3].jsonl"]):
        assert shard(folder, pattern, out=f"out{number}", option=option) == 0
        assert contents(folder / f"out{number}") == contents(folder / "listed")
    capsys.readouterr()
    assert shard(folder, "y-*.jsonl", option=option) == 2
    assert f"error: {option}: no file {folder}/y-*.jsonl" in capsys.readouterr().err


def rejections(out: Path) -> list[dict]:
    return read_lines(out / "rejected.jsonl")


def write_json(folder: Path, records: list) -> None:
    (folder / "llava.json").write_text(json.dumps(records))


def write_csv(path: Path, rows: list[dict], **more) -> None:
    with path.open("w", newline="", encoding=more.pop("encoding", "utf-8")) as file:
        writer = csv.DictWriter(file, list(rows[0]), **more)
        writer.writeheader()
        writer.writerows(rows)


def coco(rows: list[dict]) -> dict:
    images = [{"id": f"i{row['id']}", "file_name": row["image"], "width": 3} for row in rows]
    notes = [
        {"image_id": f"i{row['id']}", "id": row["id"], "caption": row["caption"]} for row in rows
    ]
    return {
        "info": {"year": 2017},
        "licenses": [{"id": 1}],
        "images": images[::-1],
        "annotations": notes,
    }


def sharegpt(row: dict) -> dict:
    return {
        "id": row["id"],
        "images": [row["image"]],
        "messages": asked(PROMPT, row["caption"], names=("user", "assistant")),
    }


def parts(row: dict) -> dict:
    question = [{"type": "image", "image": row["image"]}, {"type": "text", "text": PROMPT}]
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": row["caption"]},
    ]
    return {"id": row["id"], "messages": turns}


def table(rows: list[dict]) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(rows)


WRITERS = {
    "llava.json": lambda path, rows: path.write_text(
        json.dumps([llava(row["id"], row["image"], row["caption"]) for row in rows])
    ),
    "captions.jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows))),
    "coco.json": lambda path, rows: path.write_text(json.dumps(coco(rows))),
    "coco_last.json": lambda path, rows: path.write_text(
        json.dumps(dict(reversed(coco(rows).items())))
    ),
    "sharegpt.json": lambda path, rows: path.write_text(json.dumps(list(map(sharegpt, rows)))),
    "parts.jsonl": lambda path, rows: path.write_text(
        "\n".join(json.dumps(parts(row)) for row in rows)
    ),
    "names.parquet": lambda path, rows: parquet.write_table(table(rows), path, row_group_size=5),
    "messages.parquet": lambda path, rows: parquet.write_table(
        table(list(map(sharegpt, rows))), path
    ),
    "mixed": lambda path, rows: datasets.Dataset.from_list(
        list(map(parts, rows)), on_mixed_types="use_json"
    ).save_to_disk(path),
    "conversations.parquet": lambda path, rows: parquet.write_table(
        table([llava(row["id"], row["image"], row["caption"]) for row in rows]), path
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_records_in_any_form_become_the_same_shards(folder, name, capsys):
    rows = [
        {"id": number, "image": image, "caption": caption}
        for number, (image, caption) in enumerate(zip(names(folder), CAPTIONS, strict=True))
    ]
    write_json(folder, [llava(row["id"], row["image"], row["caption"]) for row in rows])
    assert shard(folder, "llava.json", option="--json", out="json") == 0
    WRITERS[name](folder / name, rows)
    assert shard(folder, name) == 0
    assert tars(folder / "out") == tars(folder / "json") and len(tars(folder / "out")) == 6
    assert f"{folder}/{name}: " in (printed := capsys.readouterr().out) and "18 records" in printed
    summary, plain = (read_json(folder / out / "dataset.json") for out in ("out", "json"))
    assert (summary["options"].pop("data.format"), plain["options"].pop("data.format")) == (
        "auto",
        "llava",
    )
    assert summary["options"] == plain["options"] and summary["sha256"] == plain["sha256"]


@pytest.mark.parametrize("write", ["bom", "tsv", "pandas.csv"])
def test_tables_of_csv_and_pandas_are_read_as_they_were_meant(folder, write):
    rows = [
        {"file_name": image, "caption": text}
        for image, text in zip(names(folder), CAPTIONS, strict=True)
    ]
    path = folder / f"rows.{write[-3:].replace('bom', 'csv')}"
    separator = "\t" if path.suffix == ".tsv" else ","
    if write.startswith("pandas"):
        pandas.DataFrame(rows).to_csv(path, sep=separator, index=False)
    else:
        write_csv(
            path, rows, encoding="utf-8-sig" if write == "bom" else "utf-8", delimiter=separator
        )
    assert shard(folder, path, more=("data.caption_prompt=Was?",)) == 0
    found = [
        members for tar in sorted((folder / "out").glob("*.tar")) for members in read_members(tar)
    ]
    texts = [json.loads(members["json"]) for members in found]
    assert [text["conversations"] for text in texts] == [
        asked("<image>\nWas?", caption) for caption in CAPTIONS
    ]
    assert [text["image"] for text in texts] == names(folder) and not any(
        "id" in text for text in texts
    )
    assert [members["__key__"] for members in found] == [
        f"record-{number:08d}" for number in range(len(CAPTIONS))
    ]


@pytest.mark.parametrize("write", ["save_to_disk", "folder", "pandas"])
def test_images_as_bytes_are_stored_as_they_are_under_the_suffix_of_what_they_are(folder, write):
    files = [(folder / "images" / name).read_bytes() for name in names(folder)]
    images = [
        {"bytes": content, "path": None if number % 3 else f"x{number}.gif"}
        for number, content in enumerate(files)
    ]
    rows = {"image": images, "caption": CAPTIONS}
    data = datasets.Dataset.from_dict(rows, features=IMAGE)
    path = folder / "data.parquet" if write == "pandas" else folder / "data"
    if write == "save_to_disk":
        data.save_to_disk(path, num_shards=3)
    elif write == "folder":
        path.mkdir()
        for number in range(2):
            data.shard(2, number).to_parquet(
                path / f"train-0000{number}-of-00002.parquet", batch_size=4
            )
    else:
        pandas.DataFrame(rows | {"image": files}).to_parquet(path, row_group_size=4)
    for workers in ("1", "2"):
        arguments = [
            "--out",
            str(folder / workers),
            "--samples-per-shard",
            "5",
            "--workers",
            workers,
        ]
        assert main(["shard", "--from", str(path), *arguments]) == 0
    assert contents(folder / "1") == contents(folder / "2")
    stored = [
        members for tar in sorted((folder / "1").glob("*.tar")) for members in read_members(tar)
    ]
    assert [members.get("jpg", members.get("png")) for members in stored] == files
    assert [("jpg" in members) for members in stored] == [
        bool(number % 2) for number in range(len(files))
    ]
    keys = [members["__key__"] for members in stored]
    named = [
        key if number % 3 or write == "pandas" else f"x{number}.gif"
        for number, key in enumerate(keys)
    ]
    assert [json.loads(members["json"])["image"] for members in stored] == named


def test_several_images_of_a_row_and_text_alone_among_them(folder):
    files = [(folder / "images" / name).read_bytes() for name in names(folder)[:3]]
    rows = [
        {
            "images": [{"bytes": file} for file in files],
            "messages": asked("Which?", "All.", names=("user", "assistant")),
        },
        {"images": None, "messages": asked("Hi", "Yes.", names=("user", "assistant"))},
        {
            "images": [{"bytes": files[0]}],
            "messages": asked("A <image> b", "c", names=("user", "assistant")),
        },
    ]
    parquet.write_table(table(rows), folder / "a.parquet")
    assert shard(folder, "a.parquet") == 0
    several, text, one = read_members(folder / "out" / "shard-000000.tar")
    assert [several["0.png"], several["1.jpg"], several["2.png"]] == files and one["png"] == files[
        0
    ]
    assert json.loads(several["json"]) == {
        "image": [f"record-00000000.{number}" for number in range(3)],
        "conversations": asked("<image>\n<image>\n<image>\nWhich?", "All."),
    }
    assert json.loads(text["json"]) == {"conversations": asked("Hi", "Yes.")}
    assert json.loads(one["json"])["conversations"] == asked("A <image> b", "c")


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def in_parts(content: bytes, number: int) -> dict:
    """As OpenAI's fine-tuning takes it."""
    url = {"url": f"data:image/jpeg;base64,{base64_of(content)}"}
    question = [{"type": "image_url", "image_url": url}, {"type": "text", "text": PROMPT}]
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": CAPTIONS[number]},
    ]
    return {"messages": turns}


def held(content: bytes) -> dict:
    return {"bytes": content, "path": None}


HELD = {  # rows that hold their images, as their data sets' cards show them
    "openai.jsonl": in_parts,
    "llava.json": lambda content, n: llava(
        n, f"data:image/png;base64,{base64_of(content)}", CAPTIONS[n]
    ),
    "vlmevalkit.tsv": lambda content, n: {
        "index": n,
        "image": base64_of(content),
        "question": PROMPT,
        "answer": CAPTIONS[n],
    },
    "finevision.parquet": lambda content, n: {
        "images": [held(content)],
        "texts": [{"user": PROMPT, "assistant": CAPTIONS[n]}],
        "source": "CoSyn_400k_chart",
        "relevance_ratings": [5],
        "relevance_min": 5,
    },
    "the_cauldron.parquet": lambda content, n: {
        "images": [held(content)],
        "texts": [{"user": PROMPT, "assistant": CAPTIONS[n], "source": "AI2D"}],
    },
    "docvqa.parquet": lambda content, n: {
        "questionId": str(n),
        "question": PROMPT,
        "question_types": ["handwritten"],
        "image": held(content),
        "docId": n,
        "answers": [CAPTIONS[n], CAPTIONS[n].lower()],
    },
    "trl.parquet": lambda content, n: {
        "images": [held(content)],
        "prompt": [{"role": "user", "content": PROMPT}],
        "completion": [{"role": "assistant", "content": CAPTIONS[n]}],
    },
    "obelics.parquet": lambda content, n: {
        "images": [held(content), None],
        "texts": [None, CAPTIONS[n]],
        "metadata": "[]",
        "general_metadata": "{}",
    },
}
UNREAD = {
    "vlmevalkit.tsv": "; not read: index",
    "finevision.parquet": "; not read: source, relevance_ratings, relevance_min",
    "docvqa.parquet": "; not read: questionId, question_types, docId",
    "obelics.parquet": "; not read: metadata, general_metadata",
}


@pytest.mark.parametrize("name", HELD)
def test_rows_of_other_data_sets_become_conversations_with_the_images_that_they_hold(
    folder, name, capsys
):
    files = [(folder / "images" / image).read_bytes() for image in names(folder)]
    rows = [HELD[name](content, number) for number, content in enumerate(files)]
    if name.endswith(".parquet"):
        parquet.write_table(table(rows), folder / name, row_group_size=5)
    elif name.endswith(".tsv"):
        write_csv(folder / name, rows, delimiter="\t")
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    for workers in ("1", "2"):
        arguments = [
            "--out",
            str(folder / workers),
            "--samples-per-shard",
            "5",
            "--workers",
            workers,
        ]
        assert main(["shard", "--from", str(folder / name), *arguments]) == 0
    assert contents(folder / "1") == contents(folder / "2")
    stored = [
        members for tar in sorted((folder / "1").glob("*.tar")) for members in read_members(tar)
    ]
    assert [members.get("jpg", members.get("png")) for members in stored] == files
    prompt = "<image>" if name == "obelics.parquet" else f"<image>\n{PROMPT}"
    turns = [json.loads(members["json"])["conversations"] for members in stored]
    assert turns == [asked(prompt, text) for text in CAPTIONS]
    assert [json.loads(members["json"])["image"] for members in stored] == [
        members["__key__"] for members in stored
    ]
    said = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(f"{folder / name}: ")
    )
    assert said.endswith(f"{UNREAD.get(name, '')}: 18 records")


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "Q", "answers": '["cat", "dog", "dog"]'}, "dog"),
        (
            {
                "prompt": '[{"role": "user", "content": "Q"}]',
                "completion": '[{"role": "assistant", "content": "A"}]',
            },
            "A",
        ),
        ({"question": "Q", "answer": "[0.1, 0.9]"}, "[0.1, 0.9]"),
    ],
)
def test_a_table_holds_lists_as_json_text_and_a_box_stays_text(folder, row, answer):
    write_csv(folder / "a.csv", [row])
    assert shard(folder, "a.csv") == 0
    (members,) = read_members(*(folder / "out").glob("*.tar"))
    assert json.loads(members["json"])["conversations"] == asked("Q", answer)


def test_rows_whose_images_are_in_another_column_are_said_to_have_none(folder, capsys):
    rows = [{"image_url": "https://example.org/a.jpg", "question": "Q", "answer": "A"}]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert shard(folder, "a.jsonl") == 0
    assert (
        "questions with their answers; without images; not read: image_url: 1 records"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "image", ["data:image/png;base64,", "data:image/png;base64,A", "A" * 301, "iVBORw0KGgo" * 30]
)
def test_base64_that_is_no_image_has_one_reason_and_does_not_print_its_text(folder, image):
    rows = [
        {"image": text, "caption": "x"}
        for text in (base64_of(b"GIF89a") * 90, image.replace("data", "DATA"))
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert shard(folder, "a.jsonl", more=("--max-reject-rate", "1")) == 2
    found = rejections(folder / "out")
    assert [line["reason"] for line in found] == ["undecodable_image"] * 2
    assert not any(re.search(r"[A-Za-z0-9+/]{40}", line["detail"]) for line in found)


def test_a_message_about_a_value_leaves_out_base64(folder):
    rows = [
        {"image": {"data": base64_of(bytes(900))}, "caption": "x"},
        {"image": "a.jpg", "caption": "x"},
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert shard(folder, "a.jsonl", more=("--max-reject-rate", "1")) == 2
    (first, _) = rejections(folder / "out")
    assert first["detail"] == "an image is {'data': '(1,200 characters)'}"


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes_and_not_with_other_options(
    folder, name, capsys
):
    rows = [
        {"image": image, "caption": text}
        for image, text in zip(names(folder), CAPTIONS, strict=True)
    ]
    rows[12]["image"] = rows[16]["image"] = "none.jpg"
    if name == "a.csv":
        write_csv(folder / name, rows)
    else:
        files = [folder / "images" / row["image"] for row in rows]
        images = [
            {"bytes": file.read_bytes()} if file.exists() else {"path": file.name} for file in files
        ]
        parquet.write_table(
            table([row | {"image": image} for row, image in zip(rows, images, strict=True)]),
            folder / name,
        )
    assert shard(folder, name, more=("--max-reject-rate", "0.06")) == 2
    assert "too many bad records: 2 of the first 17 (2 missing_image)" in (capsys.readouterr().err)
    assert (folder / "out" / "unfinished.jsonl").is_file()
    again = ("--resume", "--max-reject-rate", "1")
    assert shard(folder, name, more=(*again, "data.caption_prompt=What?")) == 2
    assert 'data.caption_prompt was "Describe the image." and is "What?"' in capsys.readouterr().err
    assert shard(folder, name, more=again) == 0
    assert "2 shards are there already" in capsys.readouterr().out
    assert shard(folder, name, out="whole", more=("--max-reject-rate", "1")) == 0
    assert contents(folder / "out") == contents(folder / "whole")
    assert [line["record"] for line in rejections(folder / "out")] == [12, 16]


def test_several_sources_are_read_one_after_the_other_each_as_it_is(folder, capsys):
    image = names(folder)[0]
    write_json(folder, [llava(0, image, "first")])
    write_csv(
        folder / "a.csv",
        [{"image": image, "caption": "second"}, {"image": "none.png", "caption": "third"}],
    )
    parquet.write_table(
        table([sharegpt({"id": 0, "image": image, "caption": "fourth"})]), folder / "a.parquet"
    )
    more = ("--max-reject-rate", "0.5")
    assert shard(folder, "llava.json", "a.csv", "a.parquet", more=more) == 0
    assert [
        (line["file"], line["record"], line["reason"]) for line in rejections(folder / "out")
    ] == [
        ("a.csv", 1, "missing_image"),
        ("a.parquet", 0, "duplicate_id"),
    ]
    inputs = read_json(folder / "out" / "dataset.json")["inputs"]
    assert [(entry["file"], entry["records"], entry["format"]) for entry in inputs] == [
        ("llava.json", 1, "llava"),
        ("a.csv", 2, "caption"),
        ("a.parquet", 1, "sharegpt"),
    ]
    assert (
        f"{folder}/a.csv: captions (image: image, caption: caption): 2 records"
        in capsys.readouterr().out
    )


def test_options_of_from_are_refused_with_json(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["shard", "--json", "a.json", "data.format=caption", "--out", str(tmp_path / "out")])
    message = "--json: reads LLaVA's own records; use --from with other keys"
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_where_pyarrow_lacks_the_extra_is_named(folder, monkeypatch, capsys):
    parquet.write_table(
        table([sharegpt({"id": 0, "image": "a.png", "caption": "x"})]), folder / "a.parquet"
    )
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert shard(folder, "a.parquet") == 2
    assert "which is not installed. Run pip install 'mmtrain[datasets]'" in capsys.readouterr().err
