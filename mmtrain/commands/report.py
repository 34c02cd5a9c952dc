"""Make the page of a run: what was trained, whether it worked, what went wrong; of several runs: side by side.

The page is one HTML file that opens without a network: curves, evaluations, held-out questions with their answers,
where time and memory went, samples, faults. A run leaves RUN/report.html at its end; this makes it anew, also of a run
that is under way. --watch serves it to this machine alone, and the page follows the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser
from mmtrain.base.printing import tell
from mmtrain.checkpoint.run_folder import REPORT
from mmtrain.report.page import write_page
from mmtrain.report.watch import HOST, server

EXAMPLES = """\
  the page of a run, runs/llava_pp4/report.html:
    mmtrain report runs/llava_pp4
  two runs on one page: their curves, their scores, the keys in which they differ:
    mmtrain report runs/llava_pp4 runs/other --out compared.html
  a run that is under way, on this machine; over ssh -L 8000:127.0.0.1:8000 on another:
    mmtrain report runs/llava_pp4 --watch --port 8000
"""


def run(options: argparse.Namespace) -> None:
    """Write the page, or serve it until Ctrl-C; raises UserError."""
    if not options.watch:
        default = options.runs[0] / REPORT if len(options.runs) == 1 else Path(REPORT)
        tell(f"report: {write_page(options.runs, options.out or default)}")
        return
    with server(options.runs, options.port) as serving:
        tell(f"report: http://{HOST}:{serving.server_port}/ (on this machine; Ctrl-C ends it)")
        serving.serve_forever()


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line; `--help` teaches by example."""
    parser = command_parser("report", __doc__, EXAMPLES, {0: "the page is written"}, interrupted="stopped")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="the folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"(RUN/{REPORT}; of several runs {REPORT} in this folder)"
    )
    parser.add_argument("--watch", action="store_true", help="serve the page on 127.0.0.1, and write none")
    parser.add_argument("--port", type=_port, metavar="N", help="--watch: where (default: a free one)")
    options = parser.parse_args(arguments)
    if options.watch and options.out is not None:
        parser.error("--watch writes no page: leave --out away")
    if options.port is not None and not options.watch:
        parser.error("--port is of --watch, which is not given")
    options.port = options.port or 0
    return options


def _port(text: str) -> int:
    if text.isdecimal() and int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: a port from 0 to 65535 is needed")
