"""The options of `mmtrain train`, and the help that teaches them."""

import argparse
import itertools
import re
from collections.abc import Sequence
from typing import Any

from mmtrain.base.arguments import command_parser
from mmtrain.base.printing import escape
from mmtrain.checkpoint.resume import AUTO
from mmtrain.config.load import KEY_AND_VALUE, key_of_option, refuse_repeated_keys

TRACED_STEPS = 3

DESCRIPTION = """\
Train the projector of a vision-language model, or what model.trainable names: adapters, layers,
the encoder, an LLM on text alone. Everything else is frozen. The LLM is cut into pipeline stages.

CONFIG is a YAML file, and any key of it can be set behind it. Ranks = parallel.pipeline x
parallel.data. Results go to run.dir/run.name: report.html (the page of the run), config.yaml and
plan.json (what runs), checkpoints/, metrics.jsonl (loss, time and scores), answers.jsonl (held-out
questions with answers), audit.json (the proof that only what should train has changed), log.txt
(the plan, and all that ranks and libraries print).

An interrupted run resumes when the same command is given again: from its newest whole checkpoint,
with the same samples in the same steps. Records made after that checkpoint move to discarded.jsonl.
"""
EXAMPLES = """\
  train the demo on the CPU (pip install 'mmtrain[demo]'; nothing is downloaded):
    mmtrain train example:llava_pp4
  see the plan for a layout; needs no GPU, no weights, starts nothing:
    mmtrain plan configs/qwen25_72b_pp8_dp2.yaml
  LLaVA-1.5's stage 1 on four GPUs:
    mmtrain train configs/llava15_7b_pp4.yaml
  change keys for one run:
    mmtrain train example:llava_pp4 run.name=try2 optimizer.lr=2e-4 parallel.pipeline=2
  resume after a crash, a full disk or a signal: the same command again; or from one checkpoint:
    mmtrain train CONFIG --resume runs/NAME/checkpoints/step-00000100
  record what every rank does when, for ui.perfetto.dev:
    mmtrain train example:llava_pp4 --trace
  measure this machine for a minute, so that plans are in seconds:
    mmtrain calibrate example:llava_pp4
  train on two machines; on the second one with --node-rank 1:
    mmtrain train CONFIG --nnodes 2 --node-rank 0 --rdzv-endpoint first-machine:29500
  through torchrun:
    torchrun --nproc-per-node 4 -m mmtrain.launch CONFIG
"""
EXITS = {
    0: "the run finished and its audit passed (or the plan was printed)",
    1: "a rank failed; the message names the rank, its stage, the step and the cause",
    2: "what the user can mend: configuration, model, data, layout, a full disk; "
    "the message says how",
    3: "stopped by SIGTERM or SIGUSR1 (Slurm: --signal=USR1@300) with everything saved; "
    "the same command resumes",
    130: "stopped at once by Ctrl-C; the same command resumes from the newest checkpoint",
    143: "stopped at once by a second SIGTERM, or by one before the ranks were started",
}


class Options(argparse.Namespace):
    config: str
    overrides: list[str]
    plan: bool = False
    calibrate: bool = False
    suggest: int | None = None
    resume: str = AUTO
    allow_change: list[str]
    trace: int | None = None
    verbose: bool = False
    download: bool = False
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    ending: dict[str, Any]


def parse_run(parser: argparse.ArgumentParser, arguments: Sequence[str], **given: bool) -> Options:
    """Read a command line that names a run; `given` are options that the command implies."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help="YAML file of the run, or example:NAME; mmtrain init lists these",
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="set a key, e.g. parallel.pipeline=2"
    )
    options, unknown = parser.parse_known_intermixed_args(arguments, namespace=Options(**given))
    if options.config is None or KEY_AND_VALUE.match(options.config):
        parser.error(
            "CONFIG is missing. Name a YAML file first, or example:llava_pp4 (mmtrain "
            "init lists others)"
        )
    refuse_repeated_keys(parser, options.overrides)
    if unknown:
        meant = next(filter(None, map(key_of_option, unknown)), "")
        parser.error(escape(f"unrecognized arguments: {' '.join(unknown)}") + meant)
    return options


def add_suggest(parser: argparse.ArgumentParser) -> None:
    """Add the option that asks for layouts instead of one plan."""
    parser.add_argument(
        "--suggest",
        type=int,
        metavar="N",
        help="instead of the plan, show at most five layouts of the run for N devices, best first: "
        "pipeline ranks, replicas, packs a micro-batch, streamed layers, and the keys to set; "
        "takes up to half a minute",
    )


def parse_arguments(arguments: Sequence[str]) -> Options:
    parser = command_parser(
        "train",
        DESCRIPTION,
        EXAMPLES,
        EXITS,
        interrupted="stopped by Ctrl-C before the ranks were started",
        waits=False,
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--plan", action="store_true", help="print the plan; start nothing, write nothing"
    )
    instead.add_argument(
        "--calibrate",
        action="store_true",
        help="measure layers and messages of this run on this machine and print the plan with "
        "them. The result goes to "
        "the file parallel.calibration, else to the cache, where later plans find it",
    )
    add_suggest(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        help="auto (default): resume an existing run; never: refuse to touch it; a step folder: "
        "resume from there, or branch from it if it belongs to another run",
    )
    parser.add_argument(
        "--allow-change",
        metavar="KEY",
        action="append",
        default=[],
        help="let a resumed run differ from its checkpoint in this key or section, e.g. "
        "optimizer.lr; may be repeated",
    )
    parser.add_argument(
        "--trace",
        type=int,
        metavar="STEPS",
        help=f"write trace.json, what every rank did when in STEPS steps (default {TRACED_STEPS}) "
        "after the first; for ui.perfetto.dev",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show the plan and all details on the console, which log.txt has anyway",
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="download models named by hub id that the cache lacks, by HTTP: "
        "weights, JSON, templates; no code",
    )
    parser.add_argument(
        "--nnodes", type=int, metavar="N", help="machines that share the run (default 1)"
    )
    parser.add_argument("--node-rank", type=int, metavar="R", help="which of them this is, from 0")
    parser.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: a free port of machine 0"
    )
    options = parse_run(parser, _with_trace_steps(arguments))
    options.ending["waits"] = options.plan
    return options


def _with_trace_steps(arguments: Sequence[str]) -> list[str]:
    """Replace `--trace` without a number behind it by --trace=TRACED_STEPS."""
    result = []
    for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        is_alone = argument == "--trace" and re.fullmatch(r"[-+]?[\d.]+", after) is None
        result.append(f"--trace={TRACED_STEPS}" if is_alone else argument)
    return result
