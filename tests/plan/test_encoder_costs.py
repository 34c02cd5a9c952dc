"""What the encoder and its slices cost: sums by hand, and slices that add up to the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.plan.calibration import CPU, GPU, assumed_timings
from mmtrain.plan.costs import run_costs
from mmtrain.plan.schedule import Op
from mmtrain.plan.simulate import Instant
from mmtrain.plan.stage_costs import StageCosts, stage_costs

CLIP = {"name": "vit_large_patch14_clip_quickgelu_336.openai"}
BLOCK = 12 * 1024**2 + 13 * 1024  # parameters
# patches, class token, positions, norm before the blocks
STEM = 1024 * 3 * 14**2 + 1024 + 577 * 1024 + 2 * 1024
IMAGES = 2048 / 656  # of a micro-batch: documents of 576 + 80 tokens


def config_of(
    vision: dict | None = CLIP, trainable: tuple[str, ...] = ("projector",), **model: object
) -> RunConfig:
    """Vicuna-7B with an encoder, 23 blocks of CLIP's by default."""
    return RunConfig.model_validate(
        {
            "run": {"name": "costs"},
            "model": {
                "llm": {"path": "lmsys/vicuna-7b-v1.5"},
                "vision": vision,
                "projector": None if vision is None else {},
                "trainable": trainable,
                **model,
            },
            "data": {"shards": "none.tar"} | ({"template": "chat"} if vision is None else {}),
            "train": {"packs_per_step": 8, "max_steps": 1},
            "parallel": {"pipeline": 4},
        }
    )


def costs_of(config: RunConfig, memory_bytes: int | None = None) -> StageCosts:
    return stage_costs(config, models_of(config), memory_bytes, None)


def test_clip_by_hand() -> None:
    encoder = costs_of(config_of()).costs.encoder
    assert encoder.blocks == 23 and encoder.frozen
    assert (encoder.block_bytes, encoder.stem_bytes) == (2 * BLOCK, 2 * STEM)
    assert encoder.block_forward == pytest.approx(
        IMAGES * 577 * (2 * 12 * 1024**2 + 4 * 1024 * 577)
    )
    assert encoder.stem_forward == pytest.approx(IMAGES * 576 * 2 * 1024 * 3 * 14**2)
    assert encoder.feature_bytes == pytest.approx(IMAGES * 576 * 1024 * 2, rel=1e-6)
    assert encoder.hidden_bytes == pytest.approx(IMAGES * 577 * 1024 * 2, rel=1e-6), (
        "the class token passes, too"
    )


@pytest.mark.parametrize("trainable", [("projector", "vision"), ("projector", "vision.blocks.22")])
def test_the_weights_of_an_encoder_that_trains_are_the_front_layers(trainable) -> None:
    frozen, trained = (
        costs_of(config_of(trainable=names)) for names in (("projector",), trainable)
    )
    encoder, weights = (
        trained.costs.encoder,
        [costs.layers[0].weight_bytes for costs in (frozen, trained)],
    )
    assert (
        not encoder.frozen
        and encoder.block_bytes == encoder.stem_bytes == trained.encoder_bytes(23) == 0
    )
    assert weights[1] - weights[0] == frozen.encoder_bytes(23) == 2 * (23 * BLOCK + STEM)


@pytest.mark.parametrize("blocks", [(23, 0, 0, 0), (0, 8, 8, 7), (5, 6, 6, 6), (3, 0, 20, 0)])
def test_slices_of_all_ranks_add_up_to_the_encoder_with_a_stem_for_each(blocks) -> None:
    costs = costs_of(config_of())
    cut = ((0, 8), (8, 17), (17, 26), (26, 34))
    whole = [costs.rank_cost((layers,), [0], []) for layers in cut]
    sliced = [
        costs.rank_cost((layers,), [0], [], count)
        for layers, count in zip(cut, blocks, strict=True)
    ]
    more = 2 * STEM * sum(count > 0 for count in blocks[1:])
    assert (
        sum(need.weight_bytes for need in sliced) == sum(need.weight_bytes for need in whole) + more
    )
    parameters = sum(
        p.numel * (4 if "projector" in p.name else 2) for p in models_of(config_of()).parameters
    )
    assert sum(need.weight_bytes for need in whole) == parameters
    for before, after, count in zip(whole[1:], sliced[1:], blocks[1:], strict=True):
        assert after.weight_bytes - before.weight_bytes == (
            2 * (count * BLOCK + STEM) if count else 0
        )
    calls = sum(count > 0 for count in blocks[1:]) * costs.timings.call
    seconds = [sum(need.seconds for need in needs) for needs in (whole, sliced)]
    assert seconds[1] == pytest.approx(seconds[0] + calls)


@pytest.mark.parametrize(
    ("stem", "later", "taken"), [(None, None, (1, 1, 1)), (0.25, 0.5, (1, 0.25, 0.5))]
)
def test_a_slice_takes_the_encoders_working_set_where_it_encodes_or_its_own_if_measured(
    stem, later, taken
) -> None:
    costs = costs_of(config_of())
    encoder = costs.costs.encoder
    working = encoder.working_bytes
    own = {
        "stem_working_bytes": stem and stem * working,
        "later_working_bytes": later and later * working,
    }
    costs.costs = replace(costs.costs, encoder=replace(encoder, **own))
    for layers, blocks, share in zip(((0, 8), (0, 8), (8, 17)), (6, 0, 6), taken, strict=True):
        need = costs.rank_cost((layers,), [0], [Instant(Op.ENCODE, 0, (0,), 7)], blocks)
        assert (need.activation_bytes, need.working_bytes) == (7, share * working) and working > 0


@pytest.mark.parametrize("device", [GPU, CPU])
def test_slices_take_as_long_as_the_encoder_and_a_call_for_each_but_the_first(device) -> None:
    config = config_of(
        llm={"path": "lmsys/vicuna-7b-v1.5", "dtype": "bfloat16"},
        vision=CLIP | {"dtype": "float32"},
    )
    costs = run_costs(config, models_of(config))
    timings = assumed_timings(costs, 1, device)
    slower = device.fp32_slowdown / device.flops_per_second
    stem, block = (
        IMAGES * 576 * 2 * 1024 * 3 * 14**2,
        IMAGES * 577 * (2 * 12 * 1024**2 + 4 * 1024 * 577),
    )
    assert timings.encode_of(0, first=True) == pytest.approx(stem * slower)
    assert timings.encode_of(5, first=True) == pytest.approx((stem + 5 * block) * slower)
    assert timings.encode_of(18, first=False) == pytest.approx(
        device.call_seconds + 18 * block * slower
    )
    parts = timings.encode_of(5, first=True) + timings.encode_of(18, first=False)
    assert timings.encode == pytest.approx(parts - timings.call)
