"""account.py: the equation of counts holds, and what breaks it is an error (test_ledger.py: the
same in real runs).
"""

import itertools
import tarfile

import pytest
from json_files import read_lines

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.indexing import ensure_indexes
from mmtrain.data.stream.account import CountError, SampleLog
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.layouts.registry import Require, Strip


def open_account(tiny, folder, *overrides):
    options = ["data.workers=0", "train.packs_per_step=5", "data.ledger=true", *overrides]
    config = load_config(tiny / "config.yaml", options)
    packed = PackedBatches(config, 0, 1)
    return packed, SampleLog(packed, None, folder, (), None)


def run_steps(account, stream, steps):
    """What the engine does with the stream, and the training loop with the account; the account's
    records.
    """
    records = []
    for step in range(steps):
        taken = list(itertools.islice(stream, 5))
        records += account.end_step(step, sum(batch.samples for batch in taken), 0)
    return records


def test_an_epoch_that_ends_within_a_step_is_closed_with_that_step(tiny, tmp_path, logged):
    packed, account = open_account(tiny, tmp_path)
    logged.clear()
    packs = [packed.order.first_pack(epoch) for epoch in range(3)]
    assert packs[1] % 5 != 0
    steps = -(-packs[2] // 5)
    records = run_steps(account, account.watch(iter(packed)), steps)
    assert [(one["epoch"], one["complete"], one["packs"], one["read"]) for one in records] == [
        (0, True, packs[1], 96),
        (1, True, packs[2] - packs[1], 96),
    ]
    assert logged == [f"epoch {epoch} is complete: 96 samples read: 96 trained" for epoch in (0, 1)]
    (rest,) = account.finish(steps)
    assert (rest["epoch"], rest["complete"], rest["packs"]) == (2, False, 5 * steps - packs[2])
    lines = read_lines(tmp_path / "samples.jsonl")
    assert sum(len(line["keys"]) for line in lines) == 2 * 96 + rest["trained"]


def test_overlong_samples_are_read_and_not_trained_on(tiny, tmp_path):
    packed, account = open_account(tiny, tmp_path, "data.pack_length=40")
    (epoch,) = run_steps(account, account.watch(iter(packed)), -(-packed.order.first_pack(1) // 5))
    assert epoch["overlong"] == packed.order.epoch(0).overlong > 5
    assert epoch["read"] == epoch["trained"] + epoch["overlong"] == 96


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_or_repeated_micro_batch_ends_the_run_with_the_epoch(tiny, tmp_path, lost):
    packed, account = open_account(tiny, tmp_path)
    batches = list(itertools.islice(packed, 40))
    batches = batches[:7] + batches[8:] if lost else [*batches[:8], *batches[7:]]
    sign = "-" if lost else r"\+"
    with pytest.raises(
        CountError, match=rf"epoch 0: 96 samples were planned in 24 packs, \d+ were .*: {sign}[1-9]"
    ):
        run_steps(account, account.watch(iter(batches)), 7)


def test_samples_that_are_unusable_from_the_start_count_among_the_damaged_in_proportion(
    tiny, tmp_path, make_tiny
):
    (shard,) = make_tiny.make_tiny_shards(
        tmp_path / "shards", samples=40, shards=1, text_only_fraction=0
    )
    with tarfile.open(shard) as archive:
        text, image = archive.getmember("000003.json"), archive.getmembers()[2 * 7 + 1]
    content = bytearray(shard.read_bytes())
    content[text.offset_data] = ord("]")
    shard.write_bytes(content)
    shard.with_name(shard.name + ".index").unlink()
    options = (f"data.shards={shard}", "data.max_quarantine_rate=0.03")
    open_account(tiny, tmp_path, *options)  # 1 of 40 is 2.5%
    content[image.offset_data + 100] ^= 1
    shard.write_bytes(content)
    packed, account = open_account(tiny, tmp_path, *options)
    stream = account.watch(iter(packed))
    with pytest.raises(UserError, match=r"2 of \d+ samples read are quarantined"):
        for step in range(20):
            taken = list(itertools.islice(stream, 5))
            account.end_step(
                step,
                sum(batch.samples for batch in taken),
                sum(len(batch.faults) for batch in taken),
            )


def test_samples_with_images_in_a_run_on_text_are_told_the_key_that_takes_their_text(
    tiny, tmp_path, make_tiny
):
    shards = make_tiny.make_tiny_shards(tmp_path / "shards", samples=20, shards=1)
    ensure_indexes(shards, Tokenization(str(tiny / "llm"), "llava_v1", Require()))
    alone = (
        "model.vision=null",
        "model.trainable=[llm.norm]",
        "data.template=llava_v1",
        "data.pack_length=512",
    )
    alone += (f"data.shards={shards[0]}",)
    with pytest.raises(
        UserError, match=r"model\.vision is null, and most have images: set data\.images=strip"
    ):
        open_account(tiny, tmp_path, *alone)
    ensure_indexes(shards, Tokenization(str(tiny / "llm"), "llava_v1", Strip()))
    open_account(tiny, tmp_path, *alone, "data.images=strip")
