"""Score a trained model on benchmarks, by lmms-eval, beside the scores that the run has already.

What a run says itself comes first, since it always means something: held-out loss, exact match, and what the right
images add to wrong ones. Benchmarks ask in words and formats of their own. A model whose projector alone was trained,
on captions, scores near 0 on many of them, though it sees well; they mean more after instruction tuning.

The task held_out asks the run's own held-out questions: its exact match is the run's, which shows that the exported
model answers as the trained one. All other names are lmms-eval's; it downloads their data, from where and as whom its
own settings say (HF_TOKEN, HF_HOME). lmms-eval is installed once, into an environment of its own in the cache, 0.5 GB;
the packages here are used, and not changed. A GPU is used if there is one (CUDA_VISIBLE_DEVICES= for none).

Scores are kept in RUN/benchmarks.jsonl, with all versions, and shown in the run's page, RUN/report.html.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.printing import print_result
from mmtrain.base.progress import ByteBars, ProgressBar
from mmtrain.benchmarks.held_out import HELD_OUT
from mmtrain.benchmarks.score import benchmark
from mmtrain.checkpoint.run_folder import REPORT
from mmtrain.checkpoint.step_folder import find
from mmtrain.report.headline import headline
from mmtrain.report.page import write_page
from mmtrain.report.records import read_run
from mmtrain.report.sections import benchmark_rows

EXAMPLES = """\
  the run's own held-out questions, which need no download:
    mmtrain benchmark runs/llava_pp4
  benchmarks of lmms-eval, the first 500 questions of each:
    mmtrain benchmark runs/mine --tasks held_out,pope,mme --limit 500
  an earlier checkpoint:
    mmtrain benchmark runs/mine/checkpoints/step-00000500 --tasks gqa
"""


def run(options: argparse.Namespace) -> None:
    """Score, and print the scores; raises UserError."""
    folder = find(options.run).run
    findings = headline(read_run(folder))
    for question in ("Did it work?", "Did it look at the images?"):
        print_result(f"{question} {findings[question].answer}. {findings[question].text}")
    with contextlib.ExitStack() as stack:
        exporting = stack.enter_context(ByteBars(sys.stdout))
        bars: list[ProgressBar] = []

        def show(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(ProgressBar("questions", total, sys.stdout, counted="answers")))
            bars[0].show(done, done)

        limits = {"limit": options.limit, "batch_size": options.batch_size}
        benchmark(options.run, options.tasks, **limits, show=show, show_export=exporting.show)
    write_page([folder], folder / REPORT)
    for task, metric, score, answers, step, _ in benchmark_rows(read_run(folder)):
        print_result(f"{task}  {metric} {score}  {answers} answers, step {step}")
    print_result(f"report: {folder / REPORT}")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    exits = {0: "scored; the page shows it"}
    parser = command_parser("benchmark", __doc__, EXAMPLES, exits, interrupted="stopped; nothing was recorded")
    run_help = "the folder of a run, whose newest whole checkpoint is taken, or of one checkpoint"
    parser.add_argument("run", type=Path, metavar="RUN", help=run_help)
    names = lambda text: [name.strip() for name in text.split(",") if name.strip()]  # noqa: E731
    task_help = (
        f"names with commas between them ({HELD_OUT}); lmms-eval's list: https://github.com/EvolvingLMMs-Lab/lmms-eval"
    )
    parser.add_argument("--tasks", type=names, default=[HELD_OUT], metavar="NAME[,NAME]", help=task_help)
    parser.add_argument("--limit", type=positive(int), metavar="N", help="only the first N questions of each task")
    batch_help = "prompts that are answered together (%(default)s)"
    parser.add_argument("--batch-size", type=positive(int), default=16, metavar="N", help=batch_help)
    return parser.parse_args(arguments)
