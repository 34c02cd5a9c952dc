"""Random models with the cost ratios of LLaVA-1.5-7B, and the samples that all contestants train
on.

ModelSize --save_parts--> folder/llm (llama), folder/vision (CLIP) --stock_llava-->
    LlavaForConditionalGeneration
text lengths --equal_steps, ragged_steps--> Pack[] of each step --packed--> PackedBatch (mmtrain)
                                                                --padded--> PaddedBatch (everybody
                                                                    else)

In LLaVA-1.5-7B the LM head on every position is 2% of the LLM's forward, the encoder 4%, and the
last of 32 decoder layers 3%. A tiny model with its usual vocabulary would spend a fifth on its
head, and flatter whoever computes less.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.utils import logging as transformers_logging

from mmtrain.config.model import ProjectorSection
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Document, Sample
from mmtrain.data.stream.images import ImageTransform
from mmtrain.data.stream.packs import Pack, PackedBatch, make_batch
from mmtrain.facts.projector import connector
from mmtrain.layouts.layout import Tiling
from mmtrain.model.trained.projector import make_projector

Decode = Callable[[bytes], torch.Tensor]
SELECT_LAYER = -2  # LLaVA's: the output of the last block but one
LEARNING_RATE = 1e-4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a llama and a CLIP tower, and of a typical sample: one image and `text_tokens`."""

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    vision_blocks: int
    vision_width: int
    vision_heads: int
    image_size: int  # pixels
    patch_size: int  # pixels
    text_tokens: int
    # name of a shape that mmtrain has recorded, to plan without files
    recorded_llm: str | None = None

    @property
    def image_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def sample_tokens(self) -> int:
        return self.image_tokens + self.text_tokens

    @property
    def image_token(self) -> int:
        return self.vocabulary - 1


SHAPES = {
    "ratios": ModelSize(32, 512, 1376, 8, 3968, 12, 192, 3, 168, 14, 24),
    "7b": ModelSize(32, 4096, 11008, 32, 32000, 24, 1024, 16, 336, 14, 80, "lmsys/vicuna-7b-v1.5"),
    "tiny": ModelSize(4, 64, 96, 4, 128, 3, 32, 2, 56, 14, 8),
}


def llama_config(shape: ModelSize) -> LlamaConfig:
    """A llama of this shape whose signals neither vanish nor explode: weights of variance 1 /
    width.
    """
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=shape.width**-0.5,
        use_cache=False,
    )


def clip_config(shape: ModelSize) -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=shape.vision_width,
        intermediate_size=4 * shape.vision_width,
        num_hidden_layers=shape.vision_blocks,
        num_attention_heads=shape.vision_heads,
        image_size=shape.image_size,
        patch_size=shape.patch_size,
        hidden_act="quick_gelu",
        initializer_factor=2.0,
    )


def save_parts(shape: ModelSize, folder: Path, dtype: torch.dtype) -> None:
    """Write a random llama to folder/llm and a random CLIP tower to folder/vision, as stock
    transformers saves them.
    """
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(shape)).to(dtype).save_pretrained(folder / "llm")
    save_vision(CLIPVisionModel(clip_config(shape)).to(dtype), folder / "vision")


def save_vision(model: CLIPVisionModel, folder: Path) -> None:
    """Write a CLIP tower with what mmtrain reads of its image processor."""
    model.save_pretrained(folder)
    processor = {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def run_config(
    shape: ModelSize,
    folder: Path,
    *,
    dtype: str,
    pack_length: int,
    microbatches: int,
    pipeline: int,
    threads: int,
    llm: str | None = None,
    calibration: Path | None = None,
    compiles: bool = False,
) -> RunConfig:
    """Return mmtrain's configuration: a constant learning rate and no clipping, as its rivals have.

    `threads` are those of a rank; `llm` is the name or folder to plan by, folder/llm by default.
    """
    tree = {
        "run": {"name": "bench", "dir": str(folder / "runs")},
        "model": {
            "llm": {"path": llm or str(folder / "llm"), "dtype": dtype},
            "vision": {"name": str(folder / "vision"), "select_layer": SELECT_LAYER},
        },
        "parallel": {
            "pipeline": pipeline,
            "threads_per_rank": threads,
            "calibration": None if calibration is None else str(calibration),
        },
        "data": {
            "shards": "none.tar",  # batches come from memory
            "pack_length": pack_length,
            "expected_text_tokens": shape.text_tokens,
            "expected_supervised_fraction": shape.text_tokens / shape.sample_tokens,
        },
        "train": {"packs_per_step": microbatches, "max_steps": 1_000_000, "compile": compiles},
        "optimizer": {
            "lr": LEARNING_RATE,
            "warmup_fraction": 0.0,
            "min_lr_fraction": 1.0,
            "clip_norm": None,
        },
    }
    return RunConfig.model_validate(tree)


def stock_llava(
    shape: ModelSize, folder: Path, dtype: torch.dtype, seed: int
) -> LlavaForConditionalGeneration:
    """Stock LLaVA over the parts in `folder` and the projector that mmtrain draws from `seed`; only
    that trains.
    """
    llm = LlamaForCausalLM.from_pretrained(folder / "llm", dtype=dtype, attn_implementation="sdpa")
    vision = CLIPVisionModel.from_pretrained(
        folder / "vision", dtype=dtype, attn_implementation="sdpa"
    )
    model = random_llava(shape, dtype, torch.device("cpu"), seed)
    model.model.language_model.load_state_dict(llm.model.state_dict())
    model.lm_head.load_state_dict(llm.lm_head.state_dict())
    model.model.vision_tower.load_state_dict(vision.state_dict())
    return model


def random_llava(
    shape: ModelSize, dtype: torch.dtype, device: torch.device, seed: int
) -> LlavaForConditionalGeneration:
    """Stock LLaVA with random weights made on `device`; its projector, fp32, is the one that
    mmtrain draws.
    """
    config = LlavaConfig(
        vision_config=clip_config(shape),
        text_config=llama_config(shape),
        image_token_index=shape.image_token,
        vision_feature_layer=SELECT_LAYER,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlavaForConditionalGeneration._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    operations = connector(ProjectorSection(type="mlp2x_gelu"), shape.vision_width, shape.width)
    projector = make_projector(operations, seed)
    model.model.multi_modal_projector.float().load_state_dict(projector.state_dict())
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    return model.eval()


def with_shared_weights(model: LlavaForConditionalGeneration) -> LlavaForConditionalGeneration:
    """A copy with a projector of its own and the very tensors of everything frozen."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


def noise_image(shape: ModelSize) -> Decode:
    """What stands for an image decoder: (3, S, S) uint8 noise, a function of the bytes."""

    def decode(content: bytes) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(content))
        return torch.randint(
            0, 256, (3, shape.image_size, shape.image_size), dtype=torch.uint8, generator=generator
        )

    return decode


BEGIN, PADDING, FIRST_WORD = 1, 0, 3
WINDOW = 16  # samples among which the last of a pack is looked for
# of ragged text: log-normal, median as a share of the typical length
MEDIAN_TEXT, SIGMA = 0.75, 0.75

Step = tuple[Pack, ...]


@dataclass(frozen=True)
class PaddedBatch:
    """What a collator hands to stock LLaVA: (B, L) int64 padded on the right, and pixels (B, 3, S,
    S) float32.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor  # (B, L) int64, 0 at padding
    labels: torch.Tensor  # as transformers wants them: not shifted
    pixel_values: torch.Tensor

    @property
    def shifted_labels(self) -> torch.Tensor:
        """(B, L): labels[b, t] is the token that position t must predict."""
        return torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORE)

    def pinned(self) -> PaddedBatch:
        """Copy to page-locked memory, from which a CUDA device reads beside its work."""
        return PaddedBatch(**{name: tensor.pin_memory() for name, tensor in vars(self).items()})

    @property
    def supervised(self) -> int:
        return int((self.labels[:, 1:] != IGNORE).sum())


@dataclass(frozen=True)
class Workload:
    """Steps of packs of one length; all contestants go through them in the same order, again and
    again.
    """

    steps: tuple[Step, ...]
    pack_length: int

    @property
    def fill(self) -> float:
        """Share of the packs' positions that hold a token."""
        packs = [pack for step in self.steps for pack in step]
        tokens = sum(len(entry.input_ids) for pack in packs for entry in pack.entries)
        return tokens / (len(packs) * self.pack_length)


def draw_document(shape: ModelSize, number: int, text_tokens: int) -> Document:
    """Sample `number`: a beginning mark, an image, words; the words are to be predicted."""
    draw = random.Random(number)
    words = [draw.randrange(FIRST_WORD, shape.image_token) for _ in range(text_tokens - 1)]
    ids = (BEGIN, *[IMAGE_POSITION] * shape.image_tokens, *words)
    image = str(number).encode()  # see bench_models.noise_image
    labels = [ids[t + 1] if t >= shape.image_tokens else IGNORE for t in range(len(ids) - 1)]
    tiling = Tiling(0, 0, shape.image_tokens)
    return Document(Sample(str(number), "", (), (image,)), ids, (*labels, IGNORE), (tiling,))


def equal_steps(shape: ModelSize, steps: int, packs: int, samples_per_pack: int) -> Workload:
    """Samples of the typical length, and packs that these fill exactly."""
    documents = iter(
        [
            draw_document(shape, n, shape.text_tokens)
            for n in range(steps * packs * samples_per_pack)
        ]
    )
    drawn = tuple(
        tuple(Pack(tuple(next(documents) for _ in range(samples_per_pack))) for _ in range(packs))
        for _ in range(steps)
    )
    return Workload(drawn, samples_per_pack * shape.sample_tokens)


def ragged_steps(shape: ModelSize, steps: int, packs: int, samples_per_pack: int) -> Workload:
    """Long-tailed text lengths, in packs as long as those of `equal_steps`.

    A pack takes samples as they are drawn while they fit, then the longest of the next `WINDOW`
    that still does. Best fit over an epoch would put samples of like length together, and so spare
    the padded batches their padding.
    """
    pack_length = samples_per_pack * shape.sample_tokens
    longest = min(6 * shape.text_tokens, pack_length - shape.image_tokens)
    draw, numbers = random.Random(0), itertools.count()

    def documents() -> Iterator[Document]:
        while True:
            text = draw.lognormvariate(math.log(MEDIAN_TEXT * shape.text_tokens), SIGMA)
            yield draw_document(shape, next(numbers), max(2, min(longest, round(text))))

    stream, waiting = documents(), []

    def pack() -> Pack:
        entries, free = [], pack_length
        while True:
            waiting.extend(next(stream) for _ in range(WINDOW - len(waiting)))
            fitting = [i for i, document in enumerate(waiting) if len(document.input_ids) <= free]
            if not fitting:
                return Pack(tuple(entries))
            best = max(fitting, key=lambda i: len(waiting[i].input_ids))
            entries.append(waiting.pop(0 if fitting[0] == 0 else best))
            free -= len(entries[-1].input_ids)

    return Workload(tuple(tuple(pack() for _ in range(packs)) for _ in range(steps)), pack_length)


def packed(step: Step, pack_length: int, decode: Decode) -> list[PackedBatch]:
    """A step's micro-batches of one pack each, as mmtrain's loader makes them: images in uint8."""
    return [
        make_batch([pack], pack_length, lambda content, *_: decode(content)[None]) for pack in step
    ]


def padded(
    shape: ModelSize, step: Step, decode: Decode, transform: ImageTransform
) -> list[PaddedBatch]:
    """Return the step's samples in the order they were drawn, a batch a pack, padded to its longest
    sample.
    """
    documents = sorted(
        (entry for pack in step for entry in pack.entries), key=lambda entry: int(entry.sample.key)
    )
    bounds = [round(len(documents) * i / len(step)) for i in range(len(step) + 1)]
    return [
        _collate(shape, documents[a:b], decode, transform) for a, b in itertools.pairwise(bounds)
    ]


def _collate(
    shape: ModelSize, documents: Sequence[Document], decode: Decode, transform: ImageTransform
) -> PaddedBatch:
    size = (len(documents), max(len(document.input_ids) for document in documents))
    input_ids = torch.full(size, PADDING)
    attention_mask = torch.zeros(size, dtype=torch.int64)
    labels = torch.full(size, IGNORE)
    for row, document in enumerate(documents):
        ids = torch.tensor(
            [shape.image_token if i == IMAGE_POSITION else i for i in document.input_ids]
        )
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        labels[row, 1 : len(ids)] = torch.tensor(document.labels[:-1])
    pixels = torch.stack([decode(document.sample.images[0]) for document in documents])
    return PaddedBatch(input_ids, attention_mask, labels, transform.normalise(pixels))
