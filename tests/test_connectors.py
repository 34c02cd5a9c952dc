"""Every connector in the stock class that has it: the same loss and gradients, whatever the LLM,
encoder and layout.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import timm
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from scenes import IMAGE_TOKEN, Case, Document, execute, make_config, make_document, merged, perturb
from tiers import nightly
from timm_folder import save_timm_folder
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Dinov2Config,
    Exaone4_5_VisionConfig,
    Exaone4_5_VisionModel,
    InternVLVisionConfig,
    PixtralVisionConfig,
    Qwen2_5_VLVisionConfig,
    Qwen3_5VisionConfig,
    Qwen3VLVisionConfig,
    Siglip2VisionConfig,
    SiglipVisionConfig,
    VideoLlama3VisionConfig,
)
from whole_models import OUR_MODULES, stock_class

from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.layouts.layout import ImageLayout
from mmtrain.model.llm.tiny import HEAD_WIDTH, HEADS, tiny_model

GRID, PATCH = 12, 4  # patches a side, which 2, 3 and 4 divide; pixels of one
LAYERS = 4

# With the scales that released models have.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
}
SIZE = GRID * PATCH
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": PATCH,
}
ENCODERS = {
    "siglip": SiglipVisionConfig(**SMALL, intermediate_size=48, vision_use_head=False),
    "clip": CLIPVisionConfig(**SMALL, intermediate_size=48),
    "dinov2": Dinov2Config(**SMALL, mlp_ratio=2),
    "internvit": InternVLVisionConfig(**SMALL, intermediate_size=48),
}
TILE = 4 * PATCH  # pixels a side, of encoders whose images are cut
ENCODERS |= {
    f"{kind} of tiles": type(ENCODERS[kind]).from_dict(
        ENCODERS[kind].to_dict() | {"image_size": TILE}
    )
    for kind in ("siglip", "clip")
}
QWENS = ("qwen2.5 vl", "qwen3 vl", "qwen3.5 vl", "exaone")
NATIVE = ("naflex", "pixtral", "video llama", *QWENS)
QWEN = {"hidden_size": 32, "intermediate_size": 48, "depth": 3, "num_heads": 2, "patch_size": PATCH}
QWEN |= {"out_hidden_size": 24}
WINDOWS = {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
ENCODERS |= {
    "naflex": Siglip2VisionConfig(
        **{name: value for name, value in SMALL.items() if name != "image_size"},
        intermediate_size=48,
        num_patches=16,
        vision_use_head=False,
    ),
    "pixtral": PixtralVisionConfig(**SMALL, intermediate_size=48),
    "video llama": VideoLlama3VisionConfig(
        **{name: value for name, value in SMALL.items() if name != "image_size"},
        intermediate_size=48,
    ),
    "qwen2.5 vl": Qwen2_5_VLVisionConfig(**QWEN, **WINDOWS),
    "qwen3 vl": Qwen3VLVisionConfig(
        **QWEN, num_position_embeddings=16, deepstack_visual_indexes=[0]
    ),
    "qwen3.5 vl": Qwen3_5VisionConfig(**QWEN, num_position_embeddings=16),
    "exaone": Exaone4_5_VisionConfig(
        **QWEN | {"out_hidden_size": HEADS * HEAD_WIDTH}, **WINDOWS, num_key_value_heads=1
    ),
}
BOUNDS = {"min_positions": 2, "max_positions": 16}
LONGEST = 40  # pixels
# (rows, columns) of tiles, the last with more positions than 9 have
GRIDS = ((1, 2), (2, 1), (2, 2), (1, 3), (5, 3))
PINPOINTS = tuple((rows * TILE, columns * TILE) for rows, columns in GRIDS)
# (width, height) in pixels, of images that are cut
SHAPES = ((40, 30), (10, 60), (100, 7), (45, 75), (33, 32))
TIMM = {
    "img_size": SIZE,
    "patch_size": PATCH,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 2,
    "global_pool": "token",
}
TIMM_ENCODERS = {
    "timm": TIMM,
    "timm with a register": {
        **TIMM,
        "class_token": False,
        "reg_tokens": 1,
        "global_pool": "avg",
        "fc_norm": False,
    },
}
TIMM_ARCHITECTURE = "vit_tiny_patch16_224"


class Run(NamedTuple):
    """One run of ours, and what is compared with it."""

    stock: str
    encoder: str
    factor: int | None
    width: int | None
    layer: int
    family: str
    layout: tuple[int, int]  # pipeline, data
    recomputed: int  # decoder layers a rank
    packed: bool
    images: str
    trainable: tuple[str, ...]


class Stock(NamedTuple):
    """A stock class, and what it computes of all that a configuration can ask for."""

    name: str
    connector: str
    encoders: Sequence[str]
    factors: Sequence[int | None] = (2, 3, 4)
    widths: Sequence[int | None] = (None,)
    layers: Sequence[int] = (-1, -2)
    final_norm: bool = False
    layout: str = "square"
    merger: bool = False


ANY = ("siglip", "clip", "dinov2")
CUT = ("siglip of tiles", "clip of tiles")
LAST_NORMED = {"layers": (-1,), "final_norm": True}
STOCK = {
    f"{stock.name} {stock.connector} {stock.layout}": stock
    for stock in (
        Stock("Llava", "mlp2x_gelu", ANY, factors=(None,)),
        Stock("AyaVision", "shuffle_swiglu", ANY, widths=(None, 48)),
        Stock("Idefics3", "shuffle_linear", ("siglip",), **LAST_NORMED),
        Stock("InternVL", "shuffle_mlp2x_gelu", ("internvit",), factors=(2, 4)),
        Stock("AyaVision", "shuffle_swiglu", CUT, factors=(2, 4), layout="tiles"),
        Stock("LlavaNext", "mlp2x_gelu", CUT, factors=(None,), layout="anyres"),
        Stock("LlavaOnevision", "mlp2x_gelu", CUT, factors=(None,), layout="anyres_max_9"),
        Stock("PerceptionLM", "mlp2x_gelu_pool", (*TIMM_ENCODERS,), **LAST_NORMED),
        Stock("Lfm2Vl", "shuffle_mlp2x_gelu", ("naflex",), layout="native", **LAST_NORMED),
        Stock("Lfm2Vl", "mlp2x_gelu", ("naflex",), factors=(None,), layout="native", **LAST_NORMED),
        Stock("Llava", "mlp2x_gelu", ("pixtral",), factors=(None,), layout="native"),
        Stock("Mistral3", "norm_merge_mlp2x", ("pixtral",), layout="native"),
        Stock("LightOnOcr", "norm_merge_mlp2x", ("pixtral",), layers=(-1,), layout="native"),
        Stock(
            "VideoLlama3",
            "mlp2x_gelu",
            ("video llama",),
            factors=(None,),
            layout="native",
            **LAST_NORMED,
        ),
        Stock(
            "HyperCLOVAXVisionV2",
            "linear",
            QWENS[:3],
            factors=(None,),
            layers=(-1,),
            layout="native",
            merger=True,
        ),
        Stock(
            "Exaone4_5_",
            "patch_merger_rms",
            ("exaone",),
            factors=(2,),
            layers=(-1,),
            layout="native",
        ),
    )
}


def stock_settings(run: Run) -> dict[str, Any]:
    """What the run asks for, in the class's own keys."""
    has_class = not run.encoder.startswith(("siglip", *NATIVE))
    strategy = "default" if has_class else "full"  # default drops the class token
    selected = {"vision_feature_layer": run.layer, "vision_feature_select_strategy": strategy}
    match STOCK[run.stock].name:
        case "Idefics3":
            return {"image_token_id": IMAGE_TOKEN, "scale_factor": run.factor}
        case "PerceptionLM":
            return {"image_token_id": IMAGE_TOKEN, "projector_pooling_ratio": run.factor}
        case "InternVL":
            layer = {"vision_feature_layer": run.layer}
            return {"image_token_id": IMAGE_TOKEN, "downsample_ratio": 1 / run.factor, **layer}
        case "AyaVision":
            selected |= {} if run.width is None else {"alignment_intermediate_size": run.width}
            selected |= {"downsample_factor": run.factor}
        case "Lfm2Vl":
            shuffles = {
                "downsample_factor": run.factor or 1,
                "projector_use_layernorm": run.factor is not None,
            }
            return {
                "image_token_id": IMAGE_TOKEN,
                "projector_hidden_size": HEADS * HEAD_WIDTH,
                **shuffles,
            }
        case "HyperCLOVAXVisionV2" | "VideoLlama3" | "Exaone4_5_":
            return {"image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN + 1}
        case "LightOnOcr":
            return {"image_token_id": IMAGE_TOKEN, "spatial_merge_size": run.factor}
        case "Mistral3":
            selected = {"vision_feature_layer": run.layer, "spatial_merge_size": run.factor}
        case "LlavaNext" | "LlavaOnevision":
            selected |= {"image_grid_pinpoints": [list(pair) for pair in PINPOINTS]}
    return {"image_token_index": IMAGE_TOKEN, **selected}


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """A tiny LLM of every family and a tiny encoder of every sort, each in a folder of its name."""
    folder = tmp_path_factory.mktemp("parts")
    for family, values in FAMILIES.items():
        config = CONFIG_MAPPING[family](**{"num_hidden_layers": LAYERS, **values})
        tiny_model(config, seed=0).save_pretrained(folder / family)
    torch.manual_seed(0)
    for name, config in ENCODERS.items():
        made = Exaone4_5_VisionModel(config) if name == "exaone" else AutoModel.from_config(config)
        perturb(made).save_pretrained(folder / name)
        square = dict.fromkeys(("height", "width"), TILE if name in CUT else SIZE)
        CLIPImageProcessorPil(size=square, crop_size=square).save_pretrained(folder / name)
    for name, arguments in TIMM_ENCODERS.items():
        model = perturb(timm.create_model(TIMM_ARCHITECTURE, num_classes=0, **arguments))
        save_timm_folder(model, folder / name, TIMM_ARCHITECTURE, arguments)
    return folder


def vision_config(run: Run) -> dict[str, Any]:
    """As the stock class takes it."""
    if run.encoder in TIMM_ENCODERS:
        return {
            "model_type": "timm_wrapper",
            "architecture": TIMM_ARCHITECTURE,
            "model_args": TIMM_ENCODERS[run.encoder],
        }
    is_idefics3 = STOCK[run.stock].name == "Idefics3"
    renamed = {"model_type": "idefics3_vision"} if is_idefics3 else {}  # SigLIP, by another name
    return ENCODERS[run.encoder].to_dict() | renamed


def stock_model(parts: Path, run: Run) -> nn.Module:
    """The stock class with the weights in `parts`, a random connector, and what trains."""
    llm = AutoModelForCausalLM.from_pretrained(parts / run.family, dtype=torch.float32)
    kind = stock_class(f"{STOCK[run.stock].name}ForConditionalGeneration")
    text = llm.config.to_dict()
    if STOCK[run.stock].merger:  # whose head multiplies by it
        text["logits_scaling"] = 1.0
    config = kind.config_class(
        text_config=text, vision_config=vision_config(run), **stock_settings(run)
    )
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = kind(config)
    model.logits_divisor = getattr(llm.config, "logits_scaling", 1.0)
    tower, connector, language = parts_of(model)
    if run.encoder in TIMM_ENCODERS:
        encoder = timm.create_model(f"local-dir:{parts / run.encoder}", pretrained=True)
    else:
        kind = Exaone4_5_VisionModel if run.encoder == "exaone" else AutoModel
        encoder = kind.from_pretrained(parts / run.encoder, dtype=torch.float32)
    tower.load_state_dict(encoder.state_dict())
    perturb(connector)
    if hasattr(model.model, "image_newline"):
        torch.nn.init.normal_(model.model.image_newline)
    language.load_state_dict(llm.model.state_dict())
    model.lm_head.load_state_dict(llm.lm_head.state_dict())
    model.requires_grad_(False)
    for name, parameter in our_parameters(parts, run, model).items():
        parameter.requires_grad_(matches_any(name, run.trainable))
    return model.eval()


def parts_of(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Encoder, connector and LLM of a stock class."""
    inner = model.model
    if hasattr(inner, "connector"):  # Idefics3
        return inner.vision_model, inner.connector.modality_projection, inner.text_model
    if hasattr(inner, "vision_projection"):  # LightOnOcr
        return inner.vision_encoder, inner.vision_projection, inner.language_model
    if hasattr(inner, "visual"):  # Exaone4_5
        return inner.visual, inner.visual.merger, inner.language_model
    if hasattr(inner, "projector"):  # HyperCLOVAXVisionV2, VideoLlama3
        return inner.vision_model, inner.projector, inner.language_model
    tower = getattr(inner.vision_tower, "timm_model", inner.vision_tower)
    return tower, inner.multi_modal_projector, inner.language_model


def our_parameters(parts: Path, run: Run, model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of a stock class by our names for them, without embedding and head.

    An encoder's are named as in its file, which transformers may rename when it loads it: found
    there by their values.
    """
    tower, connector, language = parts_of(model)
    stored = load_file(parts / run.encoder / "model.safetensors")
    named = {}
    for name, value in connector.named_parameters():
        module, _, kind = name.rpartition(".")
        named[f"projector.{OUR_MODULES.get(module, module)}.{kind}"] = value
    if hasattr(model.model, "image_newline"):
        named["projector.image_newline"] = model.model.image_newline
    named |= {f"llm.{name}": value for name, value in language.named_parameters()}
    for value in tower.parameters():
        if any(value is other for other in named.values()):  # Exaone4_5's connector is in its tower
            continue
        [name] = (name for name, tensor in stored.items() if torch.equal(tensor, value))
        named[f"vision.{name}"] = value
    return named


def stock_loss_sum(model: nn.Module, document: Document) -> torch.Tensor:
    """Sum of token losses of one document on its own, through the stock model's forward."""
    ids = torch.tensor([[IMAGE_TOKEN if i == IMAGE_POSITION else i for i in document.ids]])
    images = document.images
    if images is not None and type(model).__name__.startswith(("Idefics3", "PerceptionLM")):
        images = images[None]  # (samples, images, 3, S, S)
    told: dict[str, torch.Tensor] = {}
    if images is not None and hasattr(model.model, "image_newline"):
        told["image_sizes"] = torch.tensor(
            [(tiling.height, tiling.width) for tiling in document.tilings]
        )
        if type(model).__name__.startswith("LlavaOnevision"):
            told["batch_num_images"] = torch.tensor([len(document.tilings)])
    if images is not None and (kind := model.config.vision_config.model_type) in NATIVE_TYPES:
        images, told = native_inputs(kind, document)
    logits = model(input_ids=ids, pixel_values=images, use_cache=False, **told).logits[0]
    # The stock classes' head is a matrix alone: what the LLM's own class does behind it is done
    # here.
    logits = logits / model.logits_divisor
    return cross_entropy(
        logits, torch.tensor(document.labels), ignore_index=IGNORE, reduction="sum"
    )


NATIVE_TYPES = [ENCODERS[name].model_type for name in NATIVE]


def native_inputs(kind: str, document: Document) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A document's cells as a stock class takes them: padded pictures, or padded rows of
    patches.
    """
    size, pictures = document.images.shape[-1], []
    for cells, tiling in zip(
        document.images.split([t.tiles for t in document.tilings]), document.tilings, strict=True
    ):
        rows = [torch.cat(list(row), dim=2) for row in cells.split(tiling.columns)]
        pictures.append(torch.cat(rows, dim=1))
        assert pictures[-1].shape == (3, tiling.rows * size, tiling.columns * size)
    sizes = torch.tensor([picture.shape[1:] for picture in pictures])
    if kind == "pixtral":
        padded = torch.zeros(len(pictures), 3, *sizes.amax(0).tolist())
        for place, picture in zip(padded, pictures, strict=True):
            place[:, : picture.shape[1], : picture.shape[2]] = picture
        return padded, {"image_sizes": sizes}
    # values (c, dy, dx)
    patches = [nn.functional.unfold(one[None], PATCH, stride=PATCH)[0].T for one in pictures]
    if kind != "siglip2_vision_model":
        grids = nn.functional.pad(sizes // PATCH, (1, 0), value=1)
        if kind == "video_llama_3_vision":
            return torch.cat(patches), {
                "image_grid_thw": grids,
                "image_merge_sizes": torch.ones(len(grids)).long(),
            }
        # two frames of each; in blocks of 2 x 2
        for number, (_, rows, columns) in enumerate(grids.tolist()):
            frames = (
                patches[number]
                .view(-1, 3, 1, PATCH**2)
                .expand(-1, -1, 2, -1)
                .reshape(rows, columns, -1)
            )
            blocks = [
                frames[y : y + 2, x : x + 2].flatten(0, 1)
                for y in range(0, rows, 2)
                for x in range(0, columns, 2)
            ]
            patches[number] = torch.cat(blocks)
        return torch.cat(patches), {"image_grid_thw": grids}
    patches = [one.view(-1, 3, PATCH**2).transpose(1, 2).flatten(1) for one in patches]
    lengths = torch.tensor([len(one) for one in patches])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).int()
    return nn.utils.rnn.pad_sequence(patches, True), {
        "pixel_attention_mask": mask,
        "spatial_shapes": sizes // PATCH,
    }


IMAGES = {"none": (0,), "one": (1,), "several": (2, 0, 3, 1, 1)}  # in a document, in turn
LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2))
TRAINABLE = (("projector",), ("vision", "projector", "llm.layers.1"))


def all_runs() -> list[Run]:
    """All that a stock class can be compared with."""
    ours = (FAMILIES, LAYOUTS, (0, 1, LAYERS), (False, True), IMAGES, TRAINABLE)
    runs: list[Run] = []
    for name, stock in STOCK.items():
        theirs = ([name], stock.encoders, stock.factors, stock.widths, stock.layers)
        runs += map(Run._make, product(*theirs, *ours))
    return runs


def pairs(run: Run) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """Every two of the run's choices, each as (field, value)."""
    return set(combinations(enumerate(run), 2))


@functools.cache
def covering() -> tuple[Run, ...]:
    """Runs that have every two choices which any run has; the first are one of each stock class, at
    two ranks.
    """
    runs, draw = all_runs(), random.Random(0)
    wanted = set().union(*map(pairs, runs))
    chosen: list[Run] = []

    def choose(candidates: list[Run]) -> None:
        best = max(
            draw.sample(candidates, min(200, len(candidates))),
            key=lambda run: len(pairs(run) & wanted),
        )
        chosen.append(best)
        wanted.difference_update(pairs(best))

    for name in STOCK:
        at_two = (name, (2, 1), True, "several")
        choose([run for run in runs if (run.stock, run.layout, run.packed, run.images) == at_two])
    while wanted:
        (i, first), (j, second) = min(wanted, key=repr)
        choose([run for run in runs if run[i] == first and run[j] == second])
    return tuple(chosen)


def documents_for(run: Run, layout: ImageLayout) -> list[Document]:
    """Twelve of a step, or four: one for each micro-batch."""
    counts, found = IMAGES[run.images], []
    for seed in range(12 if run.packed else 4):
        images = counts[seed % len(counts)]
        shapes = [SHAPES[(seed + image) % len(SHAPES)] for image in range(images)]
        tilings = tuple(layout.tiling(*shape, images) for shape in shapes)
        size = layout.tile_size
        found.append(make_document(seed, 0, 6 + seed, image_size=size, tilings=tilings))
    return found


def case(parts: Path, folder: Path, run: Run) -> tuple[Case, float, dict[str, torch.Tensor]]:
    """The run of ours, and the stock class's loss and gradients of the same step from the same
    weights.
    """
    model, stock = stock_model(parts, run), STOCK[run.stock]
    vision = {
        "name": str(parts / run.encoder),
        "select_layer": run.layer,
        "final_norm": stock.final_norm,
    }
    vision |= {
        "layout": stock.layout,
        "pinpoints": PINPOINTS if stock.layout.startswith("anyres") else None,
    }
    if run.encoder in NATIVE:
        vision |= {"longest_edge": LONGEST} if run.encoder == "pixtral" else BOUNDS
        vision["merger"] = stock.merger
    settings: dict[str, Any] = {
        "model__llm": {"path": str(parts / run.family), "dtype": "float32"},
        "model__vision": vision,
        "model__projector": {"type": stock.connector, "factor": run.factor, "width": run.width},
        "model__trainable": run.trainable,
    }
    documents = documents_for(run, models_of(make_config(folder, **settings)).layout)
    start = folder / "projector.safetensors"
    folder.mkdir()
    parameters = our_parameters(parts, run, model)
    save_file(
        {name: value for name, value in parameters.items() if name.startswith("projector.")}, start
    )
    tokens = sum(label != IGNORE for document in documents for label in document.labels)
    loss = sum(stock_loss_sum(model, document) for document in documents) / tokens
    if loss.requires_grad:
        loss.backward()
    gradients = {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in parameters.items()
        if value.requires_grad
    }
    rows = [documents[i::4] for i in range(4)]
    pipeline, data = run.layout
    settings["model__projector"]["init_from"] = str(start)
    config = make_config(
        folder,
        **settings,
        parallel={"pipeline": pipeline, "data": data, "recompute_layers": run.recomputed},
        data__pack_length=256 + max(sum(len(document.ids) for document in row) for row in rows),
    )
    return Case(config, (tuple([row] for row in rows),)), float(loss.detach()), gradients


@pytest.mark.parametrize(
    ("layout", "some"),
    [((2, 1), slice(0, len(STOCK), 2)), *(nightly(each, slice(None)) for each in LAYOUTS)],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_stock_class(parts, tmp_path, layout, some):
    runs = [run for run in covering()[some] if run.layout == layout]
    cases = [case(parts, tmp_path / str(number), run) for number, run in enumerate(runs)]
    # A few at a time: a process keeps the process groups of every case that it has run, and their
    # threads.
    ranks_by_case: list[list[dict[str, Any]]] = []
    for first in range(0, len(cases), 6):
        few = [ours for ours, _, _ in cases[first : first + 6]]
        ranks_by_case.extend(
            map(list, zip(*run_ranks(layout[0] * layout[1], execute, few), strict=True))
        )
    for run, ranks, (_, loss, gradients) in zip(runs, ranks_by_case, cases, strict=True):
        assert ranks[0]["results"][0].loss == pytest.approx(loss, rel=1e-5), run
        found = merged(ranks, "gradients")
        # Towers end at the selected layer: what lies behind it is not there, and has no gradient in
        # the stock model.
        assert found.keys() == {
            name for name, value in gradients.items() if name in found or value.any()
        }, run
        largest = max(float(gradient.norm()) for gradient in gradients.values())
        for name, gradient in found.items():
            expected = gradients[name].double().numpy()
            # A key's bias has no gradient but rounding: the softmax does not see it.
            error = np.linalg.norm(gradient - expected) / max(
                np.linalg.norm(expected), 0.01 * largest, 1e-30
            )
            assert error <= 1e-5, (run, name, error)
        assert all(rank["audit"]["failures"] == [] for rank in ranks), run
