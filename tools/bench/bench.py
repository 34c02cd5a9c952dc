"""Measure mmtrain on this machine.

Every command prints a table and, with --json FILE, writes all single measurements. Contestants take
turns in one run, over the same weights, samples and threads; tables show medians and, in brackets,
least and largest. What else runs on the machine distorts every number: see the load average that is
printed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from mmtrain.base.printing import run_command

COMMANDS = {
    "peers": "against stock transformers, DeepSpeed's pipeline and torch's pipelining",
    "plan": "predicted against measured step time, idle share and memory",
    "encoder_plans": "plans of real models with the encoder in slices, against others; "
    "nothing runs",
    "loader": "samples a second, against webdataset and the images alone",
    "data": "counting, opening and planning data sets of up to 100 million samples",
    "mixers": "recurrent layers of hybrid LLMs over packs, against the stock mixer, which leaks",
    "gpu": "a 7B-shaped model on one CUDA device, against the stock loop",
}
EXIT_CODES = """\
exit codes:
  0    done
  1    a rank failed, or contestants did not compute the same; the message says which
  2    wrong input, or no such device here; the message says what to do
  130  stopped by Ctrl-C
"""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; only the module of the command that is asked for is imported."""
    options = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXIT_CODES, **options)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        if name not in arguments[:1]:
            commands.add_parser(name, help=purpose)
            continue
        module = importlib.import_module(f"bench_{name}")
        epilog = f"{getattr(module, 'EXAMPLES', '')}\n{EXIT_CODES}"
        command = commands.add_parser(
            name, help=purpose, description=module.__doc__, epilog=epilog, **options
        )
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: options.run(options))


if __name__ == "__main__":
    sys.exit(main())
