"""TensorBoard and Weights & Biases have what metrics.jsonl has, and decide nothing of how a run
ends.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_files import read_json
from processes import wait_for
from rank_runs import Run, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.config.load import load_config
from mmtrain.launching.machine import refuse_missing_libraries
from mmtrain.training import trackers

STEPS = 5
ALL = "run.report_to=[tensorboard,wandb]"
RUN = (
    f"train.max_steps={STEPS}",
    "parallel.pipeline=1",
    "parallel.threads_per_rank=1",
    "eval.fraction=0.2",
    "eval.every_steps=2",
)
RUN += (
    "data.caption_prompt=https://me:hunter2@host/",
    "optimizer.groups=[{match: [projector.linear_1], lr: 1e-4}]",
    "checkpoint.every_steps=3",
    "data.workers=1",
)
OFFLINE = {"WANDB_MODE": "offline"} | dict.fromkeys(
    ("HTTP_PROXY", "HTTPS_PROXY", "WANDB_BASE_URL"), "http://127.0.0.1:9"
)
SCORES = ("loss", "token_accuracy", "exact_match")
STEPWISE = (
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "pack_fill",
    "epoch",
    "samples",
    "quarantined",
)


@pytest.fixture(scope="module")
def reported(tiny, tmp_path_factory) -> Run:
    """A run that reports to all of them, wandb with every way to a network closed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["train", "data.shards=pipe:curl -H hunter2 https://host/"])
        return train(
            tiny / "config.yaml",
            *RUN,
            ALL,
            "eval.show_answers=2",
            f"run.dir={tmp_path_factory.mktemp('runs')}",
        )


def expected(run: Run) -> dict[str, dict[int, float]]:
    """What metrics.jsonl says of each step, by the trackers' names."""
    found: dict[str, dict[int, float]] = {}
    for line in run.lines("metrics.jsonl", "train"):
        told = {name: line[name] for name in STEPWISE} | {
            "peak_memory_bytes": line["peak_memory_bytes"]["max"]
        }
        told |= {f"lr/{group}": rate for group, rate in line["lr_groups"].items()}
        for name, value in told.items():
            found.setdefault(f"train/{name}", {})[line["step"]] = value
    for line in run.lines("metrics.jsonl", "eval", "eval_permuted"):
        for name in SCORES:
            found.setdefault(f"{line['kind']}/{name}", {})[line["step"]] = line[name]
    assert len(found) == 10 + 2 * len(SCORES)
    return found


def in_tensorboard(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"))
    return events.Reload()


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = in_tensorboard(folder)
    found = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert all(len(dict(pairs)) == len(pairs) for pairs in found.values()), "each step once"
    return {name: dict(pairs) for name, pairs in found.items()}


def texts(folder: Path) -> dict[tuple[str, int], str]:
    events = in_tensorboard(folder)
    return {
        (name, event.step): event.tensor_proto.string_val[0].decode()
        for name in events.Tags()["tensors"]
        for event in events.Tensors(name)
    }


def records_of(file: Path) -> Iterator[bytes]:
    """Records of a log as LevelDB's (doc/log_format.md), which wandb writes behind 7 bytes of its
    own.
    """
    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:  # no header fits: the block's end is empty
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def in_wandb(file: Path) -> tuple[dict[str, dict[int, Any]], dict[str, Any]]:
    """History by name and step, and the configuration, read by wandb's own messages."""
    history: dict[str, dict[int, Any]] = {}
    config: dict[str, Any] = {}
    for record in map(Record.FromString, records_of(file)):
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            assert record.history.step.num not in history.setdefault(name, {}), "each step once"
            history[name][record.history.step.num] = json.loads(item.value_json)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return history, config


def test_each_of_them_has_what_metrics_jsonl_has(reported):
    told = expected(reported)
    as_float32 = {
        name: {step: float(np.float32(value)) for step, value in of.items()}
        for name, of in told.items()
    }
    assert scalars(reported.folder) == as_float32

    (file,) = reported.folder.glob("wandb/offline-run-*/run-*.wandb")
    history, config = in_wandb(file)
    assert {name: history[name] for name in told} == told
    assert config["train"]["max_steps"] == STEPS and config["run"]["name"] == "tiny"


def test_no_login_of_the_configuration_nor_of_the_command_line_is_there(reported):
    files = [
        file for name in ("tensorboard", "wandb") for file in (reported.folder / name).rglob("*")
    ]
    contents = [file.read_bytes() for file in files if file.is_file()]
    assert sum(b"https://host/" in content for content in contents) >= 2, (
        "each has the address without the login"
    )
    assert not any(b"hunter2" in content for content in contents)


def test_answers_and_the_configuration_are_there_as_text(reported):
    answers = reported.lines("answers.jsonl")
    found = texts(reported.folder)
    (configuration,) = (
        text for (name, _), text in found.items() if name.startswith("configuration")
    )
    assert "max_steps: 5" in configuration
    for step in (0, STEPS):
        (said,) = (
            text for (name, at), text in found.items() if name.startswith("answers") and at == step
        )
        assert all(
            answer["truth"] in said and answer["key"] in said
            for answer in answers
            if answer["step"] == step
        )
    tables = sorted(reported.folder.glob("wandb/offline-run-*/files/media/table/*.json"))
    rows = [row for table in tables for row in read_json(table)["data"]]
    names = ("step", "key", "question", "given", "truth", "right")
    assert sorted(rows) == sorted([answer[name] for name in names] for answer in answers)


def test_a_run_that_goes_on_has_each_step_once(tiny, reported, tmp_path, monkeypatch):
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    shutil.copytree(reported.folder, tmp_path / "tiny", symlinks=True)
    here = (ALL, "eval.show_answers=2", f"run.dir={tmp_path}")
    again = train(
        tiny / "config.yaml",
        *RUN,
        *here,
        resume=tmp_path / "tiny" / "checkpoints" / "step-00000003",
    )
    told = expected(again)
    assert again.losses() == reported.losses()
    assert scalars(again.folder)["train/tokens_per_second"] == {
        step: float(np.float32(value)) for step, value in told["train/tokens_per_second"].items()
    }
    first, second = sorted(again.folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert first.name == second.name, "one run of wandb"
    history = in_wandb(second)[0]
    assert {name: history[name] for name in told} == told, "and all of it, from the first step on"
    assert [line["step"] for line in again.lines("answers.jsonl")] == [0, 0, STEPS, STEPS]


@pytest.mark.nightly
@pytest.mark.cpu_ranks
def test_those_that_fail_or_hang_are_said_once_and_left_out_and_the_run_ends_as_it_would(
    tiny, reported, tmp_path, monkeypatch
):
    """A file where TensorBoard's folder goes, and a server that never answers."""
    monkeypatch.setattr(trackers, "SECONDS_TO_BEGIN", 0.5)
    folder = shutil.copytree(reported.folder, tmp_path / "tiny", symlinks=True)
    shutil.rmtree(folder / "tensorboard")
    (folder / "tensorboard").write_text("")
    here = (ALL, "eval.show_answers=0", f"run.dir={tmp_path}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        run = train(
            tiny / "config.yaml", *RUN, *here, resume=folder / "checkpoints" / "step-00000003"
        )
    assert run.losses() == reported.losses()
    for name, why in (("tensorboard", "FileExistsError"), ("wandb", "CommError")):
        (said,) = (
            line
            for line in run.printed.splitlines()
            if line.startswith(f"{name} receives no more metrics")
        )
        assert why in said and said.endswith("metrics.jsonl has everything")


def train_record(step: int, loss: float | str) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "time": 1.8e9 + step,
        "peak_memory_bytes": {"mean": 6, "max": 7, "max_rank": 1},
        "loss": loss,
    }


def test_a_run_that_fails_leaves_what_it_reported_and_a_loss_that_is_not_finite_is_told(
    tiny, tmp_path
):
    config, said = load_config(tiny / "config.yaml"), []
    with JsonLines(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(**train_record(0, 1.5))
        metrics.write(**train_record(1, math.nan))
    told = trackers.Trackers(("tensorboard",), tmp_path, config, 2, said.append)
    told.take({"kind": "eval", "step": 2, "time": 0.0, "loss": 0.25})
    told.take(train_record(2, math.inf))
    wait_for(lambda: 2 in scalars(tmp_path).get("train/loss", {}), 60, "the last step")
    assert scalars(tmp_path)["eval/loss"] == {2: 0.25}
    assert list(scalars(tmp_path)["train/loss"].values()) == pytest.approx(
        [1.5, math.nan, math.inf], nan_ok=True
    )
    assert said == []


def test_those_that_fail_are_said_once_and_left_out(tiny, tmp_path):
    (tmp_path / "tensorboard").write_text("")
    (tmp_path / "metrics.csv").symlink_to("/dev/full")
    config, said = load_config(tiny / "config.yaml"), []
    told = trackers.Trackers(("csv", "tensorboard"), tmp_path, config, 0, said.append)
    for step in range(3):
        told.take(train_record(step, 1.5))
    assert sorted(line.partition(" ")[0] for line in said) == ["csv", "tensorboard"]


@pytest.mark.parametrize(
    ("key", "value", "library", "extra"),
    [
        ("run.report_to", "[tensorboard,wandb]", "wandb", "wandb"),
        ("model.llm.quantize", "nf4", "bitsandbytes", "quantize"),
    ],
)
def test_a_library_that_is_not_there_is_refused_with_how_to_get_it(
    tiny, monkeypatch, key, value, library, extra
):
    config = load_config(tiny / "config.yaml", [f"{key}={value}"])
    refuse_missing_libraries(config.model, config.run.report_to)
    monkeypatch.setitem(sys.modules, library, None)
    message = (
        f"{key}: {library} is not installed. Install it: "
        f"pip install 'mmtrain[{extra}]', or leave it out"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        refuse_missing_libraries(config.model, config.run.report_to)
