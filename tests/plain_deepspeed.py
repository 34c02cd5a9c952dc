"""DeepSpeed's own pipeline on frozen layouts: every scenario in real processes, outcomes as JSON on the last line.

    python plain_deepspeed.py

DeepSpeed is imported once and the ranks of each scenario are forked, 1 s each instead of 10. A rank reports the
exception that ended it, or what it returned; ranks that wait for one that has died are killed.
"""

import itertools
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops
import torch
import torch._dynamo  # torch.optim imports it at the first optimizer: 2 s here, or 2 s in every rank
from deepspeed.pipe import LayerSpec, PipelineModule
from ranks import free_port
from torch import nn

PATIENCE = 60  # seconds that a scenario may take
GRACE = 1.5  # seconds in which other ranks reach their own failure after the first one
WIDTH = 8

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else init compiles an op for half a minute


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)


class Trained(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class NoOp(torch.optim.Optimizer):
    """Gets past the first failure: torch refuses an empty list, but takes an empty group."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure=None) -> None:
        pass


def train_once(layers: list[type], own_optimizer: bool, **config: object) -> str:
    """One training step over two stages of two layers each."""
    model = PipelineModule(
        [LayerSpec(layer) for layer in layers], num_stages=2, partition_method="uniform", loss_fn=nn.MSELoss()
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None
    if own_optimizer:
        optimizer = torch.optim.AdamW(trainable) if trainable else NoOp()
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=trainable,
        dist_init_required=False,
        config={"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, **config},
    )
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    engine.train_batch(iter([(torch.randn(2, WIDTH, dtype=dtype), torch.randn(2, WIDTH, dtype=dtype))] * 2))
    return "trained"


def parts(layers: list[type]) -> list[int]:
    """Layers that the default partitioner gives to each of four stages."""
    bounds = PipelineModule([LayerSpec(layer) for layer in layers], num_stages=4).parts
    return [int(last - first) for first, last in itertools.pairwise(bounds)]


UPSTREAM = [Trained, Frozen, Frozen, Frozen]  # stage 1 is frozen
DOWNSTREAM = [Frozen, Frozen, Frozen, Trained]  # stage 0 is frozen
SCENARIOS = {
    "empty optimizer": (2, lambda: train_once(UPSTREAM, own_optimizer=False, gradient_clipping=0.0)),
    "backward upstream": (2, lambda: train_once(DOWNSTREAM, own_optimizer=True, gradient_clipping=0.0)),
    "default clipping": (2, lambda: train_once(UPSTREAM, own_optimizer=True)),
    "bf16": (2, lambda: train_once(UPSTREAM, own_optimizer=True, gradient_clipping=0.0, bf16={"enabled": True})),
    "zero 1": (
        2,
        lambda: train_once(
            UPSTREAM,
            own_optimizer=True,
            gradient_clipping=0.0,
            zero_optimization={"stage": 1},
            zero_allow_untested_optimizer=True,
        ),
    ),
    "all trained": (2, lambda: train_once([Trained] * 4, own_optimizer=True, gradient_clipping=0.0)),
    "partition": (4, lambda: parts([Trained] + [Frozen] * 35)),
}


def run_rank(scenario: str, rank: int, world: int, port: int, report: Connection) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        report.send(["returned", SCENARIOS[scenario][1]()])
    except BaseException as error:  # whatever it is, it is this scenario's result
        report.send([type(error).__name__, str(error)])
    time.sleep(PATIENCE)  # a rank that left would end its peers' waiting with errors that are not theirs


def run(scenario: str) -> dict[int, list]:
    """Outcome by rank; ranks that were still waiting for others when it was clear how it ends are missing."""
    world = SCENARIOS[scenario][0]
    port = free_port()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=run_rank, args=(scenario, rank, world, port, pipes[rank][1])) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    outcomes: dict[int, list] = {}
    deadline = time.monotonic() + PATIENCE
    while len(outcomes) < world and time.monotonic() < deadline:
        for rank, (reports, _) in enumerate(pipes):
            if rank not in outcomes and reports.poll(0.02):
                outcomes[rank] = reports.recv()
                if outcomes[rank][0] != "returned":  # the others now wait for this one for ever
                    deadline = min(deadline, time.monotonic() + GRACE)
    for process in ranks:
        process.kill()
        process.join()
    return outcomes


if __name__ == "__main__":
    print(json.dumps({scenario: run(scenario) for scenario in SCENARIOS}))
