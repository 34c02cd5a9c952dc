"""The doctor's checks of several ranks: channels between them, and the demo on other layouts than pipeline 1."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from mmtrain.doctor.check import FailedError, Here, Seen
from mmtrain.doctor.runs import SAME, demo, demo_config, losses, pipeline_1, worst
from mmtrain.plan.planner import make_plan
from mmtrain.processes.job import Job
from mmtrain.processes.rank import Rank
from mmtrain.processes.supervise import prepared, run_ranks

MOST_CHANNEL_RANKS = 4
TIMEOUT_SECONDS = 60


def channels(here: Here) -> Seen:
    """Every channel of a ring of ranks with two stages each, messages both ways, computing in between."""
    from mmtrain.doctor.rank import exchange

    ranks = min(len(here.gpus), MOST_CHANNEL_RANKS) if here.gpus else 2
    stages = 2 if ranks <= 3 else 1  # on each rank, of front, four decoder layers and head
    plan = make_plan(demo_config(here, "channels", f"parallel.pipeline={ranks}", f"parallel.stages_per_rank={stages}"))
    on_ranks(here, ranks, functools.partial(exchange, plan, here.folder))
    found = [json.loads((here.folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    rate = min(one["gigabytes_per_second"] for one in found)
    small = max(one["small_microseconds"] for one in found)
    return Seen(
        f"{found[0]['channels']} among {ranks} ranks on {here.device}, by torch's {found[0]['backend']}: all in "
        f"order; {rate:,.2f} GB/s a rank, small messages {small:,.0f} us",
        {"ranks": found},
    )


def on_ranks(here: Here, ranks: int, target: Callable[[Rank], None]) -> None:
    """Run `target` on so many ranks of one machine; raises FailedError with the launcher's message."""
    job = Job(
        places=tuple(f"rank {rank} of {ranks}" for rank in range(ranks)),
        folder=here.folder / "ranks",
        threads=1,
        timeout_seconds=TIMEOUT_SECONDS,
        on_gpus=bool(here.gpus),
        preload=("mmtrain.doctor.rank",),
    )
    job.folder.mkdir()
    with prepared(job):
        failure = run_ranks(target, job)
    if failure is not None:
        raise FailedError(failure.message.splitlines()[0])


def layout(here: Here, pipeline: str, stages_per_rank: str, data: str) -> Seen:
    """The demo on a layout against the demo at pipeline 1: losses of every step."""
    expected = losses(pipeline_1(here))
    name = f"pp{pipeline}x{stages_per_rank}-dp{data}"
    keys = {"pipeline": pipeline, "stages_per_rank": stages_per_rank, "data": data}
    run = demo(here, name, *(f"parallel.{key}={value}" for key, value in keys.items()))
    found = losses(run)
    off = worst(found, expected)
    facts = {"losses": found, "pipeline_1": expected, "worst": off, "boundaries": run.plan["boundaries"]}
    text = f"{len(found)} steps on {here.device}: {off:.1e} off pipeline 1"
    if not off <= SAME:
        raise FailedError(f"{text}, {SAME:.0e} is rounding", facts=facts)
    return Seen(text, facts)
