"""Packed attention on any device: one call of scaled_dot_product_attention for each document.

    query (B, H, L, D), key (B, K, L, D), value (B, K, L, E), Documents --attend_by_document--> (B, L, H, E)
    query (1, H, S, D), key (B, K, L, D), value (B, K, L, E), Runs ------attend_by_run--> (1, S, H, E)

The only way on a CPU: 1.5 s forward and backward for 4 layers and 2,048 tokens in 8 documents, where one dense mask
takes 2.9 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


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


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one document's last m of n tokens, (B, H, m, D) to (B, m, H, E).

    Soft-capped scores and sinks are as gemma2 and gpt_oss define them in transformers. They make the (B, H, m, n)
    scores, which torch's fused kernels avoid: 4,096 tokens and 16 heads take 1 GB in fp32.
    """
    queries, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if softcap is None and sinks is None:
        causal = (window is None or keys <= window) and queries in (1, keys)
        seen = None if causal else _visible(queries, keys, window, q.device)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=causal and queries > 1, scale=scale, enable_gqa=groups > 1
        )
        return attended.transpose(1, 2)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~_visible(queries, keys, window, q.device), torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more column that takes probability and gives nothing
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return (torch.softmax(scores.float(), dim=-1).to(q.dtype)[..., :keys] @ v).transpose(1, 2)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean (queries, keys): which token (column) each of the last tokens (rows) of one document sees."""
    i, j = torch.arange(keys - queries, keys, device=device)[:, None], torch.arange(keys, device=device)
    seen = i >= j
    return seen if window is None else seen & (i - j < window)
