"""The refusal of a run that does not fit names a change with which it fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import mmtrain
from mmtrain.base.errors import UserError
from mmtrain.plan.plan import Plan

DEMO = "example:llava_pp4"
LORA = ["model.lora.r=16", "model.trainable=[projector, llm.layers.*.lora_*]"]
ENCODER = ["model.trainable=[projector, vision]"]
ALL = ["model.trainable=[projector, vision, llm]"]
MANY_PACKS, LONG = "train.packs_per_microbatch=4", "data.pack_length=4096"


@pytest.fixture(scope="module")
def vicuna(tmp_path_factory) -> Path:
    """Vicuna-7B with CLIP: shapes are recorded, weights are not needed."""
    file = tmp_path_factory.mktemp("hints") / "config.yaml"
    file.write_text(
        """
run: {name: test}
model: {llm: {path: lmsys/vicuna-7b-v1.5}, vision: {name: vit_large_patch14_clip_quickgelu_336.openai}}
data: {shards: none.tar, template: chat}
train: {packs_per_step: 16, max_steps: 1}
"""
    )
    return file


def refusal(file: str | Path, overrides: Sequence[str]) -> str:
    with pytest.raises(UserError, match=r"parallel\.(device|host)_memory_gib") as caught:
        mmtrain.make_plan(mmtrain.load_config(file, overrides))
    return str(caught.value)


def hints_of(message: str) -> list[list[str]]:
    """Return the hints of a message, each as its overrides."""
    _, _, listed = message.partition("To use less memory (planned: it fits): ")
    return [hint.split() for hint in listed.split("; or ") if hint]


def plan_with(file: str | Path, overrides: Sequence[str], hint: Sequence[str]) -> Plan:
    """Return the plan of a run with these overrides, where a hint's values take the place of
    others.
    """
    values = dict(override.split("=", 1) for override in (*overrides, *hint))
    return mmtrain.make_plan(
        mmtrain.load_config(file, [f"{key}={value}" for key, value in values.items()])
    )


@pytest.mark.parametrize(
    ("model", "gib", "overrides", "first_hint"),
    [
        # the projector trains
        ("vicuna", 12, ["parallel.pipeline=1"], "parallel.streamed_layers=auto"),
        (DEMO, 0.012, ["parallel.pipeline=2", MANY_PACKS], "train.packs_per_microbatch=1"),
        (DEMO, 0.005, ["parallel.pipeline=4"], "model.llm.dtype=bfloat16"),
        (
            DEMO,
            0.005,
            ["parallel.pipeline=4", "parallel.data=4", "train.packs_per_step=16"],
            "model.llm.dtype=bfloat16",
        ),
        # LoRA
        ("vicuna", 14, LORA, "parallel.streamed_layers=auto"),
        (
            "vicuna",
            14,
            [*LORA, "parallel.data=2", "parallel.host_memory_gib=1"],
            "parallel.pipeline=2 parallel.data=1",
        ),
        # the encoder, whose activations stage 0 keeps for as many micro-batches as there are ranks
        (DEMO, 0.024, [*ENCODER, "parallel.pipeline=4"], "parallel.pipeline=2 parallel.data=2"),
        pytest.param(
            "vicuna",
            11,
            [*ENCODER, LONG],
            "data.pack_length=2048 train.packs_per_step=32 parallel.streamed_layers=auto",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "vicuna",
            24,
            [*ENCODER, "parallel.pipeline=16", LONG],
            "parallel.pipeline=4 parallel.data=4",
            marks=pytest.mark.nightly,
        ),
        # everything
        (DEMO, 0.024, [*ALL, "parallel.pipeline=1"], "parallel.pipeline=2"),
        (DEMO, 0.012, [*ALL, "parallel.pipeline=4", "parallel.data=2"], ""),
        pytest.param(
            "vicuna",
            29.5,
            [*ALL, "parallel.pipeline=4"],
            "parallel.pipeline=8",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_with_the_first_hint_a_run_fits(vicuna, model, gib, overrides, first_hint):
    file = vicuna if model == "vicuna" else model
    overrides = [*overrides, f"parallel.device_memory_gib={gib}"]
    hints = hints_of(refusal(file, overrides))
    assert " ".join(hints[0] if hints else []) == first_hint
    assert all(plan_with(file, overrides, hint) for hint in hints[:1])


def test_one_hint_quantises_and_what_is_set_by_hand_is_left_to_the_planner(vicuna):
    overrides = [
        "parallel.recompute_layers=0",
        "parallel.boundaries=[]",
        "parallel.device_memory_gib=12",
    ]
    hints = hints_of(refusal(vicuna, overrides))
    by_hand = ["parallel.boundaries=null", "parallel.recompute_layers=auto"]
    assert hints == [
        [*by_hand, "parallel.streamed_layers=auto"],
        [*by_hand, "model.llm.quantize=nf4"],
    ]
    assert plan_with(vicuna, overrides, hints[1]).streaming.source == "nf4"


def test_layers_for_which_the_host_lacks_memory_get_a_planned_hint_too(vicuna):
    message = refusal(vicuna, ["parallel.streamed_layers=32", "parallel.host_memory_gib=8"])
    assert message.startswith(
        "parallel.host_memory_gib: 8 GiB, but rank 0 would keep 12.1 GiB of streamed layers in "
    )
    assert hints_of(message)[0] == ["parallel.streamed_layers=auto"]
