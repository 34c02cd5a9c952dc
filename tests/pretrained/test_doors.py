"""The doors of a run, asked when it is planned: the class that computes what it trains, or what to change."""

from __future__ import annotations

import pytest

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.plan.planner import make_plan


def planned(tiny, *overrides: str) -> str:
    """What the planner refuses of the tiny run with these keys; empty where it plans."""
    try:
        make_plan(load_config(tiny / "config.yaml", overrides))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "overrides,said",
    [
        (["export.format=hf"], ""),
        (["export.format=llava", "model.projector.type=linear"], ""),
        (["export.format=safetensors", "model.projector.type=linear"], ""),
        (["export.format=hf", "model.projector.type=linear"], "no stock model has a linear projector"),
        (["export.format=llava", "model.trainable=[projector, llm.norm]"], "model.trainable has 'llm.norm' too"),
    ],
)
def test_a_run_that_could_not_leave_is_refused_when_planning(tiny, overrides, said):
    found = planned(tiny, *overrides)
    assert (said in found and found.startswith("export.format=")) if said else not found
