"""Which layers may have adapters, and what is said of those that may not; nothing is skipped."""

import re

import pytest
from transformers import CONFIG_MAPPING

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.model.llm.tiny import tiny_model
from mmtrain.plan.planner import make_plan

EVERYWHERE = ("llm.layers.*.lora_*",)


def config_of(llm="lmsys/vicuna-7b-v1.5", trainable=EVERYWHERE, vision=None, **lora) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "adapters"},
            "model": {
                "llm": {"path": llm},
                "vision": {"name": vision or "vit_large_patch14_clip_quickgelu_336.openai"},
                "lora": lora,
                "trainable": trainable,
            },
            "data": {"shards": "none.tar"},
            "train": {"packs_per_step": 8, "max_steps": 1},
        }
    )


def test_adapters_stand_behind_the_layers_that_a_pattern_names() -> None:
    models = models_of(
        config_of(targets=("llm.layers.*.self_attn.q_proj", "llm.layers.31.mlp"), r=8)
    )
    names = [p.name for p in models.parameters if ".lora_" in p.name]
    assert len(names) == 2 * (32 + 3)
    shapes = {p.name: p.shape for p in models.parameters}
    assert shapes["llm.layers.31.mlp.down_proj.lora_A.weight"] == (8, 11008)
    assert shapes["llm.layers.31.mlp.down_proj.lora_B.weight"] == (4096, 8)


def test_a_plan_with_llavas_adapters_trains_what_llavas_script_trains() -> None:
    """LLaVA-1.5's second stage: rank 128 in every linear layer of a 7B's 32 layers, and the
    projector.
    """
    config = config_of(trainable=("projector", *EVERYWHERE), r=128, alpha=256)
    plan = make_plan(config)
    of_a_layer = 4 * (4096 + 4096) + 3 * (4096 + 11008)
    projector = 1024 * 4096 + 4096 + 4096 * 4096 + 4096
    assert sum(rank.trainable for rank in plan.ranks) == 32 * 128 * of_a_layer + projector


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"targets": ("llm.head",)},
            "'llm.head' names no linear layer of a decoder layer or of an encoder's block",
        ),
        ({"targets": ("llm.layers.*.q_porj",)}, "have llm.layers.*.self_attn.q_proj, "),
        (
            {"trainable": ("projector",)},
            "llm.layers.0.self_attn.q_proj.lora_A.weight would not train",
        ),
        ({"trainable": ("llm.layers.*.lora_B",)}, "lora_A.weight would not train"),
        ({"targets": ("vision.*",), "trainable": ("projector",)}, "Add vision.*.lora_* to it"),
        (
            {"vision": "beit_base_patch16_224.in22k_ft_in22k_in1k", "targets": ("vision.*",)},
            "vision.blocks.0.attn.qkv cannot have an adapter",
        ),
    ],
)
def test_what_can_have_no_adapter_is_refused_by_name(settings: dict, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        make_plan(config_of(**settings))


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("deepseek_v3", "llm.layers.*.mlp.gate", "llm.layers.3.mlp.gate cannot have an adapter"),
        (
            "qwen3_moe",
            "llm.layers.1.mlp",
            "llm.layers.1.mlp.experts.down_proj cannot have an adapter",
        ),
        ("gpt_oss", "llm.layers.*.mlp.router", "llm.layers.0.mlp.router cannot have an adapter"),
        ("deepseek_v3", "llm.layers.*.mlp.shared_experts.*_proj", 2 * 3),
        ("qwen3_moe", "llm.layers.0.mlp", 3),
    ],
)
def test_all_linear_layers_of_a_moe_model_may_have_adapters_but_experts_and_routers(
    tmp_path, family, targets, said
):
    values = {"qwen3_moe": {"mlp_only_layers": [0]}}.get(family, {})
    tiny_model(CONFIG_MAPPING[family](num_hidden_layers=5, **values), seed=0).save_pretrained(
        tmp_path
    )
    config = config_of(llm=str(tmp_path), targets=(targets,))
    if isinstance(said, int):
        names = [p.name for p in models_of(config).parameters if ".lora_A" in p.name]
        assert len(names) == said and all(
            matches_any(name.removesuffix(".lora_A.weight"), (targets,)) for name in names
        )
        return
    with pytest.raises(UserError, match=re.escape(said)):
        models_of(config).read()
