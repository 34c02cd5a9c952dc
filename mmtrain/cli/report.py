"""Make the page of a run: what was trained, whether it worked; or of several, side by side.

The page is one HTML file that opens without a network: curves, evaluations, held-out questions with
their answers, where time and memory went, samples, faults. A run leaves RUN/report.html at its end;
this command makes it again, also during the run.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser
from mmtrain.base.printing import print_result
from mmtrain.checkpoint.run_folder import REPORT
from mmtrain.report.page import write_page

EXAMPLES = """\
  the page of a run, runs/llava_pp4/report.html:
    mmtrain report runs/llava_pp4
  two runs on one page: their curves, their scores, the keys in which they differ:
    mmtrain report runs/llava_pp4 runs/other --out compared.html
"""


def run(options: Namespace) -> None:
    """Write the page; raises UserError."""
    default = options.runs[0] / REPORT if len(options.runs) == 1 else Path(REPORT)
    print_result(f"report: {write_page(options.runs, options.out or default)}")


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser(
        "report", __doc__, EXAMPLES, {0: "the page is written"}, interrupted="stopped"
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"(RUN/{REPORT}; of several runs {REPORT} in this folder)",
    )
    return parser.parse_args(arguments)
