"""Frozen matrices in FP8 (e4m3): kept with a scale for each row, and multiplied as they are kept.

    forward   x (T, K), cast by row       W (N, K) with scales (N, 1)     --> x W^T (T, N)
    backward  (g * scales^T) (T, N), cast by row      the bytes of W      --> g W (T, K)

Backward sums over the rows of W, so their scales go into the gradient before it is cast, and one
set of bytes serves both. Ada and Hopper multiply operands that lie contiguous along the sum, so
backward turns W over each time: 1 byte a weight is kept instead of 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.model.weights.streaming import StreamedLayer

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# of a row; else a row of zeros would be divided by 0
LEAST = 1e-30


def cast(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cast rows (..., K) to FP8; return them with float32 scales (..., 1) to multiply with."""
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST) / LARGEST
    return (rows.float() / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


class Product(torch.autograd.Function):
    """x W^T of x (T, K) and W as `cast` gives it, for which no gradient exists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return _product(x, codes, scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        codes, scales = ctx.saved_tensors
        turned = codes.t().contiguous()
        ones = scales.new_ones(len(turned), 1)
        product = _product(gradient.float() * scales.t(), turned, ones)
        return product.to(gradient.dtype), None, None


def _product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    rows, of_rows = cast(x)
    # the kernel's results by row are bfloat16
    return torch._scaled_mm(
        rows,
        codes.t(),
        scale_a=of_rows,
        scale_b=scales.t(),
        out_dtype=torch.bfloat16,
    ).to(x.dtype)


class _Multiplied(nn.Linear):
    """A linear layer that multiplies by what is kept of its weight.

    Layers become it by class: torch's compiler takes a forward of each layer's own for new code.
    """

    def forward(self, x: Tensor) -> Tensor:
        product = Product.apply(x.flatten(0, -2), *self.kept).unflatten(0, x.shape[:-1])
        if self.bias is None:
            return product
        return product + self.bias


class Fp8Linears:
    """The frozen linear layers of one decoder layer, which can multiply by what is kept of them."""

    def __init__(self, layer: nn.Module, streamed: StreamedLayer) -> None:
        self._streamed = streamed
        self._linears = []
        kept_of = dict(zip(map(id, streamed.parameters), enumerate(streamed.kept), strict=True))
        for module in layer.modules():
            if type(module) is not nn.Linear or id(module.weight) not in kept_of:
                continue
            place, kept = kept_of[id(module.weight)]
            if kept.state is not None:
                module.kept = kept
                self._linears.append((module, place))

    def multiply(self) -> None:
        """Multiply in FP8 from now on; fetches leave the weights out."""
        for module, place in self._linears:
            module.__class__ = _Multiplied
            self._streamed.unfetched.add(place)

    def dequantise(self) -> None:
        """Multiply by weights again, which the next fetch dequantises."""
        for module, _ in self._linears:
            module.__class__ = nn.Linear
        self._streamed.unfetched.clear()
