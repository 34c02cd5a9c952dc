"""What training more than the connector costs: the tables of configs/README.md, planned for a 7B, measured on the demo.

    python tools/bench/bench_modes.py            prints both tables, to be put into configs/README.md

Planned: the work of a step, and the bytes of the fullest rank at 1, 2, 4 and 8 pipeline ranks, one stage each; no
weights are needed. Measured: one micro-batch of the demo's models through forward, backward and AdamW on this machine,
FLOPs by torch's counter, bytes by what autograd saves and what the optimizer then holds. tests/plan/test_modes_table.py
holds both to the tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.base.printing import say
from mmtrain.config.load import DEMO, load_config
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.packs import PackedBatch
from mmtrain.engine.optimizer import MasterWeights, make_optimizer, optimizer_state
from mmtrain.engine.single_stage import SingleStage, expected_batch
from mmtrain.model.stage import Stage, build_stage
from mmtrain.plan.block_costs import keys_seen
from mmtrain.plan.costs import Models, run_costs
from mmtrain.plan.optimizers import ADAMW
from mmtrain.plan.plan import StagePlan
from mmtrain.plan.planner import make_plan, models_of
from mmtrain.plan.workload import FP32, Workload

BIG = Path(__file__).parents[2] / "configs" / "llava15_7b_pp4.yaml"
PIPELINES = (1, 2, 4, 8)
TRAINED = {  # name of a mode -> model.trainable
    "connector": "projector",
    "connector, last 2 layers": "projector, llm.layers.{last_but_one}, llm.layers.{last}",
    "connector, LoRA": "projector, llm.layers.*.lora_*",
    "connector, encoder by LoRA": "projector, vision.*.lora_*",
    "connector, encoder": "projector, vision",
    "all": "projector, vision, llm",
}
MICROBATCH = (  # the demo's: an image of 16 positions and 48 tokens, 16 of them supervised
    *("data.pack_length=64", "data.expected_text_tokens=48", "data.expected_supervised_fraction=0.25"),
    "train.packs_per_microbatch=1",
)


def configured(mode: str, file: str | Path, layers: int, rank: int, *overrides: str) -> RunConfig:
    """The configuration with what this mode trains; `rank` of LoRA's adapters."""
    targets = "vision.*" if "encoder" in mode else "llm.layers.*"
    lora = (f"model.lora.r={rank}", f"model.lora.alpha={2 * rank}", f"model.lora.targets=[{targets}]")
    trainable = TRAINED[mode].format(last_but_one=layers - 2, last=layers - 1)
    return load_config(file, [f"model.trainable=[{trainable}]", *(lora if "LoRA" in mode else ()), *overrides])


class Planned(NamedTuple):
    """A mode on the 7B."""

    trained: int  # elements
    step_flops: int
    fullest: tuple[tuple[int, int], ...]  # bytes, nothing and everything recomputed, at each of PIPELINES


def planned(mode: str, pipelines: tuple[int, ...] = PIPELINES) -> Planned:
    """What the planner says of a mode."""
    fullest = []
    for pipeline in pipelines:
        layout = (f"parallel.pipeline={pipeline}", "parallel.stages_per_rank=1", "parallel.device_memory_gib=null")
        layout += ("parallel.encoder_ranks=0",)
        plans = [
            make_plan(configured(mode, BIG, 32, 128, *layout, f"parallel.recompute_layers={count}"))
            for count in (0, 1000)
        ]
        fullest.append(tuple(max(rank.total_bytes for rank in plan.ranks) for plan in plans))
        trained = sum(rank.trainable for rank in plans[0].ranks)
        flops = sum(rank.flops.total for rank in plans[0].ranks)
    return Planned(trained, flops, tuple(fullest))


class Measured(NamedTuple):
    """A micro-batch of a mode on the demo's models, and what the planner says of it."""

    flops: int
    planned_flops: int
    saved_bytes: int  # for backward
    planned_saved_bytes: int
    state_bytes: int  # master weights beside stored ones, gradients, moments
    planned_state_bytes: int


def measured(mode: str) -> Measured:
    """One micro-batch and one update on this machine, on one rank that holds everything."""
    config = configured(mode, DEMO, 4, 8, *MICROBATCH)
    models = models_of(config)
    costs = run_costs(config, models)
    stage = build_stage(config, StagePlan(0, 0, len(models.llm.decoder), True, True))
    masters = MasterWeights({name: p for name, p in stage.global_parameters() if p.requires_grad})
    optimizer = make_optimizer(stage, masters.by_name, config.optimizer)
    stored = {p.data_ptr() for p in stage.parameters()}
    with _saved_bytes(stage) as saved:
        _forward_and_backward(stage, expected_batch(config, models))
    masters.reduce_gradients(None)
    optimizer.step()
    state = [moment for moment in optimizer_state(ADAMW, optimizer, masters.by_name).values() if moment.dim()]
    for master in masters.by_name.values():
        state += [master.grad] if master.data_ptr() in stored else [master.grad, master]
    # torch's counter sees the matrix products of attention that is not fused.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        _forward_and_backward(stage, expected_batch(config, models))
    return Measured(
        counted.get_total_flops() - _left_out_by_masks(models, costs.work),
        costs.encoder.forward + sum(layer.flops.total for layer in costs.layers),
        sum(saved.values()),
        sum(layer.kept_bytes for layer in costs.layers),
        sum(tensor.numel() * FP32 for tensor in state),
        sum(layer.state_bytes for layer in costs.layers),
    )


def _forward_and_backward(stage: Stage, batch: PackedBatch) -> None:
    alone = SingleStage(stage, batch, input_gradient=False, backward=True)
    alone.forward()
    alone.backward()


@contextlib.contextmanager
def _saved_bytes(stage: Stage) -> Iterator[dict[int, int]]:
    """Bytes of the distinct storages that autograd saves meanwhile, parameters and buffers left out, by address."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
    alive, found = [], {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)  # so that no other gets its address
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _left_out_by_masks(models: Models, work: Workload) -> int:
    """What torch counts of attention and nobody needs, products with later tokens, in a forward and a backward."""
    llm, keys = models.llm, work.document
    whole = work.tokens * (keys - keys_seen(keys, keys, None))
    rows = work.supervised * (keys - 1 - keys_seen(keys, work.supervised, None))  # the last token predicts nothing
    return round(3 * 4 * llm.heads * llm.head_dim * (whole * (len(llm.decoder) - 1) + rows))


def main() -> None:
    """Print both tables."""
    gib = lambda count: f"{count / 2**30:.1f}"  # noqa: E731
    say("| what trains | parameters | TFLOP a step |" + "".join(f" {count} |" for count in PIPELINES))
    say("|---|" + "---|" * (2 + len(PIPELINES)))
    for mode in TRAINED:
        found = planned(mode)
        bytes_of = "".join(f" {gib(most)} / {gib(least)} |" for most, least in found.fullest)
        say(f"| {mode} | {found.trained / 1e6:,.0f} M | {found.step_flops / 1e12:,.0f} |{bytes_of}")
    say("")
    say("| what trains | MFLOP | planned | saved for backward, KB | planned | optimizer, KB | planned |")
    say("|---|---|---|---|---|---|---|")
    for mode in TRAINED:
        found = measured(mode)
        flops = f"{found.flops / 1e6:,.2f} | {found.planned_flops / 1e6:,.2f}"
        others = " | ".join(f"{count / 1e3:,.0f}" for count in found[2:])
        say(f"| {mode} | {flops} | {others} |")


if __name__ == "__main__":
    main()
