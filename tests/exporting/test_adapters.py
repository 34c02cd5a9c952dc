"""Runs with low-rank adapters, exported: merged into a folder's weights, or as peft's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_runs import train
from safetensors.torch import load_file
from untrained_runs import compared, config_of, export, load_stock, make_checkpoint, make_tower, weights

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig
from mmtrain.pretrained.adapters import is_adapter, with_adapters
from mmtrain.pretrained.shapes import llm_shape, vision_shape

ALL = "model.lora.targets=[llm.layers.*, vision.*]"


def drawn_adapters(config: RunConfig) -> dict[str, torch.Tensor]:
    """Of every layer that has one, by global name; neither matrix is zero."""
    chosen, draw = config.model.vision, torch.Generator().manual_seed(5)
    vision = vision_shape(chosen.name, chosen.select_layer, chosen.final_norm)
    llm, vision = with_adapters(llm_shape(config.model.llm.path), vision, config.model.lora)
    parameters = [*(one for layer in llm.decoder for one in layer), *vision.parameters]
    return {one.name: 0.05 * torch.randn(one.shape, generator=draw) for one in parameters if is_adapter(one.name)}


def adapted(folder: Path, config: RunConfig, others: dict[str, torch.Tensor] | None = None) -> StepFolder:
    """A checkpoint of a run with adapters that was never trained."""
    return make_checkpoint(folder, config, {**drawn_adapters(config), **(others or {})})


CASES = {
    "llama with a timm siglip": ("llama", {}, ("vit_base_patch16_siglip_224", {}), ALL),
    "tied qwen2 with a timm clip": ("qwen2", {"tied": True}, ("vit_base_patch16_clip_quickgelu_224", {}), ALL),
    "phi3, fused": ("phi3", {}, None, "model.lora.targets=[llm.layers.*.self_attn, llm.layers.1.mlp]"),
    "mixtral's attention": ("mixtral", {}, None, "model.lora.targets=[llm.layers.*.self_attn]"),
}


@pytest.mark.parametrize("case", CASES)
def test_stock_logits_of_merged_layers_are_those_of_layers_with_adapters(tiny, make_tiny, tmp_path, case):
    family, options, tower, targets = CASES[case]
    make_tiny.make_tiny_llm(tmp_path / "llm", family, layers=2, max_shard_size="150KB", **options)
    keys = [f"model.llm.path={tmp_path / 'llm'}", "model.lora.r=3", "model.lora.alpha=7.5", targets]
    if tower is not None:
        keys.append(f"model.vision.name={make_tower(tmp_path / 'vision', *tower)}")
    checkpoint = adapted(tmp_path / "run", config_of(tiny, *keys))
    exported = export(checkpoint, tmp_path / "out", shard_bytes=200_000)
    found = compared(checkpoint, tmp_path / "out", exported, torch.float32, 6)
    assert found.difference <= 1e-5 * max(1.0, found.largest) and found.agreeing == found.tokens > 20
    load_stock(tmp_path / "out")


def test_a_layer_with_an_adapter_that_trains_itself_too_is_merged_and_cast_once(tiny, tmp_path):
    config = config_of(tiny, "model.lora.r=4", "model.lora.alpha=2", "model.lora.targets=[llm.layers.3.mlp.up_proj]")
    name = "llm.layers.3.mlp.up_proj"
    checkpoint = adapted(tmp_path / "run", config, {f"{name}.weight": torch.randn(128, 64)})
    trained = load_file(checkpoint.tensors_file)
    whole = trained[f"{name}.weight"] + 0.5 * trained[f"{name}.lora_B.weight"] @ trained[f"{name}.lora_A.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        exported = export(checkpoint, tmp_path / str(dtype), dtype)
        found = weights(tmp_path / str(dtype))["language_model.model.layers.3.mlp.up_proj.weight"]
        assert torch.equal(found, whole.to(dtype))
        assert compared(checkpoint, tmp_path / str(dtype), exported, dtype, 2).passed


@pytest.mark.parametrize("name", ["llm.layers.9.mlp.up_proj", "vision.blocks.9.attn.qkv"])
def test_an_adapter_without_its_layer_is_refused(tiny, tmp_path, name):
    stray = {f"{name}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, "model.lora.r=4"), stray)
    with pytest.raises(UserError, match=f"{name}.lora_A.weight was trained"):
        export(checkpoint, tmp_path / "out")


def test_an_adapter_of_another_width_is_refused(tiny, tmp_path):
    stray = {f"llm.layers.0.mlp.up_proj.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, "model.lora.r=4"), stray)
    with pytest.raises(UserError, match=r"trained with shapes \[4, 4\] and \[4, 4\].*another model lies there"):
        export(checkpoint, tmp_path / "out")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """Three steps with adapters in LLM and encoder; the projector trains."""
    keys = (
        "model.lora.r=4",
        "model.lora.alpha=8",
        ALL,
        "parallel.pipeline=2",
        "train.max_steps=3",
        "optimizer.lr=0.02",
    )
    trainable = "model.trainable=[projector, llm.layers.*.lora_*, vision.*.lora_*]"
    return train(tiny / "config.yaml", f"run.dir={tmp_path_factory.mktemp('runs')}", trainable, *keys).folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_adapters_is_exported_and_verified(run, tmp_path, capsys, dtype):
    options = ["--checkpoint", str(run), "--format", "hf", "--out", str(tmp_path / "out"), "--dtype", dtype, "--verify"]
    assert main(["export", *options]) == 0
    assert "are answered in one batch as one at a time" in (said := capsys.readouterr().out) and "is open" not in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "low-rank adapters of 68 layers, merged into their weights; the projector between the two was too" in card
