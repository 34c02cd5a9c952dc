"""From a configuration to ranks that train: this process starts its machine's, or is the one that torchrun started.

plan --> data checked --> run folder locked and prepared, where it begins --> ranks, all with the same plan --> how it
ended. The first process of a run does what is done once: the launcher of machine 0, or torchrun's rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mmtrain.base.errors import EncoderSliceError, UserError
from mmtrain.base.json_lines import recorded
from mmtrain.base.printing import escape, print_info, print_note, show_cursor, show_error
from mmtrain.checkpoint.resume import AUTO, ResumePoint, find_start, is_complete, refuse_unfit_init_from_run
from mmtrain.checkpoint.run_folder import METRICS, REPORT, locked, prepare_folder, run_folder
from mmtrain.checkpoint.step_folder import step_folders, step_of
from mmtrain.config.schema import RunConfig
from mmtrain.engine.trace import refuse_unfit_trace
from mmtrain.launching.command_line import Options
from mmtrain.launching.data import check_data, with_formats
from mmtrain.launching.machine import (
    job_here,
    plan_here,
    refuse_missing_quantisation,
    refuse_missing_trackers,
    refuse_short_host_memory,
)
from mmtrain.launching.starters import TORCHRUN_VARIABLES, agree
from mmtrain.models.probing.probe import probe, probe_encoder
from mmtrain.models.weights.projector_files import refuse_unfit_init_from
from mmtrain.plan.plan import Plan, RankPlan, render
from mmtrain.plan.refusals import GpuMemory, refuse_short_memory
from mmtrain.plan.schedule import ranks_of
from mmtrain.report.page import write_page
from mmtrain.runtime.failures import Failure
from mmtrain.runtime.gpus import visible_gpus
from mmtrain.runtime.job import Job
from mmtrain.runtime.rank import Rank, run_rank
from mmtrain.runtime.supervise import STOPPED, prepared, run_ranks, set_rank_environment

ANEW = "To train anew choose another run.name, or set run.overwrite=true, which deletes it"
SIGNALLED = 128  # exit codes above it: ended by the signal of that number less 128

Train = Callable[[Rank], str | None]


def train(config: RunConfig, options: Options) -> int:
    """Start this machine's ranks, wait for their end and print how the run ended; return the exit code."""
    local_ranks, gpus = ranks_of_node(config, options), visible_gpus()
    plan = plan_here(config, gpus, local_ranks)
    if not _can_slice(config, plan, alone=options.nnodes == 1):
        config = config.changed({"parallel.encoder_ranks": 0})
        plan = plan_here(config, gpus, local_ranks)
    job = dataclasses.replace(
        job_here(config, plan, gpus, local_ranks, run_folder(config)),
        nodes=options.nnodes,
        node=options.node_rank,
        endpoint=options.rdzv_endpoint,
        saves_when_asked=True,
    )
    here = [plan.ranks[number] for number in job.local_ranks]
    _refuse_unfit(config, plan, here, options, is_first=job.node == 0)
    for rank_plan, (number, gpu) in zip(here, enumerate(gpus), strict=False):
        refuse_short_memory(rank_plan, f"GPU {number} ({gpu.name})", GpuMemory(gpu.total_bytes, gpu.free_bytes))
    to_agree_on = config if job.nodes > 1 else None
    if any(rank_plan.pipeline == 0 for rank_plan in here):
        config = check_data(config, others_wait=job.nodes > 1)
    with locked(job.folder) if job.node == 0 else contextlib.nullcontext():
        start = None
        if job.node == 0:
            start = find_start(config, options.resume, options.allow_change)
            if start is not None and job.nodes == 1 and is_complete(job.folder, start.checkpoint, config):
                print_info(f"complete: {job.folder} has made all its {start.checkpoint.step} steps. {ANEW}")
                return 0
            _prepare(config, plan, start)
        if job.nodes > 1 and job.node == 0:
            _say_who_can_reach_it(job.endpoint)
        job.folder.mkdir(parents=True, exist_ok=True)  # other machines may not see the folder of the first one
        with prepared(job):
            _try_family(config, plan)
            failure = run_ranks(functools.partial(_train, config, plan, start, options.trace or 0, to_agree_on), job)
        if job.node == 0:
            _leave_page(job.folder)  # first: whoever reads only the last line must read how the run ended
        return _report_end(failure, job, _how_to_resume(config, options))


def _report_end(failure: Failure | None, job: Job, how_to_resume: str) -> int:
    """Print how the run ended and what to do next; return the exit code."""
    if failure is None:
        if job.node == 0:
            print_info(f"results: {job.folder}")
        return 0
    if failure.exit_code == STOPPED:
        print_info(f"{failure.message}. {how_to_resume}")
        return STOPPED
    show_cursor()  # a rank that was killed could not
    show_error(failure.message)
    if failure.exit_code > SIGNALLED and job.node == 0:
        if saved := step_folders(job.folder):
            print_note(f"nothing was saved since step {step_of(saved[0])}. {how_to_resume}")
        else:
            print_note("nothing was saved yet: the same command begins where this run began")
    return failure.exit_code


def train_as_rank(config: RunConfig, options: Options, rank: int) -> int:
    """Train as global rank `rank`, whose process torchrun has started; return the exit code."""
    local_ranks, gpus = _ranks_of_torchrun(config, options), visible_gpus()
    plan = plan_here(config, gpus, local_ranks)
    job = dataclasses.replace(job_here(config, plan, gpus, local_ranks, run_folder(config)), saves_when_asked=True)
    first = rank - int(os.environ["LOCAL_RANK"])
    _refuse_unfit(config, plan, plan.ranks[first : first + local_ranks], options, is_first=rank == 0)
    to_agree_on, start = config, None
    if rank == 0:
        config = check_data(config, others_wait=len(plan.ranks) > 1)
    elif plan.ranks[rank].pipeline == 0:
        config = with_formats(config)  # rank 0 may run on another machine
    with locked(job.folder) if rank == 0 else contextlib.nullcontext():
        if rank == 0:
            start = find_start(config, options.resume, options.allow_change)
            _prepare(config, plan, start)
        set_rank_environment(job.threads, on_gpus=job.on_gpus)
        if rank == 0:
            _try_family(config, plan)
            _can_slice(config, plan, alone=False)
        store = agree(to_agree_on, plan, options.trace or 0, rank)  # and wait until rank 0 has prepared the folder
        target = functools.partial(_train, config, plan, start, options.trace or 0, None)
        stopped = run_rank(functools.partial(_train_and_say, target, _how_to_resume(config, options)), job)
        del store  # it may be the one that all ranks meet at
        if rank == 0:
            _leave_page(job.folder)
    return 0 if stopped is None else STOPPED


def _refuse_unfit(config: RunConfig, plan: Plan, here: Sequence[RankPlan], options: Options, *, is_first: bool) -> None:
    """Raise UserError for what this machine lacks for its ranks, `here`; the run's first process needs trackers too."""
    refuse_unfit_trace(options.trace, config.train.max_steps)
    if is_first:
        refuse_missing_trackers(config)
    refuse_missing_quantisation(config)
    refuse_short_host_memory(here)


def _prepare(config: RunConfig, plan: Plan, start: ResumePoint | None) -> None:
    """Prepare the run's folder, in its first process alone, and print the plan."""
    folder = run_folder(config)
    if start is None:
        refuse_unfit_init_from_run(config, folder)
        refuse_unfit_init_from(config, folder)
    prepare_folder(config, plan, goes_on=start is not None)
    print_info(*render(plan))


def _try_family(config: RunConfig, plan: Plan) -> None:
    probe(config.model.llm.path, plan.boundaries, streams=plan.streaming is not None)


def _can_slice(config: RunConfig, plan: Plan, *, alone: bool) -> bool:
    """Whether the encoder can be cut as planned; tried once.

    Raises UserError where that was asked for and it cannot, or where other processes have planned it, too: `alone` is
    False.
    """
    if len(ranks_of(plan.chain)) == 1:
        return True
    try:
        probe_encoder(config)
    except EncoderSliceError as error:
        if config.parallel.encoder_ranks != "auto" or not alone:
            raise
        print_note(f"the encoder stays whole on rank 0: {error}")
        return False
    return True


def _leave_page(folder: Path) -> None:
    """Make the page of a run that has made a step, whatever its end was, which this does not change."""
    try:
        if next(recorded(folder / METRICS, "train"), None) is None:
            return
        print_info(f"report: {write_page([folder], folder / REPORT)}")
    except Exception as error:  # whatever it is, the run is over, and its exit code says how
        print_note(
            f"the run's page was not made: {escape(str(error) or repr(error))}; mmtrain report {folder} makes it"
        )


def _train_and_say(target: Train, how_to_resume: str, rank: Rank) -> str | None:
    """`target` under torchrun: this process's own stdout is the log by now, and no launcher says how the run ended."""
    stopped = target(rank)
    if stopped is not None:
        rank.print_info(f"{stopped}. {how_to_resume}")
    return stopped


def _train(
    config: RunConfig, plan: Plan, start: ResumePoint | None, trace_steps: int, given: RunConfig | None, rank: Rank
) -> str | None:
    """What every rank runs; `start` is rank 0's, `given`, on several machines, the configuration as it came.

    Which formats data have can be seen where they are read alone: there the ranks compare the data themselves.
    """
    if given is not None:
        rank.progress.at(0, "comparing plans with rank 0")
        agree(given, plan, trace_steps, rank.rank)
    from mmtrain.training.loop import main

    return main(config, plan, rank, start if rank.rank == 0 else None, trace_steps)


def ranks_of_node(config: RunConfig, options: Options) -> int:
    """Ranks on each machine. Raises UserError where the options for several are wrong."""
    nodes, node, endpoint = options.nnodes, options.node_rank, options.rdzv_endpoint
    if nodes < 1 or not 0 <= node < nodes:
        raise UserError(f"--nnodes {nodes} --node-rank {node}: machines are numbered from 0 to --nnodes - 1")
    if nodes > 1 and endpoint is None:
        raise UserError(f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, the same on every machine")
    port = re.fullmatch(r".+:(\d{1,5})", endpoint or "")
    if endpoint is not None and not (port and 0 < int(port[1]) < 2**16):
        raise UserError(f"--rdzv-endpoint {endpoint}: needs HOST:PORT, e.g. first-machine:29500")
    ranks = config.parallel.pipeline * config.parallel.data
    if ranks % nodes:
        raise UserError(
            f"--nnodes {nodes} machines cannot share {ranks} ranks evenly (parallel.pipeline "
            f"{config.parallel.pipeline} x parallel.data {config.parallel.data})"
        )
    return ranks // nodes


def _ranks_of_torchrun(config: RunConfig, options: Options) -> int:
    """Ranks on this machine. Raises UserError where torchrun was asked for others than the configuration."""
    if options.nnodes != 1 or options.node_rank != 0 or options.rdzv_endpoint:
        raise UserError("--nnodes, --node-rank and --rdzv-endpoint: give them to torchrun, which starts the ranks here")
    world_size, needed = int(os.environ["WORLD_SIZE"]), config.parallel.pipeline * config.parallel.data
    if world_size != needed:
        raise UserError(
            f"torchrun started {world_size} ranks; parallel.pipeline {config.parallel.pipeline} x parallel.data "
            f"{config.parallel.data} needs {needed}: change --nproc-per-node, or these keys; if no torchrun "
            f"started this process, unset {', '.join(TORCHRUN_VARIABLES)}"
        )
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _say_who_can_reach_it(endpoint: str) -> None:
    from mmtrain.runtime.rendezvous import EVERY_INTERFACE, listening_address

    if (address := listening_address(endpoint)) == EVERY_INTERFACE:
        print_info(
            f"listening for the other machines on every interface: the host of --rdzv-endpoint {endpoint} is no "
            "address of this machine, or only its own; better give its address in the cluster's network"
        )
    else:
        print_info(f"listening for the other machines on {address}")


def _how_to_resume(config: RunConfig, options: Options) -> str:
    in_the_way = [f"--resume {options.resume}"] if options.resume != AUTO else []
    in_the_way += ["run.overwrite=true"] if config.run.overwrite else []
    return f"The same command{' without ' + ' and '.join(in_the_way) if in_the_way else ''} goes on from there"
