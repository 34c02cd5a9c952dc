"""What ranks allocate on GPUs is what was planned from a calibration made there, within 5%."""

from __future__ import annotations

import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from bench_models import ModelSize, save_parts
from gpu_ranks import run_gpu_ranks
from scenes import calibrate, join, make_config, make_engine

from mmtrain.engine.single_stage import expected_batch
from mmtrain.plan.calibration import gpu_device
from mmtrain.plan.planner import make_plan

SIZE = ModelSize(8, 256, 512, 4, 256, 2, 64, 2, 28, 14, 12)
LAYOUTS = {
    "as it comes": {},
    "recomputed": {"recompute_layers": 4},
    "streamed": {"streamed_layers": 4},
    "streamed and recomputed": {"streamed_layers": 4, "recompute_layers": 4},
}

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.nightly]


def planned_and_allocated(folder, config):
    """By layout: bytes of this rank as planned, and the most that it has allocated at once in its
    third step.
    """
    join()
    models, file = calibrate(folder, config)
    device = gpu_device(torch.cuda.get_device_name())
    result = {}
    for name, asked in LAYOUTS.items():
        changed = config.changed(
            {f"parallel.{key}": value for key, value in {**asked, "calibration": str(file)}.items()}
        )
        engine = make_engine(changed, make_plan(changed, device=device))
        mine = engine.plan.ranks[dist.get_rank()]
        batches = map(copy.deepcopy, itertools.repeat(expected_batch(changed, models)))
        for _ in range(3):
            step = engine.train_step(batches if mine.pipeline == 0 else None)
        result[name] = (mine.total_bytes, step.ranks[dist.get_rank()].peak_memory_bytes)
        del engine
        gc.collect()  # its memory, too
    return result


@pytest.mark.timeout(600)
def test_ranks_allocate_what_was_planned(tmp_path, monkeypatch):
    # 8 MiB a stream, which plans have in what they reserve
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    save_parts(SIZE, tmp_path, torch.bfloat16)
    config = make_config(
        tmp_path,
        model__llm={"path": str(tmp_path / "llm"), "dtype": "bfloat16"},
        data__expected_text_tokens=SIZE.text_tokens,
        data__pack_length=128,
        parallel__pipeline=2,
        parallel__boundaries=(4,),
        parallel__encoder_ranks=0,
        train__packs_per_step=4,
        train__max_steps=1_000_000,
    )
    of_ranks = run_gpu_ranks(2, planned_and_allocated, tmp_path, config, timeout=500)
    ratios = {name: [rank[name][1] / rank[name][0] for rank in of_ranks] for name in LAYOUTS}
    print(ratios)
    assert all(0.95 <= ratio <= 1.05 for of_layout in ratios.values() for ratio in of_layout), (
        ratios
    )
