"""Measure how long a run's layers and messages take on this machine, and print its plan.

Takes about a minute and as many ranks as the run has, all on this machine. Later plans of this run
on such devices find the result in the cache. To carry it to other machines, name a file by
parallel.calibration.
"""

from collections.abc import Sequence

from mmtrain.base.arguments import command_parser
from mmtrain.launch import run
from mmtrain.launching.command_line import Options, parse_run

EXAMPLES = """\
  the demo, on two ranks of this machine:
    mmtrain calibrate example:llava_pp4 parallel.pipeline=2
  a run of your own, into a file for all machines of a cluster:
    mmtrain calibrate CONFIG parallel.calibration=a100.json
"""
EXITS = {
    0: "measured, and the plan is printed",
    1: "a rank failed; the message names it and the cause",
}
__all__ = ["parse_arguments", "run"]


def parse_arguments(arguments: Sequence[str]) -> Options:
    parser = command_parser(
        "calibrate",
        __doc__,
        EXAMPLES,
        EXITS,
        interrupted="stopped by Ctrl-C before the ranks were started",
        waits=False,
    )
    return parse_run(parser, arguments, calibrate=True)
