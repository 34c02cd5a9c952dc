"""mmtrain shard: every record ends in a shard, unchanged, or in rejected.jsonl with its reason."""

import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from json_files import read_json, read_lines, write_json
from llava_data import (
    command,
    contents,
    damaged_records,
    good_records,
    keys_in,
    picture,
    read_members,
    turns,
)
from PIL import Image

from mmtrain.__main__ import main
from mmtrain.cli.shard import parse_size
from mmtrain.data.samples.sample import read_sample
from mmtrain.data.shards.index import read_index
from mmtrain.data.shards.shard_list import expand_shards
from mmtrain.facts.tokenizer_files import text_fingerprint

SOUND = {"id": 1, "conversations": turns("Hi", "Yes.")}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path


def shard(folder: Path, *more: str, out: str = "out", json_files=("a.json",)) -> int:
    files = [str(folder / name) for name in json_files]
    chosen = [] if "--workers" in more else ["--workers", "1"]
    return main(
        [
            "shard",
            "--json",
            *files,
            "--images",
            str(folder / "images"),
            "--out",
            str(folder / out),
            *chosen,
            *more,
        ]
    )


def rejections(out: Path) -> list[dict]:
    return read_lines(out / "rejected.jsonl")


def names_of(record: dict) -> list[str]:
    field = record.get("image")
    return [] if field is None else [field] if isinstance(field, str) else field


def test_what_the_tool_writes_reads_back_equal_to_its_input_and_in_its_order(folder):
    records = good_records(folder / "images", 60)
    write_json(folder / "a.json", records[:35])
    (folder / "b.jsonl").write_text(
        "\n".join(json.dumps(record, ensure_ascii=False) for record in records[35:])
    )
    assert shard(folder, "--samples-per-shard", "11", json_files=("a.json", "b.jsonl")) == 0
    tars = expand_shards(f"{folder}/out/shard-{{000000..000005}}.tar")
    read = [members for tar in tars for members in read_members(tar)]
    for record, members in zip(records, read, strict=True):
        assert json.loads(members["json"]) == record
        names = names_of(record)
        suffixes = [Path(name).suffix[1:].lower() for name in names]
        if len(names) != 1:
            suffixes = [f"{number}.{suffix}" for number, suffix in enumerate(suffixes)]
        stored = {name: members[name] for name in members if not name.startswith("__")}
        assert list(stored) == ["json", *suffixes]
        sample = read_sample(members["__key__"], members["__url__"], stored)
        assert sample.turns == tuple(
            (turn["from"], turn["value"]) for turn in record["conversations"]
        )
        assert list(sample.images) == [(folder / "images" / name).read_bytes() for name in names]
    assert len({members["__key__"] for members in read}) == 60 and rejections(folder / "out") == []


def test_dataset_json_counts_what_is_there(folder, capsys):
    records = good_records(folder / "images", 20)
    records[3]["image"] = "none.png"
    records[3]["conversations"][0]["value"] = "<image>"
    write_json(folder / "a.json", records[:15])
    write_json(folder / "b.json", records[15:])
    assert shard(folder, "--samples-per-shard", "8", json_files=("a.json", "b.json")) == 0
    counts = read_json(folder / "out" / "dataset.json")
    images = [
        name for number, record in enumerate(records) if number != 3 for name in names_of(record)
    ]
    sizes = [Image.open(folder / "images" / name).size for name in images]
    tars = sorted((folder / "out").glob("*.tar"))
    digests = [hashlib.sha256(tar.read_bytes()).hexdigest() for tar in tars]
    shards, options = counts.pop("shards"), counts.pop("options")
    assert counts == {
        "format_version": 1,
        "records": 20,
        "samples": 19,
        "images": len(images),
        "image_pixels": sum(width * height for width, height in sizes),
        "text_tokens": None,
        "bytes": sum(tar.stat().st_size for tar in tars),
        "rejected": {"missing_image": 1},
        "inputs": [
            {
                "file": name,
                "records": count,
                "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
                "format": "llava",
            }
            for name, count in (("a.json", 15), ("b.json", 5))
        ],
        "sha256": hashlib.sha256("".join(digests).encode()).hexdigest(),
    }
    assert options["samples_per_shard"] == 8
    assert [(entry["file"], entry["sha256"], entry["samples"]) for entry in shards] == [
        (tar.name, digest, samples)  # 8 records each, one lacks its image
        for tar, digest, samples in zip(tars, digests, (7, 8, 4), strict=True)
    ]
    printed = capsys.readouterr().out
    assert re.search(r"20 of 20 records  [\d,]+ samples/s  1 rejected\n", printed)
    assert f"3 shards, 19 samples, {len(images)} images" in printed
    assert "1  missing_image: an image file that does not exist" in printed


# Where workers are forked, and where they are spawned.
@pytest.mark.parametrize("platform", ["linux", pytest.param("darwin", marks=pytest.mark.nightly)])
def test_the_bytes_do_not_depend_on_the_workers(folder, monkeypatch, platform):
    write_json(folder / "a.json", damaged_records(folder, 120))
    monkeypatch.setattr("sys.platform", platform)
    for workers in ("1", "2"):
        arguments = ("--samples-per-shard", "9", "--max-reject-rate", "0.3", "--workers", workers)
        assert shard(folder, *arguments, out=workers) == 0
    assert contents(folder / "1") == contents(folder / "2")
    numbers = [line["record"] for line in rejections(folder / "1")]
    assert numbers == sorted(numbers) and len(numbers) >= 12


def test_a_shard_holds_as_many_bytes_as_asked_for_and_no_more(folder):
    draw, records = random.Random(0), []
    for number in range(40):
        side = 1200 if number == 7 else draw.randint(100, 350)  # one is larger than a shard
        Image.effect_noise((side, side), 50).save(folder / "images" / f"{number}.bmp")
        records.append(
            {"id": number, "image": f"{number}.bmp", "conversations": turns("<image>", "Noise.")}
        )
    write_json(folder / "a.json", records)
    assert shard(folder, "--shard-bytes", "1MB") == 0
    tars = sorted((folder / "out").glob("*.tar"))
    sizes, keys = [tar.stat().st_size for tar in tars], [keys_in(tar) for tar in tars]
    assert [key for keys_of_tar in keys for key in keys_of_tar] == [
        str(number) for number in range(40)
    ]
    alone = keys.index(["7"])
    assert (
        max(size for number, size in enumerate(sizes) if number != alone)
        <= 1_000_000
        < sizes[alone]
    )
    for number in range(len(tars) - 1):  # the next shard's first sample would not have fitted
        first = (folder / "images" / f"{keys[number + 1][0]}.bmp").stat().st_size
        assert sizes[number] + first + 10240 > 1_000_000


def test_every_bad_record_is_listed_with_its_reason_and_the_others_are_written(folder, capsys):
    images, draw = folder / "images", random.Random(0)
    for name in ("a.png", "../outside.png"):
        (images / name).write_bytes(picture(draw, "PNG"))
    (images / "broken.png").write_bytes((images / "a.png").read_bytes()[:40])
    Image.new("L", (40, 30)).save(images / "large.png")
    ask = turns("<image>", "A cat.")
    good = [
        {"id": "x", "image": "a.png", "conversations": ask},
        {"id": 4, "conversations": turns("Hi", "Yes.")},
    ]
    bad = {
        "not_an_object": "text",
        "not_json": {
            "id": "n",
            "image": "a.png",
            "conversations": ask,
            "note": "half a pair: \ud83d",
        },
        "bad_id": {"id": {"a": 1}, "image": "a.png", "conversations": ask},
        "duplicate_id": {"id": "x", "conversations": turns("Hi", "Again.")},
        "no_conversation": {"id": "c", "image": "a.png", "text": "A cat."},
        "image_count": {"id": "m", "image": ["a.png", "a.png"], "conversations": ask},
        "outside_images": {"id": "o", "image": "../outside.png", "conversations": ask},
        "missing_image": {"id": "i", "image": "none.png", "conversations": ask},
        "undecodable_image": {"id": "d", "image": "broken.png", "conversations": ask},
        "too_many_pixels": {"id": "p", "image": "large.png", "conversations": ask},
    }
    (folder / "a.json").write_text("\n".join(map(json.dumps, [good[0], *bad.values(), good[1]])))
    assert shard(folder, "--max-reject-rate", "1", "--max-pixels", "1199") == 0
    lines = rejections(folder / "out")
    assert [(line["file"], line["record"], line["reason"]) for line in lines] == [
        ("a.json", number, reason) for number, reason in enumerate(bad, 1)
    ]
    assert [line["id"] for line in lines] == [None, "n", None, "x", *"cmoidp"]
    assert all(line["detail"] and len(line) == 5 for line in lines)
    assert lines[3]["detail"].startswith("record 0 of a.json has it too; --duplicate-ids keep")
    assert keys_in(folder / "out" / "shard-000000.tar") == ["x", "4"]
    printed = capsys.readouterr().out
    assert all(f"1  {reason}: " in printed for reason in bad)
    assert read_json(folder / "out" / "dataset.json")["rejected"] == Counter(bad.keys())


def test_an_id_belongs_to_the_first_record_of_sound_text(folder):
    records = [{"id": "a", "conversations": []}]
    records += [{"id": "a", "conversations": turns("Hi", answer)} for answer in ("Yes.", "No.")]
    records += [{"id": "b", "image": "none.png", "conversations": turns("<image>", "A cat.")}]
    records += [{"id": "b", "conversations": turns("Hi", "Yes.")}]
    write_json(folder / "a.json", records)
    assert shard(folder, "--max-reject-rate", "0.8") == 0
    assert [(line["record"], line["reason"]) for line in rejections(folder / "out")] == [
        (0, "no_conversation"),
        (2, "duplicate_id"),
        (3, "missing_image"),
        (4, "duplicate_id"),
    ]
    (members,) = read_members(folder / "out" / "shard-000000.tar")
    assert members["__key__"] == "a" and json.loads(members["json"]) == records[1]


def test_repeated_ids_can_be_kept_under_keys_of_their_own(folder, capsys):
    ids = [
        "a",
        "a",
        "a-2",
        "a",
        "x" * 80,
        "x" * 80,
        "a-2",
        "a/b",
        "a/b",
        7,
        "7",
        None,
        "record-00000011",
    ]
    records = [
        {"id": name, "conversations": turns("Hi", f"{number}")} for number, name in enumerate(ids)
    ]
    write_json(folder / "a.json", records)
    assert shard(folder, "--duplicate-ids", "keep") == 0
    stored = read_members(folder / "out" / "shard-000000.tar")
    assert [json.loads(members["json"]) for members in stored] == records
    hashed = "a-b-" + hashlib.sha256(b"a/b").hexdigest()[:12]
    assert [members["__key__"] for members in stored] == [
        *("a", "a-2", "a-2-2", "a-3", "x" * 80, "x" * 80 + "-2", "a-2-3", hashed, f"{hashed}-2"),
        *("7", "7-2", "record-00000011", "record-00000011-2"),
    ]
    assert shard(folder, out="other") == 2
    assert "--duplicate-ids keep gives each its own key" in capsys.readouterr().err


def test_text_lengths_of_the_given_tokenizer_and_template_are_in_the_index(folder, tiny):
    """`plain` is the caption's tokens and EOS, and BOS where the tokenizer begins with it."""
    from transformers import AutoTokenizer

    Image.new("RGB", (9, 9)).save(folder / "images" / "a.png")
    records = [
        {
            "id": "one",
            "image": "a.png",
            "conversations": turns("<image>\nWhat?", "a red circle on a blue background."),
        },
        {"id": "many", "conversations": turns("Hi", "Yes.", "And?", "No.")},
        {"id": "text", "conversations": turns("Hi", "a green square.")},
    ]
    write_json(folder / "a.json", records)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llm")
    lengths = [
        len(tokenizer(records[number]["conversations"][1]["value"]).input_ids) + 1
        for number in (0, 2)
    ]
    assert shard(folder, str(tiny / "config.yaml"), "--workers", "2") == 0
    fingerprint = text_fingerprint(tiny / "llm", "plain")
    text = read_index(folder / "out" / "shard-000000.tar").texts[fingerprint]
    assert text.tokens == [lengths[0], 0, lengths[1]]
    assert text.faults.keys() == {1} and text.faults[1][0] == "template"
    summary = read_json(folder / "out" / "dataset.json")
    assert summary["text_tokens"] == sum(lengths)
    assert (
        summary["options"]["text_fingerprint"] == fingerprint
        and summary["options"]["data.template"] == "plain"
    )


@pytest.mark.parametrize(
    ("bad", "rate", "code"), [(5, "0.05", 0), (6, "0.05", 2), (29, "0.29", 0), (1, "0", 2)]
)
def test_more_bad_records_than_allowed_stop_the_tool(folder, capsys, bad, rate, code):
    texts = ["Yes."] * (100 - bad) + [""] * bad
    records = [
        {"id": number, "conversations": turns("Hi", text)} for number, text in enumerate(texts)
    ]
    write_json(folder / "a.json", records)
    assert shard(folder, "--samples-per-shard", "10", "--max-reject-rate", rate) == code
    message = capsys.readouterr().err
    assert (folder / "out" / "dataset.json").exists() == (code == 0)
    if code:
        assert re.fullmatch(
            rf"error: too many bad records: {bad} of the first 100 \({bad} no_answer\), but "
            rf"{bad - 1} of 100 are "
            r"allowed; the last is no_answer: turn 1, from gpt, is empty\. "
            r"Fix them, give rows that are not LLaVA's by "
            r"--from, not --json, or raise --max-reject-rate; "
            r"\S+/out/rejected\.jsonl lists what was left out\. \S+/out is unfinished: "
            r"go on with --resume, or delete "
            r"it\n",
            message,
        )
        assert len(rejections(folder / "out")) == bad
        assert not list((folder / "out").glob("*.tmp"))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_record_that_is_one_too_many_is_the_same_for_any_workers(folder, capsys, workers):
    records = good_records(folder / "images", 60)
    for number in range(20, 60, 2):
        records[number] = {"id": number, "conversations": []}
    for number in range(21, 60, 2):
        records[number] |= {"image": "none.png", "conversations": turns("<image>", "None.")}
    write_json(folder / "a.json", records)
    arguments = ("--samples-per-shard", "7", "--max-reject-rate", "0.2", "--workers", workers)
    assert shard(folder, *arguments) == 2
    message = capsys.readouterr().err
    assert (
        "13 of the first 33 (7 no_conversation, 6 missing_image), but 12 of 60 are allowed"
        in message
    )
    assert [line["record"] for line in rejections(folder / "out")] == list(range(20, 33))


def test_a_wrong_images_folder_shows_early_and_another_try_needs_no_clean_up(folder, capsys):
    records = good_records(folder / "images", 40)
    write_json(folder / "a.json", records)
    (folder / "empty").mkdir()
    arguments = [
        "--json",
        str(folder / "a.json"),
        "--out",
        str(folder / "out"),
        "--samples-per-shard",
        "50",
    ]
    assert main(["shard", *arguments, "--images", str(folder / "empty")]) == 2
    message = capsys.readouterr().err
    assert "the first 3 images are not where --images says" in message and "--resume" not in message
    assert list(contents(folder / "out")) == ["rejected.jsonl"]
    assert main(["shard", *arguments, "--images", str(folder / "images")]) == 0
    assert rejections(folder / "out") == []


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("echo '[]' > a.json", "a.json: has no records"),
        (
            """echo '[{"id": 1}]' > a.json""",
            r"too many bad records: 1 of the first 1 .*its keys are id",
        ),
        ("rm -r images && touch images", r"--images \S+/images: no such folder"),
        ("touch out", r"--out \S+/out: is a file"),
        ("mkdir out && touch out/old.tar", r"--out \S+/out: already holds shards \(old\.tar\)"),
        ("mkdir out && touch out/dataset.json", r"already holds shards \(dataset\.json\)"),
        ("ln -s /proc out", r"out/\.lock cannot be used: "),
        ("ln -s images out", r"--out \S+/out: is the folder of the images"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(folder, capsys, prepare, message):
    write_json(folder / "a.json", [SOUND])
    subprocess.run(prepare, shell=True, cwd=folder, check=True)
    before = sorted(path.name for path in folder.glob("*.tar*"))
    assert shard(folder) == 2
    assert re.search(rf"\Aerror: .*{message}.*\n\Z", capsys.readouterr().err)
    assert sorted(path.name for path in folder.glob("*.tar*")) == before


@pytest.mark.parametrize("content", ["", "[]", '{"inputs": 1, "options": [], "samples": 3}'])
def test_resuming_where_another_tool_left_a_dataset_json_is_refused(folder, capsys, content):
    write_json(folder / "a.json", [SOUND])
    (folder / "out").mkdir()
    (folder / "out" / "dataset.json").write_text(content)
    assert shard(folder, "--resume") == 2
    assert "out/dataset.json is from another run" in capsys.readouterr().err


def test_the_hint_at_the_end_names_the_shards_whatever_the_folder_is_called(folder, capsys):
    write_json(folder / "a.json", [SOUND])
    assert shard(folder, out="my [new] data") == 0
    (hint,) = shlex.split(
        capsys.readouterr().out.splitlines()[-1].removeprefix("next: mmtrain train CONFIG ")
    )
    assert [path.name for path in expand_shards(hint.removeprefix("data.shards="))] == [
        "shard-000000.tar"
    ]


def test_a_broken_last_file_shows_before_anything_is_written(folder, capsys):
    write_json(folder / "a.json", [SOUND])
    (folder / "b.json").write_text("[1, 2")
    assert shard(folder, json_files=("a.json", "b.json")) == 2
    assert "b.json: not valid JSON" in capsys.readouterr().err
    assert not (folder / "out").exists()
    assert shard(folder, json_files=("a.json", "a.json")) == 2
    assert "a.json: named twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard-bytes", "many"], "'many' is no size"),
        (["--shard-bytes", "1e400GB"], "'1e400GB' is no size"),
        (["--out", ""], "--out: an empty name"),
        (["--workers", "0"], "--workers: 0: a whole number"),
        (["--max-reject-rate", "nan"], "a share from 0 to 1"),
    ],
)
def test_arguments_out_of_range_are_refused(folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        shard(folder, *arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("500MB", 500_000_000), ("1GiB", 1 << 30), ("2e9", 2_000_000_000), ("1.5GB", 1_500_000_000)],
)
def test_sizes_are_read_as_they_are_written(text, size):
    assert parse_size(text) == size


@pytest.mark.nightly
def test_memory_is_that_of_a_few_images(folder):
    """100 images of 1 MB (BMP, which decodes at once) pass through less than 12 MB."""
    Image.effect_noise((1000, 1000), 50).save(folder / "images" / "a.bmp")
    records = [
        {"id": n, "image": "a.bmp", "conversations": turns("<image>", "Noise.")} for n in range(100)
    ]
    write_json(folder / "a.json", records)
    tracemalloc.start()
    assert shard(folder, "--samples-per-shard", "60") == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (folder / "out" / "shard-000000.tar").stat().st_size > 60_000_000
    assert peak < 12_000_000


def test_the_command_as_the_help_shows_it_without_torch(folder):
    records = good_records(folder / "images", 12)
    write_json(folder / "a.json", records)
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    ran = subprocess.run(
        command(), cwd=folder, capture_output=True, text=True, timeout=60, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert (
        "mmtrain.data.samples.records" in imported
        and not {"torch", "webdataset", "rich"} & imported
    )
    lines = ran.stdout.splitlines()
    assert lines[0] == "a.json: LLaVA's conversations: 12 records"
    assert re.fullmatch(r"12 of 12 records  [\d,]+ samples/s  0 rejected", lines[1])
    assert re.fullmatch(r"out: 1 shards, 12 samples, \d+ images", lines[2])
    assert lines[3:] == ["rejected: 0", "next: mmtrain train CONFIG 'data.shards=out/shard-*.tar'"]
    assert len(read_members(folder / "out" / "shard-000000.tar")) == 12


def test_conversations_without_images_need_no_folder_of_them(tmp_path):
    seen = {"id": "b", "image": "b.png", "conversations": turns("<image>", "A.")}
    write_json(tmp_path / "a.json", [SOUND, seen])
    options = ["--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(["shard", *options, "--max-reject-rate", "0.5"]) == 0
    assert read_json(tmp_path / "out" / "dataset.json")["samples"] == 1
    (rejected,) = rejections(tmp_path / "out")
    assert rejected["reason"] == "missing_image" and "--images" in rejected["detail"]
