"""Compute what is recorded of plans: choices, seconds and bytes of a configuration, and hashes of instruction lists."""

from __future__ import annotations

import collections
import hashlib
import re
from pathlib import Path
from typing import Any

from mmtrain.base.errors import UserError
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.plan.calibration import Calibration, Device, LayerMeasures, MessageSeconds, calibration_key
from mmtrain.plan.costs import run_costs
from mmtrain.plan.instructions import Schedule, in_common_order
from mmtrain.plan.plan import Plan
from mmtrain.plan.planner import make_plan, models_of
from mmtrain.plan.schedule import Encodes, forward_schedule, prelude, ranks_of, training_schedule
from mmtrain.plan.simulate import Program, simulate

BASE = Path(__file__).with_name("base.yaml")
DEVICES = {"gpu": Device("a GPU", 1, 1, is_gpu=True), "cpu": Device("a CPU", 4, 1)}
KEY = re.compile(r"\b(?:run|model|parallel|data|train|optimizer|eval|checkpoint|export)\.[a-z_]+(?:\.[a-z_]+)*")


# ---- plans


def facts_of(case: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Plan a case. Return the choices, simulated seconds and bytes per rank, or the key that a refusal names."""
    try:
        plan = plan_of(case, scratch)
    except UserError as error:
        named = KEY.search(str(error))
        return {"refused": named[0] if named else None, "message": str(error)}
    replica = [rank for rank in plan.ranks if rank.data == 0]
    return {
        "seconds": simulate(Program(plan.schedule), plan.seconds).seconds,
        "bytes": [rank.total_bytes for rank in replica],
        "host_bytes": [rank.host_bytes for rank in replica],
        "choices": {
            "stages_per_rank": plan.stages_per_rank,
            "boundaries": list(plan.boundaries),
            "recompute": [[stage.recompute_layers for stage in rank.stages] for rank in replica],
            "streamed": [[list(stage.streamed) for stage in rank.stages] for rank in replica],
            "encoder_slices": list(plan.encoder_slices),
            "encode_ahead": plan.encode_ahead,
            "instructions": hash_of(" ".join(map(hash_of, map(text_of, plan.schedule)))),
        },
    }


def plan_of(case: dict[str, Any], scratch: Path) -> Plan:
    """Plan base.yaml with a case's overrides, for its device, if asked as if calibrated. Raises UserError."""
    config, device = load_config(BASE, case["overrides"]), DEVICES[case["device"]]
    if case["calibrated"]:
        file = measured(config, device).save(scratch / "calibration.json")
        config = load_config(BASE, [*case["overrides"], f"parallel.calibration={file}"])
    return make_plan(config, device=device)


def measured(config: RunConfig, device: Device) -> Calibration:
    """Made-up measurements: a decoder layer takes 20 + 31 ms, 11 + 19 ms on supervised rows, and 30 kB a token."""
    models = models_of(config)
    seconds = {"encoder": (0.061, 0.1), "front": (0.003, 0.008), "head": (0.016, 0.017)}
    tokens = config.data.pack_length * config.train.packs_per_microbatch
    layers = {}
    for kind in run_costs(config, models).kinds:
        forward, backward = seconds.get(kind.name, (0.011, 0.019) if kind.on_rows else (0.02, 0.031))
        kept, working = 30_000 * tokens, 9_000 * tokens
        amounts = kept, 8_000 * tokens, working, 2 * working, kept + working
        layers[kind.name] = LayerMeasures(forward, backward, forward + backward, *amounts)
    return Calibration(
        key=calibration_key(config, models, device),
        layers=layers,
        compute_seconds=0.0003,
        encode_seconds=0.002,
        encode_block_seconds=0.0021,
        messages=MessageSeconds(0.0001, 0.0001, 0.0014),
        features=MessageSeconds(0.0001, 0.0001, 0.0007),
        end_seconds=0.01,
        replicas=1,
        matmul_flops_per_second=2e14,
        encode_stem_bytes=2**20,
        encode_later_bytes=2**24,
        fetches={"host": 19e9},
    )


# ---- instruction lists


def shape_of(case: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Plan a case and return what its instruction lists depend on."""
    plan = plan_of(case, scratch)
    return {
        "pipeline": plan.pipeline,
        "microbatches": plan.microbatches_per_step,
        "first_trainable_stage": plan.first_trainable_stage,
        "stages_per_rank": plan.stages_per_rank,
        "encodes": [encodes and [encodes.ahead, list(encodes.before)] for encodes in plan.chain],
        "evaluation_lead": plan.evaluation_lead,
    }


def lists_of(shape: dict[str, Any]) -> dict[str, Any]:
    """Hash the instruction lists of a shape, rank by rank, and count their kinds of instruction."""
    chain = tuple(encodes and Encodes(encodes[0], tuple(encodes[1])) for encodes in shape["encodes"])
    pipeline, microbatches, stages_per_rank = shape["pipeline"], shape["microbatches"], shape["stages_per_rank"]
    training = training_schedule(pipeline, microbatches, shape["first_trainable_stage"], stages_per_rank, chain)
    schedules = {
        "training": training,
        "training in common order": in_common_order(training),
        "prelude": prelude(chain),
        "evaluation": forward_schedule(
            pipeline, 2 * pipeline, stages_per_rank, ranks_of(chain), shape["evaluation_lead"]
        ),
    }
    return {
        name: {"ranks": [hash_of(text_of(order)) for order in schedule], "kinds": kinds(schedule)}
        for name, schedule in schedules.items()
    }


def text_of(order: tuple[Any, ...]) -> str:
    return "\n".join(map(str, order))


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kinds(schedule: Schedule) -> dict[str, int]:
    return dict(sorted(collections.Counter(x.op.value for order in schedule for x in order).items()))
