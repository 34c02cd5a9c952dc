"""The rank's part of bench_gpu.py: all contestants over one set of weights that is made on the device.

random LLaVA on the device --shared_chunk--> mmtrain's stage over the very tensors of its LLM
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import torch
from bench_contestant import Contestant
from bench_mmtrain import Mmtrain
from bench_models import (
    DTYPES,
    SELECT_LAYER,
    SHAPES,
    clip_config,
    random_llava,
    save_parts,
    save_vision,
    with_shared_weights,
)
from bench_peer_ranks import MMTRAIN, MULTIPLIED_LAYERS, SCRIPT, SEED, TUNED
from bench_row import Settings, Work, make_config, run_row
from bench_stock import Stock
from transformers import CLIPVisionModel, LlamaForCausalLM, LlavaForConditionalGeneration

from mmtrain.config import RunConfig
from mmtrain.data.images import image_transform
from mmtrain.engine import join_process_group
from mmtrain.errors import UserError
from mmtrain.model.attention import ATTENTION
from mmtrain.model.language import LanguageSlice
from mmtrain.model.projector import make_projector
from mmtrain.model.stage import Chunk, Front
from mmtrain.model.trainable import set_trainable
from mmtrain.model.vision import load_vision
from mmtrain.plan.planner import make_plan
from mmtrain.rank import Rank


def prepare(settings: Settings, folder: Path) -> None:
    """Write what planning reads: the encoder, and an LLM of a shape that mmtrain has not recorded."""
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
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    plan = make_plan(config, memory)
    try:
        script = random_llava(shape, dtype, device, SEED)
        tower = CLIPVisionModel.from_pretrained(parts / "vision", dtype=dtype)
        script.model.vision_tower.load_state_dict(tower.state_dict())
        chunk = shared_chunk(script, config, device, plan.ranks[0].recompute_layers)
        tuned = with_shared_weights(script)
        contestants: dict[str, Contestant] = {
            MMTRAIN: Mmtrain(config, plan, work.packed_batches(), device, {0: chunk}),
            SCRIPT: Stock(script, "script", work.padded_steps()),
        }
        if with_tuned:
            contestants[TUNED] = Stock(tuned, "tuned", work.padded_steps())
        layers = script.model.language_model.layers[:MULTIPLIED_LAYERS]
        facts = work.facts(config) | {"recomputed_layers_of_mmtrain": plan.ranks[0].recompute_layers}
        run_row(settings, row, contestants, rank, facts, [p for p in layers.parameters() if p.ndim == 2])
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the device's memory does not suffice ({str(error).partition('. ')[0]}); "
            "fewer --samples-per-pack or --without-tuned need less"
        ) from error


def shared_chunk(
    model: LlavaForConditionalGeneration, config: RunConfig, device: torch.device, recompute_layers: int
) -> Chunk:
    """mmtrain's only stage over the LLM of `model`, no tensor of which is copied; encoder and projector are its own."""
    language_model = model.model.language_model
    with torch.device("meta"):
        llm = LlamaForCausalLM(copy.deepcopy(language_model.config))
    tensors = {f"model.{name}": tensor for name, tensor in language_model.state_dict().items()}
    llm.load_state_dict(tensors | {"lm_head.weight": model.lm_head.weight}, assign=True)
    llm.model.rotary_emb = copy.deepcopy(language_model.rotary_emb)  # its buffers are in no state_dict
    llm.set_attn_implementation(ATTENTION)
    language = LanguageSlice(llm, 0, llm.config.num_hidden_layers, embedding=True, head=True)
    language.recompute(recompute_layers)
    vision = load_vision(config.model.vision.name, SELECT_LAYER, DTYPES[config.model.llm.dtype], device)
    projector = make_projector(config.model.projector.type, vision.width, language.hidden_size, config.run.seed)
    transform = functools.partial(image_transform, config.model.vision.name)
    chunk = Chunk(language, Front(vision, projector.to(device), transform), DTYPES[config.model.llm.dtype]).eval()
    set_trainable(chunk.global_parameters(), config.model.trainable)
    return chunk
