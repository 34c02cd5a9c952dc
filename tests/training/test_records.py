"""What a run keeps of answers: their texts, and small upright pictures that are never taken for
each other.
"""

from __future__ import annotations

import io
import json
import time

from PIL import Image

from mmtrain.base.json_lines import recorded
from mmtrain.training.answers import Answer
from mmtrain.training.records import (
    PICTURE_SIDE,
    PICTURED_QUESTIONS,
    PICTURES_OF_A_QUESTION,
    Records,
)

PIXELS = 1_000_000  # of an image, at most
TURNED = 6  # EXIF: the stored picture's left side is its top


def photograph(size: tuple[int, int], colours: tuple[str, str], orientation: int = 1) -> bytes:
    """A picture whose left half has the first colour."""
    image, content, exif = Image.new("RGB", size, colours[1]), io.BytesIO(), Image.Exif()
    image.paste(colours[0], (0, 0, size[0] // 2, size[1]))
    exif[0x0112] = orientation
    image.save(content, "JPEG", exif=exif)
    return content.getvalue()


def test_pictures_are_small_turned_as_in_training_and_called_after_what_they_show(tmp_path):
    wide, red = (
        photograph((1200, 600), ("black", "white"), TURNED),
        photograph((40, 30), ("red", "red")),
    )
    answers = [
        Answer("a/1", "What?\x1b[31m", "white", "black \ud800", False, (wide, red)),
        Answer("a/2", "And now?", "red", "red", True, (red,)),
        Answer("a/3", "No picture?", "", "none", False),
    ]
    told: list[dict] = []
    records, began = Records(tmp_path, told.append, PIXELS, asks=True), time.time()
    records.answers(0, answers)
    records.answers(8, answers[1:2])
    records.close()
    lines = list(recorded(tmp_path / "answers.jsonl"))
    assert told == [
        {"kind": "answers", "step": 0, "answers": lines[:3]},
        {"kind": "answers", "step": 8, "answers": lines[3:]},
    ]
    fields = "step", "key", "question", "given", "truth", "right"
    said = [
        (answer.key, answer.question, answer.given, answer.truth, answer.right)
        for answer in answers
    ]
    assert [tuple(line[name] for name in fields) for line in lines] == [
        *((0, *one) for one in said),
        (8, *said[1]),
    ]
    assert all(began <= line["time"] <= time.time() for line in lines)
    (first, second), *others = (line["pictures"] for line in lines)
    assert others == [[second], [], [second]] and first != second
    assert {f"answers/{file.name}" for file in (tmp_path / "answers").iterdir()} == {first, second}
    with Image.open(tmp_path / first) as image:
        assert (image.format, image.mode, image.size) == (
            "JPEG",
            "RGB",
            (PICTURE_SIDE // 2, PICTURE_SIDE),
        )
        assert image.getpixel((96, 20))[0] < 10 and image.getpixel((96, 364))[0] > 245
    with Image.open(tmp_path / second) as image:
        assert image.size == (40, 30), "never larger than it was"


def test_pictures_are_bounded_in_number(tmp_path):
    image = photograph((8, 8), ("red", "green"))
    records = Records(tmp_path, [].append, PIXELS, asks=True)
    records.answers(0, [Answer("k", "?", "", "", False, (image,) * 20)] * 30)
    records.close()
    counts = [
        len(json.loads(line)["pictures"])
        for line in (tmp_path / "answers.jsonl").read_text().splitlines()
    ]
    assert counts == [PICTURES_OF_A_QUESTION] * PICTURED_QUESTIONS + [0] * (30 - PICTURED_QUESTIONS)


def test_other_ranks_and_runs_that_ask_nothing_write_no_answers(tmp_path):
    (tmp_path / "none").mkdir()
    told: list[dict] = []
    for folder, asks in ((None, True), (tmp_path / "none", False)):
        records = Records(folder, told.append, PIXELS, asks=asks)
        records.write("end", step=1)
        records.answers(0, [])
        records.close()
    assert [record["kind"] for record in told] == ["end", "end"]
    assert [file.name for file in (tmp_path / "none").iterdir()] == ["metrics.jsonl"]
