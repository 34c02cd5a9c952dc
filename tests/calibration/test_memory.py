"""Memory of ranks as it is planned from a calibration, against the bytes that live at once in their
steps.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from bench_models import ModelSize, save_parts
from bench_plan_ranks import Runner, lasting_bytes
from ranks import run_ranks
from scenes import calibrate, join, layers_streamed_here, make_config, make_engine
from tiers import nightly
from tiny_models import make_tokenizer
from whole_models import save_whole, whole_config

from mmtrain.calibration.allocations import bytes_used
from mmtrain.calibration.transfers import measure_fetches
from mmtrain.engine.single_stage import expected_batch
from mmtrain.model.weights.weight_sources import PeerSource
from mmtrain.plan.planner import make_plan

# 6 decoder layers; 5 blocks of the encoder run; a tile is 196 patches, of which 59 run at a time.
SIZE = ModelSize(6, 64, 128, 4, 256, 6, 64, 2, 112, 8, 11)
TILES = 5  # of an image
SHUFFLED, PLAIN = {"type": "shuffle_mlp2x_gelu", "factor": 2}, {"type": "mlp2x_gelu"}
MICROBATCHES = 6


class Shape(NamedTuple):
    """What the ranks of one calibration run."""

    pipeline: int
    layouts: tuple[tuple[int, tuple[int, ...] | int], ...]  # stages a rank, encoder_ranks
    dtype: str = "float32"
    images: int = 3  # of a micro-batch
    projector: dict[str, Any] = SHUFFLED


SHAPES = {
    "2 ranks": Shape(2, ((1, 0), (1, (0, 1)), (2, (0, 1)), (1, (1,)))),
    "3 ranks": Shape(3, ((1, (0, 1, 2)), (2, (0, 2)), (2, (0, 1, 2)))),
    "4 ranks": Shape(4, ((1, (0, 1, 2, 3)), (1, (1, 3)))),
    "several groups of tiles": Shape(2, ((1, (0, 1)), (1, 0)), images=13),
    "features that the projector keeps": Shape(2, ((1, (0, 1)), (1, 0)), projector=PLAIN),
    "bfloat16": Shape(2, ((1, (0, 1)), (2, (0, 1))), "bfloat16", projector=PLAIN),
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
    """Of each layout on this rank: bytes as planned, those that are no weights or state among them,
    and as measured.
    """
    return planned_and_measured_of(folder, config_of(folder, shape), shape.layouts)


def planned_and_measured_of(folder, config, layouts):
    join()
    models, file = calibrate(folder, config)
    weights, result = {}, []
    for stages, encoder_ranks in layouts:
        asked = {
            "stages_per_rank": stages,
            "encoder_ranks": encoder_ranks,
            "calibration": str(file),
        }
        changed = config.changed({f"parallel.{key}": value for key, value in asked.items()})
        runner = Runner(changed, models, weights)
        mine = runner.plan.ranks[dist.get_rank()]
        ahead = [encodes and encodes.ahead for encodes in runner.plan.chain]
        walked = mine.activation_bytes + mine.workspace_bytes
        result.append((ahead, mine.total_bytes, walked, runner.peak_bytes()))
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.cpu_ranks
def test_every_rank_takes_the_memory_that_was_planned(tmp_path, name):
    shape = SHAPES[name]
    save_parts(SIZE, tmp_path, getattr(torch, shape.dtype))
    of_ranks = run_ranks(shape.pipeline, planned_and_measured, tmp_path, shape, timeout=280)
    for layout, found in zip(shape.layouts, zip(*of_ranks, strict=True), strict=True):
        for rank, (ahead, planned, walked, measured) in enumerate(found):
            assert walked > planned / 2, "weights are the smaller part"
            assert planned == pytest.approx(measured, rel=0.05), (layout, ahead, rank)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5"])
@pytest.mark.cpu_ranks
def test_a_whole_model_with_m_rope_takes_the_memory_that_was_planned(tmp_path, kind):
    save_whole(kind, tmp_path, make_tokenizer())
    image = {"data__expected_image_tiles": 15, "data__expected_image_positions": 15}
    config = whole_config(
        tmp_path,
        **{**image, "data__expected_text_tokens": 33, "data__pack_length": 20 * 48},
        parallel__pipeline=2,
        parallel__threads_per_rank=1,
        train__packs_per_step=MICROBATCHES,
        train__max_steps=1_000_000,
    )
    of_ranks = run_ranks(2, planned_and_measured_of, tmp_path, config, ((1, 0),), timeout=280)
    for ((_, planned, _, measured),) in of_ranks:
        print(f"{kind}: measured {measured / planned:.3f} of what is planned")
        assert planned == pytest.approx(measured, rel=0.1)


# ---- layers that are not kept on the device

WIDE = ModelSize(8, 256, 512, 4, 256, 2, 64, 2, 28, 14, 12)  # weights are most of what a rank takes
KEPT = {1: 1.0, 2: 0.5, 4: 0.25}  # of a streamed layer, by replicas that share it


class InPlace(PeerSource):
    """Sends part by part: gloo's all-gather, not NCCL's, makes a copy of all that it gathers."""

    def fetch(self, layer):
        parts = layer.buffer.chunk(dist.get_world_size(self._group))
        parts[self._rank].copy_(layer.kept)
        sent = [
            dist.broadcast(part, group_src=rank, group=self._group, async_op=True)
            for rank, part in enumerate(parts)
        ]
        return lambda: [work.wait() for work in sent]


def keys(parallel):
    """Overrides of a configuration's section."""
    return {f"parallel.{key}": value for key, value in parallel.items()}


def streamed_and_measured(folder, config, layouts):
    """Of each layout on this rank: its plan; bytes as measured in a step; of streamed layers, whole
    and as kept.
    """
    join()
    models, file = calibrate(folder, config)
    result = []
    for asked in layouts:
        rates = measure_fetches(c := config.changed(keys(asked)), make_plan(c), torch.device("cpu"))
        assert all(rate > 0 for rate in rates.values())
        assert set(rates) == {asked.get("stream_from", "host")}
        changes = {"calibration": str(file), **asked}
        mine_config = config.changed(keys(changes))
        plan = make_plan(mine_config)
        mine = plan.ranks[dist.get_rank()]
        streamed = layers_streamed_here(plan)
        if isinstance(streamed.source, PeerSource):
            streamed.source = InPlace(streamed.source._group, streamed.source.device)
        engine = make_engine(mine_config, plan, streamed)
        batch = expected_batch(mine_config, models)
        reads = mine.pipeline == 0

        def step(engine=engine, batch=batch, reads=reads):
            engine.train_step(map(copy.deepcopy, itertools.repeat(batch)) if reads else None)

        step()
        layers = streamed.layers.values()
        on_device = (
            0
            if plan.streaming is None or plan.streaming.source == "host"
            else sum(x.kept.nbytes for x in layers)
        )
        lasting = lasting_bytes(engine) + on_device
        (used,) = bytes_used(step, device=torch.device("cpu"))
        whole = sum(layer.bytes for layer in layers)
        on_host = whole if plan.streaming.source == "host" else 0
        result.append((mine, lasting + used.peak, whole, on_device, on_host))
    return result


HOST = {"streamed_layers": 8}
STREAMED = {
    1: (HOST, {"streamed_layers": 4}),
    2: (
        {**HOST, "pipeline": 2, "data": 1, "boundaries": (4,)},
        {**HOST, "stream_from": "peers", "weight_shards": 2},
    ),
    4: ({**HOST, "stream_from": "peers", "weight_shards": 4},),
}


@pytest.mark.parametrize(
    ("ranks", "layouts"), [(1, STREAMED[1][1:]), *(nightly(*item) for item in STREAMED.items())]
)
@pytest.mark.cpu_ranks
def test_ranks_that_stream_take_the_memory_that_was_planned(tmp_path, ranks, layouts):
    save_parts(WIDE, tmp_path, torch.float32)
    config = make_config(
        tmp_path,
        data__expected_text_tokens=WIDE.text_tokens,
        data__pack_length=32,
        parallel__data=ranks,
        parallel__threads_per_rank=1,
        train__packs_per_step=4,
        train__max_steps=1_000_000,
    )
    of_ranks = run_ranks(ranks, streamed_and_measured, tmp_path, config, layouts, timeout=280)
    for layout, found in zip(layouts, zip(*of_ranks, strict=True), strict=True):
        for plan, measured, whole, on_device, on_host in found:
            assert plan.total_bytes == pytest.approx(measured, rel=0.05), layout
            assert plan.host_bytes == on_host, layout
            shards = layout.get("weight_shards", 1)
            assert on_device == (KEPT[shards] * whole if shards > 1 else 0)
            assert whole > 0.4 * measured
