"""LLaVA as a list of layers, which is how DeepSpeed's and torch's pipelines want it: front, decoder layers, head.

(input_ids (B, L), pixels (B, 3, S, S)) --Front--> hidden (B, L, D) --Decoder--> ... --Head--> logits (B, L, V)
logits, labels (B, L) --token_loss--> mean over the supervised positions

The layers are those of stock transformers. The encoder runs up to the selected block only, under no_grad, and there is
no padding mask, since these races have samples of one length.
"""

from __future__ import annotations

from pathlib import Path

import torch
from bench_models import SELECT_LAYER, ModelSize
from torch import nn
from transformers import LlamaForCausalLM

from mmtrain.config.model import ProjectorSection
from mmtrain.data.samples.sample import IGNORE
from mmtrain.model.projector import make_projector
from mmtrain.model.vision import load_vision


class Front(nn.Module):
    """Encoder, trainable projector (fp32) and embedding."""

    def __init__(self, llm: LlamaForCausalLM, shape: ModelSize, folder: Path, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.embedding = llm.model.embed_tokens
        self.vision = load_vision(str(folder / "vision"), SELECT_LAYER, dtype)
        self.projector = make_projector(ProjectorSection(type="mlp2x_gelu"), shape.vision_width, shape.width, seed)
        self.image_token = shape.image_token

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        input_ids, pixels = inputs
        embeddings = self.embedding(input_ids)
        with torch.no_grad():
            features = self.vision(pixels)
        image_embeddings = self.projector(features.float()).to(embeddings.dtype)
        return embeddings.masked_scatter((input_ids == self.image_token)[..., None], image_embeddings)


class Decoder(nn.Module):
    """One decoder layer; what it rotates by is made once for each length."""

    def __init__(self, llm: LlamaForCausalLM, index: int) -> None:
        super().__init__()
        self.layer = llm.model.layers[index]
        self.rotary = llm.model.rotary_emb
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        length = hidden.shape[1]
        if length not in self._angles:
            positions = torch.arange(length, device=hidden.device)[None]
            with torch.no_grad():
                self._angles[length] = self.rotary(hidden, positions)
        return self.layer(hidden, attention_mask=None, position_embeddings=self._angles[length], use_cache=False)


class Head(nn.Module):
    """Final norm and logits of every position."""

    def __init__(self, llm: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm = llm.model.norm
        self.head = llm.lm_head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden))


def make_layers(shape: ModelSize, folder: Path, dtype: torch.dtype, seed: int) -> list[nn.Module]:
    """All layers of the model in `folder`, frozen but for the projector."""
    llm = LlamaForCausalLM.from_pretrained(folder / "llm", dtype=dtype, attn_implementation="sdpa")
    llm.eval().requires_grad_(False)
    decoder = [Decoder(llm, index) for index in range(shape.layers)]
    return [Front(llm, shape, folder, dtype, seed), *decoder, Head(llm)]


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss over the supervised positions, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
