"""Train the demo's LLM and its tokenizer on text alone; `tools/demo_backbones/train_demo_backbones.py` runs this.

Nothing here knows a picture. Where a conversation has its image mark, the LLM reads a grid of 16 words: each cell of
the scene has 2 x 2 of them, with the words of its colour and its digit, or "empty". Their embeddings come blended,
scaled and noisy, so that the LLM learns to read soft tokens that lie near its words: what a projector can give it.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.distributions import Gamma
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from mmtrain.base.printing import print_result
from mmtrain.data.samples.records import IMAGE_MARK
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.samples.templates import make_template
from mmtrain.demo.scene import CELLS, Scene, draw_scene
from mmtrain.demo.text import COLOUR_WORDS, DIGIT_WORDS, converse
from mmtrain.layouts.square import Square

# Vicuna's and LLaVA-1.5's format, in jinja.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
    "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
GRID_WORDS = (*COLOUR_WORDS, *DIGIT_WORDS, "empty")
EMPTY = len(GRID_WORDS) - 1
PATCHES = 4  # words of the grid in each cell
VOCABULARY = 384
ROPE_THETA = 100.0  # of the usual 10,000 most frequencies hardly turn within 100 tokens: places are learned far later
BATCH = 32
BATCHES_SORTED = 8  # together, by length
LR = 1.5e-3  # with 3e-3 it takes several times as many steps to learn which place is where
WARMUP_STEPS = 50
DECAY_SHARE = 0.4  # of the steps, at the end: linear to 0
CLEAN_UNTIL, NOISY_FROM = 0.33, 0.6  # shares of the steps: no noise before the one, full noise from the other on
CLEAN_SHARE = 0.2  # of the steps that could be noisy


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the demo's conversations: any text has tokens, each of the demo's words has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random("demo tokenizer")
    turns = (text for _ in range(3000) for _, text in converse(draw_scene(draw), draw))
    lines = (line for text in turns for line in (f"USER: {text} ASSISTANT:", f" {text}", "".join(grid_words())))
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.add_special_tokens([AddedToken(IMAGE_MARK, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": IMAGE_MARK},
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def grid_words() -> list[str]:
    return [f" {word}" for word in GRID_WORDS]


def batches(
    tokenizer: PreTrainedTokenizerFast, draw: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[Scene]]]:
    """For ever: ids and shifted labels (BATCH, T), padded at the end, and the scenes that they are about.

    Ids are IMAGE_POSITION where the grid goes. Two conversations on end: the grid is read more often at the price of
    few tokens. Rows of like length share a batch: a third less padding.
    """
    template = make_template("chat", tokenizer, Square(CELLS * PATCHES), VOCABULARY)

    def document(scene: Scene) -> Document:
        (human, question), *rest = converse(scene, draw) + converse(scene, draw)
        return template(Sample("", "demo", ((human, f"{IMAGE_MARK}\n{question}"), *rest), images=(b"",)))

    while True:
        scenes = [draw_scene(draw) for _ in range(BATCHES_SORTED * BATCH)]
        rows = [(document(scene), scene) for scene in scenes]
        rows.sort(key=lambda row: len(row[0].input_ids))
        groups = [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]
        draw.shuffle(groups)
        for group in groups:
            ids = [torch.tensor(document.input_ids) for document, _ in group]
            labels = [torch.tensor(document.labels) for document, _ in group]
            padded = pad_sequence(ids, True, tokenizer.pad_token_id), pad_sequence(labels, True, IGNORE)
            yield *padded, [scene for _, scene in group]


def grid(scenes: list[Scene], strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (N, 16, words) that blend the words' embeddings into the grid, and the noise's scale (N, 1, 1).

    With strength 0 colour and digit stand alone on two of a cell's four places, "empty" on the others. With strength 1
    every word of a cell has a total weight of 0.8 to 2.5, spread over the four places, evenly or not, and wrong words
    are mixed in faintly; in between it is a blend of the two.
    """
    count, words = len(scenes), len(GRID_WORDS)
    present = torch.zeros(count, CELLS, words)
    for row, scene in enumerate(scenes):
        for cell, item in enumerate(scene):
            named = (EMPTY,) if item is None else (item.colour, len(COLOUR_WORDS) + item.digit)
            present[row, cell, list(named)] = 1
    order = torch.rand(count, CELLS, PATCHES).argsort(-1)
    colour_here, digit_here = (order == 0).unsqueeze(-1), (order == 1).unsqueeze(-1)
    is_colour = torch.arange(words) < len(COLOUR_WORDS)
    is_digit = (torch.arange(words) >= len(COLOUR_WORDS)) & (torch.arange(words) < EMPTY)
    clean = present.unsqueeze(2) * ((colour_here & is_colour) | (digit_here & is_digit)).float()
    clean[..., EMPTY] = (clean.sum(-1) == 0).float()
    evenness = torch.rand(count, 1, 1, 1) * 1.5 + 0.15
    spread = Gamma(evenness.expand(count, CELLS, PATCHES, words), 1.0).sample() + 1e-4
    mass = 0.8 + 1.7 * torch.rand(count, CELLS, 1, words)
    blended = present.unsqueeze(2) * mass * spread / spread.sum(2, keepdim=True)
    blended = blended + Gamma(torch.full(blended.shape, 0.05), 1.0).sample() * 0.3
    blended = blended * torch.exp(torch.empty(count, 1, 1, 1).uniform_(-0.7, 1.1))
    weights = clean + strength * (blended - clean)
    noise = torch.rand(count, 1, 1) * 0.8 * strength
    # (row of cells, column of cells, row in a cell, column in a cell) -> reading order of the 4 x 4 grid
    weights = weights.view(count, 2, 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
    return weights.reshape(count, CELLS * PATCHES, -1), noise


def read_grid(
    model: LlamaForCausalLM, ids: torch.Tensor, words: torch.Tensor, scenes: list[Scene], strength: float
) -> torch.Tensor:
    """Embeddings (N, T, D) of ids, blended words where the grid goes."""
    embedding = model.get_input_embeddings()
    weights, noise = grid(scenes, strength)
    vectors = embedding(words)
    soft = weights @ vectors
    soft = soft + torch.randn_like(soft) * noise * vectors.detach().square().mean().sqrt()
    places = ids == IMAGE_POSITION
    hidden = embedding(ids.masked_fill(places, 0))
    return hidden.masked_scatter(places.unsqueeze(-1), soft)


@torch.no_grad()
def exact_match(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, words: torch.Tensor, strength: float, samples: int
) -> float:
    """Share of answers whose every token is the arg max, end mark included."""
    draw = random.Random("demo LLM exact match")
    model.eval()
    right = answers = 0
    for ids, labels, scenes in itertools.islice(batches(tokenizer, draw), -(-samples // BATCH)):
        logits = model(inputs_embeds=read_grid(model, ids, words, scenes, strength), use_cache=False).logits
        wrong = (logits.argmax(-1) != labels) & (labels != IGNORE)
        ends = (labels == tokenizer.eos_token_id).long()
        wrong_tokens = torch.zeros_like(labels).scatter_add_(1, ends.cumsum(-1) - ends, wrong.long())  # of each answer
        answers += int(ends.sum())
        right += int(ends.sum() - (wrong_tokens > 0).sum())
    model.train()
    return right / answers


def train_llm(folder: Path, steps: int, seed: int) -> dict[str, float]:
    """Train the LLM and save it with its tokenizer into `folder`, in float16; its accuracies and seconds."""
    start = time.perf_counter()
    draw = random.Random(f"demo LLM {seed}")
    tokenizer = make_tokenizer()
    words = torch.tensor([tokenizer(word, add_special_tokens=False).input_ids for word in grid_words()])
    assert words.shape[1] == 1, "every word of the grid is one token"
    words = words[:, 0]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    for step, (ids, labels, scenes) in enumerate(itertools.islice(batches(tokenizer, draw), steps)):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))
        ramp = min(1.0, max(0.0, (step / steps - CLEAN_UNTIL) / (NOISY_FROM - CLEAN_UNTIL)))
        strength = 0.0 if draw.random() < CLEAN_SHARE else ramp
        hidden = read_grid(model, ids, words, scenes, strength)
        logits = model(inputs_embeds=hidden, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            print_result(f"LLM step {step + 1}/{steps}  noise {strength:.2f}  loss {float(loss.detach()):.4f}")
    result = {
        "llm_exact_match_clean": exact_match(model, tokenizer, words, strength=0.0, samples=1000),
        "llm_exact_match_noisy": exact_match(model, tokenizer, words, strength=1.0, samples=1000),
        "llm_seconds": time.perf_counter() - start,
    }
    save(model.half(), tokenizer, folder)
    return result


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write model and tokenizer so that transformers 4 reads them too.

    It knows rope_theta alone, this class name, and no list of extra tokens.
    """
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, changes in (
        ("config.json", {"rope_theta": ROPE_THETA}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": None}),
    ):
        content = json.loads((folder / name).read_text()) | changes
        content = {key: value for key, value in content.items() if value is not None}
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True) + "\n")
