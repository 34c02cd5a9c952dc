"""Stock transformers as a contestant: the loop that people write around LlavaForConditionalGeneration.

script    as LLaVA's script for stage 1: every decoder layer recomputed in backward, LLM in train mode
tuned     the same without recomputation, as whoever has the memory would run it

Both: batches padded on the right with an attention mask, SDPA, no cache, AdamW on the projector alone, gradients set to
None, loss of a step over all its tokens as transformers' Trainer counts them; in bfloat16 the projector stays fp32
under autocast. Logits are those of all positions: that is what the stock forward computes when it is given labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from bench_contestant import FirstGradients, Gradients
from bench_models import LEARNING_RATE
from bench_samples import PaddedBatch
from transformers import LlavaForConditionalGeneration

Settings = Literal["script", "tuned"]


class Stock:
    """A stock model and an endless iterator over steps, each a list of batches. `settings` as above."""

    def __init__(
        self, model: LlavaForConditionalGeneration, settings: Settings, steps: Iterator[Sequence[PaddedBatch]]
    ) -> None:
        self._model = model
        self._steps = steps
        self._device = model.lm_head.weight.device
        self._autocast = torch.autocast(self._device.type, torch.bfloat16, model.lm_head.weight.dtype == torch.bfloat16)
        if settings == "script":
            language = model.model.language_model
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # a later transformers calls it otherwise
                language.gradient_checkpointing_enable()
            model.enable_input_require_grads()
            language.train()  # in eval mode transformers recomputes nothing; there is no dropout
        projector = dict(model.model.multi_modal_projector.named_parameters())
        self._optimizer = torch.optim.AdamW(projector.values(), lr=LEARNING_RATE, weight_decay=0.0)
        self._first = FirstGradients(self._optimizer, projector)

    @property
    def gradients(self) -> Gradients | None:
        return self._first.found

    def step(self) -> float:
        batches = next(self._steps)
        tokens = torch.tensor(sum(batch.supervised for batch in batches), device=self._device)
        total = torch.zeros((), device=self._device)
        for batch in batches:
            inputs = {name: tensor.to(self._device, non_blocking=True) for name, tensor in vars(batch).items()}
            with self._autocast:
                loss = self._model(**inputs, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)
