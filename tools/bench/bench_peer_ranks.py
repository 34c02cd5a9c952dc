"""The rank's part of bench_peers.py: contestants over the same weights and samples, in the same
processes.
"""

from __future__ import annotations

from pathlib import Path

from bench_models import DTYPES, SHAPES, stock_llava, with_shared_weights
from bench_race import Contestant, Settings, Work, make_config, run_row
from bench_rivals import DeepSpeedPipeline, Mmtrain, Stock, TorchPipeline, make_layers
from torch import device as torch_device

from mmtrain.calibration.calibrate import calibrate
from mmtrain.engine.process_groups import join_process_group
from mmtrain.plan.calibration import cpu_device
from mmtrain.plan.planner import make_plan
from mmtrain.runtime.rank import Rank

MMTRAIN, SCRIPT, TUNED = "mmtrain", "stock, as LLaVA's script", "stock, tuned"
DEFAULT, UNIFORM, TORCH = (
    "DeepSpeed, its default cut",
    "DeepSpeed, uniform cut",
    "torch 1F1B, uniform cut",
)
SEED = 0  # of the projector
STAGES = 2
MULTIPLIED_LAYERS = 4  # decoder layers whose matrices measure the machine


def one_rank(settings: Settings, row: str, parts: Path, rank: Rank) -> None:
    """mmtrain at pipeline 1 against the stock loops, and matrix products as the measure of the
    machine.
    """
    shape, dtype, device = SHAPES[settings.shape], DTYPES[settings.dtype], torch_device(rank.device)
    join_process_group(device, settings.timeout_seconds)
    work = Work(settings, row, parts, device)
    config = make_config(settings, parts, 1)
    script = stock_llava(shape, parts, dtype, SEED)
    tuned = with_shared_weights(script)
    contestants: dict[str, Contestant] = {
        MMTRAIN: Mmtrain(config, make_plan(config), work.packed_batches(), device),
        SCRIPT: Stock(script, "script", work.padded_steps()),
        TUNED: Stock(tuned, "tuned", work.padded_steps()),
    }
    layers = script.model.language_model.layers[:MULTIPLIED_LAYERS]
    run_row(
        settings,
        row,
        contestants,
        rank,
        work.facts(config),
        [p for p in layers.parameters() if p.ndim == 2],
    )


def calibration_file(parts: Path) -> Path:
    return parts / "calibration.json"


def calibrate_pipeline(settings: Settings, row: str, parts: Path, rank: Rank) -> None:
    config = make_config(settings, parts, STAGES)
    calibrate(config, make_plan(config), cpu_device(config.parallel), calibration_file(parts), rank)


def two_ranks(settings: Settings, row: str, parts: Path, rank: Rank) -> None:
    """mmtrain at pipeline 2 against DeepSpeed's and torch's pipelines."""
    shape, dtype, device = SHAPES[settings.shape], DTYPES[settings.dtype], torch_device(rank.device)
    join_process_group(device, settings.timeout_seconds)
    work = Work(settings, row, parts, device)
    calibration = calibration_file(parts)
    config = make_config(
        settings, parts, STAGES, calibration=calibration if calibration.exists() else None
    )
    plan, count = make_plan(config), settings.microbatches
    default, uniform, torchs = (make_layers(shape, parts, dtype, SEED) for _ in range(3))
    pipelines = {
        DEFAULT: DeepSpeedPipeline(default, "parameters", STAGES, count, work.padded_batches()),
        UNIFORM: DeepSpeedPipeline(uniform, "uniform", STAGES, count, work.padded_batches()),
        TORCH: TorchPipeline(torchs, STAGES, count, work.padded_batches(), device),
    }
    mmtrain = Mmtrain(config, plan, work.packed_batches(), device)
    boundaries = {MMTRAIN: list(plan.boundaries)}
    # front is layer 0
    boundaries |= {name: [bound - 1 for bound in p.parts[1:-1]] for name, p in pipelines.items()}
    facts = {
        "microbatches_per_step": count,
        "decoder_layers": shape.layers,
        "calibrated": config.parallel.calibration is not None,
        "stages_per_rank": plan.stages_per_rank,
        "microbatches_prefetched": plan.encode_ahead,
        "first_decoder_layer_of_later_stages": boundaries,
    }
    run_row(settings, row, {MMTRAIN: mmtrain, **pipelines}, rank, work.facts(config) | facts)
