"""A LLaVA data set of made-up photographs, the same every time: what the benchmarks of data read.

how many --> FOLDER/llava.json, FOLDER/images/00000/000000000.jpg, ...
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from PIL import Image

JSON = "llava.json"
IMAGES = "images"
SHARDS = 8  # that it is cut into, at least: every worker of webdataset needs one
SIZES = ((640, 480), (480, 640), (512, 512))  # width, height
QUALITY = 88  # of JPEG; with the grain below some 55 kB a photograph, as in LLaVA's 558K
GRAIN = 5.0  # standard deviation of the noise of each pixel, of 255
# Cells along the canvas's longer side and amplitude of 255: shapes of all scales, as in photographs.
OCTAVES = ((5, 70.0), (17, 40.0), (60, 22.0), (200, 12.0), (700, 8.0))
CANVAS = (1920, 1440)
WORDS = re.findall(
    r"\w+",
    "a the red old small white street harbour boat woman man dog with near behind bright wooden stone table window "
    "standing walking under blue sky flowers garden market bridge two three children bicycle morning light snow",
)


def make_photographs(folder: Path, count: int) -> None:
    """Write `count` records with one image each into an empty folder; about 12 ms of one core an image."""
    draw = np.random.RandomState(0)
    canvas = _canvas(draw)
    records = []
    for number in range(count):
        name = f"{number // 1000:05d}/{number:09d}.jpg"
        path = folder / IMAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _photograph(canvas, draw).save(path, "JPEG", quality=QUALITY)
        caption = " ".join(draw.choice(WORDS, draw.randint(6, 16)))
        turns = [("human", "Describe the picture.\n<image>"), ("gpt", caption)]
        conversation = [{"from": speaker, "value": text} for speaker, text in turns]
        records.append({"id": f"{number:09d}", "image": name, "conversations": conversation})
    (folder / JSON).write_text(json.dumps(records), encoding="utf-8")


def _canvas(draw: np.random.RandomState) -> Image.Image:
    """A large picture of noise of all scales; photographs are cut out of it."""
    width, height = CANVAS
    total = np.full((height, width, 3), 128, np.float32)
    for cells, amplitude in OCTAVES:
        noise = draw.uniform(-amplitude, amplitude, (cells * height // width + 1, cells + 1, 3))
        for channel in range(3):
            plane = Image.fromarray(noise[:, :, channel].astype(np.float32))
            total[:, :, channel] += np.asarray(plane.resize(CANVAS, Image.Resampling.BICUBIC))
    total += draw.normal(0, GRAIN, (height, width, 1))
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def _photograph(canvas: Image.Image, draw: np.random.RandomState) -> Image.Image:
    width, height = SIZES[draw.randint(len(SIZES))]
    scale = draw.uniform(1, 2)
    left = draw.uniform(0, canvas.width - scale * width)
    top = draw.uniform(0, canvas.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    return canvas.resize((width, height), Image.Resampling.BILINEAR, box)
