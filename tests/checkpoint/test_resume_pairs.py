"""A run that goes on in another layout than the one that saved it is the run that was never
interrupted.
"""

from __future__ import annotations

import shutil
import tarfile
from typing import Any

import numpy as np
import pytest
import torch
from crash_job import MEASURED
from json_files import read_json
from rank_runs import Run, train
from safetensors.torch import load_file, save_file
from tiers import nightly

from mmtrain.data.prepare.sharding import write_shard
from mmtrain.data.samples.sample import Tokenization
from mmtrain.data.samples.templates import load_tokenizer
from mmtrain.data.shards.indexing import ensure_indexes

STEPS, CUT = 8, 3  # an epoch is six steps
RUN = (f"train.max_steps={STEPS}", "train.packs_per_step=4", "data.ledger=true", "data.workers=0")
SAVED = ("checkpoint.every_minutes=null", "checkpoint.keep_last=null")


def layout_of(pipeline: int, data: int) -> tuple[str, str]:
    return f"parallel.pipeline={pipeline}", f"parallel.data={data}"


def branch(
    run: Run, name: str, file, *overrides: str, cut: int, prefetch: int | str = "auto"
) -> Run:
    """Copy a run's folder, as it was left, and go on from its checkpoint after `cut` steps."""
    folder = run.folder.with_name(name)
    shutil.copytree(run.folder, folder)
    here = (f"run.dir={folder.parent}", f"run.name={name}")
    return train(
        file,
        *overrides,
        *here,
        resume=folder / "checkpoints" / f"step-{cut:08d}",
        prefetch=prefetch,
    )


def steps(run: Run, count: int = STEPS) -> list[dict[str, Any]]:
    """What was recorded of each step, without what measures the machine."""
    records = run.lines("metrics.jsonl", "train")
    assert [record["step"] for record in records] == list(range(count)), "each step once, in order"
    return [
        {key: value for key, value in record.items() if key not in MEASURED} for record in records
    ]


def tensors(run: Run, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state after `step` updates."""
    folder = run.checkpoint(step)
    return load_file(folder.tensors_file) | load_file(folder.optimizer_file)


def assert_bitwise(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_close(
    found: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    tolerance_of_largest: float = 1e-5,
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = tolerance_of_largest * float(tensor.abs().max())
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def damage(tiny, folder, make_tiny) -> str:
    """60 samples, of which one is no JSON, which its index says, and two were damaged after they
    had been indexed.
    """
    shards = make_tiny.make_tiny_shards(
        folder / "shards", samples=60, shards=2, text_only_fraction=0
    )
    places = {}
    for shard in shards:
        with tarfile.open(shard) as archive:
            places |= {member.name: (shard, member.offset_data) for member in archive.getmembers()}

    def flip(name, byte):
        shard, offset = places[name]
        content = bytearray(shard.read_bytes())
        content[offset + byte] ^= 16
        shard.write_bytes(content)

    flip("000007.json", 0)
    ensure_indexes(shards, Tokenization(str(tiny / "llm"), "plain"))
    flip("000030.json", 30)
    flip(
        next(name for name in places if name.startswith("000010") and not name.endswith("json")), 30
    )
    return f"{folder}/shards/*.tar"


@pytest.fixture(scope="module")
def damaged_data(tiny, make_tiny, tmp_path_factory) -> tuple[str, ...]:
    """Options of a run over damaged samples, of which one is found in each epoch."""
    shards = damage(tiny, tmp_path_factory.mktemp("damaged"), make_tiny)
    return (f"data.shards={shards}", "data.max_quarantine_rate=0.2", "data.pack_length=88")


@pytest.fixture(scope="module")
def reference(tiny, damaged_data, tmp_path_factory) -> Run:
    """An uninterrupted run on one rank, saved after every step."""
    here = (
        *layout_of(1, 1),
        f"run.dir={tmp_path_factory.mktemp('reference')}",
        "run.name=undisturbed",
    )
    return train(
        tiny / "config.yaml", *RUN, *SAVED, *damaged_data, "checkpoint.every_steps=1", *here
    )


HOST = ("parallel.streamed_layers=99",)
PEERS = (*HOST, "parallel.stream_from=peers", "parallel.weight_shards=2")
SLICES = ("parallel.encoder_ranks=[0,1]",)
# Each run resumes from a checkpoint of the run before it, a step later, in the next of these
# layouts (pipeline, data). The last two differ only in where frozen layers are: they have the same
# bits.
FEW = [((2, 1), SLICES, 4), ((1, 2), (), "auto"), ((1, 2), PEERS, "auto")]
RING = [((2, 1), SLICES, 4), ((4, 1), HOST, "auto"), ((1, 2), PEERS, "auto"), ((4, 2), (), "auto")]
RING += [((2, 2), (), "auto"), ((2, 2), PEERS, "auto")]


@pytest.mark.parametrize("ring", [FEW, nightly(RING)], ids=len)
def test_runs_that_resume_in_one_layout_after_another_are_the_run_that_never_stopped(
    tiny, reference, damaged_data, ring
):
    unusable, *damaged = reference.lines("quarantine.jsonl")
    assert unusable["step"] is None and damaged[0]["step"] < 2 and damaged[-1]["step"] > 5
    whole, rest = reference.lines("metrics.jsonl", "epoch")
    assert (whole["read"], whole["trained"], whole["quarantined"], whole["packs"]) == (
        60,
        57,
        3,
        23,
    )
    assert not rest["complete"]
    runs = [reference]
    for cut, (layout, placement, prefetch) in enumerate(ring, start=1):
        options = (
            *RUN,
            *SAVED,
            *damaged_data,
            "checkpoint.every_steps=1",
            f"data.workers={cut % 3}",
        )
        options += (*layout_of(*layout), *placement)
        run = branch(
            runs[-1],
            f"ring-{len(ring)}-{cut}",
            tiny / "config.yaml",
            *options,
            cut=cut,
            prefetch=prefetch,
        )
        assert [line["step"] for line in run.lines("metrics.jsonl", "resume")] == list(
            range(1, cut + 1)
        ), layout
        for name in ("samples.jsonl", "quarantine.jsonl"):
            assert (run.folder / name).read_bytes() == (reference.folder / name).read_bytes(), (
                layout
            )
        assert run.lines("metrics.jsonl", "epoch") == [whole, rest], layout
        counts = [one.checkpoint(STEPS).state["data"]["counts"] for one in (run, reference)]
        assert counts[0] == counts[1], layout
        assert_close(tensors(run, STEPS), tensors(reference, STEPS))
        found, expected = steps(run), steps(reference)
        for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
            np.testing.assert_allclose(
                [s.pop(key) for s in found], [s.pop(key) for s in expected], rtol=tolerance
            )
        assert found == expected, layout
        runs.append(run)
    assert steps(runs[-1]) == steps(runs[-2])
    assert_bitwise(tensors(runs[-1], STEPS), tensors(runs[-2], STEPS))
    discarded = [
        line["record"]
        for line in runs[1].lines("discarded.jsonl")
        if line["file"] == "quarantine.jsonl"
    ]
    assert discarded == [line for line in damaged if line["step"] >= 1]


@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 2)), nightly((4, 1), (2, 2))])
def test_what_trains_elsewhere_than_the_projector_travels_between_the_ranks(
    tiny, tmp_path, before, after
):
    trainable = "[projector, llm.layers.6, llm.layers.1.mlp, llm.layers.*.lora_*, vision]"
    adapters = ("model.lora.r=4", "model.lora.targets=[llm.layers.*.self_attn, vision.*]")
    few = 5
    options = (
        *RUN[1:],
        f"train.max_steps={few}",
        "model.llm.dtype=bfloat16",
        f"model.trainable={trainable}",
        *adapters,
    )
    reference = train(
        tiny / "config.yaml",
        *options,
        *SAVED,
        f"checkpoint.every_steps={CUT}",
        *layout_of(*before),
        f"run.dir={tmp_path}",
    )
    plan = read_json(reference.folder / "plan.json")
    assert [rank["optimizer"] for rank in plan["ranks"]].count("AdamW") > 1, "else nothing travels"
    trained = tensors(reference, CUT)
    assert {name.split(".")[0] for name in trained} == {"projector", "llm", "vision"}
    for name in ("llm.layers.6.self_attn.q_proj", "llm.layers.0.self_attn.v_proj.lora_B"):
        assert f"{name}.weight/exp_avg_sq" in trained
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    run = branch(
        reference, "resumed", tiny / "config.yaml", *options, *SAVED, *layout_of(*after), cut=CUT
    )
    losses = ([step["loss"] for step in steps(one, few)] for one in (run, reference))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    # Through a bfloat16 LLM: on some processors one of its roundings goes the other way in another
    # layout.
    assert_close(tensors(run, few), tensors(reference, few), tolerance_of_largest=1e-4)


def test_metrics_tell_of_saves_of_resuming_and_of_the_end(tiny, reference, damaged_data):
    saves = reference.lines("metrics.jsonl", "checkpoint")
    assert [line["step"] for line in saves] == list(range(1, STEPS + 1))
    for line in saves:
        assert list(line) == ["kind", "step", "bytes", "seconds"] and line["seconds"] > 0
        entries = read_json(reference.checkpoint(line["step"]).path / "manifest.json")["files"]
        assert line["bytes"] == sum(entry["bytes"] for entry in entries.values())
    end = reference.lines("metrics.jsonl")[-1]
    assert end == {"kind": "end", "step": STEPS}
    deterministic = "train.deterministic=true"  # which makes no difference on a CPU
    options = (*RUN, *damaged_data, deterministic, *layout_of(1, 1))
    once = branch(reference, "records", tiny / "config.yaml", *options, cut=CUT)
    assert_bitwise(tensors(once, STEPS), tensors(reference, STEPS))
    records = [
        record
        for record in once.lines("metrics.jsonl")
        if record["kind"] not in ("kernels", "checkpoint", "ranks")
    ]
    at = [record["kind"] for record in records].index("resume")
    before, begun = records[at - 2 : at]
    assert (before["kind"], before["step"], begun["kind"], begun["step"]) == (
        "train",
        CUT - 1,
        "begin",
        CUT,
    )
    path, changed = str(once.checkpoint(CUT).path), ["deterministic False -> True"]
    assert records[at] == {"kind": "resume", "step": CUT, "checkpoint": path, "changed": changed}
    assert records[at + 1]["kind"] == "train" and records[at + 1]["step"] == CUT
    assert records[-1] == end and records.count(end) == 1
    timed = sum(sums["steps"] for sums in once.lines("metrics.jsonl", "ranks"))
    assert timed == STEPS - 2, "all but the first of each process, whatever the resume cuts off"


def poison(tiny, folder, make_tiny):
    """A model that overflows where it reads '#', and data of which two samples have one."""
    make_tiny.make_tiny_llm(folder / "llm", "gemma2", layers=4, tied=False)
    file = folder / "llm" / "model.safetensors"
    weights = load_file(file)
    number = load_tokenizer(str(folder / "llm")).convert_tokens_to_ids("#")
    # finite; Gemma multiplies embeddings by sqrt(width)
    weights["model.embed_tokens.weight"][number, 0] = 3e38
    save_file(weights, file, metadata={"format": "pt"})
    make_tiny.make_tiny_shards(folder / "shards", samples=60, shards=2)
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "# and so on"}]
    samples = [(key, {"id": key, "conversations": turns}, []) for key in ("poison-0", "poison-1")]
    write_shard(folder / "shards" / "poison.tar", samples)
    return f"model.llm.path={folder / 'llm'}", f"data.shards={folder}/shards/*.tar"


@pytest.mark.nightly
def test_bad_steps_are_counted_over_a_resume(tiny, tmp_path, make_tiny):
    options = (*RUN, *poison(tiny, tmp_path, make_tiny))
    reference = train(
        tiny / "config.yaml",
        *options,
        *SAVED,
        "checkpoint.every_steps=1",
        f"train.max_bad_steps={STEPS}",
        *layout_of(2, 1),
        f"run.dir={tmp_path}",
    )
    bad = [line["step"] for line in reference.lines("bad_steps.jsonl")]
    assert 2 < len(bad) < STEPS - 1 and reference.checkpoint(STEPS).state["bad_steps"] == len(bad)
    cut = bad[0] + 1
    assert reference.checkpoint(cut).state["bad_steps"] == 1
    enough = (*options, f"train.max_bad_steps={len(bad)}", *layout_of(1, 1))
    run = branch(reference, "enough", tiny / "config.yaml", *enough, cut=cut)
    assert steps(run) == steps(reference)
    written, expected = (
        [line | {"ranks": []} for line in one.lines("bad_steps.jsonl")] for one in (run, reference)
    )
    assert written == expected, "but for the rank that held the value"
    assert run.checkpoint(STEPS).state["bad_steps"] == len(bad)
    too_few = (*options, f"train.max_bad_steps={len(bad) - 1}", *layout_of(1, 1))
    with pytest.raises(
        AssertionError,
        match=f"bad step {len(bad)} of the run, and train.max_bad_steps={len(bad) - 1}",
    ):
        branch(reference, "too_few", tiny / "config.yaml", *too_few, cut=cut)
