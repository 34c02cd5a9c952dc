import itertools
import json
import os
import signal
import tarfile
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmtrain.config import load_config
from mmtrain.data.images import image_transform
from mmtrain.data.loader import PackedBatches, epoch_samples, load_tokenizer
from mmtrain.data.samples import IGNORE, IMAGE_POSITION
from mmtrain.data.shard_list import expand_shards
from mmtrain.data.shards import read_members
from mmtrain.errors import UserError

STEP = ("train.packs_per_step=4", "train.packs_per_microbatch=1")


def open_batches(tiny, *overrides, replica=0, replicas=1):
    return PackedBatches(load_config(tiny / "config.yaml", ["data.workers=0", *STEP, *overrides]), replica, replicas)


def first(batches, count):
    return list(itertools.islice(batches, count))


def same(one, other):
    assert one.keys == other.keys
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.images is None) == (other.images is None)
    assert one.images is None or torch.equal(one.images, other.images)


def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(tiny):
    expected = []
    for tar in sorted((tiny / "shards").glob("*.tar")):
        with tarfile.open(tar) as archive:
            expected += sorted({name[:6] for name in archive.getnames()})
    packs = open_batches(tiny).packs()
    keys = [document.sample.key for members in itertools.islice(packs, 60) for document in members.documents]
    epochs = [keys[: len(expected)], keys[len(expected) : 2 * len(expected)]]
    counted = [members.epoch for members in itertools.islice(open_batches(tiny).packs(), 60) for _ in members.documents]
    assert counted[: 2 * len(expected)] == [0] * len(expected) + [1] * len(expected)
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1] and epochs[0] != expected


def test_an_epoch_mixes_samples_inside_and_across_shards(tiny):
    shards = expand_shards(f"{tiny}/shards/*.tar")
    stored = [[members["__key__"] for members in read_members(shard)] for shard in shards]
    keys = [sample.key for sample in epoch_samples(shards, seed=0, epoch=0)]
    assert keys not in (stored[0] + stored[1], stored[1] + stored[0])
    assert 10 < sum(key in stored[0] for key in keys[:48]) < 38


def test_the_order_is_a_function_of_the_seed(tiny):
    keys = {seed: [b.keys for b in first(open_batches(tiny, f"run.seed={seed}"), 4)] for seed in (0, 1)}
    assert keys[0] == [b.keys for b in first(open_batches(tiny, "run.seed=0"), 4)]
    assert keys[0] != keys[1]


def test_replicas_share_each_step_of_one_list_of_packs(tiny):
    alone = first(open_batches(tiny), 48)
    halves = [first(open_batches(tiny, replica=replica, replicas=2), 24) for replica in (0, 1)]
    together = []
    for step in range(12):
        together += halves[0][2 * step : 2 * step + 2] + halves[1][2 * step : 2 * step + 2]
    for one, other in zip(alone, together, strict=True):
        same(one, other)


def test_micro_batches_of_two_packs_are_two_of_the_same_packs(tiny):
    alone = first(open_batches(tiny), 8)
    pairs = first(open_batches(tiny, "train.packs_per_microbatch=2"), 4)
    assert [b.input_ids.tolist() for b in pairs] == [
        torch.cat([alone[2 * n].input_ids, alone[2 * n + 1].input_ids]).tolist() for n in range(4)
    ]


def test_a_micro_batch_is_of_the_epoch_of_its_last_pack(tiny):
    packs = [members.epoch for members in itertools.islice(open_batches(tiny).packs(), 77)]
    assert packs.index(1) % 7 != 0, "some micro-batch holds packs of two epochs"
    sevens = first(open_batches(tiny, "train.packs_per_step=7", "train.packs_per_microbatch=7"), 11)
    assert [batch.epoch for batch in sevens] == packs[6::7]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(tiny, workers):
    alone = open_batches(tiny, replica=1, replicas=2)
    inline = first(alone, 30)
    helped = open_batches(tiny, f"data.workers={workers}", replica=1, replicas=2)
    for one, other in zip(inline, first(helped, 30), strict=True):
        same(one, other)


def test_images_are_those_of_the_keys_that_the_batch_names(tiny):
    transform = image_transform(str(tiny / "vision"))
    stored = {}
    for tar in (tiny / "shards").glob("*.tar"):
        with tarfile.open(tar) as archive:
            for name in sorted(archive.getnames()):
                if not name.endswith(".json"):
                    image = Image.open(archive.extractfile(name))
                    stored.setdefault(name[:6], []).append(transform(image))
    seen = 0
    for batch in first(open_batches(tiny, "train.packs_per_microbatch=4"), 8):
        expected = [image for key in batch.keys for image in stored.get(key, [])]
        assert torch.equal(batch.images, torch.stack(expected))
        assert int((batch.input_ids == IMAGE_POSITION).sum()) == 16 * len(expected)
        seen += len(expected)
    assert seen > 96


def test_a_batch_counts_its_samples_and_their_tokens(tiny):
    padded = False
    for batch in first(open_batches(tiny, "data.pack_length=48", "train.packs_per_microbatch=2"), 10):
        documents = [
            row[begin:end]
            for row, positions in zip(batch.labels, batch.position_ids, strict=True)
            for begin, end in itertools.pairwise([*(positions == 0).nonzero().flatten().tolist(), len(row)])
        ]
        real = [labels for labels in documents if (labels != IGNORE).any()]  # padding has no label
        assert batch.samples == len(batch.keys) == len(real)
        assert batch.tokens == sum(map(len, real))
        padded = padded or len(real) < len(documents)
    assert padded


def test_every_overlong_sample_of_an_epoch_is_counted_once(tiny):
    tokenizer = load_tokenizer(str(tiny / "llm"))
    longer = 0
    for tar in (tiny / "shards").glob("*.tar"):
        with tarfile.open(tar) as archive:
            for name in archive.getnames():
                if name.endswith(".json"):
                    record = json.load(archive.extractfile(name))
                    images = record["conversations"][0]["value"].count("<image>")
                    longer += 16 * images + len(tokenizer(record["conversations"][1]["value"]).input_ids) + 1 > 40
    assert longer > 5
    packs = open_batches(tiny, "data.pack_length=40").packs()
    skipped = kept = 0
    while kept < 96 - longer:
        members = next(packs)
        skipped, kept = skipped + members.skipped, kept + len(members.documents)
    assert skipped == longer


def test_skipped_samples_add_up_over_replicas(tiny):
    halves = [open_batches(tiny, "data.pack_length=40", replica=replica, replicas=2) for replica in (0, 1)]
    skipped = sum(batch.skipped for half in halves for batch in first(half, 10))
    packs = itertools.islice(open_batches(tiny, "data.pack_length=40").packs(), 20)
    assert skipped == sum(members.skipped for members in packs) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_ends_the_run_with_its_shard_and_key(tiny, tmp_path, make_tiny, workers):
    (shard,) = make_tiny.make_tiny_shards(tmp_path, samples=6, shards=1, text_only_fraction=0)
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as archive:
        member = archive.getmembers()[3]
        content[member.offset_data : member.offset_data + 8] = b"nonsense"
    shard.write_bytes(content)
    batches = open_batches(tiny, f"data.shards={shard}", f"data.workers={workers}")
    with pytest.raises(UserError, match=rf"^{shard}: sample 000001, image 0: not a readable image"):
        first(batches, 20)


def test_shards_without_a_sample_that_fits_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match=r"no sample in 2 shards fits .* data\.pack_length=4 "):
        first(open_batches(tiny, "data.pack_length=4"), 1)
    tarfile.open(tmp_path / "empty.tar", "w").close()
    with pytest.raises(UserError, match="no sample in 1 shards fits into a pack: they are empty"):
        first(open_batches(tiny, f"data.shards={tmp_path}/empty.tar"), 1)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
def test_workers_end_with_a_killed_rank(tiny):
    ready, tell = os.pipe()
    rank = os.fork()
    if rank == 0:
        stream = iter(open_batches(tiny, "data.workers=2"))
        next(stream)
        os.write(tell, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        workers = children(rank)
        assert len(workers) == 2 and all(map(alive, workers))
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    deadline = time.monotonic() + 2
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, workers))
