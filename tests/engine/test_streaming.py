"""Runs whose frozen layers are fetched before they compute against runs that keep them: the same to
the last bit.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scenes import (
    arrays,
    as_batch,
    join,
    layers_streamed_here,
    make_audit,
    make_config,
    make_document,
    make_engine,
    save_parts,
)

from mmtrain.base.collectives import all_gather_object
from mmtrain.base.errors import UserError
from mmtrain.engine.audit import AuditError, model_fingerprint
from mmtrain.model.stage import build_stage
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import HostSource, lock
from mmtrain.plan.instructions import Op, fetches_of, uses_of, with_following
from mmtrain.plan.planner import make_plan
from mmtrain.plan.schedule import forward_schedule, training_schedule

LAYERS, LOCAL, STEPS = 6, 3, 2  # micro-batches of a step and replica
LORA = {"model__lora": {"r": 2}}
TRAINS = {
    "connector": {},
    "last layer": {"model__trainable": ("projector", f"llm.layers.{LAYERS - 1}", "llm.head")},
    "LoRA": {**LORA, "model__trainable": ("llm.layers.*.lora_*",)},
    "LoRA and connector": {**LORA, "model__trainable": ("projector", "llm.layers.*.lora_*")},
    "an MLP": {"model__trainable": ("llm.layers.2.mlp.*",)},
}
BOUNDARIES = {1: None, 2: (3,), 3: (2, 4)}  # else the cut follows from what fetching takes
# pipeline, replicas, weight shards
HOST, PEERS_2, PEERS_4, PEERS_2_OF_4, BOTH = (1, 1, 1), (1, 2, 2), (1, 4, 4), (1, 4, 2), (2, 2, 2)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streaming")
    save_parts(folder, layers=LAYERS)
    return folder


@dataclass(frozen=True)
class Case:
    layout: tuple[int, int, int]
    trains: str = "connector"
    dtype: str = "float32"
    recompute: int = 0
    streamed: int = LAYERS
    boundaries: tuple[int, ...] = ()

    def config(self, parts, *, streamed):
        pipeline, data, shards = self.layout
        streams = {"parallel__streamed_layers": self.streamed, "parallel__weight_shards": shards}
        streams["parallel__stream_from"] = "host" if shards == 1 else "peers"
        return make_config(
            parts,
            model__llm__dtype=self.dtype,
            parallel__pipeline=pipeline,
            parallel__data=data,
            parallel__recompute_layers=self.recompute,
            train__packs_per_step=LOCAL * data,
            train__max_steps=STEPS,
            parallel__boundaries=self.boundaries or BOUNDARIES[pipeline],
            **TRAINS[self.trains],
            **(streams if streamed else {}),
        )


def microbatches_of(step, data):
    """Of a step: some with images, some of text alone, one without a label."""
    return [
        [[make_document(100 * step + i, images=(1, 0, 2)[i % 3], labelled=(step, i) != (1, 1))]]
        for i in range(LOCAL * data)
    ]


def train(config):
    """What steps and evaluations in between said, gradients, what is left, and the audit of this
    rank.
    """
    join()
    plan = make_plan(config)
    streamed = layers_streamed_here(plan)
    gradients, whole = [], []

    def on_instruction(step, instruction):
        if streamed is not None:
            whole.append(
                sum(
                    layer.buffer.untyped_storage().nbytes() > 0
                    for layer in streamed.layers.values()
                )
            )
        if instruction.op is Op.OPTIMIZER_STEP:
            gradients.append(arrays({name: p.grad for name, p in engine.trainable.items()}))

    engine = make_engine(config, plan, streamed, on_instruction=on_instruction, warms_up=True)
    audit = make_audit(engine)
    mine, starts = audit.plan, all_gather_object(audit.start())
    if streamed is not None and plan.streaming.source == "host":
        kept = sum(layer.kept.nbytes for layer in streamed.layers.values())
        assert mine.host_bytes == kept, "the host keeps what is planned"

    def share(step, count=LOCAL):
        mine_of = microbatches_of(step, plan.data)[mine.data * LOCAL :][:count]
        return (
            iter([as_batch(x, config.data.pack_length) for x in mine_of])
            if mine.pipeline == 0
            else None
        )

    said = []
    for step in range(STEPS):
        result = engine.train_step(share(step))
        said.append((result.loss, result.grad_norm, result.supervised_tokens))
        said.append(engine.evaluate(share(7), LOCAL))
        said.append({k: x.tolist() for k, x in engine.predicted.items()})
        audit.check_versions()
        if streamed is not None:
            assert not any(
                layer.buffer.untyped_storage().nbytes() for layer in streamed.layers.values()
            )
    left = arrays({**engine.trainable, **engine.weights.optimizer_state()})
    record = audit.finish(engine.saw_gradient)
    fingerprint = model_fingerprint(start["frozen_parameters"] for start in starts)
    return said, gradients, left, fingerprint, record, max(whole, default=0)


def compare(parts, cases):
    """On every rank: each case streamed and not; what differs, fetches, and the most layers whole
    at once.
    """
    found = []
    for case in cases:
        kept, streamed = (train(case.config(parts, streamed=streams)) for streams in (False, True))
        differ = [
            name
            for i, name in enumerate(("said", "", "", "fingerprint"))
            if name and kept[i] != streamed[i]
        ]
        for kind in (1, 2):
            pairs = (
                zip(kept[kind], streamed[kind], strict=True)
                if kind == 1
                else [(kept[kind], streamed[kind])]
            )
            for expected, seen in pairs:
                assert expected.keys() == seen.keys()
                differ += [
                    name
                    for name, value in expected.items()
                    if not np.array_equal(value, seen[name])
                ]
        record = streamed[4]
        differ += record["failures"] + kept[4]["failures"]
        before, after = (
            record["frozen"]["fingerprint_before"],
            record["frozen"]["fingerprint_after"],
        )
        if not before == after == kept[4]["frozen"]["fingerprint_after"]:
            differ.append("frozen")
        found.append(
            (differ, record["frozen"]["streamed_layers"], record["frozen"]["fetches"], streamed[5])
        )
    return found


CASES = [
    Case(HOST, "connector"),
    Case(HOST, "LoRA", recompute=2),
    Case(PEERS_2, "last layer", "bfloat16", recompute=LAYERS),
]
MORE_CASES = [
    Case(BOTH, "LoRA and connector", streamed=2, recompute=1),
    Case(BOTH, "an MLP", "bfloat16"),
]
MORE_CASES += [
    Case(layout, trains, dtype, recompute, LAYERS)
    for i, layout in enumerate((HOST, PEERS_4, PEERS_2_OF_4, (1, 2, 1), (2, 1, 1), (3, 1, 1)))
    for j, trains in enumerate(TRAINS)
    for dtype, recompute in (
        ("float32", (0, 2, LAYERS)[(i + j) % 3]),
        ("bfloat16", (2, LAYERS, 0)[(i + j) % 3]),
    )
]
INTERLEAVED = [Case((2, 1, 1), trains, boundaries=(1, 3, 5), recompute=2) for trains in TRAINS]


def check(parts, cases):
    """Cases of one number of ranks."""
    pipeline, data, _ = cases[0].layout
    by_rank = run_ranks(pipeline * data, compare, parts, cases, timeout=280)
    for i, case in enumerate(cases):
        for rank, found in enumerate(by_rank):
            differ, layers, fetches, whole = found[i]
            assert not differ, (case, rank)
            assert whole <= 2, case
            assert bool(fetches) == bool(layers), case
    return by_rank


def grouped(cases):
    by_layout = {}
    for case in cases:
        by_layout.setdefault(case.layout, []).append(case)
    return list(by_layout.values())


@pytest.mark.parametrize("cases", grouped(CASES), ids=lambda cases: str(cases[0].layout))
def test_streamed_layers_change_no_bit(parts, cases):
    check(parts, cases)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cases", [*grouped(MORE_CASES), INTERLEAVED], ids=lambda cases: str(cases[0].layout)
)
def test_streamed_layers_change_no_bit_in_any_mode(parts, cases):
    check(parts, cases)


# ---- how often, and when


def counted(pipeline, microbatches, first, stages_per_rank, streamed, first_layer=0):
    """Fetches of each rank in a training step, and in an evaluation of as many micro-batches."""
    lists = training_schedule(pipeline, microbatches, first, stages_per_rank)
    passes = forward_schedule(pipeline, microbatches, stages_per_rank)
    return [
        [len(fetches_of(uses_of(instructions, streamed, first_layer))) for instructions in schedule]
        for schedule in (lists, passes)
    ]


def test_fetches_of_a_step_by_hand():
    one = {0: tuple(range(8))}
    # Forward and backward in turn: each begins with two layers that are still whole, but for the
    # first.
    assert counted(1, 5, 0, 1, one) == [[2 + 5 * (6 + 6)], [5 * 8]]
    # The first stage trains nothing: it goes forward alone, and each fetch is for one micro-batch.
    assert counted(2, 5, 1, 1, {0: (0, 1, 2, 3), 1: (4, 5, 6)}, first_layer=4) == [
        [5 * 4, 2 + 5 * 2],
        [5 * 4, 5 * 3],
    ]
    # 1F1B of two: rank 0 goes forward twice, then back and forth, then back twice.
    assert counted(2, 3, 0, 1, {0: (0, 1, 2, 3), 1: (4, 5, 6)})[0][0] == 4 + 4 + 2 + 2 + 2 + 4
    # Only layers from the first that trains go backward.
    assert counted(1, 2, 0, 1, one, first_layer=6)[0] == [8 + 0 + 6 + 2 + 0]
    # Two layers are never let go.
    assert counted(1, 5, 0, 1, {0: (3, 4)})[0] == [2]
    # Interleaved: both micro-batches through stage 0, through stage 2 and back, then back through
    # stage 0.
    assert counted(2, 2, 0, 2, {0: (0, 1), 2: (4, 5)})[0][0] == 2 + 2 + 2


def test_the_next_other_layer_follows():
    assert list(with_following([1, 2, 2, 1, 1])) == [(1, 2), (2, 1), (2, 1), (1, None), (1, None)]
    assert list(with_following([])) == []


class LoggingSource:
    """Keeps layers in this process, and notes when fetches begin and are waited for."""

    device = torch.device("cpu")
    name, is_exact = "logged", True

    def __init__(self):
        self.log = []

    def padded(self, size):
        return size

    def keep(self, layer):
        return layer.buffer.clone()

    def fetch(self, layer):
        number = int(layer.names[0].split(".")[2])
        self.log.append(("fetch", number))
        layer.buffer.copy_(layer.kept)
        return lambda: self.log.append(("wait", number))


def test_the_next_layers_fetch_begins_before_a_layer_computes():
    streamed = StreamedLayers(LoggingSource())
    log, layers = (
        streamed.source.log,
        [torch.nn.Linear(4, 4).requires_grad_(False) for _ in range(3)],
    )
    hidden = torch.ones(1, 4, requires_grad=True)
    for number, layer in enumerate(layers):
        streamed.take(number, layer)

    def forward(number, x):
        log.append(("compute", number))
        return layers[number](x)

    forwards = [streamed.around(number, partial(forward, number)) for number in range(3)]
    streamed.follow([0, 1, 2, 2, 1, 0])
    result = forwards[2](forwards[1](forwards[0](hidden)))
    log.append("backward")
    result.sum().backward()
    streamed.end()
    assert log == [
        *(("fetch", 0), ("fetch", 1), ("wait", 0), ("compute", 0)),
        *(("fetch", 2), ("wait", 1), ("compute", 1)),
        *(("wait", 2), ("compute", 2)),
        "backward",
        *(("fetch", 0), ("wait", 0)),
    ]


# ---- what goes wrong


def flip(tensor):
    tensor.view(-1)[3] ^= 16


def failures_of(parts, case, quantisation=None):
    """What the audit finds at the end where a bit of what this rank keeps was flipped after it
    began.
    """
    config = case.config(parts, streamed=quantisation is None)
    if quantisation is not None:
        config = config.changed({"model.llm.quantize": quantisation})
    engine = make_engine(config)
    audit = make_audit(engine)
    kept = next(iter(engine.stages.values())).streamed.layers[2].kept
    dist.barrier()  # the other rank's audit has compared the memory that they share
    if dist.get_rank() == 0:
        flip(kept if quantisation is None else kept[0].codes)
    dist.barrier()
    return audit.finish(engine.saw_gradient)[
        "failures"
    ], kept.sum().item() if quantisation is None else None


@pytest.mark.parametrize(
    ("case", "quantisation"), [(Case(HOST), None), (Case(PEERS_2), None), (Case(HOST), "nf4")]
)
def test_a_bit_that_flips_where_a_layer_is_kept_fails_the_run(parts, case, quantisation):
    for failures, _ in run_ranks(case.layout[1], failures_of, parts, case, quantisation):
        (failure,) = failures
        assert failure.startswith("frozen tensor llm.layers.2.") and failure.endswith(" changed")


def test_ranks_of_a_machine_that_stream_the_same_layers_share_one_copy(parts):
    (own, first), (other, second) = run_ranks(2, failures_of, parts, Case((1, 2, 1)))
    assert own == other and len(own) == 1, "rank 1 sees what rank 0 has written"
    assert first == second


def wrong_copy(parts):
    """The error of a rank whose source keeps something else than it was given."""
    join()
    config = Case(HOST).config(parts, streamed=True)
    plan = make_plan(config)
    streamed = layers_streamed_here(plan)
    keep = streamed.source.keep

    def wrong(layer):
        kept = keep(layer)
        flip(kept)
        return kept

    streamed.source.keep = wrong
    engine = make_engine(config, plan, streamed)
    with pytest.raises(AuditError) as found:
        make_audit(engine)
    return str(found.value)


def test_what_is_fetched_must_be_what_the_file_has(parts):
    (error,) = run_ranks(1, wrong_copy, parts)
    assert (
        "llm.layers.0." in error and "is fetched with other values than its file has here" in error
    )


def test_a_layer_that_comes_out_of_turn_and_one_that_does_not_come_are_said():
    streamed = StreamedLayers(LoggingSource())
    layers = [torch.nn.Linear(4, 4).requires_grad_(False) for _ in range(3)]
    forwards = []
    for number, layer in enumerate(layers):
        streamed.take(number, layer)
        forwards.append(streamed.around(number, layer.forward))
    hidden = torch.ones(1, 4)
    streamed.follow([0, 1, 2])
    forwards[0](hidden)
    with pytest.raises(RuntimeError, match="decoder layer 2 is used where the list has layer 1"):
        forwards[2](hidden)
    streamed.follow([0, 1])
    forwards[0](hidden)
    with pytest.raises(RuntimeError, match="1 uses of streamed layers are left, first of layer 1"):
        streamed.end()
    assert not any(layer.buffer.untyped_storage().nbytes() for layer in streamed.layers.values())


def without_room(parts):
    """The error of a host that gives no memory to a layer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # memory files are files
    config = Case(HOST).config(parts, streamed=True)
    streamed = StreamedLayers(HostSource(torch.device("cpu")))
    with pytest.raises(UserError) as found:
        build_stage(config, make_plan(config).ranks[0].stages[0], streamed=streamed)
    return str(found.value)


def test_a_host_without_room_is_told_so_by_name(parts):
    (error,) = run_ranks(1, without_room, parts)
    assert "does not fit in the host's memory" in error and "parallel.streamed_layers" in error


def test_memory_that_cuda_cannot_lock_is_told_so_by_name_and_what_it_has_locked_is_unlocked(
    monkeypatch,
):
    answers, unlocked = iter((2, 0)), []
    driver = SimpleNamespace(
        cudaHostRegister=lambda *_: next(answers), cudaHostUnregister=unlocked.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(
        UserError, match=r"CUDA cannot lock 4\.0 KiB of host memory .* \(ulimit -l\)"
    ):
        lock(torch.zeros(4096, dtype=torch.uint8))
    kept = torch.zeros(4096, dtype=torch.uint8)
    place = kept.data_ptr()
    lock(kept)
    assert unlocked == []
    del kept
    assert unlocked == [place]
