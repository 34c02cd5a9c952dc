"""Measure what layers and messages of a run take on this machine, and print the plan that they give.

About a minute. Later plans of this run on such devices find the result by themselves, in the cache; a file that
parallel.calibration names can be carried to other machines. Measured on as many ranks as the run has, all of them here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmtrain import launch
from mmtrain.commands.parser import command_parser

EXAMPLES = """\
examples:
  the demo, on two ranks of this machine:
    mmtrain calibrate demo:llava_pp4 parallel.pipeline=2
  a run of your own; into a file, for the machines of a cluster that are all alike:
    mmtrain calibrate CONFIG parallel.calibration=a100.json

exit codes:
  0    measured, and the plan is printed
  1    a rank failed; the message names it and the cause
  2    wrong input; the message says what to do
  130  stopped by Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code."""
    parser = command_parser("calibrate", __doc__, EXAMPLES)
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run, or demo:llava_pp4")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="set a key, e.g. parallel.pipeline=2")
    options = parser.parse_args(arguments)
    return launch.main([options.config, *options.overrides, "--calibrate"])
