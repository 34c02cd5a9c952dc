"""Encoders that take images of any size: features of each picture are the stock model's, whole or
in slices.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from scenes import perturb
from stock_encoders import NATIVE_SIZES, QWEN_SIZES, TABLE, WINDOWS
from sweeps import sweep
from transformers import PreTrainedModel

from mmtrain.base.errors import UserError
from mmtrain.facts.encoders import FAMILIES
from mmtrain.facts.shapes import VisionShape, vision_shape
from mmtrain.model import probe
from mmtrain.model.encoder.moonvit import MoonViTConfig, MoonViTModel
from mmtrain.model.encoder.native_tower import NativeTower, Unmerged
from mmtrain.model.encoder.vision import load_vision, made_up_encoder, model_class
from mmtrain.model.encoder.vision_tower import slices_difference

pytestmark = pytest.mark.slow

PATCH = 7
GRIDS = ((2, 3), (1, 4), (2, 3), (3, 1))  # of cells
CUTS = ((0, 0, 1, 2, 4), (0, 2, 4))
KINDS = {
    "naflex": ("Siglip2VisionConfig", {**NATIVE_SIZES, "num_patches": 16}),
    "pixtral": ("PixtralVisionConfig", {**NATIVE_SIZES, "image_size": 56}),
    "video llama": ("VideoLlama3VisionConfig", NATIVE_SIZES),
    "mlcd": ("MLCDVisionConfig", {**NATIVE_SIZES, "image_size": 56}),
    "moonvit": (
        "MoonViTConfig",
        {**NATIVE_SIZES, "init_pos_emb_height": 4, "init_pos_emb_width": 5},
    ),
    "qwen2.5": ("Qwen2_5_VLVisionConfig", {**QWEN_SIZES, **WINDOWS}),
    "qwen3": ("Qwen3VLVisionConfig", {**QWEN_SIZES, **TABLE, "deepstack_visual_indexes": [1]}),
    "qwen3.5": ("Qwen3_5VisionConfig", {**QWEN_SIZES, **TABLE}),
    "qwen2": (
        "Qwen2VLVisionConfig",
        {
            "depth": 4,
            "num_heads": 4,
            "patch_size": 7,
            "embed_dim": 32,
            "hidden_size": 24,
            "mlp_ratio": 2,
        },
    ),
    "glm": ("Glm4vVisionConfig", QWEN_SIZES),
    "glm ocr": ("GlmOcrVisionConfig", QWEN_SIZES),
    "paddleocr": ("PaddleOCRVisionConfig", {**NATIVE_SIZES, "image_size": 28}),
}
GLMS = ("glm", "glm ocr")
NORMED = ("naflex", "video llama", "moonvit", "paddleocr", *GLMS)
MERGES = ("qwen2.5", "qwen3", "qwen3.5", "qwen2")
CASES = [  # encoder, positions a side of a cell, whether its own merger runs
    *((kind, factor, False) for kind in KINDS if kind not in (*MERGES, *GLMS) for factor in (1, 2)),
    *((kind, 2, False) for kind in GLMS),
    *((kind, *case) for kind in MERGES for case in ((2, False), (1, True), (2, True))),
]
DAILY = [
    *(("naflex", 2, False), ("pixtral", 1, False), ("moonvit", 2, False), ("paddleocr", 1, False)),
    *(("glm", 2, False), ("qwen2.5", 2, True), ("qwen3", 2, False), ("qwen2", 1, True)),
]


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """Makes a stock encoder and its folder, once."""

    @functools.cache
    def made(kind: str) -> tuple[Path, PreTrainedModel]:
        name, values = KINDS[kind]
        torch.manual_seed(0)
        if kind == "moonvit":
            model = perturb(MoonViTModel(MoonViTConfig(**values)))
        else:
            config = getattr(transformers, name)(**values)
            # Qwen2-VL's is no AutoModel
            model = perturb(model_class(FAMILIES[config.model_type])(config))
        folder = tmp_path_factory.mktemp("native")
        model.eval().save_pretrained(folder)
        settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return folder, model

    return made


def shape_of(folder: Path, kind: str, factor: int, merger: bool) -> VisionShape:
    return vision_shape(str(folder), -1, kind in NORMED, merger).with_cells(factor)


def tower_of(
    folder: Path, kind: str, factor: int, merger: bool, dtype: torch.dtype = torch.float32
) -> NativeTower:
    shape = shape_of(folder, kind, factor, merger)
    return load_vision(str(folder), -1, dtype, final_norm=kind in NORMED, shape=shape)


def cells_for(tower: NativeTower) -> torch.Tensor:
    count, size = sum(rows * columns for rows, columns in GRIDS), tower.image_size
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def expected(
    kind: str, model: PreTrainedModel, picture: torch.Tensor, merger: bool
) -> torch.Tensor:
    """Features (rows, columns, W) that the stock model makes of one picture (3, H, W), row by
    row.
    """
    rows, columns = (side // PATCH for side in picture.shape[1:])
    patches = torch.nn.functional.unfold(picture[None], PATCH, stride=PATCH)[0].T.view(
        rows, columns, 3, PATCH**2
    )
    if kind == "naflex":
        told = torch.ones(1, rows * columns, dtype=torch.int32), torch.tensor([[rows, columns]])
        found = model(
            patches.transpose(2, 3).reshape(1, rows * columns, -1), *told
        ).last_hidden_state
    elif kind == "pixtral":
        found = model(picture[None], image_sizes=[tuple(picture.shape[1:])]).last_hidden_state
    elif kind == "mlcd":
        found = model(picture[None]).last_hidden_state[:, 1:]
    elif kind == "moonvit":
        # compared with its published code by hand: see `test_numbers_of_moonvit`
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        told = (
            torch.tensor([[1, rows, columns]]),
            places,
            torch.tensor([0, len(places)]),
            len(places),
        )
        found = model(patches.reshape(rows * columns, -1), *told).last_hidden_state
    elif kind == "video llama":
        grid, one = torch.tensor([[1, rows, columns]]), torch.ones(1, dtype=torch.long)
        found = model(
            patches.reshape(rows * columns, -1), grid_thw=grid, merge_sizes=one
        ).last_hidden_state
    elif kind == "paddleocr":
        pixels = patches.reshape(1, rows * columns, 3, PATCH, PATCH)
        found = model(pixels, grid_thw=torch.tensor([[1, rows, columns]])).last_hidden_state
    else:
        frames = patches.unsqueeze(3).expand(-1, -1, -1, 2, -1).flatten(2)
        blocks = (
            frames.view(rows // 2, 2, columns // 2, 2, -1)
            .transpose(1, 2)
            .reshape(rows * columns, -1)
        )
        if kind in GLMS:  # features behind the norm, which go into a convolution
            seen = []
            with model.downsample.register_forward_pre_hook(lambda _, taken: seen.append(taken[0])):
                model(blocks, grid_thw=torch.tensor([[1, rows, columns]]))
            found = (
                seen[0].permute(0, 2, 3, 1).view(rows // 2, columns // 2, 2, 2, -1).transpose(1, 2)
            )
            return found.reshape(rows, columns, -1)
        if not merger:  # `last_hidden_state` of Qwen2.5's stands in the order of its windows
            model.merger = Unmerged(4)
        found = model(blocks, grid_thw=torch.tensor([[1, rows, columns]])).pooler_output
        if merger:
            return found.view(rows // 2, columns // 2, -1)
        found = found.view(rows // 2, columns // 2, 2, 2, -1).transpose(1, 2)
    return found.reshape(rows, columns, -1)


@pytest.mark.parametrize(("kind", "factor", "merger"), sweep(CASES, DAILY))
def test_features_of_each_picture_are_the_stock_models_and_slices_change_no_bit(
    stock, kind, factor, merger
):
    folder, model = stock(kind)
    own, tower = model.merger if kind in MERGES else None, tower_of(folder, kind, factor, merger)
    cells = cells_for(tower)
    features = tower.in_groups(cells, grids=GRIDS)
    assert features.shape == (len(cells), *tower.feature_shape)
    counts, size = [rows * columns for rows, columns in GRIDS], tower.image_size
    for found, of_image, (rows, columns) in zip(
        features.split(counts), cells.split(counts), GRIDS, strict=True
    ):
        lines = [torch.cat(list(line), dim=2) for line in of_image.split(columns)]
        with torch.no_grad():
            wanted = expected(kind, model, torch.cat(lines, dim=1), merger)
        assert torch.cat(lines, dim=1).shape == (3, rows * size, columns * size)
        wanted = wanted.unflatten(0, (rows, factor)).unflatten(2, (columns, factor)).transpose(1, 2)
        wanted = wanted.reshape(rows * columns, factor**2, -1)
        assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    if kind in MERGES:
        model.merger = own
    if kind != "mlcd":  # its class token has no cell
        assert all(slices_difference(tower, cuts, cells, GRIDS) == 0 for cuts in CUTS)


@pytest.mark.parametrize(("kind", "factor", "merger"), sweep(CASES, DAILY))
def test_what_is_planned_is_what_is_loaded(stock, kind, factor, merger):
    folder, _ = stock(kind)
    tower, shape = tower_of(folder, kind, factor, merger), shape_of(folder, kind, factor, merger)
    assert {name: tuple(p.shape) for name, p in tower.global_parameters()} == {
        parameter.name: parameter.shape for parameter in shape.parameters
    }
    assert tower.feature_shape == (shape.features_per_image, shape.feature_width)
    assert tower.hidden_shape == (shape.patches_per_image + shape.prefix_tokens, shape.width)
    if kind != "mlcd":
        made_up = made_up_encoder(str(folder), torch.bfloat16, kind in NORMED, probe.BLOCKS, shape)
        pixels = cells_for(made_up)
        assert all(slices_difference(made_up, cuts, pixels, GRIDS) == 0 for cuts in probe.CUTS)


def test_a_group_is_of_whole_pictures_and_a_large_one_is_a_group_by_itself(stock):
    tower = tower_of(stock("naflex")[0], "naflex", 2, False)
    # of cells of 4 patches; at most 11,664 patches
    grids = [(50, 50), (20, 10), (10, 10), (60, 60), (1, 1)]
    groups = tower.groups(sum(rows * columns for rows, columns in grids), grids)
    assert groups == [(2800, tuple(grids[:3])), (3600, (grids[3],)), (1, (grids[4],))]


def test_bits_of_a_picture_do_not_depend_on_the_others_of_a_group_where_each_is_a_call(stock):
    tower = tower_of(stock("pixtral")[0], "pixtral", 1, False)
    cells = cells_for(tower)
    together = tower.in_groups(cells, grids=GRIDS)
    alone = [
        tower.in_groups(part, grids=[grid])
        for part, grid in zip(cells.split([6, 4, 6, 3]), GRIDS, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_what_an_encoder_does_not_have_is_refused_by_name(stock):
    with pytest.raises(UserError, match=r"model\.vision\.merger: .* has no merger of its own"):
        vision_shape(str(stock("naflex")[0]), -1, merger=True)
    with pytest.raises(UserError, match="has no final norm over its patches"):
        vision_shape(str(stock("qwen3")[0]), -1, final_norm=True)
