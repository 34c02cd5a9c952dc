"""The rank's part of bench_gpu.py, over weights that are made on the device.

random LLaVA on the device --shared_stage--> mmtrain's stage over the tensors of its LLM, raced
    against stock
shape, a stage of a plan --random_stage--> mmtrain's stage with nothing else on the device, as a
    rank of a pipeline
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_models import (
    DTYPES,
    SELECT_LAYER,
    SHAPES,
    ModelSize,
    clip_config,
    llama_config,
    random_llava,
    save_parts,
    save_vision,
    with_shared_weights,
)
from bench_peer_ranks import MMTRAIN, MULTIPLIED_LAYERS, SCRIPT, SEED, TUNED
from bench_race import Contestant, Settings, Work, make_config, run_row
from bench_rivals import Mmtrain, Stock
from transformers import CLIPVisionModel, LlamaForCausalLM, LlavaForConditionalGeneration

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.engine.process_groups import join_process_group
from mmtrain.facts.models import models_of
from mmtrain.model.encoder.vision import load_vision
from mmtrain.model.llm.attention import ATTENTION
from mmtrain.model.llm.bookends import absent_modules, replace
from mmtrain.model.llm.kernels import Backend, describe_backends
from mmtrain.model.llm.language import DecoderLayers
from mmtrain.model.llm.parity import takes_rows
from mmtrain.model.stage import Stage, set_trainable
from mmtrain.model.trained.projector import make_projector
from mmtrain.plan.plan import StagePlan
from mmtrain.plan.planner import make_plan
from mmtrain.runtime.rank import Rank

MATRICES = 7 * MULTIPLIED_LAYERS  # of a rank that measure its device


def prepare(settings: Settings, folder: Path) -> None:
    """Write what planning reads: the encoder, and an LLM of a shape that mmtrain has not
    recorded.
    """
    shape, dtype = SHAPES[settings.shape], DTYPES[settings.dtype]
    if shape.recorded_llm is None:
        save_parts(shape, folder, dtype)
    else:
        torch.manual_seed(SEED)
        save_vision(CLIPVisionModel(clip_config(shape)).to(dtype), folder / "vision")


def race_row(settings: Settings, row: str, parts: Path, with_tuned: bool, rank: Rank) -> None:
    """Race on this rank's device. Raises UserError where its memory does not suffice."""
    shape, dtype, device = SHAPES[settings.shape], DTYPES[settings.dtype], torch.device(rank.device)
    join_process_group(device, settings.timeout_seconds)
    work = Work(settings, row, parts, device)
    config = make_config(settings, parts, 1, llm=shape.recorded_llm)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    )
    plan = make_plan(config, memory)
    try:
        script = random_llava(shape, dtype, device, SEED)
        tower = CLIPVisionModel.from_pretrained(
            parts / "vision", dtype=dtype, attn_implementation="sdpa"
        )
        script.model.vision_tower.load_state_dict(tower.state_dict())
        stage = shared_stage(script, config, device, plan.ranks[0].recompute_layers)
        tuned = with_shared_weights(script)
        mmtrain = Mmtrain(config, plan, work.packed_batches(), device, {0: stage})
        contestants: dict[str, Contestant] = {
            MMTRAIN: mmtrain,
            SCRIPT: Stock(script, "script", work.padded_steps()),
        }
        if with_tuned:
            contestants[TUNED] = Stock(tuned, "tuned", work.padded_steps())
        layers = script.model.language_model.layers[:MULTIPLIED_LAYERS]
        facts = work.facts(config) | {
            "recomputed_layers_of_mmtrain": plan.ranks[0].recompute_layers
        }

        def afterwards() -> dict[str, Any]:
            return {"kernels": describe_backends([mmtrain.kernels])[1]}

        matrices = [p for p in layers.parameters() if p.ndim == 2]
        run_row(settings, row, contestants, rank, facts, matrices, afterwards)
    except torch.OutOfMemoryError as error:
        raise _too_little(error, "fewer --samples-per-pack or --without-tuned need less") from error


def race_pipeline(settings: Settings, row: str, parts: Path, pipeline: int, rank: Rank) -> None:
    """Run mmtrain alone on `pipeline` ranks; every rank tells what it took beside what was planned
    for it.
    """
    shape, device = SHAPES[settings.shape], torch.device(rank.device)
    join_process_group(device, settings.timeout_seconds)
    work = Work(settings, row, parts, device)
    config = make_config(settings, parts, pipeline, llm=shape.recorded_llm)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    )
    plan = make_plan(config, memory)
    mine = plan.ranks[rank.rank]
    try:
        stages = {stage.stage: random_stage(shape, config, stage, device) for stage in mine.stages}
        mmtrain = Mmtrain(config, plan, work.packed_batches(), device, stages)
        parameters = (p for stage in stages.values() for _, p in stage.language.global_parameters())
        matrices = list(itertools.islice((p for p in parameters if p.ndim == 2), MATRICES))

        def afterwards() -> dict[str, Any]:
            idle = mmtrain.idle
            layers = [name for stage in mine.stages for name in stage.layers]
            took = {"layers": layers, "planned_bytes": mine.total_bytes} | memory_of(
                mmtrain.step, device
            )
            of_ranks: list[tuple[set[Backend], dict[str, Any]]] = [(set(), {})] * pipeline
            dist.all_gather_object(of_ranks, (mmtrain.kernels, took))
            kernels = describe_backends([ways for ways, _ in of_ranks])[1]
            return {"ranks": [rank for _, rank in of_ranks], "idle": idle, "kernels": kernels}

        facts = work.facts(config) | {"pipeline": pipeline, "planned_idle": plan.idle_share}
        run_row(settings, row, {MMTRAIN: mmtrain}, rank, facts, matrices, afterwards)
    except torch.OutOfMemoryError as error:
        raise _too_little(
            error, "fewer --samples-per-pack or a longer --pipeline need less"
        ) from error


def memory_of(step: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Peak bytes of a step on a GPU: allocated by tensors, reserved by torch, held by all
    processes; {} on a CPU.
    """
    if device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
        "held_bytes": total - free,
    }


def _too_little(error: torch.OutOfMemoryError, advice: str) -> UserError:
    return UserError(
        f"the device's memory does not suffice ({str(error).partition('. ')[0]}); {advice}"
    )


def shared_stage(
    model: LlavaForConditionalGeneration,
    config: RunConfig,
    device: torch.device,
    recompute_layers: int,
) -> Stage:
    """Return mmtrain's only stage over the LLM of `model`, without copies; encoder and projector
    are its own.
    """
    language_model = model.model.language_model
    with torch.device("meta"):
        llm = LlamaForCausalLM(copy.deepcopy(language_model.config))
    tensors = {f"model.{name}": tensor for name, tensor in language_model.state_dict().items()}
    llm.load_state_dict(tensors | {"lm_head.weight": model.lm_head.weight}, assign=True)
    # its buffers are in no state_dict
    llm.model.rotary_emb = copy.deepcopy(language_model.rotary_emb)
    stage = StagePlan(
        0, 0, llm.config.num_hidden_layers, front=True, head=True, recompute_layers=recompute_layers
    )
    return _stage(llm, config, stage, device)


def random_stage(
    shape: ModelSize, config: RunConfig, stage: StagePlan, device: torch.device
) -> Stage:
    """A stage whose LLM weights are drawn on the device, by their names: no file is read, no other
    weight is made.
    """
    dtype = DTYPES[config.model.llm.dtype]
    with torch.device("meta"):
        llm = LlamaForCausalLM(llama_config(shape))
    absent = absent_modules(llm, stage.first, stage.last, embedding=stage.front, head=stage.head)
    for module, replacement in absent.items():
        replace(llm, module, replacement)
    tensors = {}
    for name, wanted in llm.state_dict().items():
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(wanted.shape, generator=generator, device=device, dtype=dtype)
        tensors[name] = drawn * shape.width**-0.5 if wanted.ndim == 2 else torch.ones_like(drawn)
    llm.load_state_dict(tensors, assign=True)
    with torch.device(device):
        # its buffers are in no state_dict
        llm.model.rotary_emb = type(llm.model.rotary_emb)(config=llm.config)
    return _stage(llm, config, stage, device)


def _stage(
    llm: LlamaForCausalLM, config: RunConfig, stage: StagePlan, device: torch.device
) -> Stage:
    """What `build_stage` makes of files, over an LLM in memory whose modules are those of the
    stage.
    """
    dtype = DTYPES[config.model.llm.dtype]
    llm.set_attn_implementation(ATTENTION)
    language = DecoderLayers(llm, stage.first, stage.last, embedding=stage.front, head=stage.head)
    language.recompute(stage.recompute_layers)
    if stage.head and stage.first < stage.last and takes_rows(llm.config):
        language.narrow_last_layer()
    vision, projector, encoder = None, None, config.model.vision.name
    if stage.front:
        vision = load_vision(encoder, SELECT_LAYER, dtype, device)
        projector = make_projector(models_of(config).connector, config.run.seed).to(device)
    module = Stage(language, dtype, vision, projector, encoder).eval()
    set_trainable(module.global_parameters(), config.model.trainable)
    module.try_out(device)
    return module
