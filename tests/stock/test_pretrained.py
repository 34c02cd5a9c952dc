"""A run begins with a whole multimodal model, or takes its LLM or its encoder: folders that
transformers has saved.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import whole_models
import yaml
from families import family_config
from json_files import read_json, write_json
from safetensors.torch import load_file, save_file
from sweeps import sweep
from torch.nn.functional import cross_entropy
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from untrained_runs import export, load_stock, make_checkpoint
from whole_models import MROPE, VISION, WHOLES, save_its_parts, save_whole

import mmtrain
from mmtrain.base.errors import UserError
from mmtrain.config.load import dump_config
from mmtrain.config.schema import RunConfig
from mmtrain.facts.families import _DEFAULTS
from mmtrain.facts.models import models_of
from mmtrain.facts.shapes import llm_shape
from mmtrain.launching.machine import plan_for_here
from mmtrain.model.llm.language import load_decoder_layers
from mmtrain.model.llm.tiny import draw_scales, tiny_model
from mmtrain.model.stage import build_stage
from mmtrain.model.trained.projector import read_projector

GRIDS = tuple((height, width) for height, width in whole_models.GRIDS)
SQUARE = {"final_norm": False, "layout": "square"}
MLP = {"type": "mlp2x_gelu", "factor": None}
COMPLETED = {  # class -> keys of model.vision, of model.projector, data.image_fit
    "llava": ({"select_layer": -2, **SQUARE}, MLP, "pad"),
    "aya_vision": (
        {"select_layer": -2, **SQUARE},
        {"type": "shuffle_swiglu", "factor": 2},
        "resize",
    ),
    "idefics3": (
        {"select_layer": -1, "final_norm": True, "layout": "idefics3"},
        {"type": "shuffle_linear", "factor": 2},
        "resize",
    ),
    "internvl": (
        {"select_layer": -1, **SQUARE},
        {"type": "shuffle_mlp2x_gelu", "factor": 2},
        "resize",
    ),
    "perception_lm": (
        {"select_layer": -1, "final_norm": True, "layout": "square"},
        {"type": "mlp2x_gelu_pool", "factor": 2},
        "resize",
    ),
    "llava_next": (
        {"select_layer": -2, "final_norm": False, "layout": "anyres", "pinpoints": GRIDS},
        MLP,
        None,
    ),
    "llava_onevision": (
        {"select_layer": -1, "final_norm": False, "layout": "anyres_max_9", "pinpoints": GRIDS},
        MLP,
        None,
    ),
    "aya_tiles": (
        {"select_layer": -2, "final_norm": False, "layout": "tiles", "max_tiles": 6},
        {"type": "shuffle_swiglu", "factor": 2},
        None,
    ),
}
COMPLETED["smolvlm"] = COMPLETED["idefics3"]
LONGEST = {
    "select_layer": -1,
    "final_norm": False,
    "layout": "native",
    "longest_edge": 56,
    "max_positions": None,
}
BOUNDED = {
    "select_layer": -1,
    "final_norm": True,
    "layout": "native",
    "min_positions": 2,
    "max_positions": 20,
}
MERGED = {**BOUNDED, "final_norm": False, "merger": True}
COMPLETED |= {
    "pixtral": (LONGEST, MLP, None),
    "mistral3": (LONGEST, {"type": "norm_merge_mlp2x", "factor": 2}, None),
    "lighton_ocr": (LONGEST, {"type": "norm_merge_mlp2x", "factor": 2}, None),
    "lfm2_vl": (BOUNDED, {"type": "shuffle_mlp2x_gelu", "factor": 2}, None),
    "lfm2_patches": (BOUNDED, MLP, None),
    "hyperclovax": (MERGED, {"type": "linear", "factor": None}, None),
    "hyperclovax3": (MERGED, {"type": "linear", "factor": None}, None),
    "video_llama_3": (BOUNDED, MLP, None),
    "exaone4_5": (MERGED | {"merger": False}, {"type": "patch_merger_rms", "factor": 2}, None),
}


_CELLS = {"select_layer": -1, "final_norm": False, "min_positions": 2, "max_positions": 20}
_QWEN = {**_CELLS, "layout": "qwen_vl"}
_GLM = {**_CELLS, "layout": "glm_v", "final_norm": True}
COMPLETED |= {
    **dict.fromkeys(
        ("qwen2_vl", "qwen3_5", "qwen3_5_moe"), (_QWEN, {"type": "qwen_merger", "factor": 2}, None)
    ),
    "qwen2_5_vl": (_QWEN, {"type": "patch_merger_rms", "factor": 2}, None),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"), (_QWEN, {"type": "qwen_merger_deepstack", "factor": 2}, None)
    ),
    **dict.fromkeys(
        ("glm4v", "glm46v", "glm4v_moe", "glm_ocr"),
        (_GLM, {"type": "glm_merger", "factor": 2, "width": 48}, None),
    ),
    "glm_ocr": (_GLM, {"type": "glm_merger", "factor": 2}, None),
    "paddleocr_vl": (
        {**_GLM, "layout": "paddleocr_vl"},
        {"type": "patch_merger", "factor": 2},
        None,
    ),
}
DAILY = ("llava", "llava_onevision", "pixtral", "lfm2_vl", "qwen3_vl")


class Made(NamedTuple):
    folder: Path
    model: PreTrainedModel


@pytest.fixture(scope="module")
def make(make_tiny, tmp_path_factory) -> Callable[[str], Made]:
    """Makes a whole model's folder, once; to be read."""

    @functools.cache
    def made(kind: str) -> Made:
        folder = tmp_path_factory.mktemp(kind)
        return Made(folder, save_whole(kind, folder, make_tiny.make_tokenizer()))

    return made


@pytest.fixture
def configured(tiny, tmp_path) -> Callable[..., RunConfig]:
    """A configuration whose model says `from` and what is given, with the tiny shards."""

    def load(whole: Path, *overrides: str, **model: Any) -> RunConfig:
        content = yaml.safe_load((tiny / "config.yaml").read_text())
        content["parallel"]["pipeline"] = 1
        content["model"] = {"pretrained": str(whole), "llm": {"dtype": "float32"}, **model}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
        return mmtrain.load_config(tmp_path / "config.yaml", overrides)

    return load


@pytest.mark.parametrize("kind", sweep(COMPLETED, DAILY))
def test_from_says_what_the_keys_say_and_an_export_has_the_same_bits(
    make, configured, tmp_path, kind
):
    whole = make(kind)
    config = configured(whole.folder)
    vision, projector, fit = COMPLETED[kind]
    named = (config.model.llm.path, config.model.vision.name, config.model.projector.init_from)
    assert named == (str(whole.folder),) * 3 and config.model.pretrained is None
    assert config.model.vision.model_dump(include=set(vision)) == vision
    assert config.model.projector.model_dump(include={*projector, "width"}) == {
        "width": None,
        **projector,
    }
    assert config.data.image_fit == fit
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert mmtrain.load_config(tmp_path / "again.yaml") == config
    plan_for_here(config)
    trained = read_projector(str(whole.folder), models_of(config).connector)
    checkpoint = make_checkpoint(
        tmp_path / "run", config, {f"projector.{name}": t for name, t in trained.items()}
    )
    export(checkpoint, tmp_path / "out")
    again = load_stock(tmp_path / "out")
    ours, theirs = again.state_dict(), whole.model.state_dict()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )
    for key in (
        "image_token_id",
        "tie_word_embeddings",
        "scale_factor",
        "downsample_factor",
        "downsample_ratio",
        "spatial_merge_size",
        "projector_use_layernorm",
        "projector_pooling_ratio",
        "vision_use_cls_token",
        "vision_feature_select_strategy",
        "image_grid_pinpoints",
        "vision_aspect_ratio",
    ):
        assert getattr(again.config, key, None) == getattr(whole.model.config, key, None), key


# their LLMs have no own class
@pytest.mark.parametrize("kind", sweep(sorted(COMPLETED.keys() - MROPE.keys()), DAILY))
def test_a_run_begins_with_the_tensors_of_the_same_model_in_three_parts(
    make, configured, tmp_path, kind
):
    whole = make(kind)
    save_its_parts(kind, whole.model, tmp_path)
    config = configured(whole.folder)
    names = {
        "llm.path": "llm",
        "vision.name": "vision",
        "projector.init_from": "projector.safetensors",
    }
    in_parts = config.changed({f"model.{key}": str(tmp_path / name) for key, name in names.items()})
    ours, theirs = held(config), held(in_parts)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )
    if models_of(config).layout_class.has_newlines:
        assert torch.equal(ours["projector.image_newline"], whole.model.model.image_newline)


@pytest.mark.parametrize(
    ("said", "fit"),
    [
        ({"do_pad": False, "size": {"shortest_edge": 28}, "do_center_crop": True}, "center_crop"),
        ({"do_pad": False, "size": 28, "crop_size": 28, "do_center_crop": True}, "center_crop"),
        ({"do_pad": False, "do_center_crop": False}, "resize"),
    ],
)
def test_how_an_image_becomes_a_square_is_read_of_its_processor(
    make, configured, tmp_path, said, fit
):
    folder = altered(
        make("llava").folder, tmp_path, {"image_processor": said}, "processor_config.json"
    )
    assert configured(folder).data.image_fit == fit


def test_that_smolvlms_tiles_are_left_aside_is_said(make, configured, tmp_path, logged):
    tiles = {"do_image_splitting": True, "size": {"longest_edge": 112}}
    folder = altered(make("smolvlm").folder, tmp_path, tiles, "preprocessor_config.json")
    assert configured(folder).data.image_fit == "resize"
    assert (
        "cuts images into tiles (do_image_splitting); mmtrain trains on one square of 28 pixels"
        in logged[-1]
    )


# ---- the LLM alone, the encoder alone


@pytest.mark.parametrize("kind", sweep(WHOLES, DAILY))
def test_the_llm_in_a_whole_model_is_staged_as_the_whole_computes_text(make, kind):
    folder = make(kind).folder
    stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(300, (1, 24), generator=draw)
    slices = [
        load_decoder_layers(str(folder), a, b, embedding=a == 0, head=b == 4, dtype=torch.float32)
        for a, b in ((0, 2), (2, 4))
    ]
    named = {name: tuple(p.shape) for part in slices for name, p in part.global_parameters()}
    shape = llm_shape(str(folder))
    assert {
        p.name: p.shape for p in (*shape.front, *itertools.chain(*shape.decoder), *shape.head)
    } == {
        "llm.head.weight": (400, 64),
        **named,
    }
    assert shape.tied == stock.config.tie_word_embeddings
    inputs = stock.get_input_embeddings()(ids).detach().requires_grad_()
    logits = stock(inputs_embeds=inputs).logits[0]
    weights = torch.randn(logits.shape, generator=draw)
    (wanted,) = torch.autograd.grad((logits * weights).sum(), inputs)
    hidden = own = slices[0].embed(ids).detach().requires_grad_()
    assert torch.equal(own, inputs)
    for part in slices:
        hidden = part(hidden, torch.arange(24)[None])
    found = slices[-1].logits(hidden[0])
    (gradient,) = torch.autograd.grad((found * weights).sum(), own)
    assert (found - logits).abs().max() <= 1e-6 * logits.abs().max()
    assert (gradient - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("family", ["falcon_h1", "granite", "minicpm3"])
def test_an_llm_in_a_llava_has_the_scales_that_the_llava_computes_with(tmp_path, family):
    text = tiny_model(draw_scales(family_config(family, num_hidden_layers=2), 0), 0).config
    config = CONFIG_MAPPING["llava"](
        text_config=text, vision_config={"model_type": "clip_vision_model", **VISION}
    )
    stock = whole_models.perturb(AutoModelForImageTextToText.from_config(config)).eval()
    stock.save_pretrained(tmp_path)
    part = load_decoder_layers(str(tmp_path), 0, 2, embedding=True, head=True, dtype=torch.float32)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        logits = part.logits(part(part.embed(ids), ids)[0])
        theirs = stock(input_ids=ids, labels=ids).loss
    assert abs(cross_entropy(logits[:-1], ids[0, 1:]) - theirs) <= 1e-6 * theirs


def test_names_of_transformers_in_memory_are_read_too_and_shards(make, configured, tmp_path):
    whole = make("llava")
    shutil.copytree(whole.folder, tmp_path / "memory")
    tensors = {name: tensor.contiguous() for name, tensor in whole.model.state_dict().items()}
    save_file(tensors, tmp_path / "memory" / "model.safetensors")
    assert any(name.startswith("model.language_model.") for name in tensors)
    shutil.copytree(
        whole.folder, tmp_path / "shards", ignore=shutil.ignore_patterns("*.safetensors")
    )
    whole.model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    index = tmp_path / "shards" / "model.safetensors.index.json"
    write_json(index, {"weight_map": read_json(index)["weight_map"]})
    unquantised = altered(whole.folder, tmp_path, {"quantization_config": {}})
    unquantised = altered(unquantised, tmp_path, {"text_config": {"quantization_config": {}}})
    folders = (whole.folder, tmp_path / "memory", tmp_path / "shards", unquantised)
    built = [held(configured(folder)) for folder in folders]
    for other in built[1:]:
        assert other.keys() == built[0].keys() and all(
            torch.equal(other[name], t) for name, t in built[0].items()
        )


def held(config: RunConfig) -> dict[str, torch.Tensor]:
    (rank,) = plan_for_here(config.changed({"parallel.pipeline": 1})).ranks
    return dict(build_stage(config, rank.stages[0]).global_parameters())


def test_a_whole_models_encoder_serves_another_llm(make, tiny, configured):
    config = configured(make("llava").folder)
    other = config.changed({"model.llm.path": str(tiny / "llm"), "model.projector.init_from": None})
    vision = {name: t for name, t in held(config).items() if name.startswith("vision.")}
    found = held(other)
    assert vision and all(torch.equal(found[name], tensor) for name, tensor in vision.items())


def test_what_published_files_leave_out_is_what_transformers_takes(make, tmp_path):
    for family, defaults in _DEFAULTS.items():
        stock = CONFIG_MAPPING[family]()
        assert {key: getattr(stock, key) for key in defaults} == defaults
    folder = altered(make("llava").folder, tmp_path, {"text_config": {"num_attention_heads": None}})
    assert llm_shape(str(folder)).heads == 32


# ---- what is refused


def altered(folder: Path, tmp_path: Path, changes: dict, file: str = "config.json") -> Path:
    """A copy with these changes, those of a section within it; None takes a key out."""
    made = shutil.copytree(folder, tmp_path / f"altered{len(list(tmp_path.glob('altered*')))}")
    content = read_json(made / file) if (made / file).exists() else {}
    for key, value in changes.items():
        section, new = (
            (content.setdefault(key, {}), value)
            if isinstance(value, dict)
            else (content, {key: value})
        )
        section.update(new)
        for gone in [name for name, one in section.items() if one is None and name in new]:
            del section[gone]
    write_json(made / file, content)
    return made


REFUSED = [  # class, file, changes, what is said
    (
        "llava",
        "config.json",
        {"model_type": "gemma3"},
        "has model_type 'gemma3', but needs one of llava",
    ),
    (
        "llava",
        "config.json",
        {"vision_feature_layer": [-2, -5]},
        "vision_feature_layer [-2, -5]; needed is one block",
    ),
    ("llava", "config.json", {"vision_feature_layer": -4}, "1 to 3 or -3 to -1"),
    (
        "llava",
        "config.json",
        {"vision_feature_select_strategy": "full"},
        "'full'; needed is default",
    ),
    (
        "aya_vision",
        "config.json",
        {"vision_feature_select_strategy": "default"},
        "'default'; needed is full",
    ),
    (
        "llava",
        "config.json",
        {"projector_hidden_act": "relu"},
        "projector_hidden_act relu, but this run has gelu",
    ),
    (
        "llava",
        "config.json",
        {"quantization_config": {"quant_method": "awq"}},
        "its weights are quantised (awq)",
    ),
    (
        "llava",
        "config.json",
        {"vision_config": {"model_type": "lfm3_vl_vision"}},
        "has model_type lfm3_vl_vis",
    ),
    (
        "pixtral",
        "processor_config.json",
        {"image_break_token": None},
        "image_break_token '[IMG_BREAK]'; ne",
    ),
    (
        "pixtral",
        "processor_config.json",
        {"image_processor": {"size": {"height": 9, "width": 9}}},
        "needed is a lon",
    ),
    (
        "mistral3",
        "config.json",
        {"multimodal_projector_bias": True},
        "multimodal_projector_bias True, but this run",
    ),
    (
        "mistral3",
        "config.json",
        {"spatial_merge_size": 9},
        "spatial_merge_size 9; needed is a factor of 2, 3, 4",
    ),
    (
        "lfm2_vl",
        "config.json",
        {"projector_hidden_size": 80},
        "projector_hidden_size 80; needed is the",
    ),
    (
        "lfm2_vl",
        "config.json",
        {"projector_use_layernorm": False},
        "projector_use_layernorm False; needed is True",
    ),
    (
        "lfm2_vl",
        "preprocessor_config.json",
        {"downsample_factor": 4},
        "downsample_factor 4; needed is 2. Corr",
    ),
    (
        "lfm2_vl",
        "preprocessor_config.json",
        {"encoder_patch_size": None},
        "encoder_patch_size 16; needed is 7. Corr",
    ),
    (
        "lfm2_vl",
        "preprocessor_config.json",
        {"min_image_tokens": -1},
        "size [-1, 20]; needed is a minimum and a",
    ),
    (
        "lfm2_vl",
        "preprocessor_config.json",
        {"max_image_tokens": 1},
        "[2, 1]; needed is a minimum and a",
    ),
    ("lfm2_vl", "config.json", {"vision_config": {"num_patches": 9}}, "in the weights, but (9, "),
    (
        "pixtral",
        "config.json",
        {"vision_config": {"patch_size": [7, 7]}},
        "does not say the size of its patches",
    ),
    (
        "pixtral",
        "config.json",
        {"vision_config": {"head_dim": 6}},
        "of 6 features, which do not make up its hidden",
    ),
    (
        "hyperclovax",
        "config.json",
        {"vision_config": {"num_heads": 3}},
        "3 attention heads, which do not divide it",
    ),
    (
        "hyperclovax",
        "config.json",
        {"vision_config": {"window_size": 13}},
        "window_size 13; needed are at least 14",
    ),
    (
        "hyperclovax",
        "config.json",
        {"vision_config": {"fullatt_block_indexes": [99]}},
        "[99]; needed are numbers of",
    ),
    (
        "hyperclovax",
        "preprocessor_config.json",
        {"patch_size": 14},
        "patch_size 14; needed is 7. Corr",
    ),
    (
        "hyperclovax",
        "preprocessor_config.json",
        {"merge_size": 1},
        "merge_size 1; needed is 2. Corr",
    ),
    (
        "hyperclovax",
        "preprocessor_config.json",
        {"size": {"longest_edge": 195}},
        "[392, 195]; needed is a minimum",
    ),
    (
        "hyperclovax",
        "config.json",
        {"text_config": {"logits_scaling": 8.0}},
        "text_config.logits_scaling 8.0; needed",
    ),
    ("mistral3", "processor_config.json", {"patch_size": 9}, "patch_size 9; needed is 7. Corr"),
    (
        "mistral3",
        "processor_config.json",
        {"spatial_merge_size": 3},
        "spatial_merge_size 3; needed is 2. Corr",
    ),
    (
        "lfm2_vl",
        "tokenizer_config.json",
        {"extra_special_tokens": {"image_start_token": None}},
        "'<|image_start|>'",
    ),
    ("llava", "config.json", {"text_config": {"model_type": "mamba"}}, "recurrent layers"),
    (
        "llava",
        "config.json",
        {"text_config": {"vocab_size": 10**9}},
        "vocab_size 1000000000, but no tensor is",
    ),
    (
        "llava",
        "config.json",
        {"vision_config": {"num_hidden_layers": 2}},
        "says 2 blocks, but the weights 3",
    ),
    (
        "idefics3",
        "config.json",
        {"vision_config": {"num_hidden_layers": None}},
        "says 12 blocks, but the weights",
    ),
    (
        "llava",
        "processor_config.json",
        {"image_processor": {"do_rescale": False}},
        "do_rescale is false, so its",
    ),
    (
        "llava",
        "processor_config.json",
        {"image_processor": {"size": {"height": 14, "width": 14}}},
        "needed is 28",
    ),
    ("llava", "processor_config.json", {"image_processor": None}, "no preprocessor_config.json"),
    (
        "aya_vision",
        "processor_config.json",
        {"image_processor": {"max_patches": 12}},
        "max_patches 12; needed is one",
    ),
    (
        "aya_vision",
        "processor_config.json",
        {"tile_token": "TILE"},
        "says tile_token 'TILE'; needed is an empty text",
    ),
    (
        "aya_vision",
        "processor_config.json",
        {"end_of_img_token": None},
        "says end_of_img_token '<|END_OF_IMG|>'",
    ),
    (
        "aya_tiles",
        "processor_config.json",
        {"start_of_img_token": None},
        "says start_of_img_token '<|START_OF_IMG|>'",
    ),
    (
        "aya_tiles",
        "processor_config.json",
        {"image_processor": {"min_patches": 2}},
        "fit [6, 2, 'resize']; needed",
    ),
    (
        "aya_tiles",
        "processor_config.json",
        {"tile_token": "T"},
        "max_patches 6; needed is one square",
    ),
    (
        "llava_next",
        "config.json",
        {"image_grid_pinpoints": "(1x1)"},
        "image_grid_pinpoints '(1x1)'; needed is up to",
    ),
    (
        "llava_next",
        "config.json",
        {"image_grid_pinpoints": [[28, 56], 5]},
        "needed is up to 400 pairs of height",
    ),
    (
        "llava_next",
        "config.json",
        {"image_grid_pinpoints": [[28, 57]]},
        "says image_grid_pinpoints ((28, 56",
    ),
    (
        "llava_next",
        "config.json",
        {"image_grid_pinpoints": [[28, 56]]},
        "its image processor says image_grid",
    ),
    ("llava_next", "config.json", {"image_grid_pinpoints": None}, "needed is ((336, 672), (672, 3"),
    (
        "llava_next",
        "processor_config.json",
        {"image_processor": {"size": {"shortest_edge": 56}}},
        "needed is 28",
    ),
    (
        "llava_onevision",
        "config.json",
        {"vision_aspect_ratio": "anyres_max_4"},
        "vision_aspect_ratio 'anyres_max_4'",
    ),
    (
        "aya_vision",
        "config.json",
        {"downsample_factor": 7},
        "downsample_factor 7; needed is a factor of 2, 3, 4",
    ),
    (
        "aya_vision",
        "config.json",
        {"adapter_layer_norm_eps": 1e-5},
        "1e-05, but this run has 1e-06",
    ),
    (
        "idefics3",
        "preprocessor_config.json",
        {"max_image_size": {"longest_edge": 364}},
        "needed is 28",
    ),
    (
        "internvl",
        "config.json",
        {"downsample_ratio": 0.3},
        "downsample_ratio 0.3; needed is a factor of 2, 4",
    ),
    (
        "internvl",
        "preprocessor_config.json",
        {"max_patches": None},
        "max_patches 12; needed is one",
    ),
    (
        "internvl",
        "tokenizer_config.json",
        {"start_image_token": "<img>"},
        "says start_image_token '<img>'",
    ),
    (
        "perception_lm",
        "preprocessor_config.json",
        {"vision_input_type": "thumb+tile"},
        "vision_input_type 'thumb",
    ),
    (
        "perception_lm",
        "config.json",
        {"vision_use_cls_token": False},
        "says vision_use_cls_token False",
    ),
]


@pytest.mark.parametrize(("kind", "file", "changes", "said"), REFUSED)
def test_what_mmtrain_would_compute_otherwise_is_refused_by_name(
    make, configured, tmp_path, kind, file, changes, said
):
    folder = altered(make(kind).folder, tmp_path, changes, file)
    with pytest.raises(UserError) as raised:
        build_stage(config := configured(folder), plan_for_here(config).ranks[0].stages[0])
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)


def test_bounds_in_pixels_are_read_as_transformers_reads_them_and_what_is_rounded_is_told(
    make, configured, tmp_path, logged
):
    changes = {"min_pixels": 1000, "max_pixels": 14 * 14 * 9}
    folder = altered(make("hyperclovax").folder, tmp_path, changes, "preprocessor_config.json")
    stock = AutoImageProcessor.from_pretrained(folder).size
    assert (stock["shortest_edge"], stock["longest_edge"]) == (1000, 14 * 14 * 9)
    vision = configured(folder).model.vision
    assert (vision.min_positions, vision.max_positions) == (6, 9)
    assert "1,000 to 1,764 pixels, which are no whole image tokens (196 pixels)" in "".join(logged)


def test_the_file_that_transformers_prefers_says_how_images_are_made(make, configured, tmp_path):
    folder = altered(make("lfm2_vl").folder, tmp_path, {})
    settings = read_json(folder / "preprocessor_config.json")
    other = {"image_processor": {**settings, "max_image_tokens": 9}}
    write_json(folder / "processor_config.json", other)
    assert AutoImageProcessor.from_pretrained(folder).max_image_tokens == 9
    assert configured(folder).model.vision.max_positions == 9


def test_grids_of_null_are_the_classes_own_as_in_transformers(make, configured, tmp_path):
    folder = altered(make("llava_next").folder, tmp_path, {})
    content = read_json(folder / "config.json")
    write_json(folder / "config.json", {**content, "image_grid_pinpoints": None})
    with pytest.raises(
        UserError, match=r"its image processor .* needed is \(\(336, 672\), \(672, 3"
    ):
        configured(folder)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("language_model.", "it lacks the weights of an LLM"),
        ("vision_tower.", "it lacks the weights of an encoder"),
        ("multi_modal_projector.", "its weights hold no connector"),
    ],
)
def test_weights_that_lack_a_part_or_hold_it_twice_are_refused(
    make, configured, tmp_path, part, said
):
    folder = shutil.copytree(make("llava").folder, tmp_path / "whole")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if not name.startswith(part)},
        folder / "model.safetensors",
    )
    with pytest.raises(UserError, match=said):
        configured(folder)
    twice = {f"model.{name}": t.clone() for name, t in tensors.items() if name.startswith(part)}
    save_file(tensors | twice, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"twice|two tensors for one parameter"):
        build_stage(config := configured(folder), plan_for_here(config).ranks[0].stages[0])


@pytest.mark.parametrize(
    ("part", "dtype"), [("language_model.", torch.int8), ("vision_tower.", torch.float8_e4m3fn)]
)
def test_weights_that_are_codes_are_refused_by_their_name(make, configured, tmp_path, part, dtype):
    folder = shutil.copytree(make("llava").folder, tmp_path / "whole")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.startswith(part))
    save_file(tensors | {name: tensors[name].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(
        UserError, match=rf"{re.escape(name)} is (stored as I8|F8_E4M3 .* is no matrix of codes)"
    ):
        configured(folder)


def places(content: dict, *above: str) -> Iterator[tuple[str, ...]]:
    for key, value in content.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, *above, key)


@pytest.mark.parametrize("file", ["config.json", "processor_config.json"])
@pytest.mark.parametrize(
    "kind", sweep(["aya_vision", "hyperclovax", "lfm2_vl", "pixtral"], ["pixtral"])
)
def test_nonsense_in_any_place_of_its_files_is_one_line_or_does_not_matter(
    make, configured, tmp_path, kind, file
):
    folder = shutil.copytree(make(kind).folder, tmp_path / "whole")
    if not (folder / file).exists():
        file = "preprocessor_config.json"
    sound = (folder / file).read_text()
    draw = random.Random(0)
    all_places = sorted(places(json.loads(sound)))
    for place in draw.sample(all_places, min(20, len(all_places))):
        content = inner = json.loads(sound)
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = draw.choice(
            ["x", -1, 10**30, [], {}, None, 0.5, {"a": {"b": [1]}}, [[]]]
        )
        write_json(folder / file, content)
        try:
            plan_for_here(configured(folder))
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("stored", "model", "dtype", "is_told"),
    [
        ("float32", {}, "float32", False),
        ("float32", {"llm": {"dtype": "bfloat16"}}, "bfloat16", False),
        ("float16", {}, "bfloat16", True),
    ],
)
def test_a_folder_trains_in_its_own_type_unless_the_configuration_says_another(
    make, configured, tmp_path, logged, stored, model, dtype, is_told
):
    whole, folder = make("llava"), tmp_path / "whole"
    shutil.copytree(whole.folder, folder)
    AutoModelForImageTextToText.from_pretrained(
        folder, dtype=getattr(torch, stored)
    ).save_pretrained(folder)
    config = configured(folder, **{"llm": {}, **model})
    assert (config.model.llm.dtype, config.model.vision_dtype) == (dtype, dtype)
    assert (
        f"model.pretrained: {folder}: its float16 is rounded to bfloat16" in "".join(logged)
    ) == is_told


def test_a_key_given_by_hand_may_repeat_the_folder_and_not_contradict_it(make, configured):
    folder = make("llava").folder
    assert configured(
        folder, "model.vision.select_layer=-2", f"model.llm.path={folder}"
    ) == configured(folder)
    for given, said in (
        (
            "model.vision.select_layer=-1",
            "model.vision.select_layer is -1 in this configuration, but -2 in that folder",
        ),
        ("model.llm.path=other", "model.llm.path is 'other' in this configuration"),
        (
            "model.projector.init_from=null",
            "model.projector.init_from is null in this configuration",
        ),
        (
            "data.image_fit=center_crop",
            "data.image_fit is 'center_crop' in this configuration, but 'pad' in that folder",
        ),
    ):
        with pytest.raises(UserError) as raised:
            configured(folder, given)
        assert said in str(raised.value) and f"model.pretrained: {folder}" in str(raised.value)
    with pytest.raises(
        UserError, match=r"model\.vision: null, but model\.pretrained names a model with an encoder"
    ):
        configured(folder, vision=None)
    with pytest.raises(
        UserError, match=r"model\.pretrained: \[5\] is not allowed; it should be a valid string"
    ):
        configured(folder, "model.pretrained=[5]")
    with pytest.raises(UserError, match=r"model\.pretrained: is empty\. Name"):
        configured(folder, "model.pretrained=")
