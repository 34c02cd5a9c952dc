"""Whether an exported folder, loaded by stock transformers, answers a batch of prompts as it answers them one by one.

three prompts of different lengths --AutoProcessor, generate--> tokens and logits, one prompt at a time
                                   --the same, in one padded batch--> the same logits, within the bound of `verify`
                                   --pipeline(batch_size=3)--> that batch's tokens

In float32 and greedy. A batch rounds its sums in another order, so that two tokens may change places whose logits are
as near as that bound: what follows such a tie is not compared.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, BatchFeature, LlavaForConditionalGeneration, ProcessorMixin, pipeline

from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import Sample
from mmtrain.export.stock import quiet

PROMPTS = 3
NEW_TOKENS = 12

Answer = tuple[list[int], torch.Tensor]  # new tokens up to the end mark, logits (T, V) from which each was taken


def batch_fault(
    folder: Path, model: LlavaForConditionalGeneration, samples: Sequence[Sample], plain: bool, bound: float
) -> str | None:
    """What differs between answers in a batch and one at a time, as the end of a sentence; None if nothing does.

    The prompts are questions of `samples` (a grey picture for those without one), made longer in turn.
    model: that of `folder`, in float32. plain: whether prompts are images and the beginning of a caption.
    bound: of a logit, or of the largest logit where that is above 1.
    """
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    asked = [_messages(samples[number % len(samples)], plain, 2 * number) for number in range(PROMPTS)]
    if len({_inputs(processor, [messages])["input_ids"].shape[1] for messages in asked}) < PROMPTS:
        asked = [_messages(samples[0], plain, 2 * number) for number in range(PROMPTS)]
    alone = [_answers(model, _inputs(processor, [messages]))[0] for messages in asked]
    inputs = _inputs(processor, asked)
    together = _answers(model, inputs)
    for (wanted, wanted_logits), (given, given_logits) in zip(alone, together, strict=True):
        agreed = next((t for t, pair in enumerate(zip(wanted, given, strict=False)) if pair[0] != pair[1]), len(wanted))
        seen = slice(0, agreed + 1)  # the logits of the first token that differs were made from the same tokens
        difference = float((wanted_logits[seen] - given_logits[seen]).abs().max().nan_to_num(nan=torch.inf))
        if difference > bound * max(1.0, float(wanted_logits[seen].abs().max())):
            said = [processor.decode(tokens, skip_special_tokens=True) for tokens in (given, wanted)]
            return (
                f"a batch of {PROMPTS} prompts is answered {said[0]!r} where one alone is answered {said[1]!r} (logits "
                f"differ by {difference:.1e})"
            )
    with quiet():
        ask = pipeline("image-text-to-text", model=model, processor=processor)
        rows = ask(text=asked, batch_size=PROMPTS, max_new_tokens=NEW_TOKENS, return_tensors=True)
    prompt = inputs["input_ids"].shape[1]
    for (wanted, _), (row,) in zip(together, rows, strict=True):
        given = _until_end(row["generated_token_ids"][prompt:].tolist(), model)
        if given != wanted:
            said = [processor.decode(tokens, skip_special_tokens=True) for tokens in (given, wanted)]
            return f"pipeline(batch_size={PROMPTS}) answers {said[0]!r} where the model answers {said[1]!r}"
    return None


def _messages(sample: Sample, plain: bool, words: int) -> list[dict[str, Any]]:
    """A sample's first question with its pictures, and some words more."""
    question = next(text for speaker, text in sample.turns if speaker == "human")
    pictures = [Image.open(io.BytesIO(content)).convert("RGB") for content in sample.images]
    pictures = pictures[: max(1, question.count(IMAGE_MARK))] or [Image.new("RGB", (64, 64), (128, 128, 128))]
    text = " ".join(["" if plain else question.replace(IMAGE_MARK, "").strip(), *["a"] * words]).strip()
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}]


def _inputs(processor: ProcessorMixin, asked: Sequence[list[dict[str, Any]]]) -> BatchFeature:
    return processor.apply_chat_template(
        list(asked),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    )


def _answers(model: LlavaForConditionalGeneration, inputs: BatchFeature) -> list[Answer]:
    with quiet():
        made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True)
    logits = torch.stack(made.logits, dim=1).float()
    rows = made.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    tokens = [_until_end(row, model) for row in rows]
    return [(found, row[: len(found)]) for found, row in zip(tokens, logits, strict=True)]


def _until_end(tokens: list[int], model: LlavaForConditionalGeneration) -> list[int]:
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    last = next((t for t, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]
