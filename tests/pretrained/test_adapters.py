"""Which layers may have adapters, and what is said of those that may not; nothing is skipped."""

import pytest
from pydantic import ValidationError
from transformers import CONFIG_MAPPING

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.model.tiny import tiny_model
from mmtrain.plan.planner import make_plan, models_of

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
    models = models_of(config_of(targets=("llm.layers.*.self_attn.q_proj", "llm.layers.31.mlp"), r=8))
    names = [p.name for p in models.parameters if ".lora_" in p.name]
    assert len(names) == 2 * (32 + 3)
    shapes = {p.name: p.shape for p in models.parameters}
    assert shapes["llm.layers.31.mlp.down_proj.lora_A.weight"] == (8, 11008)
    assert shapes["llm.layers.31.mlp.down_proj.lora_B.weight"] == (4096, 8)


def test_a_plan_with_llavas_adapters_trains_what_llavas_script_trains() -> None:
    """LLaVA-1.5's second stage: rank 128 in every linear layer of a 7B's 32 layers, and the projector."""
    config = config_of(trainable=("projector", *EVERYWHERE), r=128, alpha=256)
    plan = make_plan(config)
    of_a_layer = 4 * (4096 + 4096) + 3 * (4096 + 11008)
    projector = 1024 * 4096 + 4096 + 4096 * 4096 + 4096
    assert sum(rank.trainable for rank in plan.ranks) == 32 * 128 * of_a_layer + projector


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"targets": ("llm.head",)}, "'llm.head' names no linear layer of a decoder layer or of an encoder's block"),
        ({"targets": ("llm.layers.*.q_porj",)}, "have llm.layers.*.self_attn.q_proj, "),
        ({"targets": ("llm.layers.*.input_layernorm",)}, "names no linear layer"),
        ({"trainable": ("projector",)}, "llm.layers.0.self_attn.q_proj.lora_A.weight would not train"),
        ({"trainable": ("llm.layers.*.lora_B",)}, "lora_A.weight would not train"),
        ({"targets": ("vision.*",), "trainable": ("projector",)}, "add vision.*.lora_* to it"),
        (
            {"vision": "beit_base_patch16_224.in22k_ft_in22k_in1k", "targets": ("vision.*",)},
            "vision.blocks.0.attn.qkv is computed without a call of its layer, since its bias is a tensor of its own, "
            "so that it cannot have an adapter; name what can, e.g. vision.blocks.*.mlp",
        ),
    ],
)
def test_what_can_have_no_adapter_is_refused_by_name(settings: dict, said: str) -> None:
    with pytest.raises(UserError) as refused:
        make_plan(config_of(**settings))
    assert said in str(refused.value)


def test_dropout_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match=r"model\.lora\.dropout: 0\.05, and only 0 is exact"):
        config_of(dropout=0.05)


def test_experts_and_what_stands_beside_them_have_none(tmp_path) -> None:
    tiny_model(CONFIG_MAPPING["deepseek_v3"](num_hidden_layers=5), seed=0).save_pretrained(tmp_path)
    for targets in ("llm.layers.*", "llm.layers.*.shared_experts", "llm.layers.0.mlp"):
        with pytest.raises(
            UserError, match=r"mlp\.\S+ stands in a module with experts.*e\.g\. llm\.layers\.\*\.self_attn$"
        ):
            models_of(config_of(llm=str(tmp_path), targets=(targets,)))
    assert models_of(config_of(llm=str(tmp_path), targets=("llm.layers.*.self_attn",)))
