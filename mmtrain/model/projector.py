"""The trainable module between vision encoder and LLM.

vision features (N, T, W) --projector--> image embeddings (N, T, D), in fp32 whatever the frozen parts are stored in.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn


class LinearProjector(nn.Module):
    """One affine map, LLaVA's first projector (arXiv:2304.08485, section 4.1)."""

    def __init__(self, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(vision_width, llm_width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features (N, T, W) -> (N, T, D)."""
        return self.linear_1(features)


class Mlp2xGeluProjector(nn.Module):
    """Linear, exact GELU, linear: LLaVA-1.5's projector (arXiv:2310.03744) under the names of the stock HF module."""

    def __init__(self, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(vision_width, llm_width)
        self.linear_2 = nn.Linear(llm_width, llm_width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features (N, T, W) -> (N, T, D)."""
        return self.linear_2(nn.functional.gelu(self.linear_1(features)))


PROJECTORS: dict[str, type[nn.Module]] = {"linear": LinearProjector, "mlp2x_gelu": Mlp2xGeluProjector}


def make_projector(kind: str, vision_width: int, llm_width: int, seed: int) -> nn.Module:
    """Build a projector in fp32 with nn.Linear's default distribution.

    Every tensor is drawn from its own generator, a function of (seed, parameter name) alone: the same weights whatever
    the layout, and whatever was drawn before.
    """
    with torch.device("meta"):
        projector = PROJECTORS[kind](vision_width, llm_width)
    for module_name, module in projector.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            digest = hashlib.sha256(f"{seed}/projector/{module_name}.{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            bound = 1 / math.sqrt(module.in_features)
            value = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
            setattr(module, name, nn.Parameter(value))
    return projector
