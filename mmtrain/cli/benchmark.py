"""Score a trained model on benchmarks with lmms-eval, beside the run's own scores.

The run's own results are printed first: held-out loss, exact match, and the gain over shuffled
images. A model whose projector alone was trained scores near 0 on many benchmarks; they mean more
after instruction tuning.

The task held_out asks the run's held-out questions: its score is the run's if the exported model
answers like the trained one. All other tasks are lmms-eval's, which downloads their data (HF_TOKEN,
HF_HOME) and runs code: its own, and that of data sets. It is installed once, into its own
environment in the cache (0.5 GB). A GPU is used if there is one (CUDA_VISIBLE_DEVICES= for none).

Scores are kept in RUN/benchmarks.jsonl, with all versions, and shown in the run's page,
RUN/report.html.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmtrain.api.generate import stock_folder
from mmtrain.base.arguments import command_parser, positive
from mmtrain.base.errors import UserError
from mmtrain.base.json_lines import JsonLines
from mmtrain.base.printing import escape, print_result
from mmtrain.base.progress import ByteBars, ProgressBar
from mmtrain.benchmarks.environment import lmms_python
from mmtrain.benchmarks.held_out import HELD_OUT, write_questions
from mmtrain.checkpoint.run_folder import BENCHMARKS, REPORT
from mmtrain.checkpoint.step_folder import find
from mmtrain.report.headline import headline
from mmtrain.report.page import write_page
from mmtrain.report.records import read_run
from mmtrain.report.sections import benchmark_rows
from mmtrain.runtime.child import python_child

EXAMPLES = """\
  the run's own held-out questions, which need no download:
    mmtrain benchmark runs/llava_pp4
  benchmarks of lmms-eval, the first 500 questions of each:
    mmtrain benchmark runs/mine --tasks held_out,pope,mme --limit 500
"""
# Its imports take a while, and mmtrain could be killed meanwhile.
DRIVER = """
import sys
from mmtrain.runtime.child import die_with_parent
die_with_parent(int(sys.argv[1]))
from mmtrain.benchmarks.driver import main
main(sys.argv[2])
"""


def run(options: Namespace) -> None:
    """Score the model, record the scores and print them; raises UserError."""
    checkpoint = find(options.run)
    config = checkpoint.config
    if config.model.vision is None:
        raise UserError(
            f"{options.run}: was trained on text alone, but these tasks ask about pictures. Export "
            "it (mmtrain export RUN --format hf --out OUT), and run lm_eval --model hf, "
            "pretrained=OUT"
        )
    if HELD_OUT in options.tasks and not config.eval.is_on:
        raise UserError(
            f"{options.run}: holds out no samples (eval.shards, eval.fraction). "
            "Name --tasks of lmms-eval"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the driver would go on
    folder = checkpoint.run
    findings = headline(read_run(folder))
    for question in ("Did it work?", "Did it look at the images?"):
        print_result(f"{question} {findings[question].answer}. {findings[question].text}")
    python = lmms_python()
    with (
        ByteBars(sys.stdout) as progress,
        tempfile.TemporaryDirectory(prefix="mmtrain-benchmark-") as questions,
    ):
        request = {
            "tasks": options.tasks,
            "limit": options.limit,
            "batch_size": options.batch_size,
            "folder": str(stock_folder(str(checkpoint.path), progress.show)),
            "questions": questions,
        }
        if HELD_OUT in options.tasks:
            request["longest"] = write_questions(config, Path(questions))
        file = Path(questions) / "request.json"
        file.write_text(json.dumps(request))
        # Elsewhere than here: lmms-eval reads a file .env where it runs.
        command = python_child("-c", DRIVER, os.getpid(), file, interpreter=python) | {
            "cwd": questions
        }
        result = _drive(command, folder / "benchmarks.log")
    with JsonLines(folder / BENCHMARKS) as records:
        now = time.time()
        for task, scores in result["results"].items():
            records.write(
                task=task,
                scores=scores,
                answers=result["answers"].get(task),
                time=now,
                step=checkpoint.step,
                limit=options.limit,
                versions=result["versions"],
            )
    write_page([folder], folder / REPORT)
    new = [
        one
        for one in read_run(folder).benchmarks.values()
        if (one.step, one.limit) == (checkpoint.step, options.limit)
    ]
    for task, metric, score, answers, step, _ in benchmark_rows(new):
        print_result(f"{task}  {metric} {score}  {answers} answers, step {step}")
    print_result(f"report: {folder / REPORT}")


def _drive(command: dict[str, Any], log: Path) -> dict[str, Any]:
    """Run the driver and return its last line; its libraries print into `log`. Raises UserError
    where it fails.
    """
    last: dict[str, Any] = {}
    bar = None
    with (
        log.open("w") as said,
        subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=said, text=True) as driver,
    ):
        try:
            for line in driver.stdout or ():
                last = json.loads(line)
                if "done" in last:
                    bar = bar or ProgressBar(
                        "questions", last["total"], sys.stdout, counted="answers"
                    )
                    bar.show(last["done"], last["done"])
        except KeyboardInterrupt:
            driver.kill()
            raise
    if bar is not None:
        bar.__exit__()
    if "results" in last:
        return last
    why = f"exit code {driver.returncode}"
    if driver.returncode < 0:
        why = f"it was ended by signal {-driver.returncode}"
    elif lines := log.read_text(errors="replace").strip().splitlines():
        why = escape(lines[-1], 500)
    raise UserError(f"lmms-eval: {why}. All that it printed is in {log}")


def _task_names(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    parser = command_parser(
        "benchmark",
        __doc__,
        EXAMPLES,
        {0: "scored; the page shows it"},
        interrupted="stopped; nothing was recorded",
    )
    add = parser.add_argument
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="the folder of a run, whose newest whole checkpoint is taken, or of one checkpoint",
    )
    add(
        "--tasks",
        type=_task_names,
        default=[HELD_OUT],
        metavar="NAME[,NAME]",
        help=f"names with commas between them ({HELD_OUT}); "
        "others are in lmms_eval/tasks of lmms-eval's repository",
    )
    add("--limit", type=positive(int), metavar="N", help="only the first N questions of each task")
    add(
        "--batch-size",
        type=positive(int),
        default=16,
        metavar="N",
        help="prompts that are answered together (%(default)s)",
    )
    return parser.parse_args(arguments)
