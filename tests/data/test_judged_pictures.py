"""One judge of a picture: what training cannot read, shard rejects and an index names, whatever
file held it.
"""

import csv
import io
import json
import struct
from pathlib import Path

import pyarrow
import pytest
from archives import conversation, write_tar
from PIL import Image
from pyarrow import parquet

from mmtrain.__main__ import main
from mmtrain.api.generate import read_image
from mmtrain.base.errors import UserError
from mmtrain.data.samples.records import BadSample
from mmtrain.data.shards.indexing import scan_shard
from mmtrain.data.stream.images import ImageTransform
from mmtrain.layouts.layout import Tiling

TRANSFORM = ImageTransform(28, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bicubic", "resize")
READ = ("1", "L", "P", "LA", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I;16B")


def encode(image: Image.Image, file_format: str = "TIFF") -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format)
    return stream.getvalue()


def pictures() -> dict[str, tuple[bytes, bool]]:
    """Files by name, and whether a model can be trained on them."""
    found = {
        f"{mode.replace(';', '-')}.tif": (encode(Image.new(mode, (9, 8))), True) for mode in READ
    }
    for mode in ("I", "F"):
        found[f"{mode}.tif"] = encode(Image.new(mode, (9, 8))), False
    grey, alpha = encode(Image.new("LA", (9, 8))), struct.Struct("<HHIHH")
    # ExtraSamples: 1 says that the grey is multiplied by its alpha.
    premultiplied = grey.replace(alpha.pack(338, 3, 1, 2, 0), alpha.pack(338, 3, 1, 1, 0))
    assert premultiplied != grey
    found["La.tif"] = premultiplied, False
    for width, height in ((40_000, 2), (2, 40_000), (30_001, 1), (30_000, 1)):
        for kind in ("png", "bmp", "tiff"):
            content = encode(Image.new("L", (width, height)), kind)
            found[f"{width}x{height}.{kind}"] = content, max(width, height) <= 30_000
    return found


PICTURES = pictures()


def is_trained_on(content: bytes) -> bool:
    try:
        TRANSFORM.decode(content, Tiling(0, 0, 1))
    except BadSample:
        return False
    return True


def test_training_reads_what_the_names_say():
    assert {name: is_trained_on(content) for name, (content, _) in PICTURES.items()} == {
        name: expected for name, (_, expected) in PICTURES.items()
    }


@pytest.mark.parametrize("form", ["json", "jsonl", "csv", "parquet"])
def test_shard_rejects_what_training_refuses(tmp_path, form):
    images, file = tmp_path / "images", tmp_path / f"a.{form}"
    images.mkdir()
    rows = []
    for name, (content, _) in PICTURES.items():
        (images / name).write_bytes(content)
        rows.append({"id": name, "image": name, "caption": "A."})
    if form == "json":
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A."}]
        file.write_text(json.dumps([{**row, "conversations": turns} for row in rows]))
    elif form == "jsonl":
        asked = {"type": "image", "image": ""}
        messages = [
            {"role": "user", "content": [asked, "What?"]},
            {"role": "assistant", "content": "A."},
        ]
        lines = []
        for row in rows:
            asked["image"] = row.pop("image")
            lines.append(json.dumps({**row, "messages": messages}))
        file.write_text("\n".join(lines))
    elif form == "csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        held = [{**row, "image": {"bytes": PICTURES[row["id"]][0], "path": None}} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(held), file)
    arguments = [
        "--images",
        str(images),
        "--out",
        str(tmp_path / "out"),
        "--max-reject-rate",
        "1",
        "--workers",
        "1",
    ]
    assert main(["shard", "--from", str(file), *arguments]) == 0
    rejected = [
        json.loads(line)["id"]
        for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()
    ]
    assert rejected == [name for name, (_, is_read) in PICTURES.items() if not is_read]


def test_an_index_names_what_training_refuses(tmp_path):
    members = []
    for number, (name, (content, _)) in enumerate(PICTURES.items()):
        picture = f"{number}{Path(name).suffix}"
        members += [(f"{number}.json", conversation("<image>\nWhat?", "A.")), (picture, content)]
    index = scan_shard(write_tar(tmp_path / "a.tar", members), lambda sample: None)
    assert {*index.faults["llava"]} == {
        number for number, (_, is_read) in enumerate(PICTURES.values()) if not is_read
    }


def test_generate_refuses_an_opened_picture_of_unknown_range(tmp_path: Path):
    for picture in (Image.new("F", (9, 8)), tmp_path / "I.tif"):
        (tmp_path / "I.tif").write_bytes(PICTURES["I.tif"][0])
        with pytest.raises(UserError, match="no known range"):
            read_image(picture)
    assert read_image(Image.new("I;16", (9, 8))).mode == "RGB"
