"""Who started this process, torchrun or a user, and whether all processes of a run were started for the same one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mmtrain import __version__
from mmtrain.base.disclosed import disclosed
from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape
from mmtrain.checkpoint.resume import flat
from mmtrain.config.load import dump_config
from mmtrain.config.schema import RunConfig
from mmtrain.plan.plan import Plan

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# (rank, number of processes) as others name them who start several: Open MPI, MPICH and Intel MPI, and cluster managers
# that set a part of what torchrun sets, once a machine
OTHER_STARTERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE"))


def rank_of_torchrun() -> int | None:
    """This process's rank if torchrun has started it."""
    found = {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}
    if len(found) < len(TORCHRUN_VARIABLES):
        return None
    for name, value in found.items():
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise UserError(
                f"{name}={value!r} in the environment, where torchrun puts a number: to start ranks from here unset "
                f"{', '.join(TORCHRUN_VARIABLES)}"
            )
    return int(found["RANK"])


def refuse_other_starters() -> None:
    """Raise UserError if this is one of several processes, each of which would start the whole run."""
    for rank, size in OTHER_STARTERS:
        if rank in os.environ and os.environ.get(size, "1") != "1":
            raise UserError(
                f"this is one of {os.environ[size]} processes, says the environment ({rank}={os.environ[rank]}, {size}="
                f"{os.environ[size]}: mpirun, or a cluster's manager), and each would start the whole run; start it "
                "once, without mpirun: it starts its ranks itself; on several machines once on each, with --nnodes; or "
                f"use torchrun. If they are left over from something else: unset {rank} {size}"
            )


def agree(config: RunConfig, plan: Plan, trace_steps: int, rank: int) -> Any:
    """The store at which all ranks meet, once all are known to have the same config and plan, and to trace alike.

    Raises UserError on every rank where they differ: such ranks would wait for each other for ever.
    """
    from torch.distributed import rendezvous

    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    store, _, world_size = next(rendezvous("env://", timeout=timeout))
    text = f"mmtrain {__version__} --trace {trace_steps} {plan.chain} "
    text += dump_config(config) + json.dumps(plan.as_dict())
    keys = flat(disclosed(config.model_dump(mode="json")))
    store.set(f"mmtrain/plan/{rank}", json.dumps([hashlib.sha256(text.encode()).hexdigest(), keys]))
    if rank == 0:
        plans = [json.loads(store.get(f"mmtrain/plan/{other}")) for other in range(world_size)]
        others = [other for other, (digest, _) in enumerate(plans) if digest != plans[0][0]]
        store.set("mmtrain/difference", _difference(plans[0][1], plans[others[0]][1], others) if others else "")
    difference = store.get("mmtrain/difference").decode()
    store.set(f"mmtrain/read/{rank}", "")
    if rank == 0:  # whose process may hold the store: it must not end before all have read
        store.wait([f"mmtrain/read/{other}" for other in range(world_size)])
    if difference:
        raise UserError(difference)
    return store


def _difference(first: dict[str, Any], other: dict[str, Any], others: Sequence[int]) -> str:
    """Return the message: the first three keys whose values differ on rank 0, `first`, and on the first of `others`."""
    keys = [key for key in first | other if first.get(key) != other.get(key)]
    seen = [
        f"{key} is {escape(json.dumps(first.get(key)))} on rank 0 and {escape(json.dumps(other.get(key)))} on rank "
        f"{others[0]}"
        for key in keys[:3]
    ]
    return f"rank {', '.join(map(str, others))} planned a different run than rank 0: " + (
        f"{'; '.join(seen)}. Start every machine with the same configuration"
        if keys
        else "mmtrain's version, secrets in the config, --trace, the model's files, the calibration (name one file in "
        "parallel.calibration) and parallel.device_memory_gib (state it where GPUs differ) must be the same on every "
        "machine"
    )
