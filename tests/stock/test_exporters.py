"""The exporter of a run, asked when it is planned: the stock class that computes what it trains, or
what to change.
"""

from __future__ import annotations

import re
import sys
from typing import get_args

import pytest
import torch
from scenes import save_native_vision
from transformers import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings
from untrained_runs import make_tower

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.config.model import ProjectorSection
from mmtrain.config.schema import ExportFormat
from mmtrain.facts.encoders import MROPE_ENCODERS
from mmtrain.model.encoder import vision
from mmtrain.plan.planner import make_plan
from mmtrain.stock.exporters import _CHECKS
from mmtrain.stock.grids import HyperCLOVAXVisionV2
from mmtrain.stock.idefics3 import Idefics3
from mmtrain.stock.mrope import MROPE_CLASSES

NORMED = ("model.vision.final_norm=true", "model.vision.select_layer=-1")
LORA = ["model.lora.r=4", "model.trainable=[projector, llm.layers.*.lora_*]"]
RESIZED = "data.image_fit=resize"


def planned(tiny, *overrides: str) -> str:
    """What the planner refuses of the tiny run with these keys; empty where it plans."""
    try:
        make_plan(load_config(tiny / "config.yaml", ["parallel.pipeline=1", *overrides]))
    except UserError as error:
        return str(error)
    return ""


def test_every_family_with_mrope_has_its_class():
    assert {stock.model_type for stock in MROPE_CLASSES} == {*MROPE_ENCODERS, "glm46v"}


def test_every_format_but_safetensors_has_its_check():
    assert {name.split()[0] for name in _CHECKS} == {*get_args(ExportFormat)} - {"safetensors"}


@pytest.mark.parametrize(
    "keys",
    [
        ["export.format=hf"],
        ["export.format=peft", *LORA],
        ["export.format=llava", "model.projector.type=linear"],
        ["export.format=safetensors", "model.projector.type=shuffle_mlp2x_gelu"],
        ["export.format=llava", "model.trainable=[projector.*.weight]"],
        ["export.format=hf", "model.trainable=[llm.layers.1]"],
        ["export.format=hf", "model.projector.type=shuffle_swiglu", RESIZED],
        ["export.format=hf", "model.projector.type=mlp2x_gelu_pool", RESIZED, *NORMED],
    ],
)
def test_a_run_that_can_leave_as_it_says_plans(tiny, keys):
    assert planned(tiny, *keys) == ""


def test_what_a_class_would_need_can_be_set_together(tiny):
    seen = 0
    for kind in get_args(ProjectorSection.model_fields["type"].annotation):
        said = planned(
            tiny, "export.format=hf", f"model.projector.type={kind}", "data.image_fit=pad"
        )
        for way in re.findall(r"\S+ would need ([^;]*)", said):
            keys = re.findall(r"((?:model|data)\.[\w.]+=[\w-]+)(?: or \w+)* \(", way)
            load_config(tiny / "config.yaml", [f"model.projector.type={kind}", *keys])
            seen += 1
    assert seen >= 5


MIXERS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
TEXT = (
    "model.vision=null",
    "data.template=llava_v1",
    "data.images=strip",
    "model.trainable=[llm.layers.1]",
)


@pytest.mark.parametrize(
    ("family", "values", "trainable", "said"),
    [
        (
            "granite",
            {"logits_scaling": 8.0},
            "projector",
            "(granite) scales or caps tokens or logits (logits_scaling)",
        ),
        ("cohere2", {}, "projector", "(cohere2) scales or caps tokens or logits (logit_scale)"),
        (
            "falcon_h1",
            {**MIXERS, "lm_head_multiplier": 0.039},
            "projector",
            "(falcon_h1) scales or caps tokens or ",
        ),
        (
            "falcon_h1",
            {**MIXERS, "embedding_multiplier": 5.65},
            "projector",
            "tokens or logits (embedding_multiplier)",
        ),
        ("falcon_h1", MIXERS, "projector", ""),
        # it scales `inputs_embeds` too
        ("granite", {"embedding_multiplier": 12.0}, "projector", ""),
        ("phi", {}, "projector", "(phi) has a bias, but stock heads have none"),
        ("gpt2", {}, "projector", "stock models do not find the embedding of a gpt2"),
        (
            "qwen3_moe",
            {},
            "llm.layers.1",
            "llm.layers.1.mlp.experts.down_proj trains, but the LLM's files have it under",
        ),
        ("qwen3_moe", {}, "projector, llm.layers.1.self_attn", ""),
        ("granite", {}, "projector, llm.layers.1", ""),
    ],
)
def test_what_the_files_of_the_llm_tell_is_refused_when_planned(
    tiny, make_tiny, tmp_path, family, values, trainable, said
):
    make_tiny.make_tiny_llm(tmp_path, family, layers=2, **values)
    keys = (f"model.llm.path={tmp_path}",)
    found = planned(tiny, *keys, "export.format=hf", f"model.trainable=[{trainable}]")
    assert found.startswith("export.format=hf: ") == bool(found) == bool(said) and said in found, (
        found
    )
    assert planned(tiny, *keys, f"model.trainable=[{trainable}]") == ""
    # by the LLM's own class, which has its head
    alone = planned(tiny, *keys, "export.format=hf", *TEXT)
    assert ("trains, but the LLM's files have" in alone) == (family == "qwen3_moe")


def test_a_record_is_refused_for_what_its_folder_is_refused_for(tiny):
    keys = ("model.llm.path=ibm-granite/granite-4.0-h-tiny", "export.format=hf")
    assert "scales or caps tokens or logits (logits_scaling)" in planned(tiny, *keys)


@pytest.mark.parametrize(
    "architecture,changes,keys,said",
    [
        ("eva02_tiny_patch14_224", {"num_heads": 2}, ["mlp2x_gelu"], "has blocks.0.attn."),
        ("vit_base_patch16_siglip_224", {"pre_norm": True}, ["mlp2x_gelu"], "has norm_pre.bias"),
        (
            "vit_base_patch16_clip_224",
            {},
            ["shuffle_linear", "model.vision.layout=idefics3", RESIZED, *NORMED],
            "(its encoder is SiglipVisionModel, but ",
        ),
        ("vit_small_patch14_reg4_dinov2", {}, ["mlp2x_gelu"], "has 5 tokens before its patches"),
        (
            "vit_base_patch16_siglip_224",
            {"img_size": 7 * 38},
            [
                "shuffle_linear",
                "model.vision.layout=idefics3",
                "data.pack_length=1024",
                RESIZED,
                *NORMED,
            ],
            "has 38 x 38 patches, which its class puts in wrong places",
        ),
    ],
)
def test_an_encoder_that_a_class_would_compute_wrongly_is_refused(
    tiny, tmp_path, architecture, changes, keys, said
):
    tower = make_tower(tmp_path / "tower", architecture, changes)
    kind, *more = keys
    found = planned(
        tiny,
        "export.format=hf",
        f"model.vision.name={tower}",
        f"model.projector.type={kind}",
        *more,
    )
    assert said in found, found


NATIVE = ("model.vision.layout=native", "model.vision.select_layer=-1", "data.image_fit=null")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("naflex", ["shuffle_mlp2x_gelu", "model.vision.final_norm=true"], ""),
        ("naflex", ["shuffle_mlp2x_gelu"], "Lfm2Vl would need model.vision.final_norm=true"),
        (
            "naflex",
            ["mlp2x_gelu", "model.vision.longest_edge=32"],
            "model.vision.longest_edge=null (its pro",
        ),
        (
            "naflex",
            ["norm_merge_mlp2x", "model.vision.longest_edge=32"],
            "(its encoder is PixtralVisionModel, but ",
        ),
        (
            "naflex",
            ["mlp2x_gelu_pool"],
            "takes images of any size, but its class makes squares of them",
        ),
        ("qwen", ["linear", "model.vision.merger=true"], ""),
        (
            "qwen",
            ["linear", "model.vision.merger=true", "model.vision.select_layer=-2"],
            "model.vision.select_layer=-1",
        ),
        ("qwen", ["patch_merger_rms"], "(its encoder is Exaone4_5_VisionModel, but "),
        ("qwen", ["shuffle_mlp2x_gelu"], "(its encoder is Siglip2VisionModel, but "),
    ],
)
def test_a_native_encoder_leaves_by_its_own_class_or_is_refused_when_planned(
    tiny, tmp_path, kind, keys, said
):
    save_native_vision(tmp_path, kind)
    projector, *more = keys
    named = [*NATIVE, f"model.vision.name={tmp_path}", f"model.projector.type={projector}"]
    bounds = ["model.vision.min_positions=2", "model.vision.max_positions=9"]
    if any("longest_edge" in key for key in more):
        bounds = []
    found = planned(tiny, "export.format=hf", *named, *bounds, *more)
    assert said in found and bool(found) == bool(said), found
    assert planned(tiny, *named, *bounds, *more) == ""


def test_a_granite_does_not_leave_by_a_class_that_multiplies_where_it_divides(
    tiny, make_tiny, tmp_path
):
    save_native_vision(tmp_path / "vision", "qwen")
    make_tiny.make_tiny_llm(tmp_path / "llm", "granite", layers=2, logits_scaling=8.0)
    keys = [
        f"model.vision.name={tmp_path}/vision",
        "model.projector.type=linear",
        "model.vision.merger=true",
    ]
    keys += [
        f"model.llm.path={tmp_path}/llm",
        "parallel.pipeline=1",
        "model.vision.max_positions=9",
    ]
    found = planned(tiny, "export.format=hf", *NATIVE, *keys, "model.vision.min_positions=2")
    assert (
        "(granite) scales or caps tokens or logits (logits_scaling), but stock classes do not"
        in found
    )


def test_a_class_that_an_older_transformers_lacks_is_refused_with_the_version_that_has_it(
    tmp_path, monkeypatch
):
    save_native_vision(tmp_path, "naflex")
    monkeypatch.setattr(vision.transformers, "Siglip2VisionModel", None)
    with pytest.raises(
        UserError, match=r"transformers \S+ has no Siglip2VisionModel. Install version 5"
    ):
        vision.load_vision(str(tmp_path), -1, torch.float32)
    monkeypatch.setattr(sys.modules["transformers"], "HyperCLOVAXVisionV2Config", None)
    with pytest.raises(
        UserError, match=r"no HyperCLOVAXVisionV2Config. Install version 5\.\d+, which has it"
    ):
        _ = HyperCLOVAXVisionV2().config_class


def test_texts_around_images_that_the_tokenizer_has_no_tokens_for_are_refused_whatever_the_export(
    tiny,
):
    found = planned(tiny, "model.vision.layout=idefics3")
    assert "idefics3 writes <fake_token_around_image> and <global-img> around each image" in found
    assert found.endswith("set model.vision.layout=square")


def places(side: int) -> torch.Tensor:
    """Where Idefics3's encoder looks up the positions of the patches of an image of `side` x
    `side`.
    """
    config = Idefics3VisionConfig(
        hidden_size=1, num_attention_heads=1, num_channels=1, image_size=side, patch_size=1
    )
    stock = Idefics3VisionEmbeddings(config).requires_grad_(False)
    stock.patch_embedding.weight.zero_()
    stock.patch_embedding.bias.zero_()
    stock.position_embedding.weight.copy_(torch.arange(side**2.0)[:, None])
    return stock(
        torch.zeros(1, 1, side, side), torch.ones(1, side, side, dtype=torch.bool)
    ).flatten()


def test_the_grids_that_idefics3s_class_places_wrongly_are_known():
    wrong = {
        side
        for side in range(1, Idefics3.largest_grid + 1)
        if not torch.equal(places(side), torch.arange(side**2.0))
    }
    # the first on every CPU, others by the width of its vectors
    assert {25, 29, 31, 41} <= wrong <= Idefics3.misplaced
