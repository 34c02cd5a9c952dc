"""Who started this process, torchrun or a user, and what all processes of a run have in common."""

from __future__ import annotations

import hashlib
import json
import os

from mmtrain import __version__
from mmtrain.base.disclosed import disclosed
from mmtrain.base.errors import UserError
from mmtrain.checkpoint.resume import flat
from mmtrain.config.load import dump_config
from mmtrain.config.schema import RunConfig
from mmtrain.plan.plan import Plan
from mmtrain.runtime.job import Agreement

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# (rank, number of processes) as others name them who start several: Open MPI, MPICH and Intel MPI, and cluster managers
# that set a part of what torchrun sets, once a machine
OTHER_STARTERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE"))


def rank_of_torchrun() -> int | None:
    """Return this process's rank if torchrun has started it."""
    values = {name: os.environ.get(name, "") for name in TORCHRUN_VARIABLES}
    is_started = values.pop("MASTER_ADDR") != "" and all(value.isdecimal() for value in values.values())
    return int(values["RANK"]) if is_started else None


def refuse_other_starters() -> None:
    """Raise UserError if this is one of several processes, each of which would start the whole run."""
    for rank, size in OTHER_STARTERS:
        if rank in os.environ and os.environ.get(size, "1") != "1":
            raise UserError(
                f"this is one of {os.environ[size]} processes, says the environment ({rank}={os.environ[rank]}, {size}="
                f"{os.environ[size]}: mpirun, or a cluster's manager), and each would start the whole run. Start it "
                "once on each machine, with --nnodes where there are several, or use torchrun. If they are left over "
                f"from something else: unset {rank} {size}"
            )


def agreement(config: RunConfig, plan: Plan, trace_steps: int) -> Agreement:
    """Return what all ranks must have in common: ranks that differ would wait for each other for ever."""
    text = (
        f"mmtrain {__version__} --trace {trace_steps} {plan.chain} {dump_config(config)} {json.dumps(plan.as_dict())}"
    )
    return Agreement(hashlib.sha256(text.encode()).hexdigest(), flat(disclosed(config.model_dump(mode="json"))))
