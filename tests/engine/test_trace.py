"""--trace and what metrics.jsonl says of time: a real interleaved run, hand-made clocks, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from json_files import read_json, read_lines
from rank_runs import train

from mmtrain import launch
from mmtrain.config.load import load_config
from mmtrain.engine import trace
from mmtrain.engine.trace import Interval, TracedStep, Work, write_trace
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.planner import make_plan

LAYOUT = ("parallel.pipeline=2", "parallel.boundaries=[2, 4, 6]")
RUN = (*LAYOUT, "train.max_steps=4", "parallel.threads_per_rank=1")
TRACED = [1, 2]


@pytest.fixture(scope="module", autouse=True)
def no_calibration(tmp_path_factory):
    """A cache of its own: plans depend on what the user's has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of four steps on two ranks with two stages each; its folder and what it printed."""
    run = train(tiny / "config.yaml", f"run.dir={tmp_path_factory.mktemp('traced')}", *RUN, trace=2)
    return run.folder, run.printed


@pytest.fixture(scope="module")
def plan(tiny):
    return make_plan(load_config(tiny / "config.yaml", RUN))


def content_of(file):
    return read_json(file)


def complete_events(content):
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def test_every_instruction_of_the_plan_is_there_once_a_step_in_the_plans_order(run, plan):
    events = complete_events(content_of(run[0] / "trace.json"))
    assert len(plan.schedule) == 2 and plan.stages_per_rank == 2
    for rank, instructions in enumerate(plan.schedule):
        for step in TRACED:
            mine = [
                e
                for e in events
                if e["tid"] == rank and e["args"]["step"] == step and e["cat"] != "wait"
            ]
            found = [
                (e["args"]["op"], e["args"].get("stage", -1), e["args"].get("microbatch", -1))
                for e in mine
            ]
            assert found == [(str(x.op), x.stage, x.microbatch) for x in instructions]
    assert {event["args"]["step"] for event in events} == set(TRACED)


def test_a_rank_does_one_thing_at_a_time_and_a_step_has_no_gaps(run):
    events = complete_events(content_of(run[0] / "trace.json"))
    assert min(event["ts"] for event in events) == 0
    for rank in (0, 1):
        mine = [event for event in events if event["tid"] == rank]
        assert mine == sorted(mine, key=lambda event: event["ts"])
        for before, after in itertools.pairwise(mine):
            gap = after["ts"] - (before["ts"] + before["dur"])
            assert gap > -0.01, "microseconds"
            assert gap < 0.01 or before["args"]["step"] < after["args"]["step"]


def test_a_wait_stands_before_what_it_was_for(run):
    events = complete_events(content_of(run[0] / "trace.json"))
    waits = 0
    for rank in (0, 1):
        mine = [event for event in events if event["tid"] == rank]
        for before, after in itertools.pairwise(mine):
            if before["name"].startswith(("wait for forward", "wait for backward")):
                assert before["name"] == f"wait for {after['name']}" and after["cat"] in (
                    "forward",
                    "backward",
                )
                waits += 1
    # A message for each of 8 micro-batches at 3 borders, there and back, in each of 2 steps.
    assert waits == 8 * 3 * 2 * 2


def test_the_file_has_the_form_that_viewers_load(run):
    content = content_of(run[0] / "trace.json")
    assert content["displayTimeUnit"] == "ms"
    assert content["otherData"] == {
        **{
            "run": "tiny",
            "pipeline": 2,
            "data": 1,
            "stages_per_rank": 2,
            "microbatches_per_step": 8,
            "steps": TRACED,
        }
    }
    for event in complete_events(content):
        assert list(event) == ["ph", "name", "cat", "pid", "tid", "ts", "dur", "args"]
        assert (
            event["pid"] == 0 and event["tid"] in (0, 1) and event["ts"] >= 0 and event["dur"] >= 0
        )
        assert event["cat"] in [str(work) for work in Work]
    names = {event["name"] for event in complete_events(content)}
    assert {
        "forward stage 3 micro-batch 7",
        "send gradient stage 1 micro-batch 0",
        "optimizer step",
    } <= names
    named = [event for event in content["traceEvents"] if event["ph"] == "M"]
    threads = {
        event["tid"]: event["args"]["name"] for event in named if event["name"] == "thread_name"
    }
    assert threads == {
        0: "rank 0: front + llm.layers.0-1, llm.layers.4-5",
        1: "rank 1: llm.layers.2-3, llm.layers.6-7 + head",
    }


def of_both_ranks(line: dict, name: str) -> list[float]:
    """Both ranks' values of a step, which mean and maximum give away."""
    value = line[name]
    values = [2 * value["mean"] - value["max"]] * 2
    values[value["max_rank"]] = value["max"]
    return values


def test_console_and_records_say_where_the_time_of_each_rank_went(run):
    assert (
        f"trace of 2 steps: {run[0] / 'trace.json'}; open it in ui.perfetto.dev"
        in run[1].splitlines()
    )
    (line,) = [line for line in run[1].splitlines() if line.startswith("idle ")]
    assert "% (rank 0: " in line
    lines = read_lines(run[0] / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 4
    events = complete_events(content_of(run[0] / "trace.json"))
    for line in steps:
        names = ("compute_seconds", "communication_seconds", "data_seconds", "idle_fraction")
        parts = [of_both_ranks(line, name) for name in names]
        for rank, (compute, communication, data, idle) in enumerate(zip(*parts, strict=True)):
            assert 0 <= idle < 1 and compute > 0 and communication > 0
            assert (data > 0) == (rank == 0), "only rank 0 reads data"
            window = (compute + communication + data) / (1 - idle)
            assert window <= line["seconds"] + 0.05
            if line["step"] in TRACED:
                mine = [e for e in events if e["tid"] == rank and e["args"]["step"] == line["step"]]
                spent = {
                    cat: sum(e["dur"] for e in mine if e["cat"] == cat) / 1e6
                    for cat in map(str, Work)
                }
                assert compute == pytest.approx(
                    spent["encode"] + spent["forward"] + spent["backward"], abs=1e-5
                )
                assert communication == pytest.approx(spent["communication"], abs=1e-5)
                assert data == pytest.approx(spent["load"], abs=1e-5)
        planned = [rank["total_bytes"] for rank in read_json(run[0] / "plan.json")["ranks"]]
        assert of_both_ranks(line, "peak_memory_bytes") == pytest.approx(planned, abs=4e6), (
            "what tensors took, not the process"
        )
        assert line["model_flops_utilization"] is None, "nothing is calibrated"


# ---- clocks and files by hand


def recorded(step, begin, work=(1.0, 2.0)):
    """A step of two parts and a wait, on a clock that reads `begin` at its begin."""
    x = Instruction(Op.FORWARD, 0, 3)
    middle, end = begin + work[0], begin + sum(work)
    parts = [Interval(Work.FETCH, x, begin, middle), Interval(Work.FORWARD, x, middle, end)]
    return TracedStep(step, end, [*parts, Interval(Work.WAIT, None, end, end + 0.5)])


def test_clocks_that_begin_anywhere_are_set_by_the_moments_at_which_all_ranks_go_on(plan, tmp_path):
    first = [recorded(5, 100.0), recorded(6, 110.0)]
    # it begins a second later than the first
    second = [recorded(5, -7.0, (0.5, 1.5)), recorded(6, 3.0, (0.5, 1.5))]
    write_trace(tmp_path / "trace.json", plan, [first, second])
    events = complete_events(content_of(tmp_path / "trace.json"))
    seconds = {
        rank: [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["tid"] == rank]
        for rank in (0, 1)
    }
    assert seconds[0] == [(0, 1), (1, 3), (3, 3.5), (10, 11), (11, 13), (13, 13.5)]
    assert seconds[1] == [(1, 1.5), (1.5, 3), (3, 3.5), (11, 11.5), (11.5, 13), (13, 13.5)]
    assert [event["name"] for event in events[:3]] == [
        *(
            "wait for weights of forward stage 0 micro-batch 3",
            "forward stage 0 micro-batch 3",
            "wait for sends",
        ),
    ]


@pytest.mark.parametrize(
    ("folder", "steps", "message"),
    [
        ("", [8], "trace of 1 step: {file}; open it in ui.perfetto.dev"),
        ("", [], "no trace was written: it begins with the second step, which did not run"),
        ("gone", [8], "no trace was written: {file} cannot be written: No such file or directory"),
    ],
)
def test_a_trace_of_fewer_steps_or_none_or_one_that_cannot_be_written_is_told(
    plan, tmp_path, monkeypatch, folder, steps, message
):
    monkeypatch.setattr(trace, "gather_to_rank_0", lambda mine: [mine])
    file = tmp_path / folder / "trace.json"
    alone = replace(plan, ranks=plan.ranks[:1])
    told = trace.finish_trace(file, alone, [recorded(step, 10.0 * step) for step in steps])
    assert told == message.format(file=file)
    assert file.exists() == message.startswith("trace of")


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "0"], "--trace 0: it records 1 to train.max_steps - 1 steps"),
        (["--trace=4"], "--trace 4: it records 1 to train.max_steps - 1 steps"),
        (
            ["--plan", "--trace"],
            "--trace records training, and nothing is trained here. Leave --trace out",
        ),
        (["--calibrate", "--trace"], "--trace records training"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(tiny, tmp_path, capsys, arguments, said):
    command = [str(tiny / "config.yaml"), f"run.dir={tmp_path / 'runs'}", *RUN, *arguments]
    assert launch.main(command) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert not (tmp_path / "runs").exists()
