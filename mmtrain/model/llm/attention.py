"""Packed attention for stock transformers models: a token sees the earlier tokens of its own
document, and no others.

    position_ids (B, L) --document_positions--> the model's mask code --packed_mask--> Documents (no
        (L, L) matrix)
    query (B, H, L, D), key (B, K, L, D), value (B, K, L, E), Documents --packed_attention--> (B, L,
        H, E)
    query (1, H, S, D) of some tokens, key, value, Documents.at(places) --packed_attention--> (1, S,
        H, E)

Documents take the place of the attention mask, from the model's own mask code to every layer. So
sliding windows and chunks are those of the model's config. Two backends: torch's variable-length
flash attention, all documents in one call (a GPU, fp16 or bf16, no soft caps, no sinks), else
scaled_dot_product_attention, one call per document.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from mmtrain.base.devices import copied
from mmtrain.model.llm.kernels import Backend, note_backend

# attn_implementation, under which transformers finds the mask and the attention
ATTENTION = "mmtrain_packed"
# the same, of encoders that take images of any size: stock code looks for flash
IMAGES_FLASH = "mmtrain_images_flash"
# flash attention copies a document's keys for each run of queries; with more, runs go one by one
MAX_KEY_COPIES = 4
WIDEST_FLASH_HEAD = 192  # wider heads have a backward on data centre GPUs alone
_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # since torch 2.12

# Arguments that layers hand on and that change nothing: the mask already says what sliding_window
# and position_ids mean, the rest asks for outputs or caches that do not exist here.
_WITHOUT_EFFECT = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_router_logits",
    "position_ids",
    "sliding_window",
}


@dataclass(eq=False)  # of a frozen one torch 2.11 compiles anew for each number of runs
class Documents:
    """Runs of tokens and the documents that they see; passed in the place of an attention mask.

    Each of `runs` is (row, begin, first, end): tokens [first, end) of a row have queries, which lie
    end to end, and see their document, which begins at `begin`, as far as themselves. Keys and
    values are those of all tokens. Where all tokens have queries, a run is a document, and flash
    attention gets `offsets`, `longest`.
    """

    runs: tuple[tuple[int, int, int, int], ...]
    window: int | None  # tokens that one sees, itself included; None: all
    # (documents + 1,) int32, on the device: borders when rows lie end to end
    offsets: Tensor | None = None
    longest: int = 0  # tokens of a document

    def at(self, places: Tensor) -> Documents:
        """Keep the queries at `places` (S,) int64 alone, on the CPU, rising over rows that lie end
        to end.
        """
        length = self.runs[-1][3]
        begins = torch.tensor([row * length + begin for row, begin, *_ in self.runs])
        document = torch.searchsorted(begins, places, right=True) - 1
        breaks = (places.diff() != 1) | (document.diff() != 0)
        borders = [*(breaks.nonzero().flatten() + 1).tolist(), len(places)]
        if len(places):
            borders.insert(0, 0)
        runs = []
        for start, stop in itertools.pairwise(borders):
            row, begin, *_ = self.runs[int(document[start])]
            first = int(places[start]) - row * length
            runs.append((row, begin, first, first + stop - start))
        return Documents(tuple(runs), self.window)


# ---- the mask


# position_ids of the forward call that packed_mask runs in; recomputation in backward makes no
# masks.
_POSITIONS: ContextVar[Tensor | None] = ContextVar("positions", default=None)


class NoPadding(Tensor):
    """An attention mask (B, L) of true that says on the host that all of it is true, when
    transformers asks.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        arguments: Any = (),
        options: Any = None,
    ) -> Any:
        if function in (torch.all, Tensor.all):
            return torch.tensor(True)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*arguments, **(options or {}))
        is_true = function in _KEEP_TRUE or (function is _EQUALS and arguments[1] == 1)
        return result.as_subclass(cls) if is_true else result


_EQUALS = torch._C.TensorBase.__eq__  # what `mask == 1` calls
_KEEP_TRUE = {Tensor.to, Tensor.__getitem__, Tensor.contiguous, Tensor.view}


@contextmanager
def document_positions(position_ids: Tensor) -> Iterator[None]:
    """Let a model's masks, within this context, also end where `position_ids` (B, L) restart.

    gpt_oss, afmoe and opt do not pass those to their masks. With position_ids on the host, no call
    waits.
    """
    token = _POSITIONS.set(position_ids)
    try:
        yield
    finally:
        _POSITIONS.reset(token)


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Documents:
    """Return the documents of a forward call, where transformers would build a mask
    (AttentionMaskInterface).

    Raises ValueError for padding masks, caches, a mask function of the model's own, and tokens that
    see later ones.
    """
    padded = attention_mask is not None and not bool(attention_mask.all())  # opt makes one of ones
    if padded or q_offset or kv_offset or q_length != kv_length or use_vmap:
        raise ValueError(
            "packed attention takes no padding mask, no cache and no mask function of the model"
        )
    assert mask_function is not None
    begins = torch.ones(batch_size, q_length, dtype=torch.bool)
    begins[:, 1:] = ~_joined(mask_function, batch_size, q_length, local_size)
    borders = [*begins.flatten().nonzero().flatten().tolist(), batch_size * q_length]

    runs = []
    for start, stop in itertools.pairwise(borders):
        row, begin = divmod(start, q_length)
        runs.append((row, begin, begin, begin + stop - start))
    offsets = copied(torch.tensor(borders, dtype=torch.int32), device or "cpu")
    longest = max(end - begin for _, begin, _, end in runs)
    return Documents(tuple(runs), local_size, offsets, longest)


def _joined(
    mask_function: Callable[..., Tensor],
    rows: int,
    length: int,
    local_size: int | None,
) -> Tensor:
    """Tell on the host which tokens, all but a row's first, are in the document of the one before.

    Documents end where the mask does and where positions do not go on.
    """
    # On the host, unless the function looks something up on the device: llama4's counts padding
    # there.
    where = next((tensor.device for tensor in _looked_up(mask_function)), torch.device("cpu"))
    row = torch.arange(rows, device=where)[:, None]
    later = torch.arange(1, length, device=where)[None]
    # Does a token see the next one? The one before? If and only if both are in one document, or
    # chunk.
    questions = (
        mask_function(row, 0, later - 1, later),
        mask_function(row, 0, later, later - 1),
    )
    shape = (rows, length - 1)
    answers = [torch.as_tensor(answer, device=where).expand(shape) for answer in questions]
    sees_later, joined = torch.stack(answers).cpu()
    if bool(sees_later.any()):
        raise ValueError("packed attention is causal, and this model lets tokens see later ones")

    position_ids = _POSITIONS.get()
    positions = torch.arange(length)[None] if position_ids is None else position_ids.cpu()
    continued = positions[:, 1:] == positions[:, :-1] + 1
    if local_size is not None and bool((continued & ~joined).any()):
        # Chunks: they count from the document's start, also where transformers (5.17) counts from
        # the row's.
        joined = positions[:, 1:] % local_size != 0
    return joined & continued


def _looked_up(mask_function: Callable[..., Any]) -> Iterator[Tensor]:
    """Yield the tensors in the closure of a mask function of transformers, and in those that it
    calls.
    """
    for cell in getattr(mask_function, "__closure__", None) or ():
        content = cell.cell_contents
        if not isinstance(content, (tuple, list)):
            content = (content,)
        for value in content:
            if isinstance(value, Tensor):
                yield value
            elif callable(value):
                yield from _looked_up(value)


# ---- the attention


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Documents,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally within documents; transformers calls this in every attention layer
    (AttentionInterface).

    `query` (B, H, L, D), `key` (B, K, L, D), `value` (B, K, L, E) with H a multiple of K; `softcap`
    bounds the scores (gemma2), `s_aux` (H,) are sinks (gpt_oss). Returns (B, L, H, E). Raises
    TypeError for an unknown argument.
    """
    name = type(module).__name__
    if not isinstance(attention_mask, Documents):
        raise TypeError(
            f"{name} passed on {type(attention_mask).__name__} instead of its documents"
        )
    unknown = []
    for option, argument in sorted(others.items()):
        if option not in _WITHOUT_EFFECT and argument is not None and argument is not False:
            unknown.append(option)
    if not unknown and dropout:
        unknown = "dropout"
    if not unknown and others.get("is_causal") is False:
        unknown = "is_causal=False"
    if unknown:
        raise TypeError(f"{name} asks for attention with {unknown}")

    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    extras = []
    if softcap is not None:
        extras.append("soft caps")
    if s_aux is not None:
        extras.append("sinks")
    reason = _reason_against_flash(query, key, value, attention_mask, extras)
    if reason is None:
        note_backend(Backend("attention", "flash"))
        return attend_flash(query, key, value, attention_mask, scaling), None
    note_backend(Backend("attention", "document", reason, slow=query.is_cuda))
    return attend_by_document(query, key, value, attention_mask, scaling, softcap, s_aux), None


def attend_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend in one call per run, or in one for documents of one length; shapes as in
    `packed_attention`.
    """
    attend = functools.partial(
        _attend,
        window=documents.window,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    lengths = {end - begin for _, begin, _, end in documents.runs}
    if len(lengths) == 1 and documents.offsets is not None:
        equal = []
        for states in (query, key, value):
            apart = states.unflatten(2, (-1, *lengths))
            equal.append(apart.transpose(1, 2).flatten(0, 1))
        attended = attend(*equal)
        return attended.reshape(*query.shape[::2], *attended.shape[2:]).contiguous()

    end_to_end = query.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
    queries = iter(_split(end_to_end, [end - first for _, _, first, end in documents.runs]))
    outputs = []
    for row, of_row in itertools.groupby(documents.runs, key=operator.itemgetter(0)):
        # Each document as far as its last run, and what lies between.
        by_document = []
        borders = [0]
        for _, of_document in itertools.groupby(of_row, key=operator.itemgetter(1)):
            runs = list(of_document)
            by_document.append(runs)
            borders += [runs[0][1], runs[-1][3]]
        borders.append(key.shape[2])
        sizes = [end - begin for begin, end in itertools.pairwise(borders)]
        keys = _split(key[row : row + 1], sizes)[1::2]
        values = _split(value[row : row + 1], sizes)[1::2]

        for runs, k, v in zip(by_document, keys, values, strict=True):
            for _, begin, _, end in runs:
                seen = slice(end - begin)
                outputs.append(attend(next(queries), k[:, :, seen], v[:, :, seen]))
    return torch.cat(outputs, dim=1).unflatten(1, query.shape[::2])[0]


def _split(states: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    # Not by slices, whose gradients have the whole length; along (1, L, H, D), whose gradients are
    # joined uncopied.
    return [part.transpose(1, 2) for part in states.transpose(1, 2).split(lengths, dim=1)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with one document's last m of n tokens, (B, H, m, D) to (B, m, H, E).

    Soft caps and sinks (gemma2, gpt_oss) cost the (B, H, m, n) scores: 1 GB in fp32 for 4,096
    tokens and 16 heads.
    """
    queries = q.shape[2]
    keys = k.shape[2]
    groups = q.shape[1] // k.shape[1]
    if softcap is None and sinks is None:
        causal = (window is None or keys <= window) and queries in (1, keys)
        seen = None if causal else _visible(queries, keys, window, q.device)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen,
            is_causal=causal and queries > 1,
            scale=scale,
            enable_gqa=groups > 1,
        ).transpose(1, 2)
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~_visible(queries, keys, window, q.device)
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more column that takes probability and gives nothing
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)[..., :keys]
    return (weights @ v).transpose(1, 2)


def _visible(
    queries: int,
    keys: int,
    window: int | None,
    device: torch.device,
) -> Tensor:
    """Make a mask (queries, keys) of the tokens that each of a document's last tokens sees."""
    i = torch.arange(keys - queries, keys, device=device)[:, None]
    j = torch.arange(keys, device=device)
    seen = i >= j
    if window is not None:
        seen &= i - j < window
    return seen


# ---- flash attention


def flash_varlen_attn(*arguments: Any, **options: Any) -> Tensor:
    """torch's variable-length attention without cuDNN, which torch 2.15 prefers on Hopper and
    Blackwell.

    cuDNN builds a graph for every new shape: 42 to 51 ms a call instead of 0.25 (pytorch pull
    request 191576).
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return varlen_attn(*arguments, **options)


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Attend in one call for all documents of all rows, as `packed_attention`; fp16 or bf16, on a
    GPU.

    The queries of a sequence are its last tokens, as in flash attention since 2.1.
    """
    width = query.shape[-1]
    value_width = value.shape[-1]
    # deepseek; the kernel wants one width, and added columns of zeros stay zeros
    if value_width < width:
        value = F.pad(value, (0, width - value_width))
    options = {}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _GROUPS_HEADS:
        options["enable_gqa"] = True
    elif groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)

    q, k, v = map(_end_to_end, (query, key, value))
    if documents.offsets is None:
        places, *sequences = _sequences(documents, key.shape[2], query.device)
        k = k[places]
        v = v[places]
    else:
        sequences = [documents.offsets, documents.offsets, documents.longest, documents.longest]
    # tokens before and after the query's own; -1: all
    before = after = -1
    if documents.window is not None:
        before = documents.window - 1
    if causal:
        after = 0
    out = flash_varlen_attn(
        q,
        k,
        v,
        *sequences,
        scale=scale,
        window_size=(before, after),
        **options,
    )
    return out.unflatten(0, query.shape[::2])[..., :value_width]


def _end_to_end(states: Tensor) -> Tensor:
    """Lay rows end to end, (B, H, L, D) to (B * L, H, D)."""
    return states.transpose(1, 2).flatten(0, 1).contiguous()


def _sequences(
    documents: Documents,
    length: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Make a sequence with its own keys for each run. Returns places of keys, offsets and lengths
    of queries and keys.
    """
    places = []
    queries = []
    keys = []
    for row, begin, first, end in documents.runs:
        places.append(torch.arange(row * length + begin, row * length + end))
        queries.append(end - first)
        keys.append(end - begin)
    tables = [torch.cat(places)]
    for counts in (queries, keys):
        offsets = [0, *itertools.accumulate(counts)]
        tables.append(torch.tensor(offsets, dtype=torch.int32))
    on_device = (copied(table, device) for table in tables)
    return *on_device, max(queries), max(keys)


# ---- the choice between the two


def _reason_against_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    extras: Sequence[str],
) -> str | None:
    """Tell why flash attention cannot be used for these tensors on this GPU; None if it can.

    `extras` names what else is asked for. The first call for heads of one kind compares it with
    attention by document, which in a layer that is recomputed would end in torch's CheckpointError.
    So a stage runs once when it is built (`Stage.try_out`).
    """
    width = query.shape[-1]
    dtype = str(query.dtype).removeprefix("torch.")
    if not query.is_cuda:
        return "flash attention needs a GPU"
    if extras:
        return f"flash attention does not support {' or '.join(extras)}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention does not compute in {dtype}"
    if width % 8 or width > WIDEST_FLASH_HEAD or value.shape[-1] > width:
        return (
            f"heads are {width} wide: flash attention takes multiples of 8 up to "
            f"{WIDEST_FLASH_HEAD}"
        )
    if documents.offsets is None:
        copies = sum(end - begin for _, begin, _, end in documents.runs)
        if copies > MAX_KEY_COPIES * key.shape[0] * key.shape[2]:
            return "supervised tokens are scattered"
    grouped = query.shape[1] != key.shape[1]
    windowed = documents.window is not None
    if not flash_agrees(grouped, width, windowed, query.dtype, query.device):
        return (
            f"flash attention of torch {torch.__version__} fails or is wrong on {dtype} heads of "
            f"{width} on this GPU"
        )
    return None


@functools.cache
@torch.enable_grad()
def flash_agrees(
    grouped: bool,
    width: int,
    windowed: bool,
    dtype: torch.dtype,
    device: torch.device | str,
) -> bool:
    """Whether flash attention gives what attention by document gives in fp32, within rounding.

    Compares results and gradients for all tokens and for some, with heads of `width`; if `grouped`,
    two query heads share a key head. A kernel that raises RuntimeError (on a GPU before Ampere)
    does not agree.
    """
    # of 100 for all windows, as memory grows with the square; the last document is longer
    window = 100 if windowed else None
    borders = (0, 13, 19, 20, 47 + (window or 0))
    runs = []
    places = []
    for begin, end in itertools.pairwise(borders):
        runs.append((0, begin, begin, end))
        places += sorted({begin, (begin + end) // 2, end - 1})
    some = torch.tensor(places)
    offsets = torch.tensor(borders, dtype=torch.int32, device=device)
    documents = Documents(tuple(runs), window, offsets, borders[-1] - borders[-2])

    scale = width**-0.5
    generator = torch.Generator(device).manual_seed(0)
    # Scores around 14 show a wrong result best; but they leave a gradient of differences that bf16
    # does not hold.
    for peak, with_gradients in ((14.0, False), (3.0, True)):
        *states, upstream = _trial_states(
            documents,
            4 if grouped else 2,
            width,
            peak,
            generator,
        )
        inputs = [one.to(dtype).requires_grad_() for one in states]
        exact = [one.detach().float().requires_grad_() for one in inputs]
        upstream = upstream.transpose(1, 2)
        for asked, at in ((documents, slice(None)), (documents.at(some), some.to(device))):
            expected = [attend_by_document(*exact, documents, scale)[:, at]]
            try:
                ours = [attend_flash(inputs[0][:, :, at], *inputs[1:], asked, scale)]
                if with_gradients:
                    ours += torch.autograd.grad(ours, inputs, upstream[:, at].to(dtype))
                    expected += torch.autograd.grad(expected, exact, upstream[:, at])
            except RuntimeError:
                return False
            if not _agree(ours, expected):
                return False
    return True


def _trial_states(
    documents: Documents,
    heads: int,
    width: int,
    peak: float,
    generator: torch.Generator,
) -> list[Tensor]:
    """Draw query, key, value and upstream gradient (1, H, L, D), with scores of up to `peak`.

    Each document's first and last token outweigh the others for every query that sees them: a
    window that is off by one, or one token of another document or its own too few, changes a result
    by a good part of what there is.
    """
    states = []
    for count in (heads, 2, 2, heads):
        shape = (1, count, documents.runs[-1][3], width)
        states.append(torch.randn(shape, generator=generator, device=generator.device))
    query, key, value, _ = states
    large = (peak / width**-0.5) ** 0.5
    query[..., 0] = large
    key[..., 0] = 0.0
    for i, (_, begin, _, end) in enumerate(documents.runs):
        for token, size in ((end - 1, 1.5), (begin, 3.0)):
            key[:, :, token, 0] = large
            value[:, :, token] = size * (-1) ** i
    return states


def _agree(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether results differ by rounding alone, and are numbers.

    bf16 keeps 3 digits, of scores as well as of values: a right kernel is off by 0.02 at most.
    """
    for one, other in zip(ours, expected, strict=True):
        largest = other.detach().abs().max()
        if not (one - other).detach().abs().max() <= 0.1 * largest:
            return False
    return True


# ---- the images of an encoder, whose patches see all others of their image


def images_attention(
    _: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attend within each image in one call, (1, H, P, D) to (1, P, H, D); images begin at
    `cu_seq_lens_q`.
    """
    images = Documents((), None, cu_seq_lens_q, max_length_q)
    return attend_flash(query, key, value, images, scaling, causal=False), None


@functools.cache
@torch.enable_grad()
def flash_takes_images(
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether flash attention within images is right on this GPU, by result and gradients, for
    heads of `width`.
    """
    is_half = dtype in (torch.float16, torch.bfloat16)
    if device.type != "cuda" or not is_half or width % 8 or width > WIDEST_FLASH_HEAD:
        return False
    generator = torch.Generator(device).manual_seed(0)
    offsets = torch.tensor(
        (0, 13, 14, 61),
        dtype=torch.int32,
        device=device,
    )
    *states, upstream = torch.randn(4, 1, 2, 61, width, generator=generator, device=device)
    upstream = upstream.transpose(1, 2)
    inputs = [one.to(dtype).requires_grad_() for one in states]
    exact = [one.detach().float().requires_grad_() for one in inputs]
    images = zip(*(one.split((13, 1, 47), 2) for one in exact), strict=True)
    attended = [F.scaled_dot_product_attention(*image) for image in images]
    expected = torch.cat(attended, 2).transpose(1, 2)
    try:
        output, _ = images_attention(None, *inputs, None, width**-0.5, offsets, 47)
        gradients = torch.autograd.grad(output, inputs, upstream.to(dtype))
    except RuntimeError:
        return False
    wanted = expected, *torch.autograd.grad(expected, exact, upstream)
    return _agree((output, *gradients), wanted)


AttentionMaskInterface.register(ATTENTION, packed_mask)
# Compiled layers stop here: documents differ in every call, and each would be new code.
AttentionInterface.register(IMAGES_FLASH, torch.compiler.disable(images_attention))
AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
