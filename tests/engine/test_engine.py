"""The engine around the parity tests: evaluation, non-finite steps, resuming, requests, messages
between stages.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from json_files import read_lines
from ranks import run_ranks
from scenes import (
    arrays,
    as_batch,
    make_config,
    make_document,
    make_engine,
    stock_gradients,
    stock_llava,
    stock_loss_sum,
    with_prefetch,
)
from tiers import nightly

from mmtrain.base.errors import NonFiniteError
from mmtrain.plan.instructions import in_common_order
from mmtrain.plan.planner import make_plan


def step(first_seed):
    return tuple([[make_document(first_seed + i, images=i % 3)]] for i in range(4))


def build(config, prefetched=0, **arguments):
    plan = with_prefetch(make_plan(config), prefetched)
    engine = make_engine(config, plan, **arguments)
    mine = plan.ranks[engine.global_rank]

    def batches(microbatches, share=plan.microbatches_per_step):
        local = [
            as_batch(m, config.data.pack_length) for m in microbatches[mine.data * share :][:share]
        ]
        named = [
            replace(b, keys=tuple(f"key-{mine.data}{k}{key}" for key in b.keys))
            for k, b in enumerate(local)
        ]
        return iter(named) if mine.pipeline == 0 else None

    return engine, batches


def train_with_evaluation(config, evaluates):
    engine, batches = build(config)
    results, evaluations, predicted = [], [], []
    for s in range(3):
        if evaluates:
            local = engine.plan.microbatches_per_step
            evaluations.append(engine.evaluate(batches(step(0)), local))
            for microbatches in (1, local + 3):
                engine.evaluate(batches(step(20) * microbatches, microbatches), microbatches)
            engine.evaluate(batches(damaged(step(0))), local)
            engine.evaluate(batches(step(0)), local)
            predicted.append({k: tokens.tolist() for k, tokens in engine.predicted.items()})
        results.append(engine.train_step(batches(step(10 * (s % 2)))))
        assert engine.predicted == {}
    return results, evaluations, predicted


INTERLEAVED = (1, 2, 3)  # two stages on each of two ranks


@pytest.mark.parametrize(("pipeline", "data", "cut"), [(2, 1, INTERLEAVED), nightly(2, 2, None)])
def test_evaluation_reports_the_stock_loss_and_leaves_training_alone(parts, pipeline, data, cut):
    config = make_config(
        parts, parallel__pipeline=pipeline, parallel__data=data, parallel__boundaries=cut
    )
    with_evaluation = run_ranks(pipeline * data, train_with_evaluation, config, True)
    without = run_ranks(pipeline * data, train_with_evaluation, config, False)
    assert [results for results, *_ in with_evaluation] == [results for results, *_ in without], (
        "to the last bit"
    )
    stock = stock_llava(parts, seed=0)
    expected, _ = stock_gradients(stock, step(0))
    for _, evaluations, _ in with_evaluation:
        first, second, _ = evaluations
        assert first.loss_sum / first.supervised_tokens == pytest.approx(expected, rel=1e-5)
        assert evaluations == with_evaluation[0][1], "the same on every rank"
        assert second.loss_sum < first.loss_sum


def train_warmed_up(config, prefetched, warms_up):
    """Two steps and an evaluation; all that they said and left, and what ran in which order."""
    executed = []
    generators = torch.get_rng_state()
    engine, batches = build(
        config, prefetched, warms_up=warms_up, on_instruction=lambda *what: executed.append(what)
    )
    assert torch.equal(torch.get_rng_state(), generators)
    assert all(p.grad is None for stage in engine.stages.values() for p in stage.parameters())
    assert engine.weights.optimizer_state() == {} and not engine.saw_gradient
    eight = [step(10 * s) + step(10 * s + 4) for s in range(3)]
    stream = (
        itertools.chain.from_iterable(map(batches, eight[1:]))
        if engine.pipeline_rank == 0
        else None
    )
    local = engine.plan.microbatches_per_step
    said = [
        engine.evaluate(batches(eight[0]), local),
        *(engine.train_step(stream) for _ in range(2)),
    ]
    planned = engine.plan.schedule
    first = in_common_order(planned) if warms_up else planned
    for number, schedule in enumerate((first, planned)):
        instructions = schedule[engine.pipeline_rank]
        assert (
            tuple(what for at, what in executed if at == number)[-len(instructions) :]
            == instructions
        )
    return said, arrays({**engine.trainable, **engine.weights.optimizer_state()})


@pytest.mark.parametrize(
    ("pipeline", "data", "cut", "trainable"),
    [
        (2, 2, INTERLEAVED, "projector"),
        nightly(1, 1, None, "vision"),
        nightly(2, 1, None, "llm.head"),
    ],
)
def test_a_run_is_the_same_with_warming_up_and_with_a_first_step_in_common_order(
    parts, pipeline, data, cut, trainable
):
    config = make_config(
        parts,
        parallel__pipeline=pipeline,
        parallel__data=data,
        parallel__boundaries=cut,
        model__trainable=("projector", trainable),
        train__packs_per_step=8,
    )
    prefetched = 0 if trainable == "vision" else 2
    cold, warm = (
        run_ranks(pipeline * data, train_warmed_up, config, prefetched, warms)
        for warms in (False, True)
    )
    for (said, left), (expected, expected_left) in zip(warm, cold, strict=True):
        assert said == expected
        assert left.keys() == expected_left.keys()
        assert all(np.array_equal(left[name], expected_left[name]) for name in left), (
            "to the last bit"
        )


def damaged(microbatches):
    microbatches = list(microbatches)
    ((document,),) = microbatches[1]
    microbatches[1] = [[replace(document, images=torch.full_like(document.images, float("nan")))]]
    return tuple(microbatches)


def counts_of_a_step(config):
    """Its result, and how long this rank would have waited for the gradients of other replicas."""
    engine, batches = build(config)
    reduce, timeouts = dist.all_reduce, set()

    def watched(tensor, *, group=None):
        if group is not None:
            timeouts.add(group._get_backend(tensor.device).options._timeout.total_seconds())
        return reduce(tensor, group=group)

    dist.all_reduce = watched
    return engine.train_step(batches(step(0))), timeouts


def test_a_step_counts_the_data_of_all_replicas_and_waits_for_them_as_long_as_the_configuration_says(
    parts,
):
    config = make_config(
        parts, parallel__pipeline=2, parallel__data=2, parallel__timeout_seconds=77
    )
    documents = [make_document(i, images=i % 3) for i in range(4)]
    results = run_ranks(4, counts_of_a_step, config)
    assert set().union(*(timeouts for _, timeouts in results)) == {77}
    for result, _ in results:
        assert (result.samples, result.images) == (4, 3)
        assert result.tokens == sum(len(d.ids) for d in documents)
        assert result.supervised_tokens == sum(label >= 0 for d in documents for label in d.labels)


def epochs_of_steps(config):
    engine, _ = build(config)
    mine = engine.plan.ranks[dist.get_rank()]
    epochs = []
    # of the step's micro-batches, in the order of its packs
    for counts in ((0, 0, 0, 1), (1, 1, 1, 1), (1, 1, 2, 3)):
        local = [as_batch(m, config.data.pack_length) for m in step(0)]
        both = [
            replace(batch, epochs=(0, epoch)) for batch, epoch in zip(local, counts, strict=True)
        ]
        share = engine.plan.microbatches_per_step
        share = both[mine.data * share : (mine.data + 1) * share]
        epochs.append(engine.train_step(iter(share) if mine.pipeline == 0 else None).epoch)
    return epochs


def test_the_epoch_of_a_step_is_that_of_its_last_pack_on_every_rank(parts):
    assert run_ranks(2, epochs_of_steps, make_config(parts, parallel__data=2)) == [[1, 1, 3]] * 2


def unlabelled_step(images):
    return tuple([[make_document(90 + i, images=images, labelled=False)]] for i in range(4))


def everything(engine):
    """Masters, the weights that are computed with, and AdamW's state, of this rank."""
    named = [pair for stage in engine.stages.values() for pair in stage.global_parameters()]
    stored = {name: p for name, p in named if p.requires_grad}
    return arrays(engine.trainable), arrays(stored), arrays(engine.weights.optimizer_state())


def equal(found, expected):
    return all(
        one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
        for one, other in zip(found, expected, strict=True)
    )


def train_with_a_look(config, steps, before):
    """Train all steps; what was there before step `before`, and what is there at the end."""
    engine, batches = build(config)
    results, seen = [], None
    for number, microbatches in enumerate(steps):
        if number == before:
            seen = everything(engine)
        results.append(engine.train_step(batches(microbatches)))
    return results, seen, everything(engine)


def train_on(config, steps, first, of_ranks, with_state):
    engine, batches = build(config, first_step=first)
    masters, _, state = of_ranks[dist.get_rank()]
    tensors = [
        {n: torch.from_numpy(v) for n, v in kind.items()}
        for kind in (masters, state if with_state else {})
    ]
    engine.weights.load(*tensors)
    loaded = everything(engine)
    results = [engine.train_step(batches(microbatches)) for microbatches in steps[first:]]
    return results, loaded, everything(engine)


IN_BF16 = {
    "model__llm__dtype": "bfloat16",
    "model__trainable": ("projector", "llm.layers.3", "llm.norm"),
    "optimizer__groups": (
        {"match": ("projector",), "lr": 2e-3},
        {"match": ("llm.norm",), "weight_decay": 0.0},
    ),
}


@pytest.mark.parametrize(
    ("pipeline", "data", "trained"),
    [
        (2, 1, IN_BF16),
        nightly(1, 1, IN_BF16),
        nightly(2, 2, {}),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(parts, pipeline, data, trained):
    layout = {
        "parallel__pipeline": pipeline,
        "parallel__data": data,
        "optimizer__weight_decay": 0.1,
    }
    config, world = make_config(parts, **layout, **trained), pipeline * data
    steps = [step(0), step(10), step(20), step(0), step(10)]
    whole = run_ranks(world, train_with_a_look, config, steps, 3)
    seen = [at_save for _, at_save, _ in whole]
    resumed = run_ranks(world, train_on, config, steps, 3, seen, True)
    for rank, (results, loaded, end) in enumerate(resumed):
        assert equal(loaded, seen[rank]), "what was loaded"
        assert [r.step for r in results] == [3, 4] and results == whole[rank][0][3:]
        assert equal(end, whole[rank][2])
    trains = [bool(masters) for masters, _, _ in seen]
    assert trains == [True] * data + [bool(trained)] * (world - data)
    assert [len(state) for *_, state in seen] == [3 * len(masters) for masters, _, _ in seen]
    if world == 1:
        ((*_, forgetful),) = run_ranks(world, train_on, config, steps, 3, seen, False)
        assert not equal(forgetful, whole[0][2]), "the moments matter, so this test can fail"


def told_of_requests(config):
    """Return (requested_save, requested_stop) of this rank after three steps, an evaluation and a
    step.

    The last rank wants a save in the second step, and asks to stop before the evaluation.
    """
    engine, batches = build(config)
    is_last, told = dist.get_rank() == dist.get_world_size() - 1, []
    for save in (False, True, False):
        engine.train_step(batches(step(0)), wants_save=save and is_last)
        told.append((engine.requested_save, engine.requested_stop))
    if is_last:
        engine.request_stop()
    engine.evaluate(batches(step(0)), engine.plan.microbatches_per_step)
    told.append((engine.requested_save, engine.requested_stop))
    engine.train_step(batches(step(0)))
    return [*told, (engine.requested_save, engine.requested_stop)]


def test_what_is_asked_of_one_rank_is_told_to_all_at_once(parts):
    told = [(False, False), (True, False), (False, False), (False, True), (False, True)]
    assert (
        run_ranks(4, told_of_requests, make_config(parts, parallel__pipeline=2, parallel__data=2))
        == [told] * 4
    )


def train_past_bad_steps(config, steps, file, already=0):
    """Results and whether each step left everything as it was, up to the error that ends the
    run.
    """
    engine, batches = build(config, bad_steps_file=file)
    engine.bad_steps = already
    results, untouched, message = [], [], None
    for microbatches in steps:
        before = everything(engine)
        try:
            results.append(engine.train_step(batches(microbatches)))
        except NonFiniteError as error:
            message = str(error)
        untouched.append(equal(everything(engine), before))
    return results, untouched, message, everything(engine), engine.bad_steps


@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), nightly(2, 2)])
def test_a_bad_step_that_may_be_left_out_changes_nothing_and_is_recorded(
    parts, tmp_path, pipeline, data
):
    layout = {
        "parallel__pipeline": pipeline,
        "parallel__data": data,
        "optimizer__weight_decay": 0.1,
    }
    config = make_config(parts, **layout, train__max_bad_steps=1)
    file = tmp_path / "bad_steps.jsonl"
    steps = [step(0), damaged(step(10)), step(20), damaged(step(0))]
    ranks = run_ranks(pipeline * data, train_past_bad_steps, config, steps, file)
    # Any step without an update: the learning rate goes on, weights and moments do not.
    instead = run_ranks(
        pipeline * data, train_with_a_look, config, [step(0), unlabelled_step(1), step(20)], 0
    )
    share = 4 // data
    for (results, untouched, message, end, count), (others, _, expected_end) in zip(
        ranks, instead, strict=True
    ):
        trains = bool(end[0])
        assert untouched == ([False, True, False, True] if trains else [True] * 4)
        assert [r.no_update for r in results] == [None, "loss or gradient is not finite", None]
        assert (
            math.isnan(results[1].loss)
            and math.isnan(results[1].grad_norm)
            and results[1].step == 1
        )
        assert [results[0], results[2]] == [others[0], others[2]] and equal(end, expected_end)
        assert count == 2
        assert message.startswith(
            "step 3: the loss sum is nan and the squared gradient norm nan, with values"
        )
        where = (
            f"micro-batch {1 % share} of replica {1 // share} (samples "
            f"key-{1 // share}{1 % share}0)."
        )
        assert where in message and str(file) in message
        assert message.endswith("bad step 2 of the run, and train.max_bad_steps=1")
    lines = read_lines(file)
    assert [line["step"] for line in lines] == [1, 3]
    for line, first_seed in zip(lines, (10, 0), strict=True):
        assert (line["loss_sum"], line["squared_gradient_norm"]) == ("nan", "nan")
        projectors = list(range(data))
        assert line["ranks"] == sorted({*projectors, (pipeline - 1) * data + 1 // share})
        assert line["parameters"] == [
            f"projector.linear_{i}.{part}" for i in (1, 2) for part in ("weight", "bias")
        ]
        places = [(m["replica"], m["microbatch"], m["keys"]) for m in line["microbatches"]]
        assert places == [
            (i // share, i % share, [f"key-{i // share}{i % share}0"]) for i in range(4)
        ]
        documents = [make_document(first_seed + i, images=i % 3) for i in range(4)]
        assert [m["supervised_tokens"] for m in line["microbatches"]] == [
            sum(x >= 0 for x in d.labels) for d in documents
        ]
    model = stock_llava(parts, seed=0)  # whose first step is the first that is damaged
    file.unlink()
    run_ranks(pipeline * data, train_past_bad_steps, config, steps[1:2], file)
    (line,) = read_lines(file)
    for i, found in enumerate(line["microbatches"]):
        loss = (
            float(stock_loss_sum(model, make_document(10 + i, images=i % 3)).detach())
            / found["supervised_tokens"]
        )
        assert found["loss"] == ("nan" if i == 1 else pytest.approx(loss, rel=1e-5))


def test_a_gradient_alone_that_is_not_finite_is_a_bad_step_too(parts, tmp_path):
    config = make_config(parts, parallel__data=2, train__max_bad_steps=1)
    without_labels = damaged(unlabelled_step(1))
    partly = (*step(0)[:1], *without_labels[1:2], *step(0)[2:])
    file = tmp_path / "bad_steps.jsonl"
    for results, untouched, message, *_ in run_ranks(
        2, train_past_bad_steps, config, [without_labels, partly], file
    ):
        assert results[0].loss is None and math.isnan(results[0].grad_norm)
        assert results[0].no_update == "loss or gradient is not finite" and untouched == [
            True,
            True,
        ]
        assert (
            "loss of each micro-batch is finite, but the gradient of projector.linear_1.weight, "
            in message
        )
    first, second = read_lines(file)
    assert [m["loss"] for m in first["microbatches"]] == [None] * 4
    assert math.isfinite(second["loss_sum"]) and second["squared_gradient_norm"] == "nan"
    assert first["ranks"] == second["ranks"] == [0, 1]


def test_bad_steps_before_a_resume_count_and_a_sound_run_writes_no_record(parts, tmp_path):
    config, file = make_config(parts, train__max_bad_steps=1), tmp_path / "bad_steps.jsonl"
    ((_, _, message, _, count),) = run_ranks(1, train_past_bad_steps, config, [step(0)], file, 1)
    assert message is None and count == 1 and not file.exists()
    ((_, _, message, _, count),) = run_ranks(
        1, train_past_bad_steps, config, [damaged(step(0))], file, 1
    )
    assert "bad step 2 of the run" in message and count == 2 and file.exists()


def test_a_record_that_a_full_disk_refuses_does_not_hide_the_cause(parts):
    config = make_config(parts, train__max_bad_steps=5)
    ((_, _, message, *_),) = run_ranks(
        1, train_past_bad_steps, config, [damaged(step(0))], Path("/dev/full")
    )
    assert message.startswith("step 0: the loss sum is nan")
    assert message.endswith("(/dev/full cannot be written: No space left on device)")
