"""The documentation's table of connectors says what the planner says."""

import re
from pathlib import Path

import pytest

from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.plan.costs import Models, minimal_flops, workload
from mmtrain.plan.search import Search
from mmtrain.plan.stage_costs import stage_costs

ROOT = Path(__file__).parents[2]
CONFIGS, PAGE = ROOT / "configs", ROOT / "mmtrain" / "docs" / "pages" / "model.md"
ROWS = re.findall(r"^\| `(type: .+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
SAMPLES = 252
assert len(ROWS) == 7, "the table is not as it is read here"


def models_with(projector: str) -> tuple[RunConfig, Models]:
    overrides = [f"model.projector.{one.replace(': ', '=')}" for one in projector.split(", ")]
    config = load_config(CONFIGS / "llava15_7b_pp4.yaml", overrides)
    return config, models_of(config)


@pytest.mark.parametrize(("projector", "positions", "tflop", "_"), ROWS)
def test_positions_and_work_are_the_planners(projector, positions, tflop, _):
    config, models = models_with(projector)
    work = workload(config.train, config.data, models.layout)
    assert int(positions) == models.layout.positions_per_tile
    exact = minimal_flops(models, ("projector",), work).total / work.tiles / 1e12
    assert float(tflop) == pytest.approx(exact, abs=0.005)


def planned_seconds(projector: str) -> float:
    config, models = models_with(projector)
    images = workload(config.train, config.data, models.layout).tiles  # of a pack
    config = config.changed({"train.packs_per_step": round(SAMPLES / images)})
    search = Search(stage_costs(config, models, 14 * 2**30, None))
    return search.find("auto").simulation.seconds / (config.train.packs_per_step * images)


@pytest.mark.nightly
def test_times_are_the_planners():
    usual = planned_seconds(ROWS[0][0])
    for projector, _, _, time in ROWS:
        assert float(time) == pytest.approx(planned_seconds(projector) / usual, abs=0.005)
