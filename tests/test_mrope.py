"""M-RoPE and DeepStack, packed and cut into stages: positions, loss and gradients of the families'
stock classes.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from json_files import read_json
from ranks import run_ranks
from safetensors.torch import load_file
from scenes import Case, Document, as_batch, bits, execute, merged, relative
from sweeps import sweep
from tiers import nightly
from tiny_models import make_tiny_llm, make_tokenizer
from transformers import AutoImageProcessor, PreTrainedModel
from untrained_runs import drawn_adapters, export, load_stock, make_checkpoint, run_export, weights
from whole_models import MROPE, QWEN_MARKS, TURNS, save_whole, whole_config

import mmtrain
from mmtrain.api.generate import load
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.step_folder import StepFolder
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IGNORE, IMAGE_POSITION, Sample
from mmtrain.data.samples.templates import load_tokenizer, make_template
from mmtrain.data.stream.packs import PackedBatch, positions_of
from mmtrain.exporting.verify import batch_fault, compare_logits
from mmtrain.facts.adapters import is_adapter
from mmtrain.facts.families import canonical_name
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import matches_any
from mmtrain.layouts.native import Native
from mmtrain.model.llm.language import load_decoder_layers
from mmtrain.model.stage import build_stage
from mmtrain.model.trained.projector import read_projector
from mmtrain.model.weights.projector_files import local_names
from mmtrain.plan.planner import make_plan
from mmtrain.stock.exporters import exporter_for

LAST = 3  # decoder layer
IMAGE_TOKEN = 320  # of config.json
SIZES = ((40, 30), (14, 60), (60, 17), (30, 45), (28, 28))  # of images in pixels
# pipeline, data, layers that recompute
LAYOUTS = ((1, 1, 0), (1, 1, 4), (1, 2, 0), (2, 1, 0), (2, 1, 4), (4, 1, 0), (2, 2, 0))


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
    pixels = (
        torch.randn(tiles, 3, side, side, generator=torch.Generator().manual_seed(seed))
        if tiles
        else None
    )
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
    return inputs | exporter_for(models_of(config)).inputs(
        one.images, one.tilings, models_of(config).layout
    )


def names_in_stock(config: RunConfig, model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The stock model's parameters by mmtrain's global names: those of its LLM and its
    connector.
    """
    named, beside = {}, {}
    for name, parameter in model.named_parameters():
        if "language_model" in name or name.startswith("lm_head"):
            named[canonical_name(name)] = parameter
        elif re.search(r"merger|downsample|model\.projector", name):
            # PaddleOCR-VL's last one is `mlp_AR` on disk
            beside[name.replace("model.projector.", "mlp_AR.")] = parameter
    return named | {
        f"projector.{ours}": beside[theirs] for ours, theirs in local_names(beside, "stock").items()
    }


def stock_step(
    config: RunConfig,
    model: PreTrainedModel,
    microbatches: Sequence,
    weights: Mapping[str, torch.Tensor],
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss per supervised token and gradients by the stock class, one document at a time.

    Adapters (`weights`) are merged: of W + s B A the gradient G gives s B^T G for A and s G A^T for
    B.
    """
    documents = [one for microbatch in microbatches for row in microbatch for one in row]
    tokens = sum(label != IGNORE for one in documents for label in one.labels)
    named, scale = names_in_stock(config, model), config.model.lora.alpha / config.model.lora.r
    trained = [
        p.name for p in models_of(config).parameters if matches_any(p.name, config.model.trainable)
    ]
    adapted = {
        name.removesuffix(".lora_A.weight") for name in trained if name.endswith(".lora_A.weight")
    }
    pairs = {layer: [weights[f"{layer}.lora_{part}.weight"] for part in "AB"] for layer in adapted}
    model.requires_grad_(False)
    for layer, (down, up) in pairs.items():
        named[f"{layer}.weight"].requires_grad_(True).data.add_(up @ down, alpha=scale)
    for name in trained:
        if not is_adapter(name):
            named[name].requires_grad_(True)
    total = 0.0
    for one in documents:
        logits = model(**stock_inputs(config, one), use_cache=False).logits[0]
        loss = (
            F.cross_entropy(logits, torch.tensor(one.labels), ignore_index=IGNORE, reduction="sum")
            / tokens
        )
        loss.backward()
        total += float(loss.detach())
    gradients = {name: named[name].grad for name in trained if not is_adapter(name)}
    for layer, (down, up) in pairs.items():
        whole = named[f"{layer}.weight"].grad
        gradients |= {
            f"{layer}.lora_A.weight": scale * up.T @ whole,
            f"{layer}.lora_B.weight": scale * whole @ down.T,
        }
        named[f"{layer}.weight"].data.sub_(up @ down, alpha=scale)
    return total, {
        name: gradient.double().flatten().numpy() for name, gradient in gradients.items()
    }


@pytest.fixture(scope="module")
def make(tmp_path_factory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """Makes a whole model and its folder, once."""

    @functools.cache
    def made(kind: str) -> tuple[Path, PreTrainedModel]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, save_whole(kind, folder, make_tokenizer())

    return made


DAILY = ("qwen3_vl", "paddleocr_vl")
FAMILIES = sweep(MROPE, DAILY)
TRAINED_FAMILIES = [("qwen3_vl", LAYOUTS[4:5]), *(nightly(kind, LAYOUTS) for kind in MROPE)]
# Of the stock class itself: a change of the images' last bits changes its gradient by 1.6e-4.
ROUNDING = {"qwen3_5_moe": 5e-4}
TRAINED = {
    "model__trainable": ("projector", f"llm.layers.{LAST}.*", "llm.layers.*.lora_*"),
    "model__lora": {"r": 2, "alpha": 6, "targets": ("llm.layers.*.self_attn.q_proj",)},
}


@pytest.mark.parametrize(("kind", "layouts"), TRAINED_FAMILIES)
def test_packed_stages_train_as_the_stock_class_on_each_document(make, kind, layouts):
    folder, model = make(kind)
    config = whole_config(folder, **TRAINED)
    microbatches, weights = step(models_of(config).layout), drawn_adapters(config)
    loss, gradients = stock_step(config, model, microbatches, weights)
    cases, worst = {}, 0.0
    for pipeline, data, recomputed in layouts:
        shape = {
            "parallel__pipeline": pipeline,
            "parallel__data": data,
            "parallel__recompute_layers": recomputed,
        }
        case = Case(whole_config(folder, **TRAINED, **shape), (microbatches,), weights=weights)
        cases.setdefault(pipeline * data, []).append(case)
    for ranks, of_ranks in cases.items():
        by_rank = run_ranks(ranks, execute, of_ranks)
        for number in range(len(of_ranks)):
            found = merged([rank[number] for rank in by_rank], "gradients")
            assert by_rank[0][number]["results"][0].loss == pytest.approx(loss, rel=1e-5)
            assert found.keys() == gradients.keys()
            worst = max(
                worst,
                *(
                    relative(found[name].flatten(), gradient)
                    for name, gradient in gradients.items()
                ),
            )
            assert all(rank[number]["audit"]["failures"] == [] for rank in by_rank)
    print(f"{kind}: worst relative gradient error {worst:.1e}")
    assert worst <= ROUNDING.get(kind, 1e-5)


# ---- positions


@pytest.mark.parametrize("kind", MROPE)
@pytest.mark.parametrize("samples", [100, nightly(10_000)])
def test_positions_are_those_of_get_rope_index_for_what_the_familys_template_writes(
    make, kind, samples
):
    folder, model = make(kind)
    config = whole_config(folder)
    layout, tokenizer = models_of(config).layout, load_tokenizer(str(folder))
    template, draw = make_template("chat", tokenizer, layout, 400), random.Random(0)
    for _ in range(samples):
        images, words = (
            draw.choice((0, 1, 1, 2, 3, 4)),
            ["a red circle", "?", "Where is it", "\n", "on a green one."],
        )
        parts = ["<image>"] * images + draw.choices(words, k=draw.randint(1, 4))
        draw.shuffle(parts)
        turns = (("human", " ".join(parts).strip() or "?"), ("gpt", draw.choice(words[::2])))
        sizes = tuple((draw.randint(8, 120), draw.randint(8, 120)) for _ in range(images))
        one = template(Sample("sample", "shard", turns, (b"",) * images, sizes=sizes))
        ids = torch.tensor(
            [[IMAGE_TOKEN if token == IMAGE_POSITION else token for token in one.input_ids]]
        )
        grids = torch.tensor([(1, 2 * tiling.rows, 2 * tiling.columns) for tiling in one.tilings])
        told = {"image_grid_thw": grids} if images else {}
        expected, delta = model.model.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=(ids == IMAGE_TOKEN).int(),
            attention_mask=torch.ones_like(ids),
            **told,
        )
        found = positions_of(one)
        assert np.array_equal(found, expected[:, 0].numpy()), (turns, sizes)
        assert found.max() + 1 - len(one.input_ids) == int(delta)


@pytest.mark.parametrize("kind", MROPE)
def test_text_alone_has_the_same_bits_with_one_row_of_positions_and_with_three(make, kind):
    folder, _ = make(kind)
    part = load_decoder_layers(
        str(folder), 0, LAST + 1, embedding=True, head=True, dtype=torch.float32, mrope=True
    )
    places = torch.cat([torch.arange(9), torch.arange(5)])[None]
    hidden = part.embed(torch.randint(300, (1, 14), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(part(hidden, places), part(hidden, places.expand(4, -1, -1)))


def gradients_of(config: RunConfig, batch: PackedBatch) -> np.ndarray:
    """The projector's gradients by the stages of a plan, in this process."""
    plan = make_plan(config)
    stages = [build_stage(config, rank.stages[0]) for rank in plan.ranks]
    hidden, inputs, outputs = stages[0].start(batch), [], []
    for stage in stages[:-1]:
        outputs.append(stage(hidden, batch.positions))
        inputs.append(outputs[-1].detach().requires_grad_())
        hidden = inputs[-1]
    stages[-1].loss(hidden, batch.positions, batch.labels)[0].backward()
    for output, received in zip(outputs[::-1], inputs[::-1], strict=True):
        output.backward(received.grad)
    return np.concatenate(
        [p.grad.double().flatten().numpy() for p in stages[0].projector.parameters()]
    )


def test_one_dimensional_positions_and_documents_found_in_a_row_of_the_grid_give_other_gradients(
    make,
):
    """Neither shows in a loss: only a comparison with the stock class holds them."""
    config = whole_config(make("qwen3_vl")[0], parallel__pipeline=2)
    batch = as_batch(step(models_of(config).layout)[2], 96, has_grid=True)
    right = gradients_of(config, batch)
    flat = replace(batch, grid_positions=batch.position_ids.expand(3, -1, -1))
    found_in_time = replace(batch, position_ids=batch.grid_positions[0])
    assert relative(gradients_of(config, flat), right) > 0.05
    assert relative(gradients_of(config, found_in_time), right) > 0.05


# ---- DeepStack


def test_stage_0_holds_the_layers_behind_which_deepstack_adds(make):
    folder, _ = make("qwen3_vl")  # two blocks of its encoder
    for pipeline, boundaries in ((2, None), (3, None), (4, None), (4, (2, 3, 4))):
        config = whole_config(folder, parallel__pipeline=pipeline, parallel__boundaries=boundaries)
        assert make_plan(config).boundaries[0] >= 2
    for wrong in (
        {"pipeline": 5},
        {"pipeline": 2, "boundaries": (1,)},
        {"pipeline": 2, "stages_per_rank": 3},
    ):
        keys = {f"parallel__{key}": value for key, value in wrong.items()}
        with pytest.raises(
            UserError, match=r"the 2 decoder layers behind which DeepStack adds features"
        ):
            make_plan(whole_config(folder, **keys))
    with pytest.raises(
        UserError, match=r"DeepStack, which takes the features of blocks 0, 1 too, and stays whole"
    ):
        make_plan(whole_config(folder, parallel__pipeline=2, parallel__encoder_ranks=(0, 1)))
    with pytest.raises(
        UserError, match="qwen_merger_deepstack has DeepStack, which needs an encoder that has it"
    ):
        changes = {"model.projector.type": "qwen_merger_deepstack"}
        models_of(whole_config(make("qwen3_5")[0]).changed(changes)).read()


def test_features_are_added_behind_the_layers_of_stage_0_and_nowhere_else(make):
    """The stock forward adds behind bookends, too: a later stage would add them once more."""
    folder, model = make("qwen3_vl")
    config = whole_config(folder, parallel__pipeline=2, parallel__boundaries=(2,))
    batch = as_batch([[document(models_of(config).layout, "tit", 0)]], 96, has_grid=True)
    stages = [build_stage(config, rank.stages[0]) for rank in make_plan(config).ranks]
    text = model.model.language_model
    with torch.no_grad():
        hidden = stages[0].start(batch)
        places, added = stages[0].language.deepstack
        mask = (
            torch.zeros(batch.labels.shape, dtype=torch.bool).flatten().index_fill(0, places, True)
        )
        length = int(
            (batch.position_ids.diff(prepend=torch.tensor([[-1]])) == 1).long().cumprod(-1).sum()
        )
        cut = {
            "inputs_embeds": hidden[:, :length],
            "position_ids": batch.grid_positions[:, :, :length],
        }
        expected = text(
            **cut,
            visual_pos_masks=mask.view_as(batch.labels)[:, :length],
            deepstack_visual_embeds=list(added),
        ).last_hidden_state
        found = stages[1](stages[0](hidden, batch.positions), batch.positions)[:, :length]
    assert stages[0].language.deepstack is None, "used up"
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


# ---- what trains, and what leaves


def test_a_frozen_merger_does_not_move(make, tmp_path):
    folder, _ = make("qwen3_vl")
    config = whole_config(folder, model__trainable=(f"llm.layers.{LAST}",), parallel__pipeline=2)
    case = Case(config, (step(models_of(config).layout),) * 2)
    before = {
        name: bits(tensor)
        for name, tensor in read_projector(str(folder), models_of(config).connector).items()
    }
    (ranks,) = zip(*run_ranks(2, execute, [case]), strict=True)
    held = {
        name: digest
        for rank in ranks
        for name, digest in rank["frozen"].items()
        if "projector" in name
    }
    assert (
        held == {f"projector.{name}": digest for name, digest in before.items()} and len(held) == 18
    )
    assert all(rank["audit"]["failures"] == [] for rank in ranks)


PAIRS = {  # a tower, an LLM of its own, and the connector drawn between them
    "qwen3_vl": ("qwen3", "qwen_merger_deepstack"),
    "qwen2_vl": ("qwen2", "qwen_merger"),
    "qwen2_5_vl": ("qwen2", "patch_merger_rms"),
}


@pytest.fixture
def trained(make, tiny, tmp_path) -> Callable[..., StepFolder]:
    """Makes a checkpoint whose projector, adapters and last norm are drawn anew."""

    def made(resize: str = "pillow", **model: Any) -> StepFolder:
        content = yaml.safe_load((tiny / "config.yaml").read_text())
        content["model"] = model
        content["data"] |= {"template": "chat", "resize": resize}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        config = mmtrain.load_config(tmp_path / "config.yaml")
        others = drawn_adapters(config) if config.model.lora is not None else {}
        return make_checkpoint(tmp_path / "run", config, others)

    return made


def content(file: Path) -> object:
    return read_json(file) if file.suffix == ".json" else file.read_bytes()


@pytest.mark.parametrize("kind", [*FAMILIES])
def test_an_export_is_the_folder_with_what_trained_and_answers_as_the_run(
    make, trained, tmp_path, kind
):
    folder, _ = make(kind)
    lora = {"r": 2, "alpha": 4, "targets": ["llm.layers.*.self_attn"]}
    checkpoint = trained(
        pretrained=str(folder),
        llm={"dtype": "float32"},
        lora=lora,
        trainable=["projector", "llm.layers.*.lora_*"],
    )
    exported = export(checkpoint, tmp_path / "out")
    names = {file.name for file in folder.iterdir()}
    assert names | {"README.md"} == {file.name for file in (tmp_path / "out").iterdir()}
    changed = {name for name in names if content(folder / name) != content(tmp_path / "out" / name)}
    assert changed == {"model.safetensors"}
    comparison, model = compare_logits(checkpoint, exported, torch.float32, 3)
    assert (
        comparison.passed
        and batch_fault(tmp_path / "out", model, comparison.samples, False) is None
    )
    load_stock(tmp_path / "out").save_pretrained(tmp_path / "again")
    ours, theirs = weights(tmp_path / "out"), weights(tmp_path / "again")
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize(
    ("kind", "select_layer", "connector"),
    [("qwen3_vl", -1, "qwen_merger"), ("qwen2_5_vl", -2, "patch_merger_rms")],
)
def test_a_folder_whose_class_computes_otherwise_is_not_written_back(
    make, trained, tmp_path, kind, select_layer, connector
):
    """Names and shapes fit: only answers would tell."""
    path = str(make(kind)[0])
    vision = {"name": path, "layout": "qwen_vl", "select_layer": select_layer}
    checkpoint = trained(
        llm={"path": path, "dtype": "float32"}, vision=vision, projector={"type": connector}
    )
    with pytest.raises(UserError, match="no stock model computes what this run trains"):
        export(checkpoint, tmp_path / "out")


def other_llm(make: Callable, folder: Path, tower: str) -> dict[str, Any]:
    """Make a published LLM and return the keys of a model with a connector between this tower and
    it.
    """
    family, kind = PAIRS[tower]
    llm = make_tiny_llm(
        folder / "llm", family, layers=4, **({"head_dim": 16} if family == "qwen3" else {})
    )
    tokenizer = load_tokenizer(str(llm))
    tokenizer.add_tokens([*QWEN_MARKS], special_tokens=True)
    tokenizer.chat_template = TURNS.replace("@IMAGE@", "")
    tokenizer.save_pretrained(llm)
    bounds = {"min_positions": 2, "max_positions": 9}
    vision = {"name": str(make(tower)[0]), "select_layer": -1, "layout": "qwen_vl", **bounds}
    return {
        "llm": {"path": str(llm), "dtype": "float32"},
        "vision": vision,
        "projector": {"type": kind},
    }


@pytest.mark.parametrize("tower", sweep(PAIRS, ("qwen3_vl",)))
def test_a_merger_drawn_anew_for_another_llm_leaves_by_the_towers_class(
    make, trained, tmp_path, tower
):
    checkpoint = trained(**other_llm(make, tmp_path, tower), trainable=["projector"])
    exported = export(checkpoint, tmp_path / "out")
    assert exported.stock.name == MROPE[tower][0]
    comparison, model = compare_logits(checkpoint, exported, torch.float32, 3)
    assert (
        comparison.passed
        and batch_fault(tmp_path / "out", model, comparison.samples, False) is None
    )


@pytest.mark.parametrize(("base", "decoder"), [("hf", "model.language_model"), ("llm", "model")])
def test_adapters_of_a_qwen2_behind_another_classs_tower_find_their_layers_by_peft(
    make, trained, tmp_path, base, decoder
):
    lora = {"r": 2, "targets": ["llm.layers.*.self_attn.q_proj"]}
    keys = other_llm(make, tmp_path, "qwen2_5_vl")
    checkpoint = trained(**keys, lora=lora, trainable=["projector", "llm.layers.*.lora_*"])
    make_plan(checkpoint.config.changed({"export.format": "peft"}))
    assert run_export(checkpoint.path, "peft", tmp_path / "out", "--base", base) == 0
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    layers = {f"base_model.model.{decoder}.layers.{layer}.self_attn.q_proj" for layer in range(4)}
    assert names.keys() == {f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"}


def altered_images(folder: Path, copy: Path, **settings: Any) -> Path:
    """A copy of the folder whose image processor has other settings; None leaves one out."""
    shutil.copytree(folder, copy)
    content = read_json(copy / "processor_config.json")
    kept = {
        key: value
        for key, value in {**content["image_processor"], **settings}.items()
        if value is not None
    }
    (copy / "processor_config.json").write_text(json.dumps({**content, "image_processor": kept}))
    return copy


@pytest.mark.parametrize(
    ("size", "vision", "cells"),
    [
        ([784, 7840], {"min_positions": 3, "max_positions": 12}, [3, 12]),
        ([784, 7840], {"max_positions": 8, "min_positions": None}, [2, 8]),
        ([1000, 3000], {}, [3, 7]),  # no whole cells
    ],
)
def test_bounds_of_image_tokens_that_trained_go_into_the_export(
    make, trained, tmp_path, size, vision, cells
):
    edges = ("shortest_edge", "longest_edge")
    folder = altered_images(
        make("glm4v")[0], tmp_path / "folder", size=dict(zip(edges, size, strict=True))
    )
    checkpoint = trained(pretrained=str(folder), llm={"dtype": "float32"}, vision=vision)
    bounds = checkpoint.config.model.vision
    assert [bounds.min_positions, bounds.max_positions] == cells
    export(checkpoint, tmp_path / "out")
    images = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert [images.size[edge] for edge in edges] == [2 * count * 14**2 for count in cells]


@pytest.mark.parametrize(
    ("resize", "published", "backend"),
    [("pillow", "Fast", "pil"), ("torchvision", "", "torchvision")],
)
def test_the_backend_that_trained_goes_into_the_export_and_chat_takes_it(
    make, trained, tmp_path, resize, published, backend
):
    kind = f"Glm4vImageProcessor{published}"
    folder = altered_images(make("glm4v")[0], tmp_path / "folder", image_processor_type=kind)
    checkpoint = trained(resize, pretrained=str(folder), llm={"dtype": "float32"})
    export(checkpoint, tmp_path / "out")
    assert load(tmp_path / "out")[1].image_processor.backend == backend


@pytest.mark.parametrize("kind", ["qwen3_vl", "glm4v", "paddleocr_vl"])
def test_bounds_that_a_folder_leaves_out_are_the_classs_own(make, tmp_path, kind):
    frames = 2 if kind == "glm4v" else 1
    folder = altered_images(
        make(kind)[0], tmp_path / "folder", size=None, min_pixels=frames * 900, max_pixels=99_000
    )
    stock, vision = (
        AutoImageProcessor.from_pretrained(folder).size,
        whole_config(folder).model.vision,
    )
    cell = frames * 14**2
    assert vision.min_positions == -(-stock["shortest_edge"] // cell)
    assert vision.max_positions == stock["longest_edge"] // cell


def test_a_least_count_of_image_tokens_above_the_most_is_refused(make, trained):
    with pytest.raises(UserError, match=r"min_positions is 2, above max_positions, 1\. Set both"):
        trained(pretrained=str(make("glm4v")[0]), vision={"max_positions": 1})


def test_a_folder_whose_tokenizer_and_template_have_other_marks_of_images_is_named(
    make, trained, tmp_path
):
    folder = tmp_path / "folder"
    shutil.copytree(make("qwen3_vl")[0], folder)
    content = read_json(folder / "tokenizer_config.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({**content, "image_token": "<image>"}))
    checkpoint = trained(pretrained=str(folder), llm={"dtype": "float32"})
    with pytest.raises(UserError, match=f"{folder}: its processor cannot be used"):
        export(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "hunyuan_vl"}, "has model_type 'hunyuan_vl', but needs one of"),
        ({"model_type": "ernie4_5_vl_moe"}, "has model_type 'ernie4_5_vl_moe', but needs one of"),
        ({"model_type": "qwen2_5_omni"}, "has model_type 'qwen2_5_omni', but needs one of"),
    ],
)
def test_families_with_other_positions_are_refused_by_name(make, tmp_path, changes, words):
    folder = tmp_path / "altered"
    shutil.copytree(make("qwen2_5_vl")[0], folder)
    content = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(UserError, match=words):
        whole_config(folder)


def test_an_llm_that_no_class_computes_with_m_rope_is_refused_by_name(make, tiny):
    config = whole_config(make("qwen2_5_vl")[0]).changed({"model.llm.path": str(tiny / "llm")})
    with pytest.raises(
        UserError,
        match=r"needs M-RoPE, which transformers does not have for llama. Name an LLM of qwen2, ",
    ):
        make_plan(config)
