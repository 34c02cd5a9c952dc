"""Plans of runs whose frozen layers are fetched: what fits, what it costs, what is chosen and what
is refused.
"""

from __future__ import annotations

import itertools
import math

import pytest

from mmtrain.base.errors import MemoryLimitError, UserError
from mmtrain.config.load import load_config
from mmtrain.facts.models import models_of
from mmtrain.plan.instructions import spread
from mmtrain.plan.plan import render
from mmtrain.plan.planner import make_plan
from mmtrain.plan.schedule import training_schedule
from mmtrain.plan.simulate import Program, instants, simulate
from mmtrain.plan.stage_costs import stage_costs

GIB = 2**30
LLAVA, QWEN_32B, QWEN_72B = (
    f"configs/{name}.yaml" for name in ("llava15_7b_pp4", "qwen25_32b_4x24gb", "qwen25_72b_pp8_dp2")
)
VICUNA_13B = "configs/vicuna13b_last_layer_pp2.yaml"
CONNECTOR = "model.trainable=[projector]"
AUTO = "parallel.streamed_layers=auto"
ONE = ("parallel.pipeline=1", "parallel.data=1", CONNECTOR)


def plan_of(file, *overrides):
    return make_plan(load_config(file, overrides))


def on_one(file, gib, *overrides):
    return plan_of(file, *ONE, f"parallel.device_memory_gib={gib}", *overrides)


def said(plan):
    return " ".join(" ".join(render(plan)).split())


# A device's memory less what CUDA and NCCL take; on each, what the planner refuses without
# streaming, and fits with it.
DEVICES = {"24 GB": 21.5, "40 GB": 37.0, "80 GB": 76.5}
REFUSED = {
    ("24 GB", VICUNA_13B),
    *itertools.product(("24 GB", "40 GB"), (QWEN_32B,)),
    *itertools.product(DEVICES, (QWEN_72B,)),
}


@pytest.mark.parametrize("file", [VICUNA_13B, QWEN_32B, QWEN_72B])
@pytest.mark.parametrize("device", DEVICES)
def test_one_device_trains_the_connector_of_any_of_these_models(device, file):
    gib = DEVICES[device]
    if (device, file) in REFUSED:
        with pytest.raises(MemoryLimitError, match="does not fit"):
            on_one(file, gib)
    plan = on_one(file, gib, AUTO)
    (rank,) = plan.ranks
    assert rank.total_bytes <= 0.94 * gib * GIB
    if (device, file) in REFUSED:
        assert rank.streamed_layers > 2 and rank.host_bytes > 0
        assert f"{rank.streamed_layers} of {plan.decoder_layers} layers are streamed" in said(plan)


def test_layers_that_stay_lie_evenly_between_those_that_are_streamed():
    for count, of in itertools.combinations(range(1, 12), 2):
        places = spread(count, of)
        gaps = [b - a for a, b in itertools.pairwise(places)]
        assert len(set(places)) == count and places[-1] < of
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert abs(places[0] - (of - 1 - places[-1])) <= 1
    (stage,) = on_one(LLAVA, 14, "parallel.streamed_layers=8").ranks[0].stages
    assert stage.streamed == tuple(range(2, 32, 4))


def test_enough_tokens_hide_what_is_fetched_and_fewer_do_not():
    short, long = (
        on_one(
            LLAVA,
            80,
            "parallel.streamed_layers=32",
            "parallel.recompute_layers=0",
            f"train.packs_per_microbatch={n}",
        )
        for n in (1, 4)
    )
    needed = short.streaming.hidden_from_tokens
    assert (
        short.streaming.microbatch_tokens
        == 2048
        < needed
        < 8192
        == long.streaming.microbatch_tokens
    )
    assert (
        f"fetches hide behind computing from {needed:,} tokens a micro-batch on; it has 2,048"
        in said(short)
    )
    # A layer of 202.4 million weights in bfloat16 at 25 GB/s against 2 FLOP a weight and token at
    # 150e12 a second.
    assert needed == pytest.approx(202.4e6 * 2 / 25e9 * 150e12 / (2 * 202.4e6), rel=0.05)


def test_a_step_takes_what_is_not_hidden_of_the_fetches_that_its_lists_have():
    plan = on_one(
        LLAVA,
        80,
        "parallel.streamed_layers=32",
        "parallel.recompute_layers=0",
        "train.packs_per_step=8",
    )
    (rank,) = plan.ranks
    layer = 202_383_360 * 2
    fetches = 2 + 8 * 2 * 30
    assert rank.fetched_bytes == pytest.approx(fetches * layer, rel=1e-3)
    assert rank.host_bytes == pytest.approx(32 * layer, rel=1e-3)
    fetch = 30e-6 + layer / 25e9
    (forward,), (backward,) = plan.seconds.forward, plan.seconds.backward
    bare = 8 * (forward + backward + plan.seconds.encode[0])
    a_layer = (forward - 200e-6) / 32.1, (backward - 200e-6) / 32.1  # the head is a tenth of one
    waiting = sum(8 * 30 * max(0, fetch - seconds) for seconds in a_layer)
    assert simulate(Program(plan.schedule), plan.seconds).seconds == pytest.approx(
        bare + waiting, rel=0.02
    )


@pytest.mark.parametrize(("recompute", "gib"), [("auto", 10), ("auto", 12), ("auto", 16), (8, 12)])
@pytest.mark.parametrize("packs", [1, 2])
def test_recomputation_and_streaming_share_what_does_not_fit_as_no_other_share_is_faster(
    recompute, gib, packs
):
    keys = (
        *ONE,
        AUTO,
        f"parallel.recompute_layers={recompute}",
        f"train.packs_per_microbatch={packs}",
    )
    config = load_config(LLAVA, keys)
    costs = stage_costs(config, models_of(config), int(gib * GIB), None)
    schedule = training_schedule(1, costs.setting.microbatches_per_step, 0)
    layers, (moments,) = ((0, costs.count),), instants(schedule, costs.buffers, polls=True)
    found = costs.fitted(0, layers, moments)
    counts = range(33) if recompute == "auto" else (recompute,)
    every = [costs.rank_cost(layers, (r,), moments, None, n) for r in counts for n in range(33)]
    best = min((need.seconds for need in every if costs.fits(need)), default=math.inf)
    assert costs.fits(found) == (best < math.inf)
    if best < math.inf:
        assert found.seconds <= best * (1 + 1e-9)


def test_what_the_host_may_keep_bounds_what_is_streamed():
    with pytest.raises(UserError, match="does not fit"):
        on_one(QWEN_32B, 21.5, AUTO, "parallel.host_memory_gib=16")
    # All layers would take 58.1 GiB, and fewer are needed.
    plan = on_one(QWEN_32B, 21.5, AUTO, "parallel.host_memory_gib=55")
    assert 40 * GIB < plan.ranks[0].host_bytes <= 55 * GIB
    with pytest.raises(
        UserError,
        match=r"host_memory_gib: 8 GiB, but rank 0 would keep 12\.1 GiB of streamed layers",
    ):
        plan_of(
            LLAVA,
            *ONE,
            "parallel.device_memory_gib=null",
            "parallel.streamed_layers=32",
            "parallel.host_memory_gib=8",
        )


def test_adapters_stay_and_what_trains_otherwise_is_not_streamed():
    lora = ("model.lora.r=8", "model.trainable=[projector, llm.layers.*.lora_*]")
    plan = plan_of(LLAVA, "parallel.pipeline=1", *lora, "parallel.streamed_layers=99")
    assert plan.ranks[0].streamed_layers == 32
    plan = plan_of(
        LLAVA,
        "parallel.pipeline=1",
        "model.trainable=[llm.layers.3.mlp]",
        "parallel.streamed_layers=99",
    )
    assert plan.ranks[0].streamed_layers == 31 and 3 not in plan.ranks[0].stages[0].streamed
    assert plan.first_trainable_layer == 3
    with pytest.raises(
        UserError,
        match=r"streamed_layers: 4, but .* in every decoder layer, such as llm\.layers\.0\.",
    ):
        plan_of(
            LLAVA,
            "parallel.pipeline=1",
            "model.trainable=[llm.layers.*]",
            "parallel.streamed_layers=4",
        )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("parallel.stream_from=peers",), "streamed_layers is 0, so nothing is streamed"),
        ((AUTO, "parallel.stream_from=peers"), "parallel.data 1 needs parallel.data of at least 2"),
        (
            (AUTO, "parallel.stream_from=peers", "parallel.data=4", "parallel.weight_shards=3"),
            "needs one of 2, 4",
        ),
        (
            (AUTO, "parallel.stream_from=peers", "parallel.data=2", "parallel.host_memory_gib=8"),
            "Leave one of them",
        ),
        (
            ("parallel.weight_shards=2", "parallel.data=2"),
            "stream_from is host, which does not use it. Set stream_from=peers",
        ),
        (("parallel.streamed_layers=[1,2]",), "streamed_layers: .* needs 4, one per pipeline rank"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(keys, words):
    with pytest.raises(UserError, match=words):
        load_config(LLAVA, keys)


@pytest.mark.nightly
@pytest.mark.parametrize(("pipeline", "data"), [(8, 1), (16, 4)])
def test_auto_is_never_slower_than_streaming_nothing(pipeline, data):
    layout = (
        f"parallel.pipeline={pipeline}",
        f"parallel.data={data}",
        "parallel.device_memory_gib=77",
    )
    plain, auto = (plan_of(QWEN_72B, *layout, f"parallel.streamed_layers={n}") for n in (0, "auto"))
    seconds = [simulate(Program(plan.schedule), plan.seconds).seconds for plan in (plain, auto)]
    assert seconds[1] <= seconds[0]
    assert auto.streaming is not None or auto.boundaries == plain.boundaries
