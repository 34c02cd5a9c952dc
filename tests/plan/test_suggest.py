"""Suggested layouts: as good as all others, really planned, told in 80 columns; what no suggestion
changes or fits.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_costs import made_up_calibration
from sweeps import sweep

from mmtrain.base.errors import UserError
from mmtrain.cli import plan as plan_command
from mmtrain.config.load import DEMO, load_config
from mmtrain.config.schema import RunConfig
from mmtrain.facts.models import models_of
from mmtrain.facts.quantised import BITS
from mmtrain.plan import planner
from mmtrain.plan.calibration import Device
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan
from mmtrain.plan.simulate import Program, simulate
from mmtrain.plan.suggest import (
    WORTH,
    Size,
    Suggestion,
    as_options,
    candidates,
    render_suggestion,
    suggest,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
NEAR = 1 + WORTH


def demo(*overrides: str) -> RunConfig:
    return load_config(DEMO, overrides)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    """Vicuna-7B on devices that hold half of it: shapes are recorded, weights are not needed."""
    file = tmp_path_factory.mktemp("suggest") / "config.yaml"
    file.write_text(
        """
run: {name: test}
model:
  llm: {path: lmsys/vicuna-7b-v1.5}
  vision: {name: vit_large_patch14_clip_quickgelu_336.openai}
parallel: {pipeline: 4, device_memory_gib: 10}
data: {shards: none.tar}
train: {packs_per_step: 4, max_steps: 1}
"""
    )
    return file


@pytest.fixture(scope="module")
def of_two(config_file) -> Suggestion:
    return suggest(load_config(config_file), 2)


@pytest.fixture(scope="module")
def of_demo() -> Suggestion:
    return suggest(demo(), 2)


def step_seconds(plan: Plan) -> float:
    return simulate(Program(plan.schedule), plan.seconds).seconds


def all_steps(config: RunConfig, devices: int) -> dict[tuple, float]:
    """Seconds of every candidate that fits."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # without planning what would fit
        patch.setattr(planner, "does_not_fit", lambda *_: "too large")
        for changes in candidates(config, models_of(config).llm, devices):
            if "model.llm.quantize" in changes:
                continue
            try:
                found[tuple(as_options(changes))] = step_seconds(make_plan(config.changed(changes)))
            except UserError as error:
                assert str(error) == "too large"
    return found


def text(suggestion: Suggestion) -> str:
    return " ".join(" ".join(render_suggestion(suggestion)).split())


# ---- what is suggested


@pytest.mark.parametrize(
    ("gib", "devices"), sweep(itertools.product((0.018, 0.03), (1, 2, 4, 6)), [(0.018, 2)])
)
def test_the_best_layout_is_as_fast_as_the_fastest_of_all(gib, devices) -> None:
    config = demo(f"parallel.device_memory_gib={gib}")
    suggestion = suggest(config, devices)
    assert suggestion.layouts[0].step_seconds <= NEAR * min(all_steps(config, devices).values())


@pytest.mark.parametrize("devices", sweep((1, 2, 4), (1,)))
def test_where_layers_must_be_streamed_the_best_is_as_fast_as_the_fastest_of_all(
    config_file, devices
) -> None:
    config = load_config(config_file, ["train.packs_per_step=12"])
    steps = all_steps(config, devices)
    suggestion = suggest(config, devices)
    assert 0 < len(steps) < len(candidates(config, models_of(config).llm, devices)), (
        "some fit, some do not"
    )
    assert suggestion.layouts[0].step_seconds <= NEAR * min(steps.values())
    assert any(
        layout.size.source == "host" and layout.host_bytes > 0 for layout in suggestion.layouts
    )


@pytest.mark.nightly
def test_every_layout_is_what_its_overrides_plan(config_file, of_two) -> None:
    assert len(of_two.layouts) > 2
    for layout in of_two.layouts:
        plan = make_plan(load_config(config_file, as_options(layout.overrides)))
        replica = [rank for rank in plan.ranks if rank.data == 0]
        assert len(plan.ranks) == 2
        assert step_seconds(plan) == layout.step_seconds
        assert max(rank.total_bytes for rank in plan.ranks) == layout.memory_bytes
        assert max(rank.host_bytes for rank in plan.ranks) == layout.host_bytes
        assert sum(rank.recompute_layers for rank in replica) == layout.recompute_layers
        assert (plan.streaming and plan.streaming.source) == layout.size.source
        assert (plan.pipeline, plan.data, plan.packs_per_microbatch) == layout.size[:3]


def test_the_fastest_comes_first_and_more_packs_or_streaming_must_save_a_hundredth() -> None:
    layouts = suggest(demo("parallel.device_memory_gib=0.03"), 4).layouts
    seconds = [layout.step_seconds for layout in layouts]
    assert len(layouts) == 5 and seconds == sorted(seconds)
    for more, less in itertools.permutations(layouts, 2):
        if more.size.is_more_than(less.size):
            assert NEAR * more.step_seconds < less.step_seconds


def test_what_a_step_computes_is_never_changed_and_all_devices_are_used(config_file) -> None:
    free = {"pipeline", "data", "streamed_layers", "stream_from", "weight_shards"}
    given = load_config(config_file)
    every = candidates(given, models_of(given).llm, 4)
    assert {x.get("model.llm.quantize") for x in every} == {None, "nf4", "int8", "fp8"}
    for changes in (x for x in every if "model.llm.quantize" not in x):
        config = load_config(config_file, as_options(changes))  # and so it is a valid one
        assert config.parallel.pipeline * config.parallel.data == 4
        before = load_config(config_file).model_dump()
        after = config.model_dump()
        del before["train"]["packs_per_microbatch"], after["train"]["packs_per_microbatch"]
        parallel = before.pop("parallel"), after.pop("parallel")
        assert (
            before == after
            and {key for key in parallel[0] if parallel[0][key] != parallel[1][key]} <= free
        )


@pytest.mark.nightly
def test_a_quantised_llm_is_suggested_last_and_only_where_that_is_faster(of_two) -> None:
    of_fewer_bits = [layout.size.source in BITS for layout in of_two.layouts]
    assert of_fewer_bits == sorted(of_fewer_bits) and set(of_fewer_bits) == {False, True}
    fastest = min(x.step_seconds for x in of_two.layouts if x.size.source not in BITS)
    assert all(x.step_seconds < fastest for x in of_two.layouts if x.size.source in BITS)
    assert "nf4, int8, fp8: a quantised LLM, near lmsys/vicuna-7b-v1.5" in text(of_two)


def test_what_belongs_to_one_layout_is_left_to_the_planner_which_is_said(of_demo) -> None:
    by_hand = [
        "parallel.boundaries=[1, 2, 3]",
        "parallel.recompute_layers=[1, 1, 1, 1]",
        "parallel.encoder_ranks=0",
    ]
    suggestion = suggest(demo(*by_hand), 2)
    assert suggestion.by_hand == (
        "parallel.boundaries",
        "parallel.recompute_layers",
        "parallel.encoder_ranks",
    )
    assert (
        "chosen by the planner, although CONFIG sets them: parallel.boundaries, parallel.recomp"
        in text(suggestion)
    )
    best = suggestion.layouts[0]
    assert best.overrides["parallel.boundaries"] is None and "parallel.boundaries=null" in text(
        suggestion
    )
    assert step_seconds(make_plan(demo(*by_hand, *as_options(best.overrides)))) == best.step_seconds
    assert [x.step_seconds for x in suggestion.layouts] == [x.step_seconds for x in of_demo.layouts]


@pytest.mark.nightly
def test_a_calibration_gives_seconds_and_leaves_out_what_was_not_measured(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, cpu = demo("parallel.device_memory_gib=1"), Device("Abacus 9000", 2, 1)
    file = made_up_calibration(config, cpu).save(tmp_path / "measured.json")
    named = config.changed({"parallel.calibration": str(file)})
    suggestion = suggest(named, 2, device=cpu)
    assert suggestion.measured_on == "Abacus 9000" and "calibrated on Abacus 9000" in text(
        suggestion
    )
    assert all(layout.size.packs_per_microbatch == 1 for layout in suggestion.layouts)
    assert suggestion.not_measured > 0 and "this calibration does not cover them" in text(
        suggestion
    )
    assert "parallel.calibration" not in suggestion.layouts[0].overrides
    plan = make_plan(named.changed(suggestion.layouts[0].overrides), device=cpu)
    assert plan.step_seconds == suggestion.layouts[0].step_seconds
    other = suggest(named, 2)  # this machine's CPU is no abacus
    assert other.measured_on is None and other.layouts[0].overrides["parallel.calibration"] is None
    assert "parallel.calibration" in other.by_hand


def test_work_is_bounded_by_plans_and_the_text_says_how_many_were_tried(monkeypatch) -> None:
    monkeypatch.setattr("mmtrain.plan.suggest.MOST_PLANS", 6)
    suggestion = suggest(demo(), 4)
    assert suggestion.tried == 6 and suggestion.not_tried > 0
    assert (
        f"6 layouts were planned, the most promising first; {suggestion.not_tried} more may be as"
        in text(suggestion)
    )
    assert suggest(demo(), 4) == suggestion, "whatever else the machine does"


# ---- the text


@pytest.mark.nightly
def test_a_table_tells_each_layout_and_what_to_put_behind_the_config(of_two) -> None:
    lines = render_suggestion(of_two)
    assert max(map(len, lines)) <= 80
    assert "lmsys/vicuna-7b-v1.5" in text(of_two) and "on 2 devices, 10.0 GiB per rank" in text(
        of_two
    )
    rows = [line.split() for line in lines if re.match(r"[1-5] +\d", line)]
    assert [row[0] for row in rows] == [str(i) for i in range(1, len(rows) + 1)]
    assert all(int(row[1]) * int(row[2]) == 2 for row in rows)
    assert "mmtrain calibrate CONFIG measures" in text(of_two)
    assert ("from peers: pays only inside a machine with NVLink" in text(of_two)) == (
        "peers/" in text(of_two)
    )


def test_overrides_that_are_too_long_go_on_behind_a_backslash(of_demo) -> None:
    long = {f"parallel.{'x' * 20}{i}": None for i in range(9)}
    layouts = replace(of_demo.layouts[0], overrides=long), replace(of_demo.layouts[0], overrides={})
    lines = render_suggestion(replace(of_demo, layouts=layouts))
    assert max(map(len, lines)) <= 80
    first = lines.index("append to CONFIG for layout 1:") + 1
    pasted = "\n".join(lines[first : lines.index("for the other layouts:")]).replace("\\\n", "")
    assert pasted.split() == [f"{key}=null" for key in long]
    assert lines[-1] == "  2: (nothing: CONFIG has this layout)"


def test_the_text_fits_80_columns() -> None:
    suggestion = suggest(demo("parallel.device_memory_gib=0.018", "train.packs_per_step=8"), 4)
    wide = {
        "size": Size(1000, 10_000, 100_000, "peers", 8),
        "memory_bytes": 2**50,
        "step_seconds": 1e6,
    }
    for devices, longest in ((1, {}), (100_000, wide)):
        layouts = tuple(replace(layout, **longest) for layout in suggestion.layouts)
        changed = replace(suggestion, devices=devices, layouts=layouts)
        assert max(map(len, render_suggestion(changed))) <= 80
        measured = replace(
            suggestion, measured_on="A" * 60, not_measured=7, not_tried=3, layouts=layouts
        )
        assert max(map(len, render_suggestion(measured))) <= 80


# ---- what cannot be suggested


def test_without_a_limit_all_fits_which_is_said(capsys) -> None:
    assert plan_command.run(plan_command.parse_arguments([DEMO, "--suggest", "2"])) == 0
    told = capsys.readouterr().out
    assert "append to CONFIG for layout 1:" in told
    assert (
        "no memory limit" in told and "without parallel.device_memory_gib all layouts fit" in told
    )


def test_devices_on_which_nothing_fits_are_told_what_the_smallest_layout_needs(config_file) -> None:
    with pytest.raises(UserError) as raised:
        suggest(load_config(config_file, ["parallel.device_memory_gib=0.5"]), 2)
    message = str(raised.value)
    assert message.startswith(
        "no layout of 2 devices fits. The smallest, parallel.pipeline=2 parallel.streamed_layers"
    )
    assert "stage 1 (" in message and "layers streamed" in message and "<- too much" in message


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (7, "Set train.packs_per_step=7 or 14, or choose another number of devices"),
        (22, "at most 6 pipeline ranks, one per layer of demo:llm (front, 4 decoder layers, head)"),
        (
            22,
            "(8), and at most 32,768 micro-batches on all ranks. "
            "Set train.packs_per_step=11, or choose",
        ),
        (99_991, "99,991 devices: no layout uses all of them"),
    ],
)
def test_devices_over_which_a_step_cannot_be_shared_out_are_refused_with_what_could(
    devices, said
) -> None:
    with pytest.raises(UserError) as raised:
        suggest(demo("train.packs_per_step=8"), devices)
    assert said in str(raised.value)
    for packs in re.findall(r"\d+", said.partition("packs_per_step=")[2]):
        assert suggest(demo(f"train.packs_per_step={packs}"), devices).layouts
