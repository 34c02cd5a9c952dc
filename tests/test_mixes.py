"""Nothing hangs on content: text, images, both or nothing at all in a micro-batch, replica or step,
in any mix.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
from rank_runs import train
from tiers import nightly
from tiny_models import describe, draw_scene, make_config, make_tiny_llm, make_tiny_vision, paint

from mmtrain.config.load import load_config
from mmtrain.data.prepare.sharding import KeyedSample, write_shards
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.stream.loader import PackedBatches

SHARDS, SAMPLES = 100, 6
PACKS = 4  # of a step, which has two a replica, one a micro-batch
SORTS = ("text", "images", "both")

# Two replicas of two ranks, and what trains there: model, layout.
RUNS = {
    "the encoder is frozen and runs ahead": (
        ["run.seed=0"],
        ["data.workers=1"],
    ),
    "the encoder trains, and each rank has two stages": (
        [
            "run.seed=1",
            "model.projector.type=shuffle_swiglu",
            "model.trainable=[vision.patch_embed, projector, llm.layers.1.mlp]",
        ],
        [
            "parallel.stages_per_rank=2",
            "parallel.boundaries=[0, 1, 2]",
            "parallel.recompute_layers=1",
        ],
    ),
}


def draw_samples(draw: random.Random) -> Iterator[KeyedSample]:
    """Shard after shard, most of one sort: text, images with the one letter that supervision needs,
    or both.
    """
    for shard in range(SHARDS):
        sorts = draw.sample(SORTS, draw.choice((1, 1, 1, 2)))
        for number in range(SAMPLES):
            sort, scene = draw.choice(sorts), draw_scene(draw)
            key, images = (
                f"{sort}-{shard:03d}{number}",
                0 if sort == "text" else draw.choice((1, 1, 2)),
            )
            turns = (
                ("human", "<image>\n" * images),
                ("gpt", "a" if sort == "images" else describe(scene)),
            )
            record = {
                "conversations": [{"from": speaker, "value": text} for speaker, text in turns],
                "image": [f"{key}.{i}.png" for i in range(images)],
            }
            yield key, record, [("png", paint(scene, "png"))] * images


def damage(tar: Path, share: float, draw: random.Random) -> None:
    """Change a byte in this share of the files: checksums will tell when they are read, and leave
    gaps.
    """
    with tarfile.open(tar) as archive:
        files = archive.getmembers()
    content = bytearray(tar.read_bytes())
    for file in draw.sample(files, round(share * len(files))):
        content[file.offset_data + file.size // 2] ^= 1
    tar.write_bytes(content)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """A run's configuration, over shards of one sort or two, some full of damage."""
    folder, draw = tmp_path_factory.mktemp("mixed"), random.Random(0)
    make_tiny_llm(folder / "llm", layers=2)
    make_tiny_vision(folder / "vision")
    (folder / "shards").mkdir()
    write_shards(draw_samples(draw), folder / "shards", SAMPLES)
    tars = sorted((folder / "shards").glob("*.tar"))
    ensure_indexes(tars, Tokenization(str(folder / "llm"), "plain"))
    for tar in tars:
        damage(tar, draw.choice((0, 0, 0, 0.2, 1)), draw)
    return make_config(folder, "mixed", pipeline=1)


def content(batches: Sequence[tuple[str, ...]]) -> str:
    """What samples of these keys hold together."""
    sorts = {key.partition("-")[0] for keys in batches for key in keys}
    return "nothing" if not sorts else sorts.pop() if len(sorts) == 1 else "both"


FIRST, _ = RUNS


@pytest.mark.parametrize(
    ("run", "steps", "pairs"),
    [(FIRST, 50, 12), *(nightly(run, 100, 14) for run in RUNS)],
)
def test_every_mix_of_contents_trains_as_in_one_process_and_ends(
    mixed, tmp_path, run, steps, pairs
):
    model, layout = RUNS[run]
    count = steps * PACKS
    sizes = [
        f"train.max_steps={steps}",
        f"train.packs_per_step={PACKS}",
        "data.pack_length=48",
        "data.workers=0",
    ]
    order = ["data.shuffle_shards=1", "data.pack_window=6", "data.max_quarantine_rate=1"]
    common = [
        f"run.dir={tmp_path}",
        "parallel.threads_per_rank=1",
        "model.vision.select_layer=-4",
        *sizes,
        *order,
    ]

    whole = train(mixed, *common, *model, "run.name=whole").lines("metrics.jsonl", "train")
    cut = train(
        mixed, *common, *model, "run.name=cut", "parallel.pipeline=2", "parallel.data=2", *layout
    )
    for expected, found in zip(whole, cut.lines("metrics.jsonl", "train"), strict=True):
        for key in ("samples", "images", "tokens", "supervised_tokens", "quarantined", "no_update"):
            assert found[key] == expected[key], (found["step"], key)
        if expected["loss"] is None:
            assert found["loss"] is None and found["grad_norm"] == expected["grad_norm"] == 0
            continue
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5), (found["step"], key)

    # What there was to hang on: every pair of the replicas' contents, and steps without an image,
    # and without labels.
    read = islice(PackedBatches(load_config(mixed, [*common, *model]), 0, 1), count)
    keys = [batch.keys for batch in read]
    firsts = range(0, count, PACKS)
    assert len({tuple(content([one]) for one in keys[i : i + PACKS]) for i in firsts}) >= steps / 2
    assert len({(content(keys[i : i + 2]), content(keys[i + 2 : i + 4])) for i in firsts}) >= pairs
    assert {content(keys[i : i + PACKS]) for i in firsts} == {*SORTS, "nothing"}
    assert len(whole) == steps and {line["images"] == 0 for line in whole} == {True, False}
    assert (
        any(line["no_update"] for line in whole) and max(line["quarantined"] for line in whole) > 4
    )
