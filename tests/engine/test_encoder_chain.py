"""Runs with the encoder in slices against runs with it on rank 0: the same to the last bit,
whatever is ahead.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ranks import run_ranks
from scenes import (
    arrays,
    as_batch,
    documents_of,
    make_audit,
    make_config,
    make_document,
    make_engine,
    native_documents,
    native_keys,
    relative,
    save_native_vision,
    save_parts,
    stock_gradients,
    stock_llava,
    with_prefetch,
    with_slices,
)
from tiers import nightly

from mmtrain.base.collectives import all_gather_object
from mmtrain.data.samples.sample import IGNORE
from mmtrain.engine.audit import model_fingerprint
from mmtrain.facts.models import models_of
from mmtrain.plan.instructions import Op
from mmtrain.plan.planner import make_plan

LOCAL = 4  # micro-batches of a step and replica
BLOCKS = 4  # of the encoder that run
STEPS = 3
INTERLEAVED = {2: (1, 2, 3), 3: (1, 2, 3, 4, 5)}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    save_parts(folder, layers=6, vision_layers=BLOCKS + 1)
    return folder


def microbatches_of(step, data, config=None):
    """Of a step: some with images, some of text alone, one of an image and hardly a word."""
    if config is not None and config.model.vision.layout == "native":
        return [
            [[one]] for one in native_documents(models_of(config).layout, LOCAL * data, seed=step)
        ]
    images = (1, 0, 2, 3, 0, 1, 2, 0)
    return [
        [[make_document(100 * step + i, images=images[(i + step) % 8], text=2 if i == 3 else 12)]]
        for i in range(LOCAL * data)
    ]


def train(config, slices, ahead, lead, warms_up=None):
    """Steps with evaluations in between; what each said, the gradients, summed over tokens, what
    was left and ran.
    """
    plan = make_plan(config)
    plan = with_prefetch(plan, 0) if slices is None else with_slices(plan, slices, ahead, lead)
    executed, gradients = [], []

    def on_instruction(step, instruction):
        executed.append(instruction)
        if instruction.op is Op.OPTIMIZER_STEP:
            gradients.append(arrays({name: p.grad for name, p in engine.trainable.items()}))

    engine = make_engine(config, plan, on_instruction=on_instruction, warms_up=warms_up)
    audit = make_audit(engine)
    mine, starts = audit.plan, all_gather_object(audit.start())

    def share(step):
        mine_of = microbatches_of(step, plan.data, config)[mine.data * LOCAL :][:LOCAL]
        return [as_batch(x, config.data.pack_length) for x in mine_of]

    reads = itertools.count()
    stream = (batch for step in range(STEPS + 3) for batch in share(step) if next(reads) >= 0)
    said = []
    for step in range(STEPS):
        said.append(engine.train_step(stream if mine.pipeline == 0 else None))
        said[-1] = (
            said[-1].loss,
            said[-1].grad_norm,
            said[-1].samples,
            said[-1].images,
            said[-1].tiles,
        )
        for count in (1, LOCAL) if step < STEPS - 1 else ():
            said.append(engine.evaluate(iter(share(7)) if mine.pipeline == 0 else None, count))
    audit.check_versions()
    left = arrays({**engine.trainable, **engine.weights.optimizer_state()})
    encoded = {x.microbatch for x in executed if x.op is Op.ENCODE}
    return (
        said,
        gradients,
        left,
        next(reads),
        len(encoded),
        model_fingerprint(start["frozen_parameters"] for start in starts),
    )


LAYOUTS = [  # pipeline, replicas, interleaved, blocks a rank, ahead of each rank, lead
    nightly(2, 1, False, (0, 4), (1, 0), 1),
    nightly(3, 2, False, (1, 0, 3), (12, 9, 6), 4),
    nightly(1, 1, False, (4,), (4,), 1),
    nightly(2, 1, True, (4, 0), (6, 0), 1),
    (2, 2, False, (3, 1), (5, 2), 1),
    nightly(3, 1, True, (1, 2, 1), (12, 9, 4), 4),
    nightly(4, 1, False, (1, 1, 1, 1), (3, 2, 1, 0), 2),
]


def compare_with_rank_0(
    parts, pipeline, data, interleaved, slices, ahead, lead, warms_up=None, **keys
):
    config = make_config(
        parts,
        **keys,
        parallel__pipeline=pipeline,
        parallel__data=data,
        parallel__boundaries=INTERLEAVED[pipeline] if interleaved else None,
        parallel__encoder_ranks=0,
        train__packs_per_step=LOCAL * data,
        train__max_steps=STEPS,
    )
    expected, found = (
        run_ranks(pipeline * data, train, config, *arguments)
        for arguments in ((None, None, None), (slices, ahead, lead, warms_up))
    )
    for rank, (
        (said, gradients, left, reads, encoded, model),
        (said_0, gradients_0, left_0, reads_0, _, model_0),
    ) in enumerate(zip(found, expected, strict=True)):
        assert said == said_0 and model == model_0
        for mine, other in zip([*gradients, left], [*gradients_0, left_0], strict=True):
            assert mine.keys() == other.keys()
            assert all(np.array_equal(mine[name], other[name]) for name in mine), "to the last bit"
        assert reads == reads_0, "nothing is read beyond the run"
        place = rank // data
        assert bool(encoded) == (place == 0 or slices[place] > 0), "the slice runs on its rank"
    return found


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen", (3, 1, False, (1, 2, 1), (6, 4, 2), 2)),
        nightly("naflex", (2, 2, False, (3, 1), (5, 2), 1)),
        nightly("naflex", (3, 1, True, (0, 1, 3), (12, 9, 4), 4)),
    ],
)
def test_slices_of_an_encoder_of_images_of_any_size_change_no_bit(parts, kind, layout):
    save_native_vision(parts / kind, kind, layers=BLOCKS)
    compare_with_rank_0(parts, *layout, **native_keys(parts / kind, kind))


@pytest.mark.parametrize(("pipeline", "data", "interleaved", "slices", "ahead", "lead"), LAYOUTS)
def test_slices_of_the_encoder_change_no_bit(
    parts, pipeline, data, interleaved, slices, ahead, lead
):
    found = compare_with_rank_0(parts, pipeline, data, interleaved, slices, ahead, lead)
    documents = documents_of(microbatches_of(0, data))
    tokens = sum(label != IGNORE for document in documents for label in document.labels)
    loss, gradients = stock_gradients(stock_llava(parts, seed=0), microbatches_of(0, data))
    said, mine, *_ = found[0]
    assert said[0][0] == pytest.approx(loss, rel=1e-5)
    assert mine[0].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative(mine[0][name] / tokens, gradient.double().numpy()) <= 1e-5, name


def test_slices_change_no_bit_where_everything_runs_once_before_the_first_message(parts):
    compare_with_rank_0(parts, 3, 1, False, (0, 3, 1), (3, 2, 1), 1, warms_up=True)
