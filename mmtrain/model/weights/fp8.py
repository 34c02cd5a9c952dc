"""Frozen matrices in FP8 (e4m3): kept with a scale for each row, and multiplied as they are kept.

    forward   x (T, K), cast by row       W (N, K) with scales (N, 1)     --> x W^T (T, N)
    backward  (g * scales^T) (T, N), cast by row      the bytes of W      --> g W (T, K)

Backward sums over the rows of W, so their scales go into the gradient before it is cast, and one
set of bytes serves both. Ada and Hopper multiply operands that lie contiguous along the sum, so
backward transposes W each time: 1 byte a weight is kept instead of 2.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.model.weights.streaming import StreamedLayer

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
LEAST = 1e-30  # row maximum; a row of zeros would divide by 0


def cast(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cast rows (..., K) to FP8; return them with float32 scales (..., 1) to multiply with."""
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST) / LARGEST
    return (rows.float() / scales).clamp(-LARGEST, LARGEST).to(FP8), scales


class Product(torch.autograd.Function):
    """x W^T for x (T, K), with W as codes (N, K) and scales (N, 1) from `cast`. W gets no
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return _product(x, codes, scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        codes, scales = ctx.saved_tensors
        transposed = codes.t().contiguous()
        ones = scales.new_ones(len(transposed), 1)
        product = _product(gradient.float() * scales.t(), transposed, ones)
        return product.to(gradient.dtype), None, None


def _product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    rows, of_rows = cast(x)
    # with scales of rows the kernel returns bfloat16 alone
    return torch._scaled_mm(
        rows,
        codes.t(),
        scale_a=of_rows,
        scale_b=scales.t(),
        out_dtype=torch.bfloat16,
    ).to(x.dtype)


class _Multiplied(nn.Linear):
    """A linear layer that multiplies FP8 codes instead of its weight.

    Layers switch to this class: for a forward set on each layer torch would compile anew.
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
        places = dict(zip(map(id, streamed.parameters), itertools.count(), strict=False))
        for module in layer.modules():
            if type(module) is not nn.Linear or id(module.weight) not in places:
                continue
            place = places[id(module.weight)]
            kept = streamed.kept[place]
            if kept.state is not None:
                module.kept = kept  # for `_Multiplied.forward`
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
