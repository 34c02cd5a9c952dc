"""The doctor's checks of numbers: what is computed here is what is computed elsewhere, and again.

The demo's recorded losses were made on a CPU (see `remake_record`); stages are compared with the same on the CPU.
"""

from __future__ import annotations

import json
import os
import platform
import time
from typing import TYPE_CHECKING

from mmtrain.checkpoint.step_folder import TENSORS, step_path
from mmtrain.config.schema import RunConfig
from mmtrain.doctor.check import FailedError, Here, Seen
from mmtrain.doctor.machine import describe_machine
from mmtrain.doctor.runs import STEPS, demo, demo_config, losses, pipeline_1, worst
from mmtrain.launching.machine import plan_for_here

if TYPE_CHECKING:
    import torch

    from mmtrain.data.stream.packs import PackedBatch
    from mmtrain.plan.plan import StagePlan

BFLOAT16 = "model.llm.dtype=bfloat16"
PRECISIONS = {"float32": ("pp1", ()), "bfloat16": ("pp1-bfloat16", (BFLOAT16,))}
# Relative differences of a step's loss from the record. A CPU's differ by the order of sums; a GPU's float32
# convolutions round their factors to 10 bits (TF32, torch's default), bfloat16 keeps 8 of all: 1.2e-3 off float32.
RECORD_TOLERANCES = {"float32": {"cpu": 1e-4, "cuda": 2e-3}, "bfloat16": {"cpu": 5e-3, "cuda": 5e-3}}
STAGE_TOLERANCE = 5e-3  # of a stage in float32 on a GPU: TF32 again


def plan_and_probe(here: Here) -> Seen:
    """A plan, and the family probe without what is remembered of earlier ones."""
    from mmtrain.model.probe import probe

    seconds = {}
    for pipeline in (1, 2, 4):
        began = time.perf_counter()
        plan_for_here(demo_config(here, "plan", f"parallel.pipeline={pipeline}"))
        seconds[f"plan at pipeline {pipeline}"] = time.perf_counter() - began
    os.environ["XDG_CACHE_HOME"] = str(here.folder / "cache")  # of this process alone
    began = time.perf_counter()
    probe("demo:llm", (1, 2, 3))
    seconds["probe"] = time.perf_counter() - began
    (record,) = (here.folder / "cache").rglob("*.json")
    found = json.loads(record.read_text())
    return Seen(
        f"pipeline 1, 2, 4; {found['family']} probed in {seconds['probe']:.1f} s: staged {found['staged']:.1g}, "
        f"packed {found['packed']:.1g} off",
        {"seconds": seconds, "probe": found},
    )


def stages_on_gpu(here: Here) -> Seen:
    """The demo's two stages at pipeline 2 on the GPU and on the CPU: outputs, loss and gradients."""
    return compare_stages(demo_config(here, "stages", "parallel.pipeline=2"), "cuda")


def compare_stages(config: RunConfig, device: str) -> Seen:
    """Run every stage of the config's plan on the CPU and on `device`; raises FailedError beyond STAGE_TOLERANCE."""
    import torch

    from mmtrain.data.stream.packs import to_device
    from mmtrain.doctor.attention import distance
    from mmtrain.engine.single_stage import expected_batch
    from mmtrain.plan.planner import make_plan, models_of

    batch = expected_batch(config, models_of(config))
    config = config.changed({"parallel.encoder_ranks": 0})  # each stage computes by itself
    stages = [stage for rank in make_plan(config).ranks for stage in rank.stages]
    differences: dict[str, float] = {}
    hidden = None
    for stage in stages:
        expected = run_stage(config, stage, batch, hidden, "cpu")
        found = run_stage(config, stage, to_device(batch, torch.device(device)), hidden, device)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            differences[f"stage {stage.stage}: {name}"] = distance(found[name], tensor)
        hidden = expected.get("output")
    name = max(differences, key=differences.__getitem__)
    text = f"{len(stages)} stages in {config.model.llm.dtype}, worst {differences[name]:.1e} off ({name})"
    if not differences[name] <= STAGE_TOLERANCE:
        raise FailedError(f"{text}; {STAGE_TOLERANCE:.0e} is rounding", facts=differences)
    return Seen(text, differences)


def run_stage(
    config: RunConfig, stage: StagePlan, batch: PackedBatch, hidden: torch.Tensor | None, device: str
) -> dict[str, torch.Tensor]:
    """What a stage makes of a micro-batch (stage 0) or of hidden states on a device, and gradients of one backward.

    All of it comes back on the CPU.
    """
    import torch

    from mmtrain.model.stage import build_stage

    module = build_stage(config, stage, device=device)
    found: dict[str, torch.Tensor] = {}
    if hidden is None:
        hidden = module.start(batch)
        leaf = None
    else:
        leaf = hidden = hidden.detach().to(device).requires_grad_()
    if stage.head:
        output, _ = module.loss(hidden, batch.position_ids, batch.labels.cpu())
        found["loss"] = output.detach()
        output.backward()
    else:
        output = module(hidden, batch.position_ids)
        found["output"] = output.detach()
        upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        output.backward(upstream)
    if leaf is not None:
        found["gradient of its input"] = leaf.grad
    named = {name: p.grad for name, p in module.global_parameters() if p.grad is not None}
    return {name: tensor.cpu() for name, tensor in (found | named).items()}


def recorded(here: Here, precision: str) -> Seen:
    """The demo at pipeline 1 against the losses that the record has."""
    record = json.loads(here.record.read_text())
    name, overrides = PRECISIONS[precision]
    run = demo(here, name, "parallel.pipeline=1", *overrides)
    found = losses(run)
    expected, device = record["losses"][precision], "cuda" if here.gpus else "cpu"
    off, tolerance = worst(found, expected), record["tolerances"][precision][device]
    text = f"{precision} on {here.device}: {len(found)} steps, loss {found[0]:.4f} to {found[-1]:.4f}, {off:.1e} off"
    if not off <= tolerance:
        raise FailedError(f"{text} the record, {tolerance:g} is rounding", facts={"losses": found, "record": expected})
    ways = [way for record in run.metrics("attention") for way in record["ways"]]
    facts = {"losses": found, "record": expected, "worst": off, "tolerance": tolerance, "attention": ways}
    slow = [way["reason"] for way in ways if way["slow"]]
    return Seen(f"{text}; attention is slow: {slow[0]}" if slow and precision == "bfloat16" else text, facts)


def remake_record(here: Here) -> Seen:
    """The record anew, as facts; for who has changed what the demo computes."""
    found = {
        precision: losses(demo(here, name, "parallel.pipeline=1", *overrides))
        for precision, (name, overrides) in PRECISIONS.items()
    }
    record = {
        "what": f"losses of {STEPS} steps of demo:llava_pp4 at pipeline 1, in nats per supervised token",
        "made_by": "mmtrain doctor --remake-record",
        "made_on": f"{platform.machine()} CPU",
        "versions": describe_machine()["versions"],
        "tolerances": RECORD_TOLERANCES,
        "losses": found,
    }
    return Seen(f"{STEPS} steps in {' and '.join(found)}", record)


def same_step_twice(here: Here) -> Seen:
    """Two runs of the same command: losses, gradient norms and the trained projector, bit by bit."""
    if here.gpus:  # where sums are made in any order unless they are told not to
        overrides = ("parallel.pipeline=1", "train.deterministic=true")
        runs = [demo(here, f"pp1-deterministic-{i}", *overrides) for i in (1, 2)]
    else:
        runs = [pipeline_1(here), demo(here, "pp1-again", "parallel.pipeline=1")]
    seen = [[(record["loss"], record["grad_norm"]) for record in run.metrics("train")] for run in runs]
    if seen[0] != seen[1]:
        step = next(i for i, (one, other) in enumerate(zip(*seen, strict=True)) if one != other)
        raise FailedError(f"two equal runs differ from step {step} on", facts={"steps": seen})
    tensors = [step_path(run.folder, STEPS) / TENSORS for run in runs]
    if tensors[0].read_bytes() != tensors[1].read_bytes():
        raise FailedError("two equal runs have equal losses, and end with different projectors", facts={"steps": seen})
    return Seen(f"{STEPS} steps, two runs: equal to the last bit, trained projector and all")
