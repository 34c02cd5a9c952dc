"""Memory of ranks as it is planned from a calibration, against the bytes that live at once in their steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from bench_models import ModelSize, save_parts
from bench_plan_ranks import Runner
from ranks import run_ranks
from scenes import make_config

from mmtrain.calibration.calibrate import Calibrator
from mmtrain.engine.process_groups import join_process_group
from mmtrain.plan.calibration import calibration_key, cpu_device
from mmtrain.plan.planner import make_plan, models_of

# 6 decoder layers; 5 blocks of the encoder run; a tile is 196 patches, of which 59 run at a time.
SIZE = ModelSize(6, 64, 128, 4, 256, 6, 64, 2, 112, 8, 11)
TILES = 5  # of an image
SHUFFLED, PLAIN = {"type": "shuffle_mlp2x_gelu", "factor": 2}, {"type": "mlp2x_gelu"}
MICROBATCHES = 6


class Shape(NamedTuple):
    """What the ranks of one calibration run."""

    pipeline: int
    layouts: tuple[tuple[int, tuple[int, ...] | int, int | str], ...]  # stages a rank, encoder_ranks, encoder_prefetch
    dtype: str = "float32"
    images: int = 3  # of a micro-batch
    projector: dict[str, Any] = SHUFFLED


SHAPES = {
    "2 ranks": Shape(2, ((1, 0, 4), (1, (0, 1), 0), (1, (0, 1), 6), (2, (0, 1), 3), (1, (1,), "auto"))),
    "3 ranks": Shape(3, ((1, (0, 1, 2), 4), (2, (0, 2), 6), (2, (0, 1, 2), "auto"))),
    "4 ranks": Shape(4, ((1, (0, 1, 2, 3), 3), (1, (1, 3), 6))),
    "several groups of tiles": Shape(2, ((1, (0, 1), 4), (1, 0, 4)), images=13),
    "features that the projector keeps": Shape(2, ((1, (0, 1), 4), (1, 0, 4)), projector=PLAIN),
    "bfloat16": Shape(2, ((1, (0, 1), 4), (2, (0, 1), 6)), "bfloat16", projector=PLAIN),
}


def config_of(folder, shape):
    positions = TILES * SIZE.image_tokens // shape.projector.get("factor", 1) ** 2
    return make_config(
        folder,
        model__llm={"path": str(folder / "llm"), "dtype": shape.dtype},
        model__vision={"name": str(folder / "vision"), "layout": "tiles"},
        model__projector=shape.projector,
        data__expected_image_tiles=TILES,
        data__expected_image_positions=positions,
        data__expected_text_tokens=SIZE.text_tokens,
        data__pack_length=shape.images * (positions + SIZE.text_tokens),
        parallel__pipeline=shape.pipeline,
        parallel__threads_per_rank=1,
        train__packs_per_step=MICROBATCHES,
        train__max_steps=1_000_000,
    )


def planned_and_measured(folder, shape):
    """Of each layout on this rank: bytes as planned, those that are no weights or state among them, and as measured."""
    join_process_group(torch.device("cpu"), 120)
    config = config_of(folder, shape)
    models, device = models_of(config), cpu_device(config)
    key = calibration_key(config, models, device)
    calibrator = Calibrator(config, models, make_plan(config), torch.device("cpu"), key)
    calibrator.warm_up(0.0)
    calibrator.round()
    found, file = calibrator.finish(), folder / "calibration.json"
    if dist.get_rank() == 0:
        found.save(file)
    dist.barrier()
    weights, result = {}, []
    for stages, encoder_ranks, prefetch in shape.layouts:
        asked = {"stages_per_rank": stages, "encoder_ranks": encoder_ranks, "encoder_prefetch": prefetch}
        asked |= {"calibration": str(file)}
        runner = Runner(config.changed({f"parallel.{key}": value for key, value in asked.items()}), models, weights)
        mine = runner.plan.ranks[dist.get_rank()]
        ahead = [encodes and encodes.ahead for encodes in runner.plan.chain]
        walked = mine.activation_bytes + mine.workspace_bytes
        result.append((ahead, mine.total_bytes, walked, runner.peak_bytes()))
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_takes_the_memory_that_was_planned(tmp_path, name):
    shape = SHAPES[name]
    save_parts(SIZE, tmp_path, getattr(torch, shape.dtype))
    of_ranks = run_ranks(shape.pipeline, planned_and_measured, tmp_path, shape, timeout=280)
    for layout, found in zip(shape.layouts, zip(*of_ranks, strict=True), strict=True):
        for rank, (ahead, planned, walked, measured) in enumerate(found):
            assert walked > planned / 2, "weights are the smaller part"
            assert planned == pytest.approx(measured, rel=0.05), (layout, ahead, rank)
