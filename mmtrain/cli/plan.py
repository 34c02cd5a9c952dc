"""Show the plan of a run: which rank holds, trains and runs what, and how much memory that takes.

CONFIG is the YAML file of a run, and any key of it can be set behind it. Nothing is started or
written, and neither GPUs nor weights are needed: a laptop plans for a cluster. Without a
calibration the plan has shares and no seconds; mmtrain calibrate measures these. --suggest N shows
the best layouts for N devices instead.
"""

from collections.abc import Sequence

from mmtrain.base.arguments import command_parser
from mmtrain.launch import run
from mmtrain.launching.command_line import Options, add_suggest, parse_run

EXAMPLES = """\
  the demo, on four ranks:
    mmtrain plan example:llava_pp4
  on two ranks with two stages each:
    mmtrain plan example:llava_pp4 parallel.pipeline=2 parallel.stages_per_rank=2
  a 72B on 16 GPUs with 72 GiB each:
    mmtrain plan configs/qwen25_72b_pp8_dp2.yaml parallel.device_memory_gib=72
  which layout it should have on 8 GPUs:
    mmtrain plan configs/qwen25_72b_pp8_dp2.yaml parallel.device_memory_gib=77 --suggest 8
"""
EXITS = {
    0: "the plan is printed",
    2: "wrong input, or a run that does not fit; the message says what to do",
}
__all__ = ["parse_arguments", "run"]


def parse_arguments(arguments: Sequence[str]) -> Options:
    parser = command_parser("plan", __doc__, EXAMPLES, EXITS)
    add_suggest(parser)
    return parse_run(parser, arguments, plan=True)
