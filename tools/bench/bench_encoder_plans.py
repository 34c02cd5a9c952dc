"""Plans of real models with the frozen encoder in slices over the ranks, beside the whole encoder
on rank 0.

Nothing runs. Steps are told over balanced work, which is what a step computes, nothing recomputed,
in equal parts on all ranks: no order of work is below 1. Each plan is the planner's own, of the
instruction lists that the engine would run, at speeds assumed of a GPU (mmtrain/plan/calibration.py
says which, and why) and without a memory limit.

Models that mmtrain has no record of are made from the numbers in their published config.json.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from bench_tables import positive, print_table
from transformers import (
    InternVLVisionConfig,
    InternVLVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from mmtrain.base.printing import print_info
from mmtrain.config.load import validated
from mmtrain.facts.models import Models
from mmtrain.facts.shapes import (
    LlmShape,
    VisionShape,
    llm_shape,
    llm_shape_from,
    vision_shape,
    vision_shape_from,
)
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles
from mmtrain.plan.calibration import GPU, assumed_timings
from mmtrain.plan.costs import run_costs
from mmtrain.plan.search import PipelineLayout, Search
from mmtrain.plan.stage_costs import Setting, StageCosts

EXAMPLES = """\
examples:
  everything, some minutes on one core:
    python tools/bench/bench.py encoder_plans
  one model on a pipeline of 8:
    python tools/bench/bench.py encoder_plans --model "SigLIP 81 + Qwen3-8B" --pipeline 8
"""
SIGLIP, QWEN3_8B, QWEN25_72B = (
    "vit_so400m_patch14_siglip_384.webli",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-72B-Instruct",
)
INTERN_VIT, INTERN_LM2 = "InternViT-6B-448px-V1-5", "InternLM2-20B"


@dataclass(frozen=True)
class Case:
    """An encoder beside an LLM, with the images and texts that they are planned for."""

    vision: str
    llm: str
    connector: str
    positions_per_tile: int
    tiles: int = 1  # of an image
    factor: int | None = None
    pack_length: int = 4096
    text_tokens: int = 80  # of a sample, beside one image


CASES = {
    "InternViT-6B + InternLM2-20B": Case(
        INTERN_VIT, INTERN_LM2, "shuffle_mlp2x_gelu", 256, 5, 2, 16384
    ),
    "InternViT-6B + Qwen2.5-72B": Case(
        INTERN_VIT, QWEN25_72B, "shuffle_mlp2x_gelu", 256, 5, 2, 16384
    ),
    "SigLIP 81 + Qwen3-8B": Case(SIGLIP, QWEN3_8B, "shuffle_swiglu", 81, factor=3),
    "SigLIP 729 + Qwen3-8B": Case(SIGLIP, QWEN3_8B, "mlp2x_gelu", 729),
    "SigLIP 81 + Qwen2.5-72B": Case(SIGLIP, QWEN25_72B, "shuffle_swiglu", 81, factor=3),
    "SigLIP 729 + Qwen2.5-72B": Case(SIGLIP, QWEN25_72B, "mlp2x_gelu", 729),
}


class Figures(NamedTuple):
    """A plan against balanced work, which is 1."""

    step: float
    slowest: float  # the work of the rank that has most
    layout: PipelineLayout


# ---- models


@functools.cache
def _vision_shape(name: str) -> VisionShape:
    """Return a recorded shape, or InternViT-6B's."""
    if name != INTERN_VIT:
        return vision_shape(name, -1)
    config = InternVLVisionConfig(
        hidden_size=3200,
        intermediate_size=12800,
        num_hidden_layers=45,
        num_attention_heads=25,
        image_size=448,
        patch_size=14,
        use_qk_norm=True,
        norm_type="rms_norm",
    )
    return vision_shape_from(
        config.to_dict(), _tensors(InternVLVisionModel, config), -1, "made from its config.json"
    )


@functools.cache
def _llm_shape(name: str) -> LlmShape:
    """Return a recorded shape, or InternLM2-20B's, which is a Llama with queries, keys and values
    in one matrix.
    """
    if name != INTERN_LM2:
        return llm_shape(name)
    config = LlamaConfig(
        hidden_size=6144,
        intermediate_size=16384,
        num_attention_heads=48,
        num_key_value_heads=8,
        num_hidden_layers=48,
        vocab_size=92544,
    )
    return llm_shape_from(
        config.to_dict(), _tensors(LlamaForCausalLM, config), "made from its config.json"
    )


def _tensors(
    model_class: type[PreTrainedModel], config: PreTrainedConfig
) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {
            name: tuple(tensor.shape) for name, tensor in model_class(config).state_dict().items()
        }


def costs_of(case: Case, pipeline: int, microbatches: int) -> StageCosts:
    """Return the costs of a case's plan."""
    layout = Square if case.tiles == 1 else Tiles
    projector = {"type": case.connector} | ({} if case.factor is None else {"factor": case.factor})
    data: dict[str, Any] = {
        "shards": "none.tar",
        "pack_length": case.pack_length,
        "expected_text_tokens": case.text_tokens,
    }
    if case.tiles > 1:
        expected = {"tiles": case.tiles, "positions": case.tiles * case.positions_per_tile}
        data |= {f"expected_image_{key}": value for key, value in expected.items()}
    content = {
        "run": {"name": "plan"},
        "model": {
            "llm": {"path": case.llm},
            "vision": {"name": case.vision, "select_layer": -1, "layout": layout.name},
            "projector": projector,
        },
        "data": data,
        "parallel": {"pipeline": pipeline},
        "train": {"packs_per_step": microbatches, "max_steps": 1},
    }
    config = validated(content, "a case")
    vision, llm = _vision_shape(case.vision), _llm_shape(case.llm)
    models = Models(config.model, config.data.images)
    # a case's shapes are in no folder
    image_layout = layout(case.positions_per_tile, vision.image_size)
    vars(models).update(published_llm=llm, published_vision=vision, layout=image_layout)
    costs = run_costs(config, models)
    return StageCosts(
        costs, assumed_timings(costs, 1, GPU), Setting(pipeline, microbatches, None, "auto")
    )


# ---- plans


def balanced_seconds(costs: StageCosts) -> float:
    """Seconds of a step's work, nothing recomputed, in equal parts on all ranks."""
    work = costs.timings.encode + sum(
        layer.forward + layer.backward for layer in costs.timings.layers
    )
    return work * costs.setting.microbatches_per_step / costs.setting.pipeline


def encoder_share(costs: StageCosts) -> float:
    """The encoder's part of a step's work."""
    ranks = costs.setting.pipeline / costs.setting.microbatches_per_step
    return costs.timings.encode / (balanced_seconds(costs) * ranks)


def figures(layout: PipelineLayout, costs: StageCosts) -> Figures:
    """A layout against balanced work."""
    work = balanced_seconds(costs)
    slowest = max(rank.seconds for rank in layout.ranks) * costs.setting.microbatches_per_step
    return Figures(layout.simulation.seconds / work, slowest / work, layout)


# ---- tables


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        action="append",
        choices=CASES,
        metavar="NAME",
        help=f"only these of: {'; '.join(CASES)}",
    )
    add(
        "--pipeline",
        type=positive,
        nargs="+",
        default=[4, 8, 16],
        metavar="N",
        help="ranks (4 8 16)",
    )
    add(
        "--microbatches",
        type=positive,
        nargs="+",
        default=[16, 32, 64],
        metavar="N",
        help="of a step (16 32 64)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    rows = []
    for name in options.model or CASES:
        for pipeline in options.pipeline:
            for microbatches in options.microbatches:
                print_info(f"{name}, pipeline {pipeline}, {microbatches} micro-batches")
                costs = costs_of(CASES[name], pipeline, microbatches)
                slices = figures(Search(costs, "auto").find("auto"), costs)
                rank_0 = figures(Search(costs).find("auto"), costs)  # the whole encoder there
                numbers = [f"{number:.3f}" for number in (slices.step, slices.slowest, rank_0.step)]
                rows.append((name, f"{encoder_share(costs):.1%}", pipeline, microbatches, *numbers))
    print_table(
        ("model", ">encoder", ">p", ">m", ">slices", ">slowest rank", ">rank 0 alone"), rows
    )
    return 0
