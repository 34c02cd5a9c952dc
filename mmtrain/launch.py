"""`mmtrain train`, also `mmtrain train`: plan a run, start its ranks, and say how it ended.

Nothing here imports torch before the configuration is known to be right and ranks have to be started.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from mmtrain.base.console_stream import output_without_waiting, prepare_standard_streams
from mmtrain.base.errors import UserError
from mmtrain.base.printing import note, run_command, say, show_cursor, show_error, show_traceback, tell
from mmtrain.checkpoint.resume import Start, is_complete
from mmtrain.checkpoint.run_folder import AUTO, claimed, find_start, prepare_folder, run_folder
from mmtrain.checkpoint.step_folder import step_folders, step_of
from mmtrain.config.load import dump_config, load_config
from mmtrain.config.schema import RunConfig
from mmtrain.data.shards.indexing import ensure_indexes, unready_shards
from mmtrain.data.shards.shard_list import expand_shards, refuse_empty_shards, refuse_unfinished_shards
from mmtrain.data.stream.catalog import data_sets
from mmtrain.demo.data import make_demo_data
from mmtrain.engine.trace import refuse_unfit_trace
from mmtrain.model.projector_files import refuse_unfit_init_from
from mmtrain.plan.calibration import Device, cached_file, calibration_key, cpu_device, gpu_device
from mmtrain.plan.layout import Plan
from mmtrain.plan.planner import make_plan, models_of
from mmtrain.plan.refusals import GpuMemory, check_environment, refuse_short_memory
from mmtrain.plan.simulate import Program, simulate
from mmtrain.plan.table import render
from mmtrain.pretrained.model_files import model_folder
from mmtrain.pretrained.tokenizer_files import refuse_missing_chat_template, text_fingerprint
from mmtrain.processes.gpus import Gpu, visible_gpus
from mmtrain.processes.job import Job
from mmtrain.processes.pool import usable_cores
from mmtrain.processes.rank import Rank, run_rank, seconds_before_message
from mmtrain.processes.supervise import STOPPED, prepared, run_ranks, set_rank_environment

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# (rank, number of processes) as others name them who start several: Open MPI, MPICH and Intel MPI, and cluster managers
# that set a part of what torchrun sets, once a machine
OTHER_STARTERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE"))
INDEXED_WHILE_OTHERS_WAIT = 1_000_000_000  # bytes of shards: seconds to a minute
ANEW = "To train anew choose another run.name, or set run.overwrite=true, which deletes it"
TRACED_STEPS = 3
RANK_MODULES = ("torch._dynamo", "mmtrain.train")  # the first torch.optim.AdamW imports _dynamo: 2 s in every rank
SIGNALLED = 128  # exit codes above it: ended by the signal of that number less 128
FEWEST_OPEN_FILES, WANTED_OPEN_FILES = 256, 4096  # connections, pipes and shards of a process

DESCRIPTION = """\
Train the projector of a vision-language model, the LLM frozen and cut into pipeline stages.

CONFIG is a YAML file; any key of it can be set on the command line. Ranks = parallel.pipeline x parallel.data.
Results go to run.dir/run.name: config.yaml and plan.json (what runs), log.txt (everything that libraries say),
metrics.jsonl (loss and each rank's time of every step, scores on held-out samples), quarantine.jsonl (damaged
samples, if any), samples.jsonl (the keys of every step, with data.ledger), audit.json, checkpoints/.

A run that was interrupted goes on when the same command is given again: from its newest whole checkpoint,
with the same samples in the same steps. What was recorded after that checkpoint moves to discarded.jsonl.
"""

EXAMPLES = """\
examples:
  train the demo, whose models and data come with mmtrain, on the CPU:
    mmtrain train demo:llava_pp4
  see the plan for a layout; needs no GPU, no weights, starts nothing:
    mmtrain plan configs/qwen25_72b_pp8_dp2.yaml
  LLaVA-1.5's stage 1 on four GPUs:
    mmtrain train configs/llava15_7b_pp4.yaml
  change keys for one run:
    mmtrain train demo:llava_pp4 run.name=try2 optimizer.lr=2e-4 parallel.pipeline=2
  go on after a crash, a full disk or a signal: the same command again; or from an earlier checkpoint
    mmtrain train CONFIG --resume runs/NAME/checkpoints/step-00000100
  record what every rank does when, for ui.perfetto.dev:
    mmtrain train demo:llava_pp4 --trace
  let the planner know this machine: a minute of measuring, then plans in seconds instead of assumptions:
    mmtrain calibrate demo:llava_pp4
  train on two machines; on the second one with --node-rank 1:
    mmtrain train CONFIG --nnodes 2 --node-rank 0 --rdzv-endpoint first-machine:29500
  the same through torchrun:
    torchrun --nproc-per-node 4 -m mmtrain.launch CONFIG

exit codes:
  0    the run finished and its audit passed (or the plan was printed)
  1    a rank failed; the message names the rank, its stage, the step and the cause
  2    what the user can mend: configuration, model, data, layout, a full disk; the message says how, without traceback
  3    stopped by SIGTERM or SIGUSR1 (Slurm: --signal=USR1@300) with everything saved: the same command goes on
  130  stopped by Ctrl-C at once     143  by a second SIGTERM, or one before the ranks were started; what was not saved
       is lost, and the same command goes on from the newest checkpoint
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    prepare_standard_streams()
    options = _parser().parse_intermixed_args(_with_trace_steps(sys.argv[1:] if arguments is None else arguments))
    sys.excepthook = show_traceback
    with contextlib.nullcontext() if options.plan else output_without_waiting():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Do what the options ask for; the exit code."""
    rank = None
    try:
        rank = _rank_of_torchrun()
        if options.local_rank is not None:
            raise UserError(
                "--local_rank comes from DeepSpeed's launcher, which does not start mmtrain: start it by mmtrain "
                "train, or by torchrun --nproc-per-node N -m mmtrain.launch"
            )
        config = load_config(options.config, options.overrides)
        if options.trace is not None and (options.plan or options.calibrate):
            raise UserError("--trace records training; mmtrain plot --plan CONFIG draws what is planned")
        if options.plan:
            return run_command(lambda: tell(*render(plan_for_here(config)).split("\n")))
        if rank is None and options.nnodes == 1:
            _refuse_other_starters()
        _allow_open_files()
        _refuse_unusable_shared_memory()
        if options.calibrate:
            return _calibrate(config, options, under_torchrun=rank is not None)
        if rank is not None:
            return _join(config, options, rank)
        return _launch(config, options)
    except UserError as error:
        time.sleep(seconds_before_message(rank or 0))
        show_error(error)
        return 2
    except KeyboardInterrupt:
        note("stopped by Ctrl-C before the ranks were started")
        return 130


def _rank_of_torchrun() -> int | None:
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


def _refuse_other_starters() -> None:
    """Raise UserError if this is one of several processes, each of which would start the whole run."""
    for rank, size in OTHER_STARTERS:
        if rank in os.environ and os.environ.get(size, "1") != "1":
            raise UserError(
                f"this is one of {os.environ[size]} processes, says the environment ({rank}={os.environ[rank]}, {size}="
                f"{os.environ[size]}: mpirun, or a cluster's manager), and each would start the whole run; start it "
                "once, without mpirun: it starts its ranks itself; on several machines once on each, with --nnodes; or "
                f"use torchrun. If they are left over from something else: unset {rank} {size}"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmtrain train",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run, or demo:llava_pp4")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="set a key, e.g. train.max_steps=100")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--plan", action="store_true", help="print the plan; start nothing, write nothing")
    instead.add_argument(
        "--calibrate",
        action="store_true",
        help="measure what layers and messages of this run take here, for later plans of it, and print the plan that "
        "they give; to parallel.calibration if that names a file, else to the cache, where plans look for it",
    )
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        default=AUTO,
        help="auto (default): an existing run goes on; never: it is not touched; a step folder: go on from there, or, "
        "if it is of another run, branch from it",
    )
    parser.add_argument(
        "--allow-change",
        metavar="KEY",
        action="append",
        default=[],
        help="let a resumed run differ from its checkpoint in this key or section, e.g. optimizer.lr; may be repeated",
    )
    parser.add_argument(
        "--trace",
        type=int,
        metavar="STEPS",
        help=f"write trace.json, what every rank did when in STEPS steps (default {TRACED_STEPS}) after the first; for "
        "ui.perfetto.dev and mmtrain plot",
    )
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="machines that share the run (default 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="R", help="which of them this is, from 0")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: a free port of machine 0")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def _with_trace_steps(arguments: Sequence[str]) -> list[str]:
    """`--trace` alone means --trace TRACED_STEPS, whatever stands behind it that is no number."""
    result = []
    for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        is_alone = argument == "--trace" and re.fullmatch(r"[-+]?[\d.]+", after) is None
        result.append(f"--trace={TRACED_STEPS}" if is_alone else argument)
    return result


def _calibrate(config: RunConfig, options: argparse.Namespace, *, under_torchrun: bool) -> int:
    """Measure on as many ranks as the run has, all on this machine, then print the plan; the exit code."""
    if options.nnodes != 1 or under_torchrun:
        raise UserError(
            "--calibrate measures on one machine, and starts its own ranks there: leave --nnodes and torchrun away, "
            "give a layout that this machine holds (parallel.pipeline), and share the file by parallel.calibration"
        )
    ranks, gpus = _local_ranks(config, options), visible_gpus()
    device = _device(config, gpus)
    file = cached_file(calibration_key(config, models_of(config), device))
    if config.parallel.calibration is not None:
        file = Path(config.parallel.calibration).expanduser()
    _refuse_unwritable(file)
    nowhere = dataclasses.replace(device, name="")  # nothing was ever measured there: the plan's costs are assumed
    uncalibrated = config.changed({"parallel.calibration": None})
    assumed = _plan(uncalibrated, gpus, ranks, nowhere)
    job = Job(
        places=_places(assumed),
        folder=Path(tempfile.mkdtemp(prefix="mmtrain-calibration-")),
        threads=_threads(config, ranks),
        timeout_seconds=config.parallel.timeout_seconds,
        on_gpus=bool(gpus),
        preload=RANK_MODULES,
    )
    with prepared(job):
        failure = run_ranks(functools.partial(_measure, uncalibrated, assumed, device, file), job)
    if failure is not None:
        show_error(failure.message)
        return failure.exit_code
    shutil.rmtree(job.folder)
    plan = _plan(config, gpus, ranks)
    say("", *render(plan).split("\n"))
    say(
        f"planned without it: stages begin at decoder layers {list(assumed.boundaries)}, {assumed.chunks_per_rank} a "
        f"rank, {assumed.encode_ahead} micro-batches encoded ahead; {_against(config, gpus, ranks, assumed, plan)}"
    )
    return 0


def _refuse_unwritable(file: Path) -> None:
    """Before a minute of measuring, not after it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(
            f"the calibration cannot be written to {file} ({error.strerror}); name a file that can be by "
            "parallel.calibration"
        ) from error


def _against(config: RunConfig, gpus: Sequence[Gpu], ranks: int, assumed: Plan, plan: Plan) -> str:
    """What a layout that was planned with assumed costs is worth by those of a calibrated plan."""
    by_hand = {
        "parallel.boundaries": assumed.boundaries or None,
        "parallel.chunks_per_rank": assumed.chunks_per_rank,
        "parallel.encoder_run_ahead": 0,  # what counts is the schedule that was planned
    }
    same = config.changed(by_hand)
    try:
        measured = _plan(same, gpus, ranks).seconds
    except UserError:
        return "by what was measured it does not fit in memory"
    seconds = simulate(Program(assumed.schedule), measured).seconds
    return f"by what was measured, {seconds / plan.step_seconds:.3f} times this step"


def _measure(config: RunConfig, plan: Plan, device: Device, file: Path | None, rank: Rank) -> None:
    """What every rank of a calibration runs."""
    from mmtrain.calibration.calibrate import calibrate

    calibrate(config, plan, device, file, rank)


def _launch(config: RunConfig, options: argparse.Namespace) -> int:
    """Start this node's ranks, wait for their end and print what failed; the exit code."""
    local_ranks = _local_ranks(config, options)
    gpus = visible_gpus()
    plan = _plan(config, gpus, local_ranks)
    refuse_unfit_trace(plan, options.trace, config.train.max_steps)
    here = plan.ranks[options.node_rank * local_ranks : (options.node_rank + 1) * local_ranks]
    for mine, (number, gpu) in zip(here, enumerate(gpus), strict=False):
        refuse_short_memory(mine, f"GPU {number} ({gpu.name})", GpuMemory(gpu.total_bytes, gpu.free_bytes))
    if any(rank.pipeline == 0 for rank in here):
        _check_data(config, others_wait=options.nnodes > 1)
    job = Job(
        places=_places(plan),
        folder=run_folder(config),
        threads=_threads(config, local_ranks),
        timeout_seconds=config.parallel.timeout_seconds,
        on_gpus=bool(gpus),
        preload=RANK_MODULES,
        nodes=options.nnodes,
        node=options.node_rank,
        endpoint=options.rdzv_endpoint,
        saves_when_asked=True,
    )
    with claimed(job.folder) if job.node == 0 else contextlib.nullcontext():
        start = None
        if job.node == 0:
            start = find_start(config, options.resume, options.allow_change)
            if start is not None and job.nodes == 1 and is_complete(job.folder, start.checkpoint, config):
                say(f"complete: {job.folder} has made all its {start.checkpoint.step} steps. {ANEW}")
                return 0
            if start is None:
                refuse_unfit_init_from(config, job.folder)
            prepare_folder(config, plan, start)
            say(*render(plan).split("\n"))
            if job.nodes > 1:
                _say_who_can_reach_it(options.rdzv_endpoint)
        else:
            job.folder.mkdir(parents=True, exist_ok=True)
        with prepared(job):
            _probe(config, plan)
            train = functools.partial(_train, config, plan, start, options.trace or 0, job.nodes > 1)
            failure = run_ranks(train, job)
    if failure is None:
        if job.node == 0:
            say(f"results: {job.folder}")
        return 0
    if failure.exit_code == STOPPED:
        say(f"{failure.message}. {_how_to_go_on(config, options)}")
        return STOPPED
    show_cursor()  # a rank that was killed could not
    show_error(failure.message)
    if failure.exit_code > SIGNALLED and job.node == 0:
        note(_what_is_saved(config, options))
    return failure.exit_code


def _join(config: RunConfig, options: argparse.Namespace, rank: int) -> int:
    """Be the rank that torchrun has started; the exit code."""
    world_size = int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if options.nnodes != 1 or options.node_rank != 0 or options.rdzv_endpoint:
        raise UserError("--nnodes, --node-rank and --rdzv-endpoint: give them to torchrun, which starts the ranks here")
    needed = config.parallel.pipeline * config.parallel.data
    if world_size != needed:
        raise UserError(
            f"torchrun started {world_size} ranks; parallel.pipeline {config.parallel.pipeline} x parallel.data "
            f"{config.parallel.data} needs {needed}: change --nproc-per-node, or these keys; if no torchrun "
            f"started this process, unset {', '.join(TORCHRUN_VARIABLES)}"
        )
    gpus = visible_gpus()
    plan = _plan(config, gpus, local_ranks)
    refuse_unfit_trace(plan, options.trace, config.train.max_steps)
    if rank == 0:
        _check_data(config, others_wait=world_size > 1)
    threads = _threads(config, local_ranks)
    set_rank_environment(threads, on_gpus=bool(gpus))
    with claimed(run_folder(config)) if rank == 0 else contextlib.nullcontext():
        start = None
        if rank == 0:
            start = find_start(config, options.resume, options.allow_change)
            if start is None:
                refuse_unfit_init_from(config, run_folder(config))
            prepare_folder(config, plan, start)
            _probe(config, plan)
            say(*render(plan).split("\n"))
        store = _agree(config, plan, options.trace or 0, rank)  # and wait until rank 0 has prepared the folder
        job = Job(_places(plan), run_folder(config), threads, config.parallel.timeout_seconds)
        how = _how_to_go_on(config, options)
        target = functools.partial(_train_and_say, config, plan, start, options.trace or 0, how)
        stopped = run_rank(target, job)
    del store  # it may be the one that all ranks meet at
    return 0 if stopped is None else STOPPED


def _what_is_saved(config: RunConfig, options: argparse.Namespace) -> str:
    """Of a run that a signal has ended at once."""
    saved = step_folders(run_folder(config))
    if saved:
        return f"nothing was saved since step {step_of(saved[0])}. {_how_to_go_on(config, options)}"
    return "nothing was saved yet: the same command begins where this run began"


def _say_who_can_reach_it(endpoint: str) -> None:
    from mmtrain.processes.rendezvous import EVERY_INTERFACE, listening_address

    if (address := listening_address(endpoint)) == EVERY_INTERFACE:
        say(
            f"listening for the other machines on every interface: the host of --rdzv-endpoint {endpoint} is no "
            "address of this machine, or only its own; better give its address in the cluster's network"
        )
    else:
        say(f"listening for the other machines on {address}")


def _how_to_go_on(config: RunConfig, options: argparse.Namespace) -> str:
    in_the_way = [f"--resume {options.resume}"] if options.resume != AUTO else []
    in_the_way += ["run.overwrite=true"] if config.run.overwrite else []
    return f"The same command{' without ' + ' and '.join(in_the_way) if in_the_way else ''} goes on from there"


def _train(
    config: RunConfig, plan: Plan, start: Start | None, trace_steps: int, several_nodes: bool, rank: Rank
) -> str | None:
    """What every rank runs; `start` is rank 0's."""
    if several_nodes:
        rank.progress.at(0, "comparing plans with rank 0")
        _agree(config, plan, trace_steps, rank.rank)
    from mmtrain.train import main as train

    return train(config, plan, rank, start if rank.rank == 0 else None, trace_steps)


def _train_and_say(
    config: RunConfig, plan: Plan, start: Start | None, trace_steps: int, how: str, rank: Rank
) -> str | None:
    """`_train` under torchrun: this process's own stdout is the log by now, and no launcher says how the run ended."""
    stopped = _train(config, plan, start, trace_steps, False, rank)
    if stopped is not None:
        rank.tell(f"{stopped}. {how}")
    return stopped


def _agree(config: RunConfig, plan: Plan, trace_steps: int, rank: int) -> Any:
    """The store at which all ranks meet, once all are known to have the same config and plan, and to trace alike.

    Raises UserError on every rank where they differ: such ranks would wait for each other for ever.
    """
    from torch.distributed import rendezvous

    timeout = timedelta(seconds=config.parallel.timeout_seconds)
    store, _, world_size = next(rendezvous("env://", timeout=timeout))
    text = dump_config(config) + json.dumps(plan.as_dict()) + f"--trace {trace_steps}"
    store.set(f"mmtrain/plan/{rank}", hashlib.sha256(text.encode()).hexdigest())
    if rank == 0:
        plans = [store.get(f"mmtrain/plan/{other}") for other in range(world_size)]
        others = [str(other) for other, plan in enumerate(plans) if plan != plans[0]]
        store.set("mmtrain/others", ", ".join(others))
    if others := store.get("mmtrain/others").decode():
        raise UserError(
            f"another run than on rank 0 is planned on rank {others}: the config, the key=value arguments, --trace, "
            "the model's files, the calibration (name one file in parallel.calibration) and parallel.device_memory_gib "
            "(state it where GPUs differ) must be the same on every machine"
        )
    return store


def _plan(config: RunConfig, gpus: Sequence[Gpu], local_ranks: int, device: Device | None = None) -> Plan:
    """The plan with the memory and the calibration of this machine's devices; `device` stands in for them."""
    if gpus and local_ranks > len(gpus):
        raise UserError(
            f"{local_ranks} ranks on this machine, which has {len(gpus)} GPUs: each rank needs its own; use fewer "
            "ranks or more machines, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if gpus:
        check_environment(config, os.environ)
    return make_plan(config, _memory(gpus[:local_ranks]), device or _device(config, gpus, local_ranks))


def plan_for_here(config: RunConfig) -> Plan:
    """The plan of ranks that are like this machine's devices, however many it has."""
    gpus = visible_gpus()
    if gpus:
        check_environment(config, os.environ)
    return make_plan(config, _memory(gpus), _device(config, gpus))


def _memory(gpus: Sequence[Gpu]) -> int | None:
    """Bytes that a rank has, the least of any GPU; None without GPUs."""
    return min((gpu.total_bytes for gpu in gpus), default=None)


def _device(config: RunConfig, gpus: Sequence[Gpu], local_ranks: int | None = None) -> Device:
    """What ranks compute on, as calibrations name it."""
    return gpu_device(gpus[0].name) if gpus else cpu_device(config, local_ranks)


def _check_data(config: RunConfig, others_wait: bool) -> None:
    """Refuse data that cannot be there before a rank starts; index what is not, and make the demo's on first use.

    `others_wait` says that other processes are about to wait for this one, with a timeout: indexing is theirs to see
    done before, unless it takes moments.
    """
    refuse_missing_chat_template(config)
    make_demo_data(config, say)
    found = {
        f"data.sets ({one.name})" if one.name else "data.shards": one.shards for one in data_sets(config.data, say)
    }
    if config.eval.shards is not None:
        found["eval.shards"] = expand_shards(config.eval.shards, "eval.shards", say, config.data.allow_pipe)
    for key, paths in found.items():
        refuse_empty_shards(paths, key)
        refuse_unfinished_shards(paths, key)
    trained = {path.resolve() for key, paths in found.items() if key != "eval.shards" for path in paths}
    both = trained & {path.resolve() for path in found.get("eval.shards", ())}
    if both:
        raise UserError(
            f"eval.shards: {min(both)} is in data.shards too; scores on samples that are trained on say nothing of "
            "others; leave some shards out of data.shards, or set eval.fraction instead"
        )
    shards = [path for paths in found.values() for path in paths]
    template, llm = config.data.template, config.model.llm.path
    seconds = config.data.io_retry_seconds
    missing = unready_shards(shards, text_fingerprint(model_folder(llm), template), seconds) if others_wait else []
    if sum(path.stat().st_size for path in missing) > INDEXED_WHILE_OTHERS_WAIT:
        raise UserError(
            f"{len(missing):,} of {len(shards):,} shards have no index for this tokenizer and template yet, and other "
            f"processes would wait for it; first run mmtrain index {' '.join(map(str, missing[:3]))}"
            f"{' ...' if len(missing) > 3 else ''} --tokenizer {llm} --template {template}"
        )
    ensure_indexes(shards, llm, template, say=say, stream=sys.stdout, retry_seconds=seconds)


def _probe(config: RunConfig, plan: Plan) -> None:
    from mmtrain.model.probe import probe

    probe(config.model.llm.path, plan.boundaries)


def _local_ranks(config: RunConfig, options: argparse.Namespace) -> int:
    """Ranks on this node, the options for several nodes being right."""
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


def _threads(config: RunConfig, local_ranks: int) -> int:
    return config.parallel.threads_per_rank or max(1, usable_cores() // local_ranks)


def _allow_open_files() -> None:
    """Let this process and its ranks open as many files as they may; raises UserError where these are too few."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < FEWEST_OPEN_FILES:
        raise UserError(
            f"this shell lets a program open {most} files (ulimit -n), and a rank with its data workers needs "
            f"{FEWEST_OPEN_FILES}: have the limit raised, in /etc/security/limits.conf or the job's settings"
        )
    if soft != resource.RLIM_INFINITY and soft < WANTED_OPEN_FILES:
        wanted = WANTED_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, WANTED_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))


def _refuse_unusable_shared_memory() -> None:
    """Raises UserError where processes cannot share semaphores, which torch and data workers need."""
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        raise UserError(
            f"/dev/shm cannot be used ({error.strerror}): mount a tmpfs there that can be written, in a container with "
            "--ipc=host or --shm-size=8g"
        ) from error


def _places(plan: Plan) -> tuple[str, ...]:
    def place(rank: Any) -> str:
        stages = ", ".join(str(stage.stage) for stage in rank.stages)
        return f"stage {stages}" if plan.data == 1 else f"stage {stages}, replica {rank.data}"

    return tuple(place(rank) for rank in plan.ranks)


if __name__ == "__main__":
    sys.exit(main())
