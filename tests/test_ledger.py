"""What became of every sample: ledger, quarantine, counts, whatever the layout."""

from __future__ import annotations

import tarfile

import pytest
from json_files import read_lines
from rank_runs import train
from tiers import nightly

from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.shards.indexing import ensure_indexes

STEP = ("train.packs_per_step=8", "data.ledger=true", "data.pack_length=88")


def options_of(folder, name, *overrides):
    return f"run.dir={folder}", f"run.name={name}", "parallel.threads_per_rank=1", *STEP, *overrides


def trained(tiny, folder, name, *overrides):
    """Run to its end; the run's folder and what it printed."""
    run = train(tiny / "config.yaml", *options_of(folder, name, *overrides))
    return run.folder, run.printed


def read(path):
    return read_lines(path)


def epochs(run):
    return [line for line in read(run / "metrics.jsonl") if line["kind"] == "epoch"]


EPOCHS = 2
# pipeline, replicas, data workers
LAYOUTS = ((1, 1, 0), (4, 1, 1), (1, 2, 3), (1, 4, 1))


@pytest.fixture(scope="module", params=[LAYOUTS[::2], nightly(LAYOUTS)], ids=len)
def ledgers(request, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledgers")
    runs = {}
    for pipeline, data, workers in request.param:
        name = f"pp{pipeline}dp{data}w{workers}"
        layout = (
            f"parallel.pipeline={pipeline}",
            f"parallel.data={data}",
            f"data.workers={workers}",
        )
        runs[name] = trained(
            tiny, folder, name, *layout, "train.max_steps=null", f"train.epochs={EPOCHS}"
        )
    return runs


def test_epochs_have_one_ledger_whatever_pipeline_replicas_and_workers(ledgers):
    texts = {name: (run / "samples.jsonl").read_text() for name, (run, _) in ledgers.items()}
    assert len(set(texts.values())) == 1
    lines = read(ledgers["pp1dp1w0"][0] / "samples.jsonl")
    assert [line["step"] for line in lines] == list(range(len(lines)))
    counts = {f"{n:06d}": sum(line["keys"].count(f"{n:06d}") for line in lines) for n in range(96)}
    assert set(counts.values()) == {EPOCHS, EPOCHS + 1} and sum(counts.values()) == sum(
        len(line["keys"]) for line in lines
    )


def test_the_counts_of_every_epoch_add_up_and_the_last_step_is_filled_from_the_next(ledgers):
    for run, printed in ledgers.values():
        *whole, rest = epochs(run)
        for number, epoch in enumerate(whole):
            assert (epoch["epoch"], epoch["complete"], epoch["read"], epoch["trained"]) == (
                number,
                True,
                96,
                96,
            )
            assert f"epoch {number} is complete: 96 samples read: 96 trained" in printed
        assert len(whole) == EPOCHS and (rest["epoch"], rest["complete"]) == (EPOCHS, False)
        trained = sum(
            line["samples"] for line in read(run / "metrics.jsonl") if line["kind"] == "train"
        )
        assert trained == EPOCHS * 96 + rest["trained"]
        assert not (run / "quarantine.jsonl").exists()


@pytest.fixture
def damaged(tiny, tmp_path, make_tiny):
    """Shards of which two members were damaged after they had been indexed."""
    shards = make_tiny.make_tiny_shards(
        tmp_path / "shards", samples=60, shards=2, text_only_fraction=0
    )
    ensure_indexes(shards, Tokenization(str(tiny / "llm"), "plain"))
    with tarfile.open(shards[1]) as archive:
        members = {member.name: member for member in archive.getmembers()}
    content = bytearray(shards[1].read_bytes())
    image = next(
        member
        for name, member in members.items()
        if name.startswith("000040") and "json" not in name
    )
    offsets = {"000040": image.offset_data, "000041": members["000041.json"].offset_data}
    for offset in offsets.values():
        content[offset + 30] ^= 16
    shards[1].write_bytes(content)
    return tmp_path / "shards", shards[1], offsets


def test_damaged_samples_are_quarantined_by_name_and_counted(tiny, tmp_path, damaged):
    folder, shard, offsets = damaged
    layout = ("parallel.pipeline=1", "parallel.data=2", f"data.shards={folder}/*.tar")
    options = ("train.max_steps=null", "train.epochs=2", "data.max_quarantine_rate=0.05")
    run, printed = trained(tiny, tmp_path, "q", *layout, *options)
    lines = read(run / "quarantine.jsonl")
    assert {line["key"] for line in lines} == set(offsets)
    for line in lines:
        assert (line["shard"], line["offset"], line["reason"]) == (
            str(shard),
            offsets[line["key"]],
            "checksum",
        )
        keys = {
            key
            for step in read(run / "samples.jsonl")
            if step["step"] == line["step"]
            for key in step["keys"]
        }
        assert line["key"] not in keys
    assert sorted((line["epoch"], line["key"]) for line in lines)[:4] == [
        (epoch, key) for epoch in (0, 1) for key in sorted(offsets)
    ]
    steps = [line for line in read(run / "metrics.jsonl") if line["kind"] == "train"]
    assert sum(line["quarantined"] for line in steps) == len(lines)
    for epoch in epochs(run)[:2]:
        assert (epoch["read"], epoch["trained"], epoch["quarantined"], epoch["overlong"]) == (
            60,
            58,
            2,
            0,
        )
    assert "quarantined 00004" in printed and "quarantine.jsonl" in printed


def test_more_damage_than_allowed_ends_the_run_with_the_list(tiny, tmp_path, damaged):
    folder, shard, offsets = damaged
    options = (
        f"data.shards={folder}/*.tar",
        "data.max_quarantine_rate=0.02",
        "parallel.pipeline=1",
    )
    with pytest.raises(
        AssertionError, match=r"UserError: .*more than data.max_quarantine_rate=0.02 allows"
    ) as ended:
        trained(tiny, tmp_path, "q", *options)
    assert f"{shard}: sample 00004" in str(ended.value)
    assert {line["key"] for line in read(tmp_path / "q" / "quarantine.jsonl")} == set(offsets)


def test_samples_that_no_run_can_use_are_known_before_the_first_step(tiny, tmp_path, make_tiny):
    (shard,) = make_tiny.make_tiny_shards(tmp_path / "shards", samples=30, shards=1)
    with tarfile.open(shard) as archive:
        text = archive.getmember("000007.json")
    content = bytearray(shard.read_bytes())
    content[text.offset_data] = ord("]")
    shard.write_bytes(content)
    shard.with_name(shard.name + ".index").unlink()
    options = (
        f"data.shards={shard}",
        "parallel.pipeline=1",
        "train.max_steps=null",
        "train.epochs=1",
    )
    with pytest.raises(AssertionError, match=r"(?s)UserError: .*sample 000007: not_json"):
        trained(tiny, tmp_path, "strict", *options)
    # a start that failed leaves nothing that is in the way
    run, printed = trained(tiny, tmp_path, "strict", *options, "data.max_quarantine_rate=0.05")
    (line,) = (line for line in read(run / "quarantine.jsonl") if line["step"] is None)
    assert (line["key"], line["offset"], line["reason"]) == ("000007", text.offset_data, "not_json")
    assert "1 unusable" in printed
    (epoch,) = (epoch for epoch in epochs(run) if epoch["complete"])
    assert (epoch["read"], epoch["trained"], epoch["quarantined"]) == (30, 29, 1)
