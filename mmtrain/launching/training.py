"""Train, or measure: start this machine's ranks, or be one that torchrun started.

plan --> data checked --> run folder locked and prepared, where it begins --> ranks, all with the
    same plan --> how it ended

The first process of a run does what is done once: the launcher of machine 0, or torchrun's rank 0.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.cache import cache_folder
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import recorded
from mmtrain.base.printing import (
    bytes_text,
    counted,
    disclosed,
    escape,
    logs_shown,
    print_info,
    print_note,
    show_cursor,
    show_error,
)
from mmtrain.base.version import VERSION
from mmtrain.checkpoint.resume import (
    AUTO,
    ResumePoint,
    find_start,
    flat,
    is_complete,
    refuse_unfit_init_from_run,
)
from mmtrain.checkpoint.run_folder import METRICS, REPORT, locked, prepare_folder, run_folder
from mmtrain.checkpoint.step_folder import step_folders, step_of
from mmtrain.config.load import dump_config
from mmtrain.config.parallel import ParallelSection
from mmtrain.config.schema import RunConfig
from mmtrain.data.stream.fetching import remove_lost_copies
from mmtrain.data.stream.stored import StoredData
from mmtrain.engine.trace import refuse_unfit_trace
from mmtrain.facts.models import models_of
from mmtrain.launching.command_line import Options
from mmtrain.launching.data import check_data, with_formats
from mmtrain.launching.machine import (
    TORCHRUN_VARIABLES,
    can_slice_encoder,
    device_here,
    job_here,
    plan_here,
    refuse_missing_libraries,
    refuse_short_host_memory,
)
from mmtrain.model.probe import probe
from mmtrain.model.weights.projector_files import refuse_unfit_init_from
from mmtrain.plan.calibration import cached_file, calibration_key
from mmtrain.plan.plan import Plan, RankPlan, render
from mmtrain.plan.refusals import GpuMemory, refuse_short_memory
from mmtrain.plan.schedule import ranks_of
from mmtrain.report.page import write_page
from mmtrain.runtime.failures import Failure
from mmtrain.runtime.gpus import Gpu, usable_cores, visible_gpus
from mmtrain.runtime.job import Agreement, Job
from mmtrain.runtime.log import PrefixedLog, log_name
from mmtrain.runtime.rank import run_rank
from mmtrain.runtime.supervise import STOPPED, prepared, run_ranks, set_rank_environment

ANEW = "To train anew choose another run.name, or set run.overwrite=true, which deletes it"
SIGNALLED = 128  # exit codes above it: ended by the signal of that number less 128


def train(config: RunConfig, options: Options) -> int:
    """Start this machine's ranks, wait, print how the run ended and return the exit code."""
    is_first = options.node_rank == 0
    alone = options.nnodes == 1
    local_ranks = ranks_of_node(config.parallel, options)
    gpus = visible_gpus()
    plan = plan_here(config, gpus, local_ranks)
    may_stay_whole = alone and config.parallel.encoder_ranks == "auto"
    has_slices = len(ranks_of(plan.chain)) > 1
    if has_slices and not can_slice_encoder(config, may_stay_whole=may_stay_whole):
        config = config.changed({"parallel.encoder_ranks": 0})
        plan = plan_here(config, gpus, local_ranks)

    first_here = options.node_rank * local_ranks
    folder = run_folder(config)
    here = plan.ranks[first_here : first_here + local_ranks]
    _refuse_unfit(config, here, options, is_first=is_first)
    for rank_plan, (number, gpu) in zip(here, enumerate(gpus), strict=False):
        memory = GpuMemory(gpu.total_bytes, gpu.free_bytes)
        refuse_short_memory(rank_plan, f"GPU {number} ({gpu.name})", memory)

    # Which formats data have can be seen where they are read alone: there the ranks compare the
    # data themselves.
    details: list[str] = []
    compared = None if alone else agreement(config, plan, options.trace or 0)
    data = None
    if any(rank_plan.pipeline == 0 for rank_plan in here):
        with logs_shown(print_info, details.append):
            config, data = check_data(config, others_wait=not alone)
    with locked(folder) if is_first else contextlib.nullcontext():
        start = None
        if is_first:
            start = find_start(config, options.resume, options.allow_change)
            if start is not None and alone and is_complete(folder, start.checkpoint, config):
                print_info(
                    f"complete: {folder} has made all its {start.checkpoint.step} steps. {ANEW}"
                )
                return 0
            _prepare(config, plan, start, details, options)
            if not alone:
                _tell_who_can_reach_it(options.rdzv_endpoint)
        # other machines may not see the folder of the first one
        folder.mkdir(parents=True, exist_ok=True)
        job = _job(config, plan, gpus, local_ranks, start, options, data, compared)
        with prepared(job):
            _probe_llm(config, plan)
            failure = run_ranks(job)
        remove_lost_copies(cache_folder("copies"))
        if is_first:
            # first: whoever reads only the last line must read how the run ended
            _leave_page(folder)
        return _report_end(failure, job)


def _report_end(failure: Failure | None, job: Job) -> int:
    if failure is None:
        if job.node == 0:
            print_info(f"results: {job.folder}")
        return 0
    if failure.exit_code == STOPPED:
        print_info(f"{failure.message}. {job.how_to_resume}")
        return STOPPED
    show_cursor()  # a rank that was killed could not
    show_error(failure.message)
    if failure.exit_code > SIGNALLED and job.node == 0:
        if saved := step_folders(job.folder):
            print_note(f"nothing was saved since step {step_of(saved[0])}. {job.how_to_resume}")
        else:
            print_note("nothing was saved yet: the same command begins where this run began")
    return failure.exit_code


def train_as_rank(config: RunConfig, options: Options, rank: int) -> int:
    """Train as global rank `rank`, whose process torchrun has started; return the exit code."""
    is_first = rank == 0
    local_ranks = _ranks_of_torchrun(config.parallel, options)
    gpus = visible_gpus()
    plan = plan_here(config, gpus, local_ranks)
    first_here = rank - int(os.environ["LOCAL_RANK"])
    _refuse_unfit(
        config, plan.ranks[first_here : first_here + local_ranks], options, is_first=is_first
    )
    compared = agreement(config, plan, options.trace or 0)
    start = data = None
    details: list[str] = []
    if is_first:
        with logs_shown(print_info, details.append):
            config, data = check_data(config, others_wait=len(plan.ranks) > 1)
    elif plan.ranks[rank].pipeline == 0:
        config = with_formats(config)  # rank 0 may run on another machine
    with locked(run_folder(config)) if is_first else contextlib.nullcontext():
        if is_first:
            start = find_start(config, options.resume, options.allow_change)
            _prepare(config, plan, start, details, options)
        job = _job(config, plan, gpus, local_ranks, start, options, data)
        set_rank_environment(job.threads, on_gpus=job.on_gpus)
        if is_first:
            _probe_llm(config, plan)
            if len(ranks_of(plan.chain)) > 1:
                can_slice_encoder(config, may_stay_whole=False)
        from torch.distributed import DistError

        from mmtrain.runtime.rendezvous import agree

        try:
            # and wait until rank 0 has prepared the folder
            store = agree(compared, rank, job.timeout_seconds)
        except DistError as error:
            why = str(error).split("\n")[0]  # C++ frames follow
            show_error(
                f"rank {rank} did not meet the other ranks, of which one may have ended "
                f"and say why: {why}"
            )
            return 1
        stopped = run_rank(job)
        del store  # it may be the one that all ranks meet at
        if is_first:
            _leave_page(job.folder)
    return 0 if stopped is None else STOPPED


def _probe_llm(config: RunConfig, plan: Plan) -> None:
    """Raise UserError for an LLM that computes something else when it is cut as planned."""
    mrope = models_of(config).has_grid_positions
    probe(config.model.llm.path, plan.boundaries, bool(plan.streaming), mrope=mrope)


def _job(
    config: RunConfig,
    plan: Plan,
    gpus: Sequence[Gpu],
    local_ranks: int,
    start: ResumePoint | None,
    options: Options,
    data: StoredData | None,
    compared: Agreement | None = None,
) -> Job:
    """Return the run's processes.

    `start` is rank 0's, `data` what this machine's launcher has counted, `compared` the `agreement`
    of nodes.
    """
    # a resumed run has as many threads a rank, where it has as many ranks and they fit
    threads = None
    if start is not None:
        earlier = start.checkpoint.state["topology"]
        ranks = (config.parallel.pipeline, config.parallel.data)
        is_alike = (earlier["pipeline"], earlier["data"]) == ranks
        if is_alike and earlier["threads"] * local_ranks <= usable_cores():
            threads = earlier["threads"]

    in_the_way = []
    if options.resume != AUTO:
        in_the_way.append(f"--resume {options.resume}")
    if config.run.overwrite:
        in_the_way.append("run.overwrite=true")
    without = f" without {' and '.join(in_the_way)}" if in_the_way else ""
    return job_here(
        config.parallel,
        plan,
        gpus,
        local_ranks,
        run_folder(config),
        "mmtrain.training.loop:main",
        threads,
        arguments={
            "config": config,
            "plan": plan,
            "start": start,
            "data": data,
            "trace_steps": options.trace or 0,
            "verbose": options.verbose,
        },
        nodes=options.nnodes,
        node=options.node_rank,
        endpoint=options.rdzv_endpoint,
        agreement=compared,
        how_to_resume=f"The same command{without} goes on from there",
        saves_when_asked=True,
    )


def agreement(config: RunConfig, plan: Plan, trace_steps: int) -> Agreement:
    """Return a digest and keys that ranks must share: others would wait for each other for ever."""
    text = (
        f"mmtrain {VERSION} --trace {trace_steps} {plan.chain} {dump_config(config)} "
        f"{json.dumps(plan.as_dict())}"
    )
    return (
        hashlib.sha256(text.encode()).hexdigest(),
        flat(disclosed(config.model_dump(mode="json"))),
    )


def _refuse_unfit(
    config: RunConfig, here: Sequence[RankPlan], options: Options, *, is_first: bool
) -> None:
    """Raise UserError for what this machine lacks for its ranks, `here`."""
    refuse_unfit_trace(options.trace, config.train.max_steps)
    if is_first:
        refuse_missing_libraries(config.model, config.run.report_to)
    else:
        refuse_missing_libraries(config.model)
    refuse_short_host_memory(here)


def _prepare(
    config: RunConfig,
    plan: Plan,
    start: ResumePoint | None,
    details: Sequence[str],
    options: Options,
) -> None:
    """Prepare the run's folder, in its first process alone, and print what runs.

    The log gets details and the plan.
    """
    folder = run_folder(config)
    if start is None:
        refuse_unfit_init_from_run(config, folder)
        refuse_unfit_init_from(config, folder)
    prepare_folder(config, plan, goes_on=start is not None)
    details = [*details, *render(plan)]
    with PrefixedLog(folder / log_name(options.node_rank), "launcher") as log:
        log.write("".join(f"{line}\n" for line in details))
    if options.verbose:
        print_info(*details)

    # what trains, on which ranks and data, and where results go
    replica = [rank for rank in plan.ranks if rank.data == 0]
    parameters = sum(rank.trainable for rank in replica)
    models = plan.llm if plan.vision is None else f"{plan.vision} -> projector -> {plan.llm}"
    expected = f"expected idle {plan.idle_share:.0%}"
    if plan.step_seconds is not None:
        expected += f", {plan.step_seconds:,.3g} s a step"
    shards = config.data.shards
    if config.data.sets is not None:
        shards = ", ".join(one.name for one in config.data.sets)
    data = escape(f"data: {disclosed(shards)}", 120)
    if config.eval.shards is not None:
        data += f"; held out: {escape(str(disclosed(config.eval.shards)), 120)}"
    print_info(
        f"{plan.run}: {models}; {parameters:,} parameters train ({', '.join(plan.trainable)}), "
        "all else is frozen",
        f"{counted(len(plan.ranks), 'rank')} (pipeline {plan.pipeline} x data {plan.data}), "
        f"at most {bytes_text(max(rank.total_bytes for rank in replica))} each; {expected}",
        data,
        f"results: {folder} (the plan and all details: log.txt there, or --verbose)",
    )


def _leave_page(folder: Path) -> None:
    """Make the page of a run that has made a step. A failure does not change the exit code."""
    try:
        if next(recorded(folder / METRICS, "train"), None) is None:
            return
        print_info(f"report: {write_page([folder], folder / REPORT)}")
    except Exception as error:
        print_note(
            f"the run's page was not made; mmtrain report {folder} makes it: "
            f"{escape(str(error) or repr(error))}"
        )


def ranks_of_node(parallel: ParallelSection, options: Options) -> int:
    """Return the number of ranks on each machine. Raises UserError for wrong options."""
    nodes = options.nnodes
    node = options.node_rank
    endpoint = options.rdzv_endpoint
    if nodes < 1 or not 0 <= node < nodes:
        raise UserError(
            f"--nnodes {nodes} --node-rank {node}: machines are numbered from 0 to --nnodes - 1"
        )
    if nodes > 1 and endpoint is None:
        raise UserError(
            f"--nnodes {nodes} needs --rdzv-endpoint HOST:PORT, the same on every machine"
        )
    port = re.fullmatch(r".+:(\d{1,5})", endpoint or "")
    if endpoint is not None and not (port and 0 < int(port[1]) < 2**16):
        raise UserError(f"--rdzv-endpoint {endpoint}: needs HOST:PORT, e.g. first-machine:29500")
    ranks = parallel.pipeline * parallel.data
    if ranks % nodes:
        raise UserError(
            f"--nnodes {nodes} machines cannot share {ranks} ranks evenly (parallel.pipeline "
            f"{parallel.pipeline} x parallel.data {parallel.data})"
        )
    return ranks // nodes


def _ranks_of_torchrun(parallel: ParallelSection, options: Options) -> int:
    """Return the number of ranks here. Raises UserError where torchrun started another number."""
    if options.nnodes != 1 or options.node_rank != 0 or options.rdzv_endpoint:
        raise UserError(
            "--nnodes, --node-rank and --rdzv-endpoint: "
            "give them to torchrun, which starts the ranks here"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    needed = parallel.pipeline * parallel.data
    if world_size != needed:
        raise UserError(
            f"torchrun started {counted(world_size, 'rank')}; parallel.pipeline "
            f"{parallel.pipeline} x parallel.data {parallel.data} needs {needed}: "
            "change --nproc-per-node, or these keys; if no torchrun started this process, unset "
            f"{', '.join(TORCHRUN_VARIABLES)}"
        )
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _tell_who_can_reach_it(endpoint: str) -> None:
    from mmtrain.runtime.rendezvous import listening_address

    address = listening_address(endpoint) or (
        f"every interface: the host of --rdzv-endpoint {endpoint} is no address of this machine, "
        "or only its own. Better give its address in the cluster's network"
    )
    print_info(f"listening for the other machines on {address}")


# ---- mmtrain calibrate


def calibrate(config: RunConfig, ranks: int) -> int:
    """Measure on as many ranks as the run has, all here, print the plan, return the exit code."""
    gpus = visible_gpus()
    device = device_here(config, gpus)
    file = cached_file(calibration_key(config, models_of(config), device))
    if config.parallel.calibration is not None:
        file = Path(config.parallel.calibration).expanduser()
    _refuse_unwritable(file)
    # Tried whatever the configuration asks for: a calibration serves plans with slices and without.
    can_cut = can_slice_encoder(config, may_stay_whole=config.parallel.encoder_ranks in ("auto", 0))
    if not can_cut:
        config = config.changed({"parallel.encoder_ranks": 0})
    uncalibrated = config.changed({"parallel.calibration": None})
    # its costs are assumed
    assumed = plan_here(uncalibrated, gpus, ranks, dataclasses.replace(device, name=""))
    refuse_missing_libraries(config.model)
    refuse_short_host_memory(assumed.ranks)
    folder = Path(tempfile.mkdtemp(prefix="mmtrain-calibration-"))
    arguments = {
        "config": uncalibrated,
        "plan": assumed,
        "device": device,
        "file": file,
        "can_cut": can_cut,
    }
    target = "mmtrain.calibration.calibrate:calibrate"
    job = job_here(config.parallel, assumed, gpus, ranks, folder, target, arguments=arguments)
    with prepared(job):
        failure = run_ranks(job)
    if failure is not None:
        show_error(failure.message)
        return failure.exit_code
    shutil.rmtree(folder)
    print_info("", *render(plan_here(config, gpus, ranks)))
    return 0


def _refuse_unwritable(file: Path) -> None:
    """Raise UserError before a minute of measuring, not after it."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
        raise UserError(
            f"the calibration cannot be written to {file}. "
            "Name another file by parallel.calibration"
        )
