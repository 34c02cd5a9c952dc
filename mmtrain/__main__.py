"""`mmtrain COMMAND ...`, also `python -m mmtrain COMMAND ...`: hands the arguments to the command's
module.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from mmtrain.base.printing import escape, print_result, run_command, show_error
from mmtrain.base.version import VERSION

COMMANDS = {  # in the order of their use; the module of each, and what it does
    "init": ("mmtrain.cli.init", "list the shipped configurations, or copy one"),
    "train": ("mmtrain.launch", "train a run, or resume it"),
    "plan": ("mmtrain.cli.plan", "show which rank holds, trains and runs what; start nothing"),
    "calibrate": ("mmtrain.cli.calibrate", "measure this machine, so that plans are in seconds"),
    "shard": ("mmtrain.cli.shard", "turn records and images into webdataset shards"),
    "index": ("mmtrain.cli.index", "index webdataset shards from elsewhere, or anew"),
    "inspect": (
        "mmtrain.cli.inspect",
        "show what is in shards; compare every byte; show one sample",
    ),
    "report": ("mmtrain.cli.report", "make the page of a run, or of several"),
    "benchmark": (
        "mmtrain.cli.benchmark",
        "score a trained model on benchmarks, beside its run's own scores",
    ),
    "export": (
        "mmtrain.cli.export",
        "export what was trained, for transformers or for LLaVA's code",
    ),
    "chat": ("mmtrain.cli.chat", "ask a trained model about a picture"),
    "convert": ("mmtrain.cli.convert", "turn pickled weights into safetensors"),
    "record": (
        "mmtrain.cli.record",
        "record a model's shapes, so that it can be planned without it",
    ),
    "doctor": ("mmtrain.cli.doctor", "check that training works on this machine"),
}
HELP = f"""\
usage: mmtrain COMMAND ..., or mmtrain --version

Train the connector of a vision-language model, the LLM frozen and in stages.

commands; mmtrain COMMAND --help tells more and has examples:
{chr(10).join(f"  {name:9}  {purpose}" for name, (_, purpose) in COMMANDS.items())}

begin with the demo: a CPU, minutes, no download (pip install 'mmtrain[demo]'):
  mmtrain train example:llava_pp4
then with your own models and data:
  mmtrain init llava15_7b_pp4 --out mine.yaml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the command's exit code, 2 where there is no such command."""
    command, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help", "help"):
        return run_command(lambda: print_result(*HELP.splitlines()))
    if command == "--version":
        return run_command(lambda: print_result(f"mmtrain {VERSION}"))
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else "mmtrain --help lists what there is"
        show_error(f"mmtrain has no command {escape(command)}: {meant}")
        return 2
    # before torch is imported; see set_rank_environment
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    module = importlib.import_module(COMMANDS[command][0])
    options = module.parse_arguments(others)
    return run_command(lambda: module.run(options), **options.ending)


def run_as_script(command: str) -> NoReturn:
    """Run `mmtrain COMMAND` with the arguments of a script in tools/, and end it with the exit
    code.
    """
    sys.exit(main([command, *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
