import itertools
import json
import os
import random
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from sweeps import sweep

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.data.samples.templates import load_tokenizer
from mmtrain.data.shards.index import read_index, write_index
from mmtrain.data.stream import stored
from mmtrain.data.stream.images import image_transform
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.data.stream.stored import stored_data

STEP = ("train.packs_per_step=4", "train.packs_per_microbatch=1")


def open_batches(tiny, *overrides, replica=0, replicas=1, first_step=0, **more):
    config = load_config(tiny / "config.yaml", ["data.workers=0", *STEP, *overrides])
    return PackedBatches(config, replica, replicas, first_step, **more)


def first(batches, count):
    return list(itertools.islice(batches, count))


def keys_of(batches, steps, microbatches):
    """The keys of each of the next steps, in pack order."""
    stream = iter(batches)
    return [
        [key for batch in first(stream, microbatches) for key in batch.keys] for _ in range(steps)
    ]


def same(one, other):
    assert one.keys == other.keys and one.epochs == other.epochs
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.tiles is None) == (other.tiles is None)
    assert one.tiles is None or torch.equal(one.tiles, other.tiles)


def packs_of_an_epoch(batches):
    return batches.order.first_pack(1)


def stored_keys(folder):
    expected = []
    for tar in sorted(folder.glob("*.tar")):
        with tarfile.open(tar) as archive:
            expected += sorted({name[:6] for name in archive.getnames()})
    return expected


def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(tiny):
    expected = stored_keys(tiny / "shards")
    epochs = {}
    for batch in itertools.takewhile(lambda batch: batch.epochs[0] < 2, open_batches(tiny)):
        epochs.setdefault(batch.epochs[0], []).extend(batch.keys)
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1] and epochs[0] != expected


@pytest.fixture(scope="module")
def three_epochs(tiny):
    """The keys of each step of three epochs and the steps of them, for one replica without
    workers.
    """
    batches = open_batches(tiny, "train.max_steps=null", "train.epochs=3")
    return keys_of(batches, batches.max_steps, 4), batches.max_steps


def test_three_epochs_are_every_sample_three_times(tiny, three_epochs):
    steps, _ = three_epochs
    counts = {key: sum(step.count(key) for step in steps) for key in stored_keys(tiny / "shards")}
    assert set(counts.values()) <= {3, 4}, "the last step is filled up from the fourth epoch"
    assert sum(count == 4 for count in counts.values()) < len(steps[-1])


@pytest.mark.parametrize(("replicas", "workers"), sweep([(1, 3), (2, 1), (4, 3)], [(1, 3), (2, 1)]))
def test_the_sequence_of_keys_does_not_depend_on_workers_and_replicas(
    tiny, three_epochs, replicas, workers
):
    steps, count = three_epochs
    shares = [
        keys_of(
            open_batches(tiny, f"data.workers={workers}", replica=replica, replicas=replicas),
            count,
            4 // replicas,
        )
        for replica in range(replicas)
    ]
    assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == steps


@pytest.mark.slow
def test_resuming_at_any_step_with_any_layout_gives_the_rest_of_the_sequence(tiny, three_epochs):
    steps, count = three_epochs
    draw = random.Random("cut points")
    for trial in range(9):
        at = [draw.randrange(count)]
        if trial % 3 == 0:  # a second cut soon after the first one
            at.append(min(at[0] + draw.randrange(3), count - 1))
        resumed = []
        for begin, end in itertools.pairwise([*at, min(at[-1] + 5, count)]):
            replicas = draw.choice((1, 2, 4))
            workers = draw.choice((0, 0, 0, 1, 3)) if trial < 3 else 0
            shares = [
                keys_of(
                    open_batches(
                        tiny,
                        f"data.workers={workers}",
                        replica=replica,
                        replicas=replicas,
                        first_step=begin,
                    ),
                    end - begin,
                    4 // replicas,
                )
                for replica in range(replicas)
            ]
            resumed += [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)]
        assert resumed == steps[at[0] : at[0] + len(resumed)], f"cut at {at}"


GROUPS = ("data.pack_window=16", "data.shuffle_shards=1")  # several groups an epoch


def test_a_resume_computes_no_group_before_that_of_its_checkpoint(tiny):
    whole = open_batches(tiny, *GROUPS)
    steps = keys_of(whole, 40, 4)
    position = json.loads(json.dumps(whole.position_at(31)))
    resumed = open_batches(tiny, *GROUPS, first_step=31, position=position)
    compute = resumed.order.group
    computed = []

    def group(*which):
        computed.append(which)
        return compute(*which)

    resumed.order.group = group
    assert keys_of(resumed, 5, 4) == steps[31:36]
    assert min(computed) == tuple(position["group"][:2]) > (3, 0)


def test_a_position_of_another_order_is_not_taken(tiny):
    position = open_batches(tiny, *GROUPS).position_at(31)
    other = ("run.seed=5", *GROUPS)
    anew = open_batches(tiny, *other, first_step=31)
    assert keys_of(open_batches(tiny, *other, first_step=31, position=position), 5, 4) == keys_of(
        anew, 5, 4
    )


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_sequence_does_not_depend_on_what_the_cache_holds(tiny, tmp_path, workers):
    options = (*GROUPS, f"data.workers={workers}")
    steps = keys_of(open_batches(tiny, *options), 12, 4)
    assert keys_of(open_batches(tiny, *options), 12, 4) == steps
    files = list((tmp_path / "cache").rglob("*.npy"))
    assert len(files) == 11
    for path in files:
        os.truncate(path, path.stat().st_size - 1)
    assert keys_of(open_batches(tiny, *options), 12, 4) == steps
    shutil.rmtree(tmp_path / "cache")
    assert keys_of(open_batches(tiny, *options), 12, 4) == steps


def test_data_that_the_launcher_counted_is_not_looked_for_again(tiny, monkeypatch):
    steps = keys_of(open_batches(tiny), 3, 4)
    config = load_config(tiny / "config.yaml", [])
    data = stored_data(config)
    monkeypatch.setattr(stored, "expand_shards", None)
    monkeypatch.setattr(stored, "count_samples", None)
    assert keys_of(open_batches(tiny, data=data), 3, 4) == steps


def test_micro_batches_of_two_packs_are_two_of_the_same_packs(tiny):
    alone = first(open_batches(tiny), 8)
    pairs = first(open_batches(tiny, "train.packs_per_microbatch=2"), 4)
    assert [b.input_ids.tolist() for b in pairs] == [
        torch.cat([alone[2 * n].input_ids, alone[2 * n + 1].input_ids]).tolist() for n in range(4)
    ]


def test_a_micro_batch_may_span_two_epochs_and_counts_the_samples_of_each_pack(tiny):
    ones = first(open_batches(tiny), 77)
    sevens = first(open_batches(tiny, "train.packs_per_step=7", "train.packs_per_microbatch=7"), 11)
    assert [epoch for batch in sevens for epoch in batch.epochs] == [
        batch.epochs[0] for batch in ones
    ]
    assert [count for batch in sevens for count in batch.samples_of_packs] == [
        len(batch.keys) for batch in ones
    ]
    assert any(len(set(batch.epochs)) == 2 for batch in sevens)


def test_images_are_those_of_the_keys_that_the_batch_names(tiny):
    transform = image_transform(str(tiny / "vision"))
    stored = {}
    for tar in (tiny / "shards").glob("*.tar"):
        with tarfile.open(tar) as archive:
            for name in sorted(archive.getnames()):
                if not name.endswith(".json"):
                    stored.setdefault(name[:6], []).append(
                        transform.fitted(Image.open(archive.extractfile(name)))
                    )
    seen = 0
    for batch in first(open_batches(tiny, "train.packs_per_microbatch=4"), 8):
        expected = [image for key in batch.keys for image in stored.get(key, [])]
        assert batch.tiles.dtype == torch.uint8 and torch.equal(batch.tiles, torch.stack(expected))
        assert int((batch.input_ids == IMAGE_POSITION).sum()) == 16 * len(expected)
        seen += len(expected)
    assert seen > 96


def longer_than(tiny, length):
    """Keys of the samples that have more tokens, counted from the files."""
    tokenizer = load_tokenizer(str(tiny / "llm"))
    found = set()
    for tar in (tiny / "shards").glob("*.tar"):
        with tarfile.open(tar) as archive:
            for name in archive.getnames():
                if name.endswith(".json"):
                    record = json.load(archive.extractfile(name))
                    images = record["conversations"][0]["value"].count("<image>")
                    tokens = (
                        16 * images
                        + len(tokenizer(record["conversations"][1]["value"]).input_ids)
                        + 1
                    )
                    if tokens > length:
                        found.add(name[:6])
    return found


def test_overlong_samples_are_left_out_and_counted_or_refused(tiny):
    longer = longer_than(tiny, 40)
    assert len(longer) > 5
    batches = open_batches(tiny, "data.pack_length=40")
    epoch = batches.order.epoch(0)
    assert (epoch.drawn, epoch.overlong, epoch.unusable) == (96, len(longer), 0)
    keys = [key for batch in first(batches, packs_of_an_epoch(batches)) for key in batch.keys]
    assert sorted(keys) == sorted(set(stored_keys(tiny / "shards")) - longer)
    assert f", {len(longer)} too long for a pack" in batches.summary
    with pytest.raises(
        UserError, match=rf"tiny-\d+\.tar: sample {min(longer)}: \d+ tokens .* pack of 40 tokens"
    ):
        open_batches(tiny, "data.pack_length=40", "data.overlong=refuse")


def test_how_often_a_run_passes_over_its_data_is_said(tiny):
    steps, epochs = "train.max_steps=10", "train.max_steps=null"
    packs = packs_of_an_epoch(open_batches(tiny))
    assert packs > 20
    assert open_batches(tiny, steps).summary.endswith(
        f"; 10 steps of 4 packs are {40 / packs:.3g} epochs"
    )
    said = open_batches(tiny, epochs, "train.epochs=3").summary
    assert said.endswith(
        f"; {-(-3 * packs // 4)} steps of 4 packs are {-(-3 * packs // 4) * 4 / packs:.3g} epochs"
    )
    assert open_batches(tiny, "train.max_steps=100000").summary.endswith(
        f" are {400_000 / packs:,.0f} epochs"
    )
    assert "\n" not in open_batches(tiny, steps, f"train.packs_per_step={packs}").summary
    assert open_batches(tiny, steps, f"train.packs_per_step={2 * packs}").summary.endswith(
        f" epochs\na step takes {2 * packs} packs, but the data fill only {packs}: "
        "each step reads them 2.0 times. "
        "Lower train.packs_per_step, or add data"
    )


def test_a_pack_holds_no_more_images_than_allowed(tiny):
    most = max(
        len(batch.tiles) for batch in first(open_batches(tiny), 12) if batch.tiles is not None
    )
    assert most > 3
    capped = first(open_batches(tiny, "data.max_tiles_per_pack=3"), 48)
    assert max(len(batch.tiles) for batch in capped if batch.tiles is not None) == 3
    with pytest.raises(UserError, match=r"2 tiles do not fit into a pack of 128 tokens and 1 tile"):
        open_batches(tiny, "data.max_tiles_per_pack=1", "data.overlong=refuse")


def test_a_held_out_fraction_is_the_same_samples_in_every_run_and_never_trained_on(tiny):
    batches = open_batches(tiny, "eval.fraction=0.2")
    held_out = {batches.catalog.find(number).key for number in batches.catalog.held_out}
    assert 8 < len(held_out) < 32
    other = open_batches(tiny, "eval.fraction=0.2", "run.seed=9", "data.pack_length=64")
    assert {other.catalog.find(number).key for number in other.catalog.held_out} == held_out
    larger = open_batches(tiny, "eval.fraction=0.4")
    assert held_out < {larger.catalog.find(number).key for number in larger.catalog.held_out}
    trained = {
        key for batch in first(batches, 2 * packs_of_an_epoch(batches)) for key in batch.keys
    }
    assert trained == set(stored_keys(tiny / "shards")) - held_out


def test_several_data_sets_are_drawn_by_weight_and_named_in_the_keys(tiny, tmp_path, make_tiny):
    make_tiny.make_tiny_shards(tmp_path, samples=20, shards=2, seed=5)
    half, twice = (
        f"name: a, shards: {tiny}/shards/*.tar, weight: 0.5",
        f"name: b, shards: {tmp_path}/*.tar, weight: 2",
    )
    batches = open_batches(tiny, "data.shards=null", f"data.sets=[{{{half}}}, {{{twice}}}]")
    keys = [key for batch in first(batches, packs_of_an_epoch(batches)) for key in batch.keys]
    of_half = [key for key in keys if key.startswith("a/")]
    assert len(of_half) == len(set(of_half)) == 48
    assert sorted(key for key in keys if key.startswith("b/")) == sorted(
        f"b/{n:06d}" for n in range(20) for _ in "12"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_member_leaves_a_gap_and_everything_else_as_it_was(
    tiny, tmp_path, make_tiny, workers
):
    shards = make_tiny.make_tiny_shards(tmp_path, samples=24, shards=2, text_only_fraction=0)
    options = (f"data.shards={tmp_path}/*.tar", f"data.workers={workers}")
    sound = first(open_batches(tiny, *options), 12)
    content = bytearray(shards[0].read_bytes())
    with tarfile.open(shards[0]) as archive:
        image, text = (
            archive.getmember("000001.png" if "000001.png" in archive.getnames() else "000001.jpg"),
            archive.getmember("000004.json"),
        )
    content[image.offset_data + 200] ^= 4
    content[text.offset_data + 7] ^= 1
    shards[0].write_bytes(content)
    damaged = first(open_batches(tiny, *options), 12)
    faults = {fault.key: fault for batch in damaged for _, fault in batch.faults}
    assert {(key, fault.offset, fault.reason) for key, fault in faults.items()} == {
        ("000001", image.offset_data, "checksum"),
        ("000004", text.offset_data, "checksum"),
    }
    for before, after in zip(sound, damaged, strict=True):
        assert list(after.keys) == [key for key in before.keys if key not in faults]
        assert torch.equal(before.position_ids, after.position_ids)
        kept = after.labels != IGNORE
        assert torch.equal(after.labels[kept], before.labels[kept])
        assert torch.equal(after.input_ids[kept], before.input_ids[kept])
        lost = sum(key in faults for key in before.keys)
        assert after.samples == before.samples - lost and len(after.faults) == lost
        assert (0 if after.tiles is None else len(after.tiles)) * 16 == int(
            (after.input_ids == IMAGE_POSITION).sum()
        )


def test_a_sample_of_another_length_than_indexed_is_a_stale_index_and_an_error(
    tiny, tmp_path, make_tiny
):
    (shard,) = make_tiny.make_tiny_shards(tmp_path, samples=6, shards=1)
    open_batches(tiny, f"data.shards={shard}")
    index = read_index(shard)
    (text,) = index.texts.values()
    text.tokens[2] += 1
    write_index(shard, index)
    message = rf"^{shard}: sample 000002: \d+ tokens, but the index .* says \d+: .*--rebuild"
    with pytest.raises(UserError, match=message):
        first(open_batches(tiny, f"data.shards={shard}"), 4)


def test_shards_without_a_sample_that_fits_are_refused(tiny, tmp_path):
    with pytest.raises(UserError, match=r"no sample in 2 shards fits .* data\.pack_length=4 "):
        first(open_batches(tiny, "data.pack_length=4"), 1)
    tarfile.open(tmp_path / "empty.tar", "w").close()
    with pytest.raises(UserError, match=r"empty\.tar is an empty archive, without any file"):
        first(open_batches(tiny, f"data.shards={tmp_path}/empty.tar"), 1)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
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


def test_a_data_set_that_no_epoch_draws_from_is_refused(tiny, tmp_path, make_tiny):
    make_tiny.make_tiny_shards(tmp_path, samples=20, shards=1)
    sets = (
        f"[{{name: a, shards: {tiny}/shards/*.tar}}, {{name: few, shards: "
        f"{tmp_path}/*.tar, weight: 0.02}}]"
    )
    with pytest.raises(
        UserError, match=r"data\.sets: few is never drawn: weight 0\.02 x 20 samples"
    ):
        open_batches(tiny, f"data.sets={sets}")


def test_shards_without_a_usable_sample_say_why(tiny, tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for number in range(3):
            tar.addfile(tarfile.TarInfo(f"{number}.txt"))
    with pytest.raises(
        UserError, match=r"3 cannot be used \(3 no_json: a sample without KEY\.json"
    ):
        open_batches(tiny, f"data.shards={tmp_path}/s.tar", "data.format=llava")


@pytest.mark.slow
def test_images_of_workers_stay_as_they_are_while_others_are_made(tiny):
    batches = iter(open_batches(tiny, "data.workers=1", "train.packs_per_microbatch=2"))
    kept = first(batches, 12)  # more than a worker has places for
    again = first(iter(open_batches(tiny, "train.packs_per_microbatch=2")), 12)
    for one, other in zip(kept, again, strict=True):
        same(one, other)
    batches.close()  # its worker does not end by SIGTERM, which pytest would wait for at its exit
