"""The doctor's check of packed attention, whose kernels are another thing on every kind of GPU."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mmtrain.doctor.check import FailedError, Here, Seen
from mmtrain.model.attention import packed_attention
from mmtrain.model.kernels import Documents

TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}  # of outputs and gradients, norm of the difference over the norm
TOKENS, HEADS, KEY_HEADS, HEAD_WIDTH, PACKS, MOST_DOCUMENTS = 1024, 8, 4, 64, 8, 12
REBUILT = 5.0  # times as long as the same lengths again: what was compiled for other lengths was of no use
REBUILT_MS = 5.0


def attention(here: Here) -> Seen:
    """Packed attention against torch's own with a mask, forward and backward, over packs whose lengths change."""
    device = torch.device("cuda" if here.gpus else "cpu")
    dtype = torch.bfloat16 if here.gpus else torch.float32
    name = str(dtype).removeprefix("torch.")
    draw = random.Random(0)
    times, again, forward, backward = [], [], 0.0, 0.0
    for pack in range(PACKS):
        borders = [0, *sorted(draw.sample(range(1, TOKENS), draw.randrange(1, MOST_DOCUMENTS))), TOKENS]
        states = _states(pack, device, dtype)
        for seconds in (times, again):
            found, took = _attended(functools.partial(_packed, borders), states)
            seconds.append(took)
        expected, _ = _attended(functools.partial(_masked, borders), [state.float() for state in states])
        output, *gradients = (distance(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        forward, backward = max(forward, output), max(backward, *gradients)
    first, later, same = times[0] * 1e3, statistics.median(times[1:]) * 1e3, statistics.median(again[1:]) * 1e3
    text = (
        f"{name}: {max(forward, backward):.1e} off; first call {first:,.0f} ms, new lengths {later:.2f}, same again "
        f"{same:.2f}"
    )
    facts = {"forward": forward, "backward": backward, "seconds": times, "seconds_again": again}
    if not max(forward, backward) <= TOLERANCES[name]:
        raise FailedError(text, facts=facts)
    if here.gpus and later > REBUILT_MS and later > REBUILT * same:
        raise FailedError(f"{text}: kernels are built anew for every pack", facts=facts)
    return Seen(text, facts)


def _states(seed: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query (1, H, L, D), key and value (1, K, L, D), and the gradient (1, L, H, D) that comes back."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, TOKENS, HEAD_WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    shapes.append((1, TOKENS, HEADS, HEAD_WIDTH))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _attended(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], states: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], float]:
    """[output (1, L, H, D), gradients of query, key and value], and the seconds that both directions took."""
    inputs = [state.detach().requires_grad_() for state in states[:3]]
    synchronise(inputs[0].device)
    began = time.perf_counter()
    output = attend(*inputs)
    gradients = torch.autograd.grad(output, inputs, states[3])
    synchronise(inputs[0].device)
    return [output.detach(), *gradients], time.perf_counter() - began


def _packed(borders: Sequence[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As the layers of a stage call it."""
    spans = tuple(itertools.pairwise(borders))
    offsets = torch.tensor(borders, dtype=torch.int32, device=query.device)
    documents = Documents((spans,), None, offsets, max(end - begin for begin, end in spans))
    return packed_attention(torch.nn.Module(), query, key, value, documents)[0]


def _masked(borders: Sequence[int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same by one dense mask."""
    places = torch.arange(TOKENS, device=query.device)
    document = torch.searchsorted(torch.tensor(borders[1:], device=query.device), places, right=True)
    seen = (document[:, None] == document[None]) & (places[:, None] >= places[None])
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
    return attended.transpose(1, 2)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm; infinite for NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    distance = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return distance if distance == distance else float("inf")


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
