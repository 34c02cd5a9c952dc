"""Run configuration: strict, frozen, typed YAML.

Every key is declared here with its meaning; an unknown or mistyped key is an error that names the key's path, the value
seen, what is allowed and the nearest valid key. Nothing here imports torch, so any YAML can be checked on a laptop.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mmtrain.errors import UserError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A group of keys: unknown keys are errors, no silent conversions, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder name of this run below run.dir")
    dir: str = Field("runs", description="folder that holds all runs")
    seed: NonNegativeInt = Field(0, description="seed of every random draw: projector initialisation, data order")
    overwrite: bool = Field(False, description="true: delete an existing run folder of this name and start anew")


class LlmSection(Section):
    path: str = Field(description="model folder, or a hub id whose files are in the local Hugging Face cache")
    dtype: Dtype = Field("bfloat16", description="storage and compute type of the frozen LLM")


class VisionSection(Section):
    name: str = Field(description="timm model name, or a folder holding a timm or Hugging Face vision model")
    select_layer: Annotated[int, Field(le=-1)] = Field(
        -2, description="which encoder block's output feeds the projector: -1 the last, -2 (LLaVA) the one before"
    )
    dtype: Dtype | None = Field(None, description="storage and compute type of the encoder; null: that of the LLM")


class ProjectorSection(Section):
    type: Literal["linear", "mlp2x_gelu"] = Field("mlp2x_gelu", description="projector architecture")


class ModelSection(Section):
    llm: LlmSection
    vision: VisionSection
    projector: ProjectorSection = ProjectorSection()
    trainable: tuple[str, ...] = Field(
        ("projector",),
        min_length=1,
        description="name patterns of what trains, e.g. projector, llm.layers.31, llm.layers.*.mlp.*, llm.head",
    )


class ParallelSection(Section):
    pipeline: PositiveInt = Field(1, description="pipeline ranks that share one copy of the model")
    data: PositiveInt = Field(1, description="data-parallel replicas of the whole pipeline")
    boundaries: tuple[NonNegativeInt, ...] | None = Field(
        None,
        description="decoder layer at which stage 1, 2, ... begins, e.g. [8, 16, 24]; null: the planner chooses",
    )
    device_memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="memory a rank may use, GiB; null: that of the GPU at launch, no limit on a CPU or in --plan"
    )
    recompute_layers: Literal["auto"] | NonNegativeInt | tuple[NonNegativeInt, ...] = Field(
        "auto",
        description="decoder layers per rank whose activations are recomputed in backward: one number, one per "
        "pipeline rank, or auto (none if all fits in memory, otherwise as few as needed)",
    )
    threads_per_rank: PositiveInt | None = Field(None, description="CPU threads of a rank; null: cores / local ranks")
    timeout_seconds: PositiveInt = Field(600, description="a collective or message waiting longer than this fails")


class DataSection(Section):
    shards: str | tuple[str, ...] = Field(description="webdataset tars: a path, a glob, a brace range, or a list")
    pack_length: PositiveInt = Field(2048, description="tokens in a pack")
    template: Literal["plain"] = Field("plain", description="conversation template")
    overlong: Literal["skip", "refuse"] = Field("skip", description="what to do with a sample longer than a pack")
    workers: NonNegativeInt = Field(2, description="processes that decode ahead, on ranks that read data")
    expected_text_tokens: PositiveInt = Field(
        80, description="text tokens of a typical sample; only the planner's estimates use it"
    )
    expected_supervised_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.12, description="share of a pack's tokens that carry a label; only the planner's estimates use it"
    )


class TrainSection(Section):
    packs_per_step: PositiveInt = Field(description="packs in one optimizer step, over all replicas")
    packs_per_microbatch: PositiveInt = Field(1, description="packs that one pipeline forward handles")
    max_steps: PositiveInt = Field(description="optimizer steps of the run")


class OptimizerSection(Section):
    lr: Annotated[float, Field(ge=0)] = Field(1e-3, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's epsilon")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's decoupled weight decay")
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] = Field(0.03, description="share of steps of linear warm-up")
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="end of the cosine, times lr")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(1.0, description="global gradient norm limit; null: none")


class RunConfig(Section):
    run: RunSection
    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()

