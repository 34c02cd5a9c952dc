"""LLaVA data sets made on the fly for the sharding tool's tests, the tool's command line, and what
it has written.
"""

import io
import json
import random
import sys
from pathlib import Path

import webdataset
from conftest import TOOLS
from PIL import Image

TOOL = TOOLS / "shard_dataset.py"


def command(*more: str) -> list[str]:
    """The tool over a.json and images/, into out/, of the current folder."""
    return [
        sys.executable,
        str(TOOL),
        "--json",
        "a.json",
        "--images",
        "images",
        "--out",
        "out",
        *more,
    ]


def picture(draw: random.Random, file_format: str) -> bytes:
    stream = io.BytesIO()
    size = (draw.randint(1, 12), draw.randint(1, 12))
    Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(stream, file_format)
    return stream.getvalue()


def turns(*texts: str) -> list[dict]:
    return [
        {"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)
    ]


def good_records(images: Path, count: int, seed: int = 0) -> list[dict]:
    """Records of every accepted kind, and their image files: none, one, several; some in folders;
    unicode; text ids.
    """
    draw = random.Random(seed)
    texts = [
        "A cat.",
        "図書館 \U0001f600",
        "two\nlines",
        'quotes " and \\',
        "<b>&amp;</b>",
        "a\u2028b",
    ]
    records = []
    for number in range(count):
        names = [
            f"{draw.choice(['', 'deep/er/'])}{seed}-{number}-{index}.{draw.choice(['jpg', 'JPEG', 'png', 'webp'])}"
            for index in range(draw.choice([0, 1, 1, 1, 2, 12]))
        ]
        for name in names:
            (images / name).parent.mkdir(parents=True, exist_ok=True)
            file_format = {"jpg": "JPEG", "JPEG": "JPEG", "png": "PNG", "webp": "WEBP"}[
                name.rpartition(".")[2]
            ]
            (images / name).write_bytes(picture(draw, file_format))
        marks = "<image>\n" * len(names)
        record = {
            "conversations": turns(
                marks + draw.choice(texts), *draw.choices(texts, k=draw.choice([1, 3]))
            )
        }
        name = f"{seed}-{number:04d}"
        record["id"] = draw.choice([name, 1000 * seed + number, f"coco/{name}.jpg", f"é{name}"])
        if len(names) == 1:
            record["image"] = draw.choice([names[0], names])
        elif names or draw.random() < 0.5:
            record["image"] = names or None
        records.append(record)
    return records


def damaged_records(folder: Path, count: int) -> list[dict]:
    """Good records, and about one in five bad by its text, its image or its id."""
    draw, records = random.Random(1), good_records(folder / "images", count)
    for number in draw.sample(range(count), count // 5):
        kind = draw.randrange(3)
        if kind == 0:
            records[number]["conversations"] = []
        elif kind == 1:
            records[number] |= {"image": "none.png", "conversations": turns("<image>", "None.")}
        else:
            records[number]["id"] = records[draw.randrange(number + 1)]["id"]
    return records


def slow_data(folder: Path, count: int) -> None:
    """Records over one image that takes some milliseconds to decode."""
    stream = io.BytesIO()
    Image.effect_noise((600, 600), 50).convert("RGB").save(stream, "JPEG")
    (folder / "images" / "a.jpg").write_bytes(stream.getvalue())
    records = [
        {"id": f"{n}", "image": "a.jpg", "conversations": turns("<image>", "Noise.")}
        for n in range(count)
    ]
    (folder / "a.json").write_text(json.dumps(records))


def read_members(tar: Path) -> list[dict]:
    """What webdataset finds in a tar."""
    return list(webdataset.tariterators.tarfile_samples([{"url": str(tar)}]))


def keys_in(tar: Path) -> list[str]:
    return [members["__key__"] for members in read_members(tar)]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"
    }
