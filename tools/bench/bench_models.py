"""The benchmarks' models: random, with the cost ratios of LLaVA-1.5-7B, on disk for mmtrain and as stock LLaVA.

ModelSize --save_parts--> folder/llm (llama), folder/vision (CLIP) --stock_llava--> LlavaForConditionalGeneration

What a benchmark of a small model must keep is what costs what. In LLaVA-1.5-7B the LM head on every position is 2% of
the LLM's forward, the encoder 4%, and the last of 32 decoder layers 3%. A tiny model with its usual vocabulary would
spend a fifth on its head, one of 12 layers 8% on its last, and flatter whoever computes less of either.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.utils import logging as transformers_logging

from mmtrain.config.model import ProjectorSection
from mmtrain.config.schema import RunConfig
from mmtrain.model.projector import make_projector

Decode = Callable[[bytes], torch.Tensor]
SELECT_LAYER = -2  # LLaVA's: the output of the last block but one
LEARNING_RATE = 1e-4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a llama and a CLIP tower, and of a typical sample: one image and `text_tokens`."""

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    vision_blocks: int
    vision_width: int
    vision_heads: int
    image_size: int  # pixels
    patch_size: int  # pixels
    text_tokens: int
    recorded_llm: str | None = None  # name of a shape that mmtrain has recorded, to plan without files

    @property
    def image_tokens(self) -> int:
        """Positions that an image takes in the LLM."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def sample_tokens(self) -> int:
        """Length of a typical sample."""
        return self.image_tokens + self.text_tokens

    @property
    def image_token(self) -> int:
        """The row of the vocabulary by which stock LLaVA marks image positions."""
        return self.vocabulary - 1


SHAPES = {
    "ratios": ModelSize(32, 512, 1376, 8, 3968, 12, 192, 3, 168, 14, 24),
    "7b": ModelSize(32, 4096, 11008, 32, 32000, 24, 1024, 16, 336, 14, 80, "lmsys/vicuna-7b-v1.5"),
    # Decoder layers of a 20B model (InternLM2) and the blocks of InternViT-6B that run, without their widths.
    "48 layers": ModelSize(48, 32, 64, 2, 128, 46, 32, 2, 56, 14, 8),
    "tiny": ModelSize(4, 64, 96, 4, 128, 3, 32, 2, 56, 14, 8),
}


def llama_config(shape: ModelSize) -> LlamaConfig:
    """A llama of this shape whose signals neither vanish nor explode: weights of variance 1 / width."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=shape.width**-0.5,
        use_cache=False,
    )


def clip_config(shape: ModelSize) -> CLIPVisionConfig:
    """A CLIP tower of this shape."""
    return CLIPVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=4 * shape.vision_width,
        num_hidden_layers=shape.vision_blocks,
        num_attention_heads=shape.vision_heads,
        image_size=shape.image_size,
        patch_size=shape.patch_size,
        hidden_act="quick_gelu",
        initializer_factor=2.0,
    )


def save_parts(shape: ModelSize, folder: Path, dtype: torch.dtype) -> None:
    """Write a random llama to folder/llm and a random CLIP tower to folder/vision, as stock transformers saves them."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(shape)).to(dtype).save_pretrained(folder / "llm")
    save_vision(CLIPVisionModel(clip_config(shape)).to(dtype), folder / "vision")


def save_vision(model: CLIPVisionModel, folder: Path) -> None:
    """Write a CLIP tower with what mmtrain reads of its image processor."""
    model.save_pretrained(folder)
    processor = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def run_config(
    shape: ModelSize,
    folder: Path,
    *,
    dtype: str,
    pack_length: int,
    microbatches: int,
    pipeline: int,
    threads: int,
    llm: str | None = None,
    calibration: Path | None = None,
) -> RunConfig:
    """mmtrain's configuration of a benchmark: a constant learning rate and no clipping, as its rivals have.

    `threads` are those of a rank; `llm` is the name or folder to plan by, folder/llm by default; `calibration` is a
    file of measured costs to plan with.
    """
    tree = {
        "run": {"name": "bench", "dir": str(folder / "runs")},
        "model": {
            "llm": {"path": llm or str(folder / "llm"), "dtype": dtype},
            "vision": {"name": str(folder / "vision"), "select_layer": SELECT_LAYER},
        },
        "parallel": {
            "pipeline": pipeline,
            "threads_per_rank": threads,
            "calibration": None if calibration is None else str(calibration),
        },
        "data": {
            "shards": "none.tar",  # batches come from memory
            "pack_length": pack_length,
            "expected_text_tokens": shape.text_tokens,
            "expected_supervised_fraction": shape.text_tokens / shape.sample_tokens,
        },
        "train": {"packs_per_step": microbatches, "max_steps": 1_000_000},
        "optimizer": {"lr": LEARNING_RATE, "warmup_fraction": 0.0, "min_lr_fraction": 1.0, "clip_norm": None},
    }
    return RunConfig.model_validate(tree)


def stock_llava(shape: ModelSize, folder: Path, dtype: torch.dtype, seed: int) -> LlavaForConditionalGeneration:
    """Stock LLaVA over the parts in `folder` and the projector that mmtrain draws from `seed`; only that trains."""
    llm = LlamaForCausalLM.from_pretrained(folder / "llm", dtype=dtype, attn_implementation="sdpa")
    vision = CLIPVisionModel.from_pretrained(folder / "vision", dtype=dtype, attn_implementation="sdpa")
    model = random_llava(shape, dtype, torch.device("cpu"), seed)
    model.model.language_model.load_state_dict(llm.model.state_dict())
    model.lm_head.load_state_dict(llm.lm_head.state_dict())
    model.model.vision_tower.load_state_dict(vision.state_dict())
    return model


def random_llava(
    shape: ModelSize, dtype: torch.dtype, device: torch.device, seed: int
) -> LlavaForConditionalGeneration:
    """Stock LLaVA with random weights made on `device`; its projector, fp32, is the one that mmtrain draws."""
    config = LlavaConfig(
        vision_config=clip_config(shape),
        text_config=llama_config(shape),
        image_token_index=shape.image_token,
        vision_feature_layer=SELECT_LAYER,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlavaForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa")
    projector = make_projector(ProjectorSection(type="mlp2x_gelu"), shape.vision_width, shape.width, seed)
    model.model.multi_modal_projector.float().load_state_dict(projector.state_dict())
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    return model.eval()


def with_shared_weights(model: LlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """A copy with a projector of its own and the very tensors of everything frozen."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


def noise_image(shape: ModelSize) -> Decode:
    """What stands for an image decoder: (3, S, S) uint8 noise, a function of the bytes."""

    def decode(content: bytes) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(content))
        return torch.randint(0, 256, (3, shape.image_size, shape.image_size), dtype=torch.uint8, generator=generator)

    return decode
