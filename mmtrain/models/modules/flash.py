"""Packed attention on a GPU: torch's variable-length flash attention, where it takes the tensors and is right.

It takes all documents in one call but knows no fp32, soft caps or sinks. It was not run where this was written: its
call is tested against torch's signature and a reference of its documentation. When a stage is built on a GPU, the
kernel's results and gradients are compared with those of `kernels`, which takes over if the two disagree.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from mmtrain.data.stream.packs import copied
from mmtrain.models.modules.kernels import Documents, Runs, attend_by_document

MOST_KEY_COPIES = 4
WIDEST_FLASH_HEAD = 192  # whose backward any GPU can do; wider heads need a data centre's
_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12


class AttentionBackend(NamedTuple):
    """How attention is computed."""

    kernel: str  # "flash": all documents in one call; "document": one call for each
    reason: str | None  # why it is not flash
    slow: bool  # a GPU does not do what it could


class _Call(NamedTuple):
    """What decides how one call computes attention."""

    reason: str | None  # why flash attention does not take these tensors on any GPU
    case: tuple[bool, int, bool, torch.dtype, torch.device]  # as for `_flash_agrees`

    def way(self) -> AttentionBackend:
        """Decide; compares flash attention with `kernels` the first time, which takes memory and runs a backward."""
        reason, (_, width, _, dtype, device) = self
        if reason is None and not _flash_agrees(*self.case):
            heads = f"{str(dtype).removeprefix('torch.')} heads of {width}"
            reason = f"flash attention of torch {torch.__version__} fails or is wrong on {heads} on this GPU"
        return AttentionBackend(
            "flash" if reason is None else "document", reason, reason is not None and device.type == "cuda"
        )


_CALLS: ContextVar[set[_Call] | None] = ContextVar("calls", default=None)


@contextmanager
def record_backends() -> Iterator[set[AttentionBackend]]:
    """Collect the ways in which attention is computed within this context; the set is filled when the context ends.

    Documents go one by one until then. Comparing the GPU kernel inside a layer that is recomputed in backward would end
    in torch's CheckpointError, since what the comparison saves counts among the tensors of the layer.
    """
    calls: set[_Call] = set()
    ways: set[AttentionBackend] = set()
    token = _CALLS.set(calls)
    try:
        yield ways
    finally:
        _CALLS.reset(token)
    ways |= {call.way() for call in calls}


def describe_backends(ways: Sequence[Collection[AttentionBackend]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A record of each way, with the ranks that take it, and a line of text; `ways` are those of each rank in turn."""
    ranks: dict[AttentionBackend, list[int]] = {}
    for rank, taken in enumerate(ways):
        for way in sorted(taken, key=str):
            ranks.setdefault(way, []).append(rank)
    records, lines = [], []
    for way, on in ranks.items():
        records.append({**way._asdict(), "ranks": on})
        text = "flash attention, all documents in one call" if way.reason is None else "documents one by one"
        because = f", which is slow: {way.reason}" if way.slow else f" ({way.reason})" if way.reason else ""
        where = f" (ranks {', '.join(map(str, on))})" if len(on) < len(ways) and len(ranks) > 1 else ""
        lines.append(f"attention: {text}{because}{where}")
    return records, lines


def flash_varlen_attn(*arguments: Any, **options: Any) -> torch.Tensor:
    """torch's variable-length attention by flash attention, forward and therefore backward.

    Left to itself torch 2.15 prefers cuDNN on Hopper and Blackwell, which builds a graph for every new shape, and every
    pack has another: 42 to 51 ms a call instead of 0.25 (pytorch pull request 191576). Earlier releases have no choice.
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return varlen_attn(*arguments, **options)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents | Runs,
    scale: float,
    kernel: Callable[..., torch.Tensor] = flash_varlen_attn,
) -> torch.Tensor:
    """All documents of all rows in one call of torch's variable-length flash attention (fp16 or bf16, on a GPU).

    Its window is (tokens to the left, tokens to the right), so a window of W tokens, itself included, is (W - 1, 0) and
    plain causal attention is (-1, 0): torch.nn.attention.varlen. Where a sequence has fewer queries than keys, they are
    its last tokens, as flash attention counts since 2.1. Shapes as in `packed_attention`.
    """
    batch, heads, length, width = query.shape
    value_width = value.shape[-1]
    if value_width < width:  # deepseek; the kernel wants one width, and added columns of zeros stay zeros
        value = F.pad(value, (0, width - value_width))
    options: dict[str, Any] = {}
    if key.shape[1] != heads:
        if _GROUPS_HEADS:
            options["enable_gqa"] = True
        else:
            key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
    q, k, v = (states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value))
    if isinstance(documents, Runs):
        seen, *sequences = _run_sequences(documents, key.shape[2], query.device)
        k, v = k[seen], v[seen]
    else:
        sequences = [documents.offsets, documents.offsets, documents.longest, documents.longest]
    left = -1 if documents.window is None else documents.window - 1
    out = kernel(q, k, v, *sequences, scale=scale, window_size=(left, 0), **options)
    return out.unflatten(0, (batch, length))[..., :value_width]


def _run_sequences(
    runs: Runs, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Runs as sequences of their own: places of the keys that each sees, offsets of queries and of keys, the longest.

    A document's keys come once for each of its runs.
    """
    asked = [end - first for _, _, first, end in runs.runs]
    seen = [end - begin for _, begin, _, end in runs.runs]
    places = torch.cat([torch.arange(row * length + begin, row * length + end) for row, begin, _, end in runs.runs])
    offsets = (torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32) for counts in (asked, seen))
    on_device = (copied(tensor, device) for tensor in (places, *offsets))
    return *on_device, max(asked), max(seen)


def use_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | Runs, extras: Sequence[str]
) -> bool:
    """Whether the GPU kernel takes these tensors, and is right on this GPU; `extras` names what else is asked for.

    Runs so many that the keys they see, put end to end, are more than MOST_KEY_COPIES times the keys that there are go
    one by one.
    """
    case = query.shape[1] != key.shape[1], query.shape[-1], documents.window is not None, query.dtype, query.device
    call = _Call(_reason_against_flash(query, key, value, documents, extras), case)
    calls = _CALLS.get()
    if calls is not None:
        calls.add(call)
        return False
    return call.way().reason is None


def _reason_against_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | Runs, extras: Sequence[str]
) -> str | None:
    width = query.shape[-1]
    if not query.is_cuda:
        return "flash attention needs a GPU"
    if extras:
        return f"flash attention knows no {' or '.join(extras)}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention does not compute in {str(query.dtype).removeprefix('torch.')}"
    if width % 8 or width > WIDEST_FLASH_HEAD or value.shape[-1] > width:
        return f"heads are {width} wide: flash attention takes multiples of 8 up to {WIDEST_FLASH_HEAD}"
    if isinstance(documents, Runs):
        seen = sum(end - begin for _, begin, _, end in documents.runs)
        if seen > MOST_KEY_COPIES * key.shape[0] * key.shape[2]:
            return "supervised tokens are scattered"
    return None


@functools.cache
def _flash_agrees(grouped: bool, width: int, windowed: bool, dtype: torch.dtype, device: torch.device) -> bool:
    # A small window stands for all: the comparison takes memory with the square of it.
    groups, window = 2 if grouped else 1, 100 if windowed else None
    return kernel_agrees(flash_varlen_attn, groups, width, window, dtype, device)


@torch.enable_grad()
def kernel_agrees(
    kernel: Callable[..., torch.Tensor],
    groups: int,
    width: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> bool:
    """Whether a variable-length kernel gives what attention document by document gives in fp32, within rounding.

    It is asked for all tokens, and for some, and for the gradients of query, key and value of both. `groups` query
    heads share a key head; heads are `width` wide. A kernel that raises RuntimeError (flash attention on a GPU before
    Ampere) does not agree.
    """
    borders = (0, 13, 19, 20, 47 + (window or 0))  # the last document is longer than the window
    spans = tuple(itertools.pairwise(borders))
    documents = Documents(
        (spans,), window, torch.tensor(borders, dtype=torch.int32, device=device), borders[-1] - borders[-2]
    )
    some = torch.tensor([place for begin, end in spans for place in {begin, (begin + end) // 2, end - 1}]).sort().values
    rows = some.to(device)
    questions = ((documents, slice(None)), (documents.at(some), rows))
    scale = width**-0.5
    generator = torch.Generator(device).manual_seed(0)
    # Scores around 14 show a wrong result best; but they leave a gradient of differences that bf16 does not hold.
    for peak, with_gradients in ((14.0, False), (3.0, True)):
        query, key, value, upstream = (
            torch.randn(1, heads, borders[-1], width, generator=generator, device=device)
            for heads in (2 * groups, 2, 2, 2 * groups)
        )
        # Each document's first and last token outweigh the others for every query that sees them: a window that is off
        # by one, or one token of another document or its own too few, changes a result by a good part of what there is.
        query[..., 0], key[..., 0] = (peak / scale) ** 0.5, 0.0
        for i, (begin, end) in enumerate(spans):
            for token, size in ((end - 1, 1.5), (begin, 3.0)):
                key[:, :, token, 0], value[:, :, token] = (peak / scale) ** 0.5, size * (-1) ** i
        given = [states.to(dtype).requires_grad_() for states in (query, key, value)]
        exact = [states.detach().float().requires_grad_() for states in given]
        upstream = upstream.transpose(1, 2)
        for asked, places in questions:
            expected = attend_by_document(*exact, documents, scale)[:, places]
            try:
                seen = attend_packed(given[0][:, :, places], *given[1:], asked, scale, kernel)
                compared = [(seen, expected)]
                if with_gradients:
                    gradients = torch.autograd.grad(seen, given, upstream[:, places].to(dtype))
                    exact_gradients = torch.autograd.grad(expected, exact, upstream[:, places])
                    compared += zip(gradients, exact_gradients, strict=True)
            except RuntimeError:
                return False
            # bf16 keeps 3 digits, of scores as well as of values: a right kernel is off by 0.02 at most.
            if any((one - other).detach().abs().max() > 0.1 * other.detach().abs().max() for one, other in compared):
                return False
    return True
