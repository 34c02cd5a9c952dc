"""tools/plot_schedule.py: a plan and a trace become a picture, with the idle share of each rank."""

from __future__ import annotations

import plot_schedule
from PIL import Image

from mmtrain.config.load import load_config
from mmtrain.engine.trace import Interval, TracedStep, Work, write_trace
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.planner import make_plan


def test_a_plan_and_a_trace_are_drawn_together(tiny, tmp_path, capsys):
    overrides = ["parallel.pipeline=2", "parallel.boundaries=[2, 4, 6]"]
    plan = make_plan(load_config(tiny / "config.yaml", overrides))
    backward = Instruction(Op.BACKWARD, 3, 5)
    ranks = []
    for busy in (3.0, 1.0):  # seconds of a step of 4
        intervals = [
            Interval(Work.BACKWARD, backward, 0.0, busy),
            Interval(Work.WAIT, backward, busy, 4.0),
        ]
        ranks.append([TracedStep(1, 4.0, intervals)])
    write_trace(tmp_path / "trace.json", plan, ranks)
    arguments = ["--plan", str(tiny / "config.yaml"), *overrides, "--trace", str(tmp_path)]
    for name in ("both.png", "both.svg"):
        assert plot_schedule.main([*arguments, "--out", str(tmp_path / name)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("predicted for tiny: idle rank 0: ")
    assert lines[1] == "measured in tiny, step 1: idle rank 0: 25.0%, rank 1: 75.0%"
    assert Image.open(tmp_path / "both.png").width == 1200
    assert (tmp_path / "both.svg").stat().st_size > 0
