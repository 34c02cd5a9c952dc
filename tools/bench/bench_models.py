"""The benchmarks' models as stock LLaVA, and the images that they see.

Shape, folder/llm, folder/vision --stock_llava--> LlavaForConditionalGeneration
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import CLIPVisionModel, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from mmtrain.doctor.models import SELECT_LAYER, Shape, clip_config, llama_config
from mmtrain.model.projector import make_projector

Decode = Callable[[bytes], torch.Tensor]


def stock_llava(shape: Shape, folder: Path, dtype: torch.dtype, seed: int) -> LlavaForConditionalGeneration:
    """Stock LLaVA over the parts in `folder` and the projector that mmtrain draws from `seed`; only that trains."""
    llm = LlamaForCausalLM.from_pretrained(folder / "llm", dtype=dtype, attn_implementation="sdpa")
    vision = CLIPVisionModel.from_pretrained(folder / "vision", dtype=dtype, attn_implementation="sdpa")
    model = random_llava(shape, dtype, torch.device("cpu"), seed)
    model.model.language_model.load_state_dict(llm.model.state_dict())
    model.lm_head.load_state_dict(llm.lm_head.state_dict())
    model.model.vision_tower.load_state_dict(vision.state_dict())
    return model


def random_llava(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> LlavaForConditionalGeneration:
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
    projector = make_projector("mlp2x_gelu", shape.vision_width, shape.width, seed)
    model.model.multi_modal_projector.float().load_state_dict(projector.state_dict())
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    return model.eval()


def with_shared_weights(model: LlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """A copy with a projector of its own and the very tensors of everything frozen."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


def noise_image(shape: Shape) -> Decode:
    """What stands for an image decoder: (3, S, S) uint8 noise, a function of the bytes."""

    def decode(content: bytes) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(content))
        return torch.randint(0, 256, (3, shape.image_size, shape.image_size), dtype=torch.uint8, generator=generator)

    return decode
