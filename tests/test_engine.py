"""The engine around the parity tests: evaluation, non-finite steps, messages between stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scenes import as_batch, make_config, make_document, save_parts, stock_gradients, stock_llava

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

    def batches(microbatches):
        share = plan.microbatches_per_step
        local = microbatches[mine.data * share : (mine.data + 1) * share]
        return iter([as_batch(m, config.data.pack_length) for m in local]) if mine.pipeline == 0 else None

    return engine, batches


def train_with_evaluation(config, evaluates):
    engine, batches = build(config)
    losses, evaluations = [], []
    for s in range(3):
        if evaluates:
            evaluations.append(engine.evaluate(batches(step(0))))
        losses.append(engine.train_step(batches(step(10 * (s % 2)))).loss)
    return losses, evaluations


@pytest.mark.parametrize("pipeline,data", [(1, 1), (2, 2)])
def test_evaluation_reports_the_stock_loss_and_leaves_training_alone(parts, pipeline, data):
    config = make_config(parts, parallel__pipeline=pipeline, parallel__data=data)
    with_evaluation = run_ranks(pipeline * data, train_with_evaluation, config, True)
    without = run_ranks(pipeline * data, train_with_evaluation, config, False)
    assert [losses for losses, _ in with_evaluation] == [losses for losses, _ in without]
    expected, _ = stock_gradients(stock_llava(parts, seed=0), step(0))
    for _, evaluations in with_evaluation:
        loss_sum, tokens = evaluations[0]
        assert loss_sum / tokens == pytest.approx(expected, rel=1e-5)
        assert evaluations == with_evaluation[0][1], "the same on every rank"
        assert evaluations[1][0] < evaluations[0][0]


def train_on_damage(config):
    engine, batches = build(config)
    before = {name: p.detach().clone() for name, p in engine.trainable.items()}
    microbatches = list(step(0))
    ((document,),) = microbatches[1]
    microbatches[1] = [[replace(document, images=torch.full_like(document.images, float("nan")))]]
    try:
        engine.train_step(batches(tuple(microbatches)))
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
