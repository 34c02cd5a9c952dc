"""Conversation templates: which tokens a sample becomes, and which of them are supervised.

Sample (turns, images) --template--> Document: input_ids (T,), labels (T,) shifted
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from mmtrain.data.samples import IGNORE, IMAGE_MARK, IMAGE_POSITION, Document, Sample
from mmtrain.errors import UserError


class PlainTemplate:
    """LLaVA's stage 1: images, then the caption, nothing else.

    [BOS] image positions, caption, EOS. BOS only if the tokenizer begins texts with it; the human turn's words are
    dropped; caption and EOS are supervised. Source: `preprocess_plain` in LLaVA's train.py, which ends a caption with a
    line break where this ends it with EOS.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens_per_image: int, vocab_size: int) -> None:
        """Raises UserError for a tokenizer without EOS: the LLM would be taught captions that never end."""
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"data.template: plain ends captions with the EOS token, and the tokenizer of {tokenizer.name_or_path} "
                "has none; set eos_token in its tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.tokens_per_image = tokens_per_image
        self.vocab_size = vocab_size
        bos = tokenizer.bos_token_id
        self.prefix = [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []

    def __call__(self, sample: Sample) -> Document:
        """Tokenize a sample; raises UserError naming it if it is not one human and one gpt turn."""
        if [speaker for speaker, _ in sample.turns] != ["human", "gpt"]:
            speakers = ", ".join(speaker for speaker, _ in sample.turns)
            raise UserError(f"{sample.where}: the plain template takes one human and one gpt turn; it has {speakers}")
        caption = sample.turns[1][1]
        if IMAGE_MARK in caption:
            raise UserError(f"{sample.where}: {IMAGE_MARK} in the caption; the plain template puts images before it")
        supervised = [*self.tokenizer(caption, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        context = self.prefix + [IMAGE_POSITION] * (self.tokens_per_image * len(sample.images))
        if max(supervised) >= self.vocab_size:
            raise UserError(
                f"{sample.where}: the tokenizer of {self.tokenizer.name_or_path} makes token {max(supervised)}, but "
                f"the model's embedding has {self.vocab_size} rows: the two do not belong together"
            )
        labels = [IGNORE] * len(context) + supervised
        return Document(sample, (*context, *supervised), (*labels[1:], IGNORE))


TEMPLATES = {"plain": PlainTemplate}  # by the names that data.template takes
