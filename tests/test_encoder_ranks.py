"""Runs whose encoder is cut into slices over pipeline ranks, as users meet them: asked for,
resumed, killed, shown.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from json_files import read_json
from processes import Command, last_given, running
from untrained_runs import make_tower

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.launch import main as launch_command
from mmtrain.plan.placement import EVALUATION_ROUND
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan
from mmtrain.plan.schedule import forward_schedule, ranks_of
from mmtrain.plan.simulate import Program, simulate


def plan_of(tiny, *overrides: str) -> Plan:
    return make_plan(load_config(tiny / "config.yaml", overrides))


# ---- asked for


@pytest.mark.parametrize(
    ("asked", "pipeline", "holders"),
    [("[0,1]", 2, [0, 1]), ("[1,2]", 3, [1, 2]), ("[3,0]", 4, [0, 3]), ("0", 2, [])],
)
def test_every_rank_that_is_named_holds_blocks_and_no_other(tiny, asked, pipeline, holders):
    plan = plan_of(tiny, f"parallel.pipeline={pipeline}", f"parallel.encoder_ranks={asked}")
    slices = [
        (rank.pipeline, *stage.encoder)
        for rank in plan.ranks
        for stage in rank.stages
        if stage.encoder
    ]
    assert [rank for rank, first, last in slices if last > first] == holders
    assert sum(last - first for _, first, last in slices) == (3 if holders else 0), (
        "of 4 blocks select_layer -2 runs 3"
    )
    assert [rank for rank, *_ in slices] == sorted({0, *holders} if holders else ())


def test_a_plan_says_which_rank_holds_what(tiny, capsys):
    assert (
        launch_command([str(tiny / "config.yaml"), "--plan", "parallel.encoder_ranks=[1,3]"]) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "encoder: patch embedding on rank 0, " in said
    assert "block 2 on rank 3; prefetch " in said or "blocks 1-2 on rank 3; prefetch " in said


def test_an_evaluation_begins_with_encodes_that_make_it_shorter(tiny):
    plan = plan_of(tiny, "parallel.encoder_ranks=[0,1,2]")
    shape = (
        plan.pipeline,
        EVALUATION_ROUND * plan.pipeline,
        plan.stages_per_rank,
        ranks_of(plan.chain),
    )
    passes = [forward_schedule(*shape, lead) for lead in (1, plan.evaluation_lead)]
    at_once, led = (simulate(Program(each), plan.seconds).seconds for each in passes)
    assert led < 0.99 * at_once


TRAINS = ("model.trainable=[projector, vision]",)
ADAPTED = (
    "model.trainable=[projector, 'vision.*.lora_*']",
    "model.lora.r=4",
    "model.lora.targets=[vision.*]",
)


@pytest.mark.parametrize("learns", [TRAINS, ADAPTED], ids=["trains", "adapters"])
def test_an_encoder_that_learns_is_whole_on_rank_0(tiny, learns):
    for asked in ("auto", "0", "[0]"):
        plan = plan_of(tiny, *learns, f"parallel.encoder_ranks={asked}")
        assert all(stage.encoder is None for rank in plan.ranks for stage in rank.stages)
        assert [encodes is not None for encodes in plan.chain] == [True, False, False, False]
    with pytest.raises(
        UserError, match=r"parallel.encoder_ranks: \[0, 1\], but vision\.\S+ trains.*use auto or 0"
    ):
        plan_of(tiny, *learns, "parallel.encoder_ranks=[0,1]")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("[]", r"\[\] is not allowed; it should .*have at least 1 item"),
        ("[0,0]", r"\[0, 0\].*Name each at most once"),
        ("[7]", r"\[7\].*has ranks 0 to 3.*Name each at most once"),
        ("all", "'all' is not allowed; it should be .*auto.*0"),
        ("1", "1 is not allowed; it should .*be a list"),
        ("[0,1,2,3]", "4 ranks.*3 blocks.*at most"),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(tiny, asked, message):
    with pytest.raises(UserError, match=rf"(?s)parallel\.encoder_ranks.*{message}"):
        plan_of(tiny, f"parallel.encoder_ranks={asked}")


# ---- real runs


SLICED = (
    *(
        "parallel.pipeline=3",
        "parallel.encoder_ranks=[0,1,2]",
        "parallel.threads_per_rank=1",
        "data.workers=0",
    ),
    *("train.max_steps=100000", "train.packs_per_step=4", "run.name=tiny", "eval.show_answers=0"),
)


def training(tiny: Path, folder: Path, *overrides: str) -> AbstractContextManager[Command]:
    """A run with a slice on every rank, started; killed when the block ends."""
    settings = last_given(f"run.dir={folder}", *SLICED, *overrides)
    return running(["-m", "mmtrain.launch", tiny / "config.yaml", *settings], folder)


@pytest.mark.nightly
def test_an_encoder_that_cannot_be_cut_is_refused_or_stays_on_rank_0(tiny, tmp_path):
    """ConViT puts its class token between two blocks, which only some later ones attend to."""
    # a plan cuts such a large one
    sizes = {"depth": 12, "embed_dim": 128, "img_size": 56, "local_up_to_layer": 6}
    make_tower(tmp_path / "convit", "convit_tiny", sizes)
    few = (f"model.vision.name={tmp_path}/convit", "train.max_steps=1")
    refused = (
        "convit cannot be cut into slices: block 6 is unlike the first 3. "
        "Set parallel.encoder_ranks=0"
    )
    with training(tiny, tmp_path / "asked", *few) as command:
        assert command.wait(200) == 2
    assert command.stderr.startswith("error: ") and refused in " ".join(command.stderr.split())
    with training(tiny, tmp_path / "auto", *few, "parallel.encoder_ranks=auto") as command:
        assert command.wait(200) == 0, command.stderr
    said = " ".join(command.stderr.split())
    assert "the encoder stays whole on rank 0: " in said and refused in said
    calibrated = ("--calibrate", few[0], f"parallel.calibration={tmp_path}/measured.json")
    with training(
        tiny, tmp_path / "calibrated", *calibrated, "parallel.encoder_ranks=auto"
    ) as command:
        assert command.wait(200) == 0, command.stderr
    assert refused in " ".join(command.stderr.split())
    assert read_json(tmp_path / "measured.json")["encode_stem_bytes"] is None
