"""Every layout gives on GPUs what it gives on CPUs, in any order of streams, and the host runs
ahead.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from families import family_config
from gpu_ranks import fake_runtime, run_gpu_ranks
from ranks import run_ranks
from scenes import (
    arrays,
    as_batch,
    join,
    make_audit,
    make_config,
    make_document,
    make_engine,
    native_documents,
    native_keys,
    relative,
    save_native_vision,
    save_parts,
    with_slices,
)
from sweeps import sweep
from tiny_models import make_tokenizer
from whole_models import save_whole, whole_config

from mmtrain.engine.algorithms import use_algorithms
from mmtrain.facts.models import models_of
from mmtrain.model.llm.tiny import tiny_model
from mmtrain.plan.instructions import Op
from mmtrain.plan.planner import make_plan

LAYERS, STEPS = 6, 2
HOST = {"parallel__streamed_layers": LAYERS, "parallel__recompute_layers": LAYERS}
PEERS = {
    "parallel__streamed_layers": LAYERS,
    "parallel__stream_from": "peers",
    "parallel__weight_shards": 2,
}
CUT = {"parallel__pipeline": 2, "parallel__boundaries": (3,)}
LORA = {"model__lora": {"r": 2}, "model__trainable": ("projector", "llm.layers.*.lora_*")}
ORDERS = (1, 2)


@dataclass(frozen=True)
class Layout:
    overrides: Mapping[str, Any] = field(default_factory=dict)
    slices: tuple[int, ...] = ()  # blocks of the encoder on each rank; none: all on rank 0
    family: str = "llama"
    native: str = ""  # kind of an encoder that takes images of any size
    whole: str = ""  # kind of a whole model whose LLM takes positions in rows
    off: float = 1e-5  # largest relative difference of rounding

    @property
    def world(self) -> int:
        return self.overrides.get("parallel__pipeline", 1) * self.overrides.get("parallel__data", 1)


LAYOUTS = {
    "pipeline 1": Layout(),
    "pipeline 1, some recomputed": Layout({"parallel__recompute_layers": 2}),
    "pipeline 1, streamed": Layout(HOST),
    "pipeline 1, nf4": Layout({"model__llm__quantize": "nf4"}),
    "pipeline 1, int8": Layout({"model__llm__quantize": "int8"}),
    "pipeline 1, bfloat16": Layout({"model__llm__dtype": "bfloat16"}, off=6e-2),
    "pipeline 1, deterministic": Layout({"train__deterministic": True}),
    "pipeline 2": Layout(CUT),
    "pipeline 2, recomputed": Layout({**CUT, "parallel__recompute_layers": LAYERS}),
    "pipeline 2, streamed and recomputed": Layout({**CUT, **HOST}),
    "pipeline 2, interleaved": Layout({"parallel__pipeline": 2, "parallel__boundaries": (1, 3, 5)}),
    "pipeline 2, encoder in slices": Layout(CUT, slices=(1, 1)),
    "pipeline 2, NaFlex in slices": Layout(CUT, slices=(1, 2), native="naflex"),
    "pipeline 2, Qwen's encoder": Layout(CUT, native="qwen"),
    "pipeline 2, Qwen's encoder in slices, bfloat16": Layout(
        {**CUT, "model__llm__dtype": "bfloat16"}, slices=(1, 2), native="qwen", off=6e-2
    ),
    "pipeline 2, LoRA": Layout({**CUT, **LORA}),
    "pipeline 2, bfloat16, streamed": Layout(
        {**CUT, **HOST, "model__llm__dtype": "bfloat16"}, off=6e-2
    ),
    "pipeline 3, last layer": Layout(
        {
            "parallel__pipeline": 3,
            "parallel__boundaries": (2, 4),
            "model__trainable": ("projector", f"llm.layers.{LAYERS - 1}"),
        }
    ),
    "pipeline 3, gemma 3, bfloat16": Layout(
        {"parallel__pipeline": 3, "parallel__boundaries": (2, 4), "model__llm__dtype": "bfloat16"},
        family="gemma3_text",
        off=6e-2,
    ),
    "pipeline 2, gpt2": Layout(CUT, family="gpt2"),
    "pipeline 2, qwen3_5, streamed and recomputed": Layout({**CUT, **HOST}, family="qwen3_5_text"),
    "pipeline 2, lfm3": Layout(CUT, family="lfm3"),
    "pipeline 2, Qwen3-VL": Layout({"parallel__pipeline": 2, **LORA}, whole="qwen3_vl"),
    "pipeline 2, Qwen3-VL, streamed and recomputed": Layout(
        {"parallel__pipeline": 2, "parallel__streamed_layers": 2, "parallel__recompute_layers": 2},
        whole="qwen3_vl",
    ),
    "pipeline 2, GLM-4.1V": Layout({"parallel__pipeline": 2}, whole="glm4v"),
    "pipeline 2, PaddleOCR-VL": Layout({"parallel__pipeline": 2}, whole="paddleocr_vl"),
    "pipeline 2, Qwen2.5-VL, bfloat16": Layout(
        {"parallel__pipeline": 2, "model__llm__dtype": "bfloat16"}, whole="qwen2_5_vl", off=6e-2
    ),
    "pipeline 4": Layout({"parallel__pipeline": 4, "parallel__boundaries": (1, 3, 5)}),
    "2 replicas": Layout({"parallel__data": 2}),
    "2 replicas, streamed from peers": Layout({"parallel__data": 2, **PEERS}),
    "2 x 2": Layout({**CUT, "parallel__data": 2}),
    "2 x 2, streamed from peers, LoRA": Layout({**CUT, **PEERS, **LORA, "parallel__data": 2}),
}
DAILY = ("pipeline 2, streamed and recomputed",)

pytestmark = [pytest.mark.gpu(count=4), pytest.mark.cpu_ranks]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return the folder of the parts with an LLM of a family."""

    @functools.cache
    def of(family: str):
        folder = tmp_path_factory.mktemp(family)
        save_parts(folder, layers=LAYERS)
        if family != "llama":
            tiny_model(family_config(family, num_hidden_layers=LAYERS), seed=0).save_pretrained(
                folder / "llm"
            )
        return folder

    return of


class WaitsByOperation:
    """Counts how often the host waits for a fake device while an instruction runs, by the
    instruction's operation.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._operation, self._before = "", 0

    def begin(self, operation: str) -> None:
        if (runtime := fake_runtime()) is not None:
            now = runtime.fake_cuda_host_waits()
            self.counts[self._operation] += now - self._before
            self._operation, self._before = operation, now


def train(config, slices, orders=(0,)):
    """By order: numbers of two steps and an evaluation, first gradients, weights, failures; host
    waits by operation.
    """
    use_algorithms(config.train)
    join()
    plan = make_plan(config)
    if slices:
        plan = with_slices(plan, slices, (1,) * plan.pipeline)
    waits = WaitsByOperation()
    by_order = []
    for order in orders:
        by_order.append(train_once(config, plan, order, waits))
        # an engine that ends later, and frees its memory in a forward, would let the host wait
        # there
        gc.collect()
    return by_order, waits.counts


def train_once(config, plan, order, waits):
    if (runtime := fake_runtime()) is not None:
        runtime.fake_cuda_order_by(order)
        torch.cuda.manual_seed(1234)
    gradients: dict[str, np.ndarray] = {}

    def on_instruction(step: int, instruction: Any) -> None:
        waits.begin(str(instruction.op) if engine.is_training else "evaluation")
        if instruction.op is Op.OPTIMIZER_STEP and step == 0:
            gradients.update(
                arrays({name: weight.grad for name, weight in engine.trainable.items()})
            )

    engine = make_engine(config, plan, on_instruction=on_instruction, warms_up=True)
    tried = [way for way in engine.kernels if way.kernel in ("compiled", "eager")]
    if runtime is not None:
        # the fake device has no compiler
        assert tried and all(way.reason and way.slow for way in tried), tried
    audit = make_audit(engine)
    mine, share = audit.plan, plan.microbatches_per_step
    first = mine.data * share

    def batches(*seeds: int):
        if (
            has_grid := models_of(config).has_grid_positions
        ) or config.model.vision.layout == "native":
            layout = models_of(config).layout
            some = [
                [[one]] for seed in seeds for one in native_documents(layout, share, seed + first)
            ]
        else:
            some = [
                [[make_document(seed + i, images=(1, 0, 2)[i % 3])]]
                for seed in seeds
                for i in range(first, first + share)
            ]
        return (
            iter([as_batch(one, config.data.pack_length, has_grid) for one in some])
            if mine.pipeline == 0
            else None
        )

    numbers, of_steps = [], batches(0, 10)
    for _ in range(STEPS):
        waits.begin("between")
        result = engine.train_step(of_steps)
        numbers += [result.loss, result.grad_norm, float(result.supervised_tokens)]
    waits.begin("between")
    numbers += [float(x) for x in engine.evaluate(batches(7), share)[:2]]
    waits.begin("between")
    assert runtime is None or torch.cuda.initial_seed() == 1234, (
        "training draws nothing from a GPU's generator"
    )
    failures = audit.finish(engine.saw_gradient)["failures"]
    return numbers, gradients, arrays(engine.trainable), failures


MAY_WAIT = {"", "between", "evaluation", "reduce_statistics", "optimizer_step"}


@pytest.mark.parametrize("name", sweep(LAYOUTS, DAILY))
def test_a_layout_trains_on_gpus_as_on_cpus_in_any_order_of_streams(parts, tmp_path_factory, name):
    layout = LAYOUTS[name]
    folder, keys = parts(layout.family), {}
    if layout.native:
        save_native_vision(folder / layout.native, layout.native)
        keys = native_keys(folder / layout.native, layout.native)
    if layout.whole:
        folder = tmp_path_factory.mktemp(layout.whole)
        save_whole(layout.whole, folder, make_tokenizer())
    make = whole_config if layout.whole else make_config
    config = make(folder, train__max_steps=STEPS, **layout.overrides, **keys)
    expected = run_ranks(layout.world, train, config, layout.slices)
    ours = run_gpu_ranks(layout.world, train, config, layout.slices, ORDERS)
    worst, waits = 0.0, Counter()
    for ((on_cpu,), _), (by_order, counts) in zip(expected, ours, strict=True):
        waits.update(counts)
        numbers, gradients, weights, _ = on_cpu
        for our_numbers, our_gradients, our_weights, _ in by_order:
            assert our_numbers == pytest.approx(numbers, rel=layout.off)
            assert our_gradients.keys() == gradients.keys() and our_weights.keys() == weights.keys()
            worst = max(
                worst,
                *(relative(our_gradients[tensor], gradients[tensor]) for tensor in gradients),
                0.0,
            )
        assert all(failures == [] for *_, failures in (on_cpu, *by_order))
        first, second = by_order
        assert first[0] == second[0], "the order of streams changes no bit"
        for ours_first, ours_second in zip(first[1:3], second[1:3], strict=True):
            assert all(
                np.array_equal(ours_first[tensor], ours_second[tensor]) for tensor in ours_first
            )
    print(f"{name}: worst relative difference of a gradient {worst:.1e}; host waits {dict(waits)}")
    assert worst <= layout.off
    assert {operation for operation, count in waits.items() if count} <= MAY_WAIT
