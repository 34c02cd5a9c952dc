"""Weights of a decoder layer that are kept in fewer bits, and their size then, without torch.

`published` keeps the codes in the LLM's files (published.py). The others quantise the matrices of
linear layers and experts in blocks, fp8 in rows, each with a float32 scale (QLoRA,
arXiv:2305.14314, quantises the scales, too). Norms, biases, adapters, routers and what a recurrent
mixer has besides matrices are small and keep all bits.
"""

import math
import re
from typing import Literal

from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.shapes import Shape

Quantisation = Literal["published", "nf4", "int8", "fp8"]
BLOCK = {"nf4": 64, "int8": 256}  # weights that share a scale
BITS = {"nf4": 4, "int8": 8, "fp8": 8}  # the LLM then differs from the one in its files
QUANTISATIONS = ("published", *BITS)
_SMALL = re.compile(
    r"\.(gate|router|router\.layer|shared_expert_gate|conv1d|conv)\.weight$|\.A_log$"
)
_SCALE_BYTES = 4


def is_quantised(name: str, shape: Shape) -> bool:
    """Whether a decoder layer's parameter, by its global name, is kept in fewer bits."""
    return len(shape) > 1 and not is_adapter(name) and not _SMALL.search(name)


def quantised_bytes(shape: Shape, quantisation: Quantisation) -> int:
    weights = math.prod(shape)
    block = BLOCK.get(quantisation, shape[-1])
    return -(-weights * BITS[quantisation] // 8) + _SCALE_BYTES * -(-weights // block)
