"""`--trace`: each rank's work over time, as a file for ui.perfetto.dev and chrome://tracing.

StepClock.intervals() on every rank, a few steps --gather--> rank 0 --one time line--> trace.json in
    the run's folder

The format is Google's "Trace Event Format"; a process is a replica, a thread of it a pipeline rank.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from mmtrain.base.collectives import gather_to_rank_0
from mmtrain.base.durable import whole_file
from mmtrain.base.errors import UserError
from mmtrain.base.printing import counted
from mmtrain.plan.instructions import Instruction, Op
from mmtrain.plan.plan import Plan, RankPlan

TRACE = "trace.json"


class Work(StrEnum):
    """A kind of work that takes a rank's time."""

    LOAD = "load"
    ENCODE = "encode"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    FETCH = "fetch"
    WAIT = "wait"
    OPTIMIZER = "optimizer"


WORK_OF = dict.fromkeys(Op, Work.COMMUNICATION) | {
    Op.LOAD: Work.LOAD,
    Op.ENCODE: Work.ENCODE,
    Op.FORWARD: Work.FORWARD,
    Op.BACKWARD: Work.BACKWARD,
    Op.OPTIMIZER_STEP: Work.OPTIMIZER,
}


class Interval(NamedTuple):
    """A rank's work from `begin` to `end`, in seconds of its clock. Without instruction it waited
    for sends.
    """

    work: Work
    instruction: Instruction | None
    begin: float
    end: float


class TracedStep(NamedTuple):
    """One traced step of one rank, in seconds of that rank's clock."""

    step: int
    left: float  # when it left the step's reduction, which all ranks leave together
    intervals: list[Interval]


def finish_trace(
    file: Path,
    plan: Plan,
    recorded: Sequence[TracedStep],
) -> str | None:
    """Write what all ranks have recorded of the same steps; return rank 0's message for the user.
    Collective.
    """
    if not recorded:
        return "no trace was written: it begins with the second step, which did not run"
    ranks = gather_to_rank_0(recorded)
    if ranks is None:
        return None
    try:
        write_trace(file, plan, ranks)
    except OSError as error:
        return f"no trace was written: {file} cannot be written: {error.strerror}"
    return f"trace of {counted(len(recorded), 'step')}: {file}; open it in ui.perfetto.dev"


def write_trace(
    file: Path,
    plan: Plan,
    ranks: Sequence[Sequence[TracedStep]],
) -> None:
    """Write the same steps of all global ranks; an existing file is replaced whole."""
    # A clock is set by the moments at which all ranks go on; one shift for all its steps keeps
    # intervals in order.
    shifts = []
    begins = []
    for steps in ranks:
        pairs = zip(ranks[0], steps, strict=True)
        shift = statistics.median(reference.left - step.left for reference, step in pairs)
        shifts.append(shift)
        begins.append(steps[0].intervals[0].begin + shift)
    first = min(begins)

    events = list(_names(plan))
    for rank, steps, shift in zip(plan.ranks, ranks, shifts, strict=True):
        for recorded in steps:
            for interval in recorded.intervals:
                events.append(_event(interval, recorded.step, rank, shift - first))

    about = {
        "run": plan.run,
        "pipeline": plan.pipeline,
        "data": plan.data,
        "stages_per_rank": plan.stages_per_rank,
        "microbatches_per_step": plan.microbatches_per_step,
        "steps": [recorded.step for recorded in ranks[0]],
    }
    with whole_file(file) as unfinished, unfinished.open("w") as out:
        out.write(
            '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [\n'
        )
        out.write(",\n".join(json.dumps(event) for event in events))
        out.write("\n]}\n")


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    for replica in range(plan.data):
        yield {
            "ph": "M",
            "name": "process_name",
            "pid": replica,
            "args": {"name": f"replica {replica}"},
        }
    for rank in plan.ranks:
        parts = [f"encoder {stage.slice}" for stage in rank.stages if stage.slice]
        parts += [stage.summary for stage in rank.stages]
        thread = {"ph": "M", "pid": rank.data, "tid": rank.pipeline}
        name = f"rank {rank.rank}: {', '.join(parts)}"
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": rank.pipeline}}


_PREFIX = {Work.WAIT: "wait for ", Work.FETCH: "wait for weights of "}


def _event(
    interval: Interval,
    step: int,
    rank: RankPlan,
    shift: float,
) -> dict[str, Any]:
    begin = round((interval.begin + shift) * 1e6, 3)
    end = round((interval.end + shift) * 1e6, 3)
    x = interval.instruction
    name = "sends"
    about = {"step": step}
    if x is not None:
        name = x.op.replace("_", " ")
        about |= {"op": str(x.op)}
    if x is not None and x.stage >= 0:
        name += f" stage {x.stage} micro-batch {x.microbatch}"
        about |= {"stage": x.stage, "microbatch": x.microbatch}
    return {
        "ph": "X",
        "name": _PREFIX.get(interval.work, "") + name,
        "cat": str(interval.work),
        "pid": rank.data,
        "tid": rank.pipeline,
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": about,
    }


def refuse_unfit_trace(
    steps: int | None,
    max_steps: int | None,
) -> None:
    """Raise UserError where `--trace` asks for more steps than a run makes; None asks for
    nothing.
    """
    if steps is not None and not 1 <= steps < (max_steps or math.inf):
        raise UserError(
            f"--trace {steps}: it records 1 to train.max_steps - 1 steps, since the first "
            f"includes warm-up. train.max_steps is {max_steps}"
        )
