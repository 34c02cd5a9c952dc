"""How far staged and packed execution of a model lie from the stock model, in forward and in the input gradient.

documents of 13, 6 and 19 tokens --stock model, one row per document--> reference
the same in one packed row (1, 38) --stock model, packed attention--> whole
the same in one packed row (1, 38) --slices, packed attention--> staged

    staged difference: staged against whole     (the same kernels: 0 unless a slice is wrong)
    packed difference: staged against reference (other kernels: rounding, unless documents see each other)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from mmtrain.model.attention import ATTENTION, document_positions
from mmtrain.model.language import LanguageSlice, slice_of
from mmtrain.model.tiny import VOCABULARY, tiny_model

DOCUMENTS = (13, 6, 19)  # tokens; below, at and beyond the tiny windows of 8


@dataclass(frozen=True, slots=True)
class Differences:
    """Largest relative differences over documents, of logits and of the gradient of the input embeddings."""

    staged: float
    packed: float


def measure_differences(
    config: PreTrainedConfig,
    cut_points: Sequence[int],
    *,
    seed: int = 0,
    slicer: Callable[..., LanguageSlice] = slice_of,
    attention: str = ATTENTION,
) -> Differences:
    """Run a tiny model of `config`'s family whole, in slices, and document by document; fp32.

    Slices begin at decoder layers 0 and `cut_points`. `slicer` makes them, with the signature of `slice_of`;
    `attention` is the attention implementation under test, as registered with transformers.
    """
    model = tiny_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (1, sum(DOCUMENTS)), generator=generator)
    weights = torch.randn(sum(DOCUMENTS), VOCABULARY, generator=generator)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]

    def separate(embeddings: torch.Tensor) -> torch.Tensor:
        # Padding lies behind the documents, where a causal model does not see it.
        rows = model(inputs_embeds=pad_sequence(list(embeddings[0].split(DOCUMENTS)), batch_first=True)).logits
        return torch.cat([row[:length] for row, length in zip(rows, DOCUMENTS, strict=True)])

    def whole(embeddings: torch.Tensor) -> torch.Tensor:
        with document_positions(positions):
            return model(inputs_embeds=embeddings, position_ids=positions).logits[0]

    def run(
        forward: Callable[[torch.Tensor], torch.Tensor], embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings = embeddings.detach().requires_grad_()
        logits = forward(embeddings)
        (gradient,) = torch.autograd.grad((logits * weights).sum(), embeddings)
        return logits.detach(), gradient[0]

    embeddings = model.get_input_embeddings()(ids)
    reference = run(separate, embeddings)
    model.set_attn_implementation(attention)
    unsliced = run(whole, embeddings)

    borders = [0, *cut_points, model.config.num_hidden_layers]
    stages = len(borders) - 1
    slices = [
        slicer(model, borders[i], borders[i + 1], embedding=i == 0, head=i == stages - 1, attention=attention)
        for i in range(stages)
    ]

    def staged(hidden: torch.Tensor) -> torch.Tensor:
        for part in slices:
            hidden = part(hidden, positions)
        return slices[-1].logits(hidden[0])

    sliced = run(staged, slices[0].embed(ids))
    return Differences(staged=_difference(sliced, unsliced), packed=_difference(sliced, reference))


def _difference(seen: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Largest difference within a document, relative to the document's largest value; of logits and gradients."""
    ratios = [
        (a - b).abs().max() / b.abs().max()
        for ours, theirs in zip(seen, expected, strict=True)
        for a, b in zip(ours.split(DOCUMENTS), theirs.split(DOCUMENTS), strict=True)
    ]
    return float(torch.stack(ratios).max())
