"""The check of packed attention, whose kernels differ from one kind of GPU to another."""

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmtrain.doctor.check import FailedError
from mmtrain.model.llm.attention import (
    Documents,
    packed_attention,
)
from mmtrain.model.llm.compiled import TOLERANCES
from mmtrain.model.llm.kernels import describe_backends, record_backends

TOKENS = 1024
DOCUMENTS = 9
HEADS = 8
KEY_HEADS = 4
HEAD_WIDTH = 64


def attention(folder: Path) -> str:
    """Compare packed attention and its gradients with attention of each document alone, in
    float32.
    """
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    borders = [0, *sorted(random.Random(0).sample(range(1, TOKENS), DOCUMENTS - 1)), TOKENS]
    states = _states(torch.device("cuda" if on_gpu else "cpu"), dtype)
    with record_backends() as backends:
        results = packed(borders, *states)
    expected = separate(borders, *(state.float() for state in states))
    difference = max(distance(ours, alone) for ours, alone in zip(results, expected, strict=True))
    backend = describe_backends([backends])[1][0].removeprefix("attention: ")
    text = (
        f"{backend}; in {str(dtype).removeprefix('torch.')} {difference:.1e} off separate documents"
    )
    if not difference <= TOLERANCES[dtype]:
        raise FailedError(
            f"{text}, at most {TOLERANCES[dtype]:g} is rounding",
            "do not train on this machine; report this line with the versions of "
            "torch, driver and GPU",
        )
    if any(backend.slow for backend in backends):
        raise FailedError(
            text, "runs are correct but slow: use another build of torch, or another GPU"
        )
    return text


def packed(borders: Sequence[int], *states: Tensor) -> list[Tensor]:
    """Return output and gradients of packed attention, called as a decoder layer does; `states` as
    in `_states`.
    """
    query, key, value = (state.detach().requires_grad_() for state in states[:3])
    runs = tuple((0, begin, begin, end) for begin, end in itertools.pairwise(borders))
    offsets = torch.tensor(borders, dtype=torch.int32, device=query.device)
    documents = Documents(runs, None, offsets, max(end - begin for _, begin, _, end in runs))
    output, _ = packed_attention(nn.Module(), query, key, value, documents)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), states[3])]


def separate(borders: Sequence[int], *states: Tensor) -> list[Tensor]:
    """Return output and gradients of attention by torch's plain kernel, one document after the
    other.
    """
    inputs = [state.detach().requires_grad_() for state in states[:3]]
    outputs = []
    for begin, end in itertools.pairwise(borders):
        document = (state[:, :, begin:end] for state in inputs)
        with sdpa_kernel(SDPBackend.MATH):
            outputs.append(
                nn.functional.scaled_dot_product_attention(
                    *document, is_causal=True, enable_gqa=True
                )
            )
    output = torch.cat(outputs, dim=2).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, inputs, states[3])]


def _states(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return query (1, H, L, D), key and value (1, K, L, D), and the output's gradient (1, L, H,
    D).
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, TOKENS, HEAD_WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    shapes.append((1, TOKENS, HEADS, HEAD_WIDTH))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def distance(ours: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm; infinite for NaN."""
    ours = ours.double().cpu()
    expected = expected.double().cpu()
    ratio = float((ours - expected).norm() / expected.norm())
    return math.inf if math.isnan(ratio) else ratio
