"""A run beside a quantised LLM: named as what it is, the same in any layout, exported for the LLM
as it is.
"""

from __future__ import annotations

import re

import pytest
import torch
from fp8_products import needs_fp8_products
from json_files import read_json
from rank_runs import train
from safetensors.torch import load_file

from mmtrain.__main__ import main
from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.data.stream.loader import PackedBatches
from mmtrain.engine.single_stage import SingleStage, choose_kernels
from mmtrain.launching.data import check_data
from mmtrain.model.llm.compiled import Compiler, compiling
from mmtrain.model.stage import build_stage
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import quantised_source
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan

ADAPTERS = (
    "model.lora.r=4",
    "model.lora.alpha=8",
    "model.trainable=[projector, llm.layers.*.lora_*]",
)
RUN = (
    *ADAPTERS,
    "train.max_steps=3",
    "optimizer.lr=0.02",
    "checkpoint.every_minutes=null",
    "data.workers=0",
)
NF4 = "model.llm.quantize=nf4"


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Runs of three steps: 4-bit weights at pipeline 2 and 1, whole weights at pipeline 1."""
    folder = tmp_path_factory.mktemp("quantised")
    layouts = {
        "two": (NF4, "parallel.pipeline=2"),
        "one": (NF4, "parallel.pipeline=1"),
        "exact": ("parallel.pipeline=1",),
    }
    start = (tiny / "config.yaml", *RUN, f"run.dir={folder}")
    return {name: train(*start, f"run.name={name}", *how) for name, how in layouts.items()}


def test_layouts_of_a_quantised_run_agree_and_it_is_another_one_than_the_exact(runs):
    found = {name: list(run.losses().values()) for name, run in runs.items()}
    assert found["two"] == pytest.approx(found["one"], rel=1e-5)
    assert found["two"] != pytest.approx(found["exact"], rel=1e-4)
    states = {name: run.checkpoint(3).state for name, run in runs.items()}
    assert states["one"]["frozen_fingerprint"] == states["two"]["frozen_fingerprint"]
    assert states["two"]["frozen_fingerprint"] != states["exact"]["frozen_fingerprint"]
    assert (
        states["one"]["frozen_files"]
        == states["two"]["frozen_files"]
        == states["exact"]["frozen_files"]
    )


def test_plan_and_audit_name_it(tiny, runs):
    audits = {name: read_json(run.folder / "audit.json")["ranks"] for name, run in runs.items()}
    assert [rank["frozen"]["streamed_from"] for rank in audits["two"]] == ["nf4", "nf4"]
    assert [rank["frozen"]["streamed_from"] for rank in audits["exact"]] == [None]
    assert all(rank["frozen"]["fetches"] > 0 for rank in audits["two"])
    plan = make_plan(load_config(tiny / "config.yaml", [*RUN, NF4, "parallel.pipeline=1"]))
    said = " ".join(" ".join(render(plan)).split())
    assert (
        "8 of 8 layers are quantised" in said
        and "quantised layers: nf4, made whole before each use" in said
    )
    exact = make_plan(load_config(tiny / "config.yaml", [*RUN, "parallel.pipeline=1"]))
    assert plan.ranks[0].weight_bytes < exact.ranks[0].weight_bytes


def test_a_run_does_not_go_on_with_other_bits(tiny, runs, tmp_path):
    with pytest.raises(UserError, match=r'model\.llm\.quantize: was "nf4", is now null'):
        train(
            tiny / "config.yaml", *RUN, f"run.dir={tmp_path}", resume=runs["two"].checkpoint(3).path
        )


def test_what_was_trained_is_exported_for_the_llm_as_its_files_have_it(tiny, runs, tmp_path):
    out, options = tmp_path / "out", [str(runs["two"].folder), "--verify", "4"]
    assert main(["export", *options, "--format", "hf", "--out", str(out)]) == 0
    card = (out / "README.md").read_text()
    assert "quantised to nf4 during training, but not here" in card
    stock = load_file(tiny / "llm" / "model.safetensors")
    exported = {
        name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()
    }
    norm = next(
        name for name in exported if re.search(r"layers\.3\.input_layernorm\.weight$", name)
    )
    assert exported[norm].equal(
        stock["model.layers.3.input_layernorm.weight"].to(exported[norm].dtype)
    )


def projector_gradient(module, batch):
    module.zero_grad()
    loss, _ = module.loss(module.start(batch), batch.positions, batch.labels)
    loss.backward()
    if module.streamed is not None:
        module.streamed.end()
    return torch.cat([p.grad.flatten().double() for p in module.projector.parameters()])


@needs_fp8_products
@pytest.mark.nightly
def test_the_demos_gradient_beside_an_llm_in_fp8_is_nearer_than_beside_nf4(tmp_path):
    """8 packs of the demo, the projector as drawn; measured: 5.9% and 6.6% off, nf4 12.9%."""

    def built(*keys):
        keys = ("parallel.pipeline=1", "train.packs_per_microbatch=8", *keys)
        config = load_config("example:llava_pp4", keys)
        stage = make_plan(config).ranks[0].stages[0]
        streamed = None
        if config.model.llm.quantize is not None:
            source = quantised_source(config.model.llm.quantize, torch.device("cpu"))
            streamed = StreamedLayers(source)
        return config, build_stage(config, stage, streamed=streamed)

    config, module = built()
    config, data = check_data(config, others_wait=False)
    packed = PackedBatches(config, replica=0, replicas=1, first_step=0, data=data, position=None)
    batch = next(iter(packed))
    exact = projector_gradient(module, batch)

    def error(module):
        return (projector_gradient(module, batch) - exact).norm() / exact.norm()

    _, module = built("model.llm.quantize=fp8")
    assert 0.02 < error(module) < 0.12
    alone = SingleStage(module, batch, input_gradient=False, backward=True)
    try:
        with compiling():
            chosen = choose_kernels(Compiler(True, tmp_path, deterministic=False), [alone])
            assert "fp8" in {way.kernel for way in chosen}
            assert 0.02 < error(module) < 0.12
    finally:
        torch.compiler.set_stance("default")
