"""Runs beside an LLM that is published in FP8: the same numbers however its codes are kept, and they
leave as they came.
"""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from coded_folders import write_codes
from json_files import read_json, write_json
from rank_runs import train
from safetensors.torch import load_file
from stock_encoders import HF_SIZES
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel
from transformers.quantizers import quantizer_finegrained_fp8
from untrained_runs import compared, export, make_checkpoint, weights
from whole_models import save_whole

import mmtrain
from mmtrain.__main__ import main
from mmtrain.api.generate import load
from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import llm_shape
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan
from mmtrain.plan.suggest import candidates

RUN = (
    "model.llm.dtype=float32",
    "model.lora.r=4",
    "model.lora.alpha=8",
    "model.lora.targets=[llm.layers.*.q_proj]",
    "model.trainable=[projector, llm.layers.*.lora_*]",
    "train.max_steps=3",
    "optimizer.lr=0.02",
    "checkpoint.every_minutes=null",
    "data.workers=0",
)
PUBLISHED = "model.llm.quantize=published"
LAYOUTS = {
    "dequantised": ("parallel.pipeline=1",),
    "streamed": ("parallel.pipeline=1", "parallel.streamed_layers=8"),
    "one": ("parallel.pipeline=1", PUBLISHED),
    "two": ("parallel.pipeline=2", PUBLISHED),
}


@pytest.fixture(scope="module")
def coded(tiny, tmp_path_factory):
    """The tiny run's LLM in FP8."""
    folder = tmp_path_factory.mktemp("coded") / "llm"
    shutil.copytree(tiny / "llm", folder)
    write_codes(folder)
    return folder


@pytest.fixture(scope="module")
def start(tiny, coded):
    return tiny / "config.yaml", *RUN, f"model.llm.path={coded}"


@pytest.fixture(scope="module")
def runs(start, tmp_path_factory):
    start = (*start, f"run.dir={tmp_path_factory.mktemp('runs')}")
    return {name: train(*start, f"run.name={name}", *how) for name, how in LAYOUTS.items()}


def test_every_way_of_keeping_codes_gives_the_same_run(runs):
    expected = runs["dequantised"].losses()
    assert runs["one"].losses() == runs["streamed"].losses() == expected
    assert list(runs["two"].losses().values()) == pytest.approx(list(expected.values()), rel=1e-5)
    states = {name: run.checkpoint(3).state for name, run in runs.items()}
    assert states["one"]["frozen_fingerprint"] == states["two"]["frozen_fingerprint"]
    assert states["one"]["frozen_files"] == states["dequantised"]["frozen_files"]
    audit = read_json(runs["two"].folder / "audit.json")["ranks"]
    assert [rank["frozen"]["streamed_from"] for rank in audit] == ["published", "published"]


def test_a_run_beside_codes_resumes_with_the_same_bits(start, runs, tmp_path):
    start = (*start, PUBLISHED, "parallel.pipeline=2", f"run.dir={tmp_path}")
    train(*start, "run.name=cut", "train.max_steps=3", "checkpoint.every_steps=1")
    resumed = train(
        *start, "run.name=on", resume=tmp_path / "cut" / "checkpoints" / "step-00000001"
    )
    ours, theirs = (load_file(run.checkpoint(3).tensors_file) for run in (resumed, runs["two"]))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_plan_knows_their_bytes_and_calls_it_no_other_llm(start):
    config = load_config(start[0], [*start[1:], PUBLISHED, "parallel.pipeline=1"])
    plan = make_plan(config)
    said = " ".join(" ".join(render(plan)).split())
    assert "quantised layers: published, made whole before each use" in said
    assert "another LLM" not in said
    whole = make_plan(config.changed({"model.llm.quantize": None}))
    assert plan.ranks[0].weight_bytes < whole.ranks[0].weight_bytes


def test_layouts_with_published_codes_are_tried_where_there_are_any(tiny, start):
    config = load_config(start[0], start[1:])
    published = {"model.llm.quantize": "published"}
    for path, expected in ((config.model.llm.path, True), (str(tiny / "llm"), False)):
        layouts = candidates(config, llm_shape(path), 1)
        assert any(published.items() <= layout.items() for layout in layouts) == expected


def test_published_needs_codes(tiny):
    config = load_config(tiny / "config.yaml", [*RUN, PUBLISHED])
    with pytest.raises(UserError, match=r"published needs .* FP8 or MXFP4 codes; .* has none"):
        make_plan(config)


class TorchWithGpu:
    """torch, to a reader of codes that asks for a GPU: one that multiplies FP8."""

    cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0))

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("two", torch.float32), ("dequantised", torch.bfloat16)],
    ids=["two-float32", "dequantised-bfloat16"],
)
def test_codes_are_exported_byte_for_byte_and_merged_weights_in_the_exports_type(
    coded, runs, tmp_path, layout, dtype, monkeypatch
):
    monkeypatch.setattr(quantizer_finegrained_fp8, "torch", TorchWithGpu())
    out = tmp_path / "out"
    name = str(dtype).removeprefix("torch.")
    options = ["--format", "hf", "--dtype", name, "--verify", "4", "--out", str(out)]
    assert main(["export", str(runs[layout].folder), *options]) == 0
    assert "quantised" not in (out / "README.md").read_text()
    published = load_file(coded / "model.safetensors")
    exported = {}
    for file in out.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            exported[re.sub(r"^.*language_model\.(model\.)?", "", name)] = tensor
    codes = {name.removeprefix("model."): t for name, t in published.items() if "_proj" in name}
    assert codes
    for name, tensor in codes.items():
        if "q_proj" not in name:
            assert exported[name].dtype == tensor.dtype
            assert torch.equal(exported[name].view(torch.uint8), tensor.view(torch.uint8))
        elif name.endswith("_scale_inv"):
            assert name not in exported
        else:
            assert exported[name].dtype == dtype
    settings = read_json(out / "config.json")["quantization_config"]
    assert settings["weight_block_size"] == [128, 128]
    assert any(module.endswith("q_proj") for module in settings["modules_to_not_convert"])


def with_llm(tiny, folder, name):
    """A step folder of an untrained run beside this LLM."""
    config = load_config(tiny / "config.yaml", [f"model.llm.path={folder}"])
    return make_checkpoint(folder.parent / name, config)


def test_a_mixture_of_experts_leaves_with_its_codes_and_a_tied_head_without(
    make_tiny, tiny, tmp_path, monkeypatch
):
    folder = make_tiny.make_tiny_llm(tmp_path / "llm", "qwen3_moe", layers=3, tied=True)
    write_codes(folder)
    checkpoint = with_llm(tiny, folder, "run")
    exported = export(checkpoint, tmp_path / "out", torch.bfloat16)
    assert compared(checkpoint, exported, torch.bfloat16, 2).passed
    experts = [name for name in weights(tmp_path / "out") if ".experts." in name]
    assert any(name.endswith("weight_scale_inv") for name in experts)
    settings = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert "lm_head" in settings["modules_to_not_convert"]
    monkeypatch.setattr(quantizer_finegrained_fp8, "torch", TorchWithGpu())
    model, _ = load(tmp_path / "out")
    assert not any("FP8" in type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("method", [None, "mxfp4"])
def test_codes_that_transformers_would_not_read_leave_as_weights(coded, tiny, tmp_path, method):
    encoder, llm = tmp_path / "vision", tmp_path / "llm"
    SiglipVisionModel(SiglipVisionConfig(**HF_SIZES)).save_pretrained(encoder)
    SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(encoder)
    write_codes(encoder)
    overrides = [f"model.vision.name={encoder}"]
    if method is not None:
        shutil.copytree(coded, llm)
        content = read_json(llm / "config.json")
        content["quantization_config"] = {"quant_method": method}
        write_json(llm / "config.json", content)
        overrides.append(f"model.llm.path={llm}")
    checkpoint = make_checkpoint(tmp_path / "run", load_config(tiny / "config.yaml", overrides))
    exported = export(checkpoint, tmp_path / "out")
    assert compared(checkpoint, exported, torch.float32, 2).passed
    assert all(tensor.dtype.itemsize > 1 for tensor in weights(tmp_path / "out").values())
    assert "quantization_config" not in read_json(tmp_path / "out" / "config.json")


def test_blocks_that_transformers_would_cut_otherwise_are_not_compared(make_tiny, tiny, tmp_path):
    folder = make_tiny.make_tiny_llm(tmp_path / "llm", intermediate_size=192, layers=2)
    write_codes(folder)
    checkpoint = with_llm(tiny, folder, "run")
    exported = export(checkpoint, tmp_path / "out")
    with pytest.raises(UserError, match=r"_proj\.weight \(.*192.*\) is no multiple of 128"):
        compared(checkpoint, exported, torch.float32, 2)


@pytest.mark.slow
def test_a_whole_model_with_codes_is_written_back_byte_for_byte(make_tiny, tiny, tmp_path):
    folder, out = tmp_path / "whole", tmp_path / "out"
    save_whole("qwen3_vl", folder, make_tiny.make_tokenizer())
    write_codes(folder)
    content = yaml.safe_load((tiny / "config.yaml").read_text())
    content["model"] = {"pretrained": str(folder)}
    content["data"]["template"] = "chat"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    config = mmtrain.load_config(tmp_path / "config.yaml")
    assert models_of(config).llm.has_published_codes
    checkpoint = make_checkpoint(tmp_path / "run", config)
    exported = export(checkpoint, out)
    assert compared(checkpoint, exported, torch.float32, 2).passed
    before, after = load_file(folder / "model.safetensors"), weights(out)
    changed = set()
    for name, tensor in before.items():
        if not torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)):
            changed.add(name)
    assert before.keys() == after.keys() and changed
    assert all("merger" in name for name in changed)

    content = read_json(folder / "config.json")
    content["quantization_config"] = {"quant_method": "mxfp4"}  # which its codes are not
    write_json(folder / "config.json", content)
    export(make_checkpoint(tmp_path / "other", config), tmp_path / "weights")
    assert "quantization_config" not in read_json(tmp_path / "weights" / "config.json")
