"""The Hugging Face folder: every tensor in its place, and stock transformers computing what mmtrain
computes.
"""

from __future__ import annotations

import re

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sweeps import sweep
from tiers import nightly
from untrained_runs import (
    compared,
    config_of,
    export,
    load_stock,
    make_checkpoint,
    make_tower,
    weights,
)

from mmtrain.base.errors import UserError
from mmtrain.exporting.hf import refuse_loading_faults
from mmtrain.exporting.tensors import INDEX
from mmtrain.stock.exporters import stock_class

TOWERS = {
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "quickgelu clip": ("vit_base_patch16_clip_quickgelu_224", {}),
    "averaging vit": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "vit with a class token": ("vit_tiny_patch16_224", {}),
}
FAMILIES = {
    "llama": {},
    "tied qwen2": {"tied": True},
    "tied gemma3_text": {"tied": True},
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "phi3": {},
    "tied lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "tied": True,
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
    },
}


@pytest.mark.parametrize(
    ("tower", "select_layer"),
    [
        *(("siglip", -1), ("vit with a class token", -2)),
        *(nightly(tower, layer) for tower in TOWERS for layer in (-1, -2)),
    ],
)
def test_stock_logits_are_mmtrains_whatever_the_encoder(tiny, tmp_path, tower, select_layer):
    vision = make_tower(tmp_path / "vision", *TOWERS[tower])
    config = config_of(
        tiny, f"model.vision.name={vision}", f"model.vision.select_layer={select_layer}"
    )
    checkpoint = make_checkpoint(tmp_path / "run", config)
    exported = export(checkpoint, tmp_path / "out")
    load_stock(tmp_path / "out")
    found = compared(checkpoint, exported, torch.float32, 8)
    assert len(found.samples) == 8 and found.tokens >= 40
    assert found.difference <= 1e-4 and found.agreeing == found.tokens


# norms of their own, experts, recurrent layers
DAILY = ("tied gemma3_text", "gpt_oss", "qwen3_5_text")


@pytest.mark.parametrize("family", sweep(FAMILIES, DAILY))
def test_stock_logits_are_mmtrains_whatever_the_llm(tiny, make_tiny, tmp_path, family):
    *_, name = family.split()
    make_tiny.make_tiny_llm(
        tmp_path / "llm", name, layers=3, max_shard_size="150KB", **FAMILIES[family]
    )
    checkpoint = make_checkpoint(
        tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}")
    )
    exported = export(checkpoint, tmp_path / "out", shard_bytes=200_000)
    assert (tmp_path / "out" / INDEX).is_file()
    load_stock(tmp_path / "out")
    found = compared(checkpoint, exported, torch.float32, 4)
    assert found.difference <= 1e-4 and found.agreeing == found.tokens > 20


def test_every_tensor_is_the_published_one_and_the_projector_is_bitwise_the_trained_one(
    tiny, checkpoint, tmp_path
):
    export(checkpoint, tmp_path / "out")
    found = weights(tmp_path / "out")
    trained = load_file(checkpoint.tensors_file)
    expected = {f"multi_modal_{name}": tensor for name, tensor in trained.items()}
    for name, tensor in load_file(tiny / "llm" / "model.safetensors").items():
        expected[f"language_model.{name}"] = tensor
    assert expected.keys() == {name for name in found if not name.startswith("vision_tower.")}
    assert all(
        torch.equal(found[name].view(torch.int32), expected[name].view(torch.int32))
        for name in expected
    )


def test_what_was_trained_besides_the_projector_lies_in_its_place(tiny, tmp_path):
    generator = torch.Generator().manual_seed(3)
    llm = load_file(tiny / "llm" / "model.safetensors")
    places = {
        "llm.layers.7.mlp.down_proj.weight": "model.layers.7.mlp.down_proj.weight",
        "llm.norm.weight": "model.norm.weight",
        "llm.head.weight": "lm_head.weight",
    }
    others = {
        name: torch.randn(llm[place].shape, generator=generator) for name, place in places.items()
    }
    vision = load_file(tiny / "vision" / "model.safetensors")
    others["vision.blocks.2.attn.qkv.weight"] = torch.randn(
        vision["blocks.2.attn.qkv.weight"].shape
    )
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny), others)
    exported = export(checkpoint, tmp_path / "out")
    found = weights(tmp_path / "out")
    for name, place in places.items():
        assert torch.equal(found[f"language_model.{place}"], others[name])
    untouched = "model.layers.6.mlp.down_proj.weight"
    assert torch.equal(found[f"language_model.{untouched}"], llm[untouched])
    found = compared(checkpoint, exported, torch.float32, 4)
    assert found.difference <= 1e-4


@pytest.mark.parametrize(
    "name,why",
    [
        ("llm.layers.0.mlp.experts.gate_up_proj", "under another name or in several tensors"),
        ("llm.layers.9.mlp.down_proj.weight", "under another name or in several tensors"),
        ("llm.norm.weight", "Restore the model"),
        ("vision.blocks.77.norm1.weight", "vision.blocks.77"),
    ],
)
def test_a_trained_tensor_without_a_place_is_refused(tiny, tmp_path, name, why):
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny), {name: torch.ones(3, 3)})
    with pytest.raises(UserError, match=why):
        export(checkpoint, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, nightly(torch.float16)])
def test_another_dtype_is_a_cast_of_every_tensor_and_logits_are_those_of_rounded_weights(
    checkpoint, tmp_path, dtype
):
    exported = export(checkpoint, tmp_path / "cast", dtype)
    export(checkpoint, tmp_path / "exact")
    exact = weights(tmp_path / "exact")
    for name, tensor in weights(tmp_path / "cast").items():
        assert torch.equal(tensor, exact[name].to(dtype)), name
    assert load_stock(tmp_path / "cast", dtype="auto").dtype == dtype
    found = compared(checkpoint, exported, dtype, 4)
    assert found.difference <= 1e-4 and found.passed


def test_what_transformers_keeps_in_float32_is_not_rounded(tiny, make_tiny, tmp_path):
    make_tiny.make_tiny_llm(tmp_path / "llm", "deepseek_v3", layers=2)
    checkpoint = make_checkpoint(
        tmp_path / "run", config_of(tiny, f"model.llm.path={tmp_path / 'llm'}")
    )
    exported = export(checkpoint, tmp_path / "out", torch.bfloat16)
    found = weights(tmp_path / "out")
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert kept == set(exported.exact) and len(kept) == 1
    assert "e_score_correction_bias" in kept.pop()
    load_stock(tmp_path / "out", dtype="auto")


def test_the_code_in_the_model_card_runs_as_it_stands(checkpoint, tmp_path, monkeypatch, capsys):
    export(checkpoint, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Training rotates pictures by their EXIF orientation, as the code above does" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    Image.new("RGB", (50, 40), (200, 30, 30)).save(tmp_path / "out" / "picture.png")
    monkeypatch.chdir(tmp_path / "out")
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out.strip()


def test_whatever_the_loader_raises_is_a_refusal_with_the_formats_that_work():
    with pytest.raises(
        UserError,
        match=r"LlavaForConditionalGeneration does not load this model: .*; --format safet",
    ):
        refuse_loading_faults(stock_class("llava"), {"text_config": {"model_type": "none"}}, {})
