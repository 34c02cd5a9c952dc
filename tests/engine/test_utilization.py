"""What metrics.jsonl says of a step's time: idle shares by hand, utilisation against what had to be
computed.
"""

from __future__ import annotations

import pytest
from crash_job import MEASURED

from mmtrain.config.load import load_config
from mmtrain.engine.statistics import StepResult
from mmtrain.engine.step_clock import RankSeconds
from mmtrain.engine.utilization import Utilization
from mmtrain.facts.models import models_of
from mmtrain.plan.calibration import Calibration, Device, calibration_key
from mmtrain.plan.costs import Workload, minimal_flops


def step(*ranks, tokens=400, samples=5, tiles=6, supervised_tokens=40):
    return StepResult(
        0, 0, 1.0, 1.0, 0.1, {}, samples, 2, tiles, tokens, supervised_tokens, 0, None, ranks
    )


DEVICE = Device("a device", 1, 1)
BUSY = RankSeconds(
    window=2.0, compute=1.0, communication=0.25, data=0.2, fetching=0.05, peak_memory_bytes=1000
)
IDLE = BUSY._replace(
    window=1.6, compute=0.15, communication=0.05, data=0.0, fetching=0.0, peak_memory_bytes=500
)


@pytest.fixture
def config(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of calibrations, too
    return load_config(tiny / "config.yaml", [])


def test_idle_is_what_computing_communication_data_and_fetching_leave_of_the_window():
    assert BUSY.idle == 0.5 and BUSY.idle_fraction == 0.25
    assert IDLE.idle == pytest.approx(1.4) and IDLE.idle_fraction == pytest.approx(0.875)
    assert BUSY._replace(window=1.4).idle_fraction == 0, (
        "clocks that disagree by a little make no negative share"
    )
    assert RankSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0).idle_fraction == 0


def over_ranks(mean: float, highest: float, rank: int) -> dict[str, object]:
    return {"mean": pytest.approx(mean), "max": pytest.approx(highest), "max_rank": rank}


def test_a_steps_record_has_mean_and_maximum_and_is_what_comparisons_of_runs_leave_out(config):
    record = Utilization(config, DEVICE).add(step(BUSY, IDLE, IDLE))
    assert record == {
        "idle_fraction": over_ranks(2 / 3, 0.875, 1),
        "compute_seconds": over_ranks(1.3 / 3, 1.0, 0),
        "communication_seconds": over_ranks(0.35 / 3, 0.25, 0),
        "data_seconds": over_ranks(0.2 / 3, 0.2, 0),
        "fetching_seconds": over_ranks(0.05 / 3, 0.05, 0),
        "peak_memory_bytes": over_ranks(2000 / 3, 1000, 0),
        "model_flops_utilization": None,
    }
    assert set(record) <= set(MEASURED)


def test_sums_list_every_rank_since_the_last_and_leave_out_the_times_of_the_first_step(config):
    use = Utilization(config, DEVICE)
    assert use.take_sums() is None
    use.add(step(BUSY, BUSY))
    use.add(step(IDLE, BUSY))
    use.add(step(IDLE, BUSY._replace(window=1.4, peak_memory_bytes=2000)))
    assert use.take_sums() == {
        "steps": 2,
        "idle_seconds": [pytest.approx(2.8), 0.5],
        "compute_seconds": [0.3, 2.0],
        "communication_seconds": [0.1, 0.5],
        "data_seconds": [0.0, 0.4],
        "fetching_seconds": [0.0, 0.1],
        "peak_memory_bytes": [1000, 2000],
    }
    assert use.take_sums() is None
    use.add(step(IDLE, BUSY))
    sums = use.take_sums()
    assert sums["steps"] == 1 and sums["peak_memory_bytes"] == [500, 1000]


def test_the_summary_weighs_steps_by_their_time_and_leaves_the_first_one_out(config):
    use = Utilization(config, DEVICE)
    assert use.summary() is None
    use.add(step(IDLE, IDLE))
    assert use.summary() == "idle 88% (rank 0: 88%, rank 1: 88%)", "but not if it is the only one"
    use.add(step(BUSY, BUSY._replace(compute=1.5)))
    assert use.summary() == "idle 12% (rank 0: 25%, rank 1: 0%)"
    use.add(step(BUSY._replace(window=6.0), BUSY._replace(window=6.0, compute=5.5)))
    assert use.summary() == "idle 31% (rank 0: 62%, rank 1: 0%)"  # (0.5 + 4.5) / 8


def test_of_many_ranks_the_summary_names_the_extremes_and_of_one_none(config):
    use = Utilization(config, DEVICE)
    use.add(step(BUSY, IDLE, BUSY, BUSY, BUSY._replace(compute=1.5)))
    assert use.summary() == "idle 30% (least rank 4: 0%, most rank 1: 88%)"
    use = Utilization(config, DEVICE)
    use.add(step(BUSY))
    assert use.summary() == "idle 25%"


def test_utilisation_is_the_needed_flops_over_what_all_ranks_could_have_computed_in_the_window(
    config,
):
    models = models_of(config)
    key = calibration_key(config, models, DEVICE)
    Calibration(key, {}, 0.0, 0.0, 0.0, None, None, 0.0, 1, matmul_flops_per_second=1e9).save()
    needed = minimal_flops(models, config.model.trainable, Workload(400, 80, 6, 0, 40)).total
    use = Utilization(config, DEVICE)
    first = use.add(step(BUSY, IDLE))["model_flops_utilization"]
    assert first == pytest.approx(needed / (2.0 * 2 * 1e9))
    assert use.summary().endswith(f", utilisation {first:.0%}")
    more = step(BUSY, IDLE, tokens=800, samples=10, tiles=12, supervised_tokens=80)
    twice = use.add(more)["model_flops_utilization"]
    assert twice == pytest.approx(2 * first), "documents as long, twice as many"
    nothing = use.add(step(BUSY, IDLE, tokens=0, samples=0, tiles=0, supervised_tokens=0))[
        "model_flops_utilization"
    ]
    assert nothing == 0
    assert use.summary().endswith(f", utilisation {first:.0%}"), "the mean of twice and nothing"
    other = Utilization(config, Device("another", 1, 1))
    assert other.add(step(BUSY))["model_flops_utilization"] is None, (
        "another device is not calibrated"
    )
