"""Plans with the encoder in slices: real models against the work that is shared out; never slower
than rank 0.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from bench_encoder_plans import CASES, costs_of, figures
from made_up_costs import made_up_costs

from mmtrain.config.load import load_config
from mmtrain.plan.calibration import gpu_device
from mmtrain.plan.cuts import even_cut
from mmtrain.plan.planner import make_plan
from mmtrain.plan.search import Search
from mmtrain.plan.stage_costs import StageCosts

pytestmark = pytest.mark.slow

INTERN_20B, INTERN_72B, SIGLIP = (
    "InternViT-6B + InternLM2-20B",
    "InternViT-6B + Qwen2.5-72B",
    "SigLIP 81 + Qwen3-8B",
)
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "microbatches", "step", "slowest"),
    [
        (INTERN_20B, 16, 1.08, 1.04),
        pytest.param(INTERN_20B, 32, 1.08, 1.04, marks=nightly),
        pytest.param(INTERN_72B, 16, 1.07, 1.04, marks=nightly),
        pytest.param(INTERN_72B, 32, 1.07, 1.04, marks=nightly),
        pytest.param(SIGLIP, 16, 1.19, 1.05, marks=nightly),
        pytest.param(SIGLIP, 32, 1.11, 1.05, marks=nightly),
    ],
)
def test_a_pipeline_of_8_takes_little_longer_than_its_work(
    name, microbatches, step, slowest
) -> None:
    costs = costs_of(CASES[name], 8, microbatches)
    found = figures(Search(costs, "auto").find("auto"), costs)
    assert found.step <= step and found.slowest <= slowest


def test_few_micro_batches_get_a_short_chain_of_slices_where_a_long_one_does_not_pay() -> None:
    config = Path(__file__).parents[2] / "configs" / "smolvlm_256m_lora.yaml"
    few = ["parallel.pipeline=8", "train.packs_per_microbatch=2", "train.packs_per_step=4"]
    plan = make_plan(load_config(config, few), None, gpu_device("NVIDIA H100"))
    slices = [rank.stages[0].encoder for rank in plan.ranks]
    assert sum(first < last for first, last in filter(None, slices)) == 2
    assert plan.idle_share < 0.7, "0.83 with the encoder on rank 0"


def never_worse(costs: StageCosts) -> tuple[bool, bool]:
    """Checks a plan against that of rank 0 alone; whether it is in slices, and whether only slices
    fit.
    """
    search = Search(costs, "auto")
    alone, free = Search(costs).find("auto"), search.find("auto")
    if alone:
        assert free, "it fits where the whole encoder on rank 0 does"
        assert free.simulation.seconds <= alone.simulation.seconds
    sliced = free is not None and sum(blocks > 0 for blocks in free.slices) > 1
    return sliced, sliced and not alone


def made_up(number: int) -> StageCosts:
    draw = random.Random(number)
    pipeline = draw.randrange(2, 6)
    costs = made_up_costs(
        draw,
        draw.randrange(pipeline, 20),
        pipeline=pipeline,
        microbatches=draw.randrange(1, 17),
        memory_bytes=draw.choice([None, draw.randrange(200, 1500)]),
    )
    timings = replace(costs.timings, encode_block=costs.timings.encode_block + draw.randrange(30))
    return StageCosts(costs.costs, timings, costs.setting)


def test_slices_are_never_slower_than_rank_0_alone() -> None:
    found = [never_worse(made_up(number)) for number in range(6)]
    assert any(sliced for sliced, _ in found)


@nightly
def test_slices_are_never_slower_than_rank_0_alone_in_200_runs() -> None:
    found = [never_worse(made_up(number)) for number in range(1000, 1170)]
    for case in CASES.values():
        for pipeline, microbatches in ((2, 8), (4, 16), (8, 16)):
            costs = costs_of(case, pipeline, microbatches)
            found += [never_worse(costs), never_worse(costs.changed(memory_bytes=80 * 2**30))]
    assert len(found) >= 200 and sum(sliced for sliced, _ in found) > 20


@pytest.mark.nightly
def test_ranks_that_are_named_hold_blocks_and_no_others_do_or_nothing_fits() -> None:
    found, refused = [], 0
    for number in range(16):
        draw, costs = random.Random(number), made_up(number)
        memory = draw.choice([None, 50, 100, 200])
        costs = StageCosts(costs.costs, costs.timings, replace(costs.setting, memory_bytes=memory))
        pipeline, blocks = costs.setting.pipeline, costs.costs.encoder.blocks
        ranks = tuple(
            sorted(draw.sample(range(pipeline), min(draw.randrange(1, pipeline + 1), blocks)))
        )
        search = Search(costs, ranks)
        given = search.at_cut(even_cut(costs, pipeline, 0.0))
        refused += given is None
        found += [
            (ranks, layout, search) for layout in (search.find(1), given) if layout is not None
        ]
    for ranks, layout, search in found:
        assert tuple(rank for rank, blocks in enumerate(layout.slices) if blocks) == ranks
        assert search.fits(layout)
    assert len(found) > 12 and refused > 4


def test_an_encoder_that_fits_on_no_rank_is_planned_in_slices() -> None:
    """InternViT-6B takes 10.3 GiB, more than rank 0 has left beside the connector and the
    embedding.
    """
    costs = costs_of(replace(CASES[INTERN_20B], pack_length=4096), 8, 8)
    costs = StageCosts(costs.costs, costs.timings, replace(costs.setting, memory_bytes=14 * 2**30))
    assert not Search(costs).find(1)
    search = Search(costs, "auto")
    layout = search.find(1)
    assert search.fits(layout) and max(layout.slices) < 45
