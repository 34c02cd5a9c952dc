"""Plans of layouts that cut images into tiles: FLOPs and bytes as torch counts them, and what is
said of an image.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fronts import bytes_of_front, front_of
from scenes import make_config
from sweeps import sweep
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, CLIPVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.data.samples.sample import IMAGE_POSITION
from mmtrain.engine.single_stage import expected_batch
from mmtrain.facts.models import models_of
from mmtrain.layouts.registry import LAYOUTS
from mmtrain.plan.costs import minimal_flops, run_costs, typical_tiling
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan

pytestmark = pytest.mark.slow

POSITIONS = 4  # of a tile: IMAGE_SIZE of tests/scenes.py in patches of 8 pixels
# Of an image: 12 tiles and the whole; LLaVA-NeXT's largest grid; a grid of 12 that is interpolated.
EXPECTED = {
    "tiles": (13, 13 * POSITIONS),
    "anyres": (5, POSITIONS + 4 * 5),
    "anyres_max_9": (13, POSITIONS + 5 * 7),
}


def tiled_config(
    parts: Path, layout: str, *trainable: str, documents: int = 1, **overrides: Any
) -> RunConfig:
    tiles, positions = EXPECTED[layout]
    return make_config(
        parts,
        model__vision={"name": str(parts / "vision"), "layout": layout},
        model__trainable=("projector", *trainable),
        **{
            "data__expected_image_tiles": tiles,
            "data__expected_image_positions": positions,
            "data__expected_text_tokens": 40,
            "data__pack_length": documents * (positions + 40),
            "train__packs_per_step": 2,
            **overrides,
        },
    )


@pytest.mark.parametrize("layout", EXPECTED)
@pytest.mark.parametrize("trainable", [(), ("vision.encoder.layers.1",)])
def test_encoder_and_front_cost_the_flops_that_torch_counts(
    parts: Path, layout: str, trainable: tuple
) -> None:
    config = tiled_config(parts, layout, *trainable)
    models = models_of(config)
    front = front_of(config)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        front.features = front.encode()
        front.forward()
        front.backward()
    costs = run_costs(config, models)
    flops = costs.layers[0].flops
    assert costs.encoder.forward + flops.total == pytest.approx(counted.get_total_flops(), rel=0.02)
    needed = minimal_flops(models, config.model.trainable, costs.work)
    without = minimal_flops(models, config.model.trainable, replace(costs.work, tiles=0))
    assert needed.total - without.total == pytest.approx(counted.get_total_flops(), rel=0.02)


# Of 64 patches a tile, beside which the class token does not count.
LARGE = {"tiles": (13, 13 * 64), "anyres": (5, 64 + 16 * 17), "anyres_max_9": (13, 64 + 20 * 28)}


@pytest.mark.parametrize(
    ("layout", "documents"), sweep(itertools.product(LARGE, (1, 3)), [("tiles", 1), ("anyres", 3)])
)
def test_the_front_holds_the_bytes_that_are_planned(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, documents: int
) -> None:
    # so that several calls are measured, too
    monkeypatch.setattr("mmtrain.facts.chunks.PATCHES_PER_CALL", 16 * 64)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=64, patch_size=8)).save_pretrained(
        tmp_path
    )
    size = {"height": 64, "width": 64}
    CLIPImageProcessorPil(size=size, crop_size=size).save_pretrained(tmp_path)
    tiles, positions = LARGE[layout]
    expected = {"data__expected_image_tiles": tiles, "data__expected_image_positions": positions}
    length = {"data__pack_length": documents * (positions + 40)}
    config = tiled_config(parts, layout, **expected, **length).changed(
        {"model.vision.name": str(tmp_path)}
    )
    planned, front = run_costs(config, models_of(config)), front_of(config)
    encoded, forward, backward = bytes_of_front(front)
    features, layer = planned.encoder.feature_bytes, planned.layers[0]
    assert encoded.end == pytest.approx(features, rel=0.1)
    assert 0.5 * planned.encoder.working_bytes < encoded.peak < 1.2 * planned.encoder.working_bytes
    assert features + forward.end == pytest.approx(layer.kept_bytes, rel=0.15)
    most = features + layer.kept_bytes + layer.forward_working_bytes
    assert 0.6 * most < features + forward.peak < 1.1 * most
    assert backward.peak < 1.1 * layer.backward_working_bytes


def test_a_frozen_encoder_works_on_some_tiles_at_a_time_and_one_that_trains_on_all(
    parts: Path,
) -> None:
    frozen, trained = [], []
    for documents in (100, 400, 800):  # 1,300 tiles are one call, 5,200 two
        config = tiled_config(parts, "tiles", documents=documents)
        frozen.append(run_costs(config, models_of(config)).encoder)
        config = tiled_config(parts, "tiles", "vision.encoder.layers.1", documents=documents)
        trained.append(run_costs(config, models_of(config)).encoder)
    assert trained[2].working_bytes == pytest.approx(8 * trained[0].working_bytes, rel=1e-3)
    assert frozen[0].working_bytes == trained[0].working_bytes
    assert frozen[1].working_bytes < 3 * frozen[0].working_bytes
    more_features = frozen[2].feature_bytes - frozen[1].feature_bytes
    assert frozen[2].working_bytes - frozen[1].working_bytes == pytest.approx(
        more_features, rel=0.01
    )


@pytest.mark.parametrize("layout", EXPECTED)
def test_the_expected_micro_batch_is_of_images_that_come_near_what_is_expected(
    parts: Path, layout: str
) -> None:
    config = tiled_config(parts, layout, documents=2)
    models, batch = models_of(config), expected_batch(config, models_of(config))
    tiles, positions = EXPECTED[layout]
    assert len(batch.tilings) == 2 and len(batch.tiles) == sum(one.tiles for one in batch.tilings)
    assert {one.tiles for one in batch.tilings} == {tiles}
    assert batch.tilings[0].positions == pytest.approx(positions, rel=0.05)
    assert int((batch.input_ids == IMAGE_POSITION).sum()) == sum(
        one.positions for one in batch.tilings
    )
    unsaid = config.changed(
        {"data.expected_image_tiles": None, "data.expected_image_positions": None}
    )
    assert typical_tiling(unsaid.data, models.layout) == models.layout.tiling(640, 480)
    short = config.changed({"data.pack_length": positions - 1})
    assert typical_tiling(short.data, models.layout).positions < positions, (
        "one that a pack has room for"
    )


def test_packs_without_room_for_a_typical_image_are_refused_with_the_remedy(parts: Path) -> None:
    config = tiled_config(parts, "anyres")
    with pytest.raises(
        UserError,
        match=r"data.pack_length: 24 .*layout anyres takes 24. .* e.g. 32 tokens. .*expected_im",
    ):
        make_plan(config.changed({"data.pack_length": 24}))
    with pytest.raises(
        UserError, match=r"data.max_tiles_per_pack: 4, but .* is 5 tiles. Set at least 5"
    ):
        make_plan(config.changed({"data.max_tiles_per_pack": 4}))
    make_plan(config.changed({"data.max_tiles_per_pack": 5, "data.pack_length": 25}))
    little = tiled_config(parts, "anyres", data__pack_length=4, data__expected_image_positions=2)
    with pytest.raises(UserError, match=r"data.pack_length: 4 .*layout anyres takes"):
        make_plan(little)  # no image is as small as that


def test_a_typical_image_has_tiles_and_positions_and_only_where_its_size_decides(
    parts: Path,
) -> None:
    both = {"data.expected_image_tiles": 7, "data.expected_image_positions": 60}
    square = make_config(parts).changed(both)
    with pytest.raises(
        UserError, match=r"_tiles: 7 .*layout square every image is one .*Leave both out"
    ):
        make_plan(square)
    make_plan(square.changed(dict.fromkeys(both)))
    unset = dict.fromkeys(("data__expected_image_tiles", "data__expected_image_positions"))
    for key, value in both.items():
        with pytest.raises(
            ValueError, match=r"data\.expected_image_.*: null, but .* is set, .*leave both out"
        ):
            tiled_config(parts, "anyres", **{**unset, key.replace(".", "__"): value})


def test_a_plan_says_what_it_expects_of_an_image_and_whether_the_largest_fits(parts: Path) -> None:
    config = tiled_config(parts, "anyres_max_9", data__expected_text_tokens=1, data__pack_length=45)
    plan = make_plan(config)
    most = plan.image.most_positions
    assert plan.as_dict()["image"] == {
        **{"layout": "anyres_max_9", "tiles": 13, "positions": 39},
        **{"most_tiles": 37, "most_positions": most, "fits": False},
    }
    text = " ".join(" ".join(render(plan)).split())
    assert (
        f"an image (anyres_max_9): 13 tiles and 39 positions expected, at most 37 and {most}; "
        "a sample with" in text
    )
    roomy = make_plan(config.changed({"data.pack_length": most + 1}))
    assert roomy.image.fits and "no pack" not in " ".join(render(roomy))
    assert not make_plan(
        config.changed({"data.pack_length": most + 1, "data.max_tiles_per_pack": 13})
    ).image.fits
    square = make_plan(make_config(parts))
    assert square.image is None and "an image" not in " ".join(render(square))


@pytest.mark.parametrize(
    ("layout", "tile_size", "side"),
    [("tiles", 32, 4), ("anyres", 336, 24), ("anyres_max_9", 384, 27)],
)
def test_no_image_takes_more_than_the_most_positions(
    layout: str, tile_size: int, side: int
) -> None:
    images = LAYOUTS[layout](side**2, tile_size)
    draw = random.Random(0)
    sizes = [(draw.randint(20, 2500), draw.randint(20, 2500)) for _ in range(2000)]
    sizes += [
        (width, height) for height, width in images.image_settings.get("image_grid_pinpoints", ())
    ]
    found = [images.tiling(*size) for size in sizes]
    assert (
        0.98 * images.most_positions < max(one.positions for one in found) <= images.most_positions
    )
    assert max(one.tiles for one in found) <= images.most_tiles
