"""Records of a run: steps stay within a size; answers keep their texts, and small upright pictures
of their own.
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from ranks import run_ranks

from mmtrain.base.json_lines import recorded
from mmtrain.config.load import dump_config, load_config
from mmtrain.config.schema import RunConfig
from mmtrain.engine.statistics import StepResult
from mmtrain.engine.step_clock import RankSeconds
from mmtrain.report.records import read_run
from mmtrain.runtime.failures import RankProgress
from mmtrain.runtime.rank import Rank
from mmtrain.runtime.stop import StopRequest
from mmtrain.training.answers import Answer
from mmtrain.training.console import Console
from mmtrain.training.records import (
    PICTURE_SIDE,
    PICTURED_QUESTIONS,
    PICTURES_OF_A_QUESTION,
    Recorder,
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


# ---- steps, and where the time of each rank went

BUSY = ("compute", "communication", "data", "fetching")


def spent(step: int, ranks: int) -> list[RankSeconds]:
    """Made-up times of a step, with all digits that a clock has."""
    draw = random.Random(step)
    found = []
    for _ in range(ranks):
        busy = [draw.random() for _ in BUSY]
        found.append(RankSeconds(4.5, *busy, draw.randrange(10**11)))
    return found


def record_steps(
    config: RunConfig, folder: Path, ranks: int, steps: range, saves: Sequence[int]
) -> None:
    """Record these steps as rank 0 of a job of `ranks` would."""
    dist.init_process_group("gloo")
    rank = Rank(0, ranks, "cpu", folder, None, RankProgress(), StopRequest())
    engine = SimpleNamespace(device=torch.device("cpu"), kernels=set())
    recorder = Recorder(config, rank, engine, Console(None, 1000), steps.start, {}, 0)
    for step in steps:
        counts = (96, 150, 150, 123_456, 45_678, 0)  # samples ... quarantined
        rates = (1 / 3, 2 / 3, 1e-3 / 3)  # loss, norm, rate
        result = StepResult(step, 0, *rates, {}, *counts, None, tuple(spent(step, ranks)))
        recorder.step(result, 4.5 + 1 / 3)
        if step + 1 in saves:
            recorder.ranks(step + 1)
    recorder.close()


def test_a_step_takes_2_kilobytes_at_512_ranks_in_the_mean_of_100(tiny, tmp_path):
    config = load_config(tiny / "config.yaml")
    run_ranks(1, record_steps, config, tmp_path, 512, range(100), [100])
    file = tmp_path / "metrics.jsonl"
    (sums,) = recorded(file, "ranks")
    assert (sums["step"], sums["steps"], len(sums["idle_seconds"])) == (100, 99, 512)
    assert file.stat().st_size <= 100 * 2000


def test_the_report_adds_up_the_times_of_each_rank_over_saves_and_resumes(tiny, tmp_path):
    config = load_config(tiny / "config.yaml")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    run_ranks(1, record_steps, config, tmp_path, 3, range(130), [1, 30, 130])
    run_ranks(1, record_steps, config, tmp_path, 3, range(130, 140), [140])
    found = [
        (line["step"], line["steps"]) for line in recorded(tmp_path / "metrics.jsonl", "ranks")
    ]
    assert found == [(1, 0), (30, 29), (100, 70), (130, 30), (140, 9)]

    run = read_run(tmp_path)
    assert (run.steps, run.timed_steps, run.begin.ranks) == (140, 138, 3) and not run.problems
    warm = [spent(step, 3) for step in range(140) if step not in (0, 130)]
    for kind in (*BUSY, "idle"):
        for rank in range(3):
            total = sum(getattr(step[rank], kind) for step in warm)
            assert run.times[kind][rank] == pytest.approx(total, rel=1e-12)
    of_steps = [spent(step, 3) for step in range(140)]
    highest = [max(step[rank].peak_memory_bytes for step in of_steps) for rank in range(3)]
    assert run.peaks == dict(enumerate(highest))
