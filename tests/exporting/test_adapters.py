"""Runs with low-rank adapters, exported: merged into a folder's weights, or as peft's own files."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from json_files import read_json
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from PIL import Image
from rank_runs import train
from safetensors.torch import load_file
from tiers import nightly
from transformers import AutoModelForCausalLM, AutoProcessor, PreTrainedModel
from untrained_runs import (
    compared,
    config_of,
    drawn_adapters,
    export,
    load_stock,
    make_checkpoint,
    make_tower,
    run_export,
    weights,
)

from mmtrain.api.generate import generate
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder, find
from mmtrain.config.schema import RunConfig
from mmtrain.exporting.verify import read_samples
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.families import canonical_name
from mmtrain.plan.planner import make_plan

ALL = "model.lora.targets=[llm.layers.*, vision.*]"


def adapted(
    folder: Path, config: RunConfig, others: dict[str, torch.Tensor] | None = None
) -> StepFolder:
    """A checkpoint of a run with adapters that was never trained."""
    return make_checkpoint(folder, config, {**drawn_adapters(config), **(others or {})})


@pytest.mark.parametrize(
    ("family", "options", "tower", "targets"),
    [
        ("qwen2", {"tied": True}, ("vit_base_patch16_clip_quickgelu_224", {}), ALL),
        # fused
        ("phi3", {}, None, "model.lora.targets=[llm.layers.*.self_attn, llm.layers.1.mlp]"),
    ],
)
def test_stock_logits_of_merged_layers_are_those_of_layers_with_adapters(
    tiny, make_tiny, tmp_path, family, options, tower, targets
):
    make_tiny.make_tiny_llm(tmp_path / "llm", family, layers=2, max_shard_size="150KB", **options)
    keys = [f"model.llm.path={tmp_path / 'llm'}", "model.lora.r=3", "model.lora.alpha=7.5", targets]
    if tower is not None:
        keys.append(f"model.vision.name={make_tower(tmp_path / 'vision', *tower)}")
    checkpoint = adapted(tmp_path / "run", config_of(tiny, *keys))
    exported = export(checkpoint, tmp_path / "out", shard_bytes=200_000)
    found = compared(checkpoint, exported, torch.float32, 6)
    assert (
        found.difference <= 1e-5 * max(1.0, found.largest) and found.agreeing == found.tokens > 20
    )
    load_stock(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("llm.layers.9.mlp.up_proj", r"llm.layers.9.mlp.up_proj.lora_A.weight trains"),
        ("vision.blocks.9.attn.qkv", r"vision.blocks.9.attn.qkv.lora_A.weight was trained"),
        (
            "llm.layers.0.mlp.up_proj",
            r"trained with shapes \[4, 4\] and \[4, 4\].*Restore the model",
        ),
    ],
)
def test_an_adapter_without_its_layer_or_of_another_width_is_refused(tiny, tmp_path, name, error):
    stray = {f"{name}.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, "model.lora.r=4"), stray)
    with pytest.raises(UserError, match=error):
        export(checkpoint, tmp_path / "out")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """Two steps with adapters in LLM and encoder; the projector trains."""
    keys = (
        "model.lora.r=4",
        "model.lora.alpha=8",
        ALL,
        "parallel.pipeline=1",
        "train.max_steps=2",
        "optimizer.lr=0.02",
    )
    trainable = "model.trainable=[projector, llm.layers.*.lora_*, vision.*.lora_*]"
    return train(
        tiny / "config.yaml", f"run.dir={tmp_path_factory.mktemp('runs')}", trainable, *keys
    ).folder


@pytest.fixture(scope="module")
def merged(run, tmp_path_factory) -> Path:
    """The run's whole model, verified."""
    out = tmp_path_factory.mktemp("merged") / "out"
    assert run_export(run, "hf", out, "--verify", "4") == 0
    return out


def test_a_run_with_adapters_is_exported_verified_and_asked(run, merged, tmp_path, own_cache):
    card, picture = (merged / "README.md").read_text(), Image.new("RGB", (28, 28), "red")
    assert generate(run, picture, max_new_tokens=4) == generate(merged, picture, max_new_tokens=4)
    assert (
        "low-rank adapters of 68 layers, merged into their weights. "
        "The projector between the two was trained too" in card
    )


def as_peft(checkpoint: Path | StepFolder, out: Path, *more: str) -> Path:
    path = checkpoint if isinstance(checkpoint, Path) else checkpoint.path
    assert run_export(path, "peft", out, *more) == 0
    return out


def put_on(base: PreTrainedModel, folder: Path) -> PeftModel:
    """As stock peft does it; every tensor of the file must find its place, and no other be looked
    for.
    """
    with warnings.catch_warnings(action="error", category=UserWarning):
        model = PeftModel.from_pretrained(base, folder)
    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    stored = load_file(folder / "adapter_model.safetensors")
    assert found.keys() == stored.keys() and all(
        torch.equal(found[name], stored[name]) for name in stored
    )
    return model.eval()


def test_peft_adds_a_runs_adapters_to_the_folder_beside_them(run, merged, tmp_path, monkeypatch):
    out = as_peft(run, tmp_path / "out")
    monkeypatch.chdir(out)
    made: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)[0], made)
    model = put_on(load_stock(out / "base"), out)
    assert {layer.scaling["default"] for layer in model.modules() if hasattr(layer, "lora_A")} == {
        2.0
    }
    whole, processor = load_stock(merged), AutoProcessor.from_pretrained(out / "base")
    samples = [sample for sample, _ in read_samples(find(run).config, 6) if len(sample.images) == 1]
    images = [[Image.open(io.BytesIO(sample.images[0]))] for sample in samples]
    text = [
        processor.image_token,
        f"{processor.image_token} a",
        f"{processor.image_token} a red square on",
    ] * 2
    inputs = processor(images=images, text=text[: len(images)], return_tensors="pt", padding=True)
    told = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    answers = [one.generate(**inputs, **told) for one in (model, whole, made["model"].eval())]
    for other in answers[1:]:
        assert torch.equal(answers[0].sequences, other.sequences) and len(images) >= 3
        torch.testing.assert_close(
            torch.stack(answers[0].logits), torch.stack(other.logits), rtol=0, atol=1e-5
        )
    found, wanted = model.merge_and_unload().state_dict(), whole.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
IN_LAYER_1 = [f"model.layers.1.self_attn.{name}" for name in ATTENTION]
LLMS = {
    "llama": (
        {},
        "llm.layers.*",
        ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    ),
    "qwen2": ({"tied": True}, "llm.layers.1.self_attn", IN_LAYER_1),
    "gpt2": (
        {},
        "llm.layers.*.attn",
        [f"transformer.h.{n}.attn.{name}" for n in range(3) for name in ("c_attn", "c_proj")],
    ),
    "qwen3_moe": ({}, "llm.layers.1.self_attn", IN_LAYER_1),
}


@pytest.mark.parametrize("family", ["qwen2", "gpt2", *map(nightly, ("llama", "qwen3_moe"))])
def test_peft_adds_adapters_to_the_published_llm_with_the_scale_of_training(
    tiny, make_tiny, tmp_path, family
):
    options, targets, wanted = LLMS[family]
    make_tiny.make_tiny_llm(tmp_path / "llm", family, layers=3, **options)
    keys = (
        f"model.llm.path={tmp_path / 'llm'}",
        "model.lora.r=4",
        "model.lora.alpha=6",
        f"model.lora.targets=[{targets}]",
    )
    checkpoint = adapted(tmp_path / "run", config_of(tiny, *keys))
    out = as_peft(checkpoint, tmp_path / "out", "--base", "llm")
    trained, stock = (
        load_file(checkpoint.tensors_file),
        AutoModelForCausalLM.from_pretrained(tmp_path / "llm"),
    )
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    after = put_on(stock, out).merge_and_unload().state_dict()
    described = read_json(out / "adapter_config.json")
    assert described["target_modules"] == wanted
    assert described["base_model_name_or_path"] == "llm"  # no folder of this machine
    moved = 0
    for name, tensor in after.items():
        layer = canonical_name(name).removesuffix(".weight")
        if f"{layer}.lora_A.weight" in trained:
            update = 1.5 * trained[f"{layer}.lora_B.weight"] @ trained[f"{layer}.lora_A.weight"]
            torch.testing.assert_close(
                tensor - before[name], update.T if family == "gpt2" else update, rtol=0, atol=1e-6
            )
            moved += 1
        else:
            assert torch.equal(tensor, before[name])
    assert 2 * moved == sum(map(is_adapter, trained))
    projector = load_file(out / "projector.safetensors")
    assert projector.keys() == {name for name in trained if name.startswith("projector.")}
    assert all(torch.equal(tensor, trained[name]) for name, tensor in projector.items())


def test_an_adapter_of_a_layer_that_loading_renames_is_merged(tiny, make_tiny, tmp_path):
    heads = {"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16}
    make_tiny.make_tiny_llm(tmp_path / "llm", "kimi_linear", layers=2, **heads)
    targets = "model.lora.targets=[llm.layers.0.self_attn.forget_gate.f_a_proj]"
    keys = (
        f"model.llm.path={tmp_path / 'llm'}",
        "parallel.pipeline=1",
        "model.lora.r=4",
        "model.lora.alpha=6",
    )
    config = config_of(
        tiny, *keys, targets, "export.format=hf", "model.trainable=[projector, llm.layers.*.lora_*]"
    )
    make_plan(config)
    checkpoint = adapted(tmp_path / "run", config)
    export(checkpoint, tmp_path / "out")
    trained = load_file(checkpoint.tensors_file)
    layer, on_disk = (
        "llm.layers.0.self_attn.forget_gate.f_a_proj",
        "model.layers.0.self_attn.f_a_proj.weight",
    )
    update = 1.5 * trained[f"{layer}.lora_B.weight"] @ trained[f"{layer}.lora_A.weight"]
    written = weights(tmp_path / "out")[f"language_model.{on_disk}"]
    torch.testing.assert_close(
        written, weights(tmp_path / "llm")[on_disk] + update, rtol=0, atol=1e-6
    )


@pytest.fixture
def moe(tiny, make_tiny, tmp_path) -> Callable[[str], StepFolder]:
    """A run on deepseek_v3, whose first layer is dense, with adapters where these targets say."""
    make_tiny.make_tiny_llm(tmp_path / "llm", "deepseek_v3", layers=3)

    def run_of(targets: str) -> StepFolder:
        keys = (
            f"model.llm.path={tmp_path / 'llm'}",
            "model.lora.r=3",
            f"model.lora.targets=[{targets}]",
        )
        return adapted(tmp_path / "run", config_of(tiny, *keys))

    return run_of


@pytest.mark.nightly
def test_adapters_of_dense_layers_and_shared_experts_leave_with_the_whole_model(moe, tmp_path):
    checkpoint = moe("llm.layers.0.mlp, llm.layers.*.shared_experts, llm.layers.2.self_attn.o_proj")
    exported = export(checkpoint, tmp_path / "merged")
    assert compared(checkpoint, exported, torch.float32, 2).passed
    out = as_peft(
        checkpoint, tmp_path / "out", "--base", "hf", "--dtype", "float32", "--verify", "2"
    )
    put_on(load_stock(out / "base"), out)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            "llm.layers.0.mlp",
            "trained with shape (3, 128), but peft would look for None in DeepseekV3ForCausalLM",
        ),
        (
            "llm.layers.*.shared_experts.up_proj",
            "peft cannot add these adapters to DeepseekV3ForCausalLM: Cannot conv",
        ),
    ],
)
def test_adapters_that_peft_takes_for_those_of_experts_are_refused(
    moe, tmp_path, capsys, targets, said
):
    assert run_export(moe(targets).path, "peft", tmp_path / "out", "--base", "llm") == 2
    error = capsys.readouterr().err
    assert said in error and "Use --format hf" in error


@pytest.mark.parametrize(
    ("targets", "others", "options", "said"),
    [
        ("vision.*", {}, [], "model.lora gives it none"),
        (
            "llm.layers.*, vision.*",
            {},
            ["--base", "llm"],
            "trains too, but adapters of the published LLM",
        ),
        (
            "llm.layers.*",
            {"llm.norm.weight": torch.ones(64)},
            ["--base", "llm"],
            "llm.norm.weight trains too",
        ),
        ("llm.layers.*", {}, ["--base", "llm", "--verify"], "Set base hf (--base hf)"),
    ],
)
def test_what_adapters_would_leave_out_is_refused(
    tiny, tmp_path, capsys, targets, others, options, said
):
    config = config_of(tiny, "model.lora.r=2", f"model.lora.targets=[{targets}]")
    checkpoint = adapted(tmp_path / "run", config, others)
    assert run_export(checkpoint.path, "peft", tmp_path / "out", *options) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_else_was_trained_is_in_the_base(tiny, tmp_path):
    others = {
        "llm.norm.weight": torch.linspace(1, 2, 64),
        "llm.layers.2.mlp.up_proj.weight": torch.randn(128, 64),
    }
    config = config_of(tiny, "model.lora.r=2", "model.lora.targets=[llm.layers.2.mlp]")
    out = as_peft(adapted(tmp_path / "run", config, others), tmp_path / "out")
    found = weights(out / "base")
    assert torch.equal(found["language_model.model.norm.weight"], others["llm.norm.weight"])
    assert torch.equal(
        found["language_model.model.layers.2.mlp.up_proj.weight"],
        others["llm.layers.2.mlp.up_proj.weight"],
    )


def test_a_run_on_text_alone_leaves_with_its_adapters_merged_or_apart(tiny, tmp_path, capsys):
    keys = (
        "model.vision=null",
        "data.template=llava_v1",
        "data.images=strip",
        "model.lora.r=3",
        "model.trainable=[llm.layers.*.lora_*]",
    )
    config = config_of(tiny, *keys)
    checkpoint = make_checkpoint(tmp_path / "run", config, drawn_adapters(config))
    assert run_export(checkpoint.path, "peft", tmp_path / "merged", "--verify", "4") == 2
    assert "for the published LLM. Set base hf (--base hf)" in capsys.readouterr().err
    assert run_export(checkpoint.path, "hf", tmp_path / "merged", "--verify", "4") == 0
    as_peft(checkpoint, tmp_path / "own", "--base", "hf", "--dtype", "bfloat16", "--verify", "4")
    out = as_peft(checkpoint, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for base, folder in ((tiny / "llm", out), (tmp_path / "own" / "base", tmp_path / "own")):
        stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        whole = put_on(stock, folder).merge_and_unload().state_dict()
        assert whole.keys() == merged.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(
                whole[name], tensor, rtol=0, atol=1e-6 if folder == out else 5e-3
            )
    assert {file.name for file in out.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
