"""Packed attention for stock transformers models: a token sees the earlier tokens of its own document, and no others.

    position_ids (B, L) --document_positions--> the model's mask code --> packed_mask --> Documents (no (L, L) matrix)
    query (B, H, L, D), key and value (B, K, L, D), Documents --packed_attention--> (B, L, H, D)
    query (1, H, S, D), key and value (B, K, L, D), Runs ------packed_attention--> (1, S, H, D), see last_layer

Documents travel in the place of the attention mask, from the model's own mask code to every layer. So sliding windows
and chunks are the ones that the model's config asks for, and a layer recomputed in backward gets the same documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from mmtrain.data.stream.packs import copied
from mmtrain.models.modules.flash import attend_packed, use_flash
from mmtrain.models.modules.kernels import Documents, Runs, attend_by_document, attend_by_run

ATTENTION = "mmtrain_packed"
"""Name under which the mask and the attention are registered with transformers (`attn_implementation`)."""


class _Given(NamedTuple):
    """What a forward call knows of its documents."""

    positions: torch.Tensor  # (B, L), on the host if the host shall not wait
    no_padding: torch.Tensor | None  # (B, L), true everywhere: the attention mask that the model was given


# Read only by packed_mask, inside the forward call that set it; recomputation in backward makes no masks.
_GIVEN: ContextVar[_Given | None] = ContextVar("documents", default=None)

# Arguments that layers hand on and that change nothing: the mask channel already says what sliding_window and
# position_ids mean, the rest asks for outputs or caches that do not exist here.
_WITHOUT_EFFECT = frozenset(
    {"cache_position", "is_causal", "output_attentions", "output_router_logits", "position_ids", "sliding_window"}
)


@contextmanager
def document_positions(position_ids: torch.Tensor, no_padding: torch.Tensor | None = None) -> Iterator[None]:
    """Within this context a model's masks also end where `position_ids` (B, L) restart.

    Needed although the model receives position_ids too: gpt_oss, afmoe and opt do not pass them to their masks. A model
    that is given `no_padding`, (B, L) of true, as its attention mask does not look for documents itself, for whose
    answer the host would wait; with position_ids on the host it then waits for nothing.
    """
    token = _GIVEN.set(_Given(position_ids, no_padding))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Documents:
    """Documents of one forward call; transformers calls this where it would build a mask (AttentionMaskInterface).

    `local_size` is the window or chunk size in tokens. Raises ValueError for what Documents cannot express: padding
    masks, caches, functions that the model lays over the causal mask, and tokens that see later ones.
    """
    given = _GIVEN.get()
    is_ours = given is not None and given.no_padding is not None and attention_mask is not None
    is_ours = is_ours and any(mask is given.no_padding for mask in (attention_mask, attention_mask._base))
    padded = attention_mask is not None and not is_ours and not bool(attention_mask.all())  # opt makes a mask of ones
    if padded or q_offset or kv_offset or q_length != kv_length or use_vmap:
        raise ValueError("packed attention takes no padding mask, no cache and no mask function of the model's own")
    assert mask_function is not None
    # On the host, unless the function looks something up on the device: llama4's counts padding there.
    where = next((tensor.device for tensor in _looked_up(mask_function)), torch.device("cpu"))
    row = torch.arange(batch_size, device=where)[:, None]
    later = torch.arange(1, q_length, device=where)[None]
    positions = torch.arange(q_length)[None] if given is None else given.positions.cpu()
    questions = (
        mask_function(row, 0, later - 1, later),  # does a token see the next one?
        mask_function(row, 0, later, later - 1),  # the one before? if and only if both are in one document, or chunk
    )
    shape = (batch_size, q_length - 1)
    answers = [torch.as_tensor(answer, device=where).expand(shape) for answer in questions]
    sees_later, joined = torch.stack(answers).cpu()
    continued = positions[:, 1:] == positions[:, :-1] + 1
    if bool(sees_later.any()):
        raise ValueError("packed attention is causal, and this model lets tokens see later ones")
    if local_size is not None and bool((continued & ~joined).any()):
        # Chunks: they count from the document's start, also where transformers (5.17) counts from the row's.
        joined = positions[:, 1:] % local_size != 0
    joined = joined & continued
    cuts: list[list[int]] = [[0] for _ in range(batch_size)]
    for b, left in (~joined).nonzero().tolist():
        cuts[b].append(left + 1)
    rows = tuple(tuple(zip(begins, [*begins[1:], q_length], strict=True)) for begins in cuts)
    borders = [b * q_length + begin for b, begins in enumerate(cuts) for begin in begins]
    offsets = copied(torch.tensor([*borders, batch_size * q_length], dtype=torch.int32), device or "cpu")
    return Documents(rows, local_size, offsets, max(end - begin for documents in rows for begin, end in documents))


def _looked_up(mask_function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Tensors that a function of transformers' masking_utils, or one that it is made of, holds on to."""
    for cell in getattr(mask_function, "__closure__", None) or ():
        held = cell.cell_contents
        for one in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(one, torch.Tensor):
                yield one
            elif callable(one):
                yield from _looked_up(one)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Documents | Runs,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents; transformers calls this in every attention layer (AttentionInterface).

    `query` (B, H, L, D), `key` (B, K, L, D), `value` (B, K, L, E) with H a multiple of K; `softcap` bounds the scores
    (gemma2), `s_aux` (H,) are attention sinks (gpt_oss). Returns (B, L, H, E). Raises TypeError for an argument that
    this attention does not know: a family that needs it would otherwise be silently wrong.
    """
    name = type(module).__name__
    if not isinstance(attention_mask, (Documents, Runs)):
        raise TypeError(f"{name} handed on {type(attention_mask).__name__} in the place of its documents")
    unknown = sorted(
        option
        for option, given in others.items()
        if option not in _WITHOUT_EFFECT and given is not None and given is not False
    )
    if unknown or dropout or others.get("is_causal") is False:
        raise TypeError(f"{name} asks for attention with {unknown or ('dropout' if dropout else 'is_causal=False')}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    extras = [name for name, given in (("soft caps", softcap), ("sinks", s_aux)) if given is not None]
    if use_flash(query, key, value, attention_mask, extras):
        return attend_packed(query, key, value, attention_mask, scale), None
    attend = attend_by_run if isinstance(attention_mask, Runs) else attend_by_document
    return attend(query, key, value, attention_mask, scale, softcap, s_aux), None


AttentionMaskInterface.register(ATTENTION, packed_mask)
AttentionInterface.register(ATTENTION, packed_attention)
