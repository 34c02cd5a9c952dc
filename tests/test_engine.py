"""The engine around the parity tests: evaluation, non-finite steps, messages between stages."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scenes import IMAGE_TOKEN, as_batch, make_config, make_document, save_parts, stock_gradients, stock_llava

from mmtrain.data.samples import IGNORE, IMAGE_POSITION
from mmtrain.engine import FrozenPipelineEngine, NonFiniteError, join_process_group
from mmtrain.model.stage import build_chunk
from mmtrain.plan.planner import make_plan


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    save_parts(folder)
    return folder


def step(first_seed):
    return tuple([[make_document(first_seed + i, images=i % 3)]] for i in range(4))


def build(config):
    join_process_group(torch.device("cpu"), 60)
    plan = make_plan(config)
    mine = plan.ranks[dist.get_rank()]
    chunks = {stage.stage: build_chunk(config, stage) for stage in mine.stages}
    engine = FrozenPipelineEngine(config, plan, chunks)

    def batches(microbatches, share=plan.microbatches_per_step):
        local = microbatches[mine.data * share : (mine.data + 1) * share]
        return iter([as_batch(m, config.data.pack_length) for m in local]) if mine.pipeline == 0 else None

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


@pytest.mark.parametrize("pipeline,data", [(1, 1), (2, 2)])
def test_evaluation_reports_the_stock_loss_and_leaves_training_alone(parts, pipeline, data):
    config = make_config(parts, parallel__pipeline=pipeline, parallel__data=data)
    with_evaluation = run_ranks(pipeline * data, train_with_evaluation, config, True)
    without = run_ranks(pipeline * data, train_with_evaluation, config, False)
    assert [results for results, *_ in with_evaluation] == [results for results, *_ in without], "to the last bit"
    stock = stock_llava(parts, seed=0)
    expected, _ = stock_gradients(stock, step(0))
    for _, evaluations, _ in with_evaluation:
        first, second, _ = evaluations
        assert first.loss_sum / first.supervised_tokens == pytest.approx(expected, rel=1e-5)
        assert evaluations == with_evaluation[0][1], "the same on every rank"
        assert second.loss_sum < first.loss_sum


def evaluate_once(config, microbatches):
    engine, batches = build(config)
    local = len(microbatches) // engine.plan.data
    found = engine.evaluate(batches(microbatches, local), local)
    return found, [tokens.tolist() for _, tokens in sorted(engine.predicted.items())]


def with_some_right_answers(model, document, seed):
    """The same document, asked for what the stock model says: all of it, all but one token, or something else."""
    ids = torch.tensor([[IMAGE_TOKEN if i == IMAGE_POSITION else i for i in document.ids]])
    with torch.no_grad():
        said = model(input_ids=ids, pixel_values=document.images, use_cache=False).logits[0].argmax(-1).tolist()
    places = [t for t, label in enumerate(document.labels) if label != IGNORE]
    labels = list(document.labels)
    for t in places if seed % 3 < 2 else ():
        labels[t] = said[t]
    if seed % 3 == 1:
        labels[places[-1]] = (said[places[-1]] + 1) % IMAGE_TOKEN
    if seed % 2:
        labels[places[len(places) // 2]] = IGNORE  # two answers
    return replace(document, labels=tuple(labels)), said


@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("microbatches", [2, 6])
def test_tokens_and_answers_are_counted_as_the_stock_models_logits_say(parts, pipeline, data, microbatches):
    model = stock_llava(parts, seed=0)
    rows, expected = [], {"correct_tokens": 0, "answers": 0, "exact_answers": 0, "supervised_tokens": 0}
    predicted = []
    for place in range(microbatches):
        row = []
        for seed in range(3 * place, 3 * place + 3):
            document, said = with_some_right_answers(model, make_document(seed, images=seed % 3), seed)
            hits = [None if x == IGNORE else x == s for x, s in zip(document.labels, said, strict=True)]
            answers = [list(run) for wanted, run in itertools.groupby(hits, lambda hit: hit is not None) if wanted]
            expected["answers"] += len(answers)
            expected["exact_answers"] += sum(map(all, answers))
            expected["correct_tokens"] += sum(map(sum, answers))
            expected["supervised_tokens"] += sum(map(len, answers))
            predicted += [s for s, hit in zip(said, hits, strict=True) if hit is not None]
            row.append(document)
        rows.append([row])
    assert 0 < expected["exact_answers"] < expected["answers"]
    config = make_config(parts, parallel__pipeline=pipeline, parallel__data=data)
    ranks = run_ranks(pipeline * data, evaluate_once, config, rows)
    for found, _ in ranks:
        assert {name: getattr(found, name) for name in expected} == expected
    by_last_stage = [tokens for _, tokens in ranks[-data:]]
    assert [token for replica in by_last_stage for tokens in replica for token in tokens] == predicted
    assert all(tokens == [] for _, tokens in ranks[:-data])


def damaged(microbatches):
    microbatches = list(microbatches)
    ((document,),) = microbatches[1]
    microbatches[1] = [[replace(document, images=torch.full_like(document.images, float("nan")))]]
    return tuple(microbatches)


def train_on_damage(config):
    engine, batches = build(config)
    before = {name: p.detach().clone() for name, p in engine.trainable.items()}
    evaluation = engine.evaluate(batches(damaged(step(0))), engine.plan.microbatches_per_step)
    assert math.isnan(evaluation.loss_sum) and evaluation.answers == 4
    try:
        engine.train_step(batches(damaged(step(0))))
    except NonFiniteError as error:
        return str(error), all(torch.equal(before[name], p) for name, p in engine.trainable.items())
    return None


@pytest.mark.parametrize("pipeline,data", [(2, 1), (1, 2)])
def test_a_non_finite_loss_stops_every_rank_before_any_update(parts, pipeline, data):
    config = make_config(parts, parallel__pipeline=pipeline, parallel__data=data)
    outcomes = run_ranks(pipeline * data, train_on_damage, config)
    for message, unchanged in outcomes:
        assert message.startswith("step 0: the loss sum is nan") and "no update was made" in message
        assert unchanged


def counts_of_a_step(config):
    engine, batches = build(config)
    return engine.train_step(batches(step(0)))


def test_a_step_counts_the_data_of_all_replicas(parts):
    config = make_config(parts, parallel__pipeline=2, parallel__data=2)
    documents = [make_document(i, images=i % 3) for i in range(4)]
    for result in run_ranks(4, counts_of_a_step, config):
        assert (result.samples, result.images) == (4, 3)
        assert result.tokens == sum(len(d.ids) for d in documents)
        assert result.supervised_tokens == sum(label >= 0 for d in documents for label in d.labels)


def epochs_of_steps(config):
    engine, _ = build(config)
    mine = engine.plan.ranks[dist.get_rank()]
    epochs = []
    for counts in ((0, 0, 0, 1), (1, 1, 1, 1), (1, 1, 2, 3)):  # of the step's micro-batches, in the order of its packs
        local = [as_batch(m, config.data.pack_length) for m in step(0)]
        both = [replace(batch, epochs=(0, epoch)) for batch, epoch in zip(local, counts, strict=True)]
        share = engine.plan.microbatches_per_step
        share = both[mine.data * share : (mine.data + 1) * share]
        epochs.append(engine.train_step(iter(share) if mine.pipeline == 0 else None).epoch)
    return epochs


@pytest.mark.parametrize(("pipeline", "data"), [(2, 1), (1, 2)])
def test_the_epoch_of_a_step_is_that_of_its_last_pack_on_every_rank(parts, pipeline, data):
    config = make_config(parts, parallel__pipeline=pipeline, parallel__data=data)
    assert run_ranks(pipeline * data, epochs_of_steps, config) == [[1, 1, 3]] * 2
