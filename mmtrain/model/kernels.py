"""How packed attention is computed: one call per document anywhere, or one call for all documents on a GPU.

    query (B, H, L, D), key (B, K, L, D), value (B, K, L, E), Documents --kernel--> (B, L, H, E)
    query (1, H, S, D), key (B, K, L, D), value (B, K, L, E), Runs --kernel--> (1, S, H, E), of S tokens alone

scaled_dot_product_attention once per document runs on any device, and is the only way on a CPU: 1.5 s forward and
backward for 4 layers and 2,048 tokens in 8 documents, where one dense mask takes 2.9 s. torch's variable-length flash
attention takes all documents in one call but knows no fp32, soft caps or sinks. It was not run where this was written:
its call is tested against torch's signature and a reference of its documentation, and at its first use on a GPU its
results and gradients are compared with those of the first way, which takes over if the two disagree.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from mmtrain.data.stream.packs import copied

MOST_KEY_COPIES = 4
WIDEST_FLASH_HEAD = 192  # whose backward any GPU can do; wider heads need a data centre's
# Added release by release: scale and window_size after 2.10, enable_gqa by 2.12.
_FLASH_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)


class Way(NamedTuple):
    """How attention is computed."""

    kernel: str  # "flash": all documents in one call; "document": one call for each
    reason: str | None  # why it is not flash
    slow: bool  # a GPU does not do what it could


_WAYS: ContextVar[set[Way] | None] = ContextVar("ways", default=None)


@contextmanager
def ways_taken() -> Iterator[set[Way]]:
    """Within this context, the ways in which attention was computed."""
    found: set[Way] = set()
    token = _WAYS.set(found)
    try:
        yield found
    finally:
        _WAYS.reset(token)


def say_ways(ways: Sequence[Collection[Way]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A record of each way, with the ranks that take it, and a line of text; `ways` are those of each rank in turn."""
    ranks: dict[Way, list[int]] = {}
    for rank, taken in enumerate(ways):
        for way in sorted(taken, key=str):
            ranks.setdefault(way, []).append(rank)
    records, lines = [], []
    for way, on in ranks.items():
        records.append({"kernel": way.kernel, "reason": way.reason, "slow": way.slow, "ranks": on})
        text = "flash attention, all documents in one call" if way.reason is None else "documents one by one"
        because = f", which is slow: {way.reason}" if way.slow else f" ({way.reason})" if way.reason else ""
        where = f" (ranks {', '.join(map(str, on))})" if len(on) < len(ways) and len(ranks) > 1 else ""
        lines.append(f"attention: {text}{because}{where}")
    return records, lines


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

    def at(self, places: torch.Tensor) -> Runs:
        """The same for queries of some tokens alone: `places` (S,) int64, on the CPU, rising over rows end to end."""
        length = self.rows[0][-1][1]
        spans = [(row, begin, end) for row, documents in enumerate(self.rows) for begin, end in documents]
        begins = torch.tensor([row * length + begin for row, begin, _ in spans])
        document = torch.searchsorted(begins, places, right=True) - 1
        breaks = (places.diff() != 1) | (document.diff() != 0)
        firsts = [0, *(breaks.nonzero().flatten() + 1).tolist()] if len(places) else []
        runs = []
        for start, stop in itertools.pairwise([*firsts, len(places)]):
            row, begin, _ = spans[int(document[start])]
            first = int(places[start]) - row * length
            runs.append((row, begin, first, first + stop - start))
        return Runs(tuple(runs), self.window)


@dataclass(frozen=True, eq=False)
class Runs:
    """Queries of some tokens alone, in the place of Documents: keys and values are still those of all tokens.

    `runs` holds (row, begin, first, end) of every run of such tokens: the document of tokens [first, end) of a row
    begins at `begin`, and each of them sees it as far as itself. Queries are laid end to end in this order.
    """

    runs: tuple[tuple[int, int, int, int], ...]
    window: int | None


def attend_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One attention call per document, or one for all if they are equally long; any device and dtype.

    Shapes as in `packed_attention`.
    """
    lengths = {end - begin for row in documents.rows for begin, end in row}
    if len(lengths) == 1:
        same = (states.unflatten(2, (-1, *lengths)).transpose(1, 2).flatten(0, 1) for states in (query, key, value))
        attended = _attend(*same, documents.window, scale, softcap, sinks)
        return attended.reshape(*query.shape[::2], *attended.shape[2:]).contiguous()
    outputs = []
    for row, *states in zip(documents.rows, query.split(1), key.split(1), value.split(1), strict=True):
        parts = (_split(part, [end - begin for begin, end in row]) for part in states)
        attended = [_attend(*qkv, documents.window, scale, softcap, sinks) for qkv in zip(*parts, strict=True)]
        outputs.append(torch.cat(attended, dim=1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _split(states: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """(B, H, L, D) into (B, H, length, D) of each length.

    Not by slices, each of whose gradients would be written into a tensor of the whole length; and along tokens as they
    lie in memory, (B, L, H, D), so that gradients are joined without being laid out anew.
    """
    return [part.transpose(1, 2) for part in states.transpose(1, 2).split(lengths, dim=1)]


def attend_by_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Runs,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One attention call per run, any device and dtype; `query` (1, H, S, D) to (1, S, H, E)."""
    queries = iter(_split(query, [end - first for _, _, first, end in runs.runs]))
    outputs = []
    for row, of_row in itertools.groupby(runs.runs, key=lambda run: run[0]):
        documents = [list(of_document) for _, of_document in itertools.groupby(of_row, key=lambda run: run[1])]
        # Each document as far as its last run, and what lies between.
        borders = [0, *(border for found in documents for border in (found[0][1], found[-1][3])), key.shape[2]]
        sizes = [end - begin for begin, end in itertools.pairwise(borders)]
        keys, values = (_split(states[row : row + 1], sizes)[1::2] for states in (key, value))
        for found, k, v in zip(documents, keys, values, strict=True):
            for _, begin, _, end in found:
                states = (next(queries), k[:, :, : end - begin], v[:, :, : end - begin])
                outputs.append(_attend(*states, runs.window, scale, softcap, sinks))
    return torch.cat(outputs, dim=1)


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
        if "enable_gqa" in _FLASH_OPTIONS:
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
    out = kernel(
        q,
        k,
        v,
        *sequences,
        scale=scale,
        window_size=(left, 0),
        **options,
    )
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | Runs, extras: Sequence[str] = ()
) -> bool:
    """Whether the GPU kernel takes these tensors, and is right on this GPU; `extras` names what else is asked for.

    Runs so many that the keys they see, put end to end, are more than MOST_KEY_COPIES times the keys that there are go
    one by one.
    """
    reason = _reason_against_flash(query, key, value, documents, extras)
    found = _WAYS.get()
    if found is not None:
        found.add(Way("flash" if reason is None else "document", reason, reason is not None and query.is_cuda))
    return reason is None


def _reason_against_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents | Runs, extras: Sequence[str]
) -> str | None:
    width, dtype = query.shape[-1], str(query.dtype).removeprefix("torch.")
    if not query.is_cuda:
        return "flash attention needs a GPU"
    if extras:
        return f"flash attention knows no {' or '.join(extras)}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention does not compute in {dtype}"
    if width % 8 or width > WIDEST_FLASH_HEAD or value.shape[-1] > width:
        return f"heads are {width} wide: flash attention takes multiples of 8 up to {WIDEST_FLASH_HEAD}"
    if isinstance(documents, Runs):
        seen = sum(end - begin for _, begin, _, end in documents.runs)
        if seen > MOST_KEY_COPIES * key.shape[0] * key.shape[2]:
            return "supervised tokens are scattered"
    windowed = documents.window is not None
    if not _flash_agrees(query.shape[1] != key.shape[1], width, windowed, query.dtype, query.device):
        return f"flash attention of torch {torch.__version__} fails or is wrong on {dtype} heads of {width} on this GPU"
    return None


@functools.cache
def _flash_agrees(grouped: bool, width: int, windowed: bool, dtype: torch.dtype, device: torch.device) -> bool:
    # A small window stands for all: the comparison takes memory with the square of it.
    groups, window = 2 if grouped else 1, 100 if windowed else None
    return {"scale", "window_size"} <= _FLASH_OPTIONS and kernel_agrees(
        flash_varlen_attn, groups, width, window, dtype, device
    )


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


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention on one document and its last m queries, (B, H, m, D) to (B, m, H, E)."""
    if softcap is None and sinks is None:
        return _scaled_dot_product(q, k, v, scale, window).transpose(1, 2)
    return _explicit_softmax(q, k, v, scale, window, softcap, sinks).transpose(1, 2)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean (queries, keys): which token (column) each of the last tokens (rows) of one document sees."""
    i, j = torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)
    seen = i >= j
    return seen if window is None else seen & (i - j < window)


def _scaled_dot_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """torch's own attention on one document and its last m queries, (B, H, m, D) to (B, H, m, E)."""
    grouped, queries, keys = q.shape[1] != k.shape[1], q.shape[2], k.shape[2]
    if window is None or keys <= window:
        if queries in (1, keys):
            return F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=scale, enable_gqa=grouped)
        window = None
    seen = _visible(queries, keys, window, q.device)
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

    The queries are those of its last m of n tokens. Makes the (B, H, m, n) scores, which torch's fused kernels avoid:
    4,096 tokens and 16 heads take 1 GB in fp32.
    """
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(queries, keys, window, q.device), torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more column that takes probability and gives nothing
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(scores.float(), dim=-1).to(q.dtype)[..., :keys] @ v
