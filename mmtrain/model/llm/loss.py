"""Sum of token losses over supervised positions only; logits never outlive a chunk of rows.

labels (B, L) --supervised_places--> (S,) of the supervised tokens
their normed hidden states (S, D) + targets (S,) --chunks--> logits (C, V) --> loss sum

The gradient is made in the forward pass, chunk by chunk, so that the largest buffer is one chunk's
logits instead of all of them (139 MB against 1,479 MB for 4,096 tokens and a vocabulary of 32,000).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.base.devices import copied
from mmtrain.data.samples.sample import IGNORE
from mmtrain.facts.chunks import LOGITS_PER_CHUNK

# maps rows (C, D) to logits (C, V)
LogitsOf = Callable[[Tensor], Tensor]


class _SupervisedLossSum(torch.autograd.Function):
    """Loss sum of rows (S, D); forward makes the gradients of rows and of the head's trainable
    parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        labels: Tensor,
        logits_of: LogitsOf,
        chunk: int,
        *parameters: Tensor,
    ) -> Tensor:
        wants_rows = rows.requires_grad
        row_gradient = torch.zeros_like(rows) if wants_rows else None
        parameter_gradients = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        for begin in range(0, rows.shape[0], chunk):
            part = slice(begin, begin + chunk)
            with torch.enable_grad():
                piece = rows[part].detach().requires_grad_(wants_rows)
                loss = F.cross_entropy(logits_of(piece).float(), labels[part], reduction="sum")
                inputs = (piece, *parameters) if wants_rows else parameters
                gradients = list(torch.autograd.grad(loss, inputs))
            if row_gradient is not None:
                row_gradient[part] = gradients.pop(0)
            for accumulated, gradient in zip(parameter_gradients, gradients, strict=True):
                accumulated += gradient
            total += loss.detach()
        ctx.save_for_backward(row_gradient, *parameter_gradients)
        ctx.parameter_dtypes = [p.dtype for p in parameters]
        return total

    @staticmethod
    def backward(
        ctx: Any,
        upstream: Tensor,
    ) -> tuple[Tensor | None, ...]:
        row_gradient, *parameter_gradients = ctx.saved_tensors
        if row_gradient is not None:
            row_gradient = row_gradient * upstream.to(row_gradient.dtype)
        scaled = []
        for gradient, dtype in zip(parameter_gradients, ctx.parameter_dtypes, strict=True):
            scaled.append((gradient * upstream).to(dtype))
        return row_gradient, None, None, None, *scaled


def supervised_places(labels: Tensor) -> Tensor:
    """Return the places (S,) int64, over rows laid end to end, where `labels` (B, L) are not
    IGNORE.
    """
    return (labels.flatten() != IGNORE).nonzero().squeeze(1)


def supervised_loss_sum(
    rows: Tensor,
    targets: Tensor,
    logits_of: LogitsOf,
    vocab_size: int,
    head_parameters: Sequence[torch.nn.Parameter] = (),
) -> Tensor:
    """Sum the cross entropy of supervised tokens, in nats, 0-dimensional; part of the graph even
    when S is 0.

    `rows` (S, D) are the LM head's input, `targets` (S,) int64 the tokens to predict. `logits_of`
    maps rows (C, D) to logits (C, V) with `head_parameters`, of which those that require a gradient
    receive theirs.
    """
    trainable = [p for p in head_parameters if p.requires_grad]
    if not (torch.is_grad_enabled() and (rows.requires_grad or trainable)):
        return loss_sum_and_predictions(rows, targets, logits_of, vocab_size)[0]
    return _SupervisedLossSum.apply(
        rows,
        targets,
        logits_of,
        _rows_per_chunk(vocab_size),
        *trainable,
    )


def loss_sum_and_predictions(
    rows: Tensor,
    targets: Tensor,
    logits_of: LogitsOf,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the loss sum without gradients, and the logits' arg max, (S,) int64; arguments as in
    `supervised_loss_sum`.
    """
    chunk = _rows_per_chunk(vocab_size)
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    predicted = torch.empty_like(targets)
    for begin in range(0, rows.shape[0], chunk):
        part = slice(begin, begin + chunk)
        loss, predicted[part] = _judge(logits_of(rows[part]), targets[part])
        total += loss
    return total, predicted


def count_answers(labels: Tensor, predicted: Tensor) -> Tensor:
    """Count a prediction's correct tokens, answers and exact answers, (3,) float64.

    `labels` (B, L) int64, on the host; `predicted` (S,) of their `supervised_places`, on any
    device. An answer is a run of supervised positions in a row. Those of two documents never merge:
    a document's last position predicts nothing.
    """
    device = predicted.device
    supervised = labels != IGNORE
    begins = supervised.clone()
    begins[:, 1:] &= ~supervised[:, :-1]
    # which answer each supervised position belongs to
    answer = begins.flatten().cumsum(0)[supervised.flatten()] - 1
    answers = int(begins.sum())
    wrong = (predicted != copied(labels[supervised], device)).long()
    wrong_tokens = wrong.new_zeros(answers).index_add(0, copied(answer, device), wrong)
    all_answers = torch.full((), answers, device=device)
    return torch.stack([(1 - wrong).sum(), all_answers, (wrong_tokens == 0).sum()]).double()


def _rows_per_chunk(vocab_size: int) -> int:
    return max(1, LOGITS_PER_CHUNK // vocab_size)


def _judge(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss sum and arg max of a chunk; its logits are freed when this returns."""
    return F.cross_entropy(logits.float(), targets, reduction="sum"), logits.argmax(-1)
