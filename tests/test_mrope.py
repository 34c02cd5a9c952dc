"""M-RoPE and DeepStack, packed and cut into stages: loss and gradients of the families' stock classes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from scenes import Case, Document, execute, make_config, merged, relative
from tiny_models import make_tokenizer
from transformers import PreTrainedModel
from whole_models import MROPE, save_whole

from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.models.facts.connectors import image_layout
from mmtrain.models.facts.families import canonical_name
from mmtrain.models.layouts.native import Native
from mmtrain.models.weights.projector_files import local_names
from mmtrain.stock.exporters import exporter_for
from mmtrain.stock.pretrained import expand_pretrained

IMAGE_TOKEN = 320  # of config.json
HYBRID = ("qwen3_5", "qwen3_5_moe")
SIZES = ((40, 30), (14, 60), (60, 17), (30, 45), (28, 28))  # of images in pixels
LAYOUTS = ((1, 1, 0), (1, 1, 4), (2, 1, 0), (2, 1, 4), (4, 1, 0), (2, 2, 0))  # pipeline, data, layers that recompute


def document(layout: Native, parts: str, seed: int) -> Document:
    """A document of parts: "t" some words, "i" an image; the last words are the answer."""
    rng, ids, tilings = random.Random(seed), [], []
    for part in parts:
        if part == "i":
            tilings.append(layout.tiling(*SIZES[rng.randrange(len(SIZES))]))
            ids += [IMAGE_POSITION] * tilings[-1].positions
        else:
            ids += [rng.randrange(3, 300) for _ in range(rng.randrange(4, 9))]
    labels = [token if place >= len(ids) - 3 else IGNORE for place, token in enumerate(ids)]
    tiles, side = sum(tiling.tiles for tiling in tilings), layout.tile_size
    pixels = torch.randn(tiles, 3, side, side, generator=torch.Generator().manual_seed(seed)) if tiles else None
    return Document(tuple(ids), (*labels[1:], IGNORE), pixels, tuple(tilings))


def step(layout: Native) -> tuple:
    """Four micro-batches: an image first, in the middle, several, none."""
    kinds = ("itit", "t", "tit", "it", "titit", "tt", "t", "tit")
    documents = [document(layout, kind, seed) for seed, kind in enumerate(kinds)]
    return tuple([[documents[2 * i], documents[2 * i + 1]]] for i in range(4))


def stock_inputs(config: RunConfig, one: Document) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[IMAGE_TOKEN if token == IMAGE_POSITION else token for token in one.ids]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE_TOKEN).long()}
    if one.images is None:
        return inputs
    return inputs | exporter_for(config).inputs(one.images, one.tilings, image_layout(config))


def names_in_stock(config: RunConfig, model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The stock model's parameters by mmtrain's global names."""
    named = {}
    for name, parameter in model.named_parameters():
        if "language_model" in name or name.startswith("lm_head"):
            named[canonical_name(name)] = parameter
    stock = exporter_for(config)
    beside = [name for name, _ in model.named_parameters() if canonical_name(name) not in named]
    # PaddleOCR-VL's is `mlp_AR` on disk.
    on_disk = {name.replace("model.projector.", "mlp_AR."): name for name in beside}
    inside = {
        name for name in on_disk if name.startswith((stock.connector_names, "model.visual.merger", "model.visual.d"))
    }
    for ours, theirs in local_names(inside, "stock").items():
        named[f"projector.{ours}"] = model.get_parameter(on_disk[theirs])
    return named


def stock_step(
    config: RunConfig, model: PreTrainedModel, microbatches: tuple, names: list[str]
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss per supervised token and gradients by the stock class, one document at a time."""
    documents = [one for microbatch in microbatches for row in microbatch for one in row]
    tokens = sum(label != IGNORE for one in documents for label in one.labels)
    named = names_in_stock(config, model)
    model.requires_grad_(False)
    for name in names:
        named[name].requires_grad_(True)
    total = 0.0
    for one in documents:
        logits = model(**stock_inputs(config, one), use_cache=False).logits[0]
        loss = F.cross_entropy(logits, torch.tensor(one.labels), ignore_index=IGNORE, reduction="sum") / tokens
        loss.backward()
        total += float(loss.detach())
    return total, {name: named[name].grad.double().flatten().numpy() for name in names}


def whole_config(folder: Path, **overrides: object) -> RunConfig:
    """A run from the whole model in `folder`."""
    config = make_config(folder, **overrides)
    content = config.model_dump()
    content["model"] = {
        "pretrained": str(folder),
        "llm": {"dtype": "float32"},
        "trainable": content["model"]["trainable"],
        "lora": content["model"]["lora"],
    }
    return expand_pretrained(RunConfig.model_validate(content))


@pytest.mark.parametrize("kind", MROPE)
def test_packed_stages_train_as_the_stock_class_on_each_document(tmp_path, kind):
    model = save_whole(kind, tmp_path, make_tokenizer())
    last = len(model.model.language_model.layers) - 1
    common = {"model__trainable": ("projector", f"llm.layers.{last}.*"), "data__pack_length": 96}
    config = whole_config(tmp_path, **common)
    microbatches = step(image_layout(config))
    cases, worst = {}, 0.0
    for pipeline, data, recomputed in LAYOUTS:
        shape = {"parallel__pipeline": pipeline, "parallel__data": data, "parallel__recompute_layers": recomputed}
        cases.setdefault(pipeline * data, []).append(Case(whole_config(tmp_path, **common, **shape), (microbatches,)))
    expected = None
    for ranks, of_ranks in cases.items():
        by_rank = run_ranks(ranks, execute, of_ranks)
        for number, case in enumerate(of_ranks):
            found = merged([rank[number] for rank in by_rank], "gradients")
            expected = expected or stock_step(config, model, microbatches, sorted(found))
            loss, gradients = expected
            assert by_rank[0][number]["results"][0].loss == pytest.approx(loss, rel=1e-5)
            for name, gradient in gradients.items():
                error = relative(found[name].flatten(), gradient)
                worst = max(worst, error)
                assert error <= 1e-5, (case.config.parallel, name, error)
            assert all(rank[number]["audit"]["failures"] == [] for rank in by_rank)
    print(f"{kind}: worst relative gradient error {worst:.1e}")
