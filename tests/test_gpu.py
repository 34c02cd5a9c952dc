"""What holds on CPUs holds on GPUs: the demo by the launcher in layouts, repeated runs, memory,
stages, fetches.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from gpu_ranks import let_programs_use_gpus, run_gpu_ranks
from json_files import read_json, read_lines
from torch import nn

from mmtrain.base.json_lines import recorded
from mmtrain.checkpoint.run_folder import METRICS
from mmtrain.config.load import DEMO, load_config
from mmtrain.data.stream.packs import to_device
from mmtrain.doctor import attention
from mmtrain.doctor.runs import SAME, STEPS, largest_difference, losses_of, run_demo
from mmtrain.engine.single_stage import expected_batch
from mmtrain.facts.models import models_of
from mmtrain.model.stage import build_stage
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import HostSource
from mmtrain.plan.planner import make_plan

pytestmark = [pytest.mark.gpu, pytest.mark.nightly]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def runs(folder, request, monkeypatch):
    """A folder of runs, each of which is made once, by programs that see as many GPUs as the test
    needs.
    """
    count = max(marker.kwargs.get("count", 1) for marker in request.node.iter_markers("gpu"))
    let_programs_use_gpus(count, monkeypatch)
    return folder


# ---- the demo by the launcher


def layout(gpus: int, *overrides: str):
    marks = pytest.mark.gpu(count=gpus)
    return pytest.param(
        tuple(f"parallel.{override}" for override in overrides), marks=marks, id="-".join(overrides)
    )


PEERS = ("streamed_layers=4", "stream_from=peers", "weight_shards=2")


@pytest.mark.parametrize(
    "overrides",
    [
        layout(2, "pipeline=2", "stages_per_rank=2"),
        layout(2, "pipeline=1", "data=2"),
        layout(4, "pipeline=1", "data=4"),
        layout(2, "pipeline=1", "data=2", *PEERS),
    ],
)
def test_ranks_train_as_one_process_does(runs, overrides):
    expected = losses_of(run_demo(runs, "float32", "parallel.pipeline=1"))
    name = "-".join(override.removeprefix("parallel.").replace("=", "-") for override in overrides)
    run = run_demo(runs, name, *overrides)
    assert "NCCL" in next(recorded(run / METRICS, "begin"))["backend"].upper()
    assert largest_difference(losses_of(run), expected) < SAME


def test_the_same_command_gives_the_same_bits(runs):
    steps, tensors = [], []
    for name in ("first", "second"):
        run = run_demo(runs, name, "parallel.pipeline=1", "train.deterministic=true")
        records = read_lines(run / "metrics.jsonl")
        steps.append(
            [
                (record["loss"], record["grad_norm"])
                for record in records
                if record["kind"] == "train"
            ]
        )
        tensors.append((run / f"checkpoints/step-{STEPS:08d}/projector.safetensors").read_bytes())
    assert len(steps[0]) == STEPS and steps[0] == steps[1] and tensors[0] == tensors[1]


# a step of a GiB: minutes on the fake CUDA, which tests/cuda/test_memory.py measures
@pytest.mark.gpu(real=True)
def test_a_step_takes_the_memory_that_was_planned(runs):
    packs = ("train.packs_per_microbatch=256", "train.packs_per_step=512")  # a GiB
    run = run_demo(runs, "memory", "parallel.pipeline=1", "model.llm.dtype=bfloat16", *packs)
    (rank,) = read_json(run / "plan.json")["ranks"]
    records = read_lines(run / "metrics.jsonl")
    peak = [record["peak_memory_bytes"]["max"] for record in records if record["kind"] == "train"][
        -1
    ]
    # cuBLAS has a workspace
    assert peak == pytest.approx(rank["total_bytes"], rel=0.1, abs=64 * 2**20)


# ---- in one process


def test_stages_compute_on_the_gpu_what_they_compute_on_the_cpu():
    run_gpu_ranks(1, compare_stages, "cuda")


def compare_stages(device: str) -> None:
    """Compare outputs, loss and gradients of the demo's two stages."""
    # each computes by itself
    config = load_config(DEMO, ["parallel.pipeline=2", "parallel.encoder_ranks=0"])
    batch, hidden = expected_batch(config, models_of(config)), None
    for rank in make_plan(config).ranks:
        (stage,) = rank.stages
        expected = run_stage(build_stage(config, stage, device="cpu"), stage.head, batch, hidden)
        on_device = (
            to_device(batch, torch.device(device)),
            None if hidden is None else hidden.to(device),
        )
        ours = run_stage(build_stage(config, stage, device=device), stage.head, *on_device)
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            # TF32 is 1e-3 off
            assert attention.distance(ours[name], tensor) < 5e-3, f"stage {stage.stage}: {name}"
        hidden = expected.get("output")


def run_stage(module, is_last, batch, hidden):
    """Output or loss of a stage, and gradients of its trained tensors and of its input `hidden`
    (None: the first).
    """
    hidden = module.start(batch) if hidden is None else hidden.detach().requires_grad_()
    if not is_last:
        output = module(hidden, batch.position_ids)
        results = {"output": output.detach()}
        output.backward(
            torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        )
    else:
        loss, _ = module.loss(hidden, batch.position_ids, batch.labels.cpu())
        results = {"loss": loss.detach()}
        loss.backward()
        results["gradient of the input"] = hidden.grad
    return results | {name: p.grad for name, p in module.global_parameters() if p.grad is not None}


@pytest.mark.gpu(real=True)
def test_packs_of_other_lengths_build_no_kernels():
    run_gpu_ranks(1, time_new_lengths, "cuda")


def time_new_lengths(device: str) -> None:
    """Time packed attention over packs whose lengths are new, and over the same packs again."""
    draw, new, again = random.Random(0), [], []
    states = attention._states(torch.device(device), torch.bfloat16)
    for _ in range(8):
        borders = [
            0,
            *sorted(draw.sample(range(1, attention.TOKENS), draw.randrange(1, 12))),
            attention.TOKENS,
        ]
        new.append(seconds_of(lambda borders=borders: attention.packed(borders, *states), device))
        again.append(seconds_of(lambda borders=borders: attention.packed(borders, *states), device))
    median, repeated = statistics.median(new[1:]), statistics.median(again[1:])
    assert median < max(5e-3, 5 * repeated), (
        f"{median * 1e3:.1f} ms for new lengths, {repeated * 1e3:.1f} ms again"
    )


@pytest.mark.gpu(real=True)
def test_fetching_hides_behind_computing_and_no_host_waits_for_it():
    run_gpu_ranks(1, measure_overlap, "cuda:0", 8192)  # 128 MiB a layer


def measure_overlap(device: str, width: int) -> None:
    """Time fetching six layers from page-locked memory, computing for about as long, and both
    together.
    """
    streamed, count = StreamedLayers(HostSource(torch.device(device))), 6
    for number in range(count):
        layer = nn.Linear(width, width, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        streamed.take(number, layer)
    hidden, work = torch.randn(2, width, width, dtype=torch.bfloat16, device=device)

    def run(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        streamed.follow(range(count))
        for number in range(count):
            streamed.around(number, compute)(hidden)
        streamed.end()

    def fastest(action: Callable[[], object]) -> float:
        action()
        return min(seconds_of(action, device) for _ in range(5))

    with torch.no_grad():
        fetching = fastest(lambda: run(lambda x: x))
        products = max(1, math.ceil(fetching / count / fastest(lambda: hidden @ work)))

        def compute(x: torch.Tensor) -> torch.Tensor:
            for _ in itertools.repeat(None, products):
                x @ work
            return x

        computing = fastest(lambda: [compute(hidden) for _ in range(count)])
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
            run(compute)
            torch.cuda.set_sync_debug_mode("default")
        both = fastest(lambda: run(compute))
    times = f"fetching {fetching:.3f} s, computing {computing:.3f} s, both {both:.3f} s"
    assert both <= 1.25 * max(fetching, computing), times


def seconds_of(action: Callable[[], object], device: str) -> float:
    """Seconds until a device has done what an action gives it."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began
