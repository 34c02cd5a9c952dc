"""References for CUDA kernels that the CPU lacks or has otherwise: attention, norms, dequantisation
into `out`.

Each takes the kernel's arguments as CPU tensors and returns its first outputs. Backward passes are
computed again from the inputs, in float32: nothing that only a kernel knows (a log-sum-exp, a
random state) is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def _gradients(
    attend: Callable[..., torch.Tensor], inputs: Sequence[Any], upstream: torch.Tensor
) -> list[Any]:
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().float().requires_grad_() for x in inputs]
        output = attend(*leaves)
        asked = [x for x in leaves if x is not None]
        gradients = iter(torch.autograd.grad(output, asked, upstream.float()))
    return [None if x is None else next(gradients).to(x.dtype) for x in inputs]


def _attend(
    query: Any, key: Any, value: Any, bias: Any = None, *, causal: bool, scale: float | None
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _floats(*states: Any) -> list[Any]:
    return [None if x is None else x.float() for x in states]


def _refuse_dropout(dropout: float) -> None:
    assert dropout == 0, "the fake CUDA's attention has no dropout"


def flash(
    q: Any,
    k: Any,
    v: Any,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
):
    _refuse_dropout(dropout)
    return [_attend(*_floats(q, k, v), causal=causal, scale=scale)]


def flash_backward(
    upstream: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cq: Any,
    ck: Any,
    mq: Any,
    mk: Any,
    dropout: float,
    causal: bool,
    seed: Any,
    offset: Any,
    *,
    scale: Any = None,
):
    return _gradients(lambda *x: _attend(*x, causal=causal, scale=scale), (q, k, v), upstream)


def efficient(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    with_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: Any = None,
):
    _refuse_dropout(dropout)
    return [_attend(*_floats(q, k, v, bias), causal=causal, scale=scale)]


def efficient_backward(
    upstream: Any,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    out: Any,
    lse: Any,
    seed: Any,
    offset: Any,
    dropout: float,
    asked: Any,
    causal: bool = False,
    *,
    scale: Any = None,
):
    inputs = (q, k, v, bias if bias is not None and asked[3] else None)
    known = None if bias is None else bias.float()

    def attend(q: Any, k: Any, v: Any, b: Any) -> torch.Tensor:
        return _attend(q, k, v, known if b is None else b, causal=causal, scale=scale)

    return _gradients(attend, inputs, upstream)


def _by_sequence(
    q: Any, k: Any, v: Any, of_queries: Any, of_keys: Any, causal: bool, scale: Any, window: Any
):
    """Attention of sequences that lie end to end, (tokens, heads, width); queries are a sequence's
    last tokens.
    """
    outputs = []
    borders = (itertools.pairwise(offsets.tolist()) for offsets in (of_queries, of_keys))
    for (first, last), (begin, end) in zip(*borders, strict=True):
        queries, keys = last - first, end - begin
        i = torch.arange(keys - queries, keys)[:, None]
        j = torch.arange(keys)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        left, right = window
        if causal:
            right = 0
        if right >= 0:
            seen &= j - i <= right
        if left >= 0:
            seen &= i - j <= left
        states = (x.transpose(0, 1)[None] for x in (q[first:last], k[begin:end], v[begin:end]))
        outputs.append(_attend(*states, seen, causal=False, scale=scale)[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen(
    q: Any,
    k: Any,
    v: Any,
    of_queries: Any,
    of_keys: Any,
    mq: Any,
    mk: Any,
    causal: bool = False,
    scale: Any = None,
    window: Any = None,
    *_: Any,
    **__: Any,
):
    return [_by_sequence(*_floats(q, k, v), of_queries, of_keys, causal, scale, window or (-1, -1))]


def varlen_backward(
    upstream: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    of_queries: Any,
    of_keys: Any,
    mq: Any,
    mk: Any,
    causal: bool,
    state: Any,
    scale: Any = None,
    window: Any = None,
    *_: Any,
    **__: Any,
):
    def attend(*states: Any) -> torch.Tensor:
        return _by_sequence(*states, of_queries, of_keys, causal, scale, window or (-1, -1))

    return _gradients(attend, (q, k, v), upstream)


def _in_float32(operation: Any) -> Callable[..., Any]:
    """Return a layer norm whose mean and deviation are float32, as on GPUs, whatever its input
    is.
    """

    def compute(*args: Any) -> Any:
        return operation(*(x.float() if isinstance(x, torch.Tensor) else x for x in args))

    return compute


def rms_norm_backward(
    upstream: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    rstd: torch.Tensor,
    weight: torch.Tensor,
    _: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the weight, of a norm over the last dimension."""
    normed, scaled = x.float() * rstd.float(), upstream.float() * weight.float()
    of_x = rstd.float() * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (upstream.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)


KERNELS: dict[Any, Callable[..., Any]] = {
    **{
        operation: _in_float32(operation)
        for operation in (aten.native_layer_norm, aten.native_layer_norm_backward)
    },
    aten._fused_rms_norm_backward: rms_norm_backward,
    aten._scaled_dot_product_flash_attention: flash,
    aten._scaled_dot_product_flash_attention_backward: flash_backward,
    aten._scaled_dot_product_efficient_attention: efficient,
    aten._scaled_dot_product_efficient_attention_backward: efficient_backward,
}


def register_bitsandbytes() -> None:
    """Add the operations of bitsandbytes that have an `out` on GPUs alone, once they are
    defined.
    """

    def with_out(operation: Any) -> Callable[..., Any]:
        inputs = len(operation.default._schema.arguments)

        def compute(*args: Any) -> list[Any]:
            result = operation.default(*args[:inputs])
            return [out.copy_(result) for out in args[inputs:]] or [result]

        return compute

    for operation in (
        torch.ops.bitsandbytes.dequantize_4bit,
        torch.ops.bitsandbytes.dequantize_blockwise,
    ):
        KERNELS[operation] = with_out(operation)


def register_varlen() -> None:
    """Add the operations of torch.nn.attention.varlen, once they are defined."""
    KERNELS[torch.ops.torch_attn._varlen_attn] = varlen
    KERNELS[torch.ops.torch_attn._varlen_attn_backward] = varlen_backward
