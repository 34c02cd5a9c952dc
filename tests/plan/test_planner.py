"""Plans of real shapes: shipped configs, memory limits, weights really loaded, calibrated costs,
every refusal.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from schedule_check import check_schedule
from sweeps import sweep

from mmtrain.base.errors import UserError
from mmtrain.config.load import example_names, load_config
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import llm_shape
from mmtrain.model.stage import build_stage
from mmtrain.plan.costs import minimal_flops, run_costs
from mmtrain.plan.plan import Plan, render
from mmtrain.plan.planner import make_plan
from mmtrain.plan.refusals import GpuMemory, refuse_short_memory
from mmtrain.plan.stage_costs import RESERVED_SHARE, limit_on_gpu

ROOT = Path(__file__).parent.parent.parent
CONFIGS = example_names()
DAILY = (
    *(
        "llava_pp4",
        "demo_lora",
        "demo_native",
        "demo_sheet",
        "demo_text",
        "llava15_hf_lora",
        "smolvlm_256m_lora",
    ),
    *(
        "naflex_lfm2_1b",
        "qwen25_32b_1x24gb",
        "qwen25_72b_pp8_dp2",
        "qwen3_vl_vit_mistral_7b",
        "rice_qwen3_8b",
    ),
)
VICUNA, CLIP = "lmsys/vicuna-7b-v1.5", "vit_large_patch14_clip_quickgelu_336.openai"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    """Vicuna-7B with CLIP over 4 pipeline ranks: shapes are recorded, weights are not needed."""
    file = tmp_path_factory.mktemp("planner") / "config.yaml"
    file.write_text(
        f"""
run: {{name: test}}
model:
  llm: {{path: {VICUNA}}}
  vision: {{name: {CLIP}}}
parallel: {{pipeline: 4, stages_per_rank: 1}}
data: {{shards: none.tar}}
train: {{packs_per_step: 16, max_steps: 1}}
"""
    )
    return file


def plan_of(file: Path, *overrides: str) -> Plan:
    return make_plan(load_config(file, overrides))


def sentences(plan: Plan) -> str:
    """The text of a plan on one line."""
    return " ".join(" ".join(render(plan)).split())


# ---- plans of real shapes


@pytest.mark.parametrize("name", sweep(CONFIGS, DAILY))
def test_every_shipped_config_plans(name: str) -> None:
    config = load_config(f"example:{name}")
    plan = make_plan(config)
    table = render(plan)
    llm = llm_shape(config.model.llm.path)
    stages = sorted(
        (s for r in plan.ranks if r.data == 0 for s in r.stages), key=lambda stage: stage.stage
    )
    assert [stage.stage for stage in stages] == list(range(plan.pipeline * plan.stages_per_rank))
    layers = [name for stage in stages for name in stage.layers]
    assert layers == ["front", *(f"llm.layers.{i}" for i in range(len(llm.decoder))), "head"]
    assert [rank.rank for rank in plan.ranks] == list(range(plan.pipeline * plan.data))
    assert all(rank.rank == rank.pipeline * plan.data + rank.data for rank in plan.ranks)
    replica = [rank for rank in plan.ranks if rank.data == 0]
    assert all(
        stage.stage % plan.pipeline == rank.pipeline for rank in replica for stage in rank.stages
    )
    assert sum(rank.work_share for rank in replica) == pytest.approx(1)
    assert all(0 <= rank.idle_share < 1 for rank in replica)
    assert (
        plan.microbatches_per_step * plan.data * plan.packs_per_microbatch
        == config.train.packs_per_step
    )
    check_schedule(
        plan.schedule,
        plan.microbatches_per_step,
        plan.first_trainable_stage,
        stages_per_rank=plan.stages_per_rank,
    )
    if plan.memory_limit_bytes:
        assert max(rank.total_bytes for rank in plan.ranks) <= plan.memory_limit_bytes * (
            1 - RESERVED_SHARE
        )
    if plan.uniform is not None and plan.uniform.fits:
        assert plan.uniform.step_time_ratio >= 1
    assert 0.5 < plan.minimal_flops_share <= 1
    assert max(map(len, table)) <= 80
    for rank in plan.ranks:
        assert rank.optimizer == ("AdamW" if rank.trainable > 0 else "NoOp") and rank.reason
        assert rank.weight_bytes > 0 and rank.activation_bytes > 0


def test_plan_json_has_the_keys_that_scripts_rely_on(config_file) -> None:
    content = json.loads(json.dumps(plan_of(config_file, "parallel.data=2").as_dict()))
    assert len(content["ranks"]) == 8
    rank = content["ranks"][1]
    assert (rank["rank"], rank["pipeline"], rank["data"]) == (1, 0, 1)
    layers = ["front", *(f"llm.layers.{i}" for i in range(8))]
    assert rank["stages"] == [
        {"stage": 0, "encoder": None, "layers": layers, "recompute_layers": 0, "streamed": []}
    ]
    assert rank["trainable"] == 20_979_712 and rank["optimizer"] == "AdamW"
    assert set(rank["flops"]) == {"forward", "dgrad", "wgrad"}
    for key in (
        "trainable_names",
        "reason",
        "weight_bytes",
        "activation_bytes",
        "recompute_layers",
        "total_bytes",
    ):
        assert key in rank
    for key in ("work_share", "idle_share"):
        assert 0 <= rank[key] < 1
    for key in (
        "first_trainable_stage",
        "microbatches_per_step",
        "boundaries",
        "memory_limit_bytes",
        "decoder_layers",
    ):
        assert key in content
    assert content["costs"] == "assumed" and content["step_seconds"] is None
    assert len(content["seconds"]["forward"]) == 4 and content["stages_per_rank"] == 1
    assert "schedule" not in content


def test_frozen_ranks_have_a_no_op_optimizer_and_say_why(config_file) -> None:
    plan = plan_of(config_file)
    assert plan.boundaries == (8, 16, 24) and plan.first_trainable_stage == 0
    assert [rank.optimizer for rank in plan.ranks] == ["AdamW", "NoOp", "NoOp", "NoOp"]
    assert [rank.reason for rank in plan.ranks] == [
        "trains projector (4 tensors)",
        "all of llm.layers.8-15 is frozen",
        "all of llm.layers.16-23 is frozen",
        "all of llm.layers.24-31 + head is frozen",
    ]
    assert (
        plan.ranks[1].trainable == 0
        and plan.ranks[1].flops.wgrad == 0
        and plan.ranks[1].optimizer_bytes == 0
    )


@pytest.mark.parametrize(
    ("trainable", "stage", "elements"),
    [
        ("llm.layers.0", 0, 202_383_360),
        ("llm.layers.16", None, 202_383_360),
        ("llm.head", 3, 131_072_000),
    ],
)
def test_a_trainable_layer_anywhere_is_planned_without_backward_before_it(
    config_file, trainable, stage, elements
) -> None:
    plan = plan_of(config_file, f"model.trainable=[{trainable}]")
    first = plan.first_trainable_stage
    assert stage is None or first == stage
    assert [rank.trainable for rank in plan.ranks] == [
        elements if s == first else 0 for s in range(4)
    ]
    for rank in plan.ranks[:first]:
        assert rank.flops.dgrad == rank.flops.wgrad == 0
        assert rank.optimizer == "NoOp" and rank.reason.endswith(
            "frozen, and everything before it: forward only"
        )
    assert all(rank.flops.dgrad > 0 for rank in plan.ranks[first + 1 :])
    cheap = (
        max(rank.stages[0].last - rank.stages[0].first for rank in plan.ranks[:first])
        if first
        else 0
    )
    if trainable == "llm.layers.16":
        dear = max(rank.stages[0].last - rank.stages[0].first for rank in plan.ranks[first + 1 :])
        assert cheap > 1.5 * dear, (
            "layers that only run forward are cheaper, so a rank gets more of them"
        )


def test_boundaries_by_hand_are_kept(config_file) -> None:
    plan = plan_of(config_file, "parallel.boundaries=[0, 16, 32]")
    assert [rank.stages[0].summary for rank in plan.ranks] == [
        "front",
        "llm.layers.0-15",
        "llm.layers.16-31",
        "head",
    ]
    boundaries = 4, 8, 12, 16, 20, 24, 28
    interleaved = "parallel.stages_per_rank=2", f"parallel.boundaries={list(boundaries)}"
    plan = plan_of(config_file, *interleaved, "parallel.recompute_layers=[0, 5, 0, 0]")
    assert plan.stages_per_rank == 2 and plan.boundaries == boundaries
    assert [stage.recompute_layers for stage in plan.ranks[1].stages] == [4, 1], (
        "the earliest stage first"
    )


def test_recompute_is_as_asked_or_as_little_as_fits(config_file) -> None:
    free = plan_of(config_file)
    assert all(rank.recompute_layers == 0 for rank in free.ranks)
    tight = plan_of(config_file, "parallel.device_memory_gib=9")
    assert any(rank.recompute_layers for rank in tight.ranks)
    assert max(rank.total_bytes for rank in tight.ranks) <= 9 * 2**30 * (1 - RESERVED_SHARE)
    assert sum(r.recompute_flops for r in tight.ranks) > 0 and all(
        r.recompute_flops == 0 for r in free.ranks
    )
    asked = plan_of(
        config_file, "parallel.recompute_layers=[3, 0, 99, 1]", "parallel.boundaries=[8, 16, 24]"
    )
    assert [rank.recompute_layers for rank in asked.ranks] == [3, 0, 8, 1]
    plain = plan_of(config_file, "parallel.boundaries=[8, 16, 24]")
    saved = plain.ranks[0].activation_bytes - asked.ranks[0].activation_bytes
    assert saved == 4 * 3 * 2048 * (131_720 - 2 * 4096), (
        "4 micro-batches in flight keep 3 layers' inputs only"
    )


def test_the_device_limits_a_rank_unless_the_config_does(config_file) -> None:
    config = load_config(config_file)
    assert make_plan(config, 80 * 2**30).memory_limit_bytes == 80 * 2**30
    assert make_plan(config, None).memory_limit_bytes is None
    stated = load_config(config_file, ["parallel.device_memory_gib=24"])
    assert make_plan(stated, 1).memory_limit_bytes == 24 * 2**30
    with pytest.raises(UserError, match=r"the GPU's memory"):
        make_plan(config, 2**29)


@pytest.mark.parametrize(
    ("gib", "left_gib"), [(15.7, 2.5), (23.6, 2.5), (41, 2.5), (79.1, 4.746), (139.8, 8.388)]
)
def test_of_a_gpu_six_percent_or_two_and_a_half_gib_are_left(gib: float, left_gib: float) -> None:
    usable = limit_on_gpu(int(gib * 2**30)) * (1 - RESERVED_SHARE)
    assert gib - usable / 2**30 == pytest.approx(left_gib, abs=1e-6)


# 2 GiB: CUDA itself
LOADED = GpuMemory(total=24 * 2**30, free=15 * 2**30, allocated=6 * 2**30, cached=7 * 2**30)


def test_a_gpu_that_another_process_fills_is_refused_with_what_is_free_and_needed(
    config_file,
) -> None:
    rank = plan_of(config_file).ranks[2]
    filled = dataclasses.replace(
        LOADED, free=2**30, allocated=rank.weight_bytes, cached=rank.weight_bytes
    )
    needed = (rank.total_bytes - rank.weight_bytes) / 2**30
    assert needed > 1
    with pytest.raises(UserError) as raised:
        refuse_short_memory(rank, "cuda:2 (A10)", filled)
    message = str(raised.value)
    assert message.startswith(
        "rank 2 (stage 2) does not fit on cuda:2 (A10): 1.0 GiB of 24.0 GiB are free, "
    )
    assert f"still needs {needed:.1f} GiB" in message and "\n" not in message
    loaded = rank.weight_bytes / 2**30
    assert f"CUDA itself and other processes hold {23 - loaded:.1f} GiB (see nvidia-smi)" in message
    assert message.endswith(f"parallel.device_memory_gib={math.floor(10 * (1 + loaded)) / 10:g}")


def test_weight_bytes_and_trainable_counts_are_those_of_the_loaded_stages(tiny) -> None:
    config = load_config(
        tiny / "config.yaml",
        [
            "parallel.pipeline=3",
            "parallel.data=1",
            "model.trainable=[projector, llm.layers.5.mlp]",
            "model.llm.dtype=bfloat16",
        ],
    )
    for rank in make_plan(config).ranks:
        parameters = dict(build_stage(config, rank.stages[0]).global_parameters())
        assert rank.weight_bytes == sum(p.numel() * p.element_size() for p in parameters.values())
        assert set(rank.trainable_names) == {
            name for name, p in parameters.items() if p.requires_grad
        }
        assert rank.trainable == sum(p.numel() for p in parameters.values() if p.requires_grad)


def test_tied_embeddings_are_held_by_both_ends_and_once_by_a_single_rank(
    tiny, make_tiny, tmp_path
) -> None:
    folder = make_tiny.make_tiny_llm(tmp_path / "tied", tied=True, layers=4)
    for pipeline in (1, 2):
        overrides = [f"model.llm.path={folder}", "parallel.data=1", f"parallel.pipeline={pipeline}"]
        config = load_config(tiny / "config.yaml", overrides)
        for rank in make_plan(config).ranks:
            stage = build_stage(config, rank.stages[0])
            assert rank.weight_bytes == sum(
                p.numel() * p.element_size() for _, p in stage.global_parameters()
            )


# ---- the table


def test_the_table_says_who_holds_and_trains_what(config_file) -> None:
    plan = plan_of(config_file, "parallel.data=2", "parallel.device_memory_gib=24")
    lines = render(plan)
    header = "rank stage layers trainable optimizer weights activations total work idle"
    assert header.split() in [line.split() for line in lines]
    row = next(line.split() for line in lines if line.split()[:1] == ["0-1"])
    assert (
        row[:7] == ["0-1", "0", "front,", "0-6", "20,979,712", "AdamW", "3.5"] and row[9] == "26.8"
    ), row
    assert "ranks 2-3: NoOp, all of llm.layers.7-14 is frozen" in lines
    text = sentences(plan)
    assert "pipeline 4 x data 2 = 8 ranks" in text and "24.0 GiB per rank" in text
    assert (
        "TFLOP per replica, of which any exact training needs 100.0%; "
        "slowest ranks 0-1 with 26.8% of" in text
    )
    assert "encoder: on rank 0; prefetch" in text and "costs: assumed" in text
    assert sum(line.split()[:1] == ["0-1"] for line in lines) == 1, "replicas share a row"


def test_a_plan_with_several_stages_a_rank_says_which(config_file) -> None:
    by_rank_0 = "parallel.encoder_ranks=0", "parallel.device_memory_gib=80"
    plan = plan_of(config_file, "parallel.stages_per_rank=auto", *by_rank_0)
    assert plan.stages_per_rank == 2
    lines = [line.split() for line in render(plan)]
    first = next(i for i, line in enumerate(lines) if line[:4] == ["0", "0", "front,", "0-1"])
    assert lines[first + 1] == ["4", "15-19"], "a line a stage"
    assert "rank 1: NoOp, all of its layers are frozen" in sentences(plan)
    assert [stage.stage for stage in plan.ranks[1].stages] == [1, 5]
    one = plan_of(config_file, *by_rank_0)
    assert plan.idle_share < one.idle_share


def test_the_table_compares_with_a_uniform_cut(config_file) -> None:
    plan = plan_of(config_file, "model.trainable=[llm.layers.16]")
    assert plan.uniform.boundaries == (8, 16, 24)
    assert plan.uniform.step_time_ratio > 1.1
    assert f"step {plan.uniform.step_time_ratio:.2f} times as long" in sentences(plan)
    settings = ["model.trainable=[llm.layers.16]", "parallel.boundaries=[8, 16, 24]"]
    assert "this is the uniform cut" in sentences(plan_of(config_file, *settings))


# ---- refusals


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        plan_of(file, *overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["parallel.pipeline=35"],
            "35 stages, but .*front, 32 decoder layers, head.*: at most 34 stages",
        ),
        (
            ["parallel.pipeline=8", "parallel.stages_per_rank=5"],
            "8 ranks of 5 stages, but .*: at most 4$",
        ),
        (
            ["parallel.boundaries=[8, 16, 33]"],
            r"\[8, 16, 33\], but .* 32 decoder layers.* layer 32 \(the head alone\)",
        ),
        (
            ["data.pack_length=576"],
            "data.pack_length: 576 tokens, but .* takes 576.*e.g. 1024 tokens",
        ),
        (
            ["model.trainable=[llm.layers.*.lora_*]"],
            "model.lora is null, so there are none. Set model.lora.r=16",
        ),
        (
            [
                "model.trainable=[projector, vision]",
                "optimizer.groups=[{match: [projector.linear_2, vision], lr: 1}, {match: "
                "[projector.*.bias], lr: 2}]",
            ],
            r"linear_2.bias is in the groups 0 \(projector.linear_2, vision\) and 1 "
            r"\(projector.\*.bias\)",
        ),
    ],
)
def test_what_no_plan_can_satisfy_is_refused_with_what_is_needed(
    config_file, overrides, expected
) -> None:
    assert re.search(expected, refusal(config_file, *overrides))


def test_a_family_whose_last_layer_runs_for_all_tokens_is_planned_so(
    tiny, make_tiny, tmp_path
) -> None:
    folder = make_tiny.make_tiny_llm(tmp_path / "gpt2", family="gpt2", max_position_embeddings=256)
    config = load_config(tiny / "config.yaml", [f"model.llm.path={folder}", "data.pack_length=256"])
    costs, llama = (run_costs(c, models_of(c)) for c in (config, load_config(tiny / "config.yaml")))
    assert costs.layers[-2] == costs.whole_last and not any(kind.on_rows for kind in costs.kinds)
    assert llama.layers[-2].flops.total < llama.whole_last.flops.total and any(
        kind.on_rows for kind in llama.kinds
    )
    minimal = minimal_flops(models_of(config), config.model.trainable, costs.work).total
    assert minimal < sum(layer.needed_flops.total for layer in costs.layers) + costs.encoder.forward


def test_packs_longer_than_a_table_of_learned_positions_are_refused(
    tiny, make_tiny, tmp_path
) -> None:
    folder = make_tiny.make_tiny_llm(tmp_path / "gpt2", family="gpt2", max_position_embeddings=256)
    message = refusal(tiny / "config.yaml", f"model.llm.path={folder}", "data.pack_length=257")
    assert "data.pack_length: 257" in message and "learned 256 positions" in message
    plan_of(tiny / "config.yaml", f"model.llm.path={folder}", "data.pack_length=256")


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("projecter", "projector"),
        ("llm.layer.31", "llm.layers.31"),
        ("llm.layers.*.mpl", "llm.layers.*.mlp"),
        ("vision.blocks.23", "vision.blocks.22"),  # after the selected block: not run
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(
    config_file, pattern, nearest
) -> None:
    message = refusal(config_file, f"model.trainable=[projector, {pattern}]")
    assert f"model.trainable: '{pattern}' matches no parameter" in message
    assert nearest in message.split("nearest: ")[1].split(", ")


TRAIN = "model.trainable=[projector, vision.blocks.2*]"


def test_a_plan_says_what_trains_at_which_rate(config_file) -> None:
    decays = "{match: [projector.linear_1], weight_decay: 0.1}"
    groups = (
        f"optimizer.groups=[{{match: [vision.blocks.21, vision.blocks.2], lr: 2e-6}}, {decays}]"
    )
    plan = plan_of(config_file, TRAIN, groups, "optimizer.lr=2e-4")
    block, linear_1, linear_2 = 12 * 1024**2 + 13 * 1024, 1024 * 4096 + 4096, 4096 * 4096 + 4096
    assert [dataclasses.astuple(group) for group in plan.groups] == [
        ("vision.blocks.21, vision.blocks.2", 2e-6, 0.0, 2 * block),
        ("projector.linear_1", 2e-4, 0.1, linear_1),
        ("the rest", 2e-4, 0.0, linear_2 + 2 * block),  # blocks 20 and 22
    ]
    said = (
        f"projector.linear_1 0.0002 with weight decay 0.1 ({linear_1:,} parameters); "
        "the rest 0.0002 ("
    )
    assert said in sentences(plan)
    assert "learning rates: the rest 0 (" in sentences(
        plan_of(config_file, TRAIN, "optimizer.lr=0")
    )
    alike = plan_of(config_file, TRAIN)
    assert alike.groups == () and "learning rates" not in sentences(alike)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            "{match: [projector, vision.block.22], lr: 1}",
            "0.match: 'vision.block.22' matches no parameter that trains",
        ),
        (
            "{match: [vision.block.22], lr: 1}",
            "0.match: 'vision.block.22' matches .* trains; nearest: vision.blocks.22",
        ),
        (
            "{match: [projector], lr: 1}, {match: [x], lr: 1}",
            "1.match: 'x' .* names look like vision.blocks.2.",
        ),
        (
            "{match: [llm.head], lr: 1}",
            "0.match: 'llm.head' matches llm.head.weight, frozen by model.trainable=.* Add",
        ),
    ],
)
def test_a_group_that_trains_nothing_is_refused_with_what_trains(
    config_file, groups, expected
) -> None:
    assert re.search(
        rf"optimizer\.groups\.{expected}",
        refusal(config_file, TRAIN, f"optimizer.groups=[{groups}]"),
    )


@pytest.mark.parametrize("pattern", ["llm.head", "llm.embedding"])
def test_a_trainable_tied_embedding_is_refused_with_the_reason(
    tiny, make_tiny, tmp_path, pattern
) -> None:
    folder = make_tiny.make_tiny_llm(tmp_path / "tied", tied=True)
    message = refusal(
        tiny / "config.yaml", f"model.llm.path={folder}", f"model.trainable=[{pattern}]"
    )
    assert f"{pattern}.weight" in message and "ties its LM head to its embedding" in message
    assert "would make them differ" in message and "tie_word_embeddings: false" in message
