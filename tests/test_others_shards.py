"""Shards that other people's software wrote train as the same data do that came through `mmtrain shard`."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
import webdataset
from processes import running, wait_for
from rank_runs import Run, train
from tiny_models import describe, draw_scene, paint

from mmtrain.__main__ import main
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.stream.catalog import data_sets
from mmtrain.data.stream.loader import PackedBatches

datasets.disable_progress_bars()
OF_IMG2DATASET = Path(__file__).parent / "data" / "shards" / "img2dataset" / "00000.tar"  # its README says how
PER_SHARD = 8
PROMPT = "Describe the image."
SHORT = ("data.pack_length=384", "train.packs_per_step=2", "train.max_steps=null", "train.epochs=2", "data.ledger=true")
SHORT = (*SHORT, "parallel.pipeline=1", "parallel.threads_per_rank=1", "data.workers=0")

Row = dict  # id, images (suffix, bytes), caption


def rows(count: int, images: int = 1, seed: int = 0) -> list[Row]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        scenes = [draw_scene(draw) for _ in range(images)]
        suffix = ("png", "jpg")[number % 2]
        pictures = [(suffix, paint(scene, suffix)) for scene in scenes]
        made.append({"id": f"{number:06d}", "images": pictures, "caption": describe(scenes[0])})
    return made


def messages(row: Row) -> list[dict]:
    return [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": row["caption"]}]


def write_tars(folder: Path, made: list[Row], text: Callable[[Row], dict]) -> None:
    """webdataset's own writer; images of several are KEY.0.png, KEY.1.png, ..."""
    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/shard-%06d.tar", maxcount=PER_SHARD, verbose=0) as writer:
        for row in made:
            several = len(row["images"]) > 1
            files = {f"{n}.{suffix}" if several else suffix: data for n, (suffix, data) in enumerate(row["images"])}
            writer.write({"__key__": row["id"], **files, **text(row)})


def shard(source: Path, out: Path) -> None:
    arguments = ["--out", str(out), "--samples-per-shard", str(PER_SHARD), "--workers", "1"]
    assert main(["shard", "--from", str(source), "--images", str(source.parent), *arguments]) == 0


def of_captions(folder: Path, text: Callable[[Row], dict]) -> tuple[Path, Path]:
    made = rows(24)
    write_tars(folder / "theirs", made, text)
    features = datasets.Features(
        {"id": datasets.Value("string"), "image": datasets.Image(), "caption": datasets.Value("string")}
    )
    listed = [{"id": row["id"], "image": {"bytes": row["images"][0][1]}, "caption": row["caption"]} for row in made]
    datasets.Dataset.from_list(listed, features=features).save_to_disk(folder / "saved")
    shard(folder / "saved", folder / "ours")
    return folder / "theirs", folder / "ours"


def of_messages(folder: Path) -> tuple[Path, Path]:
    """Two images a sample, which the messages do not mark."""
    made = rows(24, images=2)
    record = lambda row: {"messages": messages(row), "images": [f"{row['id']}.{n}" for n in range(2)]}  # noqa: E731
    write_tars(folder / "theirs", made, lambda row: {"json": record(row)})
    listed = [
        {
            "id": row["id"],
            "images": [{"bytes": data, "path": None} for _, data in row["images"]],
            "messages": messages(row),
        }
        for row in made
    ]
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
        }
    )
    datasets.Dataset.from_list(listed, features=features).to_parquet(folder / "messages.parquet")
    shard(folder / "messages.parquet", folder / "ours")
    return folder / "theirs", folder / "ours"


def of_img2dataset(folder: Path) -> tuple[Path, Path]:
    (folder / "theirs").mkdir()
    shutil.copy(OF_IMG2DATASET, folder / "theirs")
    with tarfile.open(OF_IMG2DATASET) as archive:
        archive.extractall(folder, filter="data")
    texts = sorted(folder.glob("*.txt"))
    lines = [json.dumps({"id": t.stem, "image": f"{t.stem}.jpg", "caption": t.read_text()}) for t in texts]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    shard(folder / "captions.jsonl", folder / "ours")
    return folder / "theirs", folder / "ours"


SOURCES = {
    "KEY.txt of webdataset": lambda folder: of_captions(folder, lambda row: {"txt": row["caption"]}),
    "a caption in KEY.json": lambda folder: of_captions(folder, lambda row: {"json": {"caption": row["caption"]}}),
    "messages of webdataset": of_messages,
    "img2dataset": of_img2dataset,
}


NIGHTLY = ("a caption in KEY.json",)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in SOURCES]
)
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    """A folder of theirs, and one of the same data through `mmtrain shard`."""
    return SOURCES[request.param](tmp_path_factory.mktemp("pair"))


def options(shards: Path, template: str = "plain") -> list[str]:
    return [*SHORT, f"data.shards={shards}", f"data.template={template}"]


def batches(config: RunConfig) -> list:
    """An epoch of packs, and some of the next."""
    (form,) = {one.form for one in data_sets(config.data)}
    tars = sorted(Path(config.data.shards).glob("*.tar"))
    ensure_indexes(tars, config.model.llm.path, config.data.template, form=form)
    return list(itertools.islice(PackedBatches(config, 0, 1), 30))


@pytest.mark.parametrize("template", ["plain", pytest.param("llava_v1", marks=pytest.mark.nightly)])
def test_tokens_labels_and_pictures_are_those_of_the_same_data_through_mmtrain_shard(tiny, pair, template):
    theirs, ours = (batches(load_config(tiny / "config.yaml", options(folder, template))) for folder in pair)
    keys = {key for batch in ours for key in batch.keys}
    assert keys == {
        key.stem for tar in pair[1].glob("*.tar") for key in map(Path, names_in(tar)) if key.suffix == ".json"
    }
    for their, our in zip(theirs, ours, strict=True):
        assert their.keys == our.keys and their.faults == our.faults == ()
        for field in ("input_ids", "position_ids", "labels", "tiles"):
            assert torch.equal(getattr(their, field), getattr(our, field)), field


def names_in(tar: Path) -> list[str]:
    with tarfile.open(tar) as archive:
        return archive.getnames()


@pytest.mark.nightly
def test_a_run_trains_on_all_of_them_with_the_same_losses(tiny, pair, tmp_path):
    """To the last bit, with the same ledger; two epochs, whose counts add up."""
    runs = [
        train(tiny / "config.yaml", *options(folder), f"run.dir={tmp_path}", f"run.name={folder.name}")
        for folder in pair
    ]
    theirs, ours = runs
    assert theirs.losses() == ours.losses()
    assert theirs.lines("samples.jsonl") == ours.lines("samples.jsonl")
    count = sum(name.endswith(".json") for tar in pair[1].glob("*.tar") for name in names_in(tar))
    for run in runs:
        epochs = [line for line in run.lines("metrics.jsonl", "epoch") if line["complete"]]
        assert [(line["read"], line["trained"]) for line in epochs] == [(count, count)] * 2
        assert not (run.folder / "quarantine.jsonl").exists()
    found = (theirs.folder / "config.yaml").read_text()
    assert re.search(r"format: (caption|sharegpt)$", found, re.MULTILINE)


@pytest.mark.nightly
def test_two_ranks_that_were_killed_go_on_to_the_same_bits_ledger_and_quarantine(tiny, tmp_path):
    """Two pictures are damaged, one before its shard is indexed and one after; all else is trained on."""
    made = rows(40)
    made[3]["images"] = [("png", b"no picture")]
    write_tars(tmp_path / "theirs", made, lambda row: {"txt": row["caption"]})
    (form,) = {one.form for one in data_sets(load_config(tiny / "config.yaml", options(tmp_path / "theirs")).data)}
    tars = sorted((tmp_path / "theirs").glob("*.tar"))
    ensure_indexes(tars, str(tiny / "llm"), "plain", form=form)
    content = tars[2].read_bytes()
    tars[2].write_bytes(content.replace(made[17]["images"][0][1], bytes(len(made[17]["images"][0][1]))))
    settings = [*options(tmp_path / "theirs"), "parallel.pipeline=2", "train.epochs=4", "data.pack_length=88"]
    settings += ["checkpoint.every_steps=3", "data.max_quarantine_rate=0.2", f"run.dir={tmp_path}"]
    command = ["-m", "mmtrain.launch", tiny / "config.yaml", *settings]
    with running([*command, "run.name=whole"], tmp_path) as whole:
        assert whole.wait(300) == 0, whole.stderr
    metrics = tmp_path / "killed" / "metrics.jsonl"
    with running([*command, "run.name=killed"], tmp_path) as killed:
        wait_for(lambda: metrics.exists() and '"step": 7' in metrics.read_text(), 120, "eight steps")
        killed.kill()
    with running([*command, "run.name=killed"], tmp_path) as again:
        assert again.wait(300) == 0, again.stderr
    assert "going on after step" in again.stdout
    whole, resumed = (Run(tmp_path / name, "") for name in ("whole", "killed"))
    assert whole.losses() == resumed.losses() and len(whole.losses()) > 12
    for name in ("samples.jsonl", "quarantine.jsonl"):
        assert whole.lines(name) == resumed.lines(name)
    assert {line["key"] for line in whole.lines("quarantine.jsonl")} == {"000003", "000017"}
    epochs = [line for line in whole.lines("metrics.jsonl", "epoch") if line["complete"]]
    assert [(line["read"], line["trained"], line["quarantined"]) for line in epochs] == [(40, 38, 2)] * 4
