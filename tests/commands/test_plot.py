"""mmtrain plot: pictures of plans and traces, and what it says of wrong input."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from PIL import Image, ImageColor

from mmtrain.__main__ import main
from mmtrain.commands import plot as plot_schedule
from mmtrain.config.load import load_config
from mmtrain.engine.trace import Interval, TracedStep, Work, write_trace
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.planner import make_plan

LAYOUT = ("parallel.pipeline=2", "parallel.boundaries=[2, 4, 6]")


@pytest.fixture(scope="module")
def plan(tiny):
    return make_plan(load_config(tiny / "config.yaml", [*LAYOUT, "parallel.data=2"]))


@pytest.fixture(scope="module")
def trace(plan, tmp_path_factory):
    """A run's folder with a trace of steps 1 and 2, of 8 s and 4 s, by 2 pipeline ranks and 2 replicas."""
    folder = tmp_path_factory.mktemp("run")
    forward, backward = Instruction(Op.FORWARD, 0, 3), Instruction(Op.BACKWARD, 3, 5)
    ranks = []
    for busy in (0.75, 0.5, 0.25, 0.125):  # ranks 0 and 1 are pipeline rank 0 of two replicas
        steps = []
        for step, begin, length in ((1, 100.0, 8.0), (2, 200.0, 4.0)):
            middle, end = begin + length / 8, begin + length * busy
            work = [Interval(Work.FORWARD, forward, begin, middle)] if busy > 0.125 else []
            work.append(Interval(Work.BACKWARD, backward, middle if work else begin, end))
            steps.append(TracedStep(step, begin + length, [*work, Interval(Work.WAIT, backward, end, begin + length)]))
        ranks.append(steps)
    write_trace(folder / "trace.json", plan, ranks)
    return folder


def pixels_of(file, colour):
    picture = np.asarray(Image.open(file).convert("RGB")).astype(int)
    assert picture.shape[1] == 1200, "as wide as a README"
    return int((abs(picture - ImageColor.getrgb(colour)).max(axis=-1) <= 2).sum())


def plot(file, *arguments):
    return main(["plot", *map(str, arguments), "--out", str(file)])


def test_a_plan_is_drawn_without_a_run(tiny, tmp_path, capsys):
    file = tmp_path / "plan.png"
    assert plot(file, "--plan", tiny / "config.yaml", *LAYOUT) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("predicted for tiny: idle ") and "% (rank 0: " in said[0]
    assert said[1] == f"written to {file}"
    for work in (Work.FORWARD, Work.BACKWARD):
        for shade in plot_schedule.STYLES[work][1:]:  # of a rank's two stages
            assert pixels_of(file, shade) > 1000
    assert pixels_of(file, plot_schedule.IDLE) > 1000
    assert list(tmp_path.iterdir()) == [file]


def test_idle_shares_of_a_trace_are_those_of_the_step_and_replica_asked_for(trace, tmp_path, capsys):
    file = tmp_path / "trace.png"
    for options, said in [
        ((), "measured in tiny, step 2, replica 0: 4.00 s, idle 50.0% (rank 0: 25.0%, rank 1: 75.0%)"),
        (("--step", 1), "measured in tiny, step 1, replica 0: 8.00 s, idle 50.0% (rank 0: 25.0%, rank 1: 75.0%)"),
        (("--replica", 1), "measured in tiny, step 2, replica 1: 4.00 s, idle 68.8% (rank 0: 50.0%, rank 1: 87.5%)"),
    ]:
        assert plot(file, "--trace", trace, *options) == 0
        assert capsys.readouterr().out.splitlines()[0] == said
    assert plot(file, "--trace", trace / "trace.json") == 0


def test_bars_are_as_long_as_what_they_stand_for(trace, tmp_path):
    file = tmp_path / "trace.png"
    assert plot(file, "--trace", trace) == 0
    first, last = (pixels_of(file, colour) for colour in (plot_schedule.STYLES[Work.FORWARD][1], "#D55E00"))
    # Forwards take an eighth of the step on both ranks, backwards what is left of 3/4 and 1/4 of it.
    assert last / first == pytest.approx((5 / 8 + 1 / 8) / (2 / 8), rel=0.1)


def test_plan_and_trace_share_one_picture_and_one_scale(tiny, trace, tmp_path, capsys):
    file, plan_alone = tmp_path / "both.png", tmp_path / "plan.png"
    assert plot(file, "--plan", tiny / "config.yaml", *LAYOUT, "--trace", trace) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in said] == ["predicted", "measured", "written"]
    assert plot(plan_alone, "--plan", tiny / "config.yaml", *LAYOUT) == 0
    assert Image.open(file).height > Image.open(plan_alone).height + 100
    assert plot(file, "--plan", tiny / "config.yaml", "parallel.pipeline=4", "--trace", trace) == 0
    assert "note: the plan and the trace are of different layouts" in capsys.readouterr().out


def test_a_plan_without_a_calibration_is_drawn_as_wide_as_the_measured_step(tiny, trace, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = plot_schedule.predicted(tiny / "config.yaml", LAYOUT)
    seen = plot_schedule.measured(trace, None, 0)
    assert not expected.in_seconds and seen.in_seconds
    drawn = expected.stretched(seen.length)
    assert drawn.length == 4.0 and max(bar.end for bar in drawn.bars) == pytest.approx(4.0)
    assert drawn.idle == expected.idle


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "nowhere"], "error: nowhere: no such file; a run that is started with --trace leaves it"),
        (["--trace", "."], "error: trace.json: no such file"),
        (["--trace", "plain.json"], "error: plain.json: not a trace that mmtrain train --trace has written"),
        (["--trace", "broken.json"], "error: broken.json: not a trace"),
        (["--trace", "another.json"], "error: another.json: not a trace"),
        (["--trace", "RUN", "--step", "3"], "trace.json has steps 1 to 2 (counted from 0)"),
        (["--trace", "RUN", "--replica", "2"], "trace.json has 2, counted from 0"),
        (["--plan", "nowhere.yaml"], "nowhere.yaml"),
        (["--plan", "CONFIG", "parallel.pipeline=64"], "parallel.pipeline"),
    ],
)
def test_wrong_input_is_exit_code_2_and_a_message(tiny, trace, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.json").write_text(json.dumps({"traceEvents": []}))
    (tmp_path / "broken.json").write_text("{")
    about = {"run": "x", "pipeline": 1, "data": 1, "steps": [1]}
    (tmp_path / "another.json").write_text(json.dumps({"otherData": about, "traceEvents": [{"ph": "X", "ts": 1}]}))
    stands_for = {"RUN": trace, "CONFIG": tiny / "config.yaml"}
    assert plot(tmp_path / "x.png", *(stands_for.get(argument, argument) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to draw: give --plan CONFIG, --trace RUN, or both"),
        (["a.b=1", "--trace", "x"], "a.b=1: keys are set for --plan CONFIG"),
        (["--plan", "x", "--step", "1"], "--step and --replica are of a trace"),
        (["--plan", "x", "--out", "x.svg"], "--out x.svg: the picture is a PNG"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(capsys, arguments, said):
    with pytest.raises(SystemExit, match="2"):
        main(["plot", *arguments])
    assert said in capsys.readouterr().err


def test_without_matplotlib_it_says_how_to_install_it(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot(tmp_path / "x.png", "--trace", trace) == 2
    assert capsys.readouterr().err == "error: matplotlib is not installed; install it: pip install 'mmtrain[plot]'\n"


def test_a_picture_that_cannot_be_written_is_named(trace, tmp_path, capsys):
    assert plot(tmp_path / "gone" / "x.png", "--trace", trace) == 2
    assert f"{tmp_path}/gone/x.png cannot be written: No such file" in capsys.readouterr().err
