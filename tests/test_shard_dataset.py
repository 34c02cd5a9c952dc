"""tools/shard_dataset.py: every record ends in a shard, unchanged, or in rejected.jsonl with its reason."""

import io
import json
import os
import pty
import random
import re
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import webdataset
from conftest import TOOLS, load_tool
from PIL import Image

from mmtrain.data.samples import read_sample
from mmtrain.data.shard_list import check_archive, expand_shards
from mmtrain.data.shards import read_members

TOOL = TOOLS / "shard_dataset.py"


@pytest.fixture(scope="module")
def tool():
    return load_tool("shard_dataset")


def picture(draw: random.Random, file_format: str) -> bytes:
    stream = io.BytesIO()
    size = (draw.randint(1, 12), draw.randint(1, 12))
    Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(stream, file_format)
    return stream.getvalue()


def turns(*texts: str) -> list[dict]:
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


def good_records(images: Path, count: int, seed: int = 0) -> list[dict]:
    """Records of every accepted kind, and their image files: none, one, several; some in folders; unicode; text ids."""
    draw = random.Random(seed)
    texts = ["A cat.", "図書館 \U0001f600", "two\nlines", 'quotes " and \\', "<b>&amp;</b>", "a\u2028b"]
    records = []
    for number in range(count):
        names = [
            f"{draw.choice(['', 'deep/er/'])}{seed}-{number}-{index}.{draw.choice(['jpg', 'JPEG', 'png', 'webp'])}"
            for index in range(draw.choice([0, 1, 1, 1, 2, 12]))
        ]
        for name in names:
            (images / name).parent.mkdir(parents=True, exist_ok=True)
            file_format = {"jpg": "JPEG", "JPEG": "JPEG", "png": "PNG", "webp": "WEBP"}[name.rpartition(".")[2]]
            (images / name).write_bytes(picture(draw, file_format))
        marks = "<image>\n" * len(names)
        record = {"conversations": turns(marks + draw.choice(texts), *draw.choices(texts, k=draw.choice([1, 3])))}
        name = f"{seed}-{number:04d}"
        record["id"] = draw.choice([name, 1000 * seed + number, f"coco/{name}.jpg", f"é{name}"])
        if len(names) == 1:
            record["image"] = draw.choice([names[0], names])
        elif names or draw.random() < 0.5:
            record["image"] = names or None
        records.append(record)
    return records


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path


def shard(tool, folder: Path, *more: str, out: str = "out", json_files=("a.json",)) -> int:
    files = [str(folder / name) for name in json_files]
    return tool.main(["--json", *files, "--images", str(folder / "images"), "--out", str(folder / out), *more])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def rejections(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]


def names_of(record: dict) -> list[str]:
    field = record.get("image")
    return [] if field is None else [field] if isinstance(field, str) else field


@pytest.mark.parametrize("seed", range(3))
def test_what_the_tool_writes_reads_back_equal_to_its_input_and_in_its_order(tool, folder, seed):
    records = good_records(folder / "images", 60, seed)
    (folder / "a.json").write_text(json.dumps(records[:35]))
    (folder / "b.jsonl").write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records[35:]))
    assert shard(tool, folder, "--samples-per-shard", "11", json_files=("a.json", "b.jsonl")) == 0
    paths = expand_shards(f"{folder}/out/shard-{{000000..000005}}.tar")
    expected = [[(folder / "images" / name).read_bytes() for name in names_of(record)] for record in records]
    read = [read_sample(members) for path in paths for members in read_members(path)]
    for record, images, sample in zip(records, expected, read, strict=True):
        assert sample.turns == tuple((turn["from"], turn["value"]) for turn in record["conversations"])
        assert list(sample.images) == images
    found = list(webdataset.WebDataset([str(path) for path in paths], shardshuffle=False))
    for record, images, members in zip(records, expected, found, strict=True):
        assert json.loads(members["json"]) == record
        wanted = [Path(name).suffix[1:].lower() for name in names_of(record)]
        if len(wanted) != 1:
            wanted = [f"{number}.{suffix}" for number, suffix in enumerate(wanted)]
        assert [(name, members[name]) for name in members if name != "json" and not name.startswith("__")] == list(
            zip(wanted, images, strict=True)
        )
    assert len({members["__key__"] for members in found}) == 60
    assert rejections(folder / "out") == []


def test_dataset_json_counts_what_is_there(tool, folder, capsys):
    records = good_records(folder / "images", 20)
    records[3]["image"] = "none.png"
    records[3]["conversations"][0]["value"] = "<image>"
    (folder / "a.json").write_text(json.dumps(records[:15]))
    (folder / "b.json").write_text(json.dumps(records[15:]))
    assert shard(tool, folder, "--samples-per-shard", "8", json_files=("a.json", "b.json")) == 0
    counts = json.loads((folder / "out" / "dataset.json").read_text())
    images = sum(len(names_of(record)) for record in records) - 1
    tars = sorted((folder / "out").glob("*.tar"))
    assert {key: value for key, value in counts.items() if key != "shards"} == {
        "format_version": 1,
        "records": 20,
        "samples": 19,
        "images": images,
        "bytes": sum(tar.stat().st_size for tar in tars),
        "rejected": {"missing_image": 1},
        "inputs": [{"file": "a.json", "records": 15}, {"file": "b.json", "records": 5}],
    }
    assert [entry["file"] for entry in counts["shards"]] == [tar.name for tar in tars]
    assert [entry["samples"] for entry in counts["shards"]] == [8, 8, 3]
    assert [entry["samples"] + entry["images"] for entry in counts["shards"]] == [check_archive(tar) for tar in tars]
    printed = capsys.readouterr().out
    assert re.search(r"20 of 20 records  [\d,]+ samples/s  1 rejected\n", printed)
    assert f"3 shards, 19 samples, {images} images" in printed
    assert "1 missing_image: an image file that does not exist" in printed


def test_a_second_run_gives_the_same_bytes(tool, folder):
    records = good_records(folder / "images", 40)
    records[7] = {"id": "bad"}
    (folder / "a.json").write_text(json.dumps(records))
    for out in ("one", "two"):
        assert shard(tool, folder, "--samples-per-shard", "9", out=out) == 0
        time.sleep(1.1)  # tar headers could hold times, in seconds
    first = contents(folder / "one")
    assert first == contents(folder / "two")
    assert list(first) == ["dataset.json", "rejected.jsonl", *(f"shard-00000{number}.tar" for number in range(5))]


def test_every_bad_record_is_listed_with_its_reason_and_the_others_are_written(tool, folder, capsys):
    images = folder / "images"
    draw = random.Random(0)
    for name in ("a.png", "../outside.png"):
        (images / name).write_bytes(picture(draw, "PNG"))
    (images / "broken.png").write_bytes((images / "a.png").read_bytes()[:40])
    (images / "folder.png").mkdir()
    (images / "b.gif").write_bytes(picture(draw, "GIF"))
    ask = turns("<image>", "A cat.")
    good = [{"id": "x", "image": "a.png", "conversations": ask}, {"id": 4, "conversations": turns("Hi", "Yes.")}]
    bad = {
        "not_an_object": "text",
        "not_json": {"id": "nan", "image": "a.png", "conversations": ask, "score": float("inf")},
        "bad_id": {"id": {"a": 1}, "image": "a.png", "conversations": ask},
        "duplicate_id": {"id": "x", "conversations": turns("Hi", "Again.")},
        "no_conversation": {"id": "c", "image": "a.png", "text": "A cat."},
        "unknown_role": {"id": "r", "conversations": [{"from": "user", "value": "Hi"}]},
        "non_text_value": {"id": "v", "conversations": [{"from": "gpt", "value": ["Hi"]}]},
        "no_answer": {"id": "n", "conversations": turns("Hi")},
        "turn_order": {"id": "t", "conversations": turns("Hi", "Hello.", "Bye")},
        "image_in_answer": {"id": "a", "image": "a.png", "conversations": turns("Hi", "<image>")},
        "bad_image_field": {"id": "f", "image": {"path": "a.png"}, "conversations": ask},
        "image_count": {"id": "m", "image": ["a.png", "a.png"], "conversations": ask},
        "outside_images": {"id": "o", "image": "../outside.png", "conversations": ask},
        "missing_image": {"id": "i", "image": "none.png", "conversations": ask},
        "unreadable_image": {"id": "u", "image": "folder.png", "conversations": ask},
        "unsupported_image": {"id": "s", "image": "b.gif", "conversations": ask},
        "undecodable_image": {"id": "d", "image": "broken.png", "conversations": ask},
    }
    assert set(bad) == set(tool.REASONS)
    (folder / "a.json").write_text(json.dumps([good[0], *bad.values(), good[1]]))
    assert shard(tool, folder, "--max-reject-rate", "1") == 0
    lines = rejections(folder / "out")
    assert [(line["file"], line["record"], line["reason"]) for line in lines] == [
        ("a.json", number, reason) for number, reason in enumerate(bad, 1)
    ]
    assert [line["id"] for line in lines] == [None, "nan", None, "x", *"crvntafmoiusd"]
    assert all(line["detail"] and len(line) == 5 for line in lines)
    details = {line["reason"]: line["detail"] for line in lines}
    assert details["duplicate_id"] == "record 0 of a.json has it too"
    assert details["image_count"] == "1 <image> marks in the conversation, 2 images"
    assert details["missing_image"].startswith("none.png: no such file")
    assert [m["__key__"] for m in read_members(folder / "out" / "shard-000000.tar")] == ["x", "4"]
    printed = capsys.readouterr().out
    assert all(f"1 {reason}: " in printed for reason in bad)
    assert json.loads((folder / "out" / "dataset.json").read_text())["rejected"] == Counter(bad.keys())


def test_a_rejected_record_does_not_take_its_id_from_a_later_good_one(tool, folder):
    records = [{"id": "a", "image": "none.png", "conversations": turns("<image>", "A cat.")}]
    records += [{"id": "a", "conversations": turns("Hi", "Yes.")}, {"id": "a", "conversations": turns("Hi", "No.")}]
    (folder / "a.json").write_text(json.dumps(records))
    assert shard(tool, folder, "--max-reject-rate", "0.7") == 0
    assert [line["reason"] for line in rejections(folder / "out")] == ["missing_image", "duplicate_id"]
    (members,) = read_members(folder / "out" / "shard-000000.tar")
    assert read_sample(members).turns[1] == ("gpt", "Yes.")


def test_records_without_an_id_get_keys_by_their_number_over_all_files(tool, folder):
    for name in ("a.json", "b.json"):
        (folder / name).write_text(json.dumps([{"conversations": turns("Hi", name)}] * 2))
    assert shard(tool, folder, json_files=("a.json", "b.json")) == 0
    keys = [members["__key__"] for members in read_members(folder / "out" / "shard-000000.tar")]
    assert keys == ["record-00000000", "record-00000001", "record-00000002", "record-00000003"]


@pytest.mark.parametrize(
    ("bad", "rate", "code"), [(5, None, 0), (6, None, 2), (0, "0", 0), (1, "0", 2), (29, "0.29", 0), (30, "0.29", 2)]
)
def test_more_bad_records_than_allowed_stop_the_tool(tool, folder, capsys, bad, rate, code):
    texts = ["Yes."] * (100 - bad) + [""] * bad
    records = [{"id": number, "conversations": turns("Hi", text)} for number, text in enumerate(texts)]
    (folder / "a.json").write_text(json.dumps(records))
    limit = () if rate is None else ("--max-reject-rate", rate)
    assert shard(tool, folder, "--samples-per-shard", "10", *limit) == code
    said = capsys.readouterr().err
    assert (folder / "out" / "dataset.json").exists() == (code == 0)
    if code:
        assert re.fullmatch(
            rf"error: too many bad records: {bad} of the first 100 \({bad} no_answer\), where {bad - 1} of 100 are "
            r"allowed; the last is no_answer: turn 1, from gpt, is empty\. Mend them, or raise --max-reject-rate; "
            r"\S+/out/rejected\.jsonl lists what was left out\. \S+/out is unfinished; delete it before another try\n",
            said,
        )
        assert len(rejections(folder / "out")) == bad
        assert not list((folder / "out").glob("*.tmp"))


def test_a_wrong_images_folder_shows_early_and_another_try_needs_no_clean_up(tool, folder, capsys):
    records = good_records(folder / "images", 40)
    for record in records:
        record["id"] = f"x{record['id']}"
    (folder / "a.json").write_text(json.dumps(records))
    (folder / "empty").mkdir()
    arguments = ["--json", str(folder / "a.json"), "--out", str(folder / "out"), "--samples-per-shard", "50"]
    assert tool.main([*arguments, "--images", str(folder / "empty")]) == 2
    assert "3 missing_image), where 2 of 40 are allowed" in capsys.readouterr().err
    assert list(contents(folder / "out")) == ["rejected.jsonl"]
    assert tool.main([*arguments, "--images", str(folder / "images")]) == 0
    assert rejections(folder / "out") == []


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("true", ""),
        ("rm a.json", r"a\.json: no such file"),
        ("echo '[{}' > a.json", r"a\.json: not valid JSON after 1 records"),
        ("echo '[]' > a.json", "no record became a sample; there is none"),
        ("""echo '[{"id": 1}]' > a.json""", r"too many bad records: 1 of the first 1 .*its keys are id"),
        ("rm -r images", r"--images \S+/images: no such folder"),
        ("rm -r images && touch images", r"--images \S+/images: no such folder"),
        ("touch out", r"--out \S+/out: is a file"),
        ("mkdir out && touch out/old.tar", r"--out \S+/out: holds shards already \(old\.tar\)"),
        ("mkdir out && touch out/shard-000004.tar.tmp", r"holds shards already \(shard-000004\.tar\.tmp\)"),
        ("ln -s /proc out", r"out/rejected\.jsonl: "),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(tool, folder, capsys, prepare, message):
    (folder / "a.json").write_text(json.dumps([{"id": 1, "conversations": turns("Hi", "Yes.")}]))
    subprocess.run(prepare, shell=True, cwd=folder, check=True)
    before = sorted(path.name for path in folder.glob("*.tar*"))
    assert shard(tool, folder) == (2 if message else 0)
    said = capsys.readouterr().err
    assert re.search(rf"\Aerror: .*{message}.*\n\Z", said) if message else said == ""
    assert sorted(path.name for path in folder.glob("*.tar*")) == before


def test_a_broken_last_file_shows_before_anything_is_written(tool, folder, capsys):
    (folder / "a.json").write_text(json.dumps([{"id": 1, "conversations": turns("Hi", "Yes.")}]))
    (folder / "b.json").write_text("[1, 2")
    assert shard(tool, folder, json_files=("a.json", "b.json")) == 2
    assert "b.json: not valid JSON" in capsys.readouterr().err
    assert not (folder / "out").exists()
    assert shard(tool, folder, json_files=("a.json", "a.json")) == 2
    assert "a.json: named twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples-per-shard", "0"], "--samples-per-shard 0: at least 1"),
        (["--max-reject-rate", "5"], "a share from 0 to 1"),
        (["--max-reject-rate", "nan"], "a share from 0 to 1"),
    ],
)
def test_arguments_out_of_range_are_refused(tool, folder, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        shard(tool, folder, *arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_memory_is_that_of_a_few_images(tool, folder):
    """100 images of 1 MB (BMP, which decodes at once) pass through less than 12 MB."""
    stream = io.BytesIO()
    Image.effect_noise((1000, 1000), 50).save(stream, "BMP")
    (folder / "images" / "a.png").write_bytes(stream.getvalue())
    records = [{"id": n, "image": "a.png", "conversations": turns("<image>", "Noise.")} for n in range(100)]
    (folder / "a.json").write_text(json.dumps(records))
    tracemalloc.start()
    assert shard(tool, folder, "--samples-per-shard", "60") == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (folder / "out" / "shard-000000.tar").stat().st_size > 60_000_000
    assert peak < 12_000_000


def command(folder: Path, *more: str) -> list[str]:
    names = ["--json", "a.json", "--images", "images", "--out", "out"]
    return [sys.executable, str(TOOL), *names, *more]


def slow_data(folder: Path, count: int) -> None:
    """Records over one image that takes some milliseconds to decode."""
    stream = io.BytesIO()
    Image.effect_noise((600, 600), 50).convert("RGB").save(stream, "JPEG")
    (folder / "images" / "a.jpg").write_bytes(stream.getvalue())
    records = [{"id": f"{n}", "image": "a.jpg", "conversations": turns("<image>", "Noise.")} for n in range(count)]
    (folder / "a.json").write_text(json.dumps(records))


def test_the_command_as_the_help_shows_it_without_torch(folder):
    records = good_records(folder / "images", 12)
    (folder / "a.json").write_text(json.dumps(records))
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    ran = subprocess.run(command(folder), cwd=folder, capture_output=True, text=True, timeout=60, env=environment)
    assert ran.returncode == 0, ran.stderr
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "mmtrain.data.records" in imported and not {"torch", "numpy", "webdataset", "rich"} & imported
    lines = ran.stdout.splitlines()
    assert lines[0] == "a.json: 12 records"
    assert re.fullmatch(r"12 of 12 records  [\d,]+ samples/s  0 rejected", lines[1])
    assert re.fullmatch(r"out: 1 shards, 12 samples, \d+ images", lines[2])
    assert lines[3:] == ["rejected: 0", "use it: data.shards=out/shard-*.tar"]
    assert len(list(read_members(folder / "out" / "shard-000000.tar"))) == 12


def test_help_teaches_by_example(tool, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "python tools/shard_dataset.py --json" in said and "rejected.jsonl" in said and "exit codes" in said
    assert all(reason in said for reason in tool.REASONS)


def test_on_a_terminal_a_bar_shows_samples_a_second(folder):
    slow_data(folder, 60)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command(folder), cwd=folder, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # Linux says so when the last holder of a terminal's other end is gone
            break
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"records \s*60/60 ━+ [\d,]+ samples/s 0 rejected left 0:00:00", text), text
    assert text.rstrip().endswith("use it: data.shards=out/shard-*.tar")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_run_leaves_no_half_shard(folder, number, code):
    slow_data(folder, 5000)
    arguments = command(folder, "--samples-per-shard", "30")
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not (folder / "out" / "shard-000001.tar").exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.005)
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    shards = sorted((folder / "out").glob("*.tar"))
    assert len(shards) >= 2 and [len(list(read_members(path))) for path in shards] == [30] * len(shards)
    unfinished = [path.name for path in (folder / "out").glob("*.tmp")]
    assert not (folder / "out" / "dataset.json").exists()
    if number == signal.SIGINT:
        assert unfinished == [] and said == "stopped by Ctrl-C; what out holds is not complete\n"
    else:
        assert len(unfinished) <= 1 and said == ""
    again = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "error: --out out: holds shards already (shard-000000.tar, " in again.stderr


def test_a_full_disk_is_one_line_and_leaves_whole_shards_only(folder):
    """A limit on the size of files stands for the disk: the kernel refuses the same writes, with EFBIG for ENOSPC."""
    slow_data(folder, 6)
    size = (folder / "images" / "a.jpg").stat().st_size
    small = [{"id": f"s{number}", "conversations": turns("Hi", "Yes.")} for number in range(6)]
    (folder / "a.json").write_text(json.dumps(small + json.loads((folder / "a.json").read_text())))
    ran = subprocess.run(
        command(folder, "--samples-per-shard", "6"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 * size, resource.RLIM_INFINITY)),
    )
    assert ran.returncode == 2
    assert re.fullmatch(
        r"error: out/shard-000001\.tar: cannot be written \(File too large\); what was written of it is removed\. "
        r"Free space, or choose another folder\. out is unfinished; delete it before another try\n",
        ran.stderr,
    )
    assert sorted(contents(folder / "out")) == ["rejected.jsonl", "shard-000000.tar"]
    assert len(list(read_members(folder / "out" / "shard-000000.tar"))) == 6


def test_a_reader_of_the_output_that_leaves_does_not_stop_the_tool(folder):
    slow_data(folder, 40)
    process = subprocess.Popen(command(folder), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0 and said == b""
    assert (folder / "out" / "dataset.json").exists()
