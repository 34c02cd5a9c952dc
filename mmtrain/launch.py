"""`mmtrain train CONFIG [key=value ...]`, or `python -m mmtrain.launch`: plan a run, start its
ranks, say how it ended.

Nothing here imports torch before the configuration is known to be right and ranks have to be
started.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.errors import UserError
from mmtrain.base.printing import print_note, print_result, run_command
from mmtrain.checkpoint.resume import refuse_unfit_init_from_run
from mmtrain.checkpoint.run_folder import run_folder
from mmtrain.config.load import load_config
from mmtrain.config.schema import RunConfig
from mmtrain.data.shards.remote import is_remote, refuse_unfit_url
from mmtrain.data.shards.shard_list import PIPE, expand_shards
from mmtrain.facts.model_files import find_model_folder, is_demo
from mmtrain.launching.command_line import Options, parse_arguments
from mmtrain.launching.machine import (
    allow_open_files,
    plan_for_here,
    rank_of_torchrun,
    refuse_other_starters,
    refuse_unusable_loopback,
    suggest_for_here,
    try_shared_memory,
)
from mmtrain.launching.training import calibrate, ranks_of_node, train, train_as_rank
from mmtrain.model.weights.projector_files import refuse_unfit_init_from
from mmtrain.plan.plan import render
from mmtrain.plan.suggest import render_suggestion
from mmtrain.runtime.rank import seconds_before_message
from mmtrain.stock.pretrained import expand_pretrained


def main(arguments: Sequence[str] | None = None) -> int:
    """`mmtrain train`, as torchrun starts it; the exit code."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: run(options), **options.ending)


def run(options: Options) -> int:
    """Do what the options ask for and return the exit code. Raises UserError."""
    rank = rank_of_torchrun()
    try:
        config = load_config(options.config, options.overrides)
        if options.download:
            from mmtrain.facts.hub import download_models  # the hub's library takes a while

            download_models(config)
        config = expand_pretrained(config)
        if options.trace is not None and (options.plan or options.calibrate):
            raise UserError(
                "--trace records training, and nothing is trained here. Leave --trace out"
            )
        if options.suggest is not None:
            if not options.plan:
                raise UserError(
                    f"--suggest {options.suggest} is for mmtrain plan CONFIG --suggest "
                    f"{options.suggest}"
                )
            print_result(*render_suggestion(suggest_for_here(config, options.suggest)))
            return 0
        if options.plan:
            plan = plan_for_here(config)
            _refuse_unfit_weights(config)
            _name_missing_shards(config)
            print_result(*render(plan))
            return 0
        if rank is None and options.nnodes == 1:
            refuse_other_starters()
        allow_open_files()
        refuse_unusable_loopback()
        try_shared_memory()
        if options.calibrate:
            if options.nnodes != 1 or rank is not None:
                raise UserError(
                    "mmtrain calibrate measures on one machine and starts its own ranks there. "
                    "Leave --nnodes and torchrun out, and share the file by parallel.calibration"
                )
            return calibrate(config, ranks_of_node(config.parallel, options))
        return train(config, options) if rank is None else train_as_rank(config, options, rank)
    except UserError:
        time.sleep(seconds_before_message(rank or 0))
        raise


def _refuse_unfit_weights(config: RunConfig) -> None:
    """Raise UserError for weights to begin with that training refuses; those that are not here are
    only named.
    """
    beginning, projector = config.model.init_from, config.model.projector.init_from
    paths = dict.fromkeys(path for path in (beginning, projector) if path)
    lacking = [
        path
        for path in paths
        if not Path(path).expanduser().exists() and find_model_folder(path) is None
    ]
    for path in lacking:
        print_note(
            f"init_from: {path} is not on this machine; "
            "whether it fits is checked when training starts"
        )
    if beginning not in lacking:
        refuse_unfit_init_from_run(config, run_folder(config))
    if projector not in lacking:
        refuse_unfit_init_from(config, run_folder(config))


def _name_missing_shards(config: RunConfig) -> None:
    """Print which shards training would refuse.

    A plan needs none. It asks no store, and runs no program of a pipe: URL.
    """
    named = {"data.shards": config.data.shards, "eval.shards": config.eval.shards}
    named |= {f"data.sets ({one.name})": one.shards for one in config.data.sets or ()}
    for key, shards in named.items():
        patterns = (shards,) if isinstance(shards, str) else shards or ()
        for pattern in patterns:
            try:
                refuse_unfit_url(pattern, key)
                if not (is_demo(pattern) or is_remote(pattern) or pattern.startswith(PIPE)):
                    expand_shards(pattern, key)
            except UserError as error:
                print_note(f"{error}; a plan needs no data, training does")


if __name__ == "__main__":
    sys.exit(main())
