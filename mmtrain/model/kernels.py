"""How packed attention is computed: one call per document anywhere, or one call for all documents on a GPU.

    query (B, H, L, D), key (B, K, L, D), value (B, K, L, E), Documents --kernel--> (B, L, H, E)

scaled_dot_product_attention once per document runs on any device, and is the only way on a CPU: 1.5 s forward and
backward for 4 layers and 2,048 tokens in 8 documents, where one dense mask takes 2.9 s. torch's variable-length flash
attention takes all documents in one call but knows no fp32, soft caps or sinks. It was not run where this was written:
its call is tested against torch's signature and a reference of its documentation, and at its first use on a GPU it is
compared with the first way, which takes over if the two disagree.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

# Added release by release: scale and window_size after 2.10, enable_gqa by 2.12.
_FLASH_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)


@dataclass(frozen=True, eq=False)
class Documents:
    """Where documents begin and end, in the place of an attention mask.

    `rows[b]` holds (begin, end) of every document of row b; `window` is the number of tokens that a token sees, itself
    included (None: all earlier ones). For the GPU kernel, made once and not in every layer: `offsets` (documents + 1,)
    int32, on the device, the borders of all documents when rows are laid end to end; `longest`, in tokens.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    window: int | None
    offsets: torch.Tensor
    longest: int


def attend_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One attention call per document, any device and dtype. Shapes as in `packed_attention`."""

    def attend(rows: slice, begin: int, end: int) -> torch.Tensor:
        q, k, v = (states[rows, :, begin:end] for states in (query, key, value))
        if softcap is None and sinks is None:
            return _scaled_dot_product(q, k, v, scale, documents.window)
        return _explicit_softmax(q, k, v, scale, documents.window, softcap, sinks)

    length = query.shape[2]
    if all(len(row) == 1 for row in documents.rows):
        return attend(slice(None), 0, length).transpose(1, 2).contiguous()
    outputs = [
        torch.cat([attend(slice(b, b + 1), begin, end) for begin, end in row], dim=2)
        for b, row in enumerate(documents.rows)
    ]
    return torch.cat(outputs).transpose(1, 2).contiguous()


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    kernel: Callable[..., torch.Tensor] = varlen_attn,
) -> torch.Tensor:
    """All documents of all rows in one call of torch's variable-length flash attention (fp16 or bf16, on a GPU).

    Its window is (tokens to the left, tokens to the right), so a window of W tokens, itself included, is (W - 1, 0) and
    plain causal attention is (-1, 0): torch.nn.attention.varlen. Shapes as in `packed_attention`.
    """
    batch, heads, length, width = query.shape
    value_width = value.shape[-1]
    if value_width < width:  # deepseek; the kernel wants one width, and added columns of zeros stay zeros
        value = F.pad(value, (0, width - value_width))
    options: dict[str, Any] = {}
    if key.shape[1] != heads:
        if "enable_gqa" in _FLASH_OPTIONS:
            options["enable_gqa"] = True
        else:
            key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
    q, k, v = (states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value))
    left = -1 if documents.window is None else documents.window - 1
    out = kernel(
        q,
        k,
        v,
        documents.offsets,
        documents.offsets,
        documents.longest,
        documents.longest,
        scale=scale,
        window_size=(left, 0),
        **options,
    )
    return out.unflatten(0, (batch, length))[..., :value_width]


def use_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> bool:
    """Whether the GPU kernel takes these tensors, and is right on this GPU.

    Backward beyond a head width of 192 needs a data centre's GPU, so such heads (gemma) go document by document.
    """
    width = query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if not query.is_cuda or not half or width % 8 or width > 192 or value.shape[-1] > width:
        return False
    return _flash_agrees(query.shape[1] != key.shape[1], width, window is not None, query.dtype, query.device)


@functools.cache
def _flash_agrees(grouped: bool, width: int, windowed: bool, dtype: torch.dtype, device: torch.device) -> bool:
    # A small window stands for all: the comparison takes memory with the square of it.
    groups, window = 2 if grouped else 1, 100 if windowed else None
    agrees = {"scale", "window_size"} <= _FLASH_OPTIONS and kernel_agrees(
        varlen_attn, groups, width, window, dtype, device
    )
    if not agrees:
        warnings.warn(
            f"torch {torch.__version__}: variable-length attention does not work on {device} for {dtype} heads of "
            f"{width}; documents are attended to one by one, which is slower",
            RuntimeWarning,
            stacklevel=2,
        )
    return agrees


@torch.no_grad()
def kernel_agrees(
    kernel: Callable[..., torch.Tensor],
    groups: int,
    width: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> bool:
    """Whether a variable-length kernel gives what attention document by document gives in fp32, within rounding.

    `groups` query heads share a key head; heads are `width` wide. A kernel that raises RuntimeError (flash attention on
    a GPU before Ampere) does not agree.
    """
    borders = (0, 13, 19, 20, 47 + (window or 0))  # the last document is longer than the window
    spans = tuple(itertools.pairwise(borders))
    documents = Documents(
        (spans,), window, torch.tensor(borders, dtype=torch.int32, device=device), borders[-1] - borders[-2]
    )
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, borders[-1], width, generator=generator, device=device) for heads in (2 * groups, 2, 2)
    )
    # Each document's first and last token outweigh the others for every query that sees them: a window that is off by
    # one, or one token of another document, changes a result by as much as there is.
    scale = width**-0.5
    query[..., 0], key[..., 0] = (14 / scale) ** 0.5, 0.0
    for i, (begin, end) in enumerate(spans):
        for token in (begin, end - 1):
            key[:, :, token, 0], value[:, :, token] = (14 / scale) ** 0.5, 3.0 * (-1) ** i
    query, key, value = (states.to(dtype) for states in (query, key, value))
    try:
        seen = attend_packed(query, key, value, documents, scale, kernel)
    except RuntimeError:
        return False
    expected = attend_by_document(query.float(), key.float(), value.float(), documents, scale)
    # bf16 keeps 3 digits, of scores around 14 as well as of values.
    return bool((seen.float() - expected).abs().max() <= 0.1 * expected.abs().max())


def _visible(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean (length, length): which token (column) a token (row) of one document sees."""
    i = torch.arange(length, device=device)
    seen = i[:, None] >= i
    return seen if window is None else seen & (i[:, None] - i < window)


def _scaled_dot_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """torch's own attention on one document, (B, H, n, D) to (B, H, n, E)."""
    grouped, length = q.shape[1] != k.shape[1], q.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, scale=scale, enable_gqa=grouped)
    seen = _visible(length, window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)


def _explicit_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention on one document with soft-capped scores and sinks, as gemma2 and gpt_oss define them in transformers.

    Makes the (B, H, n, n) scores, which torch's fused kernels avoid: 4,096 tokens and 16 heads take 1 GB in fp32.
    """
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(length, window, q.device), torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more column that takes probability and gives nothing
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(scores.float(), dim=-1).to(q.dtype)[..., :length] @ v
