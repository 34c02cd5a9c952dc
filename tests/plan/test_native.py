"""Plans of images in their own shape: FLOPs and bytes as torch counts them, whichever encoder they
go through.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from fronts import bytes_of_front, front_of
from scenes import NATIVE, make_config, native_keys, save_native_vision, save_parts
from sweeps import sweep
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.base.errors import UserError
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.plan.costs import run_costs
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan

pytestmark = pytest.mark.slow

BLOCKS = {"naflex": "vision.encoder.layers.2", "qwen": "vision.blocks.2"}
CASES = sweep(itertools.product(NATIVE, (False, True)), [("naflex", False), ("qwen", True)])


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    save_parts(folder)
    for kind in NATIVE:
        save_native_vision(folder / kind, kind, width=64)
    return folder


def native_config(
    parts: Path, kind: str, *trainable: str, positions: int = 108, **overrides: Any
) -> RunConfig:
    keys = native_keys(parts / kind, kind)
    keys["model__vision"] |= {"min_positions": 4, "max_positions": 400}
    expected = {
        "data__expected_image_tiles": positions,
        "data__expected_image_positions": positions,
    }
    return make_config(
        parts,
        **keys,
        model__trainable=("projector", *trainable),
        **{
            **expected,
            "data__expected_text_tokens": 24,
            "data__pack_length": 4 * (positions + 24),
            **overrides,
        },
    )


@pytest.mark.parametrize(("kind", "trains"), CASES)
def test_encoder_and_front_cost_the_flops_that_torch_counts(parts, kind, trains):
    config = native_config(parts, kind, *([BLOCKS[kind]] if trains else []))
    models, front = models_of(config), front_of(config)
    assert {tiling.positions for tiling in front.batch.tilings} == {108}
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        front.features = front.encode()
        front.forward()
        front.backward()
    costs = run_costs(config, models)
    planned = costs.encoder.forward + costs.layers[0].flops.total
    assert planned == pytest.approx(counted.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(("kind", "trains"), CASES)
def test_the_front_holds_the_bytes_that_are_planned(parts, kind, trains):
    config = native_config(parts, kind, *([BLOCKS[kind]] if trains else []), positions=300)
    planned, front = run_costs(config, models_of(config)), front_of(config)
    encoded, forward, backward = bytes_of_front(front)
    features, layer = planned.encoder.feature_bytes, planned.layers[0]
    kept = planned.encoder.kept_bytes if trains else features
    assert encoded.end == pytest.approx(kept, rel=0.1)
    assert (
        0.5 * planned.encoder.working_bytes
        < encoded.peak
        < 1.2 * planned.encoder.working_bytes + kept * trains
    )
    assert forward.peak < 1.1 * (layer.kept_bytes + layer.forward_working_bytes)
    assert backward.peak < 1.1 * layer.backward_working_bytes


def test_attention_in_the_encoder_is_planned_by_the_image_of_an_average_tile(parts):
    flat = native_config(parts, "naflex")
    uneven = flat.changed({"data.expected_attended_tiles": 400})
    plain, more = (
        run_costs(config, models_of(config)).encoder.forward for config in (flat, uneven)
    )
    tokens, width, blocks = 4 * 4 * 108, 64, 3  # of 4 documents
    assert more - plain == pytest.approx(blocks * 4 * tokens * width * 4 * (400 - 108), rel=0.01)
    with pytest.raises(
        UserError, match=r"expected_attended_tiles: 9, .*layout square the encoder sees each tile"
    ):
        make_plan(make_config(parts).changed({"data.expected_attended_tiles": 9}))


def test_a_plan_counts_an_image_in_positions_alone(parts):
    text = " ".join(" ".join(render(make_plan(native_config(parts, "naflex")))).split())
    assert "an image (native): 108 positions expected, at most 400" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model.vision.layout": "square"},
            r"layout: square, but \S+ takes images of any size. Set .*layout=native",
        ),
        (
            {"model.vision.name": "{parts}/vision"},
            r"layout: native, but \S+ takes images of one size, 16 pixels",
        ),
        ({"model.vision.max_positions": 3}, r"min_positions: 4 is above max_positions, 3"),
        (
            {"model.vision.longest_edge": 64},
            "longest_edge: 64, but min_positions or max_positions is set too",
        ),
        (
            {"data.image_fit": "pad"},
            "image_fit: pad makes one square of an image, but model.vision.layout native",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(parts, changes, said):
    changes = {
        key: value.format(parts=parts) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    if changes.get("model.vision.layout") == "square":
        changes |= {"model.vision.min_positions": None, "model.vision.max_positions": None}
    with pytest.raises((UserError, ValueError), match=said):
        changed = native_config(parts, "naflex").changed(
            {"model.vision.final_norm": False, **changes}
        )
        models_of(RunConfig.model_validate(changed.model_dump())).read()


def test_qwens_patches_go_through_their_merger_or_through_a_connector_that_joins_them(parts):
    config = native_config(parts, "qwen").changed({"model.vision.merger": False})
    with pytest.raises(
        UserError, match=r"factor: \S+ has its patches in blocks of 2 x 2, but linear joins 1 x 1"
    ):
        models_of(config).read()
    joined = models_of(config.changed({"model.projector.type": "shuffle_mlp2x_gelu"}))
    assert joined.vision.features_per_image == 4 and joined.vision.merge == 1
